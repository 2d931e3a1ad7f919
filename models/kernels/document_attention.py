"""Attention that stays inside the documents of a packed window (`data.mask_documents`).

You can skip this file. `document_attention` computes what `causal_attention` would compute on each
document alone. On a GPU it is one call of PyTorch's `varlen_attn`. Most of the file is the same for
a CPU, where PyTorch has no such kernel: a loop over the documents, wrapped into one operator so
that autograd, torch.compile and checkpointing see a single call.

`piece_attention` is for context parallelism, where a rank may have only the last queries of a
document, and all its keys.

Shapes:  B batch   T sequence   N documents of a microbatch   H query heads   K key/value heads   E head_dim
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from models.kernels.causal_attention import cpu_causal_attention_backward

# tokens of a document from which on products take 0.3 to 1 of the kernel's time; at 64 they take 1
# to 4 times of it
LONG = 256


@dataclass(frozen=True)
class Documents:
    """The documents that are packed into a microbatch, for attention that stays inside them.

    It is made once per microbatch, on the host, where the batch comes from: neither N nor
    `longest` must be asked of a GPU. The positions of the tokens are a separate input of the model,
    because a part of a sequence has positions of its own but needs the table of all documents.
    """

    # int32 [N + 1]: where each document begins among the B*T tokens, and B*T; no document spans two
    # rows
    starts: Tensor
    longest: int  # tokens of the longest document

    @classmethod
    def of(cls, positions: Tensor, device: torch.device) -> "Documents":
        """From the batch's positions, int64 [B, T] on the CPU: 0 at every document's first token
        and at each row's."""
        first = (positions.flatten() == 0).nonzero().flatten()
        starts = F.pad(first, (0, 1), value=positions.numel()).int()
        longest = int(starts.diff().max())
        if device.type == "cuda":
            starts = starts.pin_memory()  # a copy from pageable memory would wait for the GPU
        return cls(starts.to(device, non_blocking=True), longest)


def _cpu_pieces(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor
) -> tuple[Tensor, Tensor]:
    """What `piece_attention` says, by PyTorch's CPU kernel, piece by piece."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for one, keys in zip(_slices(starts), _slices(key_starts)):
        o, s = _attend(*_heads_first(one, q), *_heads_first(keys, k, v))
        out[one], lse[one] = o[0].transpose(0, 1), s[0].transpose(0, 1)
    return out, lse


def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of n queries [1, H, n, E] that are the last of m positions to the keys of all [1,
    K, m, E], and its log-sum-exp [1, H, n]. The kernel masks equally many queries and keys only, so
    earlier keys are a call of their own, and the two results are merged (Dao, arXiv:2307.08691,
    section 2.3.1)."""
    kernel, earlier = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        k.shape[2] - q.shape[2],
    )
    out, lse = kernel(q, k[:, :, earlier:], v[:, :, earlier:], 0.0, True)
    if not earlier:
        return out, lse
    out_earlier, lse_earlier = kernel(q, k[:, :, :earlier], v[:, :, :earlier], 0.0, False)
    whole = torch.logaddexp(lse, lse_earlier)
    return out * (lse - whole).exp()[..., None] + out_earlier * (lse_earlier - whole).exp()[
        ..., None
    ], whole


def _cpu_pieces_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    key_starts: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Grad of q, k, v in their types. Short documents in float32: PyTorch's bfloat16 kernel takes 5
    times as long on those of 30 to 100 tokens, and about as long on those of 1,000 (AVX512-BF16,
    torch 2.13); long ones in bfloat16 by products, if all their queries are here."""
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    given = grad, q, k, v, out
    wide = [x.float() for x in given]
    for one, keys in zip(_slices(starts), _slices(key_starts)):
        s, length = lse[one].transpose(0, 1)[None], one.stop - one.start
        is_whole = keys.stop - keys.start == length
        backward, inputs = _attend_backward, wide
        if q.dtype == torch.bfloat16 and is_whole and length >= LONG:
            backward, inputs = cpu_causal_attention_backward, given
        grad_, q_, k_, v_, out_ = inputs
        pieces = backward(
            *_heads_first(one, grad_, q_), *_heads_first(keys, k_, v_), *_heads_first(one, out_), s
        )
        for whole, place, piece in zip(grads, (one, keys, keys), pieces):
            whole[place] = piece[0].transpose(0, 1)
    return grads


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Grad of q, k, v of `_attend`. With the merged out and lse each of its two calls has its part
    of the gradient."""
    kernel, earlier = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
        k.shape[2] - q.shape[2],
    )
    dq, dk, dv = kernel(grad, q, k[:, :, earlier:], v[:, :, earlier:], out, lse, 0.0, True)
    if not earlier:
        return dq, dk, dv
    more, dk_earlier, dv_earlier = kernel(
        grad, q, k[:, :, :earlier], v[:, :, :earlier], out, lse, 0.0, False
    )
    return dq + more, torch.cat((dk_earlier, dk), 2), torch.cat((dv_earlier, dv), 2)


