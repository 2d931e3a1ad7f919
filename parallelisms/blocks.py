"""Wrap each block: in activation checkpointing (Chen et al., arXiv:1604.06174), which recomputes in
backward instead of keeping, and in torch.compile, which compiles identical blocks once.  A block's
`forward` is replaced by a checkpointed or compiled version of it. Unlike a wrapper module this
changes no parameter's name, and hooks stay where they belong: those of FSDP (on the block) gather
weights outside the recomputed region and the graph, those of tensor parallelism (on the modules
inside) move activations inside it."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from configs.schema import ActivationCheckpoint, Compile

# Mode "selective" keeps the results of these operators and recomputes everything else (norms,
# rotary positions, SiLU, casts), which is large to keep and cheap to redo. These are the operators
# whose time is more than memory traffic. They are listed by name, because some are custom operators
# of this repository; tests/test_masking.py checks that each name exists.
KEEP = {
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten._scaled_mm.default",  # training.float8
    "aten.amax.default",  # its scales: recomputing them would read the matrix again
    # the matmuls of experts (models/kernels/grouped_product.py)
    "plumbline.grouped_product.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    # otherwise a CPU would recompute its attention
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "torch_attn._varlen_attn.default",  # document masking on CUDA
    # the same on a CPU (models/kernels/cpu/document_attention.py)
    "plumbline.document_attention.default",
    "plumbline.ruled_attention.default",  # attention with a window, sinks, a cap or a scale
    "plumbline.delta_rule.default",
    "plumbline.flash_delta_rule.default",
    # context parallelism: keys and values are gathered once
    "plumbline.gathered_attention.default",
    "plumbline.largest_products.default",  # optimizer.qk_clip
    "_c10d_functional.all_to_all_single.default",
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_reduce.default",
}
# The operators that activation_checkpoint.gather_again recomputes nevertheless. Within blocks only
# tensor parallelism calls them. Its gathered sequences are as large on every rank as without it,
# where all that is computed from them is split (Korthikanti et al., arXiv:2205.05198, section
# 4.2.2).
AGAIN = {
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.wait_tensor.default",  # or a compiler would keep its result
}


def _policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if str(op) in KEEP else CheckpointPolicy.PREFER_RECOMPUTE


def _gathering_again(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE if str(op) in AGAIN else _policy(ctx, op)


def checkpoint_blocks(model: nn.Module, cfg: ActivationCheckpoint) -> nn.Module:
    """Checkpoint the blocks of `model.layers`, in place. Nothing in the model draws random numbers,
    so no RNG is saved."""
    if cfg.mode == "none":
        return model
    every = cfg.every_n if cfg.mode == "every_n" else 1
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if cfg.mode == "selective":
        policy = _gathering_again if cfg.gather_again else _policy
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    blocks: Any = model.layers
    for number, block in blocks.items():
        if int(number) % every == 0:
            block.forward = partial(checkpoint, block.forward, **options)
    return model


def compile_blocks(model: nn.Module, cfg: Compile) -> nn.Module:
    """Compile the blocks of `model.layers`, in place. With fullgraph a graph break is an error, not a
    slow run."""
    if not cfg.enabled:
        return model
    blocks: Any = model.layers
    for block in blocks.values():
        block.forward = torch.compile(block.forward, backend=cfg.backend, fullgraph=True)
    return model
