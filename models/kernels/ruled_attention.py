"""Attention by a spec: a sliding window, sinks, a soft cap, a scale of the scores.

You can skip this file if no layer of your model has a spec (`AttentionSpec`): the plain spec never
comes here. One operator serves whole windows, documents, and the pieces of context parallelism. On
a GPU in 16-bit types it is FlashAttention-2 (Dao, arXiv:2307.08691), which knows windows. Sinks
cost it nothing: they are one more key of every query, whose value is 0, so they only shrink the
output by a factor that follows from the log-sum-exp. Everything else is computed in the open by
`by_blocks`: on a CPU, in float32 on a GPU, and with a soft cap, for which PyTorch has no kernel.

Shapes:  B batch   T sequence   H query heads   K key/value heads   G = H / K   E head_dim
         n queries and m keys of all pieces   t queries and s keys of a block
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.kernels.document_attention import (
    Documents,
    Saved,
    VarlenMetadata,
    fits_varlen,
    piece_attention,
    piece_attention_backward,
)
from models.kernels.precision import wide, wide_type

aten = torch.ops.aten

BLOCK = 128  # queries whose scores exist at a time, where there is no kernel


class SpecNumbers(NamedTuple):
    """An `AttentionSpec` as operators take it."""

    window: int  # 0: none
    scale: float
    soft_cap: float  # 0: none


@dataclass(frozen=True)
class AttentionSpec:
    """The variant of causal attention that a core computes. The default is plain attention."""

    # a query sees the last `window` keys, its own included; None: all keys before it
    window: int | None = None
    scale: float | None = None  # factor of the scores; None: 1 / sqrt(head_dim)
    # scores become cap * tanh(score / cap) (Gemma 2, arXiv:2408.00118); None: they stay
    soft_cap: float | None = None
    # a learned score of each head joins the softmax's denominator (gpt-oss, arXiv:2508.10925; Xiao
    # et al., arXiv:2309.17453)
    sinks: bool = False

    def describe(self) -> str:
        """Describe the spec in words, for a plan."""
        parts = ["all keys" if self.window is None else f"a window of {self.window:,}"]
        if self.sinks:
            parts.append("sinks")
        if self.soft_cap is not None:
            parts.append(f"a soft cap of {self.soft_cap:g}")
        if self.scale is not None:
            parts.append(f"a scale of {self.scale:g}")
        return ", ".join(parts)

    def keys(self, length: int) -> int:
        """Return the most keys that a query sees in a sequence of this length."""
        return length if self.window is None else min(length, self.window)

    def check(self, sinks: Tensor | None) -> None:
        """Raise ValueError if the sinks of this spec are missing, or if there are sinks without
        it."""
        if self.sinks != (sinks is not None):
            raise ValueError(
                f"{self} was given {'no sinks' if sinks is None else 'sinks'}: they would be "
                "dropped silently"
            )

    def numbers(self, head_dim: int) -> SpecNumbers:
        scale = head_dim**-0.5 if self.scale is None else self.scale
        return SpecNumbers(self.window or 0, scale, self.soft_cap or 0.0)


PLAIN = AttentionSpec()


def why_slow(device: torch.device, spec: AttentionSpec) -> str | None:
    """Return a sentence if this spec has no fast kernel on this device. Its numbers are right
    anyway."""
    if device.type == "cuda" and spec.soft_cap is not None:
        return (
            "attention with a soft cap has no FlashAttention kernel in PyTorch: it is computed in "
            "blocks of matmuls, several times slower"
        )
    return None


def ruled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    documents: Documents | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention by `spec`: q [B, T, H, E], k and v [B, T, K, E], sinks [H] in any type, None
    where the spec has none -> [B, T, H, E]. With documents it does not cross them."""
    spec.check(sinks)
    if documents is None:
        pieces = VarlenMetadata(None, None, q.shape[1], q.shape[1])
    else:
        starts, longest = documents.starts, documents.longest
        pieces = VarlenMetadata(starts, starts, longest, longest)
    out, _ = attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), sinks, pieces, spec)
    return out.view(q.shape)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Attention of few queries by `spec`, q [B, t, H, E], to keys k [B, s, K, E] and values v [B, s,
    K, E], of which they see those of mask, bool [B, 1, t, s] -> [B, t, H, E]. The window must be in
    the mask. All scores exist, in float32."""
    spec.check(sinks)
    _, scale, soft_cap = spec.numbers(q.shape[-1])
    groups = q.shape[2] // k.shape[2]
    k = wide(k).repeat_interleave(groups, 2)
    v = wide(v).repeat_interleave(groups, 2)
    scores = torch.einsum("bthe,bshe->bhts", wide(q), k) * scale
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        of_queries = wide(sinks)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, of_queries), -1)
    p = scores.softmax(-1)[..., : k.shape[1]]  # [B, H, t, s]
    return torch.einsum("bhts,bshe->bthe", p, v).to(q.dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    pieces: VarlenMetadata,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """Attention by `spec` of the last queries of some pieces to the keys of these, q [n, H, E], k
    and v [m, K, E], sinks [H] -> output [n, H, E] and log-sum-exp of the scores and the sink,
    float32 [n, H]. By the plain spec it has no gradient, and the pieces have tables."""
    if spec == PLAIN:
        return piece_attention(q, k, v, pieces)
    return forward_operator(q, k, v, sinks, *pieces, *spec.numbers(q.shape[-1]))


def attend_backward(
    grad: Tensor, saved: Saved, sinks: Tensor | None, pieces: VarlenMetadata, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Grad of q, k, v and the sinks of `attend`, in their types; of no sinks, an empty tensor."""
    if spec == PLAIN:
        return *piece_attention_backward(grad, saved, pieces), grad.new_empty(0)
    return backward_operator(grad, *saved, sinks, *pieces, *spec.numbers(saved.q.shape[-1]))


