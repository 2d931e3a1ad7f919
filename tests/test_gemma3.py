"""Gemma 2 and 3: soft caps, norms with a gain of 1 + weight before and after each layer, a scaled
embedding, windows in some layers, two rotary tables, and the text model of files that have more than
one. tests/test_hf_parity.py compares logits, loss and gradients with transformers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from checkpoint import hf
from configs.schema import InputError
from models import FORMATS, MODELS
from models.formats.gemma2 import FORMATS as of_gemma2
from models.formats.gemma3 import FORMATS as formats
from models.gemma3 import FAMILY as GEMMA
from models.layers import AttentionSpec
from models.norms import ZeroCentredRMSNorm
from tests.parity import DOCUMENTS, FLOAT64, NUMBERS, check, combination_of
from tests.shapes import GEMMA2 as GEMMA2_ARGS
from tests.shapes import GEMMA3
from tools import convert

MODEL = ["--model.family=gemma3", "--model.n_layers=4", "--model.window=5"]
GEMMA2 = ["--model.family=gemma2", *MODEL[1:], "--model.attention_cap=0.2", "--model.logit_cap=0.5"]
MODEL.append("--model.window_pattern=3")
DOCUMENTED = NUMBERS | {"documents": {"masked": [DOCUMENTS]}}


@pytest.mark.parametrize(
    "mesh, model",
    [
        # a slice of the sequence after each norm, the scale in the first stage, the head in the last;
        # a cap of logits whose rows the ranks share
        pytest.param("pp2xtp2", GEMMA2, marks=pytest.mark.slow),
        ("cp2", MODEL),
    ],
)
def test_a_mesh_equals_the_plain_model(mesh, model):
    combination = {
        factor: chosen for factor, chosen in combination_of().items() if factor in NUMBERS
    }
    combination |= {"embeddings": "tied", "documents": "masked"}
    check(mesh, [combination], [*model, FLOAT64], factors=DOCUMENTED)


# The pieces -----------------------------------------------------------------------------------------


def test_a_norm_computes_in_float32_what_is_narrower_and_nothing_else():
    torch.manual_seed(0)
    norm = ZeroCentredRMSNorm(14, eps=0.01)
    norm.weight.data.normal_()
    x = torch.randn(3, 14, dtype=torch.float64)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.double(), weight.double()
        return x * (x.square().mean(-1, keepdim=True) + 0.01).rsqrt() * (1 + weight)

    norm.double()
    torch.testing.assert_close(norm(x), exact(x, norm.weight), rtol=1e-14, atol=1e-14)
    norm.bfloat16()
    narrow = x.bfloat16()
    assert torch.equal(norm(narrow), exact(narrow, norm.weight).bfloat16())
    rounded_gain = nn.functional.rms_norm(narrow, (14,), 1 + norm.weight, 0.01)
    assert not torch.equal(rounded_gain, norm(narrow))


def test_the_embedding_is_scaled_by_a_root_in_the_type_of_the_step():
    """sqrt(1152) is 33.94, and 34 in bfloat16. A stage that is not the first scales nothing."""
    args = replace(GEMMA3, dim=1152, n_layers=2, vocab_size=3, n_heads=2)
    model = GEMMA.build(args, range(1))
    model.tok_embeddings.weight.data.fill_(1.0)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    assert model.embed(tokens).unique().item() == pytest.approx(1152**0.5)
    assert model.bfloat16().embed(tokens).unique().item() == 34.0
    last = GEMMA.build(args, range(1, 2))
    passed = []
    last.layers["1"].register_forward_pre_hook(lambda _, inputs: passed.append(inputs[0]))
    h = torch.ones(1, 4, args.dim)
    last(h, torch.arange(4))
    assert torch.equal(passed[0], h)


def test_layers_have_their_windows_and_scores_their_scale():
    """A stage has those of its layers; a scale that is the usual one leaves the plain kernel."""
    with torch.device("meta"):
        stage = GEMMA.build(replace(GEMMA3, n_layers=9), layers=range(1, 7))
        plain = GEMMA.build(replace(GEMMA3, query_scalar=10))
    scale = 17**-0.5
    assert [core.spec.window for core in stage.cores()] == [7, None, 7, 7, None, 7]
    assert {core.spec.scale for core in stage.cores()} == {scale}
    assert [core.spec == AttentionSpec() for core in plain.cores()] == [
        False,
        False,
        True,
        False,
        False,
    ]


# config.json ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        GEMMA3,
        replace(GEMMA3, rope_factor=1.0, tied_embeddings=False),
        replace(GEMMA3, n_layers=2),  # with no layer of full attention
        replace(GEMMA3, window_pattern=1),
    ],
)
def test_both_ways_of_writing_a_config_are_read(args):
    """Read the form of transformers 5, and that of everything older."""
    config = formats.hf_config(args)
    assert formats.args_from_hf(config) == args
    new = {"rope_scaling", "rope_theta", "rope_local_base_freq"}
    new = {key: value for key, value in config.items() if key not in new}
    old = {
        key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")
    }
    assert formats.args_from_hf(new) == formats.args_from_hf(old) == args


@pytest.mark.parametrize(
    "change, words",
    [
        ({"window": 0}, "model.window is 0"),
        ({"n_heads": 4}, "n_heads .4. to divide dim .42."),
    ],
)
def test_what_transformers_does_not_have_is_refused_before_training(change, words):
    with pytest.raises(ValueError, match=words):
        formats.hf_config(replace(GEMMA3, **change))


def test_a_gemma_2_without_caps_comes_back():
    args = replace(GEMMA2_ARGS, attention_cap=0.0, logit_cap=0.0)
    assert of_gemma2.args_from_hf(of_gemma2.hf_config(args)) == args


def test_a_loss_head_that_knows_of_no_cap_raises():
    """Rather than to train on other logits. transformers' are compared by tests/test_hf_parity.py."""
    model = MODELS["gemma2"].build(GEMMA2_ARGS)
    with pytest.raises(TypeError, match="cap"):
        model(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4), lambda h, weight: h.sum())


