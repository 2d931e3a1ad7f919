"""Verify checkpoints: a manifest, a hash of every byte, and a reader that checks both.

A checkpoint is a folder `step-00000100` with one file per rank and one manifest:

    rank-00000.safetensors   8 bytes of length, a JSON header, then the raw bytes of this rank's parts of the tensors
    manifest.json            what is not a tensor; how each tensor is cut (`layout.py`); the size of each file, and the
                             hash of its header

The hashes form a tree. The manifest carries its own hash, and those of the headers. A header says
where each part is in its file, and carries the hashes of its blocks. So the manifest stays small
however many ranks there are, rank 0 writes nothing for other ranks, and whoever reads a part reads
the manifest, one header and that part's blocks.

The manifest is written last. A folder is a checkpoint if its manifest agrees with itself and with
the files; the existence of a file proves nothing. There is no pickle anywhere, and no name of a
file is ever read from a file: rank numbers are. So reading a hostile checkpoint can fail, but it
cannot run code or leave the folder. (xxh3 finds accidents, not forgeries: whoever may write the
folder decides which numbers it holds.)

    python -m checkpoint.verify DIR [--all]

reads every byte of the newest checkpoint, or of all. It exits with 0 if these are the bytes that
were written; with 1 if not, naming the file, the position, and what was expected and found; and
with 2 if there is nothing to verify. It imports no torch.
"""

import argparse
import contextlib
import json
import math
import os
import re
import signal
import stat
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import xxhash
from tqdm import tqdm

from checkpoint import layout, others
from checkpoint.layout import Box
from configs import program
from configs.schema import InputError
from configs.words import aligned, number_of
from reliability import disk
from reliability.objects import Key, RangeReader, checkpoint_places, location

FORMAT = 2  # of the folder as described here; a reader refuses another one by name
# Format 1 was written until 22 November 2026, before any release. This commit still reads it.
LAST_READER_OF_1 = "dcc8c5d3"
MANIFEST = "manifest.json"
# where a safetensors header holds what is no tensor; ours holds the hashes of the blocks there
METADATA = "__metadata__"
# bytes under one hash: the least that a rank reads to trust one row of a large tensor
BLOCK = 1 << 24
# no step or attempt has more digits
NAME = re.compile(r"step-([0-9]{8,15})(?:\.([1-9][0-9]{0,5}))?")
# where the files of a checkpoint in an object store are, under the prefix of its manifest: run and
# save
PARTS = re.compile(r"[0-9a-f]{8}-[0-9]+")
HEX = re.compile(r"[0-9a-f]{16}")  # a hash
# characters that a terminal obeys instead of showing: controls, and those that reverse a line
UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")
LARGEST = 1 << 28  # bytes of a manifest or a header: what is longer is not read into memory
STEPS = 10**15  # more than a run has
HEAD = {  # keys of every manifest other than "files" and "tensors"
    "format": int,
    "step": int,
    "progress": dict,
    "mesh": dict,
    "facts": dict,
    "optimizer": str,
    "hyperparameters": dict,
    "parent": str,
    "ancestors": list,
    "torch": str,
    "saved": str,
}
SIZES = {  # bytes per element, by the names of the safetensors format
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


class Damaged(Exception):
    """A checkpoint that is not what was written; the message says which file, where, what was
    expected and found."""


@contextlib.contextmanager
def refuse_damage(path: Path | Key | str, doing: str = "") -> Iterator[None]:
    """Raise InputError, inside the context, for a checkpoint that turns out to be damaged; and, where
    `doing` says what could not be done, for a file that cannot be read or written."""
    try:
        yield
    except Damaged as error:
        raise InputError(f"{path} is damaged: {error}") from None
    except OSError as error:
        if not doing:
            raise
        raise InputError(f"{doing}: {error.filename or ''} {error.strerror}") from None


# The hash of bytes, as 16 digits. xxh3 (64 bits) is the fastest hash that depends on their order:
# several GB/s on one core. It releases the GIL above 64 KB.
digest: Callable[[bytes | memoryview], str] = xxhash.xxh3_64_hexdigest


def step_name(step: int, attempt: int) -> str:
    return f"step-{step:08d}" + (f".{attempt}" if attempt else "")


def parse_name(name: str) -> tuple[int, int] | None:
    """Return (attempt, step) of a checkpoint's folder name, None for any other name. The pairs sort
    from oldest to newest.

    The attempt counts how often the run went back to an earlier checkpoint, by `load_step` or
    because the newest was damaged. Everything saved after that carries it (`step-00000200.1`), so
    no published folder is ever written again and an abandoned future is never newer than what
    replaced it, even if clocks differ.
    """
    match = NAME.fullmatch(name)
    if not match:
        return None
    step = int(match[1])
    attempt = int(match[2] or 0)
    return (attempt, step) if step_name(step, attempt) == name else None


def published(folder: Path | Key) -> list[str]:
    """Return the names of the checkpoints in a folder, newest first. All other files there are
    ignored.

    A symbolic link is not a checkpoint: its target is not this run's to read or to remove.
    """
    if isinstance(folder, Key):
        names = [name for name in folder.folders() if parse_name(name)]
        names = [name for name in names if (folder / name / MANIFEST).exists()]
        return sorted(names, key=parse_name, reverse=True)
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if parse_name(e.name) and e.is_dir(follow_symlinks=False)]
    return sorted(names, key=parse_name, reverse=True)


