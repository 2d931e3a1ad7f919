"""Llama 2, 3, 3.1 and 3.2 as single-device code: it knows torch, and nothing of meshes.

The model is written for whole tensors. Tensor parallelism, sharding and checkpointing are applied to it from outside
(`parallelisms/`), driven by the tables at the end of this file. It has parameters and no buffers, so that building it
on the `meta` device, sharding it and materialising it loses nothing.

Shapes:  B batch   T sequence   D = dim   V = vocab_size   F = hidden_dim
         H query heads   K key/value heads   E = head_dim      (under tensor parallelism H, K, F, V are this rank's share)

Weights carry Meta's names (wq wk wv wo w1 w2 w3) in Hugging Face's layout: rotary positions in the rotate-half
convention, so that exchanging weights with Hugging Face renames tensors and permutes nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.causal_attention import causal_attention
from models.document_attention import Documents, document_attention


@dataclass(frozen=True)
class Args:
    """The numbers that define one Llama; a row of FLAVORS, with the overrides of the [model] table laid on top."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    rope_theta: float
    rope_scaling: dict | None
    norm_eps: float
    max_seq_len: int
    tied_embeddings: bool


def rope_tables(args: Args, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every position [T] or [B, T] and frequency, float32 [..., E], for rotate-half RoPE (Su et al.,
    arXiv:2104.09864).

    Always from *global* positions: under sequence parallelism a hidden state holds only a slice of the sequence.
    With `rope_scaling` the frequencies are stretched as Llama 3.1 does (Llama 3 paper, arXiv:2407.21783, and Meta's
    `apply_scaling`): wavelengths longer than the original context / low_freq_factor by the whole factor, those shorter
    than the original context / high_freq_factor not at all, linearly in between.
    """
    exponents = torch.arange(0, args.head_dim, 2, dtype=torch.int64, device=positions.device).float() / args.head_dim
    freqs = 1.0 / (args.rope_theta**exponents)  # [E/2]
    if args.rope_scaling is not None:
        s = args.rope_scaling
        wavelength = 2 * math.pi / freqs
        low, high = s["original_max_seq_len"] / s["low_freq_factor"], s["original_max_seq_len"] / s["high_freq_factor"]
        smooth = s["original_max_seq_len"] / wavelength - s["low_freq_factor"]
        smooth = smooth / (s["high_freq_factor"] - s["low_freq_factor"])
        between = (1 - smooth) * freqs / s["factor"] + smooth * freqs
        stretched = torch.where(wavelength > low, freqs / s["factor"], freqs)
        freqs = torch.where((wavelength >= high) & (wavelength <= low), between, stretched)
    angles = positions.float()[..., None] * freqs  # [..., E/2]
    angles = torch.cat((angles, angles), dim=-1)  # [..., E]
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of x [B, T, heads, E] by their position; in float32 whatever the type of x."""
    a, b = x.chunk(2, dim=-1)
    rotated = torch.cat((-b, a), dim=-1)
    return (x * cos[..., None, :] + rotated * sin[..., None, :]).type_as(x)


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al., arXiv:2305.13245)."""

    def __init__(self, args: Args):
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None = None) -> Tensor:
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, -1, self.head_dim)  # [B, T, H, E]: -1, because a rank may hold some of the heads
        k = self.wk(x).view(B, T, -1, self.head_dim)  # [B, T, K, E]
        v = self.wv(x).view(B, T, -1, self.head_dim)  # [B, T, K, E]
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        if documents is not None:
            return self.wo(document_attention(q, k, v, documents).flatten(2))  # [B, T, D]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, heads, T, E]
        o = causal_attention(q, k, v)  # [B, H, T, E]
        return self.wo(o.transpose(1, 2).reshape(B, T, -1))  # [B, T, D]


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, args: Args):
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=False)  # gate
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)  # down
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)  # up

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # [B, T, D]


class Block(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = FeedForward(args)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None = None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), cos, sin, documents)  # [B, T, D]
        return h + self.feed_forward(self.ffn_norm(h))  # [B, T, D]


class Output(nn.Linear):
    """The projection to the vocabulary, which hands its weight [V, D] to `head` instead of multiplying by itself.

    The head is a loss in training, so that it can work through the sequence in pieces and [B, T, V] logits never exist.
    It runs inside this module's forward because that is where FSDP has gathered the weight.
    """

    def forward(self, h: Tensor, head: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return head(h, self.weight)


class Llama(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.n_layers))
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        if not args.tied_embeddings:
            self.output = Output(args.dim, args.vocab_size, bias=False)

    documents = staticmethod(Documents.of)  # for those who have a model but do not know its family

    def forward(
        self, tokens: Tensor, head: Callable[[Tensor, Tensor], Tensor] = F.linear, documents: Documents | None = None
    ) -> Tensor:
        """tokens int64 [B, T] -> head(hidden states [B, T, D], output weight [V, D]); by default logits [B, T, V].

        With `documents` each one is alone in the world: attention and positions begin anew with it.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device) if documents is None else documents.positions
        cos, sin = rope_tables(self.args, positions)  # [T, E], or [B, T, E]
        h = self.tok_embeddings(tokens)  # [B, T, D]
        for layer in self.layers:
            h = layer(h, cos, sin, documents)
        h = self.norm(h)
        return head(h, self.tok_embeddings.weight) if self.args.tied_embeddings else self.output(h, head)


