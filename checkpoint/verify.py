"""What makes a checkpoint trustworthy: a manifest, a hash of every byte, and a reader that checks both.

A checkpoint is a folder `step-00000100` with one file per rank and one manifest:

    rank-00000.safetensors   8 bytes of length, a JSON header, then the raw bytes of this rank's parts of the tensors
    manifest.json            where each part of each tensor lies, the hashes of its blocks, and all that is not a tensor

The manifest is written last and carries its own hash. A folder is a checkpoint if its manifest agrees with itself and
with the files; the existence of a file proves nothing. There is no pickle anywhere, and a manifest can only name files
called `rank-NNNNN.safetensors` beside it. So reading a hostile checkpoint can fail, but it cannot run code or leave the
folder. (xxh3 finds accidents, not forgeries: whoever may write the folder decides which numbers it holds.)

    python -m checkpoint.verify DIR [--all]

reads every byte of the newest checkpoint, or of all. It exits with 0 if these are the bytes that were written; with 1
if not, naming the file, the position, and what was expected and found; and with 2 if there is nothing to verify. It
imports no torch.
"""

import argparse
import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import xxhash
from tqdm import tqdm

from configs.schema import InputError
from reliability import disk

FORMAT = 1  # of the folder as described here; a reader refuses a newer one by name
MANIFEST = "manifest.json"
BLOCK = 1 << 24  # bytes under one hash: the least that a rank reads to trust one row of a large tensor
FILE = re.compile(r"rank-[0-9]{5,}\.safetensors")
NAME = re.compile(r"step-([0-9]{8,})(?:\.([1-9][0-9]*))?")
HEAD = {  # what every manifest says, beside "files" and "tensors"
    "format": int, "step": int, "progress": dict, "mesh": dict, "facts": dict, "optimizer": str,
    "hyperparameters": dict, "parent": str, "ancestors": list, "torch": str, "saved": str,
}  # fmt: skip
SIZES = {  # bytes per element, by the names of the safetensors format
    "F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1,
    "BOOL": 1,
}  # fmt: skip


class Damaged(Exception):
    """A checkpoint that is not what was written; the message says which file, where, what was expected and found."""


def digest(data: bytes | memoryview) -> str:
    """xxh3 (64 bits): the fastest hash that depends on the order of bytes. It does several GB/s on one core and does
    not hold the GIL."""
    return xxhash.xxh3_64_hexdigest(data)


def step_name(step: int, attempt: int) -> str:
    return f"step-{step:08d}" + (f".{attempt}" if attempt else "")


def parse_name(name: str) -> tuple[int, int] | None:
    """(attempt, step) of a checkpoint's folder name, None for any other name. The pairs sort from oldest to newest.

    The attempt counts how often the run went back to an earlier checkpoint, by `load_step` or because the newest was
    damaged. Everything saved after that carries it (`step-00000200.1`), so no published folder is ever written again
    and an abandoned future is never newer than what replaced it, whatever the clocks say.
    """
    match = NAME.fullmatch(name)
    if not match:
        return None
    step, attempt = int(match[1]), int(match[2] or 0)
    return (attempt, step) if step_name(step, attempt) == name else None


def published(folder: Path) -> list[str]:
    """Names of the checkpoints in a folder, newest first. Whatever else lies there is not ours, and is not looked at.

    A symbolic link is not a checkpoint: its target is not this run's to read or to remove.
    """
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if parse_name(e.name) and e.is_dir(follow_symlinks=False)]
    return sorted(names, key=parse_name, reverse=True)


def find(folder: Path) -> list[Path]:
    """The checkpoints that a person may mean by `folder`, newest first: the folder itself, or those in it, or those in
    its `checkpoints`. Raises InputError if there are none.
    """
    try:
        if (folder / MANIFEST).exists():
            return [folder]
        for parent in (folder, folder / "checkpoints"):
            if parent.is_dir() and (names := published(parent)):
                return [parent / name for name in names]
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(f"{str(folder)!r} cannot be read: {error}") from None
    raise InputError(f"there is no checkpoint in {str(folder)!r} (looked for {MANIFEST}, step-*, checkpoints/step-*)")