def find(folder: Path | Key) -> list[Path | Key]:
    """Return the checkpoints that a user may mean by `folder`, newest first. Raises InputError if
    there are none."""
    if found := look(folder):
        return found
    if isinstance(folder, Path) and (other := others.named(folder)):
        raise InputError(other)
    raise InputError(
        f"there is no checkpoint in {str(folder)!r} (looked for {MANIFEST}, step-*, "
        "checkpoints/step-*)"
    )


def look(folder: Path | Key) -> list[Path | Key]:
    """Return the folder itself, if it is a checkpoint, or those in it, or those of the run whose
    folder it is. Raises InputError if it cannot be read."""
    try:
        if (folder / MANIFEST).exists():
            return [folder]
        for parent in (folder, *checkpoint_places(folder)):
            if _is_folder(parent) and (names := published(parent)):
                return [parent / name for name in names]
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(f"{str(folder)!r} cannot be read: {error}") from None
    return []


def _is_folder(path: Path | Key) -> bool:
    return isinstance(path, Key) or path.is_dir()


def newest(folder: Path | Key) -> Path | Key:
    """Return the newest checkpoint that `find` finds, whole or not."""
    return find(folder)[0]


class Rows(dict[str, dict]):
    """The `tensors` of a manifest, for a run that writes the same ones at every save. They are
    checked once and made into text once: for thousands of tensors that takes 50 ms, in which
    training would wait for the GIL."""

    checked_for: int | None = None  # a number of files

    def check(self, ranks: int) -> None:
        if self.checked_for != ranks:
            _check_rows(self, ranks)
            self.checked_for = ranks

    @cached_property
    def text(self) -> str:
        return _text(dict(self))