@torch.library.custom_op("plumbline::document_attention", mutates_args=())
def cpu_document_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Causal attention within each document on CPU: q [B*T, H, E], k, v [B*T, K, E], starts int32
    [N + 1] -> output [B*T, H, E] and log-sum-exp, float32 [B*T, H], which backward needs.

    PyTorch's own CPU kernel, document by document, as one operator: the loop is hidden from
    autograd (which would record and concatenate N pieces), from torch.compile (which would unroll
    it and compile anew for each batch) and from selective checkpointing (which keeps one result).
    """
    return _cpu_pieces(q, k, v, starts, starts)


@torch.library.custom_op("plumbline::document_attention_backward", mutates_args=())
def _cpu_document_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Grad of q, k, v in their types."""
    return _cpu_pieces_backward(grad, q, k, v, out, lse, starts, starts)


def _slices(starts: Tensor) -> list[slice]:
    ends = starts.tolist()
    return [slice(a, b) for a, b in zip(ends, ends[1:])]


def _heads_first(one: slice, *tensors: Tensor) -> list[Tensor]:
    """One document of each [B*T, heads, E], as the kernels want it: [1, heads, length, E]; a view."""
    return [x[one].transpose(0, 1)[None] for x in tensors]


@cpu_document_attention.register_fake
def _(q, k, v, starts):
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


@_cpu_document_attention_backward.register_fake
def _(grad, q, k, v, out, lse, starts):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep_for_backward(ctx, inputs, output):
    q, k, v, starts = inputs
    ctx.save_for_backward(q, k, v, *output, starts)


def _backward(ctx, grad, _):
    return *_cpu_document_attention_backward(grad, *ctx.saved_tensors), None


cpu_document_attention.register_autograd(_backward, setup_context=_keep_for_backward)


# torch 2.11 has no such parameter: there grouped heads are taken unasked.
VARLEN_GQA = {"enable_gqa": True} if "enable_gqa" in varlen_attn.__kwdefaults__ else {}


def fits_varlen(x: Tensor) -> bool:
    """Whether `varlen_attn` takes such queries [..., E]: its kernel is FlashAttention-2 (Dao,
    arXiv:2307.08691), written for CUDA, 16-bit types, and heads of 8, 16, ... 256 numbers."""
    return kernel_exists(x.device, x.dtype, x.shape[-1])


def kernel_exists(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """The same before there are queries; width: the numbers of a head."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        and width <= 256
    )


def one_by_one(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """What `varlen_attn` computes, on any device in any type: as slow as it looks, it waits for the
    GPU in every layer, and torch.compile does not take it (`configs/check.py` refuses it)."""
    how = {"is_causal": True, "enable_gqa": q.shape[1] != k.shape[1]}
    pieces = [
        F.scaled_dot_product_attention(*_heads_first(one, q, k, v), **how)[0]
        for one in _slices(starts)
    ]
    return torch.cat(pieces, dim=1).transpose(0, 1)


def document_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Causal attention that does not cross documents: q [B, T, H, E], k, v [B, T, K, E] -> [B, T,
    H, E].

    A T x T mask never exists, and the work is that of the documents, not of the window. On CUDA in
    16-bit types one call of PyTorch's variable-length FlashAttention; on CPU a loop over its CPU
    kernel; what remains (float32 on CUDA, for comparisons) is a loop in the open.
    """
    shape, starts, longest = q.shape, documents.starts, documents.longest
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # [B*T, heads, E]
    if fits_varlen(q):
        out = varlen_attn(
            q, k, v, starts, starts, longest, longest, window_size=(-1, 0), **VARLEN_GQA
        )
    elif q.device.type == "cpu":
        out, _ = cpu_document_attention(q, k, v, starts)
    else:
        out = one_by_one(q, k, v, starts)
    return out.view(shape)


def piece_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_keys: int,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last queries of some documents to all keys of these up to there.

    q [n, H, E] has the queries of one piece after another, k and v [m, K, E] the keys and values of
    one piece after another; starts and key_starts, int32 [pieces + 1], say where each begins. A
    piece has at least as many keys as queries, and its last query is at the position of its last
    key. longest, longest_keys: the most of a piece.

    Returns the output [n, H, E] and the log-sum-exp, float32 [n, H], for
    `piece_attention_backward`: autograd does not see the kernels. On CUDA they are
    FlashAttention-2's, which aligns queries and keys in this way (`fits_varlen` must hold).
    """
    if q.device.type == "cpu":
        return _cpu_pieces(q, k, v, starts, key_starts)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, key_starts, longest, longest_keys, 0.0, True, False
    )
    return out, lse.t().contiguous()


def piece_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_keys: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Grad of q, k, v of `piece_attention`, from the grad of its output and from what it returned."""
    if q.device.type == "cpu":
        return _cpu_pieces_backward(grad, q, k, v, out, lse, starts, key_starts)
    # its random state
    no_dropout = (
        torch.zeros(2, dtype=torch.uint64, device=q.device),
        torch.empty(0, device=q.device),
    )
    return torch.ops.aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse.t().contiguous(),
        starts,
        key_starts,
        longest,
        longest_keys,
        0.0,
        True,
        *no_dropout,
    )
