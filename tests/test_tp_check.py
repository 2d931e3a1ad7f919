"""A plan of tensor parallelism that does not fit its model is named in a sentence before a run begins
(parallelisms/tp_check.py). One process plays a rank of two that exchange nothing."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

from configs.schema import InputError
from models import MODELS, layers
from models.kernels.ruled_attention import AttentionSpec
from models.local import local
from parallelisms import tp, tp_check
from tests.ranks import run_ranks
from tools.plan import trace

ATTENTION = "layers.*.attention"
FEED_FORWARD = "layers.*.feed_forward"
MISSING = None


# What is wrong -> the family and its flavor, what is different in its plan, what is said.
MISTAKES: dict[str, tuple] = {
    "a misspelt module": (
        "llama debug",
        {"layers.*.atention.wq": "columns"},
        "has a row for layers.*.atention.wq",
        "is it layers.*.attention.wq?",
    ),
    "a misspelt style": (
        "llama debug",
        {f"{ATTENTION}.wq": "colums"},
        "gives layers.*.attention.wq the style colums",
        "is it columns?",
    ),
    "no row for a linear layer": (
        "llama debug",
        {f"{ATTENTION}.wv": MISSING},
        "no row for layers.0.attention.wv, a linear layer",
        "or columns or",
    ),
    "no row for a norm": (
        "llama debug",
        {"layers.*.ffn_norm": MISSING},
        "no row for layers.0.ffn_norm, a norm",
        "sequence or sequence_plain or",
    ),
    "no row for a router": (
        "qwen3 debug_moe",
        {f"{FEED_FORWARD}.router": MISSING},
        "no row for layers.0.feed_forward.router, a router: router would fit",
    ),
    "a linear layer's style for a norm": (
        "llama debug",
        {"layers.*.ffn_norm": "rows"},
        "gives layers.0.ffn_norm the style rows, which is for a linear layer, and it is a norm",
    ),
    "a norm's style for a linear layer": (
        "llama debug",
        {f"{ATTENTION}.wq": "sequence"},
        "gives layers.0.attention.wq the style sequence, which is for a norm",
    ),
    "rows where columns are right": (
        "llama debug",
        {f"{ATTENTION}.wq": "rows"},
        "gives layers.0.attention.wq the style rows, which takes the whole sequence with this "
        "rank's columns",
        "gets the whole sequence with all features as a DTensor [1, 8, 256]",
        "columns would fit",
    ),
    "columns where rows are right": (
        "llama debug",
        {f"{ATTENTION}.wo": "columns"},
        "gives layers.0.attention.wo the style columns, which takes the whole sequence with all "
        "features",
        "gets the whole sequence with this rank's columns as a plain tensor [1, 8, 128]",
        "rows would fit",
    ),
    "a sequence that is never gathered": (
        "llama debug",
        {FEED_FORWARD: MISSING},
        "gives layers.0.feed_forward.w1 the style columns",
        "gets a slice of the sequence with all features",
        "(layers.0.feed_forward has no row)",
    ),
    "a norm of each head for a norm over all": (
        "olmo2 debug",
        {f"{ATTENTION}.q_norm": "heads"},
        "gives layers.0.attention.q_norm the style heads, which takes the whole sequence with "
        "this rank's heads",
        "gets the whole sequence with this rank's columns",
        "norm_of_columns would fit",
    ),
    "a norm over all heads for one of each": (
        "qwen3 debug",
        {f"{ATTENTION}.k_norm": "norm_of_columns"},
        "gives layers.0.attention.k_norm the style norm_of_columns",
        "heads would fit",
    ),
    "a router that gets a DTensor": (
        "qwen3 debug_moe",
        {FEED_FORWARD: MISSING},
        "gives layers.0.feed_forward.router the style router",
        "(layers.0.feed_forward has no row)",
    ),
    "latents that are never gathered": (
        "deepseek_v3 debug",
        {f"{ATTENTION}.latents": MISSING},
        "cannot compute layers.0.attention.latents, which has no row",
    ),
    "a DTensor with a plain tensor": (
        "deepseek_v3 debug",
        {f"{ATTENTION}.kv_norm": "sequence"},
        "cannot compute layers.0.attention",
        "layers.0.attention.kv_norm with the style sequence gave it a DTensor",
    ),
    "one layer that is not like the others": (
        "llama debug",
        {"layers.2.attention.wo": "columns"},
        "gives layers.2.attention.wo the style columns",
    ),
}


def plan_with(family: Any, args: Any, changes: dict[str, str | None]) -> dict[str, str]:
    """Return the family's plan with these rows before it, or without them."""
    plan = family.tp_plan(args)
    new = {pattern: style for pattern, style in changes.items() if style is not MISSING}
    kept = {pattern: style for pattern, style in plan.items() if pattern not in changes}
    return new | kept


