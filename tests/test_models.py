"""Promises of every family's model: the published numbers, the rotary positions of transformers,
and, for placing it on machines, stages of a pipeline and a core that can be replaced."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import train
from configs.load import load_config
from models import FORMATS, MODELS, NUMBERS, llama
from training import init

SIZES = {
    "dim": 24,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 6,
    "hidden_dim": 20,
    "vocab_size": 31,
}
# of hybrids: the layer in the middle has attention
HYBRID_SIZES = SIZES | {"attention_interval": 2, "rope_dim": 4}
TOKENS, POSITIONS = torch.arange(22).view(2, 11), torch.arange(11)


def numbers(name: str, **changes: object):
    """`Args` of the family's debug flavor at these sizes, as far as it has them."""
    flavor = MODELS[name].numbers.flavors["debug"]
    sizes = HYBRID_SIZES if "attention_interval" in flavor else SIZES
    return MODELS[name].Args(
        **flavor | {key: size for key, size in sizes.items() if key in flavor} | changes
    )


def built(name: str, layers: range | None = None, **changes: object) -> torch.nn.Module:
    """Return a model, or a stage of it, with the initial values of seed 0."""
    args = numbers(name, **changes)
    model = MODELS[name].build(args, layers)
    init.initialise(model, MODELS[name].initial_values(args), 0)
    return model


WITHOUT_POSITIONS = ("kimi_linear",)
every_family = pytest.mark.parametrize("name", FORMATS)


@pytest.mark.parametrize(
    "wrong", [{"heads": "n_head"}, {"kv_heads": "kv"}, {"hidden_units": "w"}, {"query_width": "e"}]
)
def test_a_number_that_a_family_does_not_have_is_refused(wrong):
    """Without the check the rules about such a number would be skipped in silence."""
    [name] = wrong.values()
    with pytest.raises(ValueError, match=f"name '{name}', which is none of its dim, n_layers"):
        replace(NUMBERS["llama"], **wrong)


@pytest.mark.parametrize(
    "params, tied, context, factor",
    [
        ({}, False, 4096, None),  # Llama 2
        ({"vocab_size": -1, "rope_theta": 10000.0}, False, 4096, None),
        ({"vocab_size": 97, "rope_theta": 500000.0}, False, 8192, None),  # Llama 3
        # 3.1 and 3.3
        ({"vocab_size": 97, "rope_theta": 500000.0, "use_scaled_rope": True}, False, 131072, 8.0),
        # 3.2
        ({"vocab_size": 97, "rope_theta": 500000.0, "use_scaled_rope": True}, True, 131072, 32.0),
    ],
)
def test_what_metas_files_leave_out_is_that_of_the_published_models(params, tied, context, factor):
    embedding = torch.arange(97.0 * 8).view(97, 8)
    weights = {
        "tok_embeddings.weight": embedding,
        "output.weight": embedding if tied else embedding + 1,
        "layers.0.feed_forward.w1.weight": torch.zeros(10, 8),
    }
    args = FORMATS["llama"].meta.args_from_meta(
        {"dim": 8, "n_layers": 1, "n_heads": 2, "norm_eps": 1e-5} | params, weights, files=2
    )
    scaling = (
        {
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 8192,
        }
        if factor
        else None
    )
    assert args == llama.Args(
        dim=8,
        n_layers=1,
        n_heads=2,
        n_kv_heads=2,
        head_dim=4,
        hidden_dim=20,
        vocab_size=97,
        norm_eps=1e-5,
        max_seq_len=context,
        rope_theta=params.get("rope_theta", 10000.0),
        tied_embeddings=tied,
        rope_scaling=scaling,
    )


@every_family
@pytest.mark.parametrize("tied", [False, True])
def test_a_family_names_and_describes_its_model(name, tied):
    args = numbers(name, tied_embeddings=tied)
    model = MODELS[name].build(args)
    assert FORMATS[name].hf_names(args).keys() == dict(model.named_parameters()).keys()
    assert "3 layers" in MODELS[name].describe(args)


# The config.json of each repository on the Hugging Face hub; of Gemma 3's larger models its
# text_config. Llama 405B is that of the later revision, whose key/value heads are not duplicated (8,
# not 16); OLMo's are as litgpt and fairseq2 repeat them, and OLMo-core makes them, OLMo 3's also
# before the extension of their context. aux_loss_alpha of DeepSeek-V3 is the report's, section 4.2
# (config.json has 0.001), that of Kimi Linear our choice (the file has none).
PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())


def published() -> list:
    """(family, flavor, the fields of its config.json)"""
    return [
        pytest.param(row["family"], row["flavor"], row["config"], id=row["repository"])
        for row in PUBLISHED
    ]


@pytest.mark.parametrize("name, flavor, config", published())
def test_every_number_of_a_flavor_is_the_published_one(name, flavor, config):
    family = MODELS[name]
    stored = FORMATS[name].args_from_hf(config)
    if "mtp_depth" in vars(stored):  # an option asks for layers that predict further tokens
        stored = replace(stored, mtp_depth=0)
    assert family.Args(**family.numbers.flavors[flavor]) == stored


