"""A small Llama whose layers have specs of attention, in place of the family's own.

tests/test_attention_rules.py and its simulated GPUs share it.
"""

import dataclasses
from collections.abc import Callable

from models import arithmetic, layers, llama
from models.kernels.ruled_attention import AttentionSpec

SPECS_OF_LAYERS = {
    True: AttentionSpec(window=5, scale=0.6, sinks=True),
    False: AttentionSpec(soft_cap=3.0, sinks=True),
}


class Alternating(llama.Llama):
    """Every other layer has a window, all have sinks."""

    def block(self, args, number):
        attention = layers.Attention(args, SPECS_OF_LAYERS[number % 2 == 0])
        return layers.Block(args, attention, layers.FeedForward(args.dim, args.hidden_dim))


def without_cap(args, layers=None):
    model = Alternating(args, layers)
    for core in model.cores():
        core.spec = dataclasses.replace(core.spec, soft_cap=None)
    return model


def flops_per_token(args, seq_len):
    specs = [SPECS_OF_LAYERS[number % 2 == 0] for number in range(args.n_layers)]
    return arithmetic.flops_per_token(args, seq_len, specs=specs)


def use(model_class: Callable = Alternating, count: Callable = flops_per_token) -> None:
    """Make the family Llama that model, in this process."""
    llama.FAMILY = dataclasses.replace(
        llama.FAMILY,
        build=model_class,
        flops_per_token=count,
        initial_values=lambda args: [("*.sinks", "normal", 1.0), *layers.initial_values(args)],
        tp_plan=lambda args: {
            **layers.tp_plan(args),
            "layers.*.attention": "gather_sequence_split_own",
        },
    )
