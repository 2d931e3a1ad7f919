"""A tokenizer, a chat template and the file of a task may be in a store: they equal those of a
disk, and a host fetches a tokenizer once."""

import json
from pathlib import Path

import pytest

pytest.importorskip("obstore")

from configs.load import load_config
from configs.schema import Data, InputError
from data import hf_tokenizer, inputs
from data.open_tokenizer import open_tokenizer
from data.prepare import __main__ as prepare_command
from data.stores import kept
from data.tokenizer import Tokenizer, train_bpe
from reliability import objects
from tests.ranks import run_ranks
from tests.runs import run, series, tiny_run
from tests.s3 import Server
from tests.stores import (
    emptied,
    running_store,  # noqa: F401  a fixture
)
from tools import check, generate, places

URL = "s3://bucket/files/tokenizer.json"
AT = "files/"
TEXT = "the cat sat on the mat and the dog sat on the cat. " * 40
TASK = '{"context": "the", "choices": ["cat", "dog"], "answer": 0}\n'


@pytest.fixture
def store(running_store: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    kept._fetched.cache_clear()
    settings = ((objects, "PAUSE", 0.05), (objects, "RETRIES", 3), (objects, "BACKOFF", 0.02))
    return emptied(running_store, monkeypatch, settings)


@pytest.fixture
def folder(store: Server, tmp_path: Path) -> Path:
    """Return a folder with the files of a tokenizer, as Hugging Face's are, with a template and a
    task, that the store has too."""
    tok = train_bpe([TEXT], 260)
    files = hf_tokenizer.files(tok, 16)
    template = "{% for m in messages %}{{ m['content'] }}<|endoftext|>{% endfor %}"
    files["tokenizer_config.json"]["chat_template"] = template
    folder = tmp_path / "files"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "task.jsonl").write_text(TASK)
    (folder / "own.jinja").write_text(template)
    for path in folder.iterdir():
        store.put(AT + path.name, path.read_bytes())
    return folder


def gets(store: Server, name: str) -> int:
    return sum(method == "GET" and name in key for method, key, _ in store.status()["log"])


def same(a: Tokenizer, b: Tokenizer) -> bool:
    return (a.fingerprint, a.bos_id, a.eot_id) == (b.fingerprint, b.bos_id, b.eot_id)


