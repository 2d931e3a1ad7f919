"""Attention that stays inside the documents of a packed window (`data.mask_documents`).

You can skip this file. `document_attention` computes what `causal_attention` would compute on each
document alone. On a GPU it is one call of PyTorch's `varlen_attn`; on a CPU,
models/kernels/cpu/document_attention.py.

`piece_attention` is for context parallelism, where a rank may have only the last queries of a
document, and all its keys.

Shapes:  B batch   T sequence   N documents of a microbatch   H query heads   K key/value heads   E head_dim
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from models.kernels.cpu import document_attention as cpu


@dataclass(frozen=True)
class Documents:
    """The documents that are packed into a microbatch, for attention that stays inside them.

    It is made once per microbatch, on the host, where the batch comes from: neither N nor
    `longest` must be asked of a GPU. The positions of the tokens are a separate input of the model,
    because a part of a sequence has only its local positions but needs the table of all documents.
    """

    # int32 [N + 1]: where each document begins among the B*T tokens, and B*T; no document spans two
    # rows
    starts: Tensor
    longest: int  # tokens of the longest document
    # int64 [B, T]: positions within documents; where cores need them (models/cores.py::documents_of)
    within: Tensor | None = None

    @classmethod
    def of(cls, positions: Tensor, device: torch.device) -> "Documents":
        """Build it from the batch's positions, int64 [B, T] on the CPU: 0 at every document's first
        token and at each row's."""
        first = (positions.flatten() == 0).nonzero().flatten()
        starts = F.pad(first, (0, 1), value=positions.numel()).int()
        longest = int(starts.diff().max())
        if device.type == "cuda":
            starts = starts.pin_memory()  # a copy from pageable memory would wait for the GPU
        return cls(starts.to(device, non_blocking=True), longest)


# torch 2.11 has no such parameter: there grouped heads are taken unasked.
VARLEN_GQA = {"enable_gqa": True} if "enable_gqa" in varlen_attn.__kwdefaults__ else {}


def fits_varlen(x: Tensor) -> bool:
    """Return True if `varlen_attn` takes such queries [..., E]: its kernel is FlashAttention-2
    (Dao, arXiv:2307.08691), written for CUDA, 16-bit types, and heads of 8, 16, ... 256 numbers."""
    return kernel_exists(x.device, x.dtype, x.shape[-1])


def kernel_exists(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Return the answer of `fits_varlen` before there are queries; width: the numbers of a head."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        and width <= 256
    )


def one_by_one(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Compute the same as `varlen_attn`, on any device in any type. Slow: it syncs host and GPU in
    every layer, and torch.compile does not take it (`configs/check.py` refuses it)."""
    is_grouped = q.shape[1] != k.shape[1]
    pieces = []
    for one in cpu.slices(starts):
        heads = cpu.heads_first(one, q, k, v)
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=is_grouped)
        pieces.append(out[0])
    return torch.cat(pieces, dim=1).transpose(0, 1)


def document_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Causal attention that does not cross documents: q [B, T, H, E], k, v [B, T, K, E] -> [B, T,
    H, E].

    A T x T mask never exists, and the work is that of the documents, not of the window. On CUDA in
    16-bit types one call of PyTorch's variable-length FlashAttention; on CPU a loop over its CPU
    kernel; what remains (float32 on CUDA, for comparisons) is a loop in the open.
    """
    shape = q.shape
    starts = documents.starts
    longest = documents.longest
    # [B*T, heads, E]
    q = q.flatten(0, 1)
    k = k.flatten(0, 1)
    v = v.flatten(0, 1)
    if fits_varlen(q):
        out = varlen_attn(
            q, k, v, starts, starts, longest, longest, window_size=(-1, 0), **VARLEN_GQA
        )
    elif q.device.type == "cpu":
        out, _ = cpu.document_attention(q, k, v, starts)
    else:
        out = one_by_one(q, k, v, starts)
    return out.view(shape)


class VarlenMetadata(NamedTuple):
    """The pieces of sequences whose attention is computed. The tokens of one piece come after another,
    and so do its keys. A piece has at least as many keys as queries, and its last query is at the
    position of its last key."""

    # int32 [pieces + 1]: where each piece's queries begin, and their number n; None: all pieces have
    # `longest` queries and as many keys
    starts: Tensor | None
    key_starts: Tensor | None  # int32 [pieces + 1]: where its keys begin, and their number m
    longest: int  # the most queries of a piece
    longest_keys: int  # the most keys of a piece


class Saved(NamedTuple):
    """Tensors of a forward that its backward needs: its inputs, and what it returned."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def piece_attention(
    q: Tensor, k: Tensor, v: Tensor, pieces: VarlenMetadata
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last queries of some documents, q [n, H, E], to all keys of these up
    to there, k and v [m, K, E]. The pieces have tables.

    Returns the output [n, H, E] and the log-sum-exp, float32 [n, H], for
    `piece_attention_backward`: autograd does not see the kernels. On CUDA they are
    FlashAttention-2's, which aligns queries and keys in this way (`fits_varlen` must hold).
    """
    if q.device.type == "cpu":
        return cpu.pieces(q, k, v, pieces.starts, pieces.key_starts)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *pieces, 0.0, True, False)
    return out, lse.t().contiguous()


def piece_attention_backward(
    grad: Tensor, saved: Saved, pieces: VarlenMetadata
) -> tuple[Tensor, Tensor, Tensor]:
    """Grad of q, k, v of `piece_attention`, from the grad of its output."""
    if grad.device.type == "cpu":
        return cpu.pieces_backward(grad, *saved, pieces.starts, pieces.key_starts)
    # its random state
    no_dropout = (
        torch.zeros(2, dtype=torch.uint64, device=grad.device),
        torch.empty(0, device=grad.device),
    )
    *tensors, lse = saved
    lse = lse.t().contiguous()
    return torch.ops.aten._flash_attention_backward(
        grad, *tensors, lse, *pieces, 0.0, True, *no_dropout
    )
