"""`run_train.sh` says what this machine lacks before it starts a rank: text, tokenizer, packages,
GPUs; all at once."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import models
import train
from configs.load import load_config
from configs.schema import InputError
from data import inputs, sources
from data.prepare import prepare
from data.tokenizer import END_OF_TEXT, SPLIT, Tokenizer, train_bpe
from models import Registry, llama, qwen3
from models.formats import llama as llama_formats
from models.formats import qwen3 as qwen3_formats
from parallelisms import mesh
from tests.programs import ROOT, finished
from tools import check

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a text, a tokenizer of 300 tokens, and the text prepared with it."""
    place = tmp_path_factory.mktemp("inputs")
    text = " ".join(f"{n} and {n * n % 97}," for n in range(3000))
    (place / "text.txt").write_text(text)
    train_bpe([text], 300).save(str(place / "t.json"))
    cfg = load_config([f"--data.source={place}/text.txt", f"--data.tokenizer={place}/t.json"])
    prepare(cfg.data, out=str(place / "prepared"), log=lambda line: None, workers=1)
    # special tokens that were added to a model of 257 rows
    added = [END_OF_TEXT, "<|image|>", "<|im_start|>", "<|im_end|>"]
    ranks = [bytes([byte]) for byte in range(256)]
    Tokenizer(ranks, SPLIT, added, END_OF_TEXT).save(str(place / "added.json"))
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    (place / "talks.json").write_text(json.dumps({"messages": talk}))
    (place / "empty").mkdir()
    (place / "parent" / "checkpoints" / "step-00000002").mkdir(parents=True)
    return place


# (options, the words of the one problem). PLACE is the folder above.
LACKING = {
    "no such corpus": (
        "data.source=PLACE/nowhere",
        "data.source: PLACE/nowhere cannot be read: No such file",
    ),
    "a corpus without text": ("data.source=PLACE/empty", "no file with a text suffix"),
    "a glob that matches nothing": ("data.source=PLACE/*.jsonl", "no file found there"),
    "a source of a mixture": (
        'data.mixture=[{name="a",source="PLACE/text.txt",weight=1},{name="b",source="PLACE/nowhere",weight=1}]',
        "PLACE/nowhere",
    ),
    "a set to validate on": (
        'validation.sets=[{name="a",source="PLACE/nowhere"}]',
        "PLACE/nowhere cannot be read",
    ),
    "no such tokenizer": ("data.tokenizer=PLACE/nowhere.json", "PLACE/nowhere.json"),
    "a tokenizer that is none": ("data.tokenizer=PLACE/text.txt", "is not a tiktoken rank file"),
    "a tokenizer that is too large": (
        "data.tokenizer=PLACE/t.json model.vocab_size=299",
        "has 300 tokens that texts may have|only 299: set model.vocab_size to at least 300",
    ),
    "a template that writes a token without a row": (
        "data.source=PLACE/talks.json data.format=chat data.chat_template=chatml data.tokenizer=PLACE/added.json "
        "data.mask_documents=true validation.interval=0 model.vocab_size=257",
        "the chat template writes <|im_start|>, the token 258|has only 257: set model.vocab_size to at least 260",
    ),
    "a prepared folder whose tokenizer is too large": (
        "data.source=PLACE/prepared data.tokenizer=bpe model.vocab_size=299",
        "the tokenizer 'PLACE/prepared' has 300 tokens|only 299",
    ),
    "a prepared folder of a different tokenizer": (
        "data.source=PLACE/prepared",
        "is not the tokenizer that made the tokens",
    ),
    "weights of another run": (
        "checkpoint.load_path=PLACE/nowhere",
        'checkpoint.load_path = "PLACE/nowhere" does not exist',
    ),
    "a branch of no run": (
        "checkpoint.branch_from=PLACE/nowhere@3",
        'checkpoint.branch_from = "PLACE/nowhere@3": there is no checkpoint in',
    ),
    "a branch of no step": (
        "checkpoint.branch_from=PLACE/parent@x",
        'checkpoint.branch_from = "PLACE/parent@x": there is no checkpoint|name a run, or RUN@STEP',
    ),
    "a branch of another step": (
        "checkpoint.branch_from=PLACE/parent@3",
        'checkpoint.branch_from = "PLACE/parent@3", but|holds only steps [2]',
    ),
    "weights of Hugging Face": (
        "checkpoint.load_hf=PLACE/nowhere",
        'checkpoint.load_hf = "PLACE/nowhere" does not exist',
    ),
}
CONFIG = llama_formats.FORMATS.hf_config(llama.Args(**llama.NUMBERS.flavors["debug"]))
OTHER_MODELS = {  # config.json -> the words of the one problem
    "granite": (
        CONFIG | {"model_type": "granite"},
        'model_type is "granite", only "llama" and "qwen3"',
    ),
    "mistral with a sliding window": (
        CONFIG | {"model_type": "mistral", "sliding_window": 4096},
        'model_type is "mistral"',
    ),
    "a family that we have": (
        qwen3_formats.FORMATS.hf_config(qwen3.Args(**qwen3.NUMBERS.flavors["0.6B"])),
        'holds a model of the family "qwen3"|set model.family = "qwen3"',
    ),
    "biases": (
        CONFIG | {"attention_bias": True},
        "attention_bias is true, only false can be converted",
    ),
    "a different size": (
        CONFIG | {"hidden_size": 512},
        "model.dim is 512 in the checkpoint and 256 here",
    ),
}
LACKING_GPU = {
    "CUDA": ("run.device=cuda", "torch sees no GPU here"),
    "a kernel": (
        "training.attention=flash model.head_dim=32 training.param_dtype=bfloat16",
        "is a kernel for GPUs, this is a cpu",
    ),
    "float8's products": (
        "training.float8=rowwise",
        "needs a GPU of compute capability 9.0, this is a CPU",
    ),
    "CUDA graphs": (
        "compile.cuda_graphs=true",
        "compile.cuda_graphs = true is for a GPU, and this run is on a cpu: set it to false",
    ),
    "asynchronous tensor parallelism": (
        "parallelism.async_tensor_parallel=true parallelism.tensor_parallel=2 compile.enabled=true",
        "needs GPUs that are connected",
    ),
}


