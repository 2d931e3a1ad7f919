"""Data parallelism: FSDP2 (`fully_shard`), which also serves as HSDP, DDP and mixed precision.

One mechanism covers the four: sharded over `dp_shard` (with context parallelism, over `cp` too);
replicated over `dp_replicate` on top (HSDP); replicated only, when nothing is sharded (DDP:
gradients all-reduced block by block during backward, weights never gathered); and its
MixedPrecisionPolicy keeps float32 masters of bfloat16 weights. A single rank needs no collectives:
`parallelisms/master_weights.py` does the same arithmetic without FSDP2's buffers, so one process computes
the same numbers as many. In float32 the model is then left alone: it is the plain model that every
test compares with.
"""

from typing import Any

from configs.cpu import bfloat16_is_fast

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from configs.schema import InputError, Parallelism, Training
from parallelisms.fsdp_details import gathers_once, shard_experts, shared_groups
from parallelisms.master_weights import keep_master_weights
from parallelisms.mesh import Mesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def param_dtype(cfg: Training, device: torch.device) -> torch.dtype:
    """Return the type of the weights in forward and backward. `auto` is bfloat16 on hardware that
    multiplies it faster than float32: GPUs since Ampere, CPUs with AMX or AVX512-BF16 (there 2.2x
    on matmuls of 2048^3, `docs/performance.md`)."""
    if cfg.param_dtype == "float64" and device.type != "cpu":
        raise InputError(
            f'training.param_dtype = "float64" is for checks on a CPU, this is a {device.type}: '
            'set run.device to "cpu"'
        )
    if cfg.param_dtype != "auto":
        return DTYPES[cfg.param_dtype]
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fast = bfloat16_is_fast()
    return torch.bfloat16 if fast else torch.float32


def master_dtype(cfg: Training) -> torch.dtype:
    """Return the type of the weights that the optimizer updates."""
    return torch.float64 if cfg.param_dtype == "float64" else torch.float32


def allocate(model: nn.Module, device: torch.device, cpu_offload: bool) -> None:
    """Allocate the parameters of a model on `meta`, without values. device: where forward computes.

    With `cpu_offload` they are on the CPU, and FSDP copies them to the device for forward and
    backward. A tensor that is not trained, such as a router's bias, is no DTensor and forward reads
    it without a copy, so it is allocated on the device.
    """
    model.to_empty(device="cpu" if cpu_offload else device)
    if not cpu_offload:
        return
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if not param.requires_grad and not isinstance(param, DTensor):
                there = torch.empty_like(param, device=device)
                module.register_parameter(name, nn.Parameter(there, requires_grad=False))


def apply(model: Any, mesh: Mesh, training: Training, cfg: Parallelism) -> nn.Module:
    """Shard the blocks bottom-up, then the rest of the model as the root, in place.

    Bottom-up is FSDP2's contract: the root takes what is left, here the embedding and the last
    norm. A block's weights are unsharded when its forward starts and resharded when it ends
    (`reshard_after_forward`; the last `keep_gathered` blocks stay unsharded until their backward).
    The output projection stays unsharded under "default": backward needs it at once.
    """
    dtype = param_dtype(training, mesh.device)
    if mesh.size == 1 and not cfg.cpu_offload:
        return model if dtype == master_dtype(training) else keep_master_weights(model, dtype)
    options = fsdp_options(model, mesh, training, cfg)
    reshard = reshard_of_blocks(mesh, cfg)
    if mesh.experts_mesh is not None:
        shard_experts(model, mesh, options, reshard is not False)
    with shared_groups():
        shard_modules(model, options, reshard, cfg.keep_gathered)
    return model


def fsdp_options(
    model: nn.Module, mesh: Mesh, training: Training, cfg: Parallelism
) -> dict[str, Any]:
    """Return the arguments of `fully_shard` that all modules share."""
    # Inputs are not cast: activations start at the embedding, in its type, and the rotary tables
    # stay float32.
    dtype = param_dtype(training, mesh.device)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=DTYPES[training.reduce_dtype] if dtype != torch.float64 else dtype,
        cast_forward_inputs=False,
    )
    offload = OffloadPolicy()
    if cfg.cpu_offload:
        # Pinned host memory exists only where there is an accelerator to copy to.
        offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    # A router's bias has no gradient. It is small, and the same on every rank.
    fixed = {p for p in model.parameters() if not p.requires_grad}
    return {
        "mesh": mesh.fsdp_mesh,
        "mp_policy": policy,
        "offload_policy": offload,
        "ignored_params": fixed,
    }


def reshard_of_blocks(mesh: Mesh, cfg: Parallelism) -> Any:
    """Return `reshard_after_forward`, or False where resharding frees nothing or costs too much."""
    is_sharded = mesh.fsdp_mesh.size(-1) > 1
    if mesh.experts_mesh is not None and mesh.experts_mesh["edp"].size() > 1:
        is_sharded = True
    if not is_sharded:
        return False
    if mesh.pp > 1 and gathers_once(cfg):
        return False
    return cfg.reshard_after_forward


def shard_modules(model: Any, options: dict[str, Any], reshard: Any, keep_gathered: int) -> None:
    """Shard the blocks, the output projection, then the root. reshard: `reshard_after_forward`."""
    of_block = True if reshard == "default" else reshard
    of_output = False if reshard == "default" else reshard
    blocks = list(model.layers.values())
    resharded = len(blocks) - keep_gathered  # the first ones: backward begins with the others
    for i, block in enumerate(blocks):
        fully_shard(block, **options, reshard_after_forward=of_block if i < resharded else False)
    # A tied model's output weight is its embedding, which belongs to the root.
    if hasattr(model, "output"):
        fully_shard(model.output, **options, reshard_after_forward=of_output)
    fully_shard(model, **options, reshard_after_forward=False)


def synchronise_gradients(model: nn.Module, last: bool, accumulate: str) -> None:
    """Set, before each backward, whether it reduces gradients over the data-parallel ranks.

    accumulate "whole": only the backward of the last microbatch does, so every rank accumulates
    unsharded gradients (in the reduction's type: 32 GiB for 70B at tp 8). "sharded": every backward
    reduce-scatters, and shards are accumulated; the all-reduce over dp_replicate still happens
    once.
    """
    if isinstance(model, FSDPModule):
        scatter = last or accumulate == "sharded"
        model.set_requires_gradient_sync(scatter)
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(scatter)


def keep_gathered(model: nn.Module, keep: bool) -> None:
    """Set whether the next backward leaves the weights unsharded for the forwards of other
    microbatches."""
    if isinstance(model, FSDPModule):
        model.set_reshard_after_backward(not keep)


def end_backward(model: nn.Module) -> None:
    """Run FSDP's post-backward by hand: reduce-scatter the gradients and reshard.

    Needed after a backward that computes the weights' gradients apart from the inputs'
    (parallelisms/pp.py): FSDP runs its post-backward when the inputs' gradients are there, and the
    weights' are not yet. Private API, as in PyTorch's own pipeline.
    """
    if isinstance(model, FSDPModule):
        root = model._get_fsdp_state()
        for state in reversed(root._state_ctx.all_states):
            # torch 2.13, 2.11
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in filter(None, groups):
                group.post_backward()
        root._root_post_backward_final_callback()


def reshard(model: nn.Module) -> None:
    """Reshard what a forward without backward (validation, sampling) left unsharded: the next
    optimizer step or checkpoint must see the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
