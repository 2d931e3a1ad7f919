"""Convert models from elsewhere into a checkpoint, and checkpoints into files for elsewhere, for
tools.convert, which reads its arguments without torch."""

import contextlib
import os
import struct
import sys
import uuid
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from checkpoint import hf, state, storage, verify
from checkpoint.storage import CODES, DTYPES
from configs.schema import InputError
from configs.words import number_of
from data import turns
from data.open_tokenizer import load_saved, open_tokenizer
from data.tokenizer import Tokenizer
from models import FORMATS
from reliability.objects import Key, location
from tools import adapters, finetune_config, new_checkpoint, places
from tools import average as averages
from tools import lora_to_peft as peft
from tools.new_checkpoint import newest, progress_bar, shapes
from tools.to_dcp import from_dcp, to_dcp

Files = Mapping[str, dict | Path]  # a file's name -> its content, or the file to copy
META = "llama"  # the family whose weights Meta published in its own format
# bytes read from mapped files before they are mapped again: mapped pages count as this process's
# memory
REMAP = 1 << 28


# --------------------------------------------------------------------------------------------------
# in


def from_hf(source: Path, out: Path) -> str:
    """Returns what was done, in a sentence; so do the others. Raises InputError."""
    name, args = hf.read_model(source, FORMATS)
    stored = hf.weights(source, FORMATS[name], args, shapes(name, args))
    tokenizer = tokenizer_of(open_tokenizer, str(source))
    return publish(out, name, args, source, lambda tensor: stored[tensor].read(), tokenizer)


def from_meta(source: Path, out: Path) -> str:
    meta = MetaFolder(source)
    tokenizer = tokenizer_of(open_tokenizer, str(source / "tokenizer.model"))
    return publish(out, META, meta.args, source, meta.read, tokenizer)


def tokenizer_of(read: Callable, source: Path | Key | str) -> Tokenizer | None:
    """Return the source's tokenizer. A model is useful without one: a problem is only printed."""
    try:
        return read(source)
    except InputError as error:
        print(f"without a tokenizer: {error}", file=sys.stderr)
        return None


def publish(
    out: Path,
    family: str,
    args: Any,
    source: Path,
    read: Callable[[str], Tensor],
    tokenizer: Tokenizer | None,
) -> str:
    """Write a checkpoint of step 0: the tensors that `read` returns by name, in float32."""

    def widened(name: str) -> Tensor:
        return read(name.removeprefix("model.")).float()

    live: dict[str, Tensor] = {}
    for parameter, shape in shapes(family, args).items():
        live[f"model.{parameter}"] = torch.empty(shape, device="meta")
    must_match: dict[str, Any] = {"model": asdict(args)}
    if tokenizer:
        must_match["tokenizer"] = tokenizer.fingerprint
    facts = {"family": family, "must_match": must_match}
    path, size = new_checkpoint.write(out, source, live, widened, facts, tokenizer=tokenizer)
    words = "with its tokenizer" if tokenizer else "without a tokenizer"
    return f"{path}: {number_of(len(live), 'tensor')}, {size / 1e9:,.2f} GB, {words}"


