"""Context parallelism: the ranks of a cp group share every sequence, and each has an equal part of
its tokens.

All of a model works on single tokens but its cores, so only these are replaced (models/cores.py);
cp_state.py has those that are not attention. For attention (`models/layers.py::AttentionCore`) there
are two methods (`parallelism.context_parallel_method`):

gather: a rank computes its own queries, and gathers the keys and values of all ranks for them
    (Llama 3, arXiv:2407.21783, section 3.3.2). It works for any number of heads. Backward gathers
    them again, so that no rank keeps them meanwhile, and sends every rank the gradient of its keys
    and values. A rank's tokens are two parts of the sequence
    (`parallelisms/mesh.py::Mesh.token_ranges`).
ulysses: an all-to-all gives each rank all tokens for some of the heads, and a second one swaps back
    (DeepSpeed-Ulysses, arXiv:2309.14509). In between, attention is that of one process. There must
    be a key/value head for every rank.

Either way every layer keeps its own spec (`models/layers.py::AttentionCore`). docs/parallelism.md
compares them.

Shapes:  b sequences of a microbatch   T their length   t = T / cp, the tokens of a rank in each   n = b t
         H query heads   K key/value heads   (under tensor parallelism: this rank's)
         E head_dim   V width of a value, E at most
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.distributed_c10d import _resolve_process_group

from configs.schema import Config, InputError
from models.cores import ATTENTION, CONVOLUTION, STATE, of_kind
from models.kernels import ruled_attention
from models.kernels.document_attention import Saved, VarlenMetadata, kernel_exists
from models.kernels.precision import wide_type
from models.kernels.ruled_attention import AttentionSpec
from parallelisms import cp_state, delta_kernel
from parallelisms.cores import CoreOfRanks, places, put
from parallelisms.mesh import Mesh


def apply(model: nn.Module, mesh: Mesh, cfg: Config) -> nn.Module:
    """Replace every core by one that the ranks share, in place; without such ranks, those that a
    kernel computes (delta_kernel.py)."""
    if mesh.cp == 1:
        return delta_kernel.apply(model, mesh, cfg)
    cores = model.cores()
    attention = of_kind(cores, ATTENTION)
    others = of_kind(cores, STATE, CONVOLUTION)
    if mesh.zigzag:
        shape = cfg.training.local_batch_size, cfg.training.seq_len
        shared: list[nn.Module] = gathering(attention, mesh, shape)
    else:
        shared = [Ulysses(core, mesh.device_mesh.get_group("cp")) for core in attention]
    shared += [cp_state.shared(core, mesh) for core in others]
    put(places(model, [*attention, *others]), shared)
    return model


def gathering(cores: list[Any], mesh: Mesh, shape: tuple[int, int]) -> list[nn.Module]:
    """Return the cores that replace these ones. shape: sequences of a microbatch, and tokens of
    each. Cores of one window share their tables."""
    b, T = shape
    tables = {}
    for window in {window_of(core.spec, T) for core in cores}:
        tables[window] = GatheredPieces.of(torch.arange(T).expand(b, -1), mesh.device, mesh, window)
    return [GatheredKV(core, mesh, tables[window_of(core.spec, T)], shape) for core in cores]


def window_of(spec: AttentionSpec, T: int) -> int:
    """Return the window of a spec in sequences of T tokens; 0: it hides nothing."""
    return 0 if spec.window is None or spec.window >= T else spec.window


def check_kernel(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """Raise InputError if "gather" cannot run on this device in this type with heads of `width`
    numbers. `tools/check.py` calls this before anything is launched."""
    if device.type == "cuda" and not kernel_exists(device, dtype, width):
        raise InputError(
            'parallelism.context_parallel_method = "gather" needs on a GPU a 16-bit type and '
            "heads of 8, 16, ... 256 "
            f"numbers, but the type is {str(dtype).removeprefix('torch.')} and a head has "
            f'{width}: use "ulysses", or '
            "change one of the two"
        )


# Keys and values gathered -------------------------------------------------------------------------


@dataclass(frozen=True)
class GatheredPieces:
    """The documents of a microbatch as one rank needs them: a piece is what it has of a document
    in one of its parts of a sequence. The keys that a piece needs are those from the beginning of
    its document, or of its first query's window, to its own end."""

    # int32 [m]: where each piece's keys are among the gathered ones, piece after piece
    keys: Tensor
    pieces: VarlenMetadata

    @classmethod
    def of(
        cls, positions: Tensor, device: torch.device, mesh: Mesh, window: int = 0
    ) -> "GatheredPieces":
        """Build it from the positions of whole sequences within their documents, int64 [b, T] on
        the CPU: 0 at every document's first token and at each sequence's. Without documents, the
        whole sequence is one. window: the keys that a query sees; 0: all of its document."""
        b, T = positions.shape
        token_ranges = mesh.token_ranges(T)
        # [b, parts, t / parts]
        here = torch.stack([torch.arange(part.start, part.stop) for part in token_ranges]).expand(
            b, -1, -1
        )
        within = positions.gather(1, here.flatten(1)).view(here.shape)
        begins = within == 0
        begins[..., 0] = True  # a part begins a piece, if not a document
        first = begins.flatten().nonzero().flatten()  # [pieces]
        ends = torch.cat((first[1:], torch.tensor([within.numel()])))
        earlier = within.flatten()[first]  # keys before a piece's first token
        if window:
            earlier = earlier.clamp(max=window - 1)
        lengths, counts = ends - first, ends - first + earlier
        starts, key_starts = (nn.functional.pad(x.cumsum(0), (1, 0)) for x in (lengths, counts))
        # The keys of a piece are contiguous in their sequence.
        row = (first // here[0].numel()).repeat_interleave(counts)  # [m]
        begin = (here.flatten()[first] - earlier - key_starts[:-1]).repeat_interleave(counts)
        keys = _gathered_index(row, begin + torch.arange(len(begin)), T, b, mesh.cp)
        tables = [x.int() for x in (keys, starts, key_starts)]
        if device.type == "cuda":
            # a copy from pageable memory would wait for the GPU
            tables = [x.pin_memory() for x in tables]
        keys, starts, key_starts = [x.to(device, non_blocking=True) for x in tables]
        pieces = VarlenMetadata(starts, key_starts, int(lengths.max()), int(counts.max()))
        return cls(keys, pieces)


def _gathered_index(row: Tensor, position: Tensor, T: int, b: int, cp: int) -> Tensor:
    """Return the index of a token in the concatenation of the ranks' tokens [b, 2, T / 2 cp]: rank
    r has parts r and 2 cp - 1 - r."""
    length = T // (2 * cp)
    part, offset = position // length, position % length
    rank = torch.minimum(part, 2 * cp - 1 - part)
    return ((rank * b + row) * 2 + (part >= cp)) * length + offset


@dataclass(frozen=True)
class GatheredDocuments:
    """The documents of a microbatch, for cores of several windows."""

    by_window: dict[int, GatheredPieces]
    within: Tensor | None = None  # as of models/kernels/document_attention.py::Documents


class GatheredKV(CoreOfRanks):
    """Attention of this rank's queries to the keys and values of all ranks."""

    supports_spec = True

    def __init__(
        self, core: Any, mesh: Mesh, whole_windows: GatheredPieces, shape: tuple[int, int]
    ):
        """whole_windows: for microbatches without documents, which must have this shape: sequences,
        and tokens of each on all ranks."""
        super().__init__(core)
        b, T = shape
        self.mesh = mesh
        self.group = mesh.device_mesh.get_group("cp").group_name
        self.whole_windows = whole_windows
        self.shape = b, T // mesh.cp
        self.window = window_of(core.spec, T)
        self.numbers = self.window, core.spec.scale, core.spec.soft_cap

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: GatheredDocuments | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute `models/layers.py::AttentionCore` for this rank's tokens."""
        if documents is None and q.shape[:2] != self.shape:
            given = tuple(q.shape[:2])
            raise ValueError(
                f"attention to gathered keys was prepared for {self.shape} sequences and tokens, "
                f"not {given}"
            )
        self.spec.check(sinks)
        gathered = self.whole_windows
        if documents is not None:
            gathered = documents.by_window[self.window]
        out, _ = gathered_attention(
            q, k, v, sinks, gathered.keys, self.group, *gathered.pieces, *self.numbers
        )
        return out

    @classmethod
    def documents(
        cls, cores: list[Any], positions: Tensor, device: torch.device
    ) -> GatheredDocuments:
        """Return the pieces for each window of these cores."""
        mesh = cores[0].mesh
        windows = {window_of(core.spec, positions.shape[1]) for core in cores}
        return GatheredDocuments(
            {window: GatheredPieces.of(positions, device, mesh, window) for window in windows}
        )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    gathered: GatheredPieces,
    group: str,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """Compute this rank's part of attention: q [b, t, H, E], k [b, t, K, E] and v [b, t, K, V] ->
    attention [b, t, H, V] to the keys of all ranks of the group, and its log-sum-exp, float32 [n,
    H]. sinks [H]: this rank's. Raises InputError where `check_kernel` does."""
    check_kernel(q.device, q.dtype, q.shape[-1])
    all_k, all_v = _gather(k, v, gathered.keys, group)
    out, lse = ruled_attention.attend(
        q.flatten(0, 1), all_k, _as_wide(q, all_v), sinks, gathered.pieces, spec
    )
    return out[..., : v.shape[3]].contiguous().view(*q.shape[:3], -1), lse


def attend_backward(
    grad: Tensor,
    saved: Saved,
    sinks: Tensor | None,
    gathered: GatheredPieces,
    group: str,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the sinks of `attend`; an empty tensor if there are no
    sinks."""
    q, k, v, out, lse = saved
    all_k, all_v = _gather(k, v, gathered.keys, group)
    grad, q_, out = (_as_wide(q, x.flatten(0, 1)) for x in (grad, q, out))
    inside = Saved(q_, all_k, _as_wide(q, all_v), out, lse)
    dq, all_dk, all_dv, of_sinks = ruled_attention.attend_backward(
        grad, inside, sinks, gathered.pieces, spec
    )
    pair = all_dk, all_dv[..., : v.shape[3]]
    size = _resolve_process_group(group).size()
    whole = grad.new_zeros(size * q_.shape[0], k.shape[2], k.shape[3] + v.shape[3])
    # a key may be used by two pieces: by those of a rank's two parts
    whole.index_add_(0, gathered.keys, torch.cat(pair, -1))
    own = funcol.wait_tensor(
        torch.ops._c10d_functional.reduce_scatter_tensor(whole, "sum", size, group)
    )
    dk, dv = own.view(*k.shape[:3], -1).split((k.shape[3], v.shape[3]), -1)
    return dq.view(q.shape), dk.contiguous(), dv.contiguous(), of_sinks


def _gather(k: Tensor, v: Tensor, keys: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Return the keys [m, K, E] and values [m, K, V] of all pieces."""
    pair = torch.cat((k, v), -1).flatten(0, 1)  # [n, K, E + V]: one message
    size = _resolve_process_group(group).size()
    everyone = funcol.wait_tensor(
        torch.ops._c10d_functional.all_gather_into_tensor(pair, size, group)
    )
    return everyone.index_select(0, keys).split((k.shape[3], v.shape[3]), -1)


def _as_wide(q: Tensor, x: Tensor) -> Tensor:
    """Pad the last dimension of x with zeros to the width of q: kernels want values as wide as
    keys, and zeros need not be sent."""
    missing = q.shape[-1] - x.shape[-1]
    return nn.functional.pad(x, (0, missing)) if missing else x


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *flat: Any
) -> tuple[Tensor, Tensor]:
    return attend(q, k, v, sinks, *_objects(sinks, *flat))


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *flat: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *inputs, out, lse = flat
    return attend_backward(grad, Saved(q, k, v, out, lse), sinks, *_objects(sinks, *inputs))


def _objects(
    sinks: Tensor | None, keys: Tensor, group: str, *flat: Any
) -> tuple[GatheredPieces, str, AttentionSpec]:
    """Return what `attend` takes, of the arguments of its operator."""
    window, scale, soft_cap = flat[4:]
    spec = AttentionSpec(window or None, scale, soft_cap, sinks is not None)
    return GatheredPieces(keys, VarlenMetadata(*flat[:4])), group, spec


# As one operator each, so that autograd keeps this rank's own keys and values alone, selective
# checkpointing keeps the result instead of gathering once more, and torch.compile does not look
# inside. Operators take no objects, so their arguments are flat.
FLAT = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor keys, str group, "
    f"{ruled_attention.PIECES}, SymInt window, float? scale, float? soft_cap"
)
gathered_attention = torch.library.custom_op(
    "plumbline::gathered_attention",
    _forward,
    mutates_args=(),
    schema=f"({FLAT}) -> (Tensor, Tensor)",
)
gathered_attention_backward = torch.library.custom_op(
    "plumbline::gathered_attention_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor grad, {FLAT}, Tensor out, Tensor lse) -> (Tensor, Tensor, Tensor, Tensor)",
)
# The same as plain functions, for a dispatch mode that must see the collectives and kernels inside.
INSIDE = {
    torch.ops.plumbline.gathered_attention.default: _forward,
    torch.ops.plumbline.gathered_attention_backward.default: _backward,
}