def newest(folder: Path) -> Path:
    """The newest checkpoint that `find` finds, whole or not."""
    return find(folder)[0]


def write_manifest(folder: Path, manifest: dict) -> None:
    """Write and fsync the manifest, and fsync the folder, so that the names in it are durable too.

    Raises ValueError for a manifest that `read_manifest` would refuse.
    """
    _check_layout(manifest)
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in manifest.items())
    with open(folder / MANIFEST, "xb") as stream:
        stream.write(f'{{"hash": "{_manifest_hash(manifest)}", "manifest": {{\n{lines}\n}}}}\n'.encode())
        stream.flush()
        os.fsync(stream.fileno())
    disk.sync(folder)


def _manifest_hash(manifest: dict) -> str:
    """A hash of the manifest's content, not of its bytes: a person may reformat the file."""
    return digest(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading: a link could lead out of the folder, and a pipe would block for ever."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(fd, "rb")


def read_manifest(folder: Path) -> dict:
    """The manifest, after checking its hash, its inner consistency, and that its files exist in their full size.

    Reads no tensor. Raises Damaged, or InputError if the checkpoint is whole but of a format newer than this code.
    """
    try:
        with open_regular(folder / MANIFEST) as stream:
            outer = json.loads(stream.read())
        manifest = outer["manifest"]
        actual_hash = _manifest_hash(manifest)
        if actual_hash != outer["hash"]:
            raise Damaged(f"{folder / MANIFEST}: hash {outer['hash']} expected, {actual_hash} found")
        if manifest["format"] > FORMAT:
            raise InputError(f"{folder} has format {manifest['format']}, this code reads up to {FORMAT}: update it")
        _check_layout(manifest)
        for name, file in manifest["files"].items():
            with open_regular(folder / name) as stream:
                size = os.fstat(stream.fileno()).st_size
            if size != file["size"]:
                raise Damaged(f"{folder / name}: {file['size']} bytes expected, {size} found")
    except OSError as error:
        raise Damaged(f"{error.filename or folder}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{folder / MANIFEST}: not a manifest ({type(error).__name__}: {error})") from None
    return manifest


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint has all its files in their full size. Reads no tensor, so damaged bytes do not show."""
    try:
        read_manifest(folder)
    except (Damaged, InputError):
        return False
    return True


def _check_layout(manifest: dict) -> None:
    """Raises ValueError, KeyError, TypeError or AttributeError unless every part lies inside its tensor and its file,
    the parts fill the tensors, and only shard files are named."""
    for key, kind in HEAD.items():
        if type(manifest[key]) is not kind:
            raise ValueError(f"{key} is {manifest[key]!r}")
    files = manifest["files"]
    for name, file in files.items():
        if not FILE.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a shard")
        if not 0 <= file["header"] <= file["size"]:
            raise ValueError(f"{name}: a header of {file['header']} bytes")
    for name, tensor in manifest["tensors"].items():
        if not (isinstance(name, str) and _is_sizes(tensor["shape"])):
            raise ValueError(f"{name}: shape {tensor['shape']}")
        filled = 0
        for part in tensor["parts"]:
            offset, shape, file = part["offset"], part["shape"], files[part["file"]]
            size = nbytes(tensor, part)
            inside = _is_sizes(offset) and _is_sizes(shape) and len(offset) == len(shape) == len(tensor["shape"])
            inside = inside and all(o + n <= whole for o, n, whole in zip(offset, shape, tensor["shape"], strict=True))
            if not inside or not file["header"] <= part["start"] <= part["start"] + size <= file["size"]:
                raise ValueError(f"{name}: the part at {offset} lies outside of its tensor or file")
            if len(part["hashes"]) != -(-size // BLOCK):
                raise ValueError(f"{name}: {len(part['hashes'])} hashes for {size} bytes")
            filled += math.prod(shape)
        if filled != math.prod(tensor["shape"]):
            raise ValueError(f"{name}: its parts hold {filled} of {math.prod(tensor['shape'])} elements")


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def nbytes(tensor: dict, part: dict) -> int:
    """The size in bytes of one part of a tensor in the manifest."""
    return math.prod(part["shape"]) * SIZES[tensor["dtype"]]


def read_blocks(stream: BinaryIO, label: str, part: dict, first: int, into: memoryview, check: bool = True) -> None:
    """Fill `into` with the bytes of a part, beginning at its block number `first`. With `check`, each block is
    verified, and `into` must hold whole blocks (the last one of a part may be shorter).

    label: the tensor's name, for the message. Raises Damaged.
    """
    stream.seek(part["start"] + first * BLOCK)
    for i in range(0, len(into), BLOCK):
        block, position = into[i : i + BLOCK], part["start"] + first * BLOCK + i
        if (count := stream.readinto(block)) != len(block):
            raise Damaged(f"{stream.name} ({label}): ends at byte {position + count}, {position + len(block)} expected")
        if check and (actual := digest(block)) != (expected := part["hashes"][first + i // BLOCK]):
            raise Damaged(f"{part['file']} ({label}) at byte {position}: hash {expected} expected, {actual} found")


def verify(folder: Path, progress: Callable[[int], object] = lambda n: None) -> dict:
    """Read every byte of a checkpoint, compare the hashes, and return its manifest. `progress` is called with the
    number of bytes of each block that was read. Raises Damaged at the first difference.
    """
    manifest = read_manifest(folder)
    buffer = memoryview(bytearray(BLOCK))
    parts = {name: [] for name in manifest["files"]}  # file -> (tensor's name, part, bytes)
    for label, tensor in manifest["tensors"].items():
        for part in tensor["parts"]:
            parts[part["file"]].append((label, part, nbytes(tensor, part)))
    try:
        for name, file in manifest["files"].items():
            with open_regular(folder / name) as stream:
                head = stream.read(file["header"])
                if (actual := digest(head)) != file["header_hash"]:
                    raise Damaged(f"{folder / name} at byte 0: hash {file['header_hash']} expected, {actual} found")
                for label, part, size in parts[name]:
                    for i in range(len(part["hashes"])):
                        block = buffer[: min(BLOCK, size - i * BLOCK)]
                        read_blocks(stream, label, part, i, block)
                        progress(len(block))
            if file["header"] + sum(size for _, _, size in parts[name]) != file["size"]:
                raise Damaged(f"{folder / name}: bytes that the manifest does not account for")
    except OSError as error:
        raise Damaged(f"{error.filename or folder}: {error.strerror or error}") from None
    return manifest


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m checkpoint.verify", description="Verify every byte of a checkpoint.")
    parser.add_argument("folder", type=Path, help="a checkpoint, a folder of checkpoints, or a run's folder")
    parser.add_argument("--all", action="store_true", help="verify all checkpoints, not only the newest")
    args = parser.parse_args(argv)
    try:
        paths = find(args.folder)[: None if args.all else 1]
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    rows, damaged = [], 0
    for path in paths:
        size = sum(f.stat().st_size for f in path.glob("*") if f.is_file())
        with tqdm(total=size, unit="B", unit_scale=True, desc=path.name, leave=False) as bar:
            try:
                manifest = verify(path, bar.update)
                extra = sorted(p.name for p in path.iterdir() if p.name not in {*manifest["files"], MANIFEST})
                note = f"ok; not ours and never read: {', '.join(extra)}" if extra else "ok"
                rows.append((path.name, f"{len(manifest['tensors'])} tensors", f"{size / 2**20:.1f} MiB", note))
            except (Damaged, InputError) as error:
                damaged += 1
                rows.append((path.name, "", f"{size / 2**20:.1f} MiB", f"DAMAGED {error}"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip())
    return 1 if damaged else 0


if __name__ == "__main__":
    sys.exit(main())