def problems(place: Path, options: str) -> list[str]:
    words = f"run.folder=PLACE/run data.source=PLACE/text.txt data.tokenizer=bytes {options}"
    given = dict(word.split("=", 1) for word in words.replace("PLACE", str(place)).split())
    if "data.mixture" in given:
        del given["data.source"]
    cfg = load_config([f"--{name}={value}" for name, value in given.items()])
    return list(check.problems(cfg, 1))


@pytest.mark.parametrize("name", LACKING)
def test_what_is_not_there_is_a_sentence(name, place):
    options, words = LACKING[name]
    (problem,) = problems(place, options)
    for fragment in words.replace("PLACE", str(place)).split("|"):
        assert fragment in problem


def test_special_tokens_that_nothing_writes_need_no_row(place):
    """As Gemma 3's image token. The end of a text needs one."""
    options = "data.tokenizer=PLACE/added.json model.vocab_size"
    assert not problems(place, f"{options}=257")
    (problem,) = problems(place, f"{options}=256")
    assert "has 257 tokens that texts may have, the model's vocabulary only 256" in problem


def test_a_token_without_a_row_in_a_corpus_is_named(place, tmp_path):
    shutil.copy(place / "added.json", tmp_path / "tokenizer.json")
    assert "it is <|image|>, which its chat template" in inputs.beyond(str(tmp_path), 257, 257)
    assert "is damaged" in inputs.beyond(str(tmp_path), 256, 200)


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_a_folder_of_a_different_model_is_refused_before_a_rank_starts(name, place, tmp_path):
    config, words = OTHER_MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (problem,) = problems(place, f"checkpoint.load_hf={tmp_path}")
    assert problem.startswith(f"checkpoint.load_hf: {tmp_path}")
    assert all(fragment in problem for fragment in words.split("|")), problem


