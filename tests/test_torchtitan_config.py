"""A configuration of TorchTitan, a TOML file or the JSON of 0.3, as one of ours
(tools/torchtitan_config.py, tools/torchtitan_json.py)."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from configs.schema import Config
from tools import convert

DECAY = "optimizer.weight_decay = 0.1: norms do not decay here"

EIGHT_BILLION = """
[job]
dump_folder = "runs/from_titan"
description = "8B"

[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"

[optimizer]
lr = 3e-4

[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
dataset = "c4"

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""


def translated(tmp_path: Path, capsys, text: str, *words: str) -> tuple[Config, str]:
    source, out = tmp_path / "theirs.toml", tmp_path / "ours.toml"
    source.write_text(text)
    code = convert.main(["config", str(source), str(out), *words])
    said = capsys.readouterr()
    assert code == 0, said.err
    return load_config([str(out)], 64, 8), said.out


def refused(tmp_path: Path, capsys, text: str, *words: str) -> str:
    source, out = tmp_path / "theirs.toml", tmp_path / "ours.toml"
    source.write_text(text)
    assert convert.main(["config", str(source), str(out), *words]) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["theirs.toml"]
    return capsys.readouterr().err


def test_a_preset_becomes_ours(tmp_path, capsys):
    """Options that the file leaves out get TorchTitan's defaults: 200 steps of warmup, linear decay
    to 0, ten checkpoints, a reduce-scatter with every microbatch, and a BOS before each document."""
    cfg, said = translated(tmp_path, capsys, EIGHT_BILLION, "--gpus=64")
    assert (cfg.model.family, cfg.model.flavor) == ("llama", "8B")
    assert cfg.run.folder == "runs/from_titan"
    assert (cfg.training.global_batch_size, cfg.training.local_batch_size) == (64, 1)
    assert (cfg.training.seq_len, cfg.training.steps, cfg.training.max_norm) == (8192, 1000, 1.0)
    assert (cfg.training.param_dtype, cfg.training.reduce_dtype) == ("bfloat16", "float32")
    assert (cfg.optimizer.lr, cfg.optimizer.betas) == (3e-4, (0.9, 0.95))
    assert (cfg.lr_schedule.kind, cfg.lr_schedule.warmup_steps) == ("linear", 200)
    assert cfg.lr_schedule.min_ratio == 0.0
    assert (cfg.data.source, cfg.data.stream, cfg.data.add_bos) == ("hf:allenai/c4/en", True, True)
    assert cfg.data.tokenizer == "./assets/hf/Llama-3.1-8B/tokenizer.json"
    assert cfg.parallelism.accumulate_gradients == "sharded"
    assert cfg.activation_checkpoint.mode == "selective"
    assert cfg.checkpoint.interval == 0, "theirs saves nothing unless checkpoint.enable is set"
    assert not cfg.compile.enabled and not cfg.metrics.tensorboard
    assert said.count("no counterpart") == 1 and DECAY in said


MANY = EIGHT_BILLION.replace('flavor = "8B"', 'flavor = "70B"\nconverters = ["mx"]').replace(
    'mode = "selective"', 'mode = "none"'
)


def test_meshes_pipelines_and_quantization(tmp_path, capsys):
    text = f"""{MANY}
[parallelism]
data_parallel_shard_degree = 2
fsdp_reshard_after_forward = "never"
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"

[compile]
enable = true
components = ["model", "loss"]

[lr_scheduler]
decay_ratio = 0.1

[checkpoint]
enable = true
interval = 50
async_mode = "async"
initial_load_path = "hf/70b"
initial_load_in_hf = true
last_save_in_hf = true
export_dtype = "float16"

[debug]
seed = 5
deterministic = true
""".replace("local_batch_size = 1", "local_batch_size = 8")
    cfg, said = translated(tmp_path, capsys, text)
    p = cfg.parallelism
    assert (p.data_parallel_shard, p.tensor_parallel, p.pipeline_parallel) == (2, 8, 4)
    assert (p.reshard_after_forward, p.async_tensor_parallel) == (False, True)
    assert p.pipeline_schedule == "interleaved_1f1b"
    # eight sequences of each of two ranks, one in a microbatch
    assert (cfg.training.global_batch_size, cfg.training.local_batch_size) == (16, 1)
    assert cfg.compile.enabled
    assert (cfg.lr_schedule.kind, cfg.lr_schedule.decay_fraction) == ("wsd", 0.1)
    assert (cfg.checkpoint.interval, cfg.checkpoint.async_save) == (50, True)
    assert (cfg.checkpoint.load_hf, cfg.checkpoint.export_hf) == ("hf/70b", "bfloat16")
    assert (cfg.run.seed, cfg.run.deterministic) == (5, True)
    assert said.count("no counterpart") == 3 and '"mx"' in said and "float16" in said
    assert '# No counterpart: model.converters has "mx"' in (tmp_path / "ours.toml").read_text()


def test_float8_and_its_recipe(tmp_path, capsys):
    text = EIGHT_BILLION.replace("[optimizer]", 'converters = ["float8"]\n[optimizer]')
    text += '\n[quantize.linear.float8]\nrecipe_name = "rowwise"\nfilter_fqns = ["output"]\n'
    text += "\n[compile]\nenable = true\n"
    cfg, said = translated(tmp_path, capsys, text, "--gpus=64")
    assert cfg.training.float8 == "rowwise" and "filter_fqns" in said


def test_blocks_between_others_are_recomputed_as_theirs(tmp_path, capsys):
    text = EIGHT_BILLION.replace('option = "op"', 'option = "3"')
    cfg, _ = translated(tmp_path, capsys, text, "--gpus=64")
    assert (cfg.activation_checkpoint.mode, cfg.activation_checkpoint.every_n) == ("every_n", 3)


LOST = {
    "[optimizer]\nlr": ('[optimizer]\nname = "Adam"\nlr', "optimizer.name"),
    "steps = 1000": (
        'steps = 1000\ndtype = "bfloat16"',
        'no counterpart: training.dtype = "bfloat16"\n',
    ),
    '"c4"': ('"c4_test"', "name a corpus as data.source"),
    "[training]": ("[metrics]\nenable_wandb = true\n[training]", "metrics.enable_wandb = true"),
    "description": ("speed = 3\ndescription", "no counterpart: job.speed = 3\n"),
}


@pytest.mark.parametrize("place", LOST)
def test_what_has_no_counterpart_is_listed(place, tmp_path, capsys):
    text, sentence = LOST[place]
    assert place in EIGHT_BILLION
    _, said = translated(tmp_path, capsys, EIGHT_BILLION.replace(place, text, 1), "--gpus=64")
    assert said.count("no counterpart:") == 2 and sentence in said and DECAY in said


WRONG = {
    "no toml": ("a = [", "ours.toml", "TOML"),
    "not theirs": ("[data]\nseed = 1\n", "", "has no option of TorchTitan's"),
    "ours": ("[run]\nfolder = 'x'\n", "", "is a configuration of Plumbline already"),
    "gpus": (EIGHT_BILLION, "", "give --gpus"),
    "family": (EIGHT_BILLION.replace("llama3", "flux"), "", 'model.name = "flux" is none'),
    "size": (
        EIGHT_BILLION.replace('"8B"', '"9B"'),
        "",
        "is none of the sizes here: debug, 1B, 3B, 8B",
    ),
    "type": (EIGHT_BILLION.replace("8192", '"8192"'), "", 'training.seq_len = "8192" is no int'),
    "rule": (
        EIGHT_BILLION + "\n[parallelism]\ntensor_parallel_degree = 3\n",
        "--gpus=64",
        "nothing written",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name, tmp_path, capsys):
    text, word, sentence = WRONG[name]
    said = refused(tmp_path, capsys, text, *([word] if word.startswith("--") else []))
    assert sentence in said and "partial" not in said and "Traceback" not in said


def test_an_existing_file_is_left_alone(tmp_path, capsys):
    out = tmp_path / "ours.toml"
    out.write_text("mine")
    source = tmp_path / "theirs.toml"
    source.write_text(EIGHT_BILLION)
    assert convert.main(["config", str(source), str(out), "--gpus=8"]) == 2
    assert "exists already" in capsys.readouterr().err and out.read_text() == "mine"


def linear(inputs: int, outputs: int, **more: Any) -> dict[str, Any]:
    return {"in_features": inputs, "out_features": outputs, "bias": False, **more}


ROPE = {"theta": 500000, "scaling": "llama", "scaling_factor": 8.0, "rope_factor": 1.0}
ATTENTION = {
    "n_heads": 32,
    "qkv_linear": {"head_dim": 128, "n_kv_heads": 8, "wqkv": linear(4096, 6144)},
    "wo": linear(4096, 4096),
    "rope": ROPE,
}
BLOCK = {
    "attention": ATTENTION,
    "feed_forward": {"w1": linear(4096, 14336), "w2": linear(14336, 4096)},
    "moe": None,
    "attention_norm": {"eps": 1e-5},
}
MODEL = {"dim": 4096, "vocab_size": 128256, "enable_weight_tying": False, "layers": [BLOCK] * 32}
EVERYTHING = {
    "pattern": ".*",
    "optimizer_name": "AdamW",
    "optimizer_kwargs": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
}
# What 0.3 writes of an 8B, shortened.
AS_JSON = {
    "model_spec": {"name": "llama3", "flavor": "8B", "model": MODEL},
    "hf_assets_path": "./assets/hf/Llama-3.1-8B",
    "dump_folder": "runs/from_titan",
    "profiler": {"enable_profiling": True, "profile_freq": 100, "trace_post_processor": None},
    "metrics": {"log_freq": 5, "enable_tensorboard": True, "enable_wandb": False},
    "tokenizer": {},
    "dataloader": {"dataset": "c4", "dataset_path": None, "num_workers": 0, "infinite": True},
    "optimizer": {"param_groups": [EVERYTHING], "implementation": "fused"},
    "lr_scheduler": {"warmup_steps": 200, "decay_ratio": None, "decay_type": "cosine"},
    "training": {"local_batch_size": 1, "seq_len": 8192, "max_norm": 1.0, "steps": 1000},
    "parallelism": {"tensor_parallel_degree": 8, "spmd_backend": "spmd_types"},
    "checkpoint": {"enable": True, "interval": 500, "initial_load_model_only": True},
    "activation_checkpoint": {"debug": False, "force_recompute_mm_shapes_by_fqns": ["gate"]},
    "compile": {"enable": True, "enable_async_tensor_parallel": True, "components": ["model"]},
    "comm": {"train_timeout_seconds": 100, "trace_buf_size": 20000, "mode": "default"},
    "validator": {"enable": False, "freq": 500, "dataloader": {"dataset": "c4_validation"}},
    "debug": {"seed": 7, "print_config": False},
    "override": {"imports": []},
    "loss": {"num_chunks": 8, "loss_fn": {"global_vocab_size": 128256}},
}
FLOAT8 = "float8 does not show in that file: see training.float8"


def from_json(tmp_path: Path, capsys, tables: dict[str, Any]) -> tuple[Config, str]:
    source, out = tmp_path / "theirs.json", tmp_path / "ours.toml"
    source.write_text(json.dumps(tables))
    code = convert.main(["config", str(source), str(out), "--gpus=64"])
    said = capsys.readouterr()
    assert code == 0, said.err
    return load_config([str(out)], 64, 8), said.out


def changed(**tables: Any) -> dict[str, Any]:
    """AS_JSON with tables like these, each merged with its own."""
    result = copy.deepcopy(AS_JSON)
    for name, table in tables.items():
        result[name] = result[name] | table
    return result


def test_the_json_of_a_run_becomes_ours(tmp_path, capsys):
    cfg, said = from_json(tmp_path, capsys, AS_JSON)
    assert (cfg.model.family, cfg.model.flavor, cfg.model.dim) == ("llama", "8B", None)
    assert cfg.run.folder == "runs/from_titan" and cfg.run.seed == 7
    assert (cfg.optimizer.lr, cfg.optimizer.betas) == (3e-4, (0.9, 0.95))
    assert (cfg.lr_schedule.kind, cfg.lr_schedule.warmup_steps) == ("cosine", 200)
    assert (cfg.training.global_batch_size, cfg.training.seq_len) == (8, 8192)
    p = cfg.parallelism
    assert (p.tensor_parallel, p.async_tensor_parallel) == (8, True)
    assert cfg.activation_checkpoint.mode == "selective" and cfg.compile.enabled
    assert (cfg.metrics.interval, cfg.metrics.tensorboard, cfg.profiler.enabled) == (5, True, True)
    assert (cfg.checkpoint.interval, cfg.data.source) == (500, "hf:allenai/c4/en")
    assert said.count("no counterpart") == 2 and DECAY in said and FLOAT8 in said


@pytest.mark.parametrize("table, mode", [(None, "none"), ({"debug": False}, "full")])
def test_the_json_names_no_class_of_recomputation(table, mode, tmp_path, capsys):
    cfg, _ = from_json(tmp_path, capsys, AS_JSON | {"activation_checkpoint": table})
    assert cfg.activation_checkpoint.mode == mode


@pytest.mark.parametrize(
    "name, dtype", [("fused", "float32"), ("fused_opt_states_bf16", "bfloat16")]
)
def test_the_type_of_adamw_s_averages(name, dtype, tmp_path, capsys):
    tables = changed(optimizer={"implementation": name})
    cfg, _ = from_json(tmp_path, capsys, tables)
    assert cfg.optimizer.moment_dtype == dtype


def test_another_model_of_that_name_has_its_own_numbers(tmp_path, capsys):
    """The JSON contains the model itself, so a fork's numbers are seen."""
    model = copy.deepcopy(MODEL)
    model["layers"] = model["layers"][:5]
    model["layers"][0]["feed_forward"]["w2"] = linear(12288, 4096)
    model["layers"][0]["attention_norm"]["eps"] = 1e-6
    model["layers"][0]["attention"]["wo"] = linear(4096, 4096, rank=8, alpha=16.0)
    spec = {"flavor": "mine", "model": model}
    cfg, said = from_json(tmp_path, capsys, changed(model_spec=spec))
    m = cfg.model
    assert (m.flavor, m.dim, m.n_layers, m.hidden_dim) == ("debug", 4096, 5, 12288)
    assert (m.n_heads, m.n_kv_heads, m.head_dim, m.vocab_size) == (32, 8, 128, 128256)
    assert m.rope_theta == 500000
    assert "the model's norm_eps is 1e-06, and 1e-05 here" in said
    assert "the model's rope_factor is 8.0, and None here" in said
    assert "linear layers with alpha, rank: plain ones here, see [lora]" in said


def of_deepseek() -> dict[str, Any]:
    experts = {
        "num_experts": 64,
        "routed_experts": {"inner_experts": {"hidden_dim": 1408}},
        "router": {
            "top_k": 6,
            "num_expert_groups": None,
            "num_limited_groups": None,
            "score_func": "softmax",
            "route_norm": False,
            "route_scale": 1.0,
        },
        "load_balance_coeff": 0.002,
        "shared_experts": {"w2": linear(2816, 2048)},
    }
    attention = {
        "n_heads": 16,
        "q_lora_rank": 0,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope": ROPE | {"theta": 10000.0, "scaling": "yarn", "rope_factor": 40.0},
    }
    dense = BLOCK | {"attention": attention, "feed_forward": {"w2": linear(10944, 2048)}}
    sparse = dense | {"feed_forward": None, "moe": experts}
    model = MODEL | {"dim": 2048, "vocab_size": 102400, "layers": [dense] + [sparse] * 26}
    spec = {"name": "deepseek_v3", "flavor": "16B", "model": model | {"mtp_layers": [1]}}
    return changed(
        model_spec=spec, compile={"enable": False, "enable_async_tensor_parallel": False}
    )


def test_a_mixture_of_experts_is_compared_number_by_number(tmp_path, capsys):
    cfg, said = from_json(tmp_path, capsys, of_deepseek())
    m = cfg.model
    assert (m.family, m.flavor) == ("deepseek_v3", "16B-A3B")
    assert (m.hidden_dim, m.vocab_size, m.routed_scale) == (10944, 102400, 1.0)
    assert (m.n_experts, m.expert_dim, m.n_shared_experts, m.n_dense_layers) == (None,) * 4
    assert cfg.training.expert_bias_speed == 0.002
    for sentence in ("mtp_layers", "a softmax", "not normalised", "rope_factor is 40.0"):
        assert sentence in said
    assert "balanced by a bias there" not in said


def test_what_else_of_the_json_has_no_counterpart(tmp_path, capsys):
    embeddings = EVERYTHING | {"pattern": "tok_embeddings"}
    tables = changed(
        optimizer={"param_groups": [embeddings, EVERYTHING]},
        dataloader={"sample_processor": "<function f>"},
        override={"imports": ["mine"]},
        parallelism={"enable_sequence_parallel": False},
    )
    _, said = from_json(tmp_path, capsys, tables)
    assert "AdamW for tok_embeddings" in said and "dataloader.sample_processor" in said
    assert 'override.imports = ["mine"]' in said
    assert "parallelism.enable_sequence_parallel = false" in said


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"model_spec": {"model": {}}})])
def test_a_json_of_something_else_is_refused(text, tmp_path, capsys):
    source, out = tmp_path / "theirs.json", tmp_path / "ours.toml"
    source.write_text(text)
    assert convert.main(["config", str(source), str(out), "--gpus=64"]) == 2
    said = capsys.readouterr().err
    assert str(source) in said and "JSON" in said or "TorchTitan 0.3" in said
    assert not out.exists()