# Operators take no objects: these are the fields of `VarlenMetadata` and of `SpecNumbers`.
PIECES = "Tensor? starts, Tensor? key_starts, SymInt longest, SymInt longest_keys"
RULE = "SymInt window, float scale, float soft_cap"


@torch.library.custom_op(
    "plumbline::ruled_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {PIECES}, {RULE}) -> (Tensor, Tensor)",
)
def forward_operator(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *flat: Any
) -> tuple[Tensor, Tensor]:
    """Compute `attend` by a spec that is not plain."""
    pieces = VarlenMetadata(*flat[:4])
    numbers = SpecNumbers(*flat[4:])
    if not _has_kernel(q, numbers.soft_cap):
        return by_blocks(q, k, v, sinks, _slices(len(q), len(k), pieces), numbers)
    out, lse, *_ = aten._flash_attention_forward(
        q,
        k,
        v,
        *_with_tables(q, pieces),
        0.0,
        not _is_local(numbers, pieces),
        False,
        scale=numbers.scale,
        **_window_of_flash(numbers, pieces),
    )
    lse = lse.t()  # [n, H]
    if sinks is not None:
        share = (lse - sinks.float()).sigmoid()  # what the sink leaves to the keys
        out.mul_(share[..., None])  # in float32, and in place
        lse = torch.logaddexp(lse, sinks.float())
    return out, lse.contiguous()