@pytest.mark.parametrize("model_type", ["llama", None])
def test_the_folder_of_the_same_model_is_taken(model_type, place, tmp_path):
    """A folder that does not say its type, as transformers' first files did not, is also taken."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": model_type}))
    assert not problems(place, f"checkpoint.load_hf={tmp_path}")


@NO_GPU
@pytest.mark.parametrize("name", LACKING_GPU)
def test_what_needs_a_gpu_is_a_sentence_also_with_device_auto(name, place):
    options, words = LACKING_GPU[name]
    (problem,) = problems(place, options)
    assert words in problem


def test_keys_that_no_gpu_kernel_takes_are_refused_on_a_machine_with_a_gpu(place, monkeypatch):
    """Not on a CPU, and there without the import of torch: run.device is "auto"."""
    gather = "parallelism.context_parallel=2 training.param_dtype=float32"
    assert not problems(place, gather)
    monkeypatch.setattr(mesh, "pick_device", lambda run, local_rank: torch.device("cuda"))
    (problem,) = problems(place, gather)
    assert 'context_parallel_method = "gather" needs on a GPU' in problem
    assert "the type is float32 and a head has 32" in problem
    narrow = "parallelism.context_parallel=2 training.param_dtype=bfloat16"
    (problem,) = problems(place, f"{narrow} model.head_dim=36")
    assert "a head has 36" in problem
    deepseek = f"model.family=deepseek_v3 {narrow}"
    (problem,) = problems(place, f"{deepseek} model.nope_dim=30")
    assert "a head has 46" in problem
    assert not problems(place, deepseek)
    assert not problems(place, f"{gather} parallelism.context_parallel_method=ulysses")


@pytest.mark.parametrize(
    "options, oldest",
    [
        ("parallelism.pipeline_parallel=2 parallelism.pipeline_schedule=zbv", (2, 13)),
        ("model.family=deepseek_v3 parallelism.expert_parallel=2 compile.enabled=true", (2, 12)),
    ],
)
def test_what_an_older_torch_cannot_do_is_a_sentence(options, oldest, place, monkeypatch):
    for minor in (11, 12, 13):
        monkeypatch.setattr(check, "version", lambda package, minor=minor: f"2.{minor}.0+cu130")
        said = problems(place, options)
        assert len(said) == ((2, minor) < oldest), said
        needs = f"needs torch {oldest[0]}.{oldest[1]}, and this is"
        assert all(needs in problem for problem in said), said
    monkeypatch.setattr(check, "version", lambda package: "2.11.0")
    assert not problems(place, options.replace("zbv", "interleaved_1f1b").replace("true", "false"))


@pytest.mark.parametrize(
    "package, options",
    [("wandb", "metrics.wandb_project=x"), ("datasets", "data.source=hf:c4")],
)
def test_a_package_that_is_missing_is_a_sentence(package, options, place, monkeypatch):
    util = check.importlib.util
    real = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == package else real(name))
    (problem,) = problems(place, options)
    assert package in problem.partition(" needs ")[2] and f"pip install {package}" in problem


def test_nothing_is_said_where_nothing_is_missing(place):
    fits = "data.tokenizer=PLACE/t.json model.vocab_size=300"
    for options in "", fits, f"data.source=PLACE/prepared {fits}":
        assert not problems(place, options)


def test_a_run_that_has_a_checkpoint_needs_no_weights_to_start_from(place, tmp_path):
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    for option in "load_path", "branch_from":
        assert not problems(place, f"checkpoint.{option}=PLACE/nowhere run.folder={tmp_path}")


def test_a_model_that_cannot_be_exported_is_a_sentence_before_it_is_trained(place, monkeypatch):
    """A family's own table of rules may lack one: what `hf_config` says at the end of the run is
    asked before it."""

    def refuse(args):
        raise ValueError("transformers has no such norm")

    refusing = replace(llama_formats.FORMATS, hf_config=refuse)
    monkeypatch.setattr(llama_formats, "FORMATS", refusing)
    assert not problems(place, "")
    (problem,) = problems(place, "checkpoint.export_hf=float32")
    assert problem.startswith('checkpoint.export_hf = "float32": ')
    assert problem.endswith(": transformers has no such norm")
    with pytest.raises(InputError, match="transformers has no such norm"):
        job = SimpleNamespace(cfg=load_config(["--checkpoint.export_hf=float32"]), args=None)
        train.resume(job, train.FORMATS, None, "", None, None)


@pytest.mark.parametrize("family", sorted(models.FORMATS))
def test_every_weight_of_a_published_family_has_a_name_in_its_format(family):
    for flavor in [name for name in models.NUMBERS[family].flavors if "debug" in name]:
        options = [f"--model.family={family}", f"--model.flavor={flavor}"]
        cfg = load_config([*options, "--checkpoint.export_hf=float32"], None, None)
        assert list(check.export_problems(cfg)) == [], flavor


def test_a_weight_that_the_format_does_not_know_is_said_before_it_is_trained(place, monkeypatch):
    """As of a fork that adds one: the export at the end of the run would fail."""
    names = llama_formats.FORMATS.hf_names

    def without_norms(args):
        return {ours: theirs for ours, theirs in names(args).items() if "ffn_norm" not in ours}

    forked = replace(llama_formats.FORMATS, hf_names=without_norms)
    monkeypatch.setattr(llama_formats, "FORMATS", forked)
    (problem,) = problems(place, "checkpoint.export_hf=float32")
    assert "the published format of llama has no layers.0.ffn_norm.weight" in problem
    assert not problems(place, "")


def test_a_family_without_formats_is_neither_loaded_nor_exported(place, monkeypatch):
    """A fork's family needs no models/formats/."""
    monkeypatch.setattr(models, "FORMATS", Registry("models.formats", "FORMATS", ("qwen3",)))
    assert not problems(place, "")
    said = problems(place, "checkpoint.export_hf=float32 checkpoint.load_hf=PLACE")
    assert len(said) == 2
    for problem in said:
        assert "the family llama has no models/formats/llama.py" in problem