def test_a_run_with_a_tokenizer_and_a_task_in_a_store(folder, store, tmp_path, capsys):
    """A rank finds what the check of its host has fetched. Its record names the URLs."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    common = [*tiny_run(tmp_path), f"--data.source={text}", "--training.steps=3"]
    common += ["--data.stream=true", "--data.streams=2", f"--data.cache={tmp_path / 'cache'}"]
    runs = {}
    for name, place in ("disk", folder), ("store", "s3://bucket/files"):
        task = f'--evaluation.tasks=[{{name="cats",file="{place}/task.jsonl"}}]'
        options = [*common, f"--data.tokenizer={place}/tokenizer.json", task]
        store.ask("clear", b"")
        assert check.main(options) == 0, capsys.readouterr().err
        after_the_check = gets(store, "tokenizer.json")
        out = tmp_path / name
        out.mkdir()
        assert run_ranks(1, run, options, out) == [(0, "")]
        assert gets(store, "tokenizer.json") == after_the_check
        scores = [row for row in (out / "metrics.jsonl").open() if "evaluation/cats/acc" in row]
        runs[name] = series(out), [json.loads(row)["evaluation/cats/acc"] for row in scores]
    assert runs["disk"] == runs["store"] and runs["disk"][1]
    assert after_the_check == 2  # without TLS it is read twice
    assert load_config([str(tmp_path / "store" / "config.toml")]).data.tokenizer == URL
    prompt = ["--prompt", "the", "--tokens", "3"]
    said = []
    for tokenizer in [], ["--tokenizer", f"{URL.rpartition('/')[0]}/saved.json"]:
        store.put(f"{AT}saved.json", (tmp_path / "store" / "tokenizer.json").read_bytes())
        assert generate.main([str(tmp_path / "store"), *prompt, *tokenizer]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_a_stored_file_equals_that_of_the_disk_with_its_companions(
    folder, store, tmp_path, monkeypatch
):
    cache = str(tmp_path / "cache")
    assert same(open_tokenizer(URL, cache), open_tokenizer(str(folder / "tokenizer.json")))
    made = []
    for at in str(folder), "s3://bucket/files":
        for template in "", f"{at}/own.jinja":
            options = {"tokenizer": f"{at}/tokenizer.json", "chat_template": template}
            cfg = Data(format="chat", cache=cache, **options)
            tok = open_tokenizer(cfg.tokenizer, cache)
            made.append(inputs.formats.describe(cfg, tok))
    assert made[0] == made[2] and made[1] == made[3] and made[0]
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    keys = []
    for name in str(folder / "tokenizer.json"), URL:
        out = tmp_path / f"out{len(keys)}"
        words = [f"--source={text}", f"--tokenizer={name}", f"--cache={cache}", f"--out={out}"]
        monkeypatch.setattr("sys.argv", ["prepare", *words])
        assert prepare_command.main() == 0
        keys.append(json.loads((out / "manifest.json").read_text())["key"])
    assert keys[0] == keys[1]


def test_a_replaced_file_is_fetched_again(folder, store, tmp_path):
    """So are the files next to it, and it need not have another size. Negative control: a file that
    is not replaced is not fetched again."""
    cache = str(tmp_path / "new" / "cache")
    first = kept.tokenizer(URL, cache)
    for change in "tokenizer.json", "tokenizer_config.json":
        kept._fetched.cache_clear()
        store.ask("clear", b"")
        assert kept.tokenizer(URL, cache) == first and not gets(store, "tokenizer")
        kept._fetched.cache_clear()
        content = bytearray((folder / change).read_bytes())
        content[-1:] = b"\n"
        store.put(AT + change, bytes(content))
        second = kept.tokenizer(URL, cache)
        assert second != first and Path(second).with_name(change).read_bytes() == content
        first = second
    assert not [path for path in Path(cache).iterdir() if ".tmp" in path.name]


def test_of_two_ranks_that_fetch_it_one_is_faster(folder, store, tmp_path, monkeypatch):
    """The file is there, whole, for both. A folder that cannot be put in place is an error."""
    cache = tmp_path / "cache"
    real = objects.Key.download

    def overtaken(self: objects.Key, path: Path, found: objects.Stat) -> objects.Stat:
        monkeypatch.setattr(objects.Key, "download", real)
        kept._fetched.__wrapped__(URL, str(cache))
        return real(self, path, found)

    monkeypatch.setattr(objects.Key, "download", overtaken)
    path = Path(kept.tokenizer(URL, str(cache)))
    assert path.read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert [each.name for each in cache.iterdir()] == [path.parent.name]

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(InputError, match="cannot be written: No space left on device; give"):
        kept.tokenizer(URL, str(tmp_path / "full"))
    assert not list((tmp_path / "full").iterdir())


@pytest.mark.parametrize("kind", ["reset", "flipped"])
def test_no_fault_reaches_it(kind, folder, store, tmp_path):
    store.rules({"kind": kind, "methods": ["GET"], "rate": 0.3})
    path = Path(kept.tokenizer(URL, str(tmp_path / "cache")))
    assert path.read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert store.status()["counts"][kind]


def test_what_cannot_be_had_is_a_sentence_and_nothing_is_written(
    folder, store, tmp_path, monkeypatch
):
    cache = tmp_path / "cache"
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    given = [*tiny_run(tmp_path), f"--data.source={text}", f"--data.cache={cache}"]

    def said(*options: str) -> str:
        return " ".join(inputs.problems(load_config([*given, *options]), 263))

    missing = "s3://bucket/files/none.json"
    assert f"data.tokenizer: {missing} is not there" in said(f"--data.tokenizer={missing}")
    task = '--evaluation.tasks=[{name="cats",file="s3://bucket/files/none.jsonl"}]'
    assert "none.jsonl: the file of an evaluation cannot be read (no such object)" in said(task)
    store.rules({"kind": "denied"})
    kept._fetched.cache_clear()
    assert "the store refuses it" in said(f"--data.tokenizer={URL}")
    store.rules()
    assert not cache.exists() or not list(cache.glob("tokenizer*"))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="give another folder with --data.cache"):
        kept.tokenizer(URL, str(tmp_path / "file"))
    monkeypatch.setattr(objects, "missing_package", lambda url: f"{url} needs obstore")
    monkeypatch.setattr("data.stores.places.missing_package", objects.missing_package)
    with pytest.raises(InputError, match="needs obstore"):
        kept.tokenizer(URL, str(cache))


def test_a_tool_keeps_it_for_its_own_time(folder, store):
    here = str(folder / "tokenizer.json")
    assert same(places.tokenizer_named(URL), places.tokenizer_named(here))
