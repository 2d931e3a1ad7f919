"""Gemma 2 (2B to 27B) as single-device code: it knows torch, and nothing of meshes.

Its blocks are Gemma 3's (models/gemma3.py), without norms of queries and keys, with a window in every
other layer, and one rotary table. Soft caps bound scores of attention and logits. `models/family.py`
explains what stands below. Source: Gemma 2's report, arXiv:2408.00118, and Gemma2ForCausalLM of
transformers, with which tests compare it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from models import arithmetic, gemma3, layers
from models.family import Family
from models.flavors.gemma2 import NUMBERS
from models.kernels.soft_cap import soft_cap
from models.layers import AttentionSpec


@dataclass(frozen=True)
class Args(layers.Args):
    """The numbers that define one Gemma 2."""

    window: int  # tokens that a layer with a window attends to, its own among them; 0: no windows
    query_scalar: int  # scores are divided by its root
    attention_cap: float  # scores become cap * tanh(score / cap); 0: they stay
    logit_cap: float  # the same of logits

    window_pattern: ClassVar[int] = 2


def spec_of(args: Args, number: int) -> AttentionSpec:
    """Return the attention spec of this layer."""
    return replace(gemma3.spec_of(args, number), soft_cap=args.attention_cap or None)


class Gemma2(gemma3.Gemma3):
    def block(self, args: Args, number: int) -> nn.Module:
        return gemma3.Block(args, layers.Attention(args, spec_of(args, number)), 0)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return one table in each of cos and sin, float32 [1, ..., E]."""
        cos, sin = layers.Decoder.rope(self, positions)
        return cos[None], sin[None]

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        loss_head: Callable[..., Tensor] = F.linear,
        *more: Any,
        **named: Any,
    ) -> Tensor:
        """Compute `models/layers.py::Decoder.forward`. The loss head gets the cap of the logits too:
        one that knows of none raises TypeError."""
        if self.args.logit_cap:
            head = capped_linear if loss_head is F.linear else loss_head
            loss_head = partial(head, cap=self.args.logit_cap)
        return super().forward(x, positions, loss_head, *more, **named)


def capped_linear(h: Tensor, weight: Tensor, cap: float) -> Tensor:
    """Return the logits of h [B, T, D] and weight [V, D], capped: [B, T, V]."""
    return soft_cap(F.linear(h, weight), cap)


def tp_plan(args: Args) -> dict[str, str]:
    """Split heads and hidden units as a Llama does; further norms get a slice of the sequence."""
    norms = ("post_attention_norm", "post_ffn_norm")
    return layers.tp_plan(args) | {f"layers.*.{norm}": "sequence_plain" for norm in norms}


def flops_per_token(args: Args, seq_len: int) -> float:
    specs = [spec_of(args, number) for number in range(args.n_layers)]
    return arithmetic.flops_per_token(args, seq_len, specs=specs)


FAMILY = Family(
    name="gemma2",
    numbers=NUMBERS,
    Args=Args,
    build=Gemma2,
    initial_values=gemma3.initial_values,
    decay=layers.DECAY,
    tp_plan=tp_plan,
    flops_per_token=flops_per_token,
    describe=gemma3.describe,
)
