"""Data parallelism: FSDP2 (`fully_shard`), which is also our HSDP, our DDP and our mixed precision.

One mechanism covers the four: sharded over `dp_shard`; replicated over `dp_replicate` on top (HSDP); replicated only, when
dp_shard = 1 (DDP: gradients all-reduced block by block during backward, weights never gathered from anyone); and its
MixedPrecisionPolicy is what keeps float32 masters of bfloat16 weights. On a single rank there is nobody to exchange with:
`keep_masters` does the same arithmetic without FSDP2's buffers, so one process computes the same numbers as many. In float32
the model is then left alone: it is the plain model that every test compares with.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from configs.schema import Parallelism, Training
from parallelisms.mesh import Mesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def param_dtype(cfg: Training, device: torch.device) -> torch.dtype:
    """The type of the weights in forward and backward. `auto` is bfloat16 on hardware that multiplies it faster than
    float32: GPUs since Ampere, CPUs with AMX or AVX512-BF16 (there 2.2x on 2048^3 products, `docs/performance.md`)."""
    if cfg.param_dtype != "auto":
        return DTYPES[cfg.param_dtype]
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:  # private probes, absent on some platforms: then float32
        probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
        fast = any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
    return torch.bfloat16 if fast else torch.float32


def apply(model: nn.Module, mesh: Mesh, training: Training, cfg: Parallelism) -> nn.Module:
    """Shard the blocks bottom-up, then the rest of the model as the root, in place.

    Bottom-up is FSDP2's contract: the root takes what is left, here the embedding and the last norm. A block's weights are
    gathered when its forward starts and freed when it ends (`reshard_after_forward`; the last `keep_gathered` blocks keep
    them until their backward). The output projection keeps its weights under "default": backward needs them at once.
    """
    dtype = param_dtype(training, mesh.device)
    if mesh.size == 1 and not cfg.cpu_offload:
        return model if dtype == torch.float32 else keep_masters(model, dtype)
    # Inputs are not cast: activations start at the embedding, in its type, and the rotary tables stay float32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=DTYPES[training.reduce_dtype], cast_forward_inputs=False)
    # Pinned host memory exists only where there is an accelerator to copy to.
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if cfg.cpu_offload else OffloadPolicy()
    how = {"mesh": mesh.fsdp_mesh, "mp_policy": policy, "offload_policy": offload}
    reshard = cfg.reshard_after_forward
    if mesh.dp_shard == 1:
        reshard = False  # nothing is sharded, nothing to free
    blocks = list(model.layers.values())
    freed = len(blocks) - cfg.keep_gathered  # of the blocks the first ones: backward begins with the others
    for i, block in enumerate(blocks):
        fully_shard(block, **how, reshard_after_forward=i < freed and (reshard == "default" or reshard))
    if hasattr(model, "output"):  # a tied model's output weight is its embedding: it belongs to the root
        fully_shard(model.output, **how, reshard_after_forward=False if reshard == "default" else reshard)
    fully_shard(model, **how, reshard_after_forward=False)
    if cfg.prefetch:
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + cfg.prefetch])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - cfg.prefetch) : i][::-1])
    return model


def keep_masters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Mixed precision on one rank, in place: the parameters stay float32, forward and backward work on copies in `dtype`.

    A copy lies in its module's `__dict__`, where `self.weight` finds it first; `model.parameters()`, the optimizer and
    checkpoints see the parameter. Its gradient is added to the parameter's, in float32, as soon as backward has it. Each
    forward makes the copies anew but where the gradient is as the last backward left it: the next micro-batch of a step.
    (A parameter's own version does not tell: fused AdamW does not count it up.)

    The numbers are bitwise those of FSDP2's MixedPrecisionPolicy on one rank (tests/test_speed.py), which moves every
    weight through a gather buffer and every gradient through a reduce buffer: 5% of a step on CPU.
    """
    left: dict[nn.Parameter, int] = {}  # version of the gradient that backward left

    def hand_on(master: nn.Parameter, copy: torch.Tensor) -> None:
        grad, copy.grad = copy.grad.to(master.dtype), None
        master.grad = grad if master.grad is None else master.grad.add_(grad)
        left[master] = master.grad._version

    @torch.no_grad()
    def refresh(model: nn.Module, _: tuple) -> None:
        for module in model.modules():
            for name, master in module.named_parameters(recurse=False):
                if name not in module.__dict__:
                    copy = module.__dict__[name] = master.to(dtype).requires_grad_()
                    copy.register_post_accumulate_grad_hook(partial(hand_on, master))
                elif master.grad is None or master.grad._version != left.get(master):
                    module.__dict__[name].copy_(master)

    model.register_forward_pre_hook(refresh)
    return model


def synchronise_gradients(model: nn.Module, last: bool, accumulate: str) -> None:
    """Before each backward: whether it reduces gradients over the data-parallel ranks.

    accumulate "whole": only that of the last micro-batch does, so every rank keeps whole gradients in between (in the type of
    the reduction: 32 GiB for 70B at tp 8). "sharded": every one reduce-scatters, and shards are added up; what dp_replicate
    adds on top, an all-reduce of shards, still happens once.
    """
    if isinstance(model, FSDPModule):
        scatter = last or accumulate == "sharded"
        model.set_requires_gradient_sync(scatter)
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(scatter)


def reshard(model: nn.Module) -> None:
    """Free the weights that a forward without backward (validation, sampling) left gathered: the next optimizer step or
    checkpoint must see the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
