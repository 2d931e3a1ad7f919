"""The layers that the model families of this folder share, as single-device code that knows nothing
of meshes. At the end: a dense decoder's numbers, initial values, and plan of tensor parallelism.

Shapes:  B batch   T sequence   D = dim   V = vocab_size   F = hidden_dim
         H query heads   K key/value heads   E = head_dim
         (under tensor parallelism H, K, F, V are this rank's share)

A family's `Args` gives the sizes: dim, n_layers, n_heads, n_kv_heads, head_dim, hidden_dim,
vocab_size, norm_eps and tied_embeddings. Weights have Meta's names (wq wk wv wo w1 w2 w3) and
Hugging Face's layout: rotary positions use the rotate-half convention, so exchanging weights with
Hugging Face renames tensors and permutes nothing.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.cores import cores_in, documents_of
from models.kernels.causal_attention import causal_attention
from models.kernels.document_attention import Documents, document_attention
from models.kernels.ruled_attention import PLAIN, AttentionSpec, ruled_attention
from models.local import local
from models.terms import AuxiliaryTerms


def rope_frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Radians per position of each pair of numbers in a head, float32 [E/2] (Su et al.,
    arXiv:2104.09864)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    return 1.0 / (theta**exponents)


def rope_tables(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin for rotate-half RoPE, float32 [..., E]. frequencies [E/2]; positions int64 [T] or
    [B, T].

    Positions are *global*: under sequence parallelism a hidden state holds only a slice of the
    sequence.
    """
    angles = positions.float()[..., None] * frequencies  # [..., E/2]
    angles = torch.cat((angles, angles), dim=-1)  # [..., E]
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of x [B, T, heads, E] by their position; in float32 for any
    the type of x."""
    a, b = x.chunk(2, dim=-1)
    rotated = torch.cat((-b, a), dim=-1)
    cos = cos[..., None, :]  # [..., 1, E]: the same for all heads
    sin = sin[..., None, :]
    return (x * cos + rotated * sin).type_as(x)


class AttentionCore(nn.Module):
    """The part of attention that has no parameters, where tokens see each other: causal attention by
    a spec, which every module that is put in its place honours (parallelisms/cores.py)."""

    # A class that overrides `forward` sets it too (parallelisms/cores.py).
    supports_spec: ClassVar[bool] = True

    def __init__(self, spec: AttentionSpec = PLAIN):
        super().__init__()
        self.spec = spec

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [B, T, H, E], k and v [B, T, K, E], rotated already; sinks [H], if the spec has them ->
        [B, T, H, E]."""
        if self.spec != PLAIN or sinks is not None:
            return ruled_attention(q, k, v, self.spec, documents, sinks)
        if documents is not None:
            return document_attention(q, k, v, documents)
        q = q.transpose(1, 2)  # [B, H, T, E]
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        return causal_attention(q, k, v).transpose(1, 2)

    @classmethod
    def documents(cls, cores: list[Any], positions: Tensor, device: torch.device) -> Any:
        """Return the `documents` of a forward of all these cores of a model, of this class. positions:
        of the tokens of whole sequences within their documents, int64 [B, T] on the CPU."""
        return Documents.of(positions, device)


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al., arXiv:2305.13245)."""

    def __init__(self, args: Any, spec: AttentionSpec = PLAIN):
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)
        self.sinks = nn.Parameter(torch.empty(args.n_heads)) if spec.sinks else None
        self.core = AttentionCore(spec)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, D] -> q [B, T, H, E], k and v [B, T, K, E]. The view has -1, because a rank may
        hold some of the heads."""
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, -1, self.head_dim)
        k = self.wk(x).view(B, T, -1, self.head_dim)
        v = self.wv(x).view(B, T, -1, self.head_dim)
        return q, k, v

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None = None
    ) -> Tensor:
        q, k, v = self.heads(x)
        q = apply_rope(q, cos, sin)
        k = apply_rope(k, cos, sin)
        sinks = [] if self.sinks is None else [local(self.sinks)]
        o = self.core(q, k, v, documents, *sinks)  # [B, T, H, E]
        return self.wo(o.flatten(2))  # [B, T, D]


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)  # gate
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)  # down
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)  # up

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # [B, T, D]


class Block(nn.Module):
    """One layer of the decoder: attention, then the feed-forward layer, each on a normalised input
    and added to the rest."""

    def __init__(self, args: Any, attention: nn.Module, feed_forward: nn.Module):
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = feed_forward

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None = None
    ) -> Tensor:
        h = x + self.attention(self.attention_norm(x), cos, sin, documents)  # [B, T, D]
        return h + self.feed_forward(self.ffn_norm(h))  # [B, T, D]


