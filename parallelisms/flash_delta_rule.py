"""The gated delta rule by the Triton kernels of the package flash-linear-attention (`fla`), on a GPU.

They are called through an operator of ours, so that a compiled block is one graph and selective
checkpointing keeps the result. Backward computes the forward again, by the package too: what its
kernels keep between the two depends on its version.

models/kernels/delta_rule.py is the reference; `lab.bench device.checks delta_rule` compares both. Signatures:
fla-org/flash-linear-attention, fla/ops/gated_delta_rule/chunk.py and fla/ops/kda/chunk.py.

Shapes:  B batch   T sequence   K key heads   H value heads, a multiple of K   E width of a key
         V width of a value   N pieces: documents, which the batch's rows cut
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from models.kernels import delta_rule

WIDEST = 256  # of a key: the kernels hold a key in one block
TYPES = (torch.bfloat16, torch.float16)  # others are refused by the package


def is_installed() -> bool:
    """Return whether the package is there, without importing it (seconds, and Triton)."""
    return importlib.util.find_spec("fla") is not None


def fits(k: Tensor, v: Tensor) -> bool:
    """Return whether the kernels compute these keys [B, T, K, E] and values."""
    return v.dtype in TYPES and k.shape[-1] <= WIDEST


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    first: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `models/kernels/delta_rule.py::chunked`, of tensors that fit. With documents the device
    is waited for once: their number is a shape."""
    B, T, H, _ = v.shape
    of_key_head = H // k.shape[2]
    q = q.type_as(v).repeat_interleave(of_key_head, 2)
    k = k.type_as(v).repeat_interleave(of_key_head, 2)
    before = delta_rule.state_before(k, v) if state is None else state
    if first is None:
        return flash_operator(q, k, v, g.float(), beta.float(), before, None)
    begins = first.clone()
    begins[:, 0] = True
    starts = begins.flatten().nonzero().flatten()  # [N]
    edges = torch.cat((starts, starts.new_tensor([B * T])))
    row_begins = (starts % T == 0).nonzero().flatten()  # [B]: the first piece of each row
    row_ends = torch.cat((row_begins[1:], row_begins.new_tensor([len(starts)]))) - 1
    kept = before.masked_fill(first[:, 0, None, None, None], 0)
    states = before.new_zeros(len(starts), *before.shape[1:]).index_put((row_begins,), kept)
    tokens = [x.reshape(1, B * T, *x.shape[2:]) for x in (q, k, v, g.float(), beta.float())]
    out, after = flash_operator(*tokens, states, edges)
    return out.view_as(v), after[row_ends]


def kernel_of(g: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the package's function for a decay of each head, [B, T, H], or of each channel."""
    if g.dim() == 4:
        from fla.ops.kda import chunk_kda

        return chunk_kda
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


def by_the_package(tensors: list[Tensor], edges: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta, state = tensors
    return kernel_of(g)(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=1.0,
        initial_state=state,
        output_final_state=True,
        cu_seqlens=edges,
    )


TENSORS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, Tensor? edges"


@torch.library.custom_op(
    "plumbline::flash_delta_rule", mutates_args=(), schema=f"({TENSORS}) -> (Tensor, Tensor)"
)
def flash_operator(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, edges: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out [B, T, H, V] and the states after the sequences, float32 [B, H, E, V]; with edges,
    int64 [N + 1], those of pieces of one row, B = 1: [N, H, E, V], as `state` has them."""
    with torch.no_grad():
        out, after = by_the_package([q, k, v, g, beta, state], edges)
    return out.contiguous(), after.to(state.dtype)


@torch.library.custom_op(
    "plumbline::flash_delta_rule_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor grad_state, {TENSORS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def flash_backward_operator(
    grad: Tensor,
    grad_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    edges: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, g, beta and the state. Raises RuntimeError if a version of the
    package computes with one of them before its autograd function gets it: nothing else is recorded
    within an operator."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v, g, beta, state)]
        results = by_the_package(leaves, edges)
        grads = torch.autograd.grad(results, leaves, (grad, grad_state.to(results[1].dtype)))
    return tuple(one.to(x.dtype).contiguous() for one, x in zip(grads, leaves))


@flash_operator.register_fake
def _(q, k, v, g, beta, state, edges):
    return torch.empty_like(v), torch.empty_like(state)


@flash_backward_operator.register_fake
def _(grad, grad_state, q, k, v, g, beta, state, edges):
    return tuple(torch.empty_like(x) for x in (q, k, v, g, beta, state))


def _keep_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
    return *flash_backward_operator(grad.contiguous(), grad_state, *ctx.saved_tensors), None


flash_operator.register_autograd(_backward, setup_context=_keep_for_backward)