def build(family: Any, args: Any) -> nn.Module:
    with torch.device("meta"):
        return family.build(args)


def said_of(family: Any, args: Any, changes: dict[str, str | None]) -> str:
    mesh = init_device_mesh("cpu", (2,))
    try:
        tp_check.check(plan_with(family, args, changes), build(family, args), mesh)
    except InputError as error:
        return str(error)
    return ""


def args_of(family: str, flavor: str) -> Any:
    return MODELS[family].Args(**MODELS[family].numbers.flavors[flavor])


def shipped_plans() -> dict[str, str]:
    """Return the family and its flavor -> what is said of the plan."""
    said = {}
    for name, family in MODELS.items():
        for flavor in family.numbers.flavors:
            if "debug" not in flavor and flavor != "671B":
                continue  # its layers are of the same kinds
            said[f"{name} {flavor}"] = said_of(family, args_of(name, flavor), {})
        tied = replace(args_of(name, "debug"), tied_embeddings=True)
        said[f"{name} debug, tied"] = said_of(family, tied, {})
    return said


def whole_output() -> str:
    """Run `rows` without scattering the sequence."""
    broken = replace(tp.STYLES["rows"], build=partial(RowwiseParallel, output_layouts=Replicate()))
    with mock.patch.dict(tp.STYLES, rows=broken):
        return said_of(MODELS["llama"], args_of("llama", "debug"), {})


def block_that_returns_too_much() -> str:
    """Two slices, which are the whole sequence of two ranks."""
    forward = layers.Block.forward

    def twice(self, *inputs):
        h = forward(self, *inputs)
        return torch.cat((h, h), 1)

    with mock.patch.object(layers.Block, "forward", twice):
        return said_of(MODELS["llama"], args_of("llama", "debug"), {})


def forwards_of_their_own() -> list[str]:
    """Gemma's scaled embedding, and norms with a gain of 1 + w, where a style replaces them and
    where it does not."""

    class Scaled(nn.Embedding):
        def forward(self, x):
            return super().forward(x) * 8

    class OnePlus(nn.RMSNorm):
        def forward(self, x):
            return nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)

    said = []
    with mock.patch.object(nn, "Embedding", Scaled):
        said.append(said_of(MODELS["llama"], args_of("llama", "debug"), {}))
    for family in "llama", "qwen3", "olmo2":
        with mock.patch.object(nn, "RMSNorm", OnePlus):
            said.append(said_of(MODELS[family], args_of(family, "debug"), {}))
    return said