class Output(nn.Linear):
    """The projection to the vocabulary, which hands its weight [V, D] to `loss_head` instead of
    multiplying by itself.

    In training the loss head is a loss, so that it can work through the sequence in pieces and
    logits [B, T, V] never exist. It runs inside this module's forward, because there FSDP has
    unsharded the weight.
    """

    # a further argument than that of nn.Linear
    def forward(  # type: ignore[override]
        self, h: Tensor, loss_head: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        return loss_head(h, self.weight)


class Decoder(nn.Module):
    """Embedding, blocks, last norm and output. A family says what a block is (`block`) and how
    positions turn (`rope`).

    It has parameters and no buffers, so building it on `meta`, sharding it and materialising it
    loses nothing. The blocks are numbered in the whole model: with `layers`, a range of these
    numbers, only a stage of a pipeline is built. The first stage has the embedding, the last has
    the norm and the output (of a tied model, that is a copy of the embedding).
    """

    def __init__(self, args: Any, layers: range | None = None):
        super().__init__()
        layers = layers or range(args.n_layers)
        self.args = args
        self.first = layers.start == 0
        self.last = layers.stop == args.n_layers
        if self.first or (self.last and self.copies_embedding()):
            self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(i): self.block(args, i) for i in layers})
        if self.last:
            self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
            if not args.tied_embeddings:
                self.output = Output(args.dim, args.vocab_size, bias=False)

    def block(self, args: Any, number: int) -> nn.Module:
        """A new block for this layer; its `forward` takes (h [B, T, D], cos, sin, documents) and
        returns [B, T, D], or that and {name: models/terms.py::Term}."""
        return Block(args, Attention(args), FeedForward(args.dim, args.hidden_dim))

    def copies_embedding(self) -> bool:
        """Return whether the last stage of a pipeline has a copy of the embedding."""
        return self.args.tied_embeddings

    def blocks(self) -> Iterable[tuple[str, nn.Module]]:
        """The blocks through which every token goes, by number."""
        return self.layers.items()

    def cores(self) -> list[Any]:
        """All cores (models/cores.py), in order; parallelisms/cores.py puts others in their place."""
        return cores_in(self)

    def documents(self, positions: Tensor, device: torch.device) -> Any:
        """Return the `documents` of a forward, as these cores take them."""
        return documents_of(self.cores(), positions, device)

    def latents(self) -> list[nn.Module]:
        """The modules, one per block, that return what keys and values are computed from; none
        where nothing is narrower (models/deepseek_v3.py has them)."""
        return []

    def mixtures(self) -> dict[int, nn.Module]:
        """The mixtures of experts by the number of their layer (models/moe.py::SparseDecoder)."""
        return {}

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [..., E], of positions int64 [T] or [B, T]."""
        frequencies = rope_frequencies(self.args.head_dim, self.args.rope_theta, positions.device)
        return rope_tables(frequencies, positions)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens int64 [B, T] -> [B, T, D]; a family may scale it."""
        return self.tok_embeddings(tokens)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        loss_head: Callable[[Tensor, Tensor], Tensor] = F.linear,
        documents: Documents | None = None,
        terms: AuxiliaryTerms | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """x: tokens, int64 [B, T]; for a stage that is not the first, hidden states [B, T, D] of
        the one before. positions: of these tokens, int64 [T] or [B, T], within the sequence or,
        with `documents`, within their document.

        Returns loss_head(hidden states [B, T, D], output weight [V, D]), by default logits [B, T,
        V]; a stage that is not the last returns its hidden states. With `documents` attention does
        not cross from one document to the next. What blocks report (models/terms.py) is added to
        `terms`, if it is given. real: which tokens are no padding, bool [B, T] (with tensor
        parallelism this rank's slice of T), for the mixtures of experts; None: all.
        """
        mixtures = {} if real is None else self.mixtures()
        cos, sin = self.rope(positions)  # [T, E], or [B, T, E]
        h = self.embed(x) if self.first else x  # [B, T, D]
        for number, block in self.blocks():
            more = (real,) if int(number) in mixtures else ()
            h = block(h, cos, sin, documents, *more)
            if isinstance(h, tuple):
                h, reported = h
                if terms is not None:
                    h = terms.add(h, reported, int(number))
        if not self.last:
            return h
        h = self.norm(h)
        if self.args.tied_embeddings:
            return loss_head(h, self.tok_embeddings.weight)
        return self.output(h, loss_head)


# What a family says of a decoder made of these layers ---------------------------------------------


@dataclass(frozen=True)
class Args:
    """The numbers that define a dense decoder: a row of FLAVORS, with the overrides of the [model]
    table laid on top."""

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

# The projections of attention and feed-forward layers, experts included. Not embeddings, the output
# projection, norms, routers and biases.
MATRICES = (("layers.*.w*.weight", True), ("layers.*.experts.w?", True), ("*", False))

# Tensor parallelism: pattern of a module's name -> its style (parallelisms/tp.py)
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
