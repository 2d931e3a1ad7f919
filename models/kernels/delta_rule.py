"""The gated delta rule: linear attention whose state forgets, and corrects what it holds for a key.

A head's state S [E, V] maps keys to values. A token lets it decay, and moves what it returns for the
token's key towards the token's value (Yang et al., arXiv:2412.06464, equation 10; the state is
transposed there):

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        out_t = S_t^T q_t

With a g for each channel of the key, exp(g_t) is diagonal and stands at the right of the bracket: Kimi
Delta Attention (arXiv:2510.26692, equation 1). `recurrent` is this loop, the reference of the tests.
`chunked` computes the same by matmuls: within a chunk of C tokens

    S_t = decay(0, t) S_0 + sum over j <= t of decay(j, t) k_j u_j^T

holds with "pseudo-values" u that a triangular system gives (Yang et al., arXiv:2406.06484, section
3.2: the UT transform), so that a chunk is an affine map of the state: S_C = A S_0 + b.

decay(j, t) is the exponential of a sum of g over the tokens after j up to t. It is always summed up,
never taken as a difference of two sums from the chunk's start: that would lose all digits behind a g
of -10,000, and turn -inf into NaN. So `first`, a document's first tokens, is a g of -inf there.

Shapes:  B batch   T sequence   K key heads   H value heads, a multiple of K   E width of a key
         V width of a value   N chunks of C tokens   S tokens of a span
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.kernels.precision import wide, wide_type

CHUNK = 64  # tokens whose pairwise decays exist, as in flash-linear-attention
SPAN = 8  # chunks that are computed at a time; the state between spans is kept for backward
BLOCK = 16  # tokens of a chunk whose decays of each channel exist pairwise, as in arXiv:2312.06635


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    first: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `chunked` token by token, as it is defined: the reference."""
    S = state_before(k, v) if state is None else state
    q, k, v, g, beta = _all_wide(q, k, v, g, beta, first)
    out = []
    for t in range(k.shape[1]):
        S = S * g[:, t].exp()[..., None]  # [B, H, E, V]
        error = v[:, t] - torch.einsum("bhe,bhev->bhv", k[:, t], S)
        S = S + torch.einsum("bhe,bhv->bhev", k[:, t], beta[:, t] * error)
        out.append(torch.einsum("bhe,bhev->bhv", q[:, t], S))
    return torch.stack(out, 1), S


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    first: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to all tokens.

    q and k [B, T, K, E], normalised and scaled already, v [B, T, H, V]: each key head serves H / K
    value heads in turn. g <= 0, the logarithm of the decay, [B, T, H], or [B, T, H, E] for each
    channel; beta [B, T, H]. first: tokens before which the state becomes 0, bool [B, T]. state: the one
    before these tokens, [B, H, E, V], of float32 (float64 where q is); None: 0.

    Returns out [B, T, H, V] in the type of v, and the state after the last token. Backward keeps the
    inputs and one state for each SPAN of chunks; neither T x T numbers nor a state for each token
    ever exist.
    """
    _check(k, v, g, chunk)
    if state is None:
        state = state_before(k, v)
    out, after, _ = forward_operator(q, k, v, g, beta, first, state, chunk)
    return out, after


def from_any_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    first: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `chunked` for a state S before these tokens that is not known yet: they leave A S + b, and
    read `reads` S + out.

    Returns A [B, H, E, E], b [B, H, E, V], reads [B, T, H, E] and out [B, T, H, V], all in float32 or
    float64. It is `chunked` with E more columns of the state, those of I, for which values are 0.
    """
    _check(k, v, g, chunk)
    E = k.shape[-1]
    nothing = state_before(k, v)
    identity = torch.eye(E, dtype=nothing.dtype, device=k.device).expand(*nothing.shape[:2], E, E)
    both = torch.cat((identity, nothing), -1)  # [B, H, E, E + V]
    out, after, _ = forward_operator(q, k, v, g, beta, first, both, chunk)
    widths = (E, v.shape[-1])
    return *after.split(widths, -1), *out.split(widths, -1)


def state_before(k: Tensor, v: Tensor) -> Tensor:
    """Return the state before a sequence, 0: [B, H, E, V] in the wide type."""
    return k.new_zeros(len(k), v.shape[2], k.shape[3], v.shape[3], dtype=wide_type(k.dtype))


