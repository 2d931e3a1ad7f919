"""A hybrid that no family of this tree is: gated linear attention with a short convolution in every other
layer, attention with a window in the others. It is here for tests of what states and convolutions
(models/recurrent.py) do on a mesh, in a cache and at a document."""

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import arithmetic, layers, llama
from models.local import local
from models.recurrent import ConvolutionCore, StateCore, state_of_zeros

TAPS = 4


class DecayedSum(StateCore):
    """S_t = diag(d_t) S_{t-1} + k_t v_t^T, read by q_t: q, k, log d [B, T, H, E], v [B, T, H, V]."""

    def run(
        self, *inputs: Tensor, first: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        q, k, v, decay = inputs
        B, T, H, E = k.shape
        if state is None:
            state = state_of_zeros(v, B, H, E, v.shape[-1])
        outputs = []
        for t in range(T):
            if first is not None:
                state = state.masked_fill(first[:, t, None, None, None], 0)
            state = state * decay[:, t, ..., None].exp() + k[:, t, ..., None] * v[:, t, :, None]
            outputs.append((q[:, t, :, None] @ state.type_as(q))[:, :, 0])
        return torch.stack(outputs, 1), state


class Recurrence(nn.Module):
    """The mixer: convolution, then the decayed sum."""

    def __init__(self, args: Any, core: StateCore):
        super().__init__()
        self.head_dim = args.head_dim
        width = args.n_heads * args.head_dim
        self.wq = nn.Linear(args.dim, width, bias=False)
        self.wk = nn.Linear(args.dim, width, bias=False)
        self.wv = nn.Linear(args.dim, width, bias=False)
        self.wg = nn.Linear(args.dim, width, bias=False)  # decay
        self.wo = nn.Linear(width, args.dim, bias=False)
        self.taps = nn.Parameter(torch.empty(width, TAPS))
        self.convolution = ConvolutionCore()
        self.core = core

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Any = None) -> Tensor:
        v = self.convolution(self.wv(x), local(self.taps), documents)
        heads = [y.unflatten(-1, (-1, self.head_dim)) for y in (self.wq(x), self.wk(x), F.silu(v))]
        decay = F.logsigmoid(self.wg(x)).unflatten(-1, (-1, self.head_dim))
        return self.wo(self.core(*heads, decay, documents=documents).flatten(2))


class Hybrid(llama.Llama):
    core: type[StateCore] = DecayedSum

    def block(self, args: Any, number: int) -> nn.Module:
        if not is_recurrent(number):
            return super().block(args, number)
        mixer = Recurrence(args, self.core())
        return layers.Block(args, mixer, layers.FeedForward(args.dim, args.hidden_dim))


def is_recurrent(number: int) -> bool:
    return number % 3 != 1


def tp_plan(args: Any) -> dict[str, str]:
    plan = {}
    for number in filter(is_recurrent, range(args.n_layers)):
        mixer = f"layers.{number}.attention"
        plan[mixer] = "gather_sequence_split_own"
        for name in ("wq", "wk", "wv", "wg"):
            plan[f"{mixer}.{name}"] = "columns"
        plan[f"{mixer}.wo"] = "rows"
    return plan | layers.tp_plan(args)


def more_weights(args: Any) -> int:
    """Count what the recurrences have more than attention."""
    width = args.n_heads * args.head_dim
    attention = 2 * args.dim * args.head_dim * (args.n_heads + args.n_kv_heads)
    own = 5 * args.dim * width + TAPS * width
    return len(list(filter(is_recurrent, range(args.n_layers)))) * (own - attention)


def flops_per_token(args: Any, seq_len: int) -> float:
    recurrent = len(list(filter(is_recurrent, range(args.n_layers))))
    specs = [layers.PLAIN] * (args.n_layers - recurrent)
    state = recurrent * DecayedSum.products * args.n_heads * args.head_dim**2
    weights = more_weights(args) + state
    return arithmetic.flops_per_token(args, seq_len, specs=specs) + 6 * weights


FAMILY = replace(
    llama.FAMILY,
    build=Hybrid,
    tp_plan=tp_plan,
    flops_per_token=flops_per_token,
)


def instead_of_llama(family: Any = FAMILY) -> Any:
    """Return a context in which the family "llama" is this one."""
    return mock.patch.object(llama, "FAMILY", family)
