"""What every family's model promises to those who place it on machines: stages of a pipeline, and a core that can be replaced."""

import pytest
import torch
from torch import Tensor

from models import MODELS, family as families
from models.layers import AttentionCore
from training import init

SIZES = {"dim": 24, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "hidden_dim": 20, "vocab_size": 31}
TOKENS, POSITIONS = torch.arange(22).view(2, 11), torch.arange(11)


def numbers(name: str, **changes: object):
    """`Args` of the family's debug flavor at these sizes."""
    return MODELS[name].Args(**MODELS[name].FLAVORS["debug"] | SIZES | changes)


def built(name: str, layers: range | None = None, **changes: object) -> torch.nn.Module:
    """A model, or a stage of it, with the initial values of seed 0."""
    args = numbers(name, **changes)
    model = MODELS[name].build(args, layers)
    init.initialise(model, MODELS[name].initial_values(args), 0)
    return model


every_family = pytest.mark.parametrize("name", MODELS)


@every_family
def test_a_family_has_every_member(name):
    wanted = {*families.Family.__annotations__, *(member for member in vars(families.Family) if not member.startswith("_"))}
    assert len(wanted) > 15 and not {member for member in wanted if not hasattr(MODELS[name], member)}


@every_family
@pytest.mark.parametrize("tied", [False, True])
def test_the_parameters_that_a_family_counts_are_those_of_the_model(name, tied):
    args = numbers(name, tied_embeddings=tied)
    model = MODELS[name].build(args)
    assert MODELS[name].parameters(args) == sum(p.numel() for p in model.parameters())
    assert MODELS[name].hf_names(args).keys() == dict(model.named_parameters()).keys()
    assert "3 layers" in MODELS[name].describe(args)


@pytest.mark.parametrize("name, flavor, billions", [
    ("llama", "8B", 8.030), ("llama", "70B", 70.554), ("llama", "405B", 405.853),  # the names of the checkpoints on the hub
    ("qwen3", "0.6B", 0.596), ("qwen3", "1.7B", 1.721), ("qwen3", "4B", 4.022), ("qwen3", "8B", 8.191),
    ("qwen3", "14B", 14.768), ("qwen3", "32B", 32.762),
])  # fmt: skip
def test_published_totals(name, flavor, billions):
    """As model.safetensors.index.json and the model cards on the Hugging Face hub count them."""
    family = MODELS[name]
    assert round(family.parameters(family.Args(**family.FLAVORS[flavor])) / 1e9, 3) == billions


@every_family
@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_a_pipeline_are_the_whole_model(name, tied):
    """Each stage is built alone; parameters have the names and the initial values that they have in the whole model."""
    whole = built(name, tied_embeddings=tied)
    stages = [built(name, layers, tied_embeddings=tied) for layers in (range(0, 1), range(1, 2), range(2, 3))]
    values = dict(whole.named_parameters())
    names = [name for stage in stages for name, value in stage.named_parameters() if torch.equal(value, values[name])]
    assert sorted(names) == sorted([*values, *(["tok_embeddings.weight"] if tied else [])])
    h = TOKENS
    for stage in stages:
        h = stage(h, POSITIONS)
    assert torch.equal(h, whole(TOKENS, POSITIONS))


@every_family
def test_positions_are_the_callers(name):
    """A slice of a sequence at its own positions. RoPE is relative, so a shift of all positions changes rounding alone, and
    other distances between the tokens change the result."""
    model = built(name)
    here, shifted, stretched = (model(TOKENS, positions) for positions in (POSITIONS, POSITIONS + 5, POSITIONS * 2))
    assert (shifted - here).abs().max() < 1e-6 < 1e-5 < (stretched - here).abs().max()


@every_family
def test_the_core_of_attention_can_be_replaced_from_outside(name):
    """As context parallelism and a cache of keys and values do it: `forward` of the module, on one instance."""
    model, plain = built(name), built(name)
    core, seen = model.layers["1"].attention.core, []
    assert not list(core.parameters())

    def forward(q: Tensor, k: Tensor, v: Tensor, documents: object) -> Tensor:
        seen.append((q.shape, k.shape, v.shape))
        return 2 * AttentionCore.forward(core, q, k, v, documents)

    core.forward = forward
    with torch.no_grad():
        plain.layers["1"].attention.wo.weight.mul_(2)
    assert torch.equal(model(TOKENS, POSITIONS), plain(TOKENS, POSITIONS))
    assert seen == [((2, 11, 4, 6), (2, 11, 2, 6), (2, 11, 2, 6))]