REQUIRED = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "intermediate_size": 96,
    "vocab_size": 50,
}
[KIMI_LAYERS] = [
    row["config"]["linear_attn_config"] for row in PUBLISHED if row["family"] == "kimi_linear"
]
# Model type -> family, and the least that a config.json must say
SHORTEST = {
    "llama": ("llama", REQUIRED),
    "qwen3": ("qwen3", REQUIRED),
    "qwen3_moe": ("qwen3", REQUIRED | {"norm_topk_prob": True}),
    "olmo2": ("olmo2", REQUIRED),
    "olmo3": ("olmo2", REQUIRED),
    "deepseek_v3": ("deepseek_v3", {}),
    "gpt_oss": ("gpt_oss", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5_text": ("qwen3_5", {}),
    "kimi_linear": ("kimi_linear", {"linear_attn_config": KIMI_LAYERS}),
    "gemma2": ("gemma2", {}),
    "gemma3_text": ("gemma3", {}),
}


@pytest.mark.parametrize("kind", SHORTEST)
def test_what_a_config_does_not_say_has_the_default_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    name, given = SHORTEST[kind]
    theirs = transformers.AutoConfig.for_model(kind, **given).to_dict()
    read = FORMATS[name].args_from_hf
    assert read({"model_type": kind} | given) == read(theirs)


@pytest.mark.parametrize("kind", SHORTEST)
def test_more_layers_and_wider_heads_than_a_model_has_are_refused(kind):
    """A damaged file is refused before tensors of its sizes are made."""
    name, given = SHORTEST[kind]
    read, given = FORMATS[name].args_from_hf, {"model_type": kind} | given
    if name != "kimi_linear":  # whose file names each layer
        assert read(given | {"num_hidden_layers": 1000}).n_layers == 1000
    with pytest.raises(ValueError, match="num_hidden_layers is 1001"):
        read(given | {"num_hidden_layers": 1001})
    if name in ("deepseek_v3", "kimi_linear"):  # whose heads have other widths
        return
    heads = {"num_attention_heads": 2**12, "num_key_value_heads": 2**12}
    assert read(given | heads | {"head_dim": 2**12}).head_dim == 2**12
    with pytest.raises(ValueError, match="4096 heads, 4096 of keys and values, 4098 wide"):
        read(given | heads | {"head_dim": 2**12 + 2})


def test_every_flavor_is_compared_with_what_was_published():
    compared = {(row.values[0], row.values[1]) for row in published()}
    assert compared == {
        (name, flavor)
        for name in FORMATS
        for flavor in MODELS[name].numbers.flavors
        if "debug" not in flavor
    }


@pytest.mark.parametrize(
    "name, flavor",
    [
        (name, flavor)
        for name in FORMATS
        if name not in WITHOUT_POSITIONS
        for flavor in MODELS[name].numbers.flavors
    ],
)
def test_rotary_positions_are_those_of_transformers(name, flavor):
    """At position 1 the sines are nearly the frequencies themselves, so each frequency is compared
    to 1e-5 of its size."""
    compare_rotary_positions(name, MODELS[name].Args(**MODELS[name].numbers.flavors[flavor]))


@pytest.mark.parametrize("name, flavor", [("deepseek_v3", "671B"), ("gpt_oss", "20B")])
def test_the_line_of_yarn_ends_with_the_head(name, flavor):
    """At this base the pair that turns beta_slow times would be the 66th of 32, and the line ends
    at 63. It begins at the 30th, so that a pair lies on it."""
    numbers = MODELS[name].numbers.flavors[flavor] | {"rope_theta": 24.0}
    compare_rotary_positions(name, MODELS[name].Args(**numbers))


def compare_rotary_positions(name: str, args: object) -> None:
    transformers = pytest.importorskip("transformers")
    family = MODELS[name]
    config = transformers.AutoConfig.for_model(**FORMATS[name].hf_config(args))
    kind = config.model_type.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    found = {key: one for key, one in vars(module).items() if key.endswith("RotaryEmbedding")}
    (rotary,) = (found[key] for key in found if "Vision" not in key)
    with torch.device("meta"):
        model = family.build(args)
    positions = torch.tensor([0, 1, 2, 77, 1000])
    # OLMo 3 has two tables, if its positions are scaled, and Gemma 3 always
    has_kinds = kind in ("olmo3", "gemma3")
    kinds = ["sliding_attention", "full_attention"] if has_kinds else [None]
    for number, kind in enumerate(kinds):
        theirs = rotary(config)(torch.zeros(1), positions[None], *([kind] if kind else []))
        for ours, want in zip(model.rope(positions), theirs, strict=True):
            ours = ours[number] if ours.ndim == 3 else ours
            if name == "gpt_oss":  # whose code has each frequency once
                want = torch.cat((want, want), -1)
            torch.testing.assert_close(ours, want[0], rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(ours[:2], want[0, :2], rtol=1e-5, atol=0)


# preset -> all parameters, and those that work on a token without adapters; until commit bcb3535c
# derived by hand from the numbers of each family
COUNTED = {
    "deepseek_v3_671b": (671_026_404_352, 37_552_282_624),
    "deepseek_v3_debug": (6_108_544, 3_454_336),
    "gemma2_9b": (9_241_705_984, 9_241_705_984),
    "gemma3_12b": (11_766_034_176, 11_766_034_176),
    "gemma3_1b": (999_959_680, 999_959_680),
    "gemma3_27b": (27_009_346_304, 27_009_346_304),
    "gemma3_4b": (3_880_263_168, 3_880_263_168),
    "gemma3_debug": (5_479_040, 5_479_040),
    "gpt_oss_120b": (116_829_156_672, 5_711_982_912),
    "gpt_oss_20b": (20_914_757_184, 4_187_440_704),
    "gpt_oss_debug": (7_828_176, 3_819_216),
    "kimi_linear_48b_a3b": (49_122_675_072, 3_484_453_248),
    "kimi_linear_debug": (5_155_820, 3_165_164),
    "llama_1b": (1_235_814_400, 1_235_814_400),
    "llama_3b": (3_212_749_824, 3_212_749_824),
    "llama_405b": (405_853_388_800, 405_853_388_800),
    "llama_70b": (70_553_706_496, 70_553_706_496),
    "llama_70b_lora": (70_760_800_256, 70_553_706_496),
    "llama_8b": (8_030_261_248, 8_030_261_248),
    "llama_8b_128k": (8_030_261_248, 8_030_261_248),
    "llama_debug": (6_524_160, 6_524_160),
    "llama_debug_lora": (8_318_208, 6_524_160),
    "moonlight_16b_a3b": (15_960_108_544, 2_914_774_528),
    "olmo2_32b": (32_234_279_936, 32_234_279_936),
    "olmo2_7b": (7_298_617_344, 7_298_617_344),
    "olmo3_7b": (7_298_011_136, 7_298_011_136),
    "qwen3_0.6b": (596_049_920, 596_049_920),
    "qwen3_235b_a22b": (235_093_634_560, 22_190_763_520),
    "qwen3_300s": (35_662_336, 35_662_336),
    "qwen3_30b_a3b": (30_532_122_624, 3_353_032_704),
    "qwen3_8b": (8_190_735_360, 8_190_735_360),
    "qwen3_moe_debug": (7_787_328, 3_806_016),
    "qwen3_next_80b_a3b": (79_674_391_296, 3_874_929_408),
    "qwen3_next_debug": (6_149_776, 3_495_568),
}


def test_the_parameters_of_each_preset():
    presets = {path.stem for path in Path("configs").glob("*.toml")}
    assert COUNTED.keys() <= presets
    for preset, counts in COUNTED.items():
        family, args = train.architecture(load_config([f"configs/{preset}.toml"]))
        assert (family.parameters(args), family.active_parameters(args)) == counts, preset


def test_experts_whose_weights_do_not_add_up_to_1_are_refused():
    """transformers leaves them so where config.json does not say otherwise."""
    family, formats = MODELS["qwen3"], FORMATS["qwen3"]
    config = formats.hf_config(family.Args(**family.numbers.flavors["debug_moe"]))
    formats.args_from_hf(config)
    del config["norm_topk_prob"]
    with pytest.raises(ValueError, match="norm_topk_prob is false"):
        formats.args_from_hf(config)


@every_family
@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_a_pipeline_are_the_whole_model(name, tied):
    """Each stage is built alone; parameters have the names and the initial values that they have in
    the whole model."""
    whole = built(name, tied_embeddings=tied)
    stages = [
        built(name, layers, tied_embeddings=tied) for layers in (range(1), range(1, 2), range(2, 3))
    ]
    values = dict(whole.named_parameters())
    names = [
        name
        for stage in stages
        for name, value in stage.named_parameters()
        if torch.equal(value, values[name])
    ]
    assert sorted(names) == sorted([*values, *(["tok_embeddings.weight"] if tied else [])])
    h = TOKENS
    for stage in stages:
        h = stage(h, POSITIONS)
    assert torch.equal(h, whole(TOKENS, POSITIONS))


@every_family
def test_the_core_of_attention_can_be_replaced_from_outside(name):
    """Replaces `forward` of the module on one instance, as a fork may."""
    model, plain = built(name), built(name)
    core, seen = model.layers["1"].attention.core, []
    assert not list(core.parameters())

    def forward(q: Tensor, k: Tensor, v: Tensor, documents: object, sinks: object = None) -> Tensor:
        seen.append((q.shape, k.shape, v.shape))
        return 2 * type(core).forward(core, q, k, v, documents, sinks)

    core.forward = forward
    with torch.no_grad():
        plain.layers["1"].attention.wo.weight.mul_(2)
    assert torch.equal(model(TOKENS, POSITIONS), plain(TOKENS, POSITIONS))
    # its values are padded inside
    heads = {
        "deepseek_v3": [(4, 48), (4, 48), (4, 32)],
        "kimi_linear": [(4, 36), (4, 36), (4, 32)],
    }.get(name, [(4, 6), (2, 6), (2, 6)])
    assert seen == [tuple((2, 11, *shape) for shape in heads)]
