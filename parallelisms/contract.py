"""Check FSDP2's contract once, on the running job before its first step (`debug.self_check`).

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
from training.optimizer_check import wrong_rows


def verify(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    same_on_all_ranks: dict[str, str],
) -> None:
    """Raise InputError naming every rule that is broken, the same error on all ranks.

    same_on_all_ranks: what must not differ between processes, as name -> text (config, versions,
    data fingerprint). Ranks exchange 16 bytes each. Only if those show a problem do they send
    texts, and of equal ones only the first.
    """
    problems = _broken_here(model, optimizer, mesh)
    if mesh.device.type == "cpu":
        device = f"{mesh.device}"
    else:
        device = str(torch.cuda.get_device_properties(mesh.device).uuid)
    own_text = _digest([problems, sorted(same_on_all_ranks.items())])
    own_digests = torch.tensor([own_text, _digest(device)])
    all_digests = [own_digests]
    if mesh.size > 1:
        all_digests = [torch.empty_like(own_digests) for _ in range(mesh.size)]
        dist.all_gather(all_digests, own_digests)
    texts, devices = torch.stack(all_digests).T.tolist()
    all_alike = len(set(texts)) == 1
    # NCCL refuses two ranks on one GPU
    may_share = mesh.device.type == "cpu" or dist.get_backend() == "gloo"
    a_device_each = may_share or len(set(devices)) == mesh.size
    if not problems and all_alike and a_device_each:
        return
    first_with = {digest: rank for rank, digest in reversed(list(enumerate(texts)))}
    is_first = first_with[texts[mesh.rank]] == mesh.rank
    reports = mesh.gather((problems, device, same_on_all_ranks if is_first else None))
    sentences = _problems_by_rank([problems for problems, _, _ in reports])
    if not may_share:
        sentences += _shared_devices([device for _, device, _ in reports])
    sentences += _differences([reports[first_with[digest]][2] for digest in texts])
    raise InputError("the parallel contract is broken before step 1:\n  " + "\n  ".join(sentences))


def _digest(value: object) -> int:
    """Return 64 bits that change with the value."""
    return int.from_bytes(
        hashlib.sha256(json.dumps(value).encode()).digest()[:8], "big", signed=True
    )


def _problems_by_rank(problems: list[list[str]]) -> list[str]:
    """Return each problem once, with the ranks that have it. problems: of each rank."""
    ranks_by_problem: dict[str, list[int]] = {}
    for rank, texts in enumerate(problems):
        for text in texts:
            ranks_by_problem.setdefault(text, []).append(rank)
    return [
        f"{text} (ranks {ranks[0]} to {ranks[-1]}: {len(ranks)} of {len(problems)})"
        for text, ranks in ranks_by_problem.items()
    ]


def _shared_devices(devices: list[str]) -> list[str]:
    """Return a sentence for each GPU that several ranks have. devices: the identity of each rank's
    GPU."""
    users: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        users.setdefault(device, []).append(rank)
    return [
        f"ranks {ranks} share GPU {uuid}: start one process per GPU"
        for uuid, ranks in users.items()
        if len(ranks) > 1
    ]


def _differences(values: list[dict[str, str]]) -> list[str]:
    """Return a sentence for each value that differs between ranks. values: `same_on_all_ranks` of
    each rank."""
    sentences = []
    for name, value in values[0].items():
        found = [same.get(name) for same in values]
        odd = {rank: other for rank, other in enumerate(found) if other != value}
        if odd:
            rank, other = next(iter(odd.items()))
            sentences.append(
                f"{name} differs: rank 0 has {value!r}, ranks {sorted(odd)} do not (rank {rank}: "
                f"{other!r})"
            )
    return sentences


def _broken_here(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh) -> list[str]:
    """Return a sentence for each rule that is broken on this rank."""
    return [
        *_wrong_modules(model, mesh),
        *_wrong_parameters(model, mesh),
        *_wrong_optimizer(model, optimizer),
    ]


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that the optimizer updates. All others, such as a router's bias, are
    updated by the module that owns them."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def _wrong_modules(model: nn.Module, mesh: Mesh) -> list[str]:
    ranks = mesh.fsdp_mesh.size()
    if all(isinstance(stage, FSDPModule) for stage in stages_of(model)):
        bare = [int(i) for i, block in model.layers.items() if not isinstance(block, FSDPModule)]
        if bare:
            return [
                f"layers {bare} are no FSDPModule: their weights are gathered for the whole step "
                "with the root's"
            ]
    elif ranks > 1:
        return [
            f"{ranks} data-parallel ranks, but the model is no FSDPModule: gradients are never "
            "reduced"
        ]
    return []


def _wrong_parameters(model: nn.Module, mesh: Mesh) -> list[str]:
    problems = []
    plain = [name for name, param in _trained(model).items() if not isinstance(param, DTensor)]
    if mesh.size > 1 and plain:
        problems.append(
            f"{len(plain)} parameters are plain tensors on a mesh of {mesh.size}: {plain[0]} ..."
        )
    meta = [name for name, param in model.named_parameters() if param.is_meta]
    if meta:
        problems.append(f"{len(meta)} parameters are still on meta, without values: {meta[0]} ...")
    return problems


def _wrong_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    problems = []
    of_the_model = {id(param) for param in model.parameters()}
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if not held <= of_the_model:
        problems.append(
            "the optimizer holds tensors that are not the model's parameters: build it after "
            "parallelize()"
        )
    trained = _trained(model)
    missing = [name for name, param in trained.items() if id(param) not in held]
    if missing:
        problems.append(
            f"the optimizer misses {len(missing)} of the model's {len(trained)} parameters: "
            f"{missing[0]} ..."
        )
    return problems + wrong_rows(optimizer)
