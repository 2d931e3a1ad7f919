"""Apply all parallelism to a model, in the one order that works.

A parallelism changes a model from outside in three ways: it replaces parameters by DTensors, it
adds hooks, and where something else has to be computed it replaces a module, which `print(model)`
shows. This table lists every replaced module; parameters keep their names and no method is
replaced:  | Module of the model | Replaced by | Why |
| --- | --- | --- |
| `AttentionCore` | cp.py::GatheredKV | ranks exchange keys and values |
| | cp.py::Ulysses | ranks exchange heads |
| | qk_clip.py::MeasuredCore | around one of these: the largest logits are measured |
| | training/sample.py::CachedAttention | keys and values of earlier tokens are kept |
| `GatedDeltaCore` | delta_kernel.py::FlashDeltaCore | a kernel for GPUs computes it |
| `StateCore` | cp_state.py::SharedState | ranks exchange what their tokens do to the state |
| `ConvolutionCore` | cp_state.py::SharedConvolution | ranks exchange its last inputs |
| | training/recurrent_cache.py | states and last inputs are kept |
| `Latents` | training/sample.py::CachedLatents | or the narrow vectors that they come from |
| `LocalDispatcher` | ep_dispatch.py::AllToAllDispatcher | the ranks share the experts |
| | ep_hosts.py::HierarchicalDispatcher | so do several hosts |
| | ep_dispatch.py::ChunkedDispatcher | one of these, in chunks |
| `BalanceLoss` | ep.py::BalanceLossOverRanks | several ranks share a sequence |
| `nn.Embedding` | tp_plain.py::SplitEmbedding | a rank has some rows of the vocabulary |
| `nn.Linear` in a block | tp_plain.py::PlainLinear | a plain tensor in and out |
| | float8.py::Float8Linear | the product in float8 |
| | models/lora.py::AdaptedLinear | adapters; what they add is `LowRank` |
| `LowRank` | lora.py::SplitLowRank | a rank has a part of the adapters |
| `nn.RMSNorm` in attention | tp_plain.py::SplitRMSNorm | a mean square over the heads of all ranks |
| `Experts` | models/lora.py::AdaptedExperts | adapters |

Layers multiply with `models/local.py::local` of a weight, which is this rank's part of a DTensor.
cores.py is the interface to cores: one that may compute anything is refused by name. blocks.py
wraps the `forward` of a block to recompute or compile it, as PyTorch does, and master_weights.py
gives modules bfloat16 copies of their weights while they compute."""

import torch
from torch import nn

from configs.schema import SCHEDULES, Config, InputError
from parallelisms import async_tp, blocks, cores, cp, dp, ep, float8, freezing, lora, qk_clip, tp
from parallelisms.mesh import Mesh

MAJOR, MINOR, *_ = torch.__version__.split(".")
VERSION = (int(MAJOR), int(MINOR))


def check_torch(cfg: Config, shares_experts: bool, version: tuple[int, ...] = VERSION) -> None:
    """Raise InputError for options that this version of torch does not support. shares_experts:
    whether several ranks share the experts."""
    schedule = cfg.parallelism.pipeline_schedule
    is_split = cfg.parallelism.pipeline_parallel > 1 and SCHEDULES[schedule].splits_backward
    if version < (2, 13) and is_split:
        raise InputError(
            f'parallelism.pipeline_schedule = "{schedule}" splits the backward pass, which '
            f'needs torch 2.13, and this is {torch.__version__}: use "1f1b" or "interleaved_1f1b"'
        )
    if version < (2, 12) and shares_experts and cfg.compile.enabled:
        raise InputError(
            "compile.enabled = true with experts that several ranks share (by "
            f"parallelism.expert_parallel or tensor_parallel) needs torch 2.12, "
            f"and this is {torch.__version__}: set it to false"
        )
    if version < (2, 12) and cfg.parallelism.expert_chunks > 1:
        raise InputError(
            "parallelism.expert_chunks > 1 needs torch 2.12, whose FSDP gathers the experts of a "
            f"block once for all chunks, and this is {torch.__version__}: set it to 1"
        )


def parallelize(model: nn.Module, mesh: Mesh, cfg: Config, tp_plan: dict[str, str]) -> nn.Module:
    """Turn a single-device model on `meta` into this rank's part of the parallel one, in place;
    nothing is allocated.

    1. Expert parallelism and tensor parallelism first: they replace the weights by DTensors, and
       all that follows must see those. Tensor parallelism checks that no weight is left over, so
       the experts leave before it. Adapters, if there are any, are then split as their weights
       are.
    2. Context parallelism replaces the cores, which then compute the heads that tensor
       parallelism leaves on a rank.
    3. Float8 replaces linear layers, so it comes before what wraps them.
    4. Activation checkpointing and compile, block by block. A *selective* policy must be inside the
       compiled region, where the partitioner reads it; recomputing whole blocks must be outside,
       because compiled regions that checkpoint DTensor code as a whole fail on torch 2.13.
    5. Data parallelism last: it shards what tensor parallelism left on each rank (so a weight is
       sharded over both), and its hooks unshard the weights before, and outside of, everything
       above. Only then are weights frozen.

    The optimizer is built afterwards, on the sharded parameters (`train.build`).
    """
    check_torch(cfg, mesh.experts_mesh is not None)
    cores.check(model, mesh, cfg)
    of_constructor = freezing.thaw(model)
    ep.apply(model, mesh, cfg.parallelism)
    tp.apply(model, mesh.tp_mesh, tp_plan)
    lora.apply(model, mesh, cfg, tp_plan)
    if cfg.parallelism.async_tensor_parallel:
        async_tp.overlap(mesh.tp_mesh)
    cp.apply(model, mesh, cfg)
    qk_clip.apply(model, mesh, cfg)
    float8.apply(model, mesh, cfg.training.float8, cfg.debug.emulate_float8)
    if cfg.activation_checkpoint.mode == "selective":
        blocks.checkpoint_blocks(model, cfg.activation_checkpoint)
        blocks.compile_blocks(model, cfg.compile)
    else:
        blocks.compile_blocks(model, cfg.compile)
        blocks.checkpoint_blocks(model, cfg.activation_checkpoint)
    dp.apply(model, mesh, cfg.training, cfg.parallelism)
    lora.freeze(model, cfg.lora)
    freezing.freeze(model, of_constructor, cfg.training.freeze)
    return model
