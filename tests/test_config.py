"""Configurations: every mistake is named in a sentence, all at once, before anything is launched or
written."""

import os
import re
from itertools import product
from pathlib import Path

import pytest
import tomli

from configs import check, dropped, elsewhere
from configs.common import COMMON
from configs.load import (
    OPTIONS,
    TABLES,
    ConfigError,
    _toml,
    allowed,
    dump,
    help_asked_for,
    help_text,
    ignored,
    json_schema,
    load_config,
    main,
)
from configs.schema import Config, InputError, Model
from models import FAMILIES, NUMBERS
from models import options as numbers_of_dense
from models.options import Numbers
from reliability.objects import location

ROOT = Path(__file__).resolve().parent.parent
PRESETS = sorted((ROOT / "configs").glob("*.toml"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Yield an empty working folder, in which nothing but the test's own file may appear."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    written = {path.name for path in tmp_path.rglob("*")} - {"x.toml", "y.toml", "folder", "pipe"}
    assert not written


def problems_of(
    argv: list[str], world: int | None = None, local_world: int | None = None
) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv, world, local_world)
    problems = caught.value.problems
    assert problems and all(problem.strip() and "\n" not in problem for problem in problems)
    assert all(problem in str(caught.value) for problem in problems)
    return problems


def assert_says(problem: str, words: str) -> None:
    """Check that the problem contains the fragments of words in this order, separated by |."""
    position = 0
    for fragment in words.split("|"):
        found = problem.find(fragment, position)
        assert found >= 0, f"{fragment!r} is missing (in this order) in: {problem}"
        position = found + len(fragment)


# --------------------------------------------------------------------------------------------------
# bad files

# name: (content, the words of the one problem)
BAD_FILES = {
    "a table's bracket": ("[training\nsteps = 1", "x.toml: not valid TOML|line 1|[training"),
    "an open string": (
        "[run]\nfolder = 'x\nseed = 1",
        "x.toml: not valid TOML|at the end, line 3|seed = 1",
    ),
    "a key twice": (
        "[run]\nseed = 1\nseed = 2\n[data]\n",
        "x.toml: not valid TOML|given twice|line 3|seed = 2",
    ),
    "a table twice": (
        '[run]\nseed = 1\n[run]\ndevice = "cpu"\n',
        "x.toml: not valid TOML|twice|line 3|[run]|stands once: put its options together",
    ),
    "unknown table": (
        "[trainning]\nsteps = 1",
        "x.toml: trainning: no such table; did you mean [training]?",
    ),
    "unknown key": (
        "[training]\nstps = 1",
        "x.toml: training.stps: no such option; did you mean training.steps?",
    ),
    "key outside tables": (
        "momentum = 0.9",
        "momentum: is outside of any table; did you mean optimizer.momentum?",
    ),
    "table in a table": (
        "[training.steps]\na = 1",
        "training.steps = {a = 1}: must be an integer >= 1, not a table",
    ),
    "NaN": ("[optimizer]\nlr = nan", "optimizer.lr = nan: must be a finite number > 0"),
    "a row without a key": (
        '[[data.mixture]]\nname = "a"\nsource = "x"',
        "x.toml: data.mixture = |: table 1 needs weight, a finite number >= 0",
    ),
    "a row with another key": (
        '[[validation.sets]]\nname = "a"\nsource = "x"\n[[validation.sets]]\nname = "b"\nsorce = '
        '"x"',
        "x.toml: validation.sets = |: table 2 has sorce; did you mean source?",
    ),
    "a name twice": (
        '[[validation.sets]]\nname = "a"\nsource = "x"\n[[validation.sets]]\nname = "a"\nsource = '
        '"y"',
        "validation.sets = |: must give each row a different name|called a",
    ),
    "rows that are none": (
        "[data]\nmixture = [3]",
        "data.mixture = [3]: must be a list, each a table of name, source, weight, schedule, "
        "loss_weight, max_epochs",
    ),
    "unknown word": (
        '[optimizer]\nkind = "adam"',
        'optimizer.kind = "adam": must be "adamw" or "sgd" or "muon" or "normuon" or "soap"; did you mean "adamw"?',
    ),
    "a word of other programs": (
        '[run]\ndevice = "gpu"',
        'run.device = "gpu": must be "auto" or "cpu" or "cuda"; did you mean "cuda"?',
    ),
    "the nearest size": (
        '[model]\nflavor = "7B"',
        'model.flavor = "7B": models/llama.py has debug, 1B|did you mean "8B"?',
    ),
    "no quotes": ("[run]\nfolder = runs", 'x.toml: not valid TOML|line 2|write folder = "runs"'),
    "Python's True in a file": (
        "[compile]\nenabled = True",
        "x.toml: not valid TOML|line 2|write enabled = true",
    ),
    "reshard to a word": (
        '[parallelism]\nreshard_after_forward = "defalt"',
        'must be true or false or "default"|did you mean "defau',
    ),
    "more than 64 bits": (
        f"[training]\nsteps = {10**30}",
        "training.steps = 1000000|must fit into 64 bits",
    ),
    "5000 digits": ("[training]\nsteps = " + "9" * 5000, "x.toml: not valid TOML|digits"),
    "home not expanded": (
        '[run]\nfolder = "~/x"',
        'run.folder = "~/x": must be written out: ~ is not expanded',
    ),
    "a run's folder in a store": (
        '[run]\nfolder = "http://bucket/x"',
        'run.folder = "http://bucket/x": must be a URL such as s3://bucket/prefix',
    ),
    "undefined variable": (
        '[run]\nfolder = "$SCRATCH/x"',
        'run.folder = "$SCRATCH/x": must be written out: environment',
    ),
    "NUL in a path": (
        '[data]\nsource = "a\\u0000b"',
        'data.source = "a\\u0000b": must not contain control characters',
    ),
    "empty": ("", "x.toml: sets nothing"),
    "latin-1": (
        "[run]\nfolder = 'é'".encode("latin-1"),
        "x.toml: line 2 is not UTF-8 (byte 0xe9): save it as UTF-8",
    ),
    "binary": (b"\x7fELF\x00\x00\x01", "x.toml: not valid TOML"),
    "10 MB": (b"#" * 10_000_000, "x.toml: larger than 1,000,000 bytes"),
    "deep lists": ("[run]\nseed = " + "[" * 100_000, "x.toml: nested too deeply"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file(name, folder):
    content, words = BAD_FILES[name]
    (folder / "x.toml").write_bytes(content.encode() if isinstance(content, str) else content)
    problems = problems_of(["x.toml"], 1, 1)
    assert len(problems) == 1, problems
    assert_says(problems[0], words)


# name: (arguments, the words of the one problem)
BAD_ARGUMENTS = {
    "no such file": (
        ["llama8b.toml"],
        "llama8b.toml: no such file; did you mean|configs/llama_8b.toml?",
    ),
    "nothing near": (["xyzzy"], "xyzzy: no such file"),
    "a URL": (["s3://bucket/a.toml"], "s3:/bucket/a.toml: a URL; give a TOML file of this machine"),
    "a folder": (["folder"], "folder: a folder; give a TOML file"),
    "a pipe": (["pipe"], "pipe: a special file; give a TOML file"),
    "two files": (
        ["y.toml", "y.toml"],
        "command line: one configuration file is allowed, found y.toml, y.toml",
    ),
    "unknown option": (
        ["--training.stps=5"],
        "command line: training.stps: no such option; did you mean training.steps?",
    ),
    "nothing of that name": (
        ["--xyzzy"],
        "command line: xyzzy: no such table or option; the tables are run, model",
    ),
    "no dashes": (
        ["training.steps=10"],
        "command line: training.steps=10: did you mean --training.steps=10?",
    ),
    "one dash before an option": (
        ["-training.steps=10"],
        "command line: -training.steps=10: did you mean --training.steps=10?",
    ),
    "--config=": (
        ["--config=y.toml"],
        "command line: --config=y.toml: the configuration file is named without an option: "
        "./run_train.sh y.toml",
    ),
    "typographic quotes": (
        ["--training.steps=\u201c10\u201d"],
        "command line: --training.steps=|typographic quotes: write --training.steps=10",
    ),
    "a power of ten": (
        ["--training.steps=1e3"],
        "training.steps = 1000.0: must be an integer >= 1, not a float; write 1000",
    ),
    "another program's, with hyphens": (
        ["--tensor-model-parallel-size", "2"],
        "tensor-model-parallel-size: no such option; did you mean parallelism.tensor_parallel?",
    ),
    "-c": (["-c", "y.toml"], "command line: -c: |named without an option: ./run_train.sh y.toml"),
    "a table": (["--model=8B"], 'model = "8B": a table is needed, as in model.family = "llama"'),
    "no value": (
        ["--training.steps"],
        "command line: --training.steps needs a value: an integer >= 1",
    ),
    "an option for a value": (
        ["--run.seed", "--compile.enabled"],
        "--run.seed needs a value: an integer >= 0",
    ),
    "two lines": (["--run.seed=1\nx = 2"], 'run.seed = "1\\nx = 2": must be an integer >= 0'),
    "Python's True": (
        ["--compile.enabled=True"],
        'compile.enabled = "True": must be true or false, not a string; write true',
    ),
    "commas": (["--optimizer.betas=0.9,0.95"], 'optimizer.betas = "0.9,0.95": must be a list of 2'),
    "undecodable": (
        ["--run.folder=\udcff"],
        "command line: run.folder = |udcff|must be UTF-8 text",
    ),
    "deep": (["--run.seed=" + "[" * 100_000], 'run.seed = "[[[|...: must be an integer >= 0'),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments(name, folder):
    (folder / "y.toml").write_text("[training]\nsteps = 10\n")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    argv, words = BAD_ARGUMENTS[name]
    problems = problems_of(argv, 1, 1)
    assert len(problems) == 1, problems
    assert_says(problems[0], words)


def test_names_of_other_programs_are_answered_with_the_option_here(folder):
    for name, option in elsewhere.OPTIONS.items():
        assert option in OPTIONS and name not in OPTIONS
        (problem,) = problems_of([f"--{name}=1"], 1, 1)
        assert_says(problem, f"command line: {name}: no such option; did you mean {option}?")
    (folder / "y.toml").write_text("[job]\ndump_folder = 'x'\ndescription = 'y'\n")
    (problem,) = problems_of(["y.toml"], 1, 1)
    assert_says(problem, "y.toml: job: no such table; write run.folder for dump_folder")


# --------------------------------------------------------------------------------------------------
# rules across tables

# A case of every rule of configs/check.py. rule: (overrides, further overrides that repair it,
# processes if not one, those of a host if fewer). An option whose name no other table has stands
# without its table.
RULE_CASES = {
    "mesh_product": (
        "data_parallel_replicate=2 data_parallel_shard=3 tensor_parallel=4",
        "data_parallel_shard=1 local_batch_size=4",
        8,
    ),
    "mesh_rest": (
        "data_parallel_replicate=2 tensor_parallel=4",
        "data_parallel_replicate=1 global_batch_size=24",
        12,
        4,
    ),
    "tp_host": ("tensor_parallel=4", "tensor_parallel_across_hosts=true", 4, 2),
    "tp_heads": (
        "tensor_parallel=4 n_heads=6 n_kv_heads=2 head_dim=32",
        "n_heads=8 n_kv_heads=4",
        4,
    ),
    "tp_kv_heads": ("tensor_parallel=8", "n_kv_heads=8", 8),
    "tp_shared": ("family=deepseek_v3 tensor_parallel=4 expert_dim=90", "expert_dim=92", 4),
    "tp_hidden": ("tensor_parallel=4 hidden_dim=702", "hidden_dim=704", 4),
    "tp_sequence": ("tensor_parallel=4 seq_len=255", "seq_len=256", 4),
    "tp_vocabulary": (
        "tensor_parallel=32 n_heads=32 n_kv_heads=32 vocab_size=279 tokenizer=bytes",
        "vocab_size=280",
        32,
    ),
    "tp_offload": ("tensor_parallel=2 cpu_offload=true", "tensor_parallel=1 local_batch_size=4", 2),
    "tp_reshard": (
        "tensor_parallel=2 reshard_after_forward=2 local_batch_size=2",
        "reshard_after_forward=true",
        8,
    ),
    "ep_experts": ("expert_parallel=2", "family=qwen3 flavor=debug_moe", 2),
    "ep_ranks": ("family=deepseek_v3 expert_parallel=4", "expert_parallel=2", 2),
    "ep_hosts": (
        "family=deepseek_v3 expert_parallel=4 expert_exchange=hierarchical local_batch_size=1",
        "expert_parallel=8",
        8,
        4,
    ),
    "expert_exchange_unused": (
        "family=deepseek_v3 expert_exchange=hierarchical",
        "expert_exchange=flat",
    ),
    "expert_chunks_unused": ("family=deepseek_v3 expert_chunks=2", "expert_chunks=1"),
    "ep_reshard": (
        "family=qwen3 flavor=debug_moe expert_parallel=4 reshard_after_forward=2 "
        "local_batch_size=1",
        "expert_parallel=1",
        8,
    ),
    "experts": (
        "family=qwen3 flavor=debug_moe n_experts=8 experts_per_token=9",
        "experts_per_token=8",
    ),
    "experts_ep": ("family=deepseek_v3 n_experts=12 expert_parallel=8", "expert_parallel=4", 8),
    "no_experts": ("family=deepseek_v3 n_experts=0", "n_dense_layers=5"),
    "gpt_oss_experts": ("family=gpt_oss n_experts=0", "n_experts=4"),
    "qwen3_next_experts": ("family=qwen3_next n_experts=0", "n_experts=4"),
    "partial_rope": ("family=qwen3_next rope_dim=34", "rope_dim=32"),
    "delta_heads": ("family=qwen3_next delta_value_heads=6", "delta_value_heads=12"),
    "tp_delta_heads": (
        "family=qwen3_next delta_key_heads=2 tensor_parallel=4",
        "tensor_parallel=2",
        4,
    ),
    "mtp_shared": ("family=qwen3_next mtp_depth=2", "mtp_depth=1"),
    "tp_kda_heads": ("family=kimi_linear delta_heads=2 tensor_parallel=4", "tensor_parallel=2", 4),
    "flash_delta_keys": (
        "family=qwen3_next delta_key_dim=320 delta_rule=flash device=auto param_dtype=bfloat16",
        "delta_key_dim=256",
    ),
    "flash_kda_keys": (
        "family=kimi_linear delta_dim=320 delta_rule=flash device=auto param_dtype=bfloat16",
        "delta_dim=256",
    ),
    "mtp_tied": (
        "family=deepseek_v3 mtp_depth=1 tied_embeddings=true pipeline_parallel=2 "
        "pipeline_schedule=zero_bubble local_batch_size=1",
        "tied_embeddings=false",
        2,
    ),
    "dense_layers": ("family=deepseek_v3 n_dense_layers=6", "n_layers=6"),
    "rope_dim": ("family=deepseek_v3 rope_dim=15", "rope_dim=14"),
    "value_dim": ("family=deepseek_v3 value_dim=49", "value_dim=48"),
    "expert_groups": ("family=deepseek_v3 n_experts=18", "expert_groups=3"),
    "groups_per_token": ("family=deepseek_v3 experts_per_token=9", "groups_per_token=3"),
    "experts_async": (
        "family=deepseek_v3 tensor_parallel=2 async_tensor_parallel=true compile.enabled=true",
        "async_tensor_parallel=false",
        2,
    ),
    "cp_sequence": ("context_parallel=3 seq_len=256 local_batch_size=1", "seq_len=252", 3),
    "cp_heads": (
        "context_parallel=4 tensor_parallel=2 context_parallel_method=ulysses",
        "context_parallel_method=gather",
        8,
    ),
    "cp_latent_heads": (
        "family=deepseek_v3 context_parallel=4 tensor_parallel=2 context_parallel_method=ulysses",
        "n_heads=8",
        8,
    ),
    "cp_attention": (
        "context_parallel=2 attention=cudnn param_dtype=bfloat16 device=cuda",
        "context_parallel_method=ulysses",
        2,
    ),
    "cp_kernel": (
        "context_parallel=2 param_dtype=float32 device=cuda",
        "context_parallel_method=ulysses",
        2,
    ),
    "context_parallel_method_unused": (
        "context_parallel_method=ulysses",
        "context_parallel_method=gather",
    ),
    "reshard_ranks": ("reshard_after_forward=3 local_batch_size=1", "reshard_after_forward=4", 8),
    "batch": ("global_batch_size=24 local_batch_size=8", "local_batch_size=6", 4),
    "batch_ranks": ("global_batch_size=8", "global_batch_size=9", 3),
    "seq_len": ("seq_len=8193", "seq_len=8192"),
    "kv_heads": ("n_kv_heads=3", "n_kv_heads=2"),
    "head_dim": ("dim=300", "dim=304"),
    "pipeline_schedule_unused": ("pipeline_schedule=zbv", "pipeline_schedule=1f1b"),
    "pipeline_stages_per_rank_unused": ("pipeline_stages_per_rank=2", "pipeline_stages_per_rank=0"),
    "pipeline_layers_unused": ("pipeline_layers=[3,3]", "pipeline_layers=[]"),
    "pipeline_stages_per_rank": (
        "pipeline_parallel=2 pipeline_stages_per_rank=3 pipeline_schedule=zbv",
        "pipeline_schedule=interleaved_1f1b",
        2,
    ),
    "pipeline_stages": ("pipeline_parallel=4 pipeline_schedule=zbv", "n_layers=8", 4),
    "pipeline_layers": ("pipeline_parallel=2 pipeline_layers=[3,4]", "pipeline_layers=[4,2]", 2),
    "pipeline_microbatches": (
        "pipeline_parallel=2 pipeline_schedule=dualpipe_v local_batch_size=4",
        "global_batch_size=32",
        4,
    ),
    "pipeline_offload": ("pipeline_parallel=2 cpu_offload=true", "cpu_offload=false", 2),
    "pipeline_reshard": (
        "pipeline_parallel=2 pipeline_schedule=zero_bubble reshard_after_forward=true",
        "pipeline_schedule=1f1b",
        2,
    ),
    "gather_again_unused": ("mode=selective gather_again=true", "gather_again=false"),
    "gather_again": ("tensor_parallel=2 gather_again=true", "mode=selective", 2),
    "pipeline_selective": (
        "pipeline_parallel=2 pipeline_schedule=zero_bubble mode=selective",
        "pipeline_schedule=1f1b",
        2,
    ),
    "pipeline_compile": (
        "pipeline_parallel=2 pipeline_schedule=zbv compile.enabled=true",
        "compile.enabled=false",
        2,
    ),
    "pipeline_float8": (
        "pipeline_parallel=2 pipeline_schedule=zbv float8=rowwise",
        "pipeline_schedule=interleaved_1f1b",
        2,
    ),
    "bpe_vocabulary": ("bpe_vocab_size=5000", "vocab_size=5000"),
    "bytes_vocabulary": ("tokenizer=bytes vocab_size=256", "vocab_size=257"),
    "tokenizer_pattern": ("tokenizer=bytes tokenizer_pattern=llama3", "tokenizer_pattern="),
    "end_token": ("tokenizer=bpe end_token=</s>", "end_token=<|endoftext|>"),
    "mixture_source": (
        'source=corpus mixture=[{name="a",source="x",weight=1}] tokenizer=bytes',
        "source=stdlib",
    ),
    "mixture_loss_weights": (
        'mixture=[{name="a",source="x",weight=1,schedule=[[9,0]]},'
        '{name="b",source="y",weight=1,loss_weight=0}] tokenizer=bytes',
        'mixture=[{name="a",source="x",weight=1},{name="b",source="y",weight=1,loss_weight=0}]',
    ),
    "stages_begin": ("stages=[{begin=200,lr=0.1}]", "training.steps=300"),
    "stages_nothing": ("stages=[{begin=5}]", "stages=[{begin=5,lr=0.1}]"),
    "stages_weights": (
        'stages=[{begin=5,weights=[["b",1.0]]}] tokenizer=bytes',
        'mixture=[{name="b",source="x",weight=1}]',
    ),
    "stages_schedule": (
        "stages=[{begin=5,lr_warmup_steps=2}]",
        'stages=[{begin=5,lr_warmup_steps=2,lr_schedule="linear"}]',
    ),
    "stages_warmup": (
        'stages=[{begin=5,lr_warmup_steps=99,lr_schedule="linear"}]',
        "training.steps=200",
    ),
    "stages_stream": (
        "stages=[{begin=5,seq_len=64}] stream=true tokenizer=bytes",
        "stages=[{begin=5,lr=0.1}]",
    ),
    "validation_names": (
        'sets=[{name="a",source="x"}] mixture=[{name="a",source="y",weight=1}]',
        'sets=[{name="b",source="x"}]',
    ),
    "evaluation_interval": ("evaluation.interval=10", 'tasks=[{name="a",file="x.jsonl"}]'),
    "answers_masked": ("format=chat tokenizer=bytes", "mask_documents=true"),
    "answers_tokenizer": ("format=completion mask_documents=true", "tokenizer=bytes"),
    "answers_stream": (
        "format=chat mask_documents=true tokenizer=bytes stream=true validation.interval=0",
        "stream=false",
    ),
    "answers_field": (
        "format=chat mask_documents=true tokenizer=bytes text_field=talk",
        "text_field=text",
    ),
    "chat_template": ("chat_template=plain", "chat_template="),
    "chat_may_drop": ('chat_may_drop=["name"]', "chat_may_drop=[]"),
    "stream_tokenizer": ("stream=true", "tokenizer=bytes"),
    "stream_ranks": (
        "stream=true tokenizer=bytes global_batch_size=24 local_batch_size=1",
        "streams=48",
        3,
    ),
    "stream_mixture": (
        'stream=true tokenizer=bytes mixture=[{name="a",source="x",weight=1}]',
        "mixture=[]",
    ),
    "stream_skip": ("stream=true tokenizer=bytes skip=[[10,2]]", "skip=[]"),
    "stream_splice": ("stream=true tokenizer=bytes allow_splice=true", "allow_splice=false"),
    "stream_workers": ("stream=true tokenizer=bytes workers=2", "workers=0"),
    "stream_timeout": ("stream=true tokenizer=bytes timeout_seconds=300", "timeout_seconds=60"),
    "stream_validation": (
        "stream=true tokenizer=bytes validation.interval=10",
        'sets=[{name="a",source="x"}]',
    ),
    "warmup": ("warmup_steps=51 training.steps=50", "warmup_steps=50"),
    "wsd": ("lr_schedule.kind=wsd warmup_steps=81 training.steps=100", "warmup_steps=80"),
    "profiler_window": (
        "profiler.enabled=true training.steps=4 warmup_steps=0",
        "training.steps=5",
    ),
    "stop_after": ("stop_after=400", "stop_after=100"),
    "branch_from": ("branch_from=a@5 load_path=b", "load_path="),
    "peers": ("peers=2", "peers=1", 4, 2),
    "fault_tolerant": ("fault_tolerant=true stream=true", "stream=false"),
    "leave_out_odd_replica": (
        "leave_out_odd_replica=true replica_check_interval=5 data_parallel_replicate=2 "
        "checkpoint.interval=10",
        "fault_tolerant=true",
        2,
    ),
    "leave_out_unchecked": (
        "leave_out_odd_replica=true replica_check_interval=5 data_parallel_replicate=2 "
        "fault_tolerant=true checkpoint.interval=12",
        "checkpoint.interval=10",
        2,
    ),
    "leave_out_odd_replica_unused": (
        "leave_out_odd_replica=true replica_check_interval=5 tensor_parallel=2 fault_tolerant=true "
        "checkpoint.interval=10",
        "data_parallel_replicate=2",
        4,
    ),
    "peers_unused": ("peer_interval=5 peers=0", "peers=1", 4, 2),
    "load_step": ("load_step=400", "load_step=100"),
    "skip_spikes": ("skip_spikes=true", "spike_threshold=6.0"),
    "replica_check_interval_unused": (
        "replica_check_interval=10 local_batch_size=4",
        "data_parallel_replicate=2",
        2,
    ),
    "replay": ("replay_interval=10 device=cuda", "deterministic=true"),
    "watch_compile": ("check_collectives=true compile.enabled=true", "compile.enabled=false"),
    "keep_gathered": ("keep_gathered=7", "keep_gathered=6"),
    "reshard_after_backward": ("reshard_after_backward=false", "reshard_after_forward=false"),
    "pipeline_keep_gathered": (
        "keep_gathered=2 pipeline_parallel=2",
        "reshard_after_forward=true",
        2,
    ),
    "tp_async": ("async_tensor_parallel=true tensor_parallel=2", "compile.enabled=true", 2),
    "graphs_ranks": (
        "cuda_graphs=true data_parallel_shard=2 local_batch_size=4",
        "cuda_graphs=false",
        2,
    ),
    "graphs_cpu": ("cuda_graphs=true device=cpu", "device=auto"),
    "graphs_documents": ("cuda_graphs=true mask_documents=true", "mask_documents=false"),
    "graphs_noise": (
        "cuda_graphs=true noise_scale_interval=10 device=auto",
        "noise_scale_interval=0",
    ),
    "noise_batch": ("noise_scale_interval=5 global_batch_size=2", "global_batch_size=4"),
    "noise_replay": (
        "noise_scale_interval=10 replay_interval=5 device=cpu",
        "replay_interval=4",
    ),
    "noise_weights": (
        'mixture=[{name="a",source="x",weight=1},{name="b",source="y",weight=1,loss_weight=0.5}] '
        "tokenizer=bytes noise_scale_interval=5",
        "noise_scale_interval=0",
    ),
    "graphs_watch": ("cuda_graphs=true check_collectives=true", "check_collectives=false"),
    "float8_tp": ("float8=rowwise tensor_parallel=2 local_batch_size=4", "tensor_parallel=1", 2),
    "float8_dtype": ("float8=tensorwise param_dtype=float32", "param_dtype=bfloat16"),
    "float8_tokens": ("float8=tensorwise seq_len=100 local_batch_size=2", "local_batch_size=4"),
    "float8_emulate": ("emulate_float8=true", "float8=rowwise"),
    "delta_rule": (
        "family=qwen3_next delta_rule=flash device=cpu",
        "device=auto param_dtype=bfloat16",
    ),
    "cp_delta_rule": (
        "family=qwen3_next delta_rule=flash context_parallel=2 device=auto",
        "delta_rule=auto",
        2,
    ),
    "delta_rule_of": ("delta_rule=reference", "family=qwen3_next"),
    "attention": ("attention=cudnn device=cpu", "device=auto"),
    "momentum": ("momentum=0.9", "optimizer.kind=sgd"),
    "ns_dtype_unread": ("ns_dtype=float32 optimizer.kind=soap", "optimizer.kind=normuon"),
    "adjust_lr_fn_unread": ("adjust_lr_fn=original", "optimizer.kind=muon"),
    "qk_clip_unread": ("qk_clip=100", "optimizer.kind=muon"),
    "qk_clip_family": ("qk_clip=100 optimizer.kind=muon family=qwen3", "family=llama"),
    "qk_clip_with": (
        "qk_clip=100 optimizer.kind=muon mask_documents=true",
        "mask_documents=false",
    ),
    "muon_offload": ("optimizer.kind=muon cpu_offload=true", "cpu_offload=false"),
    "transfer_tied": ("width_base=64 tied_embeddings=true", "tied_embeddings=false"),
    "transfer_depth": ("family=olmo2 depth_base=2", "depth_base=0"),
    "transfer_kind": ("width_base=64 optimizer.kind=soap", "optimizer.kind=adamw"),
    "transfer_lora": (
        'width_base=64 lora.rank=4 lora.targets=["wq"] checkpoint.load_hf=x',
        "width_base=0",
    ),
    "fim_unused": ("fim_tokens=['a','b','c']", "fim_rate=0.5"),
    "fim_format": (
        "fim_rate=0.5 format=completion mask_documents=true tokenizer=x.json",
        "fim_rate=0",
    ),
    "lora_unused": ('targets=["wq"]', "rank=4 load_hf=x"),
    "lora_targets": ('rank=4 targets=["wq","q_proj"] load_hf=x', 'targets=["wq"]'),
    "lora_base": ('rank=4 targets=["wq"]', "load_hf=x"),
    "lora_load": (
        'rank=4 targets=["wq"] load_path=x exclude_from_loading=["*"]',
        "exclude_from_loading=[]",
    ),
    "lora_export": ('rank=4 targets=["wq"] load_hf=x export_hf=bfloat16', "export_hf="),
    "lora_muon": ('rank=4 targets=["wq"] load_hf=x optimizer.kind=muon', "optimizer.kind=adamw"),
    "lora_float8": (
        'rank=4 targets=["wq"] load_hf=x float8=rowwise param_dtype=bfloat16',
        "float8=none",
    ),
    "lora_async": (
        'rank=4 targets=["wq"] load_hf=x compile.enabled=true async_tensor_parallel=true '
        "tensor_parallel=2",
        "async_tensor_parallel=false",
        2,
    ),
    "lora_queries": ('family=deepseek_v3 rank=4 targets=["wq_a"] load_hf=x', 'targets=["wq_b"]'),
    "load_path": ('exclude_from_loading=["output.*"]', "load_path=runs/x"),
    "load_hf": ("load_hf=models/x load_path=runs/x", "load_path="),
    "export_hf": ("export_hf=bfloat16 dim=300 head_dim=32", "n_heads=12"),
    "mask_compile": (
        "mask_documents=true compile.enabled=true param_dtype=float32",
        "param_dtype=bfloat16",
    ),
    "validation_split": (
        "validation.interval=10 validation_fraction=0.0",
        "validation_fraction=0.01",
    ),
}


TABLE_OF = {name.partition(".")[2]: name for name in OPTIONS}


def whole(word: str) -> str:
    """Return an override with its table."""
    key, _, value = word.partition("=")
    return f"{key if '.' in key else TABLE_OF[key]}={value}"


def case(words: str) -> list[str]:
    """Return arguments from the bare defaults: a file that changes nothing, and these overrides."""
    Path("x.toml").write_text("[run]\nseed = 0\n")
    return ["x.toml", *(f"--{whole(word)}" for word in words.split())]


EVERY_RULE = {name: rule for family in FAMILIES for name, rule in check.rules(family).items()}


@pytest.mark.parametrize("name", EVERY_RULE)
def test_rule(name, monkeypatch):
    """A rule without a case fails here. The rule alone must find the case, in a sentence that names an
    option of it, and the repaired case must break no rule."""
    overrides, repair, *processes = RULE_CASES[name]
    world, local_world = (processes * 2 or [1, 1])[:2]
    load_config(case(f"{overrides} {repair}"), world, local_world)
    of_all = problems_of(case(overrides), world, local_world)
    monkeypatch.setattr(check, "rules", lambda *_: {name: EVERY_RULE[name]})
    [problem] = problems_of(case(overrides), world, local_world)
    assert problem in of_all
    options = map(whole, f"{overrides} {repair}".split())
    assert any(f"{option.partition('=')[0]} = " in problem for option in options), problem


def test_the_bpe_vocabulary_counts_only_where_a_tokenizer_is_trained(tmp_path_factory):
    """A prepared folder has its own tokenizer, and a folder that is not on this machine may be
    prepared. Text is not."""
    place = tmp_path_factory.mktemp("data")
    for name in ("prepared", "raw"):
        (place / name).mkdir()
        (place / name / "a.txt").write_text("text")
    for name in ("manifest.json", "tokenizer.json", "names.starts"):
        (place / "prepared" / name).write_text("")

    def refused(*sources: str) -> bool:
        rows = [
            f'{{name = "s{i}", source = "{source}", weight = 1.0}}'
            for i, source in enumerate(sources)
        ]
        given = (
            f"--data.mixture=[{', '.join(rows)}]"
            if len(rows) > 1
            else f"--data.source={sources[0]}"
        )
        try:
            cfg = load_config([*case("model.vocab_size=300"), given], 1, 1)
        except ConfigError as error:
            assert all(
                "data.bpe_vocab_size = 4096 is more" in problem for problem in error.problems
            ), error
            return True
        assert [row.source for row in cfg.data.mixture] == list(
            sources
        ) or cfg.data.source == sources[0]
        return False

    prepared, raw = f"{place}/prepared", f"{place}/raw"
    for sources in ([prepared], ["/only/on/the/cluster"], [prepared, "/only/on/the/cluster"]):
        assert not refused(*sources), sources
    for sources in ([raw], [f"{place}/*"], ["stdlib"], ["hf:c4"], [prepared, raw]):
        assert refused(*sources), sources


def test_no_case_without_a_rule():
    assert set(RULE_CASES) == set(EVERY_RULE)


def test_sizes_unknown():
    """Without a world size the rules of the mesh are left out, the rest is checked."""
    load_config(
        case(
            "parallelism.tensor_parallel=4 parallelism.data_parallel_shard=5 "
            "training.global_batch_size=40"
        )
    )
    [problem] = problems_of(case("parallelism.tensor_parallel=8"))
    assert "model.n_kv_heads" in problem
    [problem] = problems_of(case("parallelism.data_parallel_shard=3"))
    assert "global_batch_size = 8 is not a multiple of the 3" in problem


# --------------------------------------------------------------------------------------- numbers
# that follow from others

# (overrides, processes) -> training.local_batch_size
LOCAL_BATCHES = [
    ("", 1, 8),
    ("", 2, 4),
    ("", 8, 1),
    ("parallelism.tensor_parallel=2", 4, 4),
    ("parallelism.data_parallel_replicate=2 parallelism.tensor_parallel=2", 8, 2),
    ("parallelism.data_parallel_shard=2", None, 4),
    ("parallelism.data_parallel_replicate=2", None, 4),
    ("training.global_batch_size=96", 6, 16),
    ("training.global_batch_size=1", 1, 1),
    ("training.local_batch_size=2", 2, 2),
]


@pytest.mark.parametrize("overrides, world, local", LOCAL_BATCHES)
def test_the_microbatch_follows_from_batch_and_mesh(overrides, world, local):
    assert load_config(case(overrides), world, world).training.local_batch_size == local


def test_a_repair_that_is_named_works():
    """Each value that the message names makes the configuration legal, for every batch that does
    not divide."""
    for batch, ranks, local in product((1, 7, 12, 24), (1, 2, 3, 5), (None, 1, 4, 6, 9)):
        options = [
            f"--training.global_batch_size={batch}",
            *([f"--training.local_batch_size={local}"] if local else []),
        ]
        legal = batch % (ranks * (local or 1)) == 0
        if legal:
            load_config(options, ranks, ranks)
            continue
        [problem] = problems_of(options, ranks, ranks)
        [sentence] = re.findall(r"set (training\..*)$", problem)
        repairs = [
            (name, value)
            for name, values in re.findall(r"(training\.\w+) to (\d+(?: or \d+)?)", sentence)
            for value in values.split(" or ")
        ]
        assert repairs
        for name, value in repairs:
            load_config([*options, f"--{name}={value}"], ranks, ranks)


def test_a_number_that_follows_is_not_written_as_a_setting(folder):
    """A resolved configuration that is read on a different mesh gives that mesh's number; one that
    was set stays."""
    on_two = load_config(case("training.steps=100 lr_schedule.warmup_fraction=0.1"), 2, 2)
    (folder / "x.toml").write_text(dump(on_two))
    assert "\n# local_batch_size = 4  (" in dump(on_two) and "\n# warmup_steps = 10  (" in dump(
        on_two
    )
    on_eight = load_config(["x.toml", "--training.steps=50"], 8, 8)
    assert on_eight.training.local_batch_size == 1 and on_eight.lr_schedule.warmup_steps == 5
    (folder / "x.toml").write_text(dump(load_config(case("training.local_batch_size=4"), 2, 2)))
    assert "local_batch_size = 8 on 8" not in problems_of(["x.toml"], 8, 8)[0]
    assert (
        "training.local_batch_size = 4 on 8 data-parallel ranks" in problems_of(["x.toml"], 8, 8)[0]
    )


@pytest.mark.parametrize(
    "options, warmup",
    [
        ("training.steps=240 lr_schedule.warmup_fraction=0.083", 20),
        ("training.steps=10 lr_schedule.warmup_fraction=0.083", 1),
        ("training.steps=1 lr_schedule.warmup_fraction=0.083", 0),
        ("training.steps=1 lr_schedule.warmup_fraction=0.99", 1),
        ("training.steps=100", 0),
        ("training.steps=100 lr_schedule.warmup_fraction=0.5 lr_schedule.warmup_steps=7", 7),
    ],
)
def test_the_warm_up_follows_from_its_fraction(options, warmup):
    assert load_config(case(options)).lr_schedule.warmup_steps == warmup


# What a newcomer tries first with the default preset, and the processes it is tried on.
FIRST_TRIES = [
    ("training.steps=1", 1),
    ("training.steps=10", 2),
    ("", 8),
    ("training.seq_len=1000", 2),
    ("training.global_batch_size=4", 2),
    ("parallelism.tensor_parallel=2", 2),
    ("parallelism.tensor_parallel=4", 4),
    ("checkpoint.interval=1000", 1),
    ("profiler.enabled=true training.steps=5", 1),
    ("lr_schedule.kind=wsd training.steps=10", 1),
    ("compile.enabled=true", 1),
    ("activation_checkpoint.mode=full", 2),
    ("parallelism.data_parallel_replicate=2", 2),
    ("model.n_layers=2", 1),
    ("data.stream=true data.tokenizer=bytes validation.interval=0", 2),
]


@pytest.mark.parametrize("overrides, ranks", FIRST_TRIES)
def test_a_first_try_is_not_refused(overrides, ranks):
    load_config([f"--{option}" for option in overrides.split()], ranks, ranks)


# --------------------------------------------------------------------------------------------------
# all at once


def test_all_mistakes_at_once(folder):
    """Four mistakes in three tables of the file, one on the command line, two rules: all seven, and
    no more."""
    (folder / "x.toml").write_text("""
[training]
stps = 5
seq_len = 250
param_dtype = "half"
[optimizer]
lr = "3e-4"
momentum = 0.5
[parallelism]
tensor_parallel = 4
keep_gathered = -1
""")
    problems = problems_of(["x.toml", "--run.sed=1"], 4, 4)
    expected = [
        "command line: run.sed: no such option; did you mean run.seed?",
        "x.toml: training.stps: no such option; did you mean training.steps?",
        'x.toml: training.param_dtype = "half": must be "auto" or',
        'x.toml: optimizer.lr = "3e-4": must be a finite number > 0, not a string',
        "x.toml: parallelism.keep_gathered = -1: must be an integer >= 0",
        "parallelism.tensor_parallel = 4 does not divide training.seq_len = 250",
        "optimizer.momentum = 0.5 has no effect",
    ]
    assert len(problems) == len(expected), problems
    for words in expected:
        assert any(problem.startswith(words) for problem in problems), (words, problems)


@pytest.mark.parametrize(
    "text",
    [
        # meant: steps, which is not the default then
        "[training]\nstps = 300\n[lr_schedule]\nwarmup_steps = 200",
        "[training]\nsteps = '300'\n[lr_schedule]\nwarmup_steps = 200",
        "[trainning]\nsteps = 300\n[lr_schedule]\nwarmup_steps = 200",
        "steps = 300\n[lr_schedule]\nwarmup_steps = 200",
        "training = 300\n[lr_schedule]\nwarmup_steps = 200",
        "[model]\nn_heds = 6\ndim = 300",
        "[model]\nn_heads = 0\ndim = 300",
        "[model]\nfamily = 'lama'\ndim = 300",
        "[training]\nsteps = 10\n[lr_schedule]\nwarmup_steps = 200\n[[",
    ],
)
def test_no_mistakes_that_only_follow_from_others(folder, text):
    (folder / "x.toml").write_text(text)
    assert len(problems_of(["x.toml"], 1, 1)) == 1


def test_very_many_mistakes(folder):
    (folder / "x.toml").write_text("\n".join(f"[nonsense{i}]" for i in range(60)))
    with pytest.raises(ConfigError) as caught:
        load_config(["x.toml"])
    assert len(caught.value.problems) == 60
    assert str(caught.value).startswith("60 mistakes") and str(caught.value).endswith(
        "\n  and 10 more"
    )


# --------------------------------------------------------------------------------------------------
# what is accepted


def test_order_defaults_file_command_line(folder):
    (folder / "x.toml").write_text("[training]\nsteps = 7\nseq_len = 64\n")
    cfg = load_config(["x.toml", "--training.seq_len=32", "--training.seq_len=16"])
    assert (cfg.training.steps, cfg.training.seq_len, cfg.training.global_batch_size) == (7, 16, 8)
    assert load_config(["--training.seq_len=32", "x.toml"]).training.steps == 7


def test_default_file():
    assert load_config([]) == load_config([str(ROOT / "configs" / "llama_debug.toml")])


@pytest.mark.parametrize(
    "prefix, suffix", [(b"\xef\xbb\xbf", b""), (b"", b"\r\n"), (b"# \xc3\xa9\n", b"")]
)
def test_byte_order_mark_line_ends_and_comments(folder, prefix, suffix):
    (folder / "x.toml").write_bytes(prefix + b"[run]\nseed = 3" + suffix)
    assert load_config(["x.toml"]).run.seed == 3


# (arguments, option, value)
OVERRIDES = [
    (["--model.flavor=8B"], "model.flavor", "8B"),
    (["--run.folder=123"], "run.folder", "123"),
    (["--run.folder", "/a b/../ü"], "run.folder", "/a b/../ü"),
    (["--data.source", "~/corpus/*.txt"], "data.source", "~/corpus/*.txt"),
    (['--debug.sample_prompt="x" = # y'], "debug.sample_prompt", '"x" = # y'),
    (["--debug.sample_prompt=a=b"], "debug.sample_prompt", "a=b"),
    (["--compile.enabled"], "compile.enabled", True),
    (["--compile.enabled", "false"], "compile.enabled", False),
    (["--compile.enabled", "--run.seed=1"], "compile.enabled", True),
    (["--compile.enabled", "y.toml"], "compile.enabled", True),
    (["--training.steps", "1_000"], "training.steps", 1000),
    (["--optimizer.lr=1"], "optimizer.lr", 1.0),
    (["--optimizer.betas=[0.5, 0]"], "optimizer.betas", (0.5, 0.0)),
    (["--parallelism.data_parallel_shard", "-1"], "parallelism.data_parallel_shard", -1),
    (
        ["--parallelism.reshard_after_forward=default"],
        "parallelism.reshard_after_forward",
        "default",
    ),
    (["--parallelism.reshard_after_forward=false"], "parallelism.reshard_after_forward", False),
    (["--parallelism.reshard_after_forward=2"], "parallelism.reshard_after_forward", 2),
    (["--model.tied_embeddings=true"], "model.tied_embeddings", True),
]


@pytest.mark.parametrize("argv, name, value", OVERRIDES)
def test_override(argv, name, value, folder):
    (folder / "y.toml").write_text("[run]\nseed = 3\n")
    table, key = name.split(".")
    found = getattr(getattr(load_config(argv), table), key)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_on_too_few_processes_says_how_many_there_are(preset):
    try:
        load_config([str(preset)], 1, 1)
    except ConfigError as error:
        assert "processes" in str(error) and "(NGPU on each node)" in str(error)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_preset(preset, folder):
    """A preset names its schema, states its world size, passes every check there, and reads back."""
    text = preset.read_text(encoding="utf-8")
    assert text.startswith("#:schema schema.json\n") and (preset.parent / "schema.json").exists()
    [(world, hosts, local_world)] = re.findall(
        r"^# world size: (\d+) \((\d+) hosts? of (\d+)\)$", text, re.MULTILINE
    )
    assert int(world) == int(hosts) * int(local_world)
    cfg = load_config([str(preset)], int(world), int(local_world))
    assert cfg.run.folder == f"runs/{preset.stem}"
    p = cfg.parallelism
    others = p.data_parallel_replicate * p.context_parallel * p.tensor_parallel
    assert check.data_parallel_shard(cfg, int(world)) * others == int(world)
    cfg = load_config([str(preset)])
    (folder / "x.toml").write_text(dump(cfg), encoding="utf-8")
    assert load_config(["x.toml"]) == cfg
    assert dump(load_config(["x.toml"])) == dump(cfg)


def other_value(option: dict) -> object:
    """Return an allowed value of an option that is not its default."""
    if "anyOf" in option:
        chosen = option["anyOf"][0 if option["default"] is None else -1]
        return other_value(chosen | {"default": None})
    if "enum" in option:
        return next(value for value in option["enum"] if value != option["default"])
    low, high = option.get("minimum", 0), option.get("maximum", option.get("exclusiveMaximum", 1e9))
    return {
        "boolean": lambda: not option["default"],
        "string": lambda: option.get("const", option.get("examples", ['ü "quoted" \\ '])[0]),
        "integer": lambda: int(min(high, (option.get("default") or 2) + 3)),
        "number": lambda: low + 0.4 * (min(high, 1) - low) + 1e-17,
        "array": lambda: (
            tuple(option["examples"][0])
            if "examples" in option
            else tuple(map(other_value, option["prefixItems"]))
            if "prefixItems" in option
            else (other_value(option["items"] | {"default": None}),)
        ),
        "object": lambda: (
            {name: "a" for name in ("name",) if name in option["properties"]}
            | {
                key: other_value({"default": None} | part)
                for key, part in option["properties"].items()
                if key != "name"
            }
        ),
    }[option["type"]]()


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_can_be_set_and_reads_back(name, folder, monkeypatch):
    # options one by one need not make sense together
    monkeypatch.setattr("configs.load.broken_rules", lambda *_: [])
    table, key = name.split(".")
    value = other_value(OPTIONS[name])
    assert value != OPTIONS[name]["default"] or "const" in OPTIONS[name]
    cfg = Config.model_validate({table: {key: value}})
    (folder / "x.toml").write_text(dump(cfg), encoding="utf-8")
    again = load_config(["x.toml"])
    assert again == check.derive(cfg, None) and again.model_dump()[table][key] == value
    text = value if isinstance(value, str) else _toml(value)
    (folder / "x.toml").write_text("[run]\nseed = 0\n")
    assert load_config(["x.toml", f"--{name}={text}"]) == again


@pytest.mark.parametrize(
    "text", ["", "a\tb\n\r\x00\x1b\x7f\x80", "\"\\'''", "é𝄞\u2028\ufeff", "[x] # y = {z}"]
)
def test_text_reads_back(folder, text):
    cfg = Config.model_validate(
        {"debug": {"sample_prompt": text}, "optimizer": {"lr": 1e-300, "eps": 1e22}}
    )
    (folder / "x.toml").write_text(dump(cfg), encoding="utf-8", newline="")
    assert load_config(["x.toml"]) == check.derive(cfg, None)


# --------------------------------------------------------------------------------------------------
# architecture


def test_architecture_of_a_flavor_with_overrides(monkeypatch):
    rows = {
        "tiny": {"dim": 64, "n_heads": 4, "head_dim": 20, "n_layers": 2},
        "big": {"dim": 128, "n_heads": 2},
    }
    numbers = Numbers(
        flavors=rows,
        options={
            name: row for name, row in numbers_of_dense.OPTIONS.items() if name != "rope_theta"
        },
        rules={},
        follows={"head_dim": (("dim", "n_heads"), lambda m: m["dim"] / m["n_heads"])},
    )
    monkeypatch.setattr(check, "NUMBERS", {"llama": numbers})
    read = lambda **given: check.architecture(Model(**given))  # noqa: E731
    assert read(flavor="tiny") == rows["tiny"]
    assert read(flavor="tiny", n_layers=5) == rows["tiny"] | {"n_layers": 5}
    assert read(flavor="tiny", dim=96) == rows["tiny"] | {"dim": 96, "head_dim": 24}
    assert read(flavor="tiny", n_heads=8) == rows["tiny"] | {"n_heads": 8, "head_dim": 8}
    assert read(flavor="tiny", n_heads=8, head_dim=6)["head_dim"] == 6
    assert read(flavor="tiny", dim=66)["head_dim"] == 16.5
    with pytest.raises(InputError, match='tiny, big; did you mean "big"'):
        read(flavor="bgi")
    with pytest.raises(
        InputError, match="model.rope_theta: the family llama has no such number; remove it"
    ):
        read(flavor="tiny", rope_theta=5.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_of_a_model_but_two_is_an_option(family):
    """rope_scaling is a table that comes with published weights, and norm_eps has no bearing on
    what a run can do."""
    for flavor, numbers in NUMBERS[family].flavors.items():
        assert set(numbers) - {"rope_scaling", "norm_eps"} <= set(NUMBERS[family].options), flavor


# ------------------------------------------------------------------------------------------- help,
# schema, command line


def test_help_names_every_option():
    lines = help_asked_for(["x.toml", "--help=all"]).splitlines()
    position = 0
    for table in TABLES:
        position = lines.index(f"[{table}]", position)
        for name, option in OPTIONS.items():
            if name.startswith(f"{table}."):
                assert re.match(rf"  {name.split('.')[1]} = \S", lines[position + 1]), (
                    name,
                    lines[position + 1],
                )
                assert lines[position + 1].endswith(f"  {allowed(option)}")
                assert lines[position + 2] == f"      {option['description']}"
                assert option["description"].endswith("."), name
                position += 2
    assert position == len(lines) - 1
    assert max(map(len, lines)) <= 120


def test_the_short_help_names_what_people_set():
    assert len(set(COMMON)) == len(COMMON) and set(COMMON) < set(OPTIONS)
    assert [name for name in OPTIONS if name in COMMON] == list(COMMON), "in the schema's order"
    short = help_asked_for(["--help"])
    assert short.startswith(help_text(COMMON)) and "--help=all lists" in short
    assert short.count("\n") < help_asked_for(["--help=all"]).count("\n") / 2
    assert help_asked_for(["x.toml", "--run.seed=1"]) == ""


# Options that earlier versions had


def old_config() -> str:
    """A configuration that an earlier version has written: every option, the old ones included."""
    tables = tomli.loads(dump(load_config([])))
    for name, old in dropped.DROPPED.items():
        table, _, key = name.partition(".")
        tables[table][key] = old.holds
    lines = []
    for table, options in tables.items():
        lines += [f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in options.items())]
    return "\n".join(lines)


def test_old_options_that_hold_now_are_read_in_silence(folder):
    (folder / "x.toml").write_text(old_config())
    assert load_config(["x.toml"]) == load_config([])
    assert ignored(["x.toml"]) == []
    assert not set(dropped.DROPPED) & set(OPTIONS)


@pytest.mark.parametrize("name", dropped.DROPPED)
def test_an_old_option_with_another_value_is_answered_with_one_sentence(name, folder):
    """Where the run's numbers would be others it is refused; otherwise the run says so, and goes
    on."""
    old = dropped.DROPPED[name]
    table, _, key = name.partition(".")
    value = {bool: str(not old.holds).lower(), str: '"x"'}.get(type(old.holds), "7")
    (folder / "x.toml").write_text(f"[{table}]\n{key} = {value}\n")
    (folder / "y.toml").write_text("[run]\nseed = 0\n")
    in_file = ["x.toml"], ["y.toml"], "x.toml"
    in_command = [f"--{name}={value}"], [], "command line"
    for argv, without, where in in_file, in_command:
        said = ignored(argv)
        if old.changes_numbers:
            with pytest.raises(ConfigError) as caught:
                load_config(argv)
            assert not said
            said = caught.value.problems
        else:
            assert load_config(argv) == load_config(without)
        assert len(said) == 1 and said[0].startswith(f"{where}: {name} = {value}"), said
        assert old.sentence in said[0]


def test_schema_file_is_up_to_date():
    written = (ROOT / "configs" / "schema.json").read_text(encoding="utf-8")
    assert written == json_schema(), "run: python -m configs.load --write-schema"


def test_main_in_process(folder, capsys):
    (folder / "x.toml").write_text("[training]\nsteps = 7\n")
    assert main(["x.toml", "--run.seed=5"]) == 0
    out, err = capsys.readouterr()
    assert out == dump(load_config(["x.toml", "--run.seed=5"])) and not err
    sizes = ["--world-size=4", "--local-world-size", "4"]
    assert main(["x.toml", "--quiet", *sizes, "--training.local_batch_size=2"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["x.toml", "--quiet", "--world-size=3", "--local-world-size=3"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(
        "1 mistake in the configuration:\n  - training.global_batch_size = 8 is not a multiple of "
        "the 3 "
    )
    assert main(["--help", "--nonsense"]) == 0
    assert capsys.readouterr().out == help_asked_for(["-h"]) + "\n"
    for argv in (
        ["--world-size=0"],
        ["--world-size=64", "--local-world-size=7"],
        ["--world-size=two"],
        ["--local-world-size"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2 and "world-size" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["checkpoint.store", "run.mirror", "data.source"])
@pytest.mark.parametrize("url", ["s3://bucket/a/../b", "gs://bucket/./b", "az://bucket/.."])
def test_a_url_with_dots_between_slashes_is_a_sentence(option, url):
    with pytest.raises(ConfigError, match=rf"{option}.* has \. or \.\. between slashes"):
        load_config([f"--{option}={url}"])
    with pytest.raises(InputError, match=r"has \. or \.\. between slashes"):
        location(url)
