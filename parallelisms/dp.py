"""Data parallelism: FSDP2 (`fully_shard`), which is also our HSDP, our DDP and our mixed precision.

One mechanism covers the four: sharded over `dp_shard` (with context parallelism, over `cp` too);
replicated over `dp_replicate` on top (HSDP); replicated only, when nothing is sharded (DDP:
gradients all-reduced block by block during backward, weights never gathered from anyone); and its
MixedPrecisionPolicy is what keeps float32 masters of bfloat16 weights. On a single rank there is
nobody to exchange with: `keep_masters` does the same arithmetic without FSDP2's buffers, so one
process computes the same numbers as many. In float32 the model is then left alone: it is the plain
model that every test compares with.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp2_common
from torch.distributed.fsdp._fully_shard import _fully_shard as fsdp2
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_leaves

from configs.schema import Parallelism, Training
from parallelisms.mesh import Mesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def param_dtype(cfg: Training, device: torch.device) -> torch.dtype:
    """The type of the weights in forward and backward. `auto` is bfloat16 on hardware that
    multiplies it faster than float32: GPUs since Ampere, CPUs with AMX or AVX512-BF16 (there 2.2x
    on 2048^3 products, `docs/performance.md`)."""
    if cfg.param_dtype != "auto":
        return DTYPES[cfg.param_dtype]
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:  # private probes, absent on some platforms: then float32
        probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
        fast = any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
    return torch.bfloat16 if fast else torch.float32


def allocate(model: nn.Module, device: torch.device, cpu_offload: bool) -> None:
    """Give the parameters of a model on `meta` memory without values. device: where forward
    computes.

    With `cpu_offload` they live on the CPU, and FSDP copies them to the device for forward and
    backward. It knows the trained ones alone. Whatever is fixed, a router's bias, is read as it
    lies, so it lies on the device.
    """
    model.to_empty(device="cpu" if cpu_offload else device)
    if not cpu_offload:
        return
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if not param.requires_grad:
                there = torch.empty_like(param, device=device)
                module.register_parameter(name, nn.Parameter(there, requires_grad=False))


@contextmanager
def shared_groups() -> Iterator[None]:
    """Inside, all modules with `reshard_after_forward` = N keep their weights over the same groups
    of N ranks.

    FSDP2 opens two groups for each module (torch 2.13), so their number grows with the layers. It
    cannot be given groups that exist, so its private function that makes them is replaced by one
    that makes them once.
    """
    original, made = fsdp2._get_post_forward_mesh_info, {}

    def once(reshard: bool | int, info: object) -> object:
        if isinstance(reshard, bool):
            return original(reshard, info)
        if reshard not in made:
            made[reshard] = original(reshard, info)
        return made[reshard]

    fsdp2._get_post_forward_mesh_info = once
    try:
        yield
    finally:
        fsdp2._get_post_forward_mesh_info = original


def shard_experts(model: nn.Module, mesh: Mesh, how: dict[str, Any], reshard: bool) -> None:
    """Let FSDP shard a rank's experts over the edp ranks that have the same ones: by expert, or by
    row where they are fewer than the ranks. Rows must divide evenly, which experts need not (FSDP2
    pads the first dimension alone).

    A block is then one module of FSDP2 with weights on two meshes, by `how`. In torch 2.11 a module
    has one mesh, so there the experts become modules of their own. Nobody prefetches these, and
    selective checkpointing gathers them once more.
    """
    experts = {p for mixture in model.mixtures().values() for p in mixture.experts.parameters()}
    edp = mesh.experts_mesh["edp"].size()
    experts_mesh = (
        mesh.experts_mesh["dp_replicate", "edp"]
        if mesh.dp_replicate > 1
        else mesh.experts_mesh["edp"]
    )

    def placement(param: nn.Parameter) -> Shard:
        experts_here, rows = param.to_local().shape[:2]
        return Shard(1 if experts_here < edp and rows % edp == 0 else 0)

    if not hasattr(fsdp2_common, "ShardPlacementResult"):
        for mixture in model.mixtures().values():
            fully_shard(
                mixture.experts,
                **how | {"mesh": experts_mesh, "shard_placement_fn": placement},
                reshard_after_forward=reshard,
            )
        return
    info = fsdp2_common.FSDPMeshInfo(experts_mesh, shard_mesh_dim=0)
    if mesh.dp_replicate > 1:
        info = fsdp2_common.HSDPMeshInfo(experts_mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    how["shard_placement_fn"] = lambda p: (
        fsdp2_common.ShardPlacementResult(placement(p), info) if p in experts else None
    )


@shared_groups()
def apply(model: nn.Module, mesh: Mesh, training: Training, cfg: Parallelism) -> nn.Module:
    """Shard the blocks bottom-up, then the rest of the model as the root, in place.

    Bottom-up is FSDP2's contract: the root takes what is left, here the embedding and the last
    norm. A block's weights are gathered when its forward starts and freed when it ends
    (`reshard_after_forward`; the last `keep_gathered` blocks keep them until their backward). The
    output projection keeps its weights under "default": backward needs them at once.
    """
    dtype = param_dtype(training, mesh.device)
    if mesh.size == 1 and not cfg.cpu_offload:
        return model if dtype == torch.float32 else keep_masters(model, dtype)
    # Inputs are not cast: activations start at the embedding, in its type, and the rotary tables
    # stay float32.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=DTYPES[training.reduce_dtype], cast_forward_inputs=False
    )
    # Pinned host memory exists only where there is an accelerator to copy to.
    offload = (
        CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
        if cfg.cpu_offload
        else OffloadPolicy()
    )
    # small, and the same on every rank
    fixed = {p for p in model.parameters() if not p.requires_grad}
    how = {
        "mesh": mesh.fsdp_mesh,
        "mp_policy": policy,
        "offload_policy": offload,
        "ignored_params": fixed,
    }
    reshard = cfg.reshard_after_forward
    nothing_sharded = mesh.fsdp_mesh.size(-1) == 1 and (
        mesh.experts_mesh is None or mesh.experts_mesh["edp"].size() == 1
    )
    if nothing_sharded or (mesh.pp > 1 and reshard == "default"):
        # nothing is sharded, nothing to free; a stage would gather again for every microbatch
        reshard = False
    if mesh.experts_mesh is not None:
        shard_experts(model, mesh, how, reshard is not False)
    blocks = list(model.layers.values())
    # of the blocks the first ones: backward begins with the others
    freed = len(blocks) - cfg.keep_gathered
    for i, block in enumerate(blocks):
        fully_shard(
            block, **how, reshard_after_forward=i < freed and (reshard == "default" or reshard)
        )
    # a tied model's output weight is its embedding: it belongs to the root
    if hasattr(model, "output"):
        fully_shard(
            model.output, **how, reshard_after_forward=False if reshard == "default" else reshard
        )
    fully_shard(model, **how, reshard_after_forward=False)
    if cfg.prefetch:
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + cfg.prefetch])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - cfg.prefetch) : i][::-1])
    return model


def keep_masters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Mixed precision on one rank, in place: the parameters stay float32, forward and backward work
    on copies in `dtype`.

    While the model's forward runs, and while backward does (which may run parts of forward again),
    the copies lie in their modules' `__dict__`, where `self.weight` finds them first. At all other
    times `layer.wq.weight` is the parameter itself, so an edit of a weight reaches what is trained.
    Only floating-point parameters that require a gradient are copied; a bias that a router sets by
    itself stays as it is. `model.working_copies` maps parameters to copies.

    A copy's gradient is added to the parameter's, in float32, as soon as backward has it. Each
    forward copies the values anew, except in the middle of a step, where the gradient is as the
    last backward left it and the parameter has the same version. (The version alone does not tell:
    fused AdamW does not count it up.) To autograd a second copy of the same values is no change, so
    several forwards may come before their backwards. An edit between the two is an error, as in
    PyTorch itself.

    The numbers are bitwise those of FSDP2's MixedPrecisionPolicy on one rank (tests/test_speed.py),
    which moves every weight through a gather buffer and every gradient through a reduce buffer: 5%
    of a step on CPU.
    """
    copies: dict[nn.Parameter, torch.Tensor] = {}
    copied: dict[nn.Parameter, int] = {}  # version of the parameter when it was copied
    left: dict[nn.Parameter, int] = {}  # version of the parameter's gradient when backward left it
    # module, name of its parameter, the copy
    places: list[tuple[nn.Module, str, torch.Tensor]] = []

    def add_gradient(master: nn.Parameter, copy: torch.Tensor) -> None:
        grad, copy.grad = copy.grad.to(master.dtype), None
        master.grad = grad if master.grad is None else master.grad.add_(grad)
        left[master] = master.grad._version

    def copy_of(master: nn.Parameter) -> torch.Tensor:
        if master not in copies:
            copy = copies[master] = master.to(dtype).requires_grad_()
            copy.register_post_accumulate_grad_hook(partial(add_gradient, master))
        elif copied[master] != master._version:
            copies[master].copy_(master)
        elif master.grad is None or master.grad._version != left.get(master):
            # most often the same values: what is done to .data does not count as a change
            copies[master].data.copy_(master)
        copied[master] = master._version
        return copies[master].requires_grad_(master.requires_grad)  # it may have been frozen since

    def show() -> None:
        for module, name, copy in places:
            module.__dict__[name] = copy

    def hide() -> None:
        for module, name, _ in places:
            module.__dict__.pop(name, None)

    @torch.no_grad()
    def forward_begins(model: nn.Module, _: tuple) -> None:
        places[:] = [
            (module, name, copy_of(param))
            for module in model.modules()
            for name, param in module.named_parameters(recurse=False)
            if param in copies
            or (param.is_floating_point() and param.requires_grad and param.dtype != dtype)
        ]
        show()

    def backward_begins(_: torch.Tensor) -> None:
        show()
        # at its end; FSDP2 has no other way either
        torch.autograd.Variable._execution_engine.queue_callback(hide)

    def forward_ends(_: nn.Module, __: tuple, output: object) -> None:
        hide()
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(backward_begins)

    model.working_copies = copies
    model.register_forward_pre_hook(forward_begins)
    model.register_forward_hook(forward_ends, always_call=True)  # also when forward fails
    return model