def chunked_flops(tokens: int, H: int, E: int, V: int, chunk: int = CHUNK) -> int:
    """Count the matmuls that `chunked` computes for these tokens, forward, with decays of heads. The
    triangular system counts half of a matmul."""
    pairs = 4 * chunk * E + chunk * (E + V) + 2 * chunk * V
    of_state = 2 * E * E + 2 * E * V + 4 * E * V  # A, b; what u and the queries read
    scan = 2 * E * E * V // chunk
    return tokens * H * (pairs + of_state + scan)


def _check(k: Tensor, v: Tensor, g: Tensor, chunk: int) -> None:
    if v.shape[2] % k.shape[2]:
        raise ValueError(
            f"{v.shape[2]} value heads cannot share {k.shape[2]} key heads: each key head serves as "
            "many value heads"
        )
    if g.shape[:3] != v.shape[:3]:
        raise ValueError(f"decays {list(g.shape)} do not fit values {list(v.shape)}")
    if chunk < 1:
        raise ValueError(f"a chunk of {chunk} tokens: it needs at least one")


def _all_wide(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first: Tensor | None
) -> list[Tensor]:
    """Return all in the wide type: q and k [B, T, H, E], v [B, T, H, V], g [B, T, H, 1 or E], with the
    decay to 0 of a document's first token, and beta [B, T, H, 1]."""
    of_key_head = v.shape[2] // k.shape[2]
    if g.ndim == 3:
        g = g[..., None]
    if first is not None:
        g = g.masked_fill(first[..., None, None], -torch.inf)
    q = wide(q).repeat_interleave(of_key_head, 2)
    k = wide(k).repeat_interleave(of_key_head, 2)
    return [q, k, wide(v), wide(g), wide(beta)[..., None]]


# A span -------------------------------------------------------------------------------------------


