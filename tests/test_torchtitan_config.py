"""A TOML file of TorchTitan as a configuration of ours (tools/torchtitan_config.py)."""

from pathlib import Path

import pytest

from configs.load import load_config
from configs.schema import Config
from tools import convert

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
    """Also what the file leaves out and TorchTitan's defaults say: 200 steps of warmup, linear decay
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
    assert "no counterpart" not in said


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
    assert said.count("no counterpart") == 2 and '"mx"' in said and "float16" in said
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
        'training.dtype = "bfloat16": has no counterpart',
    ),
    '"c4"': ('"c4_test"', "name a corpus as data.source"),
    "[activation": (
        '[lr_scheduler]\ndecay_type = "sqrt"\n[activation',
        "the decay is linear here",
    ),
    "[training]": ("[metrics]\nenable_wandb = true\n[training]", "metrics.enable_wandb = true"),
    "description": ("speed = 3\ndescription", "job.speed = 3: has no counterpart"),
}


@pytest.mark.parametrize("place", LOST)
def test_what_has_no_counterpart_is_listed(place, tmp_path, capsys):
    text, sentence = LOST[place]
    assert place in EIGHT_BILLION
    _, said = translated(tmp_path, capsys, EIGHT_BILLION.replace(place, text, 1), "--gpus=64")
    assert said.count("no counterpart:") == 1 and sentence in said


def test_options_that_do_nothing_are_not_listed(tmp_path, capsys):
    more = '[training]\ndtype = "float32"'
    text = EIGHT_BILLION.replace("[training]", more)
    assert "no counterpart" not in translated(tmp_path, capsys, text, "--gpus=64")[1]


WRONG = {
    "no toml": ("a = [", "ours.toml", "TOML"),
    "not theirs": ("[run]\nfolder = 'x'\n", "", "has no option of TorchTitan's"),
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
