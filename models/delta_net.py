"""Gated delta net (Yang et al., arXiv:2412.06464), the mixer of three of four layers of Qwen3-Next: linear
attention whose state has the size of one weight, at any length of the sequence. models/kimi_linear.py
has its own decay and gate.

A short convolution lets a token's query, key and value see the few tokens before it; the gated delta
rule (models/kernels/delta_rule.py) writes and reads the state of each head; a gate scales what is read.
It takes the place of attention in a block, and is called as attention is. Positions do not turn it.

Shapes:  B batch   T sequence   D = dim   K key heads   H value heads, a multiple of K
         E = delta_key_dim   V = delta_value_dim   C channels of the convolution   W = conv_width
         (under tensor parallelism K, H and C are this rank's share)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.kernels import delta_rule
from models.kernels.precision import wide
from models.local import local
from models.recurrent import ConvolutionCore, StateCore

EPS = 1e-6  # of the L2 norm of queries and keys, as in flash-linear-attention


class GatedDeltaCore(StateCore):
    """The gated delta rule of q and k [B, T, K, E], v [B, T, H, V], g [B, T, H] (or [B, T, H, E], a decay
    for each channel) and beta [B, T, H]."""

    products = 3  # what the state holds for the key, the correction, what the query reads

    def run(
        self, *inputs: Tensor, first: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return delta_rule.chunked(*inputs, first, state)

    def begin(
        self, *inputs: Tensor, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        A, b, reads, out = delta_rule.from_any_state(*inputs, first)
        v = inputs[2]

        def read(state: Tensor) -> Tensor:
            return (torch.einsum("bthe,bhev->bthv", reads, state) + out).to(v.dtype)

        return A, b, read

    def summary(self, *inputs: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.begin(*inputs, first=first)[:2]


class DeltaNet(nn.Module):
    """A layer with the gated delta rule: all but the decay of its states and the gate of what it reads,
    which a subclass adds, with their weights and dt_bias."""

    def __init__(self, args: Any, key_heads: int, value_heads: int, key_dim: int, value_dim: int):
        super().__init__()
        self.key_dim = key_dim
        self.value_dim = value_dim
        keys = key_heads * key_dim
        values = value_heads * value_dim
        self.wq = nn.Linear(args.dim, keys, bias=False)
        self.wk = nn.Linear(args.dim, keys, bias=False)
        self.wv = nn.Linear(args.dim, values, bias=False)
        self.wb = nn.Linear(args.dim, value_heads, bias=False)  # beta
        self.conv_q = nn.Parameter(torch.empty(keys, args.conv_width))
        self.conv_k = nn.Parameter(torch.empty(keys, args.conv_width))
        self.conv_v = nn.Parameter(torch.empty(values, args.conv_width))
        self.A_log = nn.Parameter(torch.empty(value_heads))
        self.norm = nn.RMSNorm(value_dim, eps=args.norm_eps)  # of each head
        self.wo = nn.Linear(values, args.dim, bias=False)
        self.convolution = ConvolutionCore()
        self.core = GatedDeltaCore()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Any = None) -> Tensor:
        """Mix x [B, T, D] -> [B, T, D]. cos and sin, of attention's positions, are not used."""
        B, T, _ = x.shape
        q, k, v = self.convolved(x, documents)
        q = unit(q.view(B, T, -1, self.key_dim), self.key_dim**-0.5)  # [B, T, K, E]
        k = unit(k.view(B, T, -1, self.key_dim))
        v = v.view(B, T, -1, self.value_dim)  # [B, T, H, V]
        beta = wide(self.wb(x)).sigmoid()  # [B, T, H]
        o = self.norm(self.core(q, k, v, self.decay(x), beta, documents=documents))
        gate = self.gate(x).view(B, T, -1, self.value_dim)
        return self.wo((o * gate).type_as(o).flatten(2))

    def convolved(self, x: Tensor, documents: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys [B, T, K E] and values [B, T, H V] after convolution and SiLU."""
        parts = [self.wq(x), self.wk(x), self.wv(x)]
        weights = [local(self.conv_q), local(self.conv_k), local(self.conv_v)]
        mixed = self.convolution(torch.cat(parts, -1), torch.cat(weights), documents)  # [B, T, C]
        q, k, v = F.silu(mixed).split([part.shape[-1] for part in parts], -1)
        return q, k, v

    def decay(self, x: Tensor) -> Tensor:
        """Return the logarithm of the decay, of the wide type [B, T, H] or [B, T, H, E], at most 0."""
        raise NotImplementedError

    def gate(self, x: Tensor) -> Tensor:
        """Return the factors of what is read, of the wide type [B, T, H V]."""
        raise NotImplementedError


class GatedDeltaNet(DeltaNet):
    """The published layer, with a projection for each thing: its queries, keys, values and gates stand in
    one matrix there, key head by key head."""

    def __init__(self, args: Any):
        heads = args.delta_key_heads, args.delta_value_heads
        super().__init__(args, *heads, args.delta_key_dim, args.delta_value_dim)
        values = args.delta_value_heads * args.delta_value_dim
        self.wz = nn.Linear(args.dim, values, bias=False)  # gate
        self.wa = nn.Linear(args.dim, args.delta_value_heads, bias=False)  # decay
        self.dt_bias = nn.Parameter(torch.empty(args.delta_value_heads))

    def decay(self, x: Tensor) -> Tensor:
        """Return the decay of each head, [B, T, H]: -exp(A_log) softplus(wa x + dt_bias), as in Mamba-2
        (Dao and Gu, arXiv:2405.21060)."""
        step = F.softplus(wide(self.wa(x)) + wide(local(self.dt_bias)))
        return -wide(local(self.A_log)).exp() * step

    def gate(self, x: Tensor) -> Tensor:
        return F.silu(wide(self.wz(x)))


def unit(x: Tensor, length: float = 1.0) -> Tensor:
    """Scale the vectors x [..., E] to this length."""
    x_ = wide(x)
    return (x_ * torch.rsqrt(x_.square().sum(-1, keepdim=True) + EPS) * length).type_as(x)


# What a family says of these layers ---------------------------------------------------------------


def initial_values(args: Any) -> list[tuple[str, str, float]]:
    """Return rows for what other layers do not have. The rates of the decay as in Mamba-2
    (training/decays.py): a head's memory lasts from a few tokens to thousands. Convolutions have the
    deviation that PyTorch draws them with."""
    return [
        ("*.A_log", "decay_rates", 0.0),
        ("*.dt_bias", "time_steps", 0.0),
        ("*.conv_?", "normal", (3 * args.conv_width) ** -0.5),
    ]


# Vectors of one number for each head do not decay; convolutions do, as matrices do.
DECAY = [("*.A_log", False), ("*.dt_bias", False)]


def tp_plan(layer: str = "*", own: tuple[str, ...] = ("wz", "wa")) -> dict[str, str]:
    """Return the rows of a layer whose mixer this is: heads are split, and each rank keeps the
    convolution and the state of its own. layer: its number, or * for all. own: a subclass's
    projections to heads."""
    mixer = f"layers.{layer}.attention"
    projections = {f"{mixer}.{name}": "columns" for name in ("wq", "wk", "wv", "wb", *own)}
    return {
        mixer: "gather_sequence_split_own",
        **projections,
        f"{mixer}.norm": "heads",
        f"{mixer}.wo": "rows",
    }


def multiplied(args: Any) -> int:
    """Count the weights of one layer that a token is multiplied with, those of the convolution
    among them."""
    keys = args.delta_key_heads * args.delta_key_dim
    values = args.delta_value_heads * args.delta_value_dim
    projections = args.dim * (2 * keys + 3 * values + 2 * args.delta_value_heads)
    return projections + (2 * keys + values) * args.conv_width


def flops_of_state(args: Any) -> float:
    """Return the FLOPs of one layer's state for training on a token, of a sequence of any length: 6
    for each product of the recurrence with a number of it. The chunked form computes more."""
    state = args.delta_value_heads * args.delta_key_dim * args.delta_value_dim
    return 6.0 * GatedDeltaCore.products * state
