"""Configurations: every mistake is named in a sentence, all at once, before anything is launched or
written."""

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

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
from configs.schema import Config, InputError, Model, Parallelism
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
    "no value": ("[run]\nseed =\nfolder = 'x'", "x.toml: not valid TOML|line 2|seed ="),
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
    "unknown table, nothing near": (
        "[xyzzy]\na = 1",
        "x.toml: xyzzy: no such table; the tables are|run|debug",
    ),
    "unknown key": (
        "[training]\nstps = 1",
        "x.toml: training.stps: no such option; did you mean training.steps?",
    ),
    "key with a dash": (
        "[training]\nseq-len = 1",
        "training.seq-len: no such option; did you mean training.seq_len?",
    ),
    "unknown key, nothing near": (
        "[compile]\nxyzzy = 1",
        "compile.xyzzy: no such option; [compile] has enabled, backend",
    ),
    "key outside tables": (
        "momentum = 0.9",
        "momentum: is outside of any table; did you mean optimizer.momentum?",
    ),
    "key of several tables": (
        "steps = 5",
        "steps: is outside of any table|training.steps or profiler.steps or validation.steps",
    ),
    "part of a name": (
        "[training]\nbatch_size = 2",
        "did you mean training.global_batch_size or training.local_batch_size?",
    ),
    "table in a table": (
        "[training.steps]\na = 1",
        "training.steps = {a = 1}: must be an integer >= 1, not a table",
    ),
    "number for a table": (
        "training = 5",
        "training = 5: a table is needed, as in training.steps = 100",
    ),
    "a key with a newline": (
        '[training]\n"a\\nb" = 1',
        "training.a\\nb|no such option; [training] has",
    ),
    "list for a number": (
        "[training]\nsteps = [1]",
        "training.steps = [1]: must be an integer >= 1, not a list",
    ),
    "boolean for a float": (
        "[optimizer]\nlr = true",
        "optimizer.lr = true: must be a finite number > 0, not a boolean",
    ),
    "float for an integer": (
        "[training]\nsteps = 1e3",
        "training.steps = 1000.0: must be an integer|not a float",
    ),
    "number for a text": ("[run]\nfolder = 5", "run.folder = 5: must be text|not an integer"),
    "NaN": ("[optimizer]\nlr = nan", "optimizer.lr = nan: must be a finite number > 0"),
    "minimum above the peak": (
        "[lr_schedule]\nmin_ratio = 1.5",
        "lr_schedule.min_ratio = 1.5: must be|>= 0 and <= 1",
    ),
    "beta 1": (
        "[optimizer]\nbetas = [0.9, 1.0]",
        "optimizer.betas = [0.9, 1.0]: must be a list of 2|>= 0 and < 1",
    ),
    "betas of text": (
        '[optimizer]\nbetas = ["a", 0.9]',
        'optimizer.betas = ["a", 0.9]: must be a list of 2, each a finite',
    ),
    "numbers for texts": (
        "[checkpoint]\nexclude_from_loading = [1, 2]",
        "checkpoint.exclude_from_loading = [1, 2]: must be a list, each text",
    ),
    "a row without a key": (
        '[[data.mixture]]\nname = "a"\nsource = "x"',
        "x.toml: data.mixture = |: table 1 needs weight, a finite number >= 0",
    ),
    "a row with another key": (
        '[[validation.sets]]\nname = "a"\nsource = "x"\n[[validation.sets]]\nname = "b"\nsorce = '
        '"x"',
        "x.toml: validation.sets = |: table 2 has sorce; did you mean source?",
    ),
    "a row's number": (
        '[[data.mixture]]\nname = "a"\nsource = "x"\nweight = -1',
        "data.mixture = |: weight of table 1 must be a finite number >= 0",
    ),
    "a row's name": (
        '[[data.mixture]]\nname = "a b"\nsource = "x"\nweight = 1',
        "data.mixture = |: name of table 1 must be 1 to 60 letters",
    ),
    "a row's schedule": (
        '[[data.mixture]]\nname = "a"\nsource = "x"\nweight = 1\nschedule = [[9, 1], [5, 2]]',
        "data.mixture = |: schedule of table 1 must name steps in ascending order",
    ),
    "a schedule of text": (
        '[[data.mixture]]\nname = "a"\nsource = "x"\nweight = 1\nschedule = [[9, "x"]]',
        "schedule of table 1 must be a list, each [an integer >= 1, a finite number >= 0]",
    ),
    "a name twice": (
        '[[validation.sets]]\nname = "a"\nsource = "x"\n[[validation.sets]]\nname = "a"\nsource = '
        '"y"',
        "validation.sets = |: must give each row a different name|called a",
    ),
    "rows that are none": (
        "[data]\nmixture = [3]",
        "data.mixture = [3]: must be a list, each a table of name, source, weight, schedule, "
        "max_epochs",
    ),
    "unknown dtype": (
        '[training]\nparam_dtype = "float16"',
        '"float16": must be "auto" or "float32" or "bfloat16" or "float64"; did you',
    ),
    "no auto in sums": (
        '[training]\nreduce_dtype = "auto"',
        'training.reduce_dtype = "auto": must be "float32" or "bfloat16"',
    ),
    "unknown word": (
        '[optimizer]\nkind = "adam"',
        'optimizer.kind = "adam": must be "adamw" or "sgd" or "muon"; did you mean "adamw"?',
    ),
    "a word of other programs": (
        '[run]\ndevice = "gpu"',
        'run.device = "gpu": must be "auto" or "cpu" or "cuda"; did you mean "cuda"?',
    ),
    "a type's short name": (
        '[training]\nparam_dtype = "fp32"',
        'training.param_dtype = "fp32": must be|did you mean "float32"?',
    ),
    "the nearest size": (
        '[model]\nflavor = "7B"',
        'model.flavor = "7B": models/llama.py has debug, 1B|did you mean "8B"?',
    ),
    "a size in millions": (
        '[model]\nfamily = "qwen3"\nflavor = "14000M"',
        'model.flavor = "14000M": models/qwen3.py has debug|did you mean "14B"?',
    ),
    "typographic quotes": (
        "[run]\nfolder = \u201cx\u201d",
        'x.toml: not valid TOML|line 2|these are typographic quotes: write " instead',
    ),
    "no quotes": (
        "[run]\nfolder = runs",
        'x.toml: not valid TOML|line 2|write folder = "runs"',
    ),
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
    "a Hugging Face folder in a store": (
        '[checkpoint]\nload_hf = "s3://bucket/x"',
        'checkpoint.load_hf = "s3://bucket/x": must be a path on this machine',
    ),
    "undefined variable": (
        '[run]\nfolder = "$SCRATCH/x"',
        'run.folder = "$SCRATCH/x": must be written out: environment',
    ),
    "newline in a path": (
        '[run]\nfolder = "a\\nb"',
        'run.folder = "a\\nb": must not contain control characters',
    ),
    "NUL in a path": (
        '[data]\nsource = "a\\u0000b"',
        'data.source = "a\\u0000b": must not contain control characters',
    ),
    "empty path": ('[data]\ntokenizer = ""', 'data.tokenizer = "": must be text, not empty'),
    "300 characters": (
        f'[run]\nfolder = "{"x" * 300}"',
        "run.folder|must be text of 1 to 240 characters",
    ),
    "unknown flavor": (
        '[model]\nflavor = "8b"',
        'model.flavor = "8b": models/llama.py has debug, 1B|did you mean "8B"?',
    ),
    "empty": ("", "x.toml: sets nothing"),
    "latin-1": (
        "[run]\nfolder = 'é'".encode("latin-1"),
        "x.toml: line 2 is not UTF-8 (byte 0xe9): save it as UTF-8",
    ),
    "UTF-16": ("[run]\nseed = 1".encode("utf-16"), "x.toml: line 1 is not UTF-8 (byte 0xff)"),
    "binary": (b"\x7fELF\x00\x00\x01", "x.toml: not valid TOML"),
    "10 MB": (b"#" * 10_000_000, "x.toml: larger than 1,000,000 bytes"),
    "deep lists": ("[run]\nseed = " + "[" * 100_000, "x.toml: nested too deeply"),
    "deep tables": ("a." * 5_000 + "a = 1", "x.toml: nested too deeply"),
    "deep, but readable": (
        "[run]\nseed = " + "[" * 300 + "]" * 300,
        "run.seed = [[[|...: must be an integer|not a list",
    ),
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
    "no ending": (
        [str(ROOT / "configs/llama_8b")],
        "configs/llama_8b: no such file; did you mean|llama_8b.toml?",
    ),
    "nothing near": (["xyzzy"], "xyzzy: no such file"),
    "a URL": (["s3://bucket/a.toml"], "s3:/bucket/a.toml: a URL; give a TOML file of this machine"),
    "a folder": (["folder"], "folder: a folder; give a TOML file"),
    "a pipe": (["pipe"], "pipe: a special file; give a TOML file"),
    "below a file": (["y.toml/x.toml"], "y.toml/x.toml: cannot be read: Not a directory"),
    "a name too long": (["x" * 5000], "xxx|cannot be read: File name too long"),
    "NUL in the name": (["a\0b"], "a\\x00b|cannot be read"),
    "two files": (
        ["y.toml", "y.toml"],
        "command line: one configuration file is allowed, found y.toml, y.toml",
    ),
    "unknown option": (
        ["--training.stps=5"],
        "command line: training.stps: no such option; did you mean training.steps?",
    ),
    "unknown option, a file": (
        ["--training.stps", "y.toml"],
        "training.stps: no such option; did you mean training.steps?",
    ),
    "unknown table": (
        ["--trainning.steps=5"],
        "trainning.steps: no such option; did you mean training.steps?",
    ),
    "no table": (
        ["--tensor_parallel=2"],
        "tensor_parallel: is outside of any table; did you mean parallelism.tensor_parallel?",
    ),
    "nothing of that name": (
        ["--xyzzy"],
        "command line: xyzzy: no such table or option; the tables are run, model",
    ),
    "one dash": (["-v"], "command line: -v: no such table or option"),
    "no dashes": (
        ["training.steps=10"],
        "command line: training.steps=10: did you mean --training.steps=10?",
    ),
    "one dash before an option": (
        ["-training.steps=10"],
        "command line: -training.steps=10: did you mean --training.steps=10?",
    ),
    "a long dash": (
        ["\u2014training.steps=10"],
        "did you mean --training.steps=10?",
    ),
    "--config=": (
        ["--config=y.toml"],
        "command line: --config=y.toml: the configuration file is named without an option: "
        "./run_train.sh y.toml",
    ),
    "--config= and a file": (
        ["--config=y.toml", "y.toml"],
        "command line: --config=y.toml: the configuration file is named without an option",
    ),
    "typographic quotes": (
        ["--training.steps=\u201c10\u201d"],
        "command line: --training.steps=|typographic quotes: write --training.steps=10",
    ),
    "typographic quotes of a text": (
        ["--run.folder", "\u2018runs/x\u2019"],
        "command line: --run.folder: these are typographic quotes: write --run.folder=runs/x",
    ),
    "a power of ten": (
        ["--training.steps=1e3"],
        "training.steps = 1000.0: must be an integer >= 1, not a float; write 1000",
    ),
    "a name with hyphens": (
        ["--global-batch-size=8"],
        "is outside of any table; did you mean training.global_batch_size?",
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
    "empty value": (
        ["--training.steps="],
        'command line: training.steps = "": must be an integer >= 1, not a string',
    ),
    "two lines": (["--run.seed=1\nx = 2"], 'run.seed = "1\\nx = 2": must be an integer >= 0'),
    "Python's True": (
        ["--compile.enabled=True"],
        'compile.enabled = "True": must be true or false, not a string; write true',
    ),
    "commas": (["--optimizer.betas=0.9,0.95"], 'optimizer.betas = "0.9,0.95": must be a list of 2'),
    "infinity by overflow": (
        ["--optimizer.lr=1e999"],
        "optimizer.lr = inf: must be a finite number > 0",
    ),
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

# A case of every rule of configs/check.py. rule: (overrides, words of the problem, further overrides
# that repair it, processes if not one, those of a host if fewer)
RULE_CASES = {
    "mesh_product": (
        "parallelism.data_parallel_replicate=2 parallelism.data_parallel_shard=3 "
        "parallelism.tensor_parallel=4",
        "parallelism.data_parallel_replicate = 2|parallelism.data_parallel_shard = "
        "3|parallelism.tensor_parallel = 4"
        "|multiply to 24|8 processes|data_parallel_shard = -1",
        "parallelism.data_parallel_shard=1 training.local_batch_size=4",
        8,
    ),
    "mesh_rest": (
        "parallelism.data_parallel_replicate=2 parallelism.tensor_parallel=4",
        "parallelism.data_parallel_shard = -1|parallelism.data_parallel_replicate = 2 times "
        "parallelism.context_parallel = 1 times parallelism.tensor_parallel = 4 times "
        "parallelism.pipeline_parallel = 1 must "
        "divide the 12 processes of the run (NGPU on each node)",
        "parallelism.data_parallel_replicate=1 training.global_batch_size=24",
        12,
        4,
    ),
    "tp_host": (
        "parallelism.tensor_parallel=4",
        "parallelism.tensor_parallel = 4 does not divide the 2 processes of a "
        "host|tensor_parallel_across_hosts = true",
        "parallelism.tensor_parallel_across_hosts=true",
        4,
        2,
    ),
    "tp_heads": (
        "parallelism.tensor_parallel=4 model.n_heads=6 model.n_kv_heads=2 model.head_dim=32",
        "parallelism.tensor_parallel = 4 does not divide model.n_heads = 6: each rank computes "
        "whole query heads",
        "model.n_heads=8 model.n_kv_heads=4",
        4,
    ),
    "tp_kv_heads": (
        "parallelism.tensor_parallel=8",
        "parallelism.tensor_parallel = 8 does not divide model.n_kv_heads = 4 (of flavor "
        "debug)|not duplicated"
        "|at most n_kv_heads",
        "model.n_kv_heads=8",
        8,
    ),
    "tp_shared": (
        "model.family=deepseek_v3 parallelism.tensor_parallel=4 model.expert_dim=90",
        "parallelism.tensor_parallel = 4 does not divide model.n_shared_experts = 1 (of flavor "
        "debug) times model.expert_dim = 90|share",
        "model.expert_dim=92",
        4,
    ),
    "tp_hidden": (
        "parallelism.tensor_parallel=4 model.hidden_dim=702",
        "parallelism.tensor_parallel = 4 does not divide model.hidden_dim = 702|equal share",
        "model.hidden_dim=704",
        4,
    ),
    "tp_sequence": (
        "parallelism.tensor_parallel=4 training.seq_len=255",
        "parallelism.tensor_parallel = 4 does not divide training.seq_len = 255|equal part of the "
        "sequence",
        "training.seq_len=256",
        4,
    ),
    "tp_vocabulary": (  # 9 rows each: 31 ranks take all 279
        "parallelism.tensor_parallel=32 model.n_heads=32 model.n_kv_heads=32 model.vocab_size=279 "
        "data.tokenizer=bytes",
        "parallelism.tensor_parallel = 32 leaves a rank without a row of the vocabulary, "
        "model.vocab_size = 279",
        "model.vocab_size=280",
        32,
    ),
    "tp_offload": (
        "parallelism.tensor_parallel=2 parallelism.cpu_offload=true",
        "parallelism.cpu_offload = true together with parallelism.tensor_parallel = 2 is not "
        "supported",
        "parallelism.tensor_parallel=1 training.local_batch_size=4",
        2,
    ),
    "tp_reshard": (
        "parallelism.tensor_parallel=2 parallelism.reshard_after_forward=2 "
        "training.local_batch_size=2",
        "parallelism.reshard_after_forward = 2|parallelism.tensor_parallel = 2, "
        "parallelism.context_parallel = 1 and "
        'parallelism.pipeline_parallel = 1 is not supported|"default"',
        "parallelism.reshard_after_forward=true",
        8,
    ),
    "ep_experts": (
        "parallelism.expert_parallel=2",
        "parallelism.expert_parallel = 2 has no effect on a model without experts",
        "model.family=qwen3 model.flavor=debug_moe",
        2,
    ),
    "ep_ranks": (
        "model.family=deepseek_v3 parallelism.expert_parallel=4",
        "parallelism.expert_parallel = 4 does not divide 2 times parallelism.context_parallel = 1",
        "parallelism.expert_parallel=2",
        2,
    ),
    "ep_hosts": (
        "model.family=deepseek_v3 parallelism.expert_parallel=4 "
        "parallelism.expert_exchange=hierarchical training.local_batch_size=1",
        'parallelism.expert_exchange = "hierarchical"|all ranks of several hosts|'
        "parallelism.expert_parallel = 4 is no such multiple of the 4 processes of a host|"
        'use "flat"',
        "parallelism.expert_parallel=8",
        8,
        4,
    ),
    "expert_exchange_unused": (
        "model.family=deepseek_v3 parallelism.expert_exchange=hierarchical",
        'parallelism.expert_exchange = "hierarchical" has no effect with '
        "parallelism.expert_parallel = 1|remove it",
        "parallelism.expert_exchange=flat",
    ),
    "expert_chunks_unused": (
        "model.family=deepseek_v3 parallelism.expert_chunks=2",
        "parallelism.expert_chunks = 2 has no effect with parallelism.expert_parallel = 1|"
        "remove it",
        "parallelism.expert_chunks=1",
    ),
    "ep_reshard": (
        "model.family=qwen3 model.flavor=debug_moe parallelism.expert_parallel=4 "
        "parallelism.reshard_after_forward=2 "
        "training.local_batch_size=1",
        "parallelism.reshard_after_forward = 2, a number of ranks, together with "
        "parallelism.expert_parallel = 4 is not "
        'supported|"default"',
        "parallelism.expert_parallel=1",
        8,
    ),
    "experts": (
        "model.family=qwen3 model.flavor=debug_moe model.n_experts=8 model.experts_per_token=9",
        "model.experts_per_token = 9 is above model.n_experts = 8",
        "model.experts_per_token=8",
    ),
    "experts_ep": (
        "model.family=deepseek_v3 model.n_experts=12 parallelism.expert_parallel=8",
        "parallelism.expert_parallel = 8 does not divide model.n_experts = 12",
        "parallelism.expert_parallel=4",
        8,
    ),
    "no_experts": (
        "model.family=deepseek_v3 model.n_experts=0",
        "model.n_experts = 0, but all of model.n_layers = 5 (of flavor debug) but the first ones, "
        "model.n_dense_layers = 1",
        "model.n_dense_layers=5",
    ),
    "gpt_oss_experts": (
        "model.family=gpt_oss model.n_experts=0",
        "model.n_experts = 0, but every layer is a mixture of experts",
        "model.n_experts=4",
    ),
    "qwen3_next_experts": (
        "model.family=qwen3_next model.n_experts=0",
        "model.n_experts = 0, but every layer is a mixture of experts",
        "model.n_experts=4",
    ),
    "partial_rope": (
        "model.family=qwen3_next model.rope_dim=34",
        "model.rope_dim = 34 must be even and at most model.head_dim = 32",
        "model.rope_dim=32",
    ),
    "delta_heads": (
        "model.family=qwen3_next model.delta_value_heads=6",
        "model.delta_key_heads = 4 (of flavor debug) does not divide model.delta_value_heads = 6",
        "model.delta_value_heads=12",
    ),
    "tp_delta_heads": (
        "model.family=qwen3_next model.delta_key_heads=2 parallelism.tensor_parallel=4",
        "parallelism.tensor_parallel = 4 does not divide model.delta_key_heads = 2",
        "parallelism.tensor_parallel=2",
        4,
    ),
    "mtp_shared": (
        "model.family=qwen3_next model.mtp_depth=2",
        "model.mtp_depth = 2, but Qwen3-Next has one such layer",
        "model.mtp_depth=1",
    ),
    "tp_kda_heads": (
        "model.family=kimi_linear model.delta_heads=2 parallelism.tensor_parallel=4",
        "parallelism.tensor_parallel = 4 does not divide model.delta_heads = 2",
        "parallelism.tensor_parallel=2",
        4,
    ),
    "flash_delta_keys": (
        "model.family=qwen3_next model.delta_key_dim=320 training.delta_rule=flash run.device=auto "
        "training.param_dtype=bfloat16",
        'training.delta_rule = "flash" has keys of at most 256 numbers, but model.delta_key_dim = 320',
        "model.delta_key_dim=256",
    ),
    "flash_kda_keys": (
        "model.family=kimi_linear model.delta_dim=320 training.delta_rule=flash run.device=auto "
        "training.param_dtype=bfloat16",
        'training.delta_rule = "flash" has keys of at most 256 numbers, but model.delta_dim = 320',
        "model.delta_dim=256",
    ),
    "mtp_tied": (
        "model.family=deepseek_v3 model.mtp_depth=1 model.tied_embeddings=true "
        "parallelism.pipeline_parallel=2 parallelism.pipeline_schedule=zero_bubble "
        "training.local_batch_size=1",
        'pipeline_schedule = "zero_bubble" splits the backward pass',
        "model.tied_embeddings=false",
        2,
    ),
    "dense_layers": (
        "model.family=deepseek_v3 model.n_dense_layers=6",
        "model.n_dense_layers = 6 is above model.n_layers = 5",
        "model.n_layers=6",
    ),
    "rope_dim": (
        "model.family=deepseek_v3 model.rope_dim=15",
        "model.rope_dim = 15 must be even",
        "model.rope_dim=14",
    ),
    "value_dim": (
        "model.family=deepseek_v3 model.value_dim=49",
        "model.value_dim = 49 is above model.nope_dim = 32 (of flavor debug) plus model.rope_dim "
        "= 16",
        "model.value_dim=48",
    ),
    "expert_groups": (
        "model.family=deepseek_v3 model.n_experts=18",
        "model.expert_groups = 4 (of flavor debug) must divide model.n_experts = 18 into groups "
        "of two",
        "model.expert_groups=3",
    ),
    "groups_per_token": (
        "model.family=deepseek_v3 model.experts_per_token=9",
        "model.experts_per_token = 9 cannot be chosen within model.groups_per_token = 2 (of "
        "flavor debug) of model.expert_groups = 4",
        "model.groups_per_token=3",
    ),
    "experts_async": (
        "model.family=deepseek_v3 parallelism.tensor_parallel=2 "
        "parallelism.async_tensor_parallel=true compile.enabled=true",
        "parallelism.async_tensor_parallel = true together with experts (model.n_experts = 16|is "
        "not supported",
        "parallelism.async_tensor_parallel=false",
        2,
    ),
    "cp_sequence": (
        "parallelism.context_parallel=3 training.seq_len=256 training.local_batch_size=1",
        "training.seq_len = 256 is not a multiple of 6|parallelism.context_parallel = "
        "3|parallelism.context_parallel_method",
        "training.seq_len=252",
        3,
    ),
    "cp_heads": (
        "parallelism.context_parallel=4 parallelism.tensor_parallel=2 "
        "parallelism.context_parallel_method=ulysses",
        "parallelism.context_parallel = 4 times parallelism.tensor_parallel = 2 does not divide "
        "model.n_kv_heads = 4"
        '|parallelism.context_parallel_method = "ulysses"|whole key/value '
        'heads|context_parallel_method = "gather"',
        "parallelism.context_parallel_method=gather",
        8,
    ),
    "cp_latent_heads": (
        "model.family=deepseek_v3 parallelism.context_parallel=4 parallelism.tensor_parallel=2 "
        "parallelism.context_parallel_method=ulysses",
        "parallelism.context_parallel = 4 times parallelism.tensor_parallel = 2 does not divide "
        "model.n_heads = 4|whole heads",
        "model.n_heads=8",
        8,
    ),
    "cp_attention": (
        "parallelism.context_parallel=2 training.attention=cudnn training.param_dtype=bfloat16 "
        "run.device=cuda",
        'training.attention = "cudnn" has no kernel for parallelism.context_parallel_method = '
        '"gather"|"flash"|"ulysses"',
        "parallelism.context_parallel_method=ulysses",
        2,
    ),
    "cp_kernel": (
        "parallelism.context_parallel=2 training.param_dtype=float32 run.device=cuda",
        'context_parallel_method = "gather" with|context_parallel = 2|a 16-bit type|param_dtype = '
        '"float32"|"ulysses"',
        "parallelism.context_parallel_method=ulysses",
        2,
    ),
    "context_parallel_method_unused": (
        "parallelism.context_parallel_method=ulysses",
        'parallelism.context_parallel_method = "ulysses" has no effect with '
        "parallelism.context_parallel = 1|above 1",
        "parallelism.context_parallel_method=gather",
    ),
    "reshard_ranks": (
        "parallelism.reshard_after_forward=3 training.local_batch_size=1",
        "parallelism.reshard_after_forward = 3 must be less than the 8 ranks|divide them",
        "parallelism.reshard_after_forward=4",
        8,
    ),
    "batch": (
        "training.global_batch_size=24 training.local_batch_size=8",
        "training.global_batch_size = 24 is not a multiple of 32, which is "
        "training.local_batch_size = 8 on 4 data-"
        "|set training.local_batch_size to 6, or training.global_batch_size to 32",
        "training.local_batch_size=6",
        4,
    ),
    "batch_ranks": (
        "training.global_batch_size=8",
        "training.global_batch_size = 8 is not a multiple of the 3 data-parallel ranks|set "
        "training.global_batch_size to 6 or 9",
        "training.global_batch_size=9",
        3,
    ),
    "seq_len": (
        "training.seq_len=8193",
        "training.seq_len = 8193 is more|model.max_seq_len = 8192 (of flavor debug)",
        "training.seq_len=8192",
    ),
    "kv_heads": (
        "model.n_kv_heads=3",
        "model.n_kv_heads = 3 does not divide model.n_heads = 8 (of flavor debug)",
        "model.n_kv_heads=2",
    ),
    "head_dim": (
        "model.dim=300",
        "model.head_dim would be 37.5|whole even number|model.dim = 300|model.n_heads = 8",
        "model.dim=304",
    ),
    "pipeline_schedule_unused": (
        "parallelism.pipeline_schedule=zbv",
        'parallelism.pipeline_schedule = "zbv" has no effect with parallelism.pipeline_parallel = '
        "1",
        "parallelism.pipeline_schedule=1f1b",
    ),
    "pipeline_stages_per_rank_unused": (
        "parallelism.pipeline_stages_per_rank=2",
        "parallelism.pipeline_stages_per_rank = 2 has no effect with "
        "parallelism.pipeline_parallel = 1",
        "parallelism.pipeline_stages_per_rank=0",
    ),
    "pipeline_layers_unused": (
        "parallelism.pipeline_layers=[3,3]",
        "parallelism.pipeline_layers = [3, 3] has no effect with parallelism.pipeline_parallel = 1",
        "parallelism.pipeline_layers=[]",
    ),
    "pipeline_stages_per_rank": (
        "parallelism.pipeline_parallel=2 parallelism.pipeline_stages_per_rank=3 "
        "parallelism.pipeline_schedule=zbv",
        'parallelism.pipeline_stages_per_rank = 3, but parallelism.pipeline_schedule = "zbv" has '
        "2 to 2 stages|there are 2",
        "parallelism.pipeline_schedule=interleaved_1f1b",
        2,
    ),
    "pipeline_stages": (
        "parallelism.pipeline_parallel=4 parallelism.pipeline_schedule=zbv",
        'pipeline_parallel = 4|pipeline_schedule = "zbv" make 8 stages|only model.n_layers = '
        "6|lower pipeline_parallel",
        "model.n_layers=8",
        4,
    ),
    "pipeline_layers": (
        "parallelism.pipeline_parallel=2 parallelism.pipeline_layers=[3,4]",
        "parallelism.pipeline_layers = [3, 4] must have one number for each of the 2 "
        "stages|model.n_layers = 6",
        "parallelism.pipeline_layers=[4,2]",
        2,
    ),
    "pipeline_microbatches": (
        "parallelism.pipeline_parallel=2 parallelism.pipeline_schedule=dualpipe_v "
        "training.local_batch_size=4",
        'pipeline_schedule = "dualpipe_v" on parallelism.pipeline_parallel = 2 ranks needs at '
        "least 4 microbatches"
        "|one has 8 sequences over all data-parallel ranks|training.global_batch_size = 8|32 or "
        "more|lower training.local_batch_size",
        "training.global_batch_size=32",
        4,
    ),
    "pipeline_offload": (
        "parallelism.pipeline_parallel=2 parallelism.cpu_offload=true",
        "parallelism.cpu_offload = true together with parallelism.pipeline_parallel = 2 is not "
        "supported",
        "parallelism.cpu_offload=false",
        2,
    ),
    "pipeline_reshard": (
        "parallelism.pipeline_parallel=2 parallelism.pipeline_schedule=zero_bubble "
        "parallelism.reshard_after_forward=true",
        'pipeline_schedule = "zero_bubble" splits the backward pass|reshard_after_forward = '
        'true|"default"',
        "parallelism.pipeline_schedule=1f1b",
        2,
    ),
    "gather_again_unused": (
        "activation_checkpoint.mode=selective activation_checkpoint.gather_again=true",
        "activation_checkpoint.gather_again = true has no effect with "
        "parallelism.tensor_parallel = 1|remove it",
        "activation_checkpoint.gather_again=false",
    ),
    "gather_again": (
        "parallelism.tensor_parallel=2 activation_checkpoint.gather_again=true",
        "activation_checkpoint.gather_again = true is about what selective checkpointing would "
        'keep|activation_checkpoint.mode = "none"|remove it',
        "activation_checkpoint.mode=selective",
        2,
    ),
    "pipeline_selective": (
        "parallelism.pipeline_parallel=2 parallelism.pipeline_schedule=zero_bubble "
        "activation_checkpoint.mode=selective",
        'pipeline_schedule = "zero_bubble" splits the backward pass|activation_checkpoint.mode = '
        '"selective"|"full"',
        "parallelism.pipeline_schedule=1f1b",
        2,
    ),
    "pipeline_compile": (
        "parallelism.pipeline_parallel=2 parallelism.pipeline_schedule=zbv compile.enabled=true",
        'pipeline_schedule = "zbv" splits the backward pass|compile.enabled = true',
        "compile.enabled=false",
        2,
    ),
    "pipeline_float8": (
        "parallelism.pipeline_parallel=2 parallelism.pipeline_schedule=zbv training.float8=rowwise",
        'pipeline_schedule = "zbv" splits the backward pass|training.float8 = "rowwise" each '
        'half|"1f1b"',
        "parallelism.pipeline_schedule=interleaved_1f1b",
        2,
    ),
    "bpe_vocabulary": (
        "data.bpe_vocab_size=5000",
        "data.bpe_vocab_size = 5000 is more than the embedding has rows, model.vocab_size = 4096",
        "model.vocab_size=5000",
    ),
    "bytes_vocabulary": (
        "data.tokenizer=bytes model.vocab_size=256",
        'data.tokenizer = "bytes" needs at least 257 rows|model.vocab_size = 256',
        "model.vocab_size=257",
    ),
    "tokenizer_pattern": (
        "data.tokenizer=bytes data.tokenizer_pattern=llama3",
        'data.tokenizer_pattern = "llama3" has no effect with|data.tokenizer = "bytes"',
        "data.tokenizer_pattern=",
    ),
    "end_token": (
        "data.tokenizer=bpe data.end_token=</s>",
        'data.end_token = "</s>" has no effect with|data.tokenizer = "bpe"',
        "data.end_token=<|endoftext|>",
    ),
    "mixture_source": (
        'data.source=corpus data.mixture=[{name="a",source="x",weight=1}] data.tokenizer=bytes',
        'data.source = "corpus" has no effect with data.mixture',
        "data.source=stdlib",
    ),
    "validation_names": (
        'validation.sets=[{name="a",source="x"}] data.mixture=[{name="a",source="y",weight=1}]',
        "validation.sets = |share a name",
        'validation.sets=[{name="b",source="x"}]',
    ),
    "evaluation_interval": (
        "evaluation.interval=10",
        "evaluation.interval = 10 has no effect without tasks",
        'evaluation.tasks=[{name="a",file="x.jsonl"}]',
    ),
    "answers_masked": (
        "data.format=chat data.tokenizer=bytes",
        'data.format = "chat" packs several conversations into a window|data.mask_documents = true',
        "data.mask_documents=true",
    ),
    "answers_tokenizer": (
        "data.format=completion data.mask_documents=true",
        'data.format = "completion", but data.tokenizer = "bpe" would be trained|tokenizer.json',
        "data.tokenizer=bytes",
    ),
    "answers_stream": (
        "data.format=chat data.mask_documents=true data.tokenizer=bytes data.stream=true "
        "validation.interval=0",
        'data.format = "chat" with data.stream = true is not supported',
        "data.stream=false",
    ),
    "answers_field": (
        "data.format=chat data.mask_documents=true data.tokenizer=bytes data.text_field=talk",
        'data.text_field = "talk" has no effect with data.format = "chat"',
        "data.text_field=text",
    ),
    "chat_template": (
        "data.chat_template=plain",
        'data.chat_template = "plain" has no effect with data.format = "text"',
        "data.chat_template=",
    ),
    "chat_may_drop": (
        'data.chat_may_drop=["name"]',
        'data.chat_may_drop = ["name"] has no effect with data.format = "text"',
        "data.chat_may_drop=[]",
    ),
    "stream_tokenizer": (
        "data.stream=true",
        'data.stream = true|data.tokenizer = "bpe"|python -m data.train_tokenizer',
        "data.tokenizer=bytes",
    ),
    "stream_ranks": (
        "data.stream=true data.tokenizer=bytes training.global_batch_size=24 "
        "training.local_batch_size=1",
        "data.streams = 64 is not a multiple of the 3 data-parallel ranks",
        "data.streams=48",
        3,
    ),
    "stream_mixture": (
        'data.stream=true data.tokenizer=bytes data.mixture=[{name="a",source="x",weight=1}]',
        "data.stream = true reads data.source alone",
        "data.mixture=[]",
    ),
    "stream_skip": (
        "data.stream=true data.tokenizer=bytes data.skip=[[10,2]]",
        "data.skip = [[10, 2]] with data.stream = true is not supported",
        "data.skip=[]",
    ),
    "stream_splice": (
        "data.stream=true data.tokenizer=bytes data.allow_splice=true",
        "data.allow_splice = true with data.stream = true is not supported",
        "data.allow_splice=false",
    ),
    "stream_workers": (
        "data.stream=true data.tokenizer=bytes data.workers=2",
        "data.workers = 2 has no effect with data.stream = true",
        "data.workers=0",
    ),
    "stream_timeout": (
        "data.stream=true data.tokenizer=bytes data.timeout_seconds=300",
        "data.timeout_seconds = 300 is not less than run.step_timeout_seconds = 300",
        "data.timeout_seconds=60",
    ),
    "stream_validation": (
        "data.stream=true data.tokenizer=bytes validation.interval=10",
        "validation.interval = 10 with data.stream = true needs [[validation.sets]]",
        'validation.sets=[{name="a",source="x"}]',
    ),
    "warmup": (
        "lr_schedule.warmup_steps=51 training.steps=50",
        "lr_schedule.warmup_steps = 51 is more than training.steps = 50",
        "lr_schedule.warmup_steps=50",
    ),
    "wsd": (
        "lr_schedule.kind=wsd lr_schedule.warmup_steps=81 training.steps=100",
        'lr_schedule.kind = "wsd"|81 steps of warm-up|20 steps of lr_schedule.decay_fraction = 0.2'
        "|training.steps = 100",
        "lr_schedule.warmup_steps=80",
    ),
    "profiler_window": (
        "profiler.enabled=true training.steps=4 lr_schedule.warmup_steps=0",
        "profiler.enabled = true traces from the fifth step on|training.steps = 4",
        "training.steps=5",
    ),
    "stop_after": (
        "training.stop_after=400",
        "training.stop_after = 400 is beyond the end of the run, training.steps = 100",
        "training.stop_after=100",
    ),
    "branch_from": (
        "checkpoint.branch_from=a@5 checkpoint.load_path=b",
        'checkpoint.branch_from = "a@5" goes on with all of another run\'s state',
        "checkpoint.load_path=",
    ),
    "load_step": (
        "checkpoint.load_step=400",
        "checkpoint.load_step = 400 is beyond the end of the run, training.steps = 100",
        "checkpoint.load_step=100",
    ),
    "skip_spikes": (
        "training.skip_spikes=true",
        "training.skip_spikes = true needs training.spike_threshold",
        "training.spike_threshold=6.0",
    ),
    "replica_check_interval_unused": (
        "debug.replica_check_interval=10 training.local_batch_size=4",
        "debug.replica_check_interval = 10 has no effect with|data_parallel_replicate or "
        "tensor_parallel above 1",
        "parallelism.data_parallel_replicate=2",
        2,
    ),
    "replay": (
        "debug.replay_interval=10 run.device=cuda",
        "debug.replay_interval = 10 compares two gradients bit by bit|run.deterministic = false",
        "run.deterministic=true",
    ),
    "watch_compile": (
        "debug.check_collectives=true compile.enabled=true",
        "debug.check_collectives = true and|compile.enabled = true takes out of sight",
        "compile.enabled=false",
    ),
    "keep_gathered": (
        "parallelism.keep_gathered=7",
        "parallelism.keep_gathered = 7 is for blocks|model.n_layers = 6|lower it",
        "parallelism.keep_gathered=6",
    ),
    "reshard_after_backward": (
        "parallelism.reshard_after_backward=false",
        "parallelism.reshard_after_backward = false keeps for the next microbatch what "
        'parallelism.reshard_after_forward = "default" frees|set reshard_after_forward = false',
        "parallelism.reshard_after_forward=false",
    ),
    "pipeline_keep_gathered": (
        "parallelism.keep_gathered=2 parallelism.pipeline_parallel=2",
        "parallelism.keep_gathered = 2 has no effect with parallelism.pipeline_parallel = 2 and "
        'parallelism.reshard_after_forward = "default"|remove it|reshard_after_forward = true',
        "parallelism.reshard_after_forward=true",
        2,
    ),
    "tp_async": (
        "parallelism.async_tensor_parallel=true parallelism.tensor_parallel=2",
        "parallelism.async_tensor_parallel = true is a rewriting of compiled "
        "blocks|compile.enabled = true",
        "compile.enabled=true",
        2,
    ),
    "graphs_ranks": (
        "compile.cuda_graphs=true parallelism.data_parallel_shard=2 training.local_batch_size=4",
        "compile.cuda_graphs = true is for one process, and the run has 2|set it to false",
        "compile.cuda_graphs=false",
        2,
    ),
    "graphs_cpu": (
        "compile.cuda_graphs=true run.device=cpu",
        'compile.cuda_graphs = true needs weights and activations on a GPU, but run.device = "cpu"',
        "run.device=auto",
    ),
    "graphs_documents": (
        "compile.cuda_graphs=true data.mask_documents=true",
        "compile.cuda_graphs = true records shapes, and with data.mask_documents = true",
        "data.mask_documents=false",
    ),
    "graphs_watch": (
        "compile.cuda_graphs=true debug.check_collectives=true",
        "debug.check_collectives = true watches operators one by one, which compile.cuda_graphs",
        "debug.check_collectives=false",
    ),
    "one_pass_ranks": (
        "compile.optimizer=true parallelism.data_parallel_shard=2 training.local_batch_size=4",
        "compile.optimizer = true is for one process with its weights on a GPU, and the run has 2",
        "compile.optimizer=false",
        2,
    ),
    "one_pass_kind": (
        "compile.optimizer=true optimizer.moment_dtype=bfloat16",
        'compile.optimizer = true is an AdamW with averages in float32, not optimizer.kind = "adamw" '
        'with optimizer.moment_dtype = "bfloat16": set it to false',
        "optimizer.moment_dtype=float32",
    ),
    "float8_tp": (
        "training.float8=rowwise parallelism.tensor_parallel=2 training.local_batch_size=4",
        'training.float8 = "rowwise" together with parallelism.tensor_parallel = 2|use one of the '
        "two",
        "parallelism.tensor_parallel=1",
        2,
    ),
    "float8_dtype": (
        "training.float8=tensorwise training.param_dtype=float32",
        'training.float8 = "tensorwise" rounds what training.param_dtype = "float32" would '
        "keep|bfloat16",
        "training.param_dtype=bfloat16",
    ),
    "float8_tokens": (
        "training.float8=tensorwise training.seq_len=100 training.local_batch_size=2",
        'training.float8 = "tensorwise" multiplies matrices whose sides are multiples of 16, and a '
        "microbatch has 200 tokens on a rank|training.seq_len = 100|training.local_batch_size = 2",
        "training.local_batch_size=4",
    ),
    "float8_emulate": (
        "debug.emulate_float8=true",
        'debug.emulate_float8 = true has no effect with training.float8 = "none"|choose a recipe',
        "training.float8=rowwise",
    ),
    "delta_rule": (
        "model.family=qwen3_next training.delta_rule=flash run.device=cpu",
        'training.delta_rule = "flash" is a kernel for GPUs and 16-bit types|run.device = "cpu"',
        "run.device=auto training.param_dtype=bfloat16",
    ),
    "cp_delta_rule": (
        "model.family=qwen3_next training.delta_rule=flash parallelism.context_parallel=2 run.device=auto",
        'training.delta_rule = "flash" computes whole sequences|parallelism.context_parallel = 2',
        "training.delta_rule=auto",
        2,
    ),
    "delta_rule_of": (
        "training.delta_rule=reference",
        'training.delta_rule = "reference" has no effect: this model.family|set it to "auto"',
        "model.family=qwen3_next",
    ),
    "attention": (
        "training.attention=cudnn run.device=cpu",
        'training.attention = "cudnn" is a kernel for GPUs|run.device = "cpu"|set it to "auto"',
        "run.device=auto",
    ),
    "momentum": (
        "optimizer.momentum=0.9",
        'optimizer.momentum = 0.9 has no effect with optimizer.kind = "adamw"|sgd',
        "optimizer.kind=sgd",
    ),
    "moment_dtype": (
        "optimizer.moment_dtype=bfloat16 optimizer.kind=muon",
        'optimizer.moment_dtype = "bfloat16" is supported with AdamW alone|optimizer.kind = "muon"',
        "optimizer.kind=adamw",
    ),
    "muon_options": (
        "optimizer.ns_dtype=float32 optimizer.adamw_lr_scale=2.0",
        'optimizer.kind = "adamw" does not read optimizer.ns_dtype = "float32" and '
        'optimizer.adamw_lr_scale = 2.0|kind = "muon"',
        "optimizer.kind=muon",
    ),
    "muon_offload": (
        "optimizer.kind=muon parallelism.cpu_offload=true",
        'optimizer.kind = "muon" together with parallelism.cpu_offload = true is not supported',
        "parallelism.cpu_offload=false",
    ),
    "transfer_tied": (
        "model.width_base=64 model.tied_embeddings=true",
        "set tied_embeddings = false, or remove width_base",
        "model.tied_embeddings=false",
    ),
    "transfer_depth": (
        "model.family=olmo2 model.depth_base=2",
        "a norm follows there that would undo it: remove depth_base",
        "model.depth_base=0",
    ),
    "transfer_sgd": (
        "model.width_base=64 optimizer.kind=sgd",
        'remove them, or set optimizer.kind = "adamw"',
        "optimizer.kind=adamw",
    ),
    "transfer_lora": (
        'model.width_base=64 lora.rank=4 lora.targets=["wq"] checkpoint.load_hf=x',
        "have no effect on adapters",
        "model.width_base=0",
    ),
    "lora_unused": (
        'lora.targets=["wq"]',
        'lora.alpha = 16.0 and lora.targets = ["wq"] have no effect with lora.rank = 0',
        "lora.rank=4 checkpoint.load_hf=x",
    ),
    "lora_targets": (
        'lora.rank=4 lora.targets=["wq","q_proj"] checkpoint.load_hf=x',
        'lora.targets = ["wq", "q_proj"] must name|lora.rank = 4|that this model.family has: wq, '
        "wk, wv, wo, w1, w2, w3",
        'lora.targets=["wq"]',
    ),
    "lora_base": (
        'lora.rank=4 lora.targets=["wq"]',
        "lora.rank = 4 trains adapters|none is named: set checkpoint.load_hf or "
        "checkpoint.load_path",
        "checkpoint.load_hf=x",
    ),
    "lora_load": (
        'lora.rank=4 lora.targets=["wq"] checkpoint.load_path=x '
        'checkpoint.exclude_from_loading=["*"]',
        'lora.rank = 4|remove checkpoint.exclude_from_loading = ["*"]',
        "checkpoint.exclude_from_loading=[]",
    ),
    "lora_export": (
        'lora.rank=4 lora.targets=["wq"] checkpoint.load_hf=x checkpoint.export_hf=bfloat16',
        'checkpoint.export_hf = "bfloat16" with lora.rank = 4 is not supported: remove it',
        "checkpoint.export_hf=",
    ),
    "lora_muon": (
        'lora.rank=4 lora.targets=["wq"] checkpoint.load_hf=x optimizer.kind=muon',
        'optimizer.kind = "muon"|frozen with lora.rank = 4',
        "optimizer.kind=adamw",
    ),
    "lora_float8": (
        'lora.rank=4 lora.targets=["wq"] checkpoint.load_hf=x training.float8=rowwise '
        "training.param_dtype=bfloat16",
        'training.float8 = "rowwise" together with lora.rank = 4 is not supported',
        "training.float8=none",
    ),
    "lora_async": (
        'lora.rank=4 lora.targets=["wq"] checkpoint.load_hf=x compile.enabled=true '
        "parallelism.async_tensor_parallel=true parallelism.tensor_parallel=2",
        "parallelism.async_tensor_parallel = true together with lora.rank = 4 is not supported",
        "parallelism.async_tensor_parallel=false",
        2,
    ),
    "lora_queries": (
        'model.family=deepseek_v3 lora.rank=4 lora.targets=["wq_a"] checkpoint.load_hf=x',
        'lora.targets = ["wq_a"] names wq_a|model.q_rank = 0 (of flavor debug)',
        'lora.targets=["wq_b"]',
    ),
    "load_path": (
        'checkpoint.exclude_from_loading=["output.*"]',
        'checkpoint.exclude_from_loading = ["output.*"] has no effect without checkpoint.load_path',
        "checkpoint.load_path=runs/x",
    ),
    "load_hf": (
        "checkpoint.load_hf=models/x checkpoint.load_path=runs/x",
        'checkpoint.load_hf = "models/x" and checkpoint.load_path = "runs/x" are both|remove one',
        "checkpoint.load_path=",
    ),
    "export_hf": (
        "checkpoint.export_hf=bfloat16 model.dim=300 model.head_dim=32",
        'checkpoint.export_hf = "bfloat16"|model.dim = 300|multiple of model.n_heads = 8 (of '
        "flavor debug)",
        "model.n_heads=12",
    ),
    "mask_compile": (
        "data.mask_documents=true compile.enabled=true training.param_dtype=float32",
        "data.mask_documents = true|compile.enabled = true|a 16-bit type|training.param_dtype = "
        '"float32"',
        "training.param_dtype=bfloat16",
    ),
    "validation_split": (
        "validation.interval=10 data.validation_fraction=0.0",
        "validation.interval = 10 needs held-out documents, but data.validation_fraction = 0.0",
        "data.validation_fraction=0.01",
    ),
}


def case(words: str) -> list[str]:
    """Return arguments from the bare defaults: a file that changes nothing, and these overrides."""
    Path("x.toml").write_text("[run]\nseed = 0\n")
    return ["x.toml", *(f"--{word}" for word in words.split())]


EVERY_RULE = {name: rule for family in FAMILIES for name, rule in check.rules(family).items()}


@pytest.mark.parametrize("name", EVERY_RULE)
def test_rule(name, monkeypatch):
    """A rule without a case fails here. The rule alone must find the case, and the repaired case
    must break no rule."""
    overrides, words, repair, *processes = RULE_CASES[name]
    world, local_world = (processes * 2 or [1, 1])[:2]
    load_config(case(f"{overrides} {repair}"), world, local_world)
    assert any(
        all(f in p for f in words.split("|"))
        for p in problems_of(case(overrides), world, local_world)
    )
    monkeypatch.setattr(check, "rules", lambda *_: {name: EVERY_RULE[name]})
    problems = problems_of(case(overrides), world, local_world)
    assert len(problems) == 1, problems
    assert_says(problems[0], words)


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


def test_kernels_are_asked_for_heads_as_wide_as_those_of_latent_attention():
    """The width of a query is the sum of two numbers there, and values are padded to it."""
    gather = (
        "model.family=deepseek_v3 parallelism.context_parallel=2 run.device=cuda "
        "training.param_dtype=bfloat16"
    )
    for options, words in {
        gather: 'context_parallel_method = "gather" with',
        "model.family=deepseek_v3 training.attention=flash training.param_dtype=bfloat16": (
            "is a kernel for GPUs"
        ),
        "model.family=deepseek_v3 data.mask_documents=true compile.enabled=true "
        "training.param_dtype=bfloat16": "needs on a GPU",
    }.items():
        ranks = 2 if options == gather else 1
        load_config(case(f"{options} model.nope_dim=34 model.rope_dim=22"), ranks, ranks)
        for width in "model.nope_dim=30", "model.nope_dim=248":
            [problem] = problems_of(case(f"{options} {width}"), ranks, ranks)
            assert (
                words in problem
                and f"{width.replace('=', ' = ')} plus model.rope_dim = 16 (of flavor debug)"
                in problem
            )


def test_no_case_without_a_rule():
    assert set(RULE_CASES) == set(EVERY_RULE)


# Meshes that cannot be. (overrides, world size, processes of a host, words of each problem)
IMPOSSIBLE_MESHES = [
    (
        "parallelism.data_parallel_shard=3",
        4,
        4,
        ["multiply to 3, but the run has 4", "global_batch_size"],
    ),
    (
        "parallelism.tensor_parallel=3",
        3,
        3,
        ["model.n_heads", "model.n_kv_heads", "hidden_dim", "training.seq_len"],
    ),
    ("parallelism.tensor_parallel=2", 3, 3, ["no whole number", "3 processes of a host"]),
    ("training.global_batch_size=2", 4, 4, ["set training.global_batch_size to 4"]),
    ("parallelism.pipeline_parallel=2", 3, 3, ["leaves no whole number of ranks"]),
    ("parallelism.context_parallel=2", 1, 1, ["parallelism.context_parallel = 2 times"]),
    (
        "parallelism.reshard_after_forward=2 parallelism.data_parallel_replicate=2 "
        "parallelism.data_parallel_shard=1 "
        "training.local_batch_size=1",
        2,
        2,
        ["less than the 1 ranks"],
    ),
]


@pytest.mark.parametrize("overrides, world, local_world, words", IMPOSSIBLE_MESHES)
def test_impossible_mesh(overrides, world, local_world, words, monkeypatch):
    """The same list on every rank: it does not depend on the environment."""
    lists = []
    for rank in "0", "1":
        for name in "RANK", "LOCAL_RANK", "NGPU", "CUDA_VISIBLE_DEVICES":
            monkeypatch.setenv(name, rank)
        lists.append(problems_of(case(overrides), world, local_world))
    assert lists[0] == lists[1]
    assert len(lists[0]) == len(words)
    for fragment in words:
        assert any(fragment in problem for problem in lists[0]), (fragment, lists[0])


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
    ("training.steps=10", 1),
    ("training.steps=400", 1),
    ("training.steps=10", 2),
    ("", 4),
    ("", 8),
    ("training.seq_len=64", 1),
    ("training.seq_len=1000", 2),
    ("training.global_batch_size=4", 1),
    ("training.global_batch_size=4", 2),
    ("training.global_batch_size=12", 3),
    ("training.local_batch_size=2", 2),
    ("parallelism.tensor_parallel=2", 2),
    ("parallelism.tensor_parallel=4", 4),
    ("validation.interval=1000", 1),
    ("checkpoint.interval=1000", 1),
    ("profiler.enabled=true training.steps=5", 1),
    ("lr_schedule.kind=wsd training.steps=10", 1),
    ("lr_schedule.warmup_steps=5", 1),
    ("compile.enabled=true", 1),
    ("activation_checkpoint.mode=full", 2),
    ("parallelism.data_parallel_replicate=2", 2),
    ("data.mask_documents=true", 1),
    ("model.n_layers=2", 1),
    ("training.param_dtype=float32", 1),
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
prefetch = 99
""")
    problems = problems_of(["x.toml", "--run.sed=1"], 4, 4)
    expected = [
        "command line: run.sed: no such option; did you mean run.seed?",
        "x.toml: training.stps: no such option; did you mean training.steps?",
        'x.toml: training.param_dtype = "half": must be "auto" or',
        'x.toml: optimizer.lr = "3e-4": must be a finite number > 0, not a string',
        "x.toml: parallelism.prefetch = 99: must be an integer >= 0 and <= 8",
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


def test_a_file_after_an_unknown_option():
    """A file is not taken for the option's value."""
    problems = problems_of(["--training.stps", "missing.toml", "--training.max_stps", "5"])
    for words in (
        "training.stps: no such option",
        "training.max_stps: no such option",
        "missing.toml: no such file",
    ):
        assert sum(words in problem for problem in problems) == 1
    assert len(problems) == 3


def test_very_many_mistakes(folder):
    (folder / "x.toml").write_text("\n".join(f"[nonsense{i}]" for i in range(60)))
    with pytest.raises(ConfigError) as caught:
        load_config(["x.toml"])
    assert len(caught.value.problems) == 60
    assert str(caught.value).startswith("60 mistakes") and str(caught.value).endswith(
        "\n  and 10 more"
    )


def test_broken_file_and_broken_arguments(folder):
    (folder / "x.toml").write_text("[run")
    # The file may set training.steps: whether the warm-up fits is not known.
    problems = problems_of(
        ["x.toml", "--run.sed=1", "--training.seq_len=0", "--lr_schedule.warmup_steps=200"]
    )
    for words in (
        "run.sed: no such option",
        "x.toml: not valid TOML",
        "command line: training.seq_len = 0",
    ):
        assert sum(words in problem for problem in problems) == 1
    assert len(problems) == 3


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
    (["--run.folder=true"], "run.folder", "true"),
    (["--run.folder", "/a b/../ü"], "run.folder", "/a b/../ü"),
    (["--data.source=a/b"], "data.source", "a/b"),
    (["--data.source", "~/corpus/*.txt"], "data.source", "~/corpus/*.txt"),
    (['--debug.sample_prompt="x" = # y'], "debug.sample_prompt", '"x" = # y'),
    (["--debug.sample_prompt="], "debug.sample_prompt", ""),
    (["--debug.sample_prompt=a=b"], "debug.sample_prompt", "a=b"),
    (["--compile.enabled"], "compile.enabled", True),
    (["--compile.enabled", "false"], "compile.enabled", False),
    (["--compile.enabled", "--run.seed=1"], "compile.enabled", True),
    (["--compile.enabled", "y.toml"], "compile.enabled", True),
    (["--compile.enabled=true"], "compile.enabled", True),
    (["--training.steps", "1_000"], "training.steps", 1000),
    (["--optimizer.lr=1"], "optimizer.lr", 1.0),
    (["--optimizer.lr=3e-4"], "optimizer.lr", 3e-4),
    (["--optimizer.betas=[0.5, 0]"], "optimizer.betas", (0.5, 0.0)),
    (["--parallelism.data_parallel_shard", "-1"], "parallelism.data_parallel_shard", -1),
    (
        ["--parallelism.reshard_after_forward=default"],
        "parallelism.reshard_after_forward",
        "default",
    ),
    (["--parallelism.reshard_after_forward=false"], "parallelism.reshard_after_forward", False),
    (["--parallelism.reshard_after_forward=2"], "parallelism.reshard_after_forward", 2),
    (["--model.dim=512"], "model.dim", 512),
    (["--model.tied_embeddings=true"], "model.tied_embeddings", True),
]


