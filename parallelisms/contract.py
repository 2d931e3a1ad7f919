"""FSDP2's contract, checked once on the running job before its first step (`debug.self_check`).

Breaking one of these rules raises nothing in PyTorch: the job trains wrong, or hangs much later. docs/parallelism.md has
each rule with its reason and what one sees when it is broken.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from configs.schema import InputError
from parallelisms.mesh import Mesh
from parallelisms.pp import stages_of


def verify(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, same_on_all_ranks: dict[str, str]) -> None:
    """Raises InputError naming every rule that is broken, on all ranks alike.

    same_on_all_ranks: what must not differ between processes, as name -> text (config, versions, data fingerprint).
    """
    problems = _broken_here(model, optimizer, mesh)
    device = f"{mesh.device}" if mesh.device.type == "cpu" else str(torch.cuda.get_device_properties(mesh.device).uuid)
    mine = {"problems": problems, "device": device, "same": same_on_all_ranks}
    ranks: list = [None] * mesh.size
    if mesh.size > 1:
        dist.all_gather_object(ranks, mine)
    else:
        ranks = [mine]
    found: dict[str, list[int]] = {}
    for r, about in enumerate(ranks):
        for text in about["problems"]:
            found.setdefault(text, []).append(r)
    problems = [f"{text} (ranks {rs[0]} to {rs[-1]}: {len(rs)} of {mesh.size})" for text, rs in found.items()]
    if mesh.device.type == "cuda":
        users: dict[str, list[int]] = {}
        for r, about in enumerate(ranks):
            users.setdefault(about["device"], []).append(r)
        problems += [f"ranks {rs} share GPU {uuid}: start one process per GPU" for uuid, rs in users.items() if len(rs) > 1]
    for name, value in ranks[0]["same"].items():
        odd = {r: about["same"].get(name) for r, about in enumerate(ranks) if about["same"].get(name) != value}
        if odd:
            r, other = next(iter(odd.items()))
            problems.append(f"{name} differs: rank 0 has {value!r}, ranks {sorted(odd)} do not (rank {r}: {other!r})")
    if problems:
        raise InputError("the parallel contract is broken before step 1:\n  " + "\n  ".join(problems))


def _broken_here(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh) -> list[str]:
    problems = []
    params = dict(model.named_parameters())
    if all(isinstance(stage, FSDPModule) for stage in stages_of(model)):
        bare = [int(i) for i, block in model.layers.items() if not isinstance(block, FSDPModule)]
        if bare:
            problems.append(f"layers {bare} are no FSDPModule: their weights are gathered for the whole step with the root's")
    elif mesh.dp_size > 1:
        problems.append(f"{mesh.dp_size} data-parallel ranks, but the model is no FSDPModule: gradients are never reduced")
    trained = {n: p for n, p in params.items() if p.requires_grad}  # all others, a router's bias say, are their owner's matter
    plain = [n for n, p in trained.items() if not isinstance(p, DTensor)]
    if mesh.size > 1 and plain:
        problems.append(f"{len(plain)} parameters are plain tensors on a mesh of {mesh.size}: {plain[0]} ...")
    meta = [n for n, p in params.items() if p.is_meta]
    if meta:
        problems.append(f"{len(meta)} parameters are still on meta, without values: {meta[0]} ...")
    mine = {id(p) for p in params.values()}
    theirs = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) not in mine for p in theirs):
        problems.append("the optimizer holds tensors that are not the model's parameters: build it after parallelize()")
    held = {id(p) for p in theirs}
    missing = [n for n, p in trained.items() if id(p) not in held]
    if missing:
        problems.append(f"the optimizer misses {len(missing)} of the model's {len(trained)} parameters: {missing[0]} ...")
    return problems
