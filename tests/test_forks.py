"""What a fork would lose in silence is refused with a sentence: a rule that names nothing, a count of
parameters, a mixer that nothing is known of. And what it freezes stays frozen on every mesh."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from configs import check
from configs.load import load_config
from configs.schema import InputError
from models import MODELS, NUMBERS, layers, llama, qwen3
from parallelisms import cores, freezing
from tests import parity
from tests.ranks import run_ranks
from training.sample import KeyValueCache

DEBUG = llama.Args(**llama.NUMBERS.flavors["debug"])
ONE_RANK = SimpleNamespace(cp=1, tp=1, rank=0, device=torch.device("cpu"))


def typo_in_the_predicate(c):
    return c.model.n_heads > 0 and c.model.windw > 0


@pytest.mark.parametrize(
    "rule, name",
    [
        ((typo_in_the_predicate, "x"), "windw"),
        ((lambda c: c.training.window > 0, "x"), "window"),
        ((lambda c: True, "{model.n_heads} and {model.n_hads}"), "n_hads"),
    ],
)
def test_a_rule_that_names_nothing_is_an_error_with_its_line(rule, name):
    numbers = replace(NUMBERS["llama"], rules={"mine": rule})
    cfg = load_config([])
    with mock.patch("models.flavors.llama.NUMBERS", numbers):
        [said] = check.broken_rules(cfg, 1, 1)
        line = rule[0].__code__.co_firstlineno + (rule[0] is typo_in_the_predicate)
        assert said.startswith(f'the rule "mine" (tests/test_forks.py:{line}) names {name}, which')


def test_a_rule_knows_the_family():
    rule = (lambda c: c.family_name == "llama", "no {family_name} here")
    numbers = replace(NUMBERS["llama"], rules={"mine": rule})
    cfg = load_config([])
    with mock.patch("models.flavors.llama.NUMBERS", numbers):
        assert check.broken_rules(cfg, 1, 1) == ["no llama here"]


class Mixer(nn.Module):
    """Adds to each token half of the one before it."""

    def __init__(self, dim):
        super().__init__()
        self.w1 = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cos, sin, documents=None):
        return self.w1(x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1] / 2)


class Local(Mixer):
    mixes_tokens = False

    def forward(self, x, cos, sin, documents=None):
        return self.w1(x)


class Apart(Mixer):
    separates_documents = True


def model_of(mixer: type[nn.Module]) -> layers.Decoder:
    class Hybrid(llama.Llama):
        def block(self, args, number):
            if number != 1:
                return super().block(args, number)
            return layers.Block(args, mixer(args.dim), layers.FeedForward(args.dim, 64))

    with torch.device("meta"):
        return Hybrid(DEBUG)


def refusal(mixer: type[nn.Module], cp: int, documents: bool) -> str:
    mesh = SimpleNamespace(**vars(ONE_RANK) | {"cp": cp})
    try:
        cores.check(
            model_of(mixer), mesh, load_config([f"--data.mask_documents={documents}".lower()])
        )
    except InputError as error:
        return str(error)
    return ""


def test_a_layer_without_attention_says_what_it_does_with_other_tokens():
    assert len(model_of(Mixer).cores()) == DEBUG.n_layers - 1
    assert refusal(Mixer, 1, False) == ""
    no_core = "layers.1.attention (Mixer) has no attention core"
    assert no_core in refusal(Mixer, 2, False)
    assert "write mixes_tokens = False in Mixer" in refusal(Mixer, 2, False)
    assert no_core in refusal(Mixer, 1, True)
    assert "write in Mixer mixes_tokens = False if it works on single" in refusal(Mixer, 1, True)
    assert refusal(Local, 2, True) == refusal(Apart, 1, True) == ""
    with pytest.raises(InputError, match="layers.1.attention .Mixer. has no attention core"):
        KeyValueCache(model_of(Mixer), 8)
    KeyValueCache(model_of(Local), 8)


def test_a_pattern_that_freezes_nothing_is_refused():
    model = llama.Llama(DEBUG)
    freezing.check(model, ["tok_embeddings.*"], [range(3), range(3, 6)])
    with pytest.raises(InputError, match="'tok_embedding.weight' matches no parameter"):
        freezing.check(model, ["tok_embedding.weight"], [range(6)])
    with pytest.raises(InputError, match="leaves the model nothing to train"):
        freezing.check(model, ["*"], [range(6)])
    with pytest.raises(InputError, match="leaves stage 0 of the pipeline nothing"):
        freezing.check(model, ["tok_*", "layers.[0-2].*"], [range(3), range(3, 6)])
    router = qwen3.FAMILY.build(qwen3.Args(**qwen3.NUMBERS.flavors["debug_moe"]))
    assert freezing.frozen(router, []) == []


class Frozen(llama.Llama):
    def __init__(self, *args):
        super().__init__(*args)
        for block in self.layers.values():
            block.attention.wk.weight.requires_grad_(False)


FREEZE = ['--training.freeze=["tok_embeddings.*", "layers.0.*"]', "--training.param_dtype=float64"]


def frozen_run(options: list[str], dp_size: int = 1) -> dict:
    """Train with weights that options and the constructor freeze."""
    with mock.patch.object(llama, "FAMILY", replace(llama.FAMILY, build=Frozen)):
        return parity.trajectory([*FREEZE, *options], dp_size)


@pytest.mark.slow
def test_what_is_frozen_stays_frozen_on_every_mesh():
    one = run_ranks(1, frozen_run, [])[0]
    names = {"tok_embeddings.weight", "layers.0.ffn_norm.weight", "layers.2.attention.wk.weight"}
    assert names.isdisjoint(one["grad"]) and "layers.1.attention.wq.weight" in one["grad"]
    for name, weight in one["weights"].items():
        assert (weight == one["init"][name]).all() == (name not in one["grad"]), name
    for options, dp_size in ((["--parallelism.tensor_parallel=2"], 1), ([], 2)):
        mesh = run_ranks(2, frozen_run, options, dp_size)[0]
        assert mesh["grad"].keys() == one["grad"].keys()
        assert mesh["loss"] == pytest.approx(one["loss"], rel=1e-12)
        assert mesh["norm"] == pytest.approx(one["norm"], rel=1e-12)
        assert not parity.compare("frozen", mesh, one)


def test_a_frozen_vector_of_a_block_is_a_weight_and_a_routers_bias_is_none():
    family = MODELS["deepseek_v3"]
    with torch.device("meta"):
        model = family.build(family.Args(**family.numbers.flavors["debug"]))
        block = model.layers["1"]
        block.scale = torch.nn.Parameter(torch.empty(4), requires_grad=False)
    assert not block.feed_forward.router.bias.requires_grad
    assert freezing.frozen_by_constructor(model) == ["layers.1.scale"]