@gathered_attention.register_fake
def _(q, k, v, *_):
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(
        q.shape[0] * q.shape[1], q.shape[2], dtype=wide_type(q.dtype)
    )


@gathered_attention_backward.register_fake
def _(grad, q, k, v, sinks, *_):
    of_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_sinks


def _keep_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, group, starts, key_starts, longest, longest_keys, window, scale, soft_cap = inputs
    ctx.group = group
    ctx.flat = longest, longest_keys, window, scale, soft_cap
    ctx.save_for_backward(*tensors, starts, key_starts, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple:
    q, k, v, sinks, keys, starts, key_starts, *output = ctx.saved_tensors
    flat = keys, ctx.group, starts, key_starts, *ctx.flat
    dq, dk, dv, of_sinks = gathered_attention_backward(grad, q, k, v, sinks, *flat, *output)
    return dq, dk, dv, None if sinks is None else of_sinks, *[None] * len(flat)


gathered_attention.register_autograd(_differentiate, setup_context=_keep_for_backward)


# Heads swapped for tokens -------------------------------------------------------------------------


class Ulysses(CoreOfRanks):
    """Attention of one process for some of the heads and the tokens of all ranks."""

    supports_spec = True

    def __init__(self, core: Any, group: dist.ProcessGroup):
        super().__init__(core)
        self.group = group

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Any, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute `models/layers.py::AttentionCore` for this rank's tokens. documents: of all
        ranks'."""
        cp = self.group.size()
        b, t = q.shape[:2]
        widths = [x.shape[2] // cp * x.shape[3] for x in (q, k, v)]
        # [b, t, ranks that get them, their heads]
        x = torch.cat([x.reshape(b, t, cp, -1) for x in (q, k, v)], -1)
        # [cp, b, t, .]
        x = funcol.all_to_all_single_autograd(
            x.permute(2, 0, 1, 3).contiguous(), None, None, self.group
        )
        x = x.transpose(0, 1).reshape(b, cp * t, -1)
        heads = [
            part.unflatten(-1, (-1, of.shape[3]))
            for part, of in zip(x.split(widths, -1), (q, k, v), strict=True)
        ]
        own_sinks = [] if sinks is None else [sinks.unflatten(0, (cp, -1))[self.group.rank()]]
        out = self.core(*heads, documents, *own_sinks)  # [b, T, H / cp, V]
        out = out.reshape(b, cp, t, -1).transpose(0, 1).contiguous()
        # [ranks whose heads, b, t, .]
        out = funcol.all_to_all_single_autograd(out, None, None, self.group)
        return out.permute(1, 2, 0, 3).reshape(b, t, q.shape[2], -1)

    @classmethod
    def documents(cls, cores: list[Any], positions: Tensor, device: torch.device) -> Any:
        """Return what the replaced cores need of the documents."""
        inner = [core.core for core in cores]
        return inner[0].documents(inner, positions, device)
