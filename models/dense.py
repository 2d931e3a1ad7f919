"""What dense decoders with grouped-query attention have in common, apart from their layers: numbers,
initial values, the plan of tensor parallelism, arithmetic.

A family takes from here what holds for it and says the rest itself. `models/family.py` explains
each name; the layers stand in `models/layers.py`.
"""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Args:
    """The numbers that define a model: a row of FLAVORS, with the overrides of the [model] table
    laid on top."""

    dim: int  # width of the residual stream
    n_layers: int
    n_heads: int  # query heads
    n_kv_heads: int  # key and value heads
    head_dim: int
    hidden_dim: int  # of the SwiGLU layer
    vocab_size: int
    rope_theta: float
    norm_eps: float
    max_seq_len: int
    tied_embeddings: bool


# What is done to the parameters of models/layers.py::Decoder --------------------------------------


def initial_values(args: Args) -> list[tuple[str, str, float]]:
    """Normal values of deviation 0.02, and projections back into the residual stream scaled by
    1/sqrt(2 * n_layers) so that its variance does not grow with depth (GPT-2; Radford et al. 2019,
    section 2.3)."""
    residual = 0.02 / math.sqrt(2 * args.n_layers)
    return [
        ("*norm.weight", "ones", 0.0),
        ("*.wo.weight", "normal", residual),
        ("*.w2.weight", "normal", residual),
        ("*.experts.w2", "normal", residual),
        ("*.router.bias", "zeros", 0.0),
        ("*", "normal", 0.02),
    ]


# decaying a norm's gain towards 0 would shrink the signal itself
DECAY = [("*norm.weight", False), ("*", True)]

TP_PLAN = {  # what every decoder has
    # rows of the vocabulary split; output: this rank's slice of the sequence
    "tok_embeddings": "vocab_embedding",
    "layers.*.attention_norm": "sequence",  # works on this rank's slice of the sequence
    "layers.*.ffn_norm": "sequence",
    "norm": "sequence",
    # rows of the vocabulary split; the loss in training/loss.py works on its share of the logits
    "output": "vocab_weight",
}
TP_PLAN_OF_ATTENTION = {
    "layers.*.attention": "gather_sequence",  # its input: the whole sequence
    "layers.*.attention.wq": "columns",  # heads split
    "layers.*.attention.wk": "columns",
    "layers.*.attention.wv": "columns",
    "layers.*.attention.wo": "rows",  # sums over heads; output: a slice of the sequence again
}


def tp_plan_of_feed_forward(layer: str = "*") -> dict[str, str]:
    """layer: the number of the layer, or * for all."""
    return {
        f"layers.{layer}.feed_forward": "gather_sequence",
        f"layers.{layer}.feed_forward.w1": "columns",  # hidden units split
        f"layers.{layer}.feed_forward.w3": "columns",
        f"layers.{layer}.feed_forward.w2": "rows",
    }


def tp_plan(args: Any) -> dict[str, str]:
    return TP_PLAN | TP_PLAN_OF_ATTENTION | tp_plan_of_feed_forward()


# Arithmetic ---------------------------------------------------------------------------------------


def multiplied(args: Args, feed_forward: int | None = None) -> int:
    """Weights that a token is multiplied with: all matrices but the embedding, which is looked up.
    A tied embedding is multiplied too, as the output projection. feed_forward: those of one block
    where it has no w1, w2 and w3."""
    # wq and wo, wk and wv
    attention = 2 * args.dim * args.head_dim * (args.n_heads + args.n_kv_heads)
    if feed_forward is None:
        feed_forward = 3 * args.dim * args.hidden_dim  # w1 w2 w3
    return args.n_layers * (attention + feed_forward) + args.dim * args.vocab_size


def parameters(args: Args, feed_forward: int | None = None) -> int:
    """Those that are multiplied, an embedding that is not tied, two norms in each block and the
    last one."""
    embedding = 0 if args.tied_embeddings else args.dim * args.vocab_size
    return multiplied(args, feed_forward) + embedding + (2 * args.n_layers + 1) * args.dim


def flops_per_token(args: Args, seq_len: int, feed_forward: int | None = None) -> float:
    """6 N + 12 L H E T, as PaLM counts it (Chowdhery et al., arXiv:2204.02311, appendix B).

    A weight that is multiplied costs 2 per token forward and 4 backward (gradients of input and of
    weight); N counts those weights. Attention scores and their use cost 2 * 2 H E T per layer
    forward, three times that with backward. Like PaLM and TorchTitan, this does *not* halve
    attention for being causal, nor count what checkpointing computes twice: MFUs compare with
    theirs. Nor does it know of data.mask_documents, which computes less attention: then FLOP/s and
    MFU are upper bounds.
    """
    return (
        6.0 * multiplied(args, feed_forward)
        + 12.0 * args.n_layers * args.n_heads * args.head_dim * seq_len
    )


def describe(args: Args) -> str:
    return (
        f"{args.n_layers} layers of width {args.dim}, {args.n_heads} heads on {args.n_kv_heads} "
        "key/value heads, "
        f"vocabulary {args.vocab_size:,}{' (tied)' if args.tied_embeddings else ''}"
    )


def largest_weight(args: Args) -> tuple[int, int]:
    return args.dim, args.hidden_dim
