"""A double of the package flash-linear-attention, for machines without a GPU: its two functions of the
gated delta rule, with what they refuse, computed token by token."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from models.kernels import delta_rule


class Rule(torch.autograd.Function):
    """As the package's, an autograd function that keeps what its backward needs."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*given)
        return by_pieces(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, edges = ctx.saved_tensors
        _, pull_back = torch.func.vjp(lambda *x: by_pieces(*x, edges), *tensors)
        return *pull_back(grads), None


def by_pieces(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, edges: Tensor | None
) -> tuple[Tensor, Tensor]:
    tokens = [q, k, v, g, beta]
    if edges is None:
        out, after = delta_rule.recurrent(*tokens, None, state)
        return out.to(v.dtype), after
    places = edges.tolist()
    parts = []
    for n, (begin, end) in enumerate(zip(places, places[1:])):
        piece = [x[:, begin:end] for x in tokens]
        parts.append(delta_rule.recurrent(*piece, None, state[n : n + 1]))
    outs, states = zip(*parts)
    return torch.cat(outs, 1).to(v.dtype), torch.cat(states)


@torch.compiler.disable
def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert q.dtype == k.dtype == v.dtype != torch.float32
    assert q.shape == k.shape and q.shape[:3] == v.shape[:3] and scale == 1.0
    assert output_final_state and initial_state.dtype == torch.float32
    if cu_seqlens is not None:
        assert cu_seqlens.dtype == torch.int64 and len(q) == 1
        assert len(initial_state) == len(cu_seqlens) - 1
    return Rule.apply(q, k, v, g, beta, initial_state, cu_seqlens)


@contextmanager
def instead_of_fla() -> Iterator[None]:
    """`import fla.ops...` finds this. What else is imported meanwhile stays imported: `mock.patch.dict`
    would take half of PyTorch out of sys.modules again, which cannot be imported twice."""
    made = {name: ModuleType(name) for name in ("fla", "fla.ops")}
    for name, function in (("gated_delta_rule", "chunk_gated_delta_rule"), ("kda", "chunk_kda")):
        module = made[f"fla.ops.{name}"] = ModuleType(f"fla.ops.{name}")
        setattr(module, function, chunk)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in made.items():
            patch.setitem(sys.modules, name, module)
        yield
