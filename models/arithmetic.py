"""Count the parameters of a model, and the FLOPs of a decoder from the numbers of
`models/layers.py::Args`. `models/family.py::Family` explains each function.

feed_forward: the weights of a block's feed-forward layer that count, where it has no w1, w2 and w3.
"""

from collections.abc import Sequence

from torch import nn

from models.kernels.ruled_attention import AttentionSpec
from models.layers import Args
from models.moe import MixtureOfExperts, Router


def parameters(model: nn.Module) -> tuple[int, int]:
    """Count all parameters of a whole model, a tied weight once, and those that work on a token: of
    the experts as many as it is sent to. The biases that balance routers are left out, as no
    optimizer moves them."""
    every = sum(param.numel() for param in model.parameters())
    idle = 0
    for module in model.modules():
        if isinstance(module, Router):
            biases = (param for param in module.parameters() if not param.requires_grad)
            every -= sum(param.numel() for param in biases)
        elif isinstance(module, MixtureOfExperts):
            experts = module.args.n_experts
            of_one = sum(param.numel() for param in module.experts.parameters()) // experts
            idle += of_one * (experts - module.args.experts_per_token)
    return every, every - idle


def multiplied(args: Args, feed_forward: int | None = None) -> int:
    """Count the weights that a token is multiplied with: all matrices but the embedding, which is
    looked up. A tied embedding is multiplied too, as the output projection. feed_forward: those of
    one block where it has no w1, w2 and w3."""
    # wq and wo, wk and wv
    attention = 2 * args.dim * args.head_dim * (args.n_heads + args.n_kv_heads)
    if feed_forward is None:
        feed_forward = 3 * args.dim * args.hidden_dim  # w1 w2 w3
    return args.n_layers * (attention + feed_forward) + args.dim * args.vocab_size


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