# The text model of one that sees images --------------------------------------------------------------

TOKENS = torch.arange(60).view(2, 30)


def write(folder: Path) -> nn.Module:
    """Write a model of text and images as transformers does, and return it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    text = formats.hf_config(GEMMA3)
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=96
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    model.save_pretrained(folder)
    return model


def test_the_text_model_goes_in_and_out_again(tmp_path, caplog):
    """Its tensors have other names there, and the vision tower's are left out, which is said."""
    theirs = write(tmp_path / "hf")
    with safe_open(tmp_path / "hf" / hf.ONE_FILE, "pt") as file:
        assert any(name.startswith("vision_tower.") for name in file.keys())
    name, args = hf.read_model(tmp_path / "hf", FORMATS)
    assert (name, args) == ("gemma3", GEMMA3)
    assert "its text model alone is read" in caplog.text
    for argv in (
        ("from-hf", tmp_path / "hf", tmp_path / "run"),
        ("to-hf", tmp_path / "run", tmp_path / "out"),
    ):
        assert convert.main([str(word) for word in argv]) == 0
    from transformers import AutoModelForCausalLM

    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(alone).__name__ == "Gemma3ForCausalLM"
    with torch.no_grad():
        assert torch.equal(alone(TOKENS).logits, theirs(TOKENS).logits)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"text_config": ...}, "text_config, the fields of the text model, is missing"),
        ({"text_config": {"attn_logit_softcapping": 50.0}}, "attn_logit_softcapping is 50.0"),
        ({"text_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping is 30.0"),
        ({"text_config": {"use_bidirectional_attention": True}}, "use_bidirectional_attention is"),
    ],
)
def test_a_text_model_that_computes_something_else_is_refused(change, words, tmp_path):
    config = {"model_type": "gemma3", "text_config": formats.hf_config(GEMMA3)}
    for key, value in change.items():
        config[key] = config[key] | value if isinstance(value, dict) else None
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=words):
        hf.read_model(tmp_path, FORMATS)


def test_two_tensors_of_one_name_are_refused():
    there = {
        name: hf.Stored(Path("model.safetensors"), name, "F32", [1])
        for name in ("model.norm.weight", "language_model.model.norm.weight")
    }
    with pytest.raises(InputError, match="has both model.norm.weight and language_model.model"):
        hf._of_text(there, formats)
    assert MODELS["gemma3"] is GEMMA