@torch.library.custom_op(
    "plumbline::ruled_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? sinks, "
    f"{PIECES}, {RULE}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def backward_operator(grad: Tensor, *flat: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `attend_backward` by a spec that is not plain.

    A softmax's gradient needs the probabilities, exp(score - lse), and delta, the rows' sums of
    grad * out (Dao et al., arXiv:2205.14135, appendix B.2). With the sink in lse and its factor in
    out both are right, so the kernels need not know of it.
    """
    saved = Saved(*flat[:5])
    sinks = flat[5]
    pieces = VarlenMetadata(*flat[6:10])
    numbers = SpecNumbers(*flat[10:])
    q, k, v, out, lse = saved
    if _has_kernel(q, numbers.soft_cap):
        no_dropout = (  # its random state
            torch.zeros(2, dtype=torch.uint64, device=q.device),
            torch.empty(0, device=q.device),
        )
        grads = aten._flash_attention_backward(
            grad.contiguous(),
            q,
            k,
            v,
            out,
            lse.t().contiguous(),
            *_with_tables(q, pieces),
            0.0,
            not _is_local(numbers, pieces),
            *no_dropout,
            scale=numbers.scale,
            **_window_of_flash(numbers, pieces),
        )
    else:
        grads = by_blocks_backward(grad, saved, _slices(len(q), len(k), pieces), numbers)
    if sinks is None:
        return *grads, q.new_empty(0)
    compute = lse.dtype
    delta = (grad.to(compute) * out).sum(-1)  # [n, H]
    of_sinks = -((sinks.to(compute) - lse).exp() * delta).sum(0)
    return *grads, of_sinks.to(sinks.dtype)


def _has_kernel(q: Tensor, soft_cap: float) -> bool:
    return fits_varlen(q) and not soft_cap


def _is_local(numbers: SpecNumbers, pieces: VarlenMetadata) -> bool:
    """Return True if the window hides any key."""
    return 0 < numbers.window < pieces.longest_keys


def _window_of_flash(numbers: SpecNumbers, pieces: VarlenMetadata) -> dict[str, int]:
    """FlashAttention counts the keys before a query's own."""
    if not _is_local(numbers, pieces):
        return {}
    return {"window_size_left": numbers.window - 1, "window_size_right": 0}


def _with_tables(q: Tensor, pieces: VarlenMetadata) -> VarlenMetadata:
    if pieces.starts is not None:
        return pieces
    every = torch.arange(0, len(q) + 1, pieces.longest, dtype=torch.int32, device=q.device)
    return pieces._replace(starts=every, key_starts=every)


# In the open --------------------------------------------------------------------------------------

PieceSlices = list[tuple[slice, slice]]  # each piece's queries and keys


def _slices(n: int, m: int, pieces: VarlenMetadata) -> PieceSlices:
    """Return the slices of queries and keys of each piece. Tables on a GPU are copied to the host,
    a sync in every layer."""
    starts, key_starts, longest, _ = pieces
    ends = list(range(0, n + 1, longest)) if starts is None else starts.tolist()
    key_ends = ends if key_starts is None else key_starts.tolist()
    queries = [slice(a, b) for a, b in zip(ends, ends[1:])]
    keys = [slice(a, b) for a, b in zip(key_ends, key_ends[1:])]
    return list(zip(queries, keys, strict=True))


def _blocks(pieces: PieceSlices, window: int, device: torch.device) -> Iterator:
    """Yield the pieces in blocks of queries: (slice of queries, slice of the keys that they see,
    which of these each query does not see, bool [t, s]). So the work is that of the window."""
    for queries, keys in pieces:
        earlier = (keys.stop - keys.start) - (queries.stop - queries.start)
        for first in range(queries.start, queries.stop, BLOCK):
            block = slice(first, min(first + BLOCK, queries.stop))
            # positions in the piece
            begin = block.start - queries.start + earlier
            end = block.stop - queries.start + earlier
            first_key = max(0, begin - window + 1) if window else 0
            of_queries = torch.arange(begin, end, device=device)[:, None]
            of_keys = torch.arange(first_key, end, device=device)
            hidden = of_keys > of_queries
            if window:
                hidden |= of_keys <= of_queries - window
            yield block, slice(keys.start + first_key, keys.start + end), hidden


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Group the queries of all heads that share a key: [t, H, ...] -> [K, G t, ...]."""
    t, H = x.shape[:2]
    by_head = x.transpose(0, 1)  # [H, t, ...]
    return by_head.reshape(heads, H // heads * t, *x.shape[2:])


def _ungrouped(x: Tensor, t: int) -> Tensor:
    """Undo `_grouped`: [K, G t, ...] -> [t, H, ...]."""
    return x.reshape(-1, t, *x.shape[2:]).transpose(0, 1)


def _scores(
    q: Tensor, k: Tensor, hidden: Tensor, numbers: SpecNumbers
) -> tuple[Tensor, Tensor | None]:
    """Compute q [K, G t, E] and k [K, s, E], float -> scores [K, G t, s], -inf where hidden; and,
    with a cap, what they are divided by it, within -1 and 1."""
    scores = torch.bmm(q, k.mT) * numbers.scale
    relative = None
    if numbers.soft_cap:
        relative = (scores / numbers.soft_cap).tanh()
        scores = relative * numbers.soft_cap
    t, s = hidden.shape
    masked = scores.view(-1, t, s).masked_fill(hidden, -math.inf)
    return masked.view(scores.shape), relative


def by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    pieces: PieceSlices,
    numbers: SpecNumbers,
) -> tuple[Tensor, Tensor]:
    """Compute `attend` by plain matmuls in float32 (or float64, if that is the type), on any
    device. At most the scores of BLOCK queries exist at a time."""
    compute = wide_type(q.dtype)
    K = k.shape[1]
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=compute)
    for block, keys, hidden in _blocks(pieces, numbers.window, q.device):
        t = block.stop - block.start
        q_ = _grouped(q[block].to(compute), K)  # [K, G t, E]
        k_ = k[keys].to(compute).transpose(0, 1)  # [K, s, E]
        v_ = v[keys].to(compute).transpose(0, 1)
        scores, _ = _scores(q_, k_, hidden, numbers)
        total = scores.logsumexp(-1)  # [K, G t]
        if sinks is not None:
            of_queries = sinks.to(compute).expand(t, -1)  # [t, H]
            total = torch.logaddexp(total, _grouped(of_queries, K))
        p = (scores - total[..., None]).exp()
        out[block] = _ungrouped(torch.bmm(p, v_), t).to(q.dtype)
        lse[block] = _ungrouped(total, t)
    return out, lse


def by_blocks_backward(
    grad: Tensor, saved: Saved, pieces: PieceSlices, numbers: SpecNumbers
) -> tuple[Tensor, Tensor, Tensor]:
    """Grad of q, k and v in their types."""
    q, k, v, out, lse = saved
    compute = lse.dtype
    K = k.shape[1]
    dq = torch.empty_like(q)
    dk = k.new_zeros(k.shape, dtype=compute)
    dv = v.new_zeros(v.shape, dtype=compute)
    for block, keys, hidden in _blocks(pieces, numbers.window, q.device):
        t = block.stop - block.start
        upstream = grad[block].to(compute)
        delta = _grouped((upstream * out[block]).sum(-1), K)  # [K, G t]
        total = _grouped(lse[block], K)
        q_ = _grouped(q[block].to(compute), K)  # [K, G t, E]
        grad_ = _grouped(upstream, K)
        k_ = k[keys].to(compute).transpose(0, 1)  # [K, s, E]
        v_ = v[keys].to(compute).transpose(0, 1)
        scores, relative = _scores(q_, k_, hidden, numbers)
        p = (scores - total[..., None]).exp()
        ds = p * (torch.bmm(grad_, v_.mT) - delta[..., None])
        if relative is not None:
            ds = ds * (1 - relative.square())  # the derivative of tanh
        dq[block] = _ungrouped(torch.bmm(ds, k_), t) * numbers.scale
        dk[keys] += torch.bmm(ds.mT, q_).transpose(0, 1) * numbers.scale
        dv[keys] += torch.bmm(p.mT, grad_).transpose(0, 1)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


# What autograd and traces must know ---------------------------------------------------------------


@forward_operator.register_fake
def _(q, *_):
    lse_type = wide_type(q.dtype)
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=lse_type)


@backward_operator.register_fake
def _(grad, q, k, v, out, lse, sinks, *_):
    of_sinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), of_sinks


def _keep_for_backward(ctx, inputs, output):
    q, k, v, sinks, starts, key_starts, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, starts, key_starts)


def _backward(ctx, grad, _):
    saved = ctx.saved_tensors  # once: a checkpointed block gives them no second time
    *_, sinks, _, _ = saved
    dq, dk, dv, of_sinks = backward_operator(grad, *saved, *ctx.numbers)
    tables = [None] * (2 + len(ctx.numbers))
    return dq, dk, dv, None if sinks is None else of_sinks, *tables


forward_operator.register_autograd(_backward, setup_context=_keep_for_backward)
