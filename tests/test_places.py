"""A checkpoint in an object store is, for the tools, what it is in a folder, and no more of it is
fetched than they need."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

pytest.importorskip("obstore")

from checkpoint import verify
from configs.load import dump, load_config
from configs.schema import InputError
from data import audit
from data.tokenizer import byte_tokenizer
from models import MODELS
from reliability import objects
from reliability.objects import location
from tests.checkpoints import generated
from tests.ranks import run_ranks
from tests.runs import SMALL_MODEL, run, tiny_run
from tests.s3 import Server
from tests.stores import (
    emptied,
    running_store,  # noqa: F401  a fixture
)
from tools import (
    adapters,
    compare_runs,
    convert,
    evaluate,
    generate,
    new_checkpoint,
    outbound,
    places,
    sampling,
)
from tools.replay import __main__ as replay

URL = "s3://bucket/runs/a"
SMALL = [*SMALL_MODEL, "--model.n_heads=5", "--model.n_kv_heads=1", "--model.head_dim=10"]
LLAMA = MODELS["llama"]


@pytest.fixture
def store(running_store: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    places._fetched.cache_clear()
    places._copied.cache_clear()
    return emptied(running_store, monkeypatch, ((objects, "PAUSE", 0.05),))


def upload(store: Server, folder: Path, below: str = "runs/a") -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(f"{below}/{path.relative_to(folder)}", path.read_bytes())


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", SMALL)


def write_run(out: Path, options: list[str]) -> Path:
    """Write the folder of a run with one checkpoint: a model with moments of AdamW, and its
    tokenizer."""
    cfg = load_config(options)
    args = LLAMA.Args(**LLAMA.numbers.flavors["debug"] | numbers(cfg))
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in new_checkpoint.shapes("llama", args).items():
        tensors[f"model.{name}"] = torch.randn(shape, generator=generator)
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer.{name}.{key}"] = torch.rand(shape, generator=generator)
        tensors[f"optimizer.{name}.step"] = torch.tensor(7.0)
    tokenizer = byte_tokenizer()
    must_match = {"model": asdict(args), "tokenizer": tokenizer.fingerprint}
    facts = {"family": "llama", "config": dump(cfg), "seq_len": 16, "must_match": must_match}
    live = {name: tensor.to("meta") for name, tensor in tensors.items()}
    more = {"step": 7, "optimizer": "AdamW", "progress": {"step": 7, "samples": 28}}
    new_checkpoint.write(out, out, live, tensors.__getitem__, facts, tokenizer, **more)
    return out


def numbers(cfg: object) -> dict:
    names = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size")
    return {name: getattr(cfg.model, name) for name in names}


def content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.mark.parametrize("command", ["to-hf", "to-dcp"])
def test_a_conversion_of_a_url_is_that_of_the_folder(command, store, trained, tmp_path, capsys):
    upload(store, trained)
    for source, out in (str(trained), "disk"), (URL, "store"):
        assert convert.main([command, source, str(tmp_path / out)]) == 0
    assert content(tmp_path / "store") == content(tmp_path / "disk")
    if command == "to-hf":
        assert (tmp_path / "store" / "tokenizer.json").is_file()
    assert f"of {URL}/checkpoints/step-00000007" in capsys.readouterr().out


OUT = "s3://bucket/out/made"


@pytest.mark.parametrize("command", ["to-hf", "to-torch", "from-hf"])
def test_what_is_converted_into_a_store_is_what_comes_into_a_folder(
    command, store, trained, tmp_path
):
    """The file that makes it a model is written last. A store that refuses a file leaves no
    model."""
    source = tmp_path / "source"
    if command == "from-hf":
        assert convert.main(["to-hf", str(trained), str(source)]) == 0
    else:
        trained.rename(source)
    store.ask("clear", b"")
    assert convert.main([command, str(source), OUT]) == 0
    assert convert.main([command, str(source), str(tmp_path / "disk")]) == 0
    store.download("out/made", tmp_path / "store")
    there = content(tmp_path / "store")
    here = content(tmp_path / "disk")
    if command == "from-hf":  # a manifest says when it was made
        assert there.keys() == here.keys()
        assert generated(location(OUT), "de", 3)
    else:
        assert there == here
    if command != "to-torch":  # which makes a single file
        log = store.status()["log"]
        puts = [Path(key).name for method, key, _ in log if method in ("PUT", "POST")]
        assert puts[-1] in outbound.LAST
        store.rules({"kind": "denied", "methods": ["PUT", "POST"], "key": "safetensors|distcp"})
        assert convert.main([command, str(source), f"{OUT}2"]) == 2
        left = {Path(key).name for key in store.keys("out/made2")}
        assert not left & {*outbound.LAST}


def test_text_and_scores_of_a_url_are_those_of_the_folder(store, trained, tmp_path):
    upload(store, trained)
    everywhere = (trained, URL, f"{URL}/checkpoints/step-00000007")
    how = {"temperature": 0.9, "top_k": 9, "seed": 3}
    texts = {generated(location(where), "de", 12, **how) for where in everywhere}
    assert len(texts) == 1 and len(texts.pop()) > 2
    task = tmp_path / "task.jsonl"
    task.write_text('{"text": "def f(x):"}\n{"text": "class A"}\n')
    found = []
    for where in (str(trained), URL):
        out = tmp_path / "scores.json"
        assert evaluate.main([where, "--task", str(task), "--json", str(out)]) == 0
        found.append(out.read_text())
    assert found[0] == found[1] and json.loads(found[0])[0]["scores"]


def on_ranks(ranks: int, seconds: float, work: Callable, *args: object) -> list:
    return run_ranks(ranks, work, *args)


def test_tools_read_a_run_at_its_url(store, tmp_path, capsys):
    """A run with a URL leaves files here and in the store, checkpoints in the store alone. Exported
    models are not fetched. Negative control: without its checkpoints no step is proved."""
    folder = tmp_path / "run"
    options = [*tiny_run(tmp_path), "--training.steps=6", f"--checkpoint.store={URL}/checkpoints"]
    folder.mkdir()
    assert run_ranks(1, run, options, folder) == [(0, "")]
    upload(store, folder)
    store.put("runs/a/hf/model.safetensors", b"as large as the model")
    store.ask("clear", b"")
    assert not (folder / "checkpoints").exists()
    for arguments in [], ["--steps=2:3"], ["--show=2:0"]:
        said = []
        for where in str(folder), URL:
            assert audit.main([where, *arguments]) == 0
            said.append(capsys.readouterr().out)
        assert said[0] == said[1] and (arguments or "steps 1 to 6," in said[0])
    for where in str(folder), URL, f"{URL}/checkpoints/step-00000005":
        against = ["--against", URL] if "step" in where else []
        assert replay.replay([where, "--steps=6", *against], compute=on_ranks) == 0
        assert "from the state after step 5, on 1 rank" in capsys.readouterr().out
    assert compare_runs.main([str(folder), URL]) == 0
    assert "checkpoints: step 6: all " in capsys.readouterr().out
    assert not any("/hf/" in key for _, key, _ in store.status()["log"])

    for key in store.keys("runs/a/checkpoints"):
        store.remove(key)
    assert audit.main([URL]) == 0 and "steps 1 to 6," not in capsys.readouterr().out


def fetched(store: Server, name: str) -> int:
    """Return the bytes of the ranges that were asked for of objects with this in their name."""
    total = 0
    for method, key, extent in store.status()["log"]:
        if method == "GET" and name in key:
            first, _, last = extent.removeprefix("bytes=").partition("-")
            total += int(last) + 1 - int(first)
    return total


def test_only_what_is_needed_is_fetched(store, tmp_path, monkeypatch):
    """The weights are a third of the checkpoint. Negative control: to-torch with the optimizer's
    state fetches all of it."""
    trained = write_run(tmp_path / "run", [*SMALL, "--model.vocab_size=20000"])
    upload(store, trained)
    (shard,) = trained.rglob("*.safetensors")
    monkeypatch.setattr(objects, "NEAR", 1 << 10)
    store.ask("clear", b"")
    assert convert.main(["to-torch", URL, str(tmp_path / "weights.pt"), "--content=model"]) == 0
    weights = fetched(store, shard.name)
    assert weights < 0.5 * shard.stat().st_size
    store.ask("clear", b"")
    assert convert.main(["to-torch", URL, str(tmp_path / "all.pt")]) == 0
    assert fetched(store, shard.name) > 0.9 * shard.stat().st_size


def test_a_store_of_checkpoints_alone_asks_for_the_tokenizer(store, trained, tmp_path, capsys):
    """checkpoint.store leaves such a store."""
    upload(store, trained / "checkpoints")
    words = ["--prompt", "de", "--tokens", "5"]
    assert generate.main([URL, *words]) == 2
    said = capsys.readouterr().err
    assert f"{URL} has no tokenizer.json next to its checkpoints" in said and "--tokenizer" in said
    assert generate.main([URL, *words, "--tokenizer", str(trained / "tokenizer.json")]) == 0
    assert capsys.readouterr().out.startswith("de")
    assert convert.main(["to-hf", URL, str(tmp_path / "hf")]) == 0
    printed = capsys.readouterr()
    assert "without a tokenizer: " in printed.err and "without a tokenizer" in printed.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["from-hf", URL, "out"], f"HF_FOLDER is a path on this machine, and {URL} is a URL"),
        (["from-dcp", URL, "out"], f"DCP_FOLDER is a path on this machine, and {URL} is a URL"),
        (["to-hf", URL, "http://host/a"], "http://host/a names no place in a store"),
        (["to-hf", URL, "s3://bucket"], "s3://bucket/ is a whole bucket: name a prefix in it"),
        (["to-hf", URL, "s3://bucket/there"], "s3://bucket/there exists already: give another"),
        (["to-hf", "s3://bucket/none", "out"], "there is no checkpoint in 's3://bucket/none'"),
    ],
)
def test_a_url_that_makes_no_sense_is_a_sentence(words, said, store, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    store.put("there/config.json", b"{}")
    assert convert.main(words) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_in_a_store_is_named(store, trained, tmp_path, capsys):
    upload(store, trained)
    (key,) = [key for key in store.keys() if key.endswith(".safetensors")]
    store.flip(key, len(store.object(key)) // 8)
    assert convert.main(["to-torch", URL, str(tmp_path / "a.pt")]) == 2
    assert f"{URL}/checkpoints/step-00000007 is damaged" in capsys.readouterr().err
    assert not (tmp_path / "a.pt").exists()


def test_adapters_find_their_base_at_its_url(store, trained, tmp_path):
    """A run of adapters whose base is a URL: its text is that of the merged model."""
    upload(store, trained)
    folder = tmp_path / "adapted"
    options = [*tiny_run(tmp_path), *SMALL, f"--checkpoint.load_path={URL}"]
    options += ["--lora.rank=2", '--lora.targets=["wq", "w2"]', "--training.steps=2"]
    options += ["--lr_schedule.warmup_steps=0", "--training.global_batch_size=2"]
    folder.mkdir()
    assert run_ranks(1, run, options, folder) == [(0, "")]
    at = f"{URL}/checkpoints/step-00000007"
    assert adapters.open_run(folder).base["folder"] == at
    text = generated(folder, "de", 8)
    assert convert.main(["lora-merge", str(folder), str(tmp_path / "merged")]) == 0
    upload(store, folder, "runs/l")  # a run of adapters is one, too
    for command in "lora-merge", "lora-to-peft":
        for out, source in ("disk", str(folder)), ("store", "s3://bucket/runs/l"):
            assert convert.main([command, source, str(tmp_path / command / out)]) == 0
        assert content(tmp_path / command / "store") == content(tmp_path / command / "disk")
    tokenizer = str(folder / "tokenizer.json")
    assert generated(tmp_path / "merged", "de", 8, tokenizer) == text
    with pytest.raises(InputError, match="has no tokens|no checkpoint"):
        sampling.load(location("s3://bucket/elsewhere"))
    assert verify.newest(location(URL)).name == "step-00000007"
