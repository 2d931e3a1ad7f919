"""TorchTitan's names of the parameters of Llama, Qwen3 and DeepSeek-V3, and where its weights lie in
another order.

Sources: the modules and state_dict_adapter.py of torchtitan/models/{llama3,qwen3,deepseek_v3}, at
v0.2.2 and 0.3.0. Shapes are the same as here, experts included. The order of numbers is not: Llama's
rotary positions turn the pairs (2i, 2i + 1) of a head there, as in Meta's files, and (i, i + E/2)
here. Qwen3 rotates as here, and DeepSeek-V3 is published in pairs, which both keep.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from models.formats.llama import half_rotation

FAMILIES = ("llama", "qwen3", "deepseek_v3")

# release -> rows (a part of a name here, what stands there instead); the first that matches counts
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


def rotated_heads(family: str, name: str, args: Any) -> int:
    """How many heads the rows of a parameter have whose order differs; 0 for all others."""
    if family != "llama":
        return 0
    return {"wq": args.n_heads, "wk": args.n_kv_heads}.get(name.split(".")[-2], 0)


def to_ours(tensor: Tensor, heads: int) -> Tensor:
    """A weight [heads * E, D], or a moment of it, in our order. heads: of `rotated_heads`."""
    return half_rotation(tensor, heads) if heads and tensor.ndim == 2 else tensor


def to_theirs(tensor: Tensor, heads: int) -> Tensor:
    """The inverse of `to_ours`."""
    if not heads or tensor.ndim != 2:
        return tensor
    halves = tensor.view(heads, 2, -1, tensor.shape[1])  # [heads, 2, E/2, D]
    return halves.transpose(1, 2).reshape(tensor.shape)