class MetaFolder:
    """Model as Meta published it: params.json and consolidated.00.pth, .01.pth ..., one per
    tensor-parallel rank.

    Column-parallel matrices are cut along their rows, row-parallel ones along their columns, the
    embedding along its columns (Llama 2) or rows (Llama 3), norms not at all: a tensor's shape says
    which. `models/llama.py` has the rest.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.files = sorted(path for path in folder.glob("consolidated.*.pth") if path.is_file())
        if not self.files:
            raise InputError(f"{folder} has no consolidated.*.pth")
        self.pieces: list[dict[str, Tensor]] = []
        self.mapped = REMAP
        self.open()
        for file, piece in zip(self.files, self.pieces, strict=True):
            if piece.keys() != self.pieces[0].keys():
                raise InputError(f"{file} does not have the tensors of {self.files[0]}")
        try:
            params = hf.read_json(folder / "params.json")
            self.args = FORMATS[META].meta.args_from_meta(params, self.pieces[0], len(self.files))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"{folder / 'params.json'} does not describe a Llama: {error!r}"
            ) from None
        self.shapes = shapes(META, self.args)
        names = self.pieces[0].keys() - FORMATS[META].meta.ignored(self.args)
        described = {name: self.describe(name) for name in sorted(names)}
        hf.check_tensors(folder, described, self.shapes)

    def open(self) -> None:
        """Map all files, if none is mapped yet or REMAP bytes have been read since."""
        if self.mapped < REMAP:
            return
        self.pieces = []
        self.mapped = 0
        for file in self.files:
            try:
                piece = torch.load(str(file), map_location="cpu", mmap=True, weights_only=True)
            except Exception as error:  # torch raises many types for a file of another kind
                first = str(error).strip().splitlines() or [type(error).__name__]
                raise InputError(
                    f"{file} is not a file of tensors that can be read without running its code: "
                    f"{first[0]}"
                ) from None
            if not isinstance(piece, dict):
                raise InputError(f"{file} is not a dict of tensors")
            for tensor in piece.values():
                if type(tensor) is not Tensor or tensor.layout != torch.strided:
                    raise InputError(f"{file} is not a dict of tensors")
            self.pieces.append(piece)

    def cut(self, name: str) -> int | None:
        """Return the dimension along which files share a tensor; None where each has it whole."""
        n = len(self.files)
        if n == 1:
            return None
        shape = list(self.pieces[0][name].shape)
        whole = self.shapes.get(name, shape)
        for dim, size in enumerate(whole):
            sharded = [*whole[:dim], size // n, *whole[dim + 1 :]]
            if size % n == 0 and shape == sharded:
                return dim
        return None

    def describe(self, name: str) -> tuple[str, list[int]]:
        first = self.pieces[0][name]
        dim = self.cut(name)
        for file, piece in zip(self.files, self.pieces, strict=True):
            if piece[name].shape != first.shape or piece[name].dtype != first.dtype:
                raise InputError(
                    f"{name} is not the same in {file} and {self.files[0]}: "
                    f"{list(piece[name].shape)}"
                )
        shape = list(first.shape)
        if dim is not None:
            shape[dim] *= len(self.files)
        return CODES.get(first.dtype, str(first.dtype)), shape

    def read(self, name: str) -> Tensor:
        self.open()
        dim = self.cut(name)
        pieces = [piece[name] for piece in self.pieces]
        if dim is None:
            pieces = pieces[:1]
        self.mapped += sum(piece.nbytes for piece in pieces)
        whole = torch.cat(pieces, dim=dim or 0)
        return FORMATS[META].meta.from_meta(name, whole, self.args)


# --------------------------------------------------------------------------------------------------
# out


def to_hf(
    source: Path | Key, out: Path, dtype: str, max_shard_size: int, tokenizer: str = ""
) -> str:
    path, manifest = newest(source)
    facts = manifest["facts"]
    if adapters.has_adapters(manifest):
        raise InputError(
            f"{path} holds adapters and no model: lora-merge writes them with their base, "
            "lora-to-peft alone"
        )
    saved = places.tokenizer_named(tokenizer) if tokenizer else saved_tokenizer(path)
    files = files_of_run(path, facts["must_match"]["model"]["max_seq_len"], saved)
    weights = state.select(manifest["tensors"], "model", ()).values()
    size = sum(verify.nbytes(row["dtype"], row["shape"]) for row in weights)
    family = hf.formats_of(FORMATS, facts["family"])
    with progress_bar(size, path.name) as bar:
        hf.export(path, out, family, getattr(torch, dtype), files, max_shard_size, bar.update)
    words = "with its tokenizer" if saved else "without a tokenizer"
    return f"{out}: the model of {path} in {dtype}, {words}"


def lora_to_peft(source: Path | Key, out: Path) -> str:
    run = adapters.open_run(source)
    base = location(run.base["folder"])
    of_hugging_face = places.is_hugging_face(base)
    named = str(base) if of_hugging_face else None
    files = dict(files_of_run(run.path, run.args.max_seq_len, saved_tokenizer(run.path)))
    files.pop(turns.GENERATION, None)  # of a whole model
    peft.write(out, run.tensors, run.formats, run.args, run.rank, run.alpha, named, files)
    words = f"{base} is their base"
    if not of_hugging_face:
        words += ", which to-hf makes a folder for transformers of"
    return f"{out}: the adapters of {run.path}; {words}"


def lora_merge(source: Path | Key, out: Path, base: str | None, max_shard_size: int) -> str:
    run = adapters.open_run(source)
    folder = location(base or run.base["folder"])
    hf.check_is_new(out)
    model = run.merged(folder)
    saved = saved_tokenizer(run.path)
    files = files_of_run(run.path, run.args.max_seq_len, saved)
    config = None
    if places.is_hugging_face(folder):
        of_base, files_of_base = adapters.files_of_base(folder)
        if of_base.get("model_type") not in run.formats.hf_nested:  # else its text model is written
            config = of_base | {"tie_word_embeddings": run.args.tied_embeddings}
        files = base_with_template(files_of_base, files, run.path, saved)
    config = config or hf.config_of(run.formats, run.args)
    with progress_bar(run.size_of(model), run.path.name) as bar:
        whole = hf.Export(model, run.formats, run.args, config, files)
        hf.write_model(run.path, out, whole, max_shard_size, bar.update)
    return f"{out}: the weights of {folder} with the adapters of {run.path}"


def saved_tokenizer(path: Path | Key) -> Tokenizer | None:
    return tokenizer_of(lambda checkpoint: load_saved(places.tokenizer_of(checkpoint)), path)


def files_of_run(path: Path | Key, longest: int, saved: Tokenizer | None) -> Files:
    """Return the files of a tokenizer for a checkpoint of a run, none without one."""
    return turns.files(places.run_of(path), saved, longest) if saved else {}


def base_with_template(
    of_base: Files, of_run: Files, path: Path | Key, saved: Tokenizer | None
) -> Files:
    """Return the files of a Hugging Face base plus the chat template of the checkpoint's run. The
    tokenizer is the base's if it can be identified from its files."""
    files = of_base if turns.CONFIG in of_base else {**of_run, **of_base}
    asked = turns.of_run(places.run_of(path), saved) if saved else None
    return turns.with_template(files, asked)


