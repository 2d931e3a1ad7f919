"""TorchTitan's names of the parameters of Llama, Qwen3 and DeepSeek-V3, and where its weights lie in
another order.

Sources: the modules and state_dict_adapter.py of torchtitan/models/{llama3,qwen3,deepseek_v3}, at
v0.2.2 and 0.3.0. Shapes are the same as here, experts included. The order of numbers is not: Llama's
rotary positions turn the pairs (2i, 2i + 1) of a head there, as in Meta's files, and (i, i + E/2)
here. Qwen3 rotates as here, and DeepSeek-V3 is published in pairs, which both keep.

Shapes:  D = dim   H query heads   K key/value heads   E = head_dim   X experts
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from models.formats.llama import half_rotation

FAMILIES = ("llama", "qwen3", "deepseek_v3")

# release -> rows (a part of a name here, its replacement there); the first that matches counts
RENAMED = {
    "0.3": (
        (".attention.wq.", ".attention.qkv_linear.wq."),
        (".attention.wk.", ".attention.qkv_linear.wk."),
        (".attention.wv.", ".attention.qkv_linear.wv."),
        (".feed_forward.experts.w1", ".moe.routed_experts.inner_experts.w1_EFD"),
        (".feed_forward.experts.w2", ".moe.routed_experts.inner_experts.w2_EDF"),
        (".feed_forward.experts.w3", ".moe.routed_experts.inner_experts.w3_EFD"),
        (".feed_forward.shared_experts.", ".moe.shared_experts."),
        (".feed_forward.router.weight", ".moe.router.gate.weight"),
        (".feed_forward.router.bias", ".moe.expert_bias_E"),
        ("output.weight", "lm_head.weight"),
    ),
    "0.2": (
        (".feed_forward.experts.", ".moe.experts."),
        (".feed_forward.shared_experts.", ".moe.shared_experts."),
        (".feed_forward.router.weight", ".moe.router.gate.weight"),
        (".feed_forward.router.bias", ".moe.expert_bias"),
    ),
}
# tables that old versions saved, by a regular expression for their whole names
TABLES = r"(.*\.)?freqs_cis"
RELEASE = "0.3"  # the one that is written
# Without q_rank the queries of DeepSeek-V3 have one projection, which is the second one here.
ONE_PROJECTION = (".attention.wq_b.", ".attention.wq.")


FUSED = ".qkv_linear.wqkv."  # queries, keys and values in one


def names(parameters: Iterable[str], args: Any, release: str = RELEASE) -> dict[str, str]:
    """Name of every parameter -> its name in TorchTitan's model."""
    rows = RENAMED[release]
    if getattr(args, "q_rank", None) == 0:
        rows = (ONE_PROJECTION, *rows)
    return {name: renamed(name, rows) for name in parameters}


def renamed(name: str, rows: Iterable[tuple[str, str]]) -> str:
    for ours, theirs in rows:
        if ours in name:
            return name.replace(ours, theirs)
    return name


def copies(args: Any, release: str = RELEASE) -> dict[str, str]:
    """Further names under which their state dict has a parameter of ours: a tied output projection."""
    if not args.tied_embeddings:
        return {}
    return {renamed("output.weight", RENAMED[release]): "tok_embeddings.weight"}


def biases_that_ours_lacks(
    parameters: Iterable[str], args: Any, release: str = RELEASE
) -> list[str]:
    """Their names of the routers' biases of a family that has none here: float32 [X], zeros at the
    beginning. Qwen3's mixtures have them there, in training only: nothing published has them."""
    if getattr(args, "balancing_bias", True):
        return []
    rows = RENAMED[release]
    routers = [name for name in parameters if name.endswith(".feed_forward.router.weight")]
    return [renamed(name.replace("router.weight", "router.bias"), rows) for name in routers]


def states(theirs: dict[str, str], fused: bool) -> dict[str, list[str]]:
    """Return the names under which their optimizer keeps its state -> the parameters of ours that
    are in it. theirs: of `names`.

    fused: whether their model has one projection for queries, keys and values, as its sizes of 0.3
    have. Its weight is saved in three, under the names of three; the moments are saved as they are.
    """
    found: dict[str, list[str]] = {}
    for ours, name in theirs.items():
        for part in (".wq.", ".wk.", ".wv.") if fused else ():
            name = name.replace(f".qkv_linear{part}", FUSED)
        found.setdefault(name, []).append(ours)
    return found


# The order of numbers -----------------------------------------------------------------------------


def joined_shape(shapes: list[list[int]]) -> list[int]:
    """Return the shape of TorchTitan's tensor that joins these of ours."""
    rows = sum(shape[0] for shape in shapes) if len(shapes) > 1 else 0
    return [rows, *shapes[0][1:]] if rows else shapes[0]


def join(family: str, ours: list[str], parts: list[Tensor], args: Any) -> Tensor:
    """Join a weight of theirs, or a moment, from those of these parameters; of a scalar, the
    first."""
    if parts[0].ndim != 2:
        return parts[0]
    turned = []
    for name, part in zip(ours, parts, strict=True):
        heads = rotated_heads(family, name, args)
        turned.append(in_pairs(part, heads) if heads else part)
    if len(turned) == 1:
        return turned[0]
    # for each head of keys: the queries that share it [H/K E, D], itself and its values [E, D]
    groups = [part.view(args.n_kv_heads, -1, part.shape[1]) for part in turned]
    return torch.cat(groups, 1).flatten(0, 1)  # [(H + 2 K) E, D]


def split(family: str, ours: list[str], whole: Tensor, args: Any) -> dict[str, Tensor]:
    """Invert `join`, by parameter."""
    if whole.ndim != 2:
        return dict.fromkeys(ours, whole)
    parts = [whole]
    if len(ours) > 1:
        groups = whole.view(args.n_kv_heads, -1, whole.shape[1])  # [K, (H/K + 2) E, D]
        rows = args.n_heads // args.n_kv_heads * args.head_dim
        in_groups = groups.split([rows, args.head_dim, args.head_dim], 1)
        parts = [part.flatten(0, 1) for part in in_groups]
    found = {}
    for name, part in zip(ours, parts, strict=True):
        heads = rotated_heads(family, name, args)
        found[name] = half_rotation(part, heads) if heads else part
    return found


def rotated_heads(family: str, name: str, args: Any) -> int:
    """Return the number of heads in a parameter whose rotary rows are permuted; 0 for all
    others."""
    if family != "llama":
        return 0
    return {"wq": args.n_heads, "wk": args.n_kv_heads}.get(name.split(".")[-2], 0)


def in_pairs(weight: Tensor, heads: int) -> Tensor:
    """Invert `half_rotation`: weight [heads * E, D]."""
    halves = weight.view(heads, 2, -1, weight.shape[1])  # [heads, 2, E/2, D]
    return halves.transpose(1, 2).reshape(weight.shape)
