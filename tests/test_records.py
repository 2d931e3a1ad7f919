"""Files as users bring them: JSON in every layout, damaged and padded archives, columns of every
type, datasets with missing parts. Each is read right, or is one sentence with file and line."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import zlib
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from configs.schema import Data, InputError
from data import records, sources, stream
from data.pieces import TOO_LONG, UNREADABLE, WHOLE
from data.prepare import prepare
from data.prepared import read_manifest
from tests.programs import PYTHON, finished

ROOT = Path(__file__).parents[1]
TEXTS = ["alpha beta", "", 'a "b" \\ {[}]', "é\u2028漢\0\n\r\n", "x" * 3000, "last"]
OBJECTS = [{"id": i, "text": text, "more": {"text": "no"}} for i, text in enumerate(TEXTS)]


def read(path: Path | str, field: str = "text", longest: int = 0, how: str = "records") -> list:
    """The documents of a file: text, or (number, problem)."""
    found = []
    for file in sources.find(str(path)):
        for piece in sources.pieces(file):
            for document in sources.read(piece, field, longest, how):
                is_text = not document.problem
                found.append(document.text if is_text else (document.number, document.problem))
    return found


def data(source: object, tmp_path: Path, **options: object) -> Data:
    options = {"tokenizer": "bytes", "validation_fraction": 0, **options}
    return Data(source=str(source), cache=str(tmp_path / "cache"), **options)


def refusal(source: object, tmp_path: Path, **options: object) -> str:
    with pytest.raises(InputError) as caught:
        prepare(data(source, tmp_path, **options), log=list)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(path: Path, content: bytes) -> Path:
    """Write a file, compressed as its name says."""
    if path.suffix == ".gz":
        content = gzip.compress(content)
    if path.suffix == ".zst":
        content = pyarrow.compress(content, codec="zstd", asbytes=True)
    path.write_bytes(content)
    return path


# ---- how a .json file is laid out

LAYOUTS = {
    "array": json.dumps(OBJECTS),
    "pretty array": json.dumps(OBJECTS, indent=2, ensure_ascii=False),
    "array without indent": json.dumps(OBJECTS, indent=0),
    "lines": "\n".join(map(json.dumps, OBJECTS)),
    "lines, CRLF": "".join(json.dumps(one) + "\r\n" for one in OBJECTS),
    "lines with blank ones": "\n \n\n".join(map(json.dumps, OBJECTS)) + "\n\n",
    "pretty objects": "\n".join(json.dumps(one, indent=1) for one in OBJECTS),
    "objects in one line": "".join(map(json.dumps, OBJECTS)),
    "two arrays": json.dumps(OBJECTS[:2]) + "\n" + json.dumps(OBJECTS[2:], indent=1),
    "lines with an array's commas": "[\n" + ",\n".join(map(json.dumps, OBJECTS)) + "\n]\n",
}


@pytest.mark.parametrize(
    "layout, suffix",
    [*((layout, ".json") for layout in LAYOUTS), ("array", ".json.gz"), ("lines", ".JSON.zst")],
)
def test_every_layout_of_json_is_records(
    layout: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = LAYOUTS[layout].encode()
    path = write(tmp_path / f"a{suffix}", content)
    assert read(path) == TEXTS
    with_bom = write(tmp_path / f"bom{suffix}", b"\xef\xbb\xbf" + content)
    assert read(with_bom) == TEXTS
    monkeypatch.setattr("data.records.BLOCK", 3)  # each value crosses many blocks
    assert read(path) == TEXTS
    raw = read(path, field="")
    assert [json.loads(one)["text"] for one in raw] == TEXTS


def test_one_object_is_one_record(tmp_path: Path) -> None:
    for indent in None, 4:
        content = json.dumps(OBJECTS[0], indent=indent).encode()
        assert read(write(tmp_path / "a.json", content)) == TEXTS[:1]


def test_a_file_of_settings_is_text_after_an_option_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.py").write_text("import b\n")
    settings = json.dumps({"name": "b", "version": "1"}, indent=2)
    write(folder / "package.json", settings.encode())
    said = refusal(folder, tmp_path)
    assert 'package.json, record 1 (line 1) has nothing under "text"' in said
    assert 'data.json_files = "text"' in said
    assert read(folder, how="text") == ["import b\n", settings]
    prepared = prepare(data(folder, tmp_path, json_files="text"), log=list)
    assert len(prepared.train) == len("import b\n") + len(settings) + 2
    # the same folder was prepared under the same name when all .json files were text
    before = data(folder, tmp_path, json_files="text")
    assert not sources.json_reading(before, sources.find(before.source))
    write(folder / "package.json", b'{"text": "now a record"}')
    both = [
        prepare(data(folder, tmp_path, json_files=how), log=list) for how in ("text", "records")
    ]
    assert both[0].fingerprint != both[1].fingerprint


BROKEN = {
    "not closed": ('[{"text": "a"}\n', 2, "line 2) ends before its array does"),
    "cut in a record": ('[{"text": "a"},\n {"text": "b', 2, "line 2) ends before its last record"),
    "no comma": ('[{"text": "a"}\n {"text": "b"}]', 2, "line 2) is not JSON: no comma"),
    "comma at the end": ('[{"text": "a"},\n]', 2, "line 2) is not JSON: a comma"),
    "broken string": ('[{"text": "a"},\n\n{"text": "b\n"}]', 2, "line 3) is not JSON: a line ends"),
    "words after it": ('[{"text": "a"}]\nthe end', 2, "line 2) is not a JSON object or array"),
    "no objects": ('[{"text": "a"},\n "b", {"text": "c"}]', 2, "line 2) is not a JSON object"),
    "null": ('[{"text": "a"},\n {"text": null}]', 2, "has null there; data.skip_failed"),
    "other key": ('[{"text": "a"},\n {"body": "b"}]', 2, 'line 2) has nothing under "text"'),
    "Python's quotes": ("[{\"text\": \"a\"},\n {'text': 'b'}]", 2, "line 2) is not a JSON object"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), 1, "iconv -f UTF-16"),
    "prose": ("no json", 1, "line 1) is not a JSON object or array"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_json_file_is_named_by_record_and_line(what: str, tmp_path: Path) -> None:
    content, record, sentence = BROKEN[what]
    path = write(tmp_path / "a.json", content if isinstance(content, bytes) else content.encode())
    found = read(path)
    number, problem = next(one for one in found if isinstance(one, tuple))
    assert (number, sentence in problem) == (record, True), problem
    assert found[: record - 1] == ["a"][: record - 1]
    assert f"a.json, record {record} (line" in refusal(path, tmp_path)


def test_an_array_is_never_whole_in_memory(tmp_path: Path) -> None:
    """The scanner holds one record and one block of an array in a single line."""
    path = tmp_path / "a.json"
    path.write_text("[" + ", ".join([json.dumps({"text": "word " * 4000})] * 1200) + "]")
    assert path.stat().st_size > 22_000_000
    code = (
        "import sys; from data import sources; import resource\n"
        "usage = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = usage()\n"
        "print(sum(1 for _ in sources.documents(sys.argv[1])), usage() - before)"
    )
    count, kilobytes = child(code, path)
    assert count == 1200
    assert kilobytes < 12_000


def child(code: str, *arguments: object) -> list[int]:
    done = finished(PYTHON, "-c", code, *arguments)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


# ---- the bound on a record

BOMB = """
import resource, sys
from data import sources
sources.find(sys.argv[1])
import pyarrow
def usage():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    before = usage()
    found = []
    for piece in sources.pieces(sources.find(path)[0]):
        found += [d.problem or d.text for d in sources.read(piece, "text", 1_000_000)]
    assert found[-2:] in (["too long", "after"], ["before", "too long"]) or found == ["too long"], found
    print(usage() - before)