def _span(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    first: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Compute `chunked` for a few chunks: out [B, S, H, V] and the state after them. The state, and
    with it out, may have more columns than v: v is 0 in the first ones."""
    S = k.shape[1]
    C = min(chunk, S)
    inputs = [_in_chunks(x, C) for x in _all_wide(q, k, v, g, beta, first)]
    q, k, v, g, beta = inputs  # [B, H, N, C, ...]
    since_start = g.cumsum(-2).exp()  # decay from before the chunk to each token, [.., C, 1 or E]
    k_old = k * since_start
    k_new = k * _until_end(g)
    system = beta * _decayed_products(k, k, g, -1)  # [.., C, C], below the diagonal
    right = beta * torch.cat((v, k_old), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    # pseudo-values u = own - of_state S_0
    own, of_state = solved.split((v.shape[-1], k.shape[-1]), -1)
    columns = (state.shape[-1] - v.shape[-1], 0)  # before those of v
    A = (since_start[..., -1, :, None] * _identity(k)) - k_new.mT @ of_state  # [.., E, E]
    b = F.pad(k_new.mT @ own, columns)  # [.., E, V]
    before = []
    for n in range(k.shape[2]):
        before.append(state)
        state = A[:, :, n] @ state + b[:, :, n]
    states = torch.stack(before, 2)  # before each chunk, [B, H, N, E, V]
    u = F.pad(own, columns) - of_state @ states
    out = (q * since_start) @ states + _decayed_products(q, k, g, 0) @ u  # [B, H, N, C, V]
    return out.flatten(2, 3).transpose(1, 2)[:, :S], state


def _in_chunks(x: Tensor, C: int) -> Tensor:
    """[B, S, H, ...] -> [B, H, N, C, ...]. Zeros fill the last chunk: they leave the state alone."""
    missing = -x.shape[1] % C
    if missing:
        x = F.pad(x, (0, 0, 0, 0, 0, missing))
    return x.transpose(1, 2).unflatten(2, (-1, C))


def _identity(k: Tensor) -> Tensor:
    return torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)


def _until_end(g: Tensor) -> Tensor:
    """Return the decay from each token to the last one, of g [.., C, 1 or E]."""
    later = F.pad(g[..., 1:, :], (0, 0, 0, 1))
    return later.flip(-2).cumsum(-2).flip(-2).exp()


def _pairwise(g: Tensor) -> Tensor:
    """Return decay(j, i) at [.., i, j, :], and 0 where j > i, of g [.., C, 1 or E]."""
    C = g.shape[-2]
    is_later = torch.ones(C, C, dtype=torch.bool, device=g.device).triu(1)  # [i, j]: j > i
    # at [l, j] what token l adds to the sum after j
    added = g[..., :, None, :].masked_fill(is_later.mT.logical_not()[..., None], 0.0)
    return added.cumsum(-3).masked_fill(is_later[..., None], -torch.inf).exp()


def _decayed_products(a: Tensor, k: Tensor, g: Tensor, diagonal: int) -> Tensor:
    """Return sum over e of a_ie decay_e(j, i) k_je at [.., i, j] for j <= i + diagonal, else 0.

    With a decay for each channel the matmul has it in its factors: from j to the start of i's block,
    and from there to i. Both are at most 1, so none overflows (Yang et al., arXiv:2312.06635, section
    4.3). Only within a block it is C x C x E.
    """
    if g.shape[-1] == 1:
        products = (a @ k.mT) * _pairwise(g)[..., 0]
        return products.tril(diagonal)
    rows = []
    C = k.shape[-2]
    for start in range(0, C, BLOCK):
        own = slice(start, min(start + BLOCK, C))
        within = torch.einsum(
            "...ie,...je,...ije->...ij", a[..., own, :], k[..., own, :], _pairwise(g[..., own, :])
        )
        from_start = g[..., own, :].cumsum(-2).exp()
        to_start = _until_end(g[..., :start, :])
        earlier = (a[..., own, :] * from_start) @ (k[..., :start, :] * to_start).mT
        rows.append(F.pad(torch.cat((earlier, within), -1), (0, C - own.stop)))
    return torch.cat(rows, -2).tril(diagonal)


def _new_out(v: Tensor, state: Tensor) -> Tensor:
    columns = state.shape[-1]
    return v.new_empty(
        *v.shape[:3], columns, dtype=v.dtype if columns == v.shape[-1] else state.dtype
    )


def _spans(T: int, chunk: int) -> list[slice]:
    size = SPAN * chunk
    return [slice(start, start + size) for start in range(0, T, size)]


# The operator -------------------------------------------------------------------------------------

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? first"


@torch.library.custom_op(
    "plumbline::delta_rule",
    mutates_args=(),
    schema=f"({INPUTS}, Tensor state, SymInt chunk) -> (Tensor, Tensor, Tensor)",
)
def forward_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    first: Tensor | None,
    state: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out [B, T, H, V], the state after all tokens, and those before each span. Where the state
    has more columns than v, so has out, in the type of the state (`from_any_state`)."""
    out = _new_out(v, state)
    spans = _spans(k.shape[1], chunk)
    before = state.new_empty(len(spans), *state.shape)
    for n, span in enumerate(spans):
        before[n] = state
        tokens = [x[:, span] for x in (q, k, v, g, beta)]
        of_documents = None if first is None else first[:, span]
        out[:, span], state = _span(*tokens, state, of_documents, chunk)
    return out, state.clone(), before


@torch.library.custom_op(
    "plumbline::delta_rule_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor grad_state, {INPUTS}, Tensor states, SymInt chunk) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def backward_operator(
    grad: Tensor,
    grad_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    first: Tensor | None,
    states: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, g, beta and the state. From the last span to the first each is
    computed again from the state before it, and differentiated by torch.func."""
    inputs = [q, k, v, g, beta]
    grads = [torch.empty_like(x) for x in inputs]
    spans = _spans(k.shape[1], chunk)
    for n, span in reversed(list(enumerate(spans))):
        of_documents = None if first is None else first[:, span]

        def again(*tensors: Tensor, of_documents: Tensor | None = of_documents) -> Any:
            return _span(*tensors, of_documents, chunk)

        tokens = [x[:, span] for x in inputs]
        _, pull_back = torch.func.vjp(again, *tokens, states[n])
        *of_tokens, grad_state = pull_back((grad[:, span].to(states.dtype), grad_state))
        for whole, of_span in zip(grads, of_tokens):
            whole[:, span] = of_span
    return *grads, grad_state.clone()


@forward_operator.register_fake
def _(q, k, v, g, beta, first, state, chunk):
    out = _new_out(v, state)
    spans = -(-k.shape[1] // (SPAN * chunk))
    return out, torch.empty_like(state), state.new_empty(spans, *state.shape)


@backward_operator.register_fake
def _(grad, grad_state, q, k, v, g, beta, first, states, chunk):
    return tuple(torch.empty_like(x) for x in (q, k, v, g, beta, grad_state))


def _keep_for_backward(ctx, inputs, output):
    q, k, v, g, beta, first, _, ctx.chunk = inputs
    ctx.save_for_backward(q, k, v, g, beta, first, output[2])


def _backward(ctx, grad, grad_state, _):
    *inputs, states = ctx.saved_tensors  # once: a checkpointed block gives them no second time
    *of_inputs, of_state = backward_operator(grad, grad_state, *inputs, states, ctx.chunk)
    return *of_inputs, None, of_state, None


forward_operator.register_autograd(_backward, setup_context=_keep_for_backward)
