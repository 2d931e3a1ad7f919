"""Count the parameters and FLOPs of a decoder from the numbers of `models/layers.py::Args`, without
building a model. `models/family.py::Family` explains each function.

feed_forward: the weights of a block's feed-forward layer that count, where it has no w1, w2 and w3.
"""

from collections.abc import Sequence

from models.kernels.ruled_attention import AttentionSpec
from models.layers import Args


def multiplied(args: Args, feed_forward: int | None = None) -> int:
    """Count the weights that a token is multiplied with: all matrices but the embedding, which is
    looked up. A tied embedding is multiplied too, as the output projection. feed_forward: those of
    one block where it has no w1, w2 and w3."""
    # wq and wo, wk and wv
    attention = 2 * args.dim * args.head_dim * (args.n_heads + args.n_kv_heads)
    if feed_forward is None:
        feed_forward = 3 * args.dim * args.hidden_dim  # w1 w2 w3
    return args.n_layers * (attention + feed_forward) + args.dim * args.vocab_size


def parameters(args: Args, feed_forward: int | None = None) -> int:
    """Count all parameters: those that are multiplied, an embedding that is not tied, two norms in
    each block and the last one."""
    embedding = 0 if args.tied_embeddings else args.dim * args.vocab_size
    return multiplied(args, feed_forward) + embedding + (2 * args.n_layers + 1) * args.dim


def flops_per_token(
    args: Args,
    seq_len: int,
    feed_forward: int | None = None,
    specs: Sequence[AttentionSpec] | None = None,
) -> float:
    """Return 6 N + 12 L H E T, as PaLM counts it (Chowdhery et al., arXiv:2204.02311, appendix B).
    specs: of the layers, None where all are plain; a window leaves min(T, window) keys of T.

    A weight that is multiplied costs 2 per token forward and 4 backward (gradients of input and of
    weight); N counts those weights. Attention scores and their use cost 2 * 2 H E T per layer
    forward, three times that with backward. Like PaLM and TorchTitan, this does *not* halve
    attention for being causal, nor count what checkpointing computes twice: MFUs compare with
    theirs. It ignores data.mask_documents too, which computes less attention: then FLOP/s and MFU
    are upper bounds.
    """
    keys = args.n_layers * seq_len  # of all layers, for a query
    if specs is not None:
        keys = sum(spec.keys(seq_len) for spec in specs)
    return 6.0 * multiplied(args, feed_forward) + 12.0 * args.n_heads * args.head_dim * keys


def layers(number: int) -> str:
    """Return a number of layers as a message says it: 1 layer, 6 layers."""
    return "1 layer" if number == 1 else f"{number} layers"


def describe(args: Args) -> str:
    return (
        f"{layers(args.n_layers)} of width {args.dim}, {args.n_heads} heads on {args.n_kv_heads} "
        "key/value heads, "
        f"vocabulary {args.vocab_size:,}{' (tied)' if args.tied_embeddings else ''}"
    )


def largest_weight(args: Args) -> tuple[int, int]:
    return args.dim, args.hidden_dim