"""


def test_a_bomb_costs_no_more_than_the_bound(tmp_path: Path) -> None:
    size = 150_000_000
    begin, end = b'{"text": "before"}\n{"text": "', b'"}\n{"text": "after"}\n'
    paths = []
    for name, (head, tail) in {
        "a.jsonl.gz": (begin, end),
        "b.json.gz": (b"[" + begin.replace(b"\n", b","), b'"}]'),
        "c.txt.gz": (b"", b""),
    }.items():
        packer = zlib.compressobj(1, wbits=31)
        with open(tmp_path / name, "wb") as file:
            file.write(packer.compress(head))
            for _ in range(size // 10_000_000):
                file.write(packer.compress(b"x" * 10_000_000))
            file.write(packer.compress(tail) + packer.flush())
        paths.append(tmp_path / name)
    with pyarrow.CompressedOutputStream(str(tmp_path / "d.jsonl.zst"), "zstd") as out:
        out.write(begin)
        for _ in range(size // 10_000_000):
            out.write(b"x" * 10_000_000)
        out.write(end)
    bound = records.bound(1_000_000)
    assert bound < 30_000_000
    # a line is gathered from blocks and then joined, so it is held twice for a moment
    costs = child(BOMB, *paths, tmp_path / "d.jsonl.zst")
    assert len(costs) == 4
    assert max(costs) * 1024 < 3 * bound, costs


def test_text_that_fits_is_kept_however_it_is_escaped(tmp_path: Path) -> None:
    text = "\u0001" * 1000  # six bytes each in JSON
    lines = [json.dumps({"text": text}), json.dumps({"text": text + "x"}), '{"text": "after"}']
    monkey = write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    prepared = prepare(data(monkey, tmp_path, max_document_bytes=1000), log=list)
    report = read_manifest(prepared.folder)["report"]
    assert (report["kept"], report["too_long"]) == (2, 1)


@pytest.mark.parametrize("cut", [10**9, 1000])
def test_lines_that_are_too_long_are_passed_over(
    cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.records.OTHERS", 100)
    lines = ['{"text": "a"}', json.dumps({"text": "x" * 9000}), "", '{"text": "b"}']
    for name, content in (
        ("a.jsonl", "\n".join(lines)),
        ("b.jsonl", "\n".join(lines[:2])),
        ("c.json", f"[{lines[0]},\n{lines[1]},\n{lines[3]}]"),
    ):
        path = write(tmp_path / name, content.encode())
        file = sources.find(str(path))[0]
        found = []
        for piece in sources.pieces(file, cut):
            found += [d.problem or d.text for d in sources.read(piece, "text", 50)]
        assert found == ["a", TOO_LONG, "b"][: 2 if name == "b.jsonl" else 3]


# ---- archives

LINES = [json.dumps({"text": f"line {i} " + "word " * (i % 50)}) for i in range(6000)]
CONTENT = ("\n".join(LINES) + "\n").encode()


def report(source: Path, tmp_path: Path, **options: object) -> dict:
    prepared = prepare(data(source, tmp_path, **options), log=list)
    found = read_manifest(prepared.folder)["report"]
    assert found["documents"] == sum(found[one] for one in ("kept", "empty", "too_long", "failed"))
    return found


@pytest.mark.parametrize(
    "kind, how", [(".jsonl.gz", "damaged"), (".jsonl.zst", "damaged"), (".json.gz", "cut")]
)
def test_all_before_the_damage_is_read(kind: str, how: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"a{kind}", CONTENT)
    packed = bytearray(path.read_bytes())
    place = len(packed) * 9 // 10
    if how == "cut":
        del packed[place:]
    else:
        packed[place : place + 40] = b"\xff" * 40
    path.write_bytes(packed)
    found = read(path)
    *texts, (number, problem) = found
    want = [json.loads(line)["text"] for line in LINES[: len(texts)]]
    assert texts == want if how == "cut" else len(texts) > 1000
    assert ("truncated" if how == "cut" else "is damaged from here on") in problem
    if how == "cut":
        assert number == len(texts) + 1 > 1000 and "data.skip_failed" in problem
    assert not problem.startswith(UNREADABLE), "it would be read again and again"
    said = refusal(path, tmp_path)
    failures = sum(isinstance(one, tuple) for one in found)
    if failures == 1:
        assert f"a{kind}, line {number} " in said
    if (how, kind) == ("damaged", ".jsonl.zst"):
        # zstd does not decode the same bytes from a damaged frame each time, so the lines there differ
        counted = report(path, tmp_path, skip_failed=failures + 1000)
        assert counted["kept"] > 1000 and counted["failed"] >= 1
    else:
        counted = report(path, tmp_path, skip_failed=failures)
        assert (counted["kept"], counted["failed"]) == (len(found) - failures, failures)


def test_a_stream_leaves_out_a_damaged_end_once(tmp_path: Path) -> None:
    """A damaged end is one failure of data.skip_failed, and no attempt to read it again helps."""
    path = write(tmp_path / "a.jsonl.gz", CONTENT)
    path.write_bytes(path.read_bytes()[:-3000])
    cfg = data(path, tmp_path, stream=True, streams=1, skip_failed=1)
    source = stream.open_source(cfg, log=list)
    order = stream.begin(stream.describe(source, 0, 256, 1))
    one = stream.Stream(source, order, 0, None)
    count = len(read(path)) - 1
    units = len(source.units)
    found = itertools.takewhile(lambda at: at[0].unit < units, one._documents(one.place))
    assert len(list(found)) == pytest.approx(count, abs=20)


PADDED = {
    "zeros": (gzip.compress(CONTENT) + b"\0" * 70_000, ""),
    "members": (gzip.compress(CONTENT[:5000]) + gzip.compress(CONTENT[5000:]), ""),
    "garbage": (gzip.compress(CONTENT) + b"garbage", "has other bytes after the end"),
    "cut member": (gzip.compress(CONTENT) + gzip.compress(b"x" * 99)[:12], "is truncated"),
    "wrong checksum": (gzip.compress(CONTENT)[:-8] + b"\1" * 8, "is damaged"),
    "no checksum": (gzip.compress(CONTENT)[:-8], "is truncated"),
}


@pytest.mark.parametrize("what", PADDED)
def test_what_follows_a_gzip_member(what: str, tmp_path: Path) -> None:
    packed, sentence = PADDED[what]
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(packed)
    found = read(path)
    assert found[:6000] == [json.loads(line)["text"] for line in LINES]
    rest = found[6000:]
    assert len(rest) == bool(sentence)
    if sentence:
        number, problem = rest[0]
        assert (number, sentence in problem) == (6001, True), problem


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_name_that_says_compressed_in_vain(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(CONTENT)
    assert f"rename it without {suffix}" in refusal(path, tmp_path)
    path.write_bytes(b"")
    assert "is empty" in refusal(path, tmp_path)


def test_several_zstd_frames_and_one_that_is_skipped(tmp_path: Path) -> None:
    frames = [
        pyarrow.compress(part, "zstd", asbytes=True) for part in (CONTENT[:999], CONTENT[999:])
    ]
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(skipped + frames[0] + skipped + frames[1])
    assert len(read(path)) == 6000


# A frame that says it needs a window of 2 GiB (zstd --long=31), with one raw block.
LONG_WINDOW = b"\x28\xb5\x2f\xfd" + b"\x00" + b"\xa8" + b"\x21\x00\x00" + b"abcd"


def test_a_window_beyond_zstds_default_is_answered_with_a_command(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(LONG_WINDOW)
    assert f"zstd -d --long=31 {path}" in refusal(path, tmp_path)


# ---- lines

ODD_LINES = {
    "BOM": (b'\xef\xbb\xbf{"text": "a"}\n', ["a"]),
    "BOM alone": (b'\xef\xbb\xbf\n{"text": "a"}', ["a"]),
    "CRLF": (b'{"text": "a"}\r\n\r\n{"text": "b"}\r\n', ["a", "b"]),
    "NaN and a huge number": (b'{"x": NaN, "n": ' + b"1" * 5000 + b', "text": "a"}', ["a"]),
    "NUL": (b'{"text": "a\0"}\n', "is not a JSON object with a string"),
    "twice": (b'{"text": "a", "text": "b"}', 'has "text" (data.text_field) twice'),
    "once, and beside": (b'{"x": {"y": 1, "y": 2}, "text": "a"}', ["a"]),
    "once, and inside": (b'{"text": "a", "more": {"text": "b"}}', ["a"]),
    "an array": (b'[{"text": "a"},\n{"text": "b"}]', "is read under the name .json"),
    "pretty": (b'{\n"text": "a"\n}\n', "is read under the name .json"),
    "UTF-16": ('{"text": "a"}\n'.encode("utf-16"), "iconv -f UTF-16"),
    "Latin-1": ('{"text": "é"}\n'.encode("latin-1"), "is not UTF-8 text"),
    "null": (b'{"text": null}', "has null there; data.skip_failed"),
    "too deep": (b'{"text": ' + b"[" * 100_000, "is not a JSON object"),
    "half a character": (b'{"text": "\\ud800"}', "is not a JSON object with a string under"),
}


@pytest.mark.parametrize("what", ODD_LINES)
def test_odd_lines(what: str, tmp_path: Path) -> None:
    content, want = ODD_LINES[what]
    path = write(tmp_path / "a.jsonl", content)
    found = read(path)
    if isinstance(want, list):
        assert found == want
    else:
        assert want in found[0][1]
        assert f"{path}, line 1 " in refusal(path, tmp_path)


OTHER_KINDS = {  # a name of text: what is in it, and what is said
    "gzip.jsonl": (gzip.compress(b'{"text": "a"}'), "but gzip: let its name end in .gz"),
    "zstd.jsonl": (pyarrow.compress(b"{}", "zstd", asbytes=True), "but zstd: let its name end"),
    "bzip2.txt": (bz2.compress(b"a"), "but bzip2, which is not read: decompress it"),
    "xz.json": (lzma.compress(b"[]"), "but xz, which is not read"),
    "zip.txt": (b"PK\x03\x04\xff", "but a zip archive, which is not read: unzip it"),
    "utf16.txt": ("some text".encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
    "utf32.jsonl": ("{}".encode("utf-32"), "iconv -f UTF-32 -t UTF-8"),
    # these two are UTF-8
    "pointer.txt": (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS: fetch the file"),
    "no_mark.txt": ("some text".encode("utf-16-le"), "iconv -f UTF-16LE -t UTF-8"),
    "no_mark.jsonl": ('{"text": "a"}'.encode("utf-16-be"), "iconv -f UTF-16BE -t UTF-8"),
    "crash.jsonl": (b"\0" * 4096, "but zeros, as a crash leaves them: cut them off"),
}


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_what_is_no_text_is_named(name: str, tmp_path: Path) -> None:
    content, words = OTHER_KINDS[name]
    path = tmp_path / name
    path.write_bytes(content)
    assert words in refusal(path, tmp_path)


def test_text_that_begins_like_an_archive_is_read(tmp_path: Path) -> None:
    for text in ("BZh is Bozhou's", "%PDF-1.7 is how it begins", "PAR1"):
        assert read(write(tmp_path / "a.txt", text.encode())) == [text]


def test_a_linked_folder_is_not_left_out_in_silence(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    corpus = tmp_path / "corpus"
    for folder in (elsewhere, corpus):
        folder.mkdir()
        write(folder / "a.txt", folder.name.encode())
    (corpus / "more").symlink_to(elsewhere)
    lines: list[str] = []
    prepare(data(corpus, tmp_path), log=lines.append)
    assert [line for line in lines if "links to folders are not followed: more;" in line], lines
    assert sorted(read(f"{corpus}/**")) == ["corpus", "elsewhere"]
    (corpus / "more").unlink()
    lines.clear()
    prepare(data(corpus, tmp_path, add_eos=False), log=lines.append)
    assert not any("links" in line for line in lines)


def test_what_a_folder_leaves_out_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("a.txt", "b.txt", "c.jsonl.xz", "d.jsonl.XZ", "README"):
        write(folder / name, name.encode())
    said: list[str] = []
    prepare(data(folder, tmp_path), log=said.append)
    assert any("left out" in line and ".xz (2), no suffix (1)" in line for line in said), said


def test_a_text_inside_an_object(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"a": {"b": "c"}, "x.y": "z"}\n')
    assert read(path, "a.b") == ["c"]
    assert read(path, "x.y") == ["z"]
    assert 'has nothing under "a.c"' in read(path, "a.c")[0][1]
    assert 'has nothing under "a.b.c"' in read(path, "a.b.c")[0][1]
    write(path, b'{"meta": {"text": "lost", "text": "a"}}')
    assert 'has "meta.text" (data.text_field) twice' in read(path, "meta.text")[0][1]
    write(path, b'{"meta": {"text": "a"}, "text": "b", "id": {"n": 1}}')
    assert read(path, "meta.text") == ["a"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.json", "b.jsonl.gz"])
def test_a_source_without_a_document_is_a_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.endswith("parquet"):
        parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), path)
    else:
        write(path, b"")
    assert "has no text: 1 file, 0 documents (none)" in refusal(path, tmp_path)


def test_a_folder_with_the_name_of_a_file_and_links_in_a_circle(tmp_path: Path) -> None:
    folder = tmp_path / "x.jsonl"
    (folder / "inner").mkdir(parents=True)
    write(folder / "inner" / "a.jsonl", b'{"text": "a"}')
    write(folder / "b.txt", b"b")
    assert read(folder) == ["b", "a"]
    (folder / "inner" / "again").symlink_to(folder)
    assert read(folder) == ["b", "a"]
    assert read(f"{folder}/**/*.*") == ["b", "a"]
    aside = tmp_path / "aside"
    aside.mkdir()
    write(aside / "c.txt", b"c")
    (folder / "linked").symlink_to(aside)
    assert read(f"{folder}/**/*.txt") == ["b", "c"], "a link to another place is followed by a glob"
    (folder / "loop.txt").symlink_to(folder / "loop.txt")
    assert "loop.txt cannot be read: Too many levels" in refusal(folder, tmp_path)


# ---- columns

STRINGS = ["a", "é" * 40, "", "x" * 2000, "a"]
TYPES = {
    "string": pyarrow.array(STRINGS),
    "large string": pyarrow.array(STRINGS, pyarrow.large_string()),
    "bytes": pyarrow.array([s.encode() for s in STRINGS], pyarrow.binary()),
    "dictionary of bytes": pyarrow.array([s.encode() for s in STRINGS]).dictionary_encode(),
    "view": pyarrow.array(STRINGS, pyarrow.string_view()),
}


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_of_text_in_a_column(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pyarrow.table({"text": TYPES[kind], "id": range(5)}), path, row_group_size=2
    )
    assert read(path) == STRINGS
    assert read(path, longest=100) == [*STRINGS[:3], (3, TOO_LONG), STRINGS[4]]


def test_columns_inside_others_and_values_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = {
        "meta": [{"body": "a", "n": 1}, {"body": None, "n": 2}, None],
        "n": [1, 2, 3],
        "raw": [b"a", b"\xff", None],
        "a.b": ["literal", "name", ""],
    }
    parquet.write_table(pyarrow.table(rows), path)
    null = 'has null in the column "meta.body"; data.skip_failed leaves some rows out'
    assert read(path, "meta.body") == ["a", (1, null), (2, null)]
    assert read(path, "a.b") == rows["a.b"]
    assert "has no string" in read(path, "n")[0][1]
    assert "has no string" in read(path, "meta")[0][1]
    assert "is not UTF-8" in read(path, "raw")[1][1]
    for missing in ("meta.none", "none", "n.x"):
        assert f'a.parquet has no column "{missing}" (data.text_field), but meta, n' in refusal(
            path, tmp_path, text_field=missing
        )
    twice = pyarrow.Table.from_arrays(
        [pyarrow.array(["a"]), pyarrow.array(["b"])], ["text", "text"]
    )
    parquet.write_table(twice, path)
    assert 'a.parquet has two columns "text" (data.text_field)' in refusal(path, tmp_path)


# ---- datasets


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Datasets on the disk: `split` without a train split, `one`, `none` and `two` (of two
    configurations), `lines` (a validation split alone)."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    one = datasets.Dataset.from_dict({"text": ["a", None, "c"], "meta": [{"body": "x"}] * 3})
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"validation": one, "test": one}).save_to_disk(tmp_path / "split")
    datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "none")
    for name in ("two/first", "two/second", "lines"):
        (tmp_path / name).mkdir(parents=True)
        file = "validation.jsonl" if name == "lines" else "train.jsonl"
        write(tmp_path / name / file, json.dumps({"text": name}).encode())
    configs = [
        f"- config_name: {one}\n  data_files: {one}/train.jsonl\n" for one in ("first", "second")
    ]
    (tmp_path / "two" / "README.md").write_text(f"---\nconfigs:\n{''.join(configs)}---\n")
    return tmp_path


DATASETS = {  # what is asked for, and what is said
    "split": 'has no split "train", but validation, test: name one, as hf:{}/split@validation',
    "split@dev": 'has no split "dev", but validation, test',
    "one@test": 'is one dataset without splits: leave "@test" out',
    "none": "has no rows",
    "two": "has several configurations, first, second: name one, as hf:{}/two/first",
    "two/third": 'has no configuration "third", but first, second',
    "lines": 'has no split "train", but validation: name one',
    "nowhere": "is no folder, and its parent has no configuration",
}


def test_a_dataset_says_what_it_has(saved: Path) -> None:
    for source, sentence in DATASETS.items():
        assert sentence.format(saved) in refusal(f"hf:{saved}/{source}", saved), source


def test_a_saved_dataset_that_is_named_as_a_folder_says_its_name(saved: Path) -> None:
    """Its files of JSON would be text with data.json_files = "text"."""
    for name in ("one", "split"):
        for options in ({}, {"json_files": "text"}):
            said = refusal(f"{saved}/{name}", saved, **options)
            assert f"name it hf:{saved}/{name}" in said, (name, options)
    (saved / "none" / "dataset_info.json").unlink()  # a state.json of one's own is a file of JSON
    assert "name it" not in refusal(f"{saved}/none", saved)


def test_datasets_that_are_named_right(saved: Path) -> None:
    null = (1, 'has null in the column "text"; data.skip_failed leaves some rows out')
    assert read(f"hf:{saved}/split@test") == ["a", null, "c"]
    assert read(f"hf:{saved}/one") == ["a", null, "c"]
    assert read(f"hf:{saved}/one", "meta.body") == ["x"] * 3
    assert read(f"hf:{saved}/two/second") == ["two/second"]
    assert read(f"hf:{saved}/lines@validation") == ["lines"]
    ((number, problem),) = read(f"hf:{saved}/lines@validation", "body")
    assert (number, problem) == (WHOLE, 'has no column "body" (data.text_field), but text')


def test_a_gated_dataset_names_the_page_of_its_conditions() -> None:
    from data.hub import _reason

    error = ValueError("Dataset 'org/closed' is a gated dataset on the Hub. Visit the page.")
    said = _reason("hf:org/closed@train", str(error), error)
    assert "https://huggingface.co/datasets/org/closed" in said and "HF_TOKEN" in said


# ---- conversations


def test_conversations_in_an_array(tmp_path: Path) -> None:
    talks = [{"prompt": f"{i}?", "completion": f"{i}!"} for i in range(3)]
    path = write(tmp_path / "a.json", json.dumps(talks, indent=1).encode())
    prepared = prepare(data(path, tmp_path, format="completion"), log=list)
    ids = np.asarray(prepared.train.read(0, len(prepared.train)))
    assert prepared.tokenizer.decode(ids[:4]) == "0?0!"