def write_manifest(folder: Path, manifest: dict) -> None:
    """Write and fsync the manifest, and fsync the folder, so that the names in it are durable too.

    Raises ValueError for a manifest that `read_manifest` would refuse.
    """
    content = manifest_text(manifest)
    with open(folder / MANIFEST, "xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    disk.sync(folder)


def manifest_text(manifest: dict) -> bytes:
    """Return the content of manifest.json. Raises ValueError for one that `read_manifest` would
    refuse."""
    _check(manifest)
    texts = {key: _text(value) for key, value in manifest.items()}
    lines = ",\n".join(f'"{key}": {text}' for key, text in texts.items())
    return f'{{"hash": "{_hash_of(texts)}", "manifest": {{\n{lines}\n}}}}\n'.encode()


def _text(value: object) -> str:
    """Return JSON that does not depend on the order of keys."""
    if isinstance(value, Rows):
        return value.text
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _hash_of(texts: dict[str, str]) -> str:
    """Hash the manifest's content, not its bytes: a user may reformat the file."""
    content = ",".join(f"{json.dumps(key)}:{texts[key]}" for key in sorted(texts))
    return digest(f"{{{content}}}".encode())


def manifest_hash(manifest: dict) -> str:
    return _hash_of({key: _text(value) for key, value in manifest.items()})


def open_regular(path: Path | Key) -> BinaryIO | RangeReader:
    """Open a regular file for reading, or an object of a store. A link is refused because it could
    lead out of the folder, and a pipe because it would block for ever."""
    if isinstance(path, Key):
        return path.open()
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(fd, "rb")


def size_of(stream: BinaryIO | RangeReader) -> int:
    if isinstance(stream, RangeReader):
        return stream.length
    return os.fstat(stream.fileno()).st_size


def tries(place: Path | Key | BinaryIO | RangeReader) -> range:
    """Return how often bytes are read whose hash is wrong: a network may damage what a store
    holds."""
    return range(getattr(place, "tries", 1))


def parts_folder(folder: Path | Key, manifest: dict) -> Path | Key:
    """Return the folder or prefix of the files of a checkpoint."""
    return folder / manifest["parts"] if "parts" in manifest else folder


def read_manifest(folder: Path | Key) -> dict:
    """Return the manifest, after checking its hash and its inner consistency. Opens no other file:
    `Shard` checks each file that is read. Raises Damaged, or InputError if the checkpoint is whole
    but of another format."""
    for left in reversed(tries(folder)):
        try:
            return _read_manifest(folder)
        except Damaged:
            if not left:
                raise
    raise AssertionError("a manifest is read at least once")


def _read_manifest(folder: Path | Key) -> dict:
    try:
        with open_regular(folder / MANIFEST) as stream:
            if size_of(stream) > LARGEST:
                raise Damaged(f"{folder / MANIFEST}: {size_of(stream):,} bytes are no manifest")
            outer = json.loads(stream.read())
        manifest = outer["manifest"]
        actual_hash = manifest_hash(manifest)
        if actual_hash != outer["hash"]:
            raise Damaged(
                f"{folder / MANIFEST}: hash {outer['hash']} expected, {actual_hash} found"
            )
        if manifest["format"] > FORMAT:
            raise InputError(
                f"{folder} has format {manifest['format']}, this code reads format {FORMAT}: update it"
            )
        if manifest["format"] == 1:
            raise InputError(
                f"{folder} has format 1, this code reads format {FORMAT}: go on with the run for a "
                f"step in a checkout of commit {LAST_READER_OF_1}, which saves it in format 2"
            )
        _check(manifest)
        return manifest | {"mesh": all_dimensions(manifest["mesh"])}
    except OSError as error:
        raise Damaged(f"{error.filename or folder}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(
            f"{folder / MANIFEST}: not a manifest ({type(error).__name__}: {error})"
        ) from None


def all_dimensions(mesh: dict[str, int]) -> dict[str, int]:
    """Return the sizes of a mesh by dimension. A mesh recorded before this code knew a dimension
    does not name it."""
    return {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1} | mesh


def is_whole(folder: Path | Key) -> bool:
    """Return whether a checkpoint has all its files in their full size. Reads no tensor, so damaged
    bytes do not show."""
    try:
        manifest = read_manifest(folder)
        inside = parts_folder(folder, manifest)
        sizes = inside.below() if isinstance(inside, Key) else None  # one listing for all files
        for rank, (size, _) in enumerate(manifest["files"]):
            name = file_name(rank)
            there = (inside / name).lstat().st_size if sizes is None else sizes.get(name)
            if there != size:
                return False
    except (Damaged, InputError, OSError):
        return False
    return True


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def part_name(name: str, box: Box) -> str:
    """Return the name of one part of a tensor in a file, such as `model.norm.weight[8:16]`."""
    ranges = [f"{start}:{start + length}" for start, length in zip(*box, strict=True)]
    return f"{name}[{','.join(ranges)}]"


def _check(manifest: dict) -> None:
    """Raise ValueError, KeyError, TypeError or AttributeError unless the manifest is consistent in
    itself."""
    for key, kind in HEAD.items():
        if type(manifest[key]) is not kind:
            raise ValueError(f"{key} is {manifest[key]!r:.100}")
    if not (manifest["format"] == FORMAT and 0 <= manifest["step"] < STEPS):
        raise ValueError(f"format {manifest['format']!r:.20}, step {manifest['step']!r:.20}")
    for name in (manifest["optimizer"], manifest["torch"], *manifest["ancestors"]):
        check_name(name)
    if not PARTS.fullmatch(manifest.get("parts", "00000000-0")):
        raise ValueError(f"parts is {manifest['parts']!r}")
    files = manifest["files"]
    for rank, file in enumerate(files):
        size, header_hash = file
        if type(size) is not int or not HEX.fullmatch(header_hash):
            raise ValueError(f"file {rank}: {file}")
    tensors = manifest["tensors"]
    if isinstance(tensors, Rows):
        tensors.check(len(files))
    else:
        _check_rows(tensors, len(files))


def check_name(name: str) -> None:
    """Raise ValueError for a name that a terminal would not show as it is, or that is no name."""
    if not isinstance(name, str) or len(name) > 2000 or UNSHOWN.search(name):
        raise ValueError(f"the name {ascii(name):.100}")


def shown(path: Path | Key) -> str:
    """Escape an untrusted path for a terminal."""
    text = str(path)
    return ascii(text)[1:-1] if UNSHOWN.search(text) else text


def _check_rows(tensors: dict[str, dict], ranks: int) -> None:
    for name, row in tensors.items():
        SIZES[row["dtype"]]
        check_name(name)
        layout.check(name, row, ranks)


class Shard:
    """The file of one rank, opened for reading. A context manager.

    Its size and its header are checked when it is opened, so each part that it finds is what the
    manifest means. Raises Damaged.
    """

    def __init__(self, folder: Path | Key, manifest: dict, rank: int):
        self.path = path = parts_folder(folder, manifest) / file_name(rank)
        self.manifest = manifest
        self.rank = rank
        self.size, header_hash = manifest["files"][rank]
        try:
            self.stream = open_regular(path)
        except OSError as error:
            raise Damaged(f"{path}: {error.strerror or error}") from None
        try:
            if (size := size_of(self.stream)) != self.size:
                raise Damaged(f"{path}: {self.size} bytes expected, {size} found")
            head = self._head(header_hash)
            self.header = len(head)
            self.parts = self._parts(json.loads(head[8:]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.stream.close()
            raise Damaged(f"{path}: not a header ({type(error).__name__}: {error})") from None
        except (OSError, Damaged):
            self.stream.close()
            raise

    def _head(self, expected: str) -> bytes:
        """Return the header, with its length. Raises Damaged if it has another hash than
        `expected`."""
        for _ in tries(self.path):
            head = self.stream.read(8)
            length = int.from_bytes(head, "little")
            head += self.stream.read(min(length, self.size, LARGEST))
            actual = digest(head)
            if actual == expected:
                return head
            again(self.stream, 0)
        raise Damaged(f"{self.path} at byte 0: hash {expected} expected, {actual} found")

    def _parts(self, header: dict) -> dict[str, dict]:
        """Return the table of parts: name -> dtype, shape, start (a byte of the file) and the
        hashes of its blocks."""
        hashes = header.pop(METADATA)["hashes"]  # 16 digits for each block
        parts = {}
        used = 0
        for name, row in header.items():
            begin, end = row["data_offsets"]
            size = end - begin
            blocks = -(-size // BLOCK)
            in_file = 0 <= begin <= end <= self.size - self.header
            if size != nbytes(row["dtype"], row["shape"]) or not in_file:
                raise ValueError(f"{name}: data_offsets {begin}, {end}")
            own = hashes[16 * used : 16 * (used + blocks)]
            if len(own) != 16 * blocks:
                raise ValueError(f"{name}: hashes are missing")
            parts[name] = {
                "dtype": row["dtype"],
                "shape": row["shape"],
                "start": self.header + begin,
                "hashes": [own[i : i + 16] for i in range(0, len(own), 16)],
            }
            used += blocks
        return parts

    def find(self, name: str, box: Box) -> dict:
        """Return the part of a tensor that the manifest puts in this file. Raises Damaged if it is
        not there."""
        part = self.parts.get(part_name(name, box))
        dtype = self.manifest["tensors"][name]["dtype"]
        if part is None or part["dtype"] != dtype or part["shape"] != list(box[1]):
            raise Damaged(
                f"{self.path}: it does not hold {part_name(name, box)}, as the manifest says"
            )
        return part

    def label(self, name: str) -> str:
        return f"{self.path.name} ({name})"

    def __enter__(self) -> "Shard":
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()


def nbytes(dtype: str, shape: list[int]) -> int:
    """Return the size in bytes of a tensor or of a part of one."""
    return math.prod(shape) * SIZES[dtype]


def again(stream: BinaryIO | RangeReader, position: int) -> None:
    """Seek back, to read again what a network may have damaged."""
    if isinstance(stream, RangeReader):
        stream.forget()
    stream.seek(position)


def read_blocks(
    stream: BinaryIO | RangeReader,
    label: str,
    part: dict,
    first: int,
    into: memoryview,
) -> None:
    """Fill `into` with the bytes of a part, beginning at its block number `first`. Each block is
    verified, so `into` must hold whole blocks (the last one of a part may be shorter).

    label: what is read, for the message. part: as in `Shard.parts`. Raises Damaged.
    """
    start = part["start"] + first * BLOCK
    stream.seek(start)
    for i in range(0, len(into), BLOCK):
        block = into[i : i + BLOCK]
        position = start + i
        expected = part["hashes"][first + i // BLOCK]
        for _ in tries(stream):
            count = stream.readinto(block)
            if count != len(block):
                raise Damaged(
                    f"{label}: ends at byte {position + count}, {position + len(block)} expected"
                )
            actual = digest(block)
            if actual == expected:
                break
            again(stream, position)
        else:
            raise Damaged(f"{label} at byte {position}: hash {expected} expected, {actual} found")


def verify(folder: Path | Key, progress: Callable[[int], object] = lambda n: None) -> dict:
    """Read every byte of a checkpoint, compare the hashes, and return its manifest. `progress` is
    called with the number of bytes of each block that was read. Raises Damaged at the first
    difference.
    """
    manifest = read_manifest(folder)
    buffer = memoryview(bytearray(BLOCK))
    for rank in range(len(manifest["files"])):
        with Shard(folder, manifest, rank) as shard:
            try:
                _verify_shard(shard, buffer, progress)
            except OSError as error:
                raise Damaged(f"{shard.path}: {error.strerror or error}") from None
    return manifest


def _verify_shard(shard: Shard, buffer: memoryview, progress: Callable[[int], object]) -> None:
    known = 0
    for name, row in shard.manifest["tensors"].items():
        if box := layout.box_of_rank(row, shard.rank):
            shard.find(name, box)
            known += 1
    if known != len(shard.parts):
        raise Damaged(
            f"{shard.path}: {len(shard.parts)} parts, of which the manifest knows {known}"
        )
    end = shard.header
    for name, part in shard.parts.items():
        size = nbytes(part["dtype"], part["shape"])
        for i in range(len(part["hashes"])):
            block = buffer[: min(BLOCK, size - i * BLOCK)]
            read_blocks(shard.stream, shard.label(name), part, i, block)
            progress(len(block))
        end += size
    if end != shard.size:
        raise Damaged(f"{shard.path}: bytes that the manifest does not account for")


def part_hashes(folder: Path | Key, manifest: dict) -> dict[str, list]:
    """Return, for each tensor, the names and hashes of all its parts: the same for equal tensors
    that were cut in the same way. Reads the header of every file. Raises Damaged."""
    hashes: dict[str, list] = {name: [] for name in manifest["tensors"]}
    for rank in range(len(manifest["files"])):
        with Shard(folder, manifest, rank) as shard:
            for name, part in shard.parts.items():
                hashes[name.rpartition("[")[0]].append((name, part["dtype"], part["hashes"]))
    return hashes


def _contents(path: Path | Key) -> dict[str, int]:
    """List the files of a checkpoint's folder, with their bytes."""
    sizes: dict[str, int] = {}
    if isinstance(path, Key):
        for rest, size in path.below().items():
            name = rest.partition("/")[0]
            sizes[name] = sizes.get(name, 0) + size
        return sizes
    for entry in path.iterdir():
        files = [entry] if entry.is_file() else entry.glob("*")
        sizes[entry.name] = sum(file.stat().st_size for file in files if file.is_file())
    return sizes


@program.refuses
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m checkpoint.verify", description="Verify every byte of a checkpoint."
    )
    parser.add_argument(
        "folder", help="a checkpoint, a folder of checkpoints, a run's folder, or the URL of one"
    )
    parser.add_argument(
        "--all", action="store_true", help="verify all checkpoints, not only the newest"
    )
    args = parser.parse_args(argv)
    paths = find(location(args.folder))[: None if args.all else 1]
    rows = []
    damaged = 0
    for path in paths:
        contents = _contents(path)
        size = sum(contents.values())
        mib = f"{size / 2**20:.1f} MiB"
        with tqdm(
            total=size, unit="B", unit_scale=True, desc=path.name, leave=False, disable=None
        ) as bar:
            try:
                manifest = verify(path, bar.update)
                ours = {MANIFEST, *map(file_name, range(len(manifest["files"])))}
                if "parts" in manifest:
                    ours = {MANIFEST, manifest["parts"]}
                extra = sorted(contents.keys() - ours)
                note = f"ok; not ours and never read: {', '.join(extra)}" if extra else "ok"
                rows.append((path.name, number_of(len(manifest["tensors"]), "tensor"), mib, note))
            except (Damaged, InputError) as error:
                damaged += 1
                what = "DAMAGED" if isinstance(error, Damaged) else "NOT READ"
                rows.append((path.name, "", mib, f"{what} {error}"))
    print("\n".join(aligned(rows)))
    return 1 if damaged else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends quietly
    program.run(main)