ALL_PRESETS = sorted(path.stem for path in (ROOT / "configs").glob("*.toml"))
PRESETS = [name for name in ALL_PRESETS if "debug" not in name and "lora" not in name]


def test_a_preset_of_adapters_asks_for_its_base(monkeypatch, capsys):
    monkeypatch.setattr(check, "gpu_problems", lambda cfg, local: iter(()))
    sizes = ["--world-size=8", "--local-world-size=8"]
    assert check.main(["configs/llama_70b_lora.toml", *sizes]) == 2
    said = capsys.readouterr().err
    assert "checkpoint.load_hf" in said and "--data.source=stdlib" not in said


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_without_its_files_ends_with_the_command_that_tries_it(
    preset, tmp_path, monkeypatch, capsys
):
    """The command is legal, lacks nothing on this machine, and its sequences fit into Python's
    library."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "configs" / f"{preset}.toml").read_text(encoding="utf-8")
    [(world, local)] = re.findall(r"^# world size: (\d+) \(\d+ hosts? of (\d+)\)$", text, re.M)
    sizes = [f"--world-size={world}", f"--local-world-size={local}"]
    monkeypatch.setattr(check, "gpu_problems", lambda cfg, local: iter(()))
    assert check.main([f"configs/{preset}.toml", "--optimizer.lr=1e-4", *sizes]) == 2
    said = capsys.readouterr().err
    if 'tokenizer = "bpe"' not in text:
        assert "data.tokenizer: hf:" in said and "is not in the cache" in said
    assert 'data.source = "corpus/' in said
    program, *arguments = shlex.split(said.strip().splitlines()[-1])
    assert program == "./run_train.sh" and "--optimizer.lr=1e-4" in arguments
    cfg = load_config(arguments, int(world), int(local))
    assert not list(check.problems(cfg, int(local)))
    assert cfg.data.source == "stdlib" and not cfg.validation.interval
    assert cfg.run.folder != f"runs/{preset}"
    characters = sum(file.size for file in sources.find("stdlib"))
    assert cfg.training.seq_len < characters / 8, "a token has less than 8 characters"


@pytest.mark.parametrize("options", ["--data.source=nowhere.txt", "--data.tokenizer=nowhere.json"])
def test_whoever_names_other_files_is_told_about_these_alone(
    options, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert check.main([str(ROOT / "configs/llama_8b.toml"), options]) == 2
    assert "./run_train.sh" not in capsys.readouterr().err


def test_run_train_says_it_all_at_once_and_starts_nothing(tmp_path):
    """The check does not import torch, which would take seconds."""
    options = ["--data.source=nowhere.txt", "--data.tokenizer=none.json"]
    options += [f"--run.folder={tmp_path}/run", "--checkpoint.load_hf=no"]
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = finished(ROOT / "run_train.sh", *options, NGPU="2", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("3 mistakes in the configuration:\n"), done.stderr
    for word in "nowhere.txt", "none.json", "checkpoint.load_hf":
        assert word in done.stderr
    assert "torch was imported" not in done.stderr and not (tmp_path / "run").exists()
