"""Folders of Hugging Face's whose config.json and tensors say one thing in several ways, or two
things at once: what we read computes transformers' logits, or is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from checkpoint import hf
from configs.schema import InputError
from models import FORMATS, MODELS, deepseek_v3
from tests.shapes import DEEPSEEK, SHAPES, formats, write_hf
from tools import check, convert, positions
from train import architecture

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(60).view(2, 30)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write(folder: Path, family: Any, args: Any, limit: str = "5GB") -> Path:
    return write_hf(folder, family, args, limit=limit)


def set_fields(folder: Path, **fields: object) -> None:
    """Change fields of config.json; a field that becomes `...` is taken out."""
    config = json.loads((folder / "config.json").read_text()) | fields
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))


def ours(folder: Path) -> nn.Module:
    name, args = hf.read_model(folder, FORMATS)
    model = MODELS[name].build(args)
    live = model.state_dict()
    shapes = {parameter: list(tensor.shape) for parameter, tensor in live.items()}
    for parameter, files in hf.weights(folder, FORMATS[name], args, shapes).items():
        live[parameter].copy_(files.read())
    return model


def theirs(folder: Path) -> Tensor:
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        return model(TOKENS).logits


def assert_computes_the_same(folder: Path) -> None:
    with torch.no_grad():
        logits = ours(folder)(TOKENS, torch.arange(TOKENS.shape[1]))
    torch.testing.assert_close(logits, theirs(folder), rtol=1e-5, atol=1e-5)


# One matrix or two -----------------------------------------------------------------------------------

FAMILIES = {
    name: SHAPES[name]
    for name in ("llama3.1", "qwen3", "qwen3 experts", "olmo2", "olmo3", "gpt_oss")
} | {"deepseek_v3": (deepseek_v3.FAMILY, DEEPSEEK)}


def without(folder: Path, name: str) -> None:
    tensors = load_file(folder / hf.ONE_FILE)
    del tensors[name]
    save_file(tensors, folder / hf.ONE_FILE, {"format": "pt"})


@pytest.mark.parametrize("shape", FAMILIES)
def test_an_untied_head_is_kept_even_if_the_flag_says_tied(shape, tmp_path, caplog):
    """The head is kept as in transformers 5; in one file and in several."""
    for limit in ("5GB", "20KB") if shape == "qwen3" else ("5GB",):
        folder = write(tmp_path / limit, *FAMILIES[shape], limit)
        set_fields(folder, tie_word_embeddings=True)
        assert_computes_the_same(folder)
        assert f"{HEAD} that differs from {EMBEDDING}" in caplog.text
        assert not hf.read_model(folder, FORMATS)[1].tied_embeddings


def test_negative_control_the_flag_alone_drops_a_head(tmp_path, monkeypatch):
    folder = write(tmp_path / "hf", *SHAPES["qwen3"])
    set_fields(folder, tie_word_embeddings=True)
    monkeypatch.setattr(hf, "_has_own_head", lambda *_: False)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_computes_the_same(folder)


@pytest.mark.parametrize("shape", FAMILIES)
def test_one_matrix_is_found_under_either_name(shape, tmp_path):
    family, args = FAMILIES[shape]
    folder = write(tmp_path / "hf", family, args)
    tensors = load_file(folder / hf.ONE_FILE)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    save_file(tensors, folder / hf.ONE_FILE, {"format": "pt"})
    set_fields(folder, tie_word_embeddings=True)
    assert hf.read_model(folder, FORMATS)[1] == replace(args, tied_embeddings=True)
    assert_computes_the_same(folder)  # a copy
    without(folder, EMBEDDING)
    assert_computes_the_same(folder)  # the head serves as both
    set_fields(folder, tie_word_embeddings=False)
    with pytest.raises(InputError, match=rf"{EMBEDDING} is missing"):
        ours(folder)


@pytest.mark.parametrize("flag", [False, ...])
def test_a_head_that_is_missing_is_not_made_up(flag, tmp_path):
    """transformers draws random numbers for it, with a warning."""
    folder = write(tmp_path / "hf", *SHAPES["llama3"])
    without(folder, HEAD)
    set_fields(folder, tie_word_embeddings=flag)
    with pytest.raises(InputError, match=f"has no {HEAD}, and its config.json does not say"):
        ours(folder)


def test_a_run_that_would_tie_an_untied_model_is_refused_before_it_starts(tmp_path):
    from configs.load import load_config

    family, args = SHAPES["llama3.2"]
    args = replace(args, rope_scaling=None, vocab_size=263)
    folder = write(tmp_path / "hf", family, replace(args, tied_embeddings=False))
    set_fields(folder, tie_word_embeddings=True)
    numbers = {key: getattr(args, key) for key in family.numbers.options}
    options = [f"--model.{key}={str(value).lower()}" for key, value in numbers.items()]
    options.append("--data.tokenizer=bytes")
    run = load_config([*options, f"--checkpoint.load_hf={folder}", "--training.seq_len=16"])
    (problem,) = check.model_problems(run, folder)
    assert "model.tied_embeddings is false in the checkpoint and true here" in problem
    options.append("--model.tied_embeddings=false")
    run = load_config([*options, f"--checkpoint.load_hf={folder}", "--training.seq_len=16"])
    assert not list(check.model_problems(run, folder))


def test_both_matrices_go_in_and_out_again(tmp_path):
    folder = write(tmp_path / "hf", *SHAPES["qwen3"])
    set_fields(folder, tie_word_embeddings=True)
    for argv in (
        ("from-hf", folder, tmp_path / "run"),
        ("to-hf", tmp_path / "run", tmp_path / "out"),
    ):
        assert convert.main([str(word) for word in argv]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert torch.equal(theirs(folder), theirs(tmp_path / "out"))


def test_a_folder_is_a_flavor(tmp_path):
    """Its family follows, a number may still be overridden, and what is wrong is one sentence."""
    from configs.load import ConfigError, load_config

    family, args = SHAPES["qwen3 experts"]
    args = replace(args, vocab_size=263)
    folder = write(tmp_path / "hf", family, args)
    options = [f"--model.flavor={folder}", "--data.tokenizer=bytes", "--training.seq_len=16"]
    assert architecture(load_config(options)) == (family, args)
    overridden = load_config([*options, "--model.rope_theta=5.0"])
    assert architecture(overridden)[1] == replace(args, rope_theta=5.0)
    with pytest.raises(ConfigError, match='of the family "qwen3", and model.family is "llama"'):
        load_config([*options, "--model.family=llama"])
    broken = write(tmp_path / "broken", family, args)
    set_fields(broken, hidden_act="gelu")
    with pytest.raises(ConfigError, match=r'broken/config.json: hidden_act is "gelu"'):
        load_config([f"--model.flavor={broken}", *options[1:]])
    with pytest.raises(ConfigError, match="a folder of Hugging Face's may be named too"):
        load_config([f"--model.flavor={tmp_path}", *options[1:]])


def test_a_model_sees_its_positions_as_far_as_memory_goes():
    family, args = SHAPES["llama3"]
    model = family.build(args)
    assert positions.within_memory(model, args) == (64, "all of the model's positions")
    count, reason = positions.within_memory(model, replace(args, max_seq_len=2**40))
    assert 2**10 < count < 2**40 and count % 1024 == 0
    assert "of the model's 1,099,511,627,776: " in reason and "GiB of memory" in reason


# Fields of config.json -------------------------------------------------------------------------------

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
ORIGINAL = "original_max_position_embeddings"
OLD = {"rope_parameters": ...}  # before transformers 5
NEW = {"rope_scaling": ..., "rope_theta": ...}


def llama3(**more: object) -> dict:
    return {"rope_type": "llama3"} | LLAMA3 | more


SPELLINGS = {  # name: (shape, fields)
    "no rotary numbers": ("llama3", OLD | NEW),
    "theta at the top": ("llama3", OLD | {"rope_scaling": None, "rope_theta": 77.0}),
    "type": ("llama3", OLD | {"rope_scaling": {"type": "llama3", ORIGINAL: 16} | LLAMA3}),
    "original inside": ("llama3", OLD | {"rope_scaling": llama3(**{ORIGINAL: 16})}),
    "original at the top": ("llama3", OLD | {"rope_scaling": llama3(), ORIGINAL: 16}),
    "original at the top, new": (
        "llama3",
        NEW | {"rope_parameters": llama3(rope_theta=77.0), ORIGINAL: 16},
    ),
    "two originals": ("llama3", OLD | {"rope_scaling": llama3(**{ORIGINAL: 40}), ORIGINAL: 16}),
    "both spellings": (
        "llama3",
        {"rope_scaling": llama3(**{ORIGINAL: 16}), "rope_parameters": {"rope_theta": 77.0}},
    ),
    "whole rotation": ("llama3", {"partial_rotary_factor": 1.0}),
    "olmo2, original at the top": ("olmo2", OLD | {"rope_scaling": YARN, ORIGINAL: 16}),
    "olmo3, original inside": ("olmo3", OLD | {"rope_scaling": YARN | {ORIGINAL: 16}}),
    "gpt_oss, original at the top": ("gpt_oss", OLD | {"rope_scaling": YARN, ORIGINAL: 16}),
    "deepseek_v3, two originals": (
        "deepseek_v3",
        OLD | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8, ORIGINAL: 64}, ORIGINAL: 16},
    ),
    "windows that are not used": (
        "qwen3",
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
    ),
    "fields that change nothing": (
        "llama3",
        {"logits_scaling": 1.0, "final_logit_softcapping": None, "rope_interleaved": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_computes_what_transformers_computes(name, tmp_path):
    shape, fields = SPELLINGS[name]
    folder = write(tmp_path / "hf", *SHAPES[shape])
    set_fields(folder, **fields)
    assert_computes_the_same(folder)


SCALED = ({"rope_type": "linear"}, {"rope_type": "dynamic"}, {"rope_type": "longrope"})
REFUSED = [  # (shapes, fields, words)
    *(
        (tuple(FAMILIES), {spelling: kind | {"factor": 4.0}}, f"of type '{kind['rope_type']}'")
        for kind in SCALED
        for spelling in ("rope_scaling",)
    ),
    (("llama3.1", "qwen3"), {"rope_scaling": YARN}, "of type 'yarn'"),
    (("qwen3", "olmo2", "gpt_oss"), {"rope_scaling": llama3()}, "of type 'llama3'"),
    (tuple(FAMILIES), {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (("llama3.1",), NEW | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary"),
    (("llama3.1",), {"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "factor of the"),
    (("llama3.1",), {"rope_scaling": llama3(attention_factor=1.2)}, "attention_factor of the"),
    (
        ("deepseek_v3",),
        {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.2}},
        "attention_factor of the",
    ),
    (("qwen3",), NEW | {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "full_attention"),
    (("olmo3",), {"rope_scaling": YARN | {ORIGINAL: 64}, ORIGINAL: 16}, f"{ORIGINAL} is 16, and 64"),
    (("llama3.1", "olmo2", "deepseek_v3"), {"sliding_window": 8}, "sliding_window is 8"),
    (
        ("llama3.1", "qwen3", "olmo2", "deepseek_v3"),
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types has",
    ),
    (("qwen3",), {"use_sliding_window": True}, "use_sliding_window is true"),
    (("deepseek_v3",), {"num_key_value_heads": 1}, "num_key_value_heads is 1"),
    (tuple(FAMILIES), {"tie_word_embeddings": 1}, "tie_word_embeddings is 1, and must be"),
    (("llama3.1", "qwen3", "olmo2", "deepseek_v3"), {"attention_bias": True}, "attention_bias is true"),
    (("gpt_oss",), {"attention_bias": False}, "attention_bias is false"),
    (tuple(FAMILIES), {"hidden_act": "gelu_pytorch_tanh"}, 'hidden_act is "gelu_pytorch_tanh"'),
    *(
        (tuple(FAMILIES), {field: value}, f"{field} is ")
        for field, value in {
            "logits_scaling": 8.0,
            "logit_scale": 0.0625,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
            "attention_multiplier": 0.0156,
            "query_pre_attn_scalar": 256,
            "residual_multiplier": 0.22,
            "embedding_multiplier": 12.0,
            "clip_qkv": 8.0,
            "use_qk_norm": True,
            "no_rope_layers": [1, 1, 0],
            "use_bidirectional_attention": True,
        }.items()
    ),
]  # fmt: skip


LINEAR, FULL, LOCAL = "linear_attention", "full_attention", "sliding_attention"
LAYERS = {"num_heads": 6, "head_dim": 9, "short_conv_kernel_size": 4}


def scaled(**more: object) -> dict:
    return {"rope_scaling": YARN | {ORIGINAL: 16} | more}


OF_ONE_FAMILY = {  # shape: what its model cannot express, and the words
    "kimi_linear": [
        ({"layer_types": [LINEAR, FULL] * 2 + [LINEAR]}, "and in the last layer, is"),
        ({"layer_types": [LINEAR, FULL]}, "for each of the 5 layers"),
        ({"layer_types": [LOCAL] * 5}, "only linear_attention with full_attention"),
        (
            {
                "layer_types": ...,
                "linear_attn_config": LAYERS | {"full_attn_layers": [2, 4, 5], "kda_layers": [1]},
            },
            "does not name each of 5 layers once",
        ),
        ({"layer_types": ..., "linear_attn_config": LAYERS}, "full_attn_layers"),
        ({"linear_attn_config": "x"}, "linear_attn_config is 'x', and must be a table"),
        ({"mlp_layer_types": ["sparse"] * 4 + ["dense"]}, "only dense layers before all sparse"),
        ({"mla_use_nope": False}, "mla_use_nope is false"),
        ({"moe_router_activation_func": "softmax"}, 'moe_router_activation_func is "softmax"'),
        ({"num_expert_group": 2}, "num_expert_group is 2"),
        ({"q_lora_rank": 8}, "q_lora_rank is 8"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1"),
        ({"num_key_value_heads": 1}, "has separate keys and values"),
    ],
    "qwen3_next": [
        ({"layer_types": [LINEAR, FULL] * 2 + [FULL]}, "full_attention at equal intervals"),
        ({"layer_types": [LINEAR, FULL]}, "for each of the 5 layers"),
        ({"layer_types": [LOCAL] * 5}, "only linear_attention with full_attention"),
        ({"layer_types": FULL}, "layer_types is 'full_attention'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is false"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers is [1]"),
        ({"attn_output_gate": False}, "attn_output_gate is false"),
        ({"linear_num_key_heads": 4}, "each key head must serve an equal group of value heads"),
        ({"rope_parameters": {"partial_rotary_factor": 0.3}}, "partial_rotary_factor is 0.3: 3 of"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "only default"),
        ({"rope_parameters": {"mrope_section": [11, 11, 10]}}, "mrope_section of the rotary"),
    ],
    "gpt_oss": [
        ({"quantization_config": {"quant_method": "gptq"}}, "convert them to bfloat16 first"),
        ({"layer_types": [FULL] * 3}, "sliding_attention and full_attention in turns"),
        ({"swiglu_limit": 5.0}, "swiglu_limit is 5.0, only 7.0 can be converted"),
        ({"rope_scaling": YARN | {"original_max_seq_len": 16}}, "original_max_position"),
        (scaled(mscale=1.0), "mscale of the rotary positions is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "only default and yarn"),
        ({"sliding_window": None}, "sliding_window is None"),
    ],
    "olmo3": [
        ({"layer_types": [FULL] * 5}, "over and over"),
        ({"layer_types": [LOCAL] * 3}, "layer_types is"),
        (scaled(mscale=0.7), "of the rotary positions is not supported"),
        (scaled(truncate=False), "of the rotary positions is not supported"),
        ({"rope_parameters": {"rope_type": "default"}}, "must say what holds in full_attention"),
        ({"rope_parameters": {LOCAL: YARN}}, "rotary positions of sliding_attention are"),
        (
            {"rope_parameters": {LOCAL: {"rope_theta": 3.0}}},
            "rotary positions of sliding_attention are",
        ),
        ({"sliding_window": -1}, "sliding_window is -1"),
    ],
    "gemma3": [
        ({"layer_types": [LOCAL, FULL, FULL, LOCAL, LOCAL]}, "equally many"),
        ({"layer_types": [LOCAL] * 3}, "layer_types is"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"rope_scaling": YARN}, "of type 'yarn'"),
        ({"rope_parameters": {"rope_type": "default"}}, "must say what holds in full_attention"),
        (
            {"rope_parameters": {LOCAL: {"rope_type": "linear", "factor": 4.0}}},
            "of type 'linear'",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"query_pre_attn_scalar": 0.5}, "query_pre_attn_scalar is 0.5"),
    ],
    "gemma2": [
        ({"layer_types": [FULL, LOCAL] * 3}, "in turn are supported"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"final_logit_softcapping": -30.0}, "final_logit_softcapping is -30.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "of type 'linear'"),
    ],
}
REFUSED += [((shape,), *row) for shape, rows in OF_ONE_FAMILY.items() for row in rows]


def test_what_would_compute_something_else_is_refused_by_name(tmp_path):
    for shapes, fields, words in REFUSED:
        for shape in shapes:
            family, args = (SHAPES | FAMILIES)[shape]
            (tmp_path / "config.json").write_text(json.dumps(formats(family).hf_config(args)))
            set_fields(tmp_path, **fields)
            with pytest.raises(InputError) as refusal:
                hf.read_model(tmp_path, FORMATS)
            assert words in str(refusal.value), (shape, fields)
