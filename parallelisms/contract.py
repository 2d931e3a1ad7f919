"""FSDP2's contract, checked once on the running job before its first step (`debug.self_check`).

Breaking one of these rules raises nothing in PyTorch: the job trains wrong, or hangs much later.
docs/parallelism.md has each rule with its reason and what one sees when it is broken.
"""

import hashlib
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from configs.schema import InputError
from parallelisms.mesh import Mesh
from parallelisms.pp import stages_of


def verify(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    same_on_all_ranks: dict[str, str],
) -> None:
    """Raises InputError naming every rule that is broken, on all ranks alike.

    same_on_all_ranks: what must not differ between processes, as name -> text (config, versions,
    data fingerprint). Ranks exchange 16 bytes each. Only if those show a problem do they send
    texts, and of equal ones only the first.
    """
    problems = _broken_here(model, optimizer, mesh)
    device = (
        f"{mesh.device}"
        if mesh.device.type == "cpu"
        else str(torch.cuda.get_device_properties(mesh.device).uuid)
    )
    own_digests = torch.tensor(
        [_digest([problems, sorted(same_on_all_ranks.items())]), _digest(device)]
    )
    all_digests = (
        [own_digests]
        if mesh.size == 1
        else [torch.empty_like(own_digests) for _ in range(mesh.size)]
    )
    if mesh.size > 1:
        dist.all_gather(all_digests, own_digests)
    texts, devices = torch.stack(all_digests).T.tolist()
    if (
        not problems
        and len(set(texts)) == 1
        and (mesh.device.type == "cpu" or len(set(devices)) == mesh.size)
    ):
        return
    first_with = {digest: rank for rank, digest in reversed(list(enumerate(texts)))}
    is_first = first_with[texts[mesh.rank]] == mesh.rank
    reports = mesh.gather((problems, device, same_on_all_ranks if is_first else None))
    values = [reports[first_with[digest]][2] for digest in texts]
    sentences = _problems_by_rank([problems for problems, _, _ in reports])
    if mesh.device.type == "cuda":
        sentences += _shared_devices([device for _, device, _ in reports])
    for name, value in values[0].items():
        if odd := {
            rank: same.get(name) for rank, same in enumerate(values) if same.get(name) != value
        }:
            rank, other = next(iter(odd.items()))
            sentences.append(
                f"{name} differs: rank 0 has {value!r}, ranks {sorted(odd)} do not (rank {rank}: "
                f"{other!r})"
            )
    raise InputError("the parallel contract is broken before step 1:\n  " + "\n  ".join(sentences))


def _digest(value: object) -> int:
    """64 bits that change with the value."""
    return int.from_bytes(
        hashlib.sha256(json.dumps(value).encode()).digest()[:8], "big", signed=True
    )


def _problems_by_rank(problems: list[list[str]]) -> list[str]:
    """problems: of each rank. Returns each problem once, with the ranks that have it."""
    ranks_by_problem: dict[str, list[int]] = {}
    for rank, texts in enumerate(problems):
        for text in texts:
            ranks_by_problem.setdefault(text, []).append(rank)
    return [
        f"{text} (ranks {ranks[0]} to {ranks[-1]}: {len(ranks)} of {len(problems)})"
        for text, ranks in ranks_by_problem.items()
    ]


def _shared_devices(devices: list[str]) -> list[str]:
    """devices: the identity of each rank's GPU. Returns a sentence for each that several ranks
    have."""
    users: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        users.setdefault(device, []).append(rank)
    return [
        f"ranks {ranks} share GPU {uuid}: start one process per GPU"
        for uuid, ranks in users.items()
        if len(ranks) > 1
    ]


def _broken_here(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh) -> list[str]:
    problems = []
    params = dict(model.named_parameters())
    if all(isinstance(stage, FSDPModule) for stage in stages_of(model)):
        bare = [int(i) for i, block in model.layers.items() if not isinstance(block, FSDPModule)]
        if bare:
            problems.append(
                f"layers {bare} are no FSDPModule: their weights are gathered for the whole step "
                "with the root's"
            )
    elif mesh.fsdp_mesh.size() > 1:
        problems.append(
            f"{mesh.fsdp_mesh.size()} data-parallel ranks, but the model is no FSDPModule: "
            "gradients are never reduced"
        )
    # all others, a router's bias say, are their owner's matter
    trained = {n: p for n, p in params.items() if p.requires_grad}
    plain = [n for n, p in trained.items() if not isinstance(p, DTensor)]
    if mesh.size > 1 and plain:
        problems.append(
            f"{len(plain)} parameters are plain tensors on a mesh of {mesh.size}: {plain[0]} ..."
        )
    meta = [n for n, p in params.items() if p.is_meta]
    if meta:
        problems.append(f"{len(meta)} parameters are still on meta, without values: {meta[0]} ...")
    mine = {id(p) for p in params.values()}
    theirs = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) not in mine for p in theirs):
        problems.append(
            "the optimizer holds tensors that are not the model's parameters: build it after "
            "parallelize()"
        )
    held = {id(p) for p in theirs}
    missing = [n for n, p in trained.items() if id(p) not in held]
    if missing:
        problems.append(
            f"the optimizer misses {len(missing)} of the model's {len(trained)} parameters: "
            f"{missing[0]} ..."
        )
    return problems