def to_torch(source: Path | Key, out: Path, content: str) -> str:
    """{"model": {name: tensor}, "optimizer": {parameter: {key: tensor}}, "step", "progress",
    "facts"}: tensors and plain values, so that torch.load with its default, weights_only, reads it.

    torch.save writes the file without the tensors' data (`skip_data`). Then the data are written
    into their places, one tensor at a time. The checksums in the zip archive stay 0: torch never
    looks at them, `unzip -t` would.
    """
    path, manifest = newest(source)
    # where each tensor goes: "model" or its parameter -> key -> name
    tables: dict[str, dict[str, str]] = {"model": {}}
    for name in state.select(manifest["tensors"], content, ()):
        kind, _, rest = name.partition(".")
        if kind == "model":
            tables["model"][rest] = name
        else:
            parameter, _, key = rest.rpartition(".")
            tables.setdefault(parameter, {})[key] = name
    order: list[str] = []  # in which torch.save meets and numbers them
    for table in tables.values():
        order += table.values()
    rows = [manifest["tensors"][name] for name in order]
    size = sum(verify.nbytes(row["dtype"], row["shape"]) for row in rows)
    optimizer: dict[str, dict[str, Tensor]] = {}
    with FakeTensorMode():  # shapes and types without memory
        for table, names in tables.items():
            optimizer[table] = {k: _empty(manifest["tensors"][name]) for k, name in names.items()}
    whole: dict = {"model": optimizer.pop("model")}
    if content != "model":
        whole["optimizer"] = optimizer
    whole |= {key: manifest[key] for key in ("step", "progress", "facts")}
    temporary = out.parent / f".tmp-{uuid.uuid4().hex[:8]}-{out.name}"
    with verify.refuse_damage(path, f"{out} cannot be written"), contextlib.ExitStack() as end:
        end.callback(temporary.unlink, missing_ok=True)
        if out.exists():
            raise InputError(f"{out} exists already: give the name of a new file")
        with (
            open(temporary, "xb") as file,
            torch.serialization.skip_data(materialize_fake_tensors=True),
        ):
            torch.save(whole, file)
        places = storages(temporary)
        tensors = hf.read_whole(path, manifest, order)
        with open(temporary, "r+b") as file, progress_bar(size, path.name) as bar:
            for name, (start, length) in zip(order, places, strict=True):
                data = storage.as_bytes(next(tensors))
                if len(data) != length:
                    why = f"{name} is not {length} bytes"
                    raise RuntimeError(f"this torch.save numbers its tensors in another way: {why}")
                file.seek(start)
                file.write(data)
                del data  # the next tensors are read after this one is gone
                bar.update(length)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(out)
    return f"{out}: {number_of(len(order), 'tensor')} of {path}"


def _empty(stored: dict) -> Tensor:
    return torch.empty(stored["shape"], dtype=DTYPES[stored["dtype"]])


def storages(path: Path) -> list[tuple[int, int]]:
    """(offset, bytes) of each tensor's data in a file of torch.save, in its order. The file is an
    uncompressed zip archive of records `data/0`, `data/1`, ..."""
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        found = {}
        for info in archive.infolist():
            folder, _, number = info.filename.rpartition("/")
            if folder.endswith("/data"):
                # the last 4 of the local header's 30 bytes: the lengths of name and extra field
                file.seek(info.header_offset + 26)
                name, extra = struct.unpack("<HH", file.read(4))
                found[int(number)] = (info.header_offset + 30 + name + extra, info.file_size)
    return [found[i] for i in sorted(found)]


def average(source: Path | Key, out: Path) -> str:
    path, manifest = newest(source)
    return averages.write(path, manifest, out, saved_tokenizer(path))


COMMANDS = {  # of tools.convert
    "from-hf": from_hf,
    "from-meta": from_meta,
    "to-hf": to_hf,
    "to-torch": to_torch,
    "to-dcp": to_dcp,
    "from-dcp": from_dcp,
    "average": average,
    "lora-to-peft": lora_to_peft,
    "lora-merge": lora_merge,
    "config": finetune_config.write,
}