def synchronise_gradients(model: nn.Module, last: bool, accumulate: str) -> None:
    """Before each backward: whether it reduces gradients over the data-parallel ranks.

    accumulate "whole": only that of the last microbatch does, so every rank keeps whole gradients
    in between (in the type of the reduction: 32 GiB for 70B at tp 8). "sharded": every one
    reduce-scatters, and shards are added up; what dp_replicate adds on top, an all-reduce of
    shards, still happens once.
    """
    if isinstance(model, FSDPModule):
        scatter = last or accumulate == "sharded"
        model.set_requires_gradient_sync(scatter)
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(scatter)


def keep_gathered(model: nn.Module, keep: bool) -> None:
    """Whether the backwards of a stage of a pipeline leave its weights gathered, for the forwards
    that come after them."""
    if isinstance(model, FSDPModule):
        model.set_reshard_after_backward(not keep)


def end_backward(model: nn.Module) -> None:
    """What FSDP does at the end of a backward, for one whose gradients of weights were computed
    apart from those of the inputs. FSDP would do it when it sees the input's gradient, which is too
    early then. Private, as PyTorch's own pipeline."""
    if isinstance(model, FSDPModule):
        root = model._get_fsdp_state()
        for state in reversed(root._state_ctx.all_states):
            # torch 2.13, 2.11
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in filter(None, groups):
                group.post_backward()
        root._root_post_backward_final_callback()


def reshard(model: nn.Module) -> None:
    """Free the weights that a forward without backward (validation, sampling) left gathered: the
    next optimizer step or checkpoint must see the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