class ScaledBlock(layers.Block):
    """A block with a number for each feature of what it returns."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.scale = nn.Parameter(torch.ones(256))

    def forward(self, x, *inputs):
        return x + local(self.scale) * (super().forward(x, *inputs) - x)


def block_with_a_parameter(style: str | None) -> str:
    rows = {"layers.?": style} if style else {}
    with mock.patch.object(layers, "Block", ScaledBlock):
        return said_of(MODELS["llama"], args_of("llama", "debug"), rows)


def attention_with_a_parameter() -> str:
    """Sinks, which the plan does not know."""

    class WithSinks(layers.Attention):
        def __init__(self, args):
            super().__init__(args, AttentionSpec(sinks=True))

    with mock.patch.object(layers, "Attention", WithSinks):
        return said_of(MODELS["llama"], args_of("llama", "debug"), {})


def own_weights() -> list[str]:
    """A block whose `weight` is a number, and attention whose `weight` has other sides than its input."""

    class WeightedBlock(layers.Block):
        def __init__(self, *parts):
            super().__init__(*parts)
            self.weight = 0.5

    class WeightedAttention(layers.Attention):
        def __init__(self, args):
            super().__init__(args)
            self.weight = nn.Parameter(torch.empty(args.n_heads, 3))

    said = []
    with mock.patch.object(layers, "Block", WeightedBlock):
        said.append(said_of(MODELS["llama"], args_of("llama", "debug"), {}))
    with mock.patch.object(layers, "Attention", WeightedAttention):
        style = {ATTENTION: "gather_sequence_split_own"}
        said.append(said_of(MODELS["llama"], args_of("llama", "debug"), style))
    return said


def all_cases() -> dict[str, Any]:
    """Return the messages for everything that this file asks, found by one rank of two that do not
    exist."""
    dist.destroy_process_group()
    with trace.pretend(2, 2):
        mistakes = {
            what: said_of(MODELS[model.split()[0]], args_of(*model.split()), changes)
            for what, (model, changes, *_) in MISTAKES.items()
        }
        return {
            "mistakes": mistakes,
            "shipped": shipped_plans(),
            "whole output": whole_output(),
            "block": block_that_returns_too_much(),
            "parameter": attention_with_a_parameter(),
            "forwards": forwards_of_their_own(),
            "no row for a block": block_with_a_parameter(None),
            "own weights": own_weights(),
            "block's row": block_with_a_parameter("slice_own"),
        }


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    return run_ranks(1, all_cases)[0]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence_that_names_the_module_and_its_style(said, mistake):
    sentence = said["mistakes"][mistake]
    assert sentence.startswith("the plan of tensor parallelism "), sentence
    assert "\n" not in sentence
    for part in MISTAKES[mistake][2:]:
        assert part in sentence, sentence


def test_the_plans_of_all_families_fit(said):
    assert len(said["shipped"]) > 2 * len(MODELS)
    assert {name: text for name, text in said["shipped"].items() if text} == {}


def test_a_style_that_is_wrong_itself_is_named(said):
    whole = said["whole output"]
    assert "layers.0.attention.wo the style rows, which is to return a slice" in whole
    assert "it returns the whole sequence" in whole


def test_a_block_that_does_not_return_its_slice_is_named(said):
    assert "makes layers.0 return the whole sequence" in said["block"]
    assert "where the next block takes a slice of the sequence" in said["block"]


def test_a_parameter_that_a_style_leaves_whole_is_named(said):
    assert "gives layers.0.attention the style gather_sequence" in said["parameter"]
    fits = "it is a module with direct parameters: gather_sequence_split_own or slice_own would"
    assert fits in said["parameter"]


def test_a_forward_that_a_style_would_drop_is_named(said):
    embedding, *norms = said["forwards"]
    assert "the forward of forwards_of_their_own.<locals>.Scaled would be dropped" in embedding
    assert "change what it returns in the model's `embed(tokens)`" in embedding
    llama, qwen3, olmo2 = norms
    assert llama == qwen3 == ""
    assert "gives layers.0.attention.q_norm the style norm_of_columns" in olmo2
    assert "OnePlus would be dropped; normalise each head by itself" in olmo2


def test_a_parameter_for_each_feature_has_a_style(said):
    fits = "a module with direct parameters: gather_sequence_split_own or slice_own would fit"
    assert fits in said["no row for a block"]
    assert said["block's row"] == ""


def test_what_a_mixer_or_a_block_calls_its_weight_is_no_width(said):
    assert said["own weights"] == ["", ""]