# ---------------------------------------------------------------------------------------------------------------------
# What others must know about this model, as plain tables. FLAVORS must stay a literal: configs/check.py reads it
# without importing torch, so that a mistake in a config is reported at once.

# Sources: Llama 3 paper (arXiv:2407.21783) table 3 for 8B, 70B, 405B; config.json of meta-llama/Llama-3.1-8B, -70B, -405B
# and meta-llama/Llama-3.2-1B, -3B on the Hugging Face hub for the rest. `debug` is ours, sized for two CPU cores; it has
# 4 key/value heads so that tensor parallelism up to 4 can be tried on a laptop.
FLAVORS = {
    "debug": {"dim": 256, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32, "hidden_dim": 704,
              "vocab_size": 4096, "rope_theta": 10000.0, "rope_scaling": None, "norm_eps": 1e-5,
              "max_seq_len": 8192, "tied_embeddings": False},
    "1B": {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "head_dim": 64, "hidden_dim": 8192,
           "vocab_size": 128256, "rope_theta": 500000.0, "norm_eps": 1e-5, "max_seq_len": 131072, "tied_embeddings": True,
           "rope_scaling": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}},
    "3B": {"dim": 3072, "n_layers": 28, "n_heads": 24, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 8192,
           "vocab_size": 128256, "rope_theta": 500000.0, "norm_eps": 1e-5, "max_seq_len": 131072, "tied_embeddings": True,
           "rope_scaling": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}},
    "8B": {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 14336,
           "vocab_size": 128256, "rope_theta": 500000.0, "norm_eps": 1e-5, "max_seq_len": 131072, "tied_embeddings": False,
           "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}},
    "70B": {"dim": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 28672,
            "vocab_size": 128256, "rope_theta": 500000.0, "norm_eps": 1e-5, "max_seq_len": 131072, "tied_embeddings": False,
            "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}},
    "405B": {"dim": 16384, "n_layers": 126, "n_heads": 128, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 53248,
             "vocab_size": 128256, "rope_theta": 500000.0, "norm_eps": 1e-5, "max_seq_len": 131072, "tied_embeddings": False,
             "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}},
}


def build(args: dict) -> Llama:
    """The model of these numbers (a FLAVORS row with overrides), on whatever device is the default: `meta` in train.py."""
    return Llama(Args(**args))


def initial_values(args: dict) -> list[tuple[str, str, float]]:
    """Rows (pattern of the parameter's name, kind, standard deviation); the first that matches counts.

    Normal values of deviation 0.02, and projections back into the residual stream scaled by 1/sqrt(2 * n_layers) so
    that its variance does not grow with depth (GPT-2; Radford et al. 2019, section 2.3).
    """
    residual = 0.02 / math.sqrt(2 * args["n_layers"])
    return [
        ("*norm.weight", "ones", 0.0),
        ("*.wo.weight", "normal", residual),
        ("*.w2.weight", "normal", residual),
        ("*", "normal", 0.02),
    ]


# Optimizer groups: (pattern, weight decay applies). Decaying a norm's gain towards 0 would shrink the signal itself.
DECAY = [("*norm.weight", False), ("*", True)]

# What tensor parallelism does to each module; the styles are defined in parallelisms/tp.py. `*` is a layer's number.
TP_PLAN = {
    "tok_embeddings": "vocab_embedding",  # rows of the vocabulary split; output: this rank's slice of the sequence
    "layers.*.attention_norm": "sequence",  # works on this rank's slice of the sequence
    "layers.*.attention": "gather_sequence",  # its input: the whole sequence
    "layers.*.attention.wq": "columns",  # heads split
    "layers.*.attention.wk": "columns",
    "layers.*.attention.wv": "columns",
    "layers.*.attention.wo": "rows",  # sums over heads; output: a slice of the sequence again
    "layers.*.ffn_norm": "sequence",
    "layers.*.feed_forward": "gather_sequence",
    "layers.*.feed_forward.w1": "columns",  # hidden units split
    "layers.*.feed_forward.w3": "columns",
    "layers.*.feed_forward.w2": "rows",
    "norm": "sequence",
    "output": "vocab_weight",  # rows of the vocabulary split; the loss in training/loss.py works on its share of the logits
}

# Names in Hugging Face's LlamaForCausalLM; layouts are the same. A tied model has no `output.weight`.
HF_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
