"""QK-clip (Kimi K2, arXiv:2507.20534, section 2.1; `optimizer.qk_clip`): attention logits that grow
under Muon are scaled down in the weights.

The largest logit S of each head is measured in the forward passes of a step, over all tokens of the
global batch and the keys that each may see. After the step the head's queries and keys are scaled so
that their products are gamma = min(1, limit / S) times as large (models/qk_clip.py).

A core that measures computes the products of queries and keys once more, in blocks, without a
gradient, and again where a block is recomputed: selective checkpointing alone keeps the result
(parallelisms/blocks.py). Where ranks share a sequence it gathers the keys once more.

Shapes:  B batch   t queries and T keys   H query heads, K key heads, G = H / K   E head_dim
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.schema import Config
from models.cores import ATTENTION, of_kind
from models.qk_clip import FACTORS
from parallelisms.boxes import box_of, shard_of
from parallelisms.cores import CoreOfRanks, places, put
from parallelisms.mesh import Mesh

BLOCK = 128  # queries whose logits exist at a time; fewer where these are more than LOGITS numbers
LOGITS = 2**26


@torch.library.custom_op("plumbline::largest_products", mutates_args=())
def largest_products(
    q: Tensor, k: Tensor, positions: Tensor, behind: Tensor, window: int | None
) -> Tensor:
    """Return the largest product of each head's queries and the keys that they may see, [H] in
    float32 or wider. q [B, t, H, E], k [B, T, K, E]; positions [t], behind [T]: of both in the
    sequence, int64.

    It is one operator, so that selective checkpointing does not keep the products themselves.
    """
    grouped = q.unflatten(2, (k.shape[2], -1))  # [B, t, K, G, E]
    of_a_query = q.shape[0] * q.shape[2] * k.shape[1]
    size = min(BLOCK, max(1, LOGITS // of_a_query))
    found = []
    for part, at in zip(grouped.split(size, 1), positions.split(size), strict=True):
        products = torch.einsum("btkge,bske->bkgts", part, k)
        hidden = behind > at[:, None]  # [t, T]
        if window is not None:
            hidden |= behind <= at[:, None] - window
        found.append(products.masked_fill_(hidden, -torch.inf).amax((0, 3, 4)).flatten())
    largest = torch.stack(found).amax(0)
    return largest.to(torch.promote_types(largest.dtype, torch.float32))


@largest_products.register_fake
def _(q, k, positions, behind, window):
    return q.new_empty(q.shape[2], dtype=torch.promote_types(q.dtype, torch.float32))


class MeasuredCore(CoreOfRanks):
    """An attention core that measures the largest logit of each of its heads."""

    supports_spec = True

    def __init__(self, core: Any, mesh: Mesh, seq_len: int) -> None:
        super().__init__(core)
        own = [torch.arange(p.start, p.stop) for p in mesh.token_ranges(seq_len)]
        self.positions = torch.cat(own).to(mesh.device)  # [t], of this rank's tokens
        self.group = mesh.device_mesh.get_group("cp") if mesh.cp > 1 else None
        self.ranks = mesh.cp
        # [H of this rank], since the last step; a scalar before the first forward, with which a
        # forward and its recomputation are the same operators
        self.none = torch.tensor(-math.inf, device=mesh.device)
        self.largest = self.none
        self.of_step: Tensor | None = None  # [H], of all ranks, in the last step

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tensor:
        if torch.is_grad_enabled():  # neither validation nor sampling
            with torch.no_grad():
                self.measure(q.detach(), k.detach())
        return self.core(q, k, v, *more)

    def measure(self, q: Tensor, k: Tensor) -> None:
        """q [B, t, H, E], k [B, t, K, E]."""
        keys = self.of_all_ranks(k.transpose(0, 1)).transpose(0, 1)  # [B, T, K, E]
        behind = self.of_all_ranks(self.positions)  # [T]
        products = largest_products(q, keys, self.positions, behind, self.spec.window)
        found = self.factor_of_logits(q.shape[-1]) * products
        self.largest = torch.maximum(self.largest, found)

    def factor_of_logits(self, width: int) -> float:
        return width**-0.5 if self.spec.scale is None else self.spec.scale

    def of_all_ranks(self, x: Tensor) -> Tensor:
        """Return the parts of the ranks that share a sequence, [t, ...] -> [T, ...]."""
        if self.group is None:
            return x
        parts = x.new_empty(self.ranks * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(parts, x.contiguous(), group=self.group)
        return parts


def apply(model: nn.Module, mesh: Mesh, cfg: Config) -> None:
    """Put a core that measures into the place of each attention core, with optimizer.qk_clip."""
    if cfg.optimizer.qk_clip:
        cores = of_kind(model.cores(), ATTENTION)
        measured = [MeasuredCore(core, mesh, cfg.training.seq_len) for core in cores]
        put(places(model, cores), measured)


@torch.no_grad()
def rescale(model: nn.Module, fine: Tensor, mesh: Mesh, limit: float) -> None:
    """Scale queries and keys whose logits were above the limit in this step. fine: bool, a scalar:
    whether the step counts; if not, no weight changes. Called by all ranks, without a host-device
    sync."""
    if not limit:
        return
    group = mesh.group_of_stage()
    layers = [m for m in model.modules() if isinstance(getattr(m, "core", None), MeasuredCore)]
    layers = [layer for layer in layers if type(layer) in FACTORS]
    if not layers:
        return
    found = torch.stack([layer.core.largest for layer in layers])  # [layers, heads of this rank]
    heads = found.shape[1]
    largest = found.new_full((len(layers), mesh.tp * heads), -torch.inf)
    first = heads * mesh.device_mesh.get_local_rank("tp") if mesh.tp > 1 else 0
    largest[:, first : first + heads] = found
    if mesh.size > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    too_large = fine & (largest > limit)
    gammas = torch.where(too_large, limit / largest, torch.ones_like(largest))
    for number, layer in enumerate(layers):
        for weight, of_rows in FACTORS[type(layer)](layer, gammas[number]):
            scale_rows(weight, of_rows)
        layer.core.largest = layer.core.none
        layer.core.of_step = largest[number]


def metrics(model: nn.Module, mesh: Mesh) -> dict[str, float]:
    """Return the largest logit of the last step, before it was scaled. Called by all ranks."""
    cores = [m for m in model.modules() if isinstance(m, MeasuredCore)]
    own = [core.of_step.max() for core in cores if core.of_step is not None]
    largest = torch.stack(own).max().item() if own else -math.inf
    return {"max_logit": max(mesh.gather(largest))}


def scale_rows(weight: nn.Parameter, factors: Tensor) -> None:
    """Multiply this rank's rows of a weight by their factors, in place."""
    offset, size = box_of(weight)
    part = shard_of(weight.data)
    here = factors[offset[0] : offset[0] + size[0]]
    part.mul_(here.to(part.dtype)[:, None])