@pytest.mark.parametrize("argv, name, value", OVERRIDES)
def test_override(argv, name, value, folder):
    (folder / "y.toml").write_text("[run]\nseed = 3\n")
    table, key = name.split(".")
    found = getattr(getattr(load_config(argv), table), key)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_preset(preset):
    """A preset names its schema, states its world size, and passes every check there."""
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
            tuple(map(other_value, option["prefixItems"]))
            if "prefixItems" in option
            else (other_value(option["items"] | {"default": None}),)
        ),
        "object": lambda: (
            {"name": "a"}
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


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_dump_reads_back(preset, folder):
    cfg = load_config([str(preset)])
    (folder / "x.toml").write_text(dump(cfg), encoding="utf-8")
    assert load_config(["x.toml"]) == cfg
    assert dump(load_config(["x.toml"])) == dump(cfg)


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


def test_data_parallel_shard():
    cfg = lambda **given: SimpleNamespace(parallelism=Parallelism(**given))  # noqa: E731
    assert check.data_parallel_shard(cfg(data_parallel_replicate=2, tensor_parallel=4), 64) == 8
    assert check.data_parallel_shard(cfg(data_parallel_shard=3), 64) == 3
    with pytest.raises(InputError, match="8 does not divide 12 processes"):
        check.data_parallel_shard(cfg(data_parallel_replicate=2, tensor_parallel=4), 12)


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
    value = {bool: "false", str: '"x"'}.get(type(old.holds), "7")
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


def test_every_option_has_one_line():
    for name, option in OPTIONS.items():
        assert option.get("description", "").endswith("."), name
        assert "\n" not in option["description"], name


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
    for argv in (["--world-size=0"], ["--world-size=two"], ["--local-world-size"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2 and "world-size" in capsys.readouterr().err


COMMANDS = [
    ([], 0, "[training]\nsteps = "),
    (["--help"], 0, "./run_train.sh [CONFIG.toml]"),
    (
        [
            str(ROOT / "configs" / "llama_405b.toml"),
            "--quiet",
            "--world-size=1024",
            "--local-world-size=8",
        ],
        0,
        "",
    ),
    (["missing.toml"], 2, "missing.toml: no such file"),
    (
        ["--parallelism.tensor_parallel=3", "--world-size=3"],
        2,
        "parallelism.tensor_parallel = 3 does not divide",
    ),
    (["--run.folder=\udcff\n"], 2, "run.folder"),
]


@pytest.mark.parametrize("argv, code, words", COMMANDS)
def test_command_line(argv, code, words):
    """Run as run_train.sh calls it; torch, which takes seconds to import, is not imported."""
    command = (
        "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('configs.load', "
        "run_name='__main__')"
    )
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    argv = [os.fsencode(argument) for argument in argv]
    done = subprocess.run(
        [sys.executable, "-c", command, *argv], capture_output=True, env=environment, timeout=60
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == code, err
    assert words in (out if code == 0 else err) and "Traceback" not in err
    assert not (err if code == 0 else out)


@pytest.mark.parametrize("option", ["checkpoint.store", "run.mirror", "data.source"])
@pytest.mark.parametrize("url", ["s3://bucket/a/../b", "gs://bucket/./b", "az://bucket/.."])
def test_a_url_with_dots_between_slashes_is_a_sentence(option, url):
    with pytest.raises(ConfigError, match=rf"{option}.* has \. or \.\. between slashes"):
        load_config([f"--{option}={url}"])
    with pytest.raises(InputError, match=r"has \. or \.\. between slashes"):
        location(url)
