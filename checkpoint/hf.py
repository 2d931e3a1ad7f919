"""Load and export models as Hugging Face folders, without transformers.

In: a folder as the hub holds it, `config.json` and safetensors files. `load` fills a live model on
any mesh, each rank reading its own slices; `python -m tools.convert from-hf` makes a checkpoint of
it. Out: `export` makes such a folder of a checkpoint saved on any mesh. The fields of config.json
and the names of tensors come from the model's family (`models/formats/`). Tensors are renamed, and
a family may declare another shape for theirs (`models/family.py::TensorLayout`): bfloat16 and
float16 widen exactly to the float32 that we train in, and bfloat16 narrows back to the same bytes.

One tensor of theirs is in memory at a time. A folder from elsewhere is not trusted: no pickle is read, an
index can only name files in its folder, and the tensors must be exactly those of the model that
`config.json` describes.
"""

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from checkpoint import changes, others, state, storage, verify
from checkpoint.agreement import on_every_rank, on_rank_0
from checkpoint.storage import CODES, DTYPES
from configs.published import described
from configs.schema import Config, InputError
from models.lora import is_adapter
from reliability import disk
from reliability.objects import Key, location

logger = logging.getLogger("plumbline")
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PIECE = 1 << 24  # elements of a matrix that are compared at once
WIDENED = ("F32", "BF16", "F16")  # types of weights that float32 holds exactly
SHARD_SIZE = 5_000_000_000  # bytes of one exported file at most, unless one tensor has more
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}

# These functions take a family as its models/family.py::Formats, or by its name and those of all
# families. `args` is an instance of that family's Args.


def formats_of(families: Mapping[str, Any], name: str) -> Any:
    """Return the formats of a family. Raises InputError for one that has none."""
    if name not in families:
        raise InputError(
            f"the family {name} has no models/formats/{name}.py, so its weights cannot be read from "
            f"Hugging Face's files nor written to them; {', '.join(families)} have one"
        )
    return families[name]


def read_model(
    folder: Path, families: Mapping[str, Any], unnamed: str | None = None
) -> tuple[str, Any]:
    """Return the name of the family that a folder's config.json describes, and its Args. Every
    reader of such a folder calls this.

    unnamed: the family of a file that has no model_type, the first one if not given. Raises
    InputError for a model of none of these families, or with parts that ours does not have.
    """
    path = folder / "config.json"
    if not path.is_file() and (other := others.named(folder)):
        raise InputError(other)
    config = read_json(path)
    try:
        name, args = described(config, families, unnamed)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    if config.get("model_type") in families[name].hf_nested:
        logging.getLogger("plumbline").warning(
            f"{folder} has a model of more than text: its text model alone is read"
        )
    if args.tied_embeddings and _has_own_head(folder, families[name]):
        args = replace(args, tied_embeddings=False)
    if getattr(args, "mtp_depth", 0) and not _has_predictions(folder, families[name], args):
        args = replace(args, mtp_depth=0)
    return name, args


def _has_weights(folder: Path) -> bool:
    """Return False for a configuration alone."""
    return (folder / ONE_FILE).is_file() or (folder / INDEX).is_file()


def _has_predictions(folder: Path, family: Any, args: Any) -> bool:
    """Return whether a folder has the layers that predict further tokens (models/mtp.py), which
    transformers drops and still counts in config.json."""
    if not _has_weights(folder):
        return True
    names = family.hf_names(args).items()
    wanted = {theirs for ours, theirs in names if ours.startswith(f"layers.{args.n_layers}.")}
    return not wanted.isdisjoint(inventory(folder))


def _has_own_head(folder: Path, family: Any) -> bool:
    """Return whether a folder has two tensors that differ although its config.json ties them, as
    where a trainer has untied them. transformers 5 keeps both then, and so do we, with a
    warning."""
    if not _has_weights(folder):
        return False
    there = _of_text(inventory(folder), family)
    embedding, head = family.hf_tied
    if embedding not in there or head not in there or _are_equal(there, embedding, head):
        return False
    logging.getLogger("plumbline").warning(
        f"{folder}: config.json says tie_word_embeddings = true, and the files have a {head} that "
        f"differs from {embedding}: both are read, and the model is not tied"
    )
    return True


def _rows(there: dict[str, "Stored"], name: str) -> Iterator[Tensor]:
    """Yield a matrix, a few rows at a time, in float32."""
    stored = there[name]
    rows, columns = stored.shape
    step = max(1, PIECE // max(1, columns))
    for start in range(0, rows, step):
        yield _read_slice(stored, (slice(start, start + step),)).float()


def _are_equal(there: dict[str, "Stored"], one: str, other: str) -> bool:
    """Return whether two matrices have the same values."""
    if there[one].shape != there[other].shape or len(there[one].shape) != 2:
        return False
    pairs = zip(_rows(there, one), _rows(there, other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def check_model(
    folder: Path, families: Mapping[str, Any], name: str, numbers: dict[str, Any]
) -> None:
    """Raise InputError unless a folder's config.json describes a model of this family with these
    numbers.

    numbers: those of the family's Args. max_seq_len may differ, because no weight depends on it.
    """
    formats_of(families, name)
    there, args = read_model(folder, families, name)
    if there != name:
        raise InputError(
            f'{folder} holds a model of the family "{there}", and model.family is "{name}": '
            f'set model.family = "{there}" and a flavor of it'
        )
    stored = asdict(args)
    stored.pop("max_seq_len")
    if numbers.get("mtp_depth", 0) < stored.get("mtp_depth", 0):
        stored["mtp_depth"] = numbers["mtp_depth"]  # fewer are trained than there are
    lines = changes.mismatches(stored, numbers, "model")
    if lines:
        raise InputError(
            f"{folder} holds another model: {'; '.join(lines)}. Set these options, or the flavor"
        )


def read_json(path: Path) -> dict:
    """Read a JSON object from an untrusted file. Raises InputError."""
    if path.exists() and not path.is_file():  # a pipe would block for ever
        raise InputError(f"{path} is not a regular file")
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} is not a JSON object")
    return value


# --------------------------------------------------------------------------------------------------
# in


class Stored(NamedTuple):
    """One tensor of a folder, as the header of its file describes it."""

    file: Path
    name: str  # in this file
    dtype: str
    shape: list[int]


def inventory(folder: Path) -> dict[str, Stored]:
    """Return every tensor of a folder by Hugging Face's name; reads the headers only. Raises
    InputError."""
    found: dict[str, Stored] = {}
    for path in _files(folder):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():
                    if name in found:
                        raise InputError(f"{name} is in {found[name].file} and in {path}")
                    part = file.get_slice(name)
                    found[name] = Stored(path, name, part.get_dtype(), part.get_shape())
        except (SafetensorError, OSError) as error:
            if path.is_file() and others.is_pointer(path):
                raise InputError(
                    f"{path} is a pointer of Git LFS: fetch it with git lfs pull"
                ) from None
            raise InputError(f"{path} is not a whole safetensors file: {error}") from None
    return found


def _of_text(there: dict[str, Stored], family: Any) -> dict[str, Stored]:
    """Return the same tensors by the names of `hf_names`, where a larger model has other names for
    those of its text model (`models/family.py::Formats.hf_stems`)."""
    renamed: dict[str, Stored] = {}
    for name, stored in there.items():
        for theirs, ours in family.hf_stems:
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
                break
        if name in renamed:
            raise InputError(f"{stored.file} has both {renamed[name].name} and {stored.name}")
        renamed[name] = stored
    return renamed


def _files(folder: Path) -> list[Path]:
    """List the safetensors files of a folder. A file may be a symbolic link, as all are in the
    hub's cache; a name that leads out of the folder is refused."""
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    index = folder / INDEX
    if not index.is_file():
        raise InputError(others.named(folder) or f"{folder} has neither {ONE_FILE} nor {INDEX}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise InputError(
                f"{index} names {name!r}, which is not the name of a safetensors file in its folder"
            )
        if not (folder / name).is_file():
            raise InputError(f"{index} names {name}, which is not there")
    return [folder / name for name in names]


Shapes = dict[str, list[int]]  # by a tensor's name


def check_tensors(
    folder: Path,
    found: dict[str, tuple[str, list[int]]],
    wanted: Shapes,
    types: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> None:
    """Raise InputError, naming some of the differences, if these (type, shape) by name are not the
    shapes wanted. types: of the tensors that may not have the types WIDENED."""
    lines = []
    for name, wanted_shape in wanted.items():
        if name not in found:
            lines.append(f"{name} is missing")
            continue
        dtype, shape = found[name]
        if shape != wanted_shape:
            lines.append(f"{name} has shape {shape}, not {wanted_shape}")
        elif dtype not in types.get(name, WIDENED):
            allowed = ", ".join(types.get(name, WIDENED))
            lines.append(f"{name} has type {dtype}, which is none of {allowed}")
    lines += [f"{name} is not a tensor of such a model" for name in found if name not in wanted]
    if lines:
        more = f"; and {len(lines) - 4} more" if len(lines) > 4 else ""
        raise InputError(
            f"{folder} does not hold the model that it describes: {'; '.join(lines[:4])}{more}"
        )


# the number of an expert in their names. We have the weights of all experts in one parameter
EXPERT = "#"


def in_files(theirs: str, shape: list[int]) -> Shapes:
    """Return the shapes, by name, of the tensors that a parameter of this shape is stored as in
    their files."""
    if EXPERT not in theirs:
        return {theirs: shape}
    names = [theirs.replace(EXPERT, str(i)) for i in range(shape[0])]
    return dict.fromkeys(names, shape[1:])


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a folder that hold a parameter of ours."""

    parts: dict[str, Stored]  # by name of theirs, in order: one tensor, or one of each expert
    stacked: bool
    shape: list[int]  # of the parameter
    layout: Any = None  # a models/family.py::TensorLayout, if the family declares one

    def read(self, box: tuple[slice, ...] = ()) -> Tensor:
        """Read this box of the parameter, or all of it. Raises InputError where a file has changed
        since its header was checked."""
        if self.layout is not None:
            whole = tuple(slice(0, size) for size in self.shape)
            return self.layout.read(box or whole, self._read_part)
        if not self.stacked:
            (stored,) = self.parts.values()
            return _read_slice(stored, box)
        experts = box[0] if box else slice(None)
        of_experts = list(self.parts.values())[experts]
        weights = [_read_slice(stored, box[1:]) for stored in of_experts]
        return torch.stack(weights)

    def _read_part(self, name: str, box: tuple[slice, ...]) -> Tensor:
        return _read_slice(self.parts[name], box)


def weights(
    folder: Path, family: Any, args: Any, shapes: dict[str, list[int]]
) -> dict[str, WeightFiles]:
    """Return the stored tensors of each parameter of ours, after checking that the folder has all
    of them and nothing else. shapes: those that they must have.

    Raises InputError.
    """
    there = _of_text(inventory(folder), family)
    names = _names_in(folder, family, args, there)
    ignored = family.hf_ignored(args)
    found = {}
    for name, stored in there.items():
        if name in names.values() or not re.fullmatch(ignored, name):
            found[name] = (stored.dtype, stored.shape)
    layouts = family.hf_layouts(args, there)
    parts_of: dict[str, Shapes] = {}  # by our name: the shapes of their tensors
    wanted: Shapes = {}
    types: dict[str, tuple[str, ...]] = {}
    for ours, theirs in names.items():
        layout = layouts.get(ours)
        if layout is None:
            parts_of[ours] = in_files(theirs, shapes[ours])
        else:
            parts_of[ours] = layout.files(shapes[ours])
            types |= dict.fromkeys(parts_of[ours], layout.types)
        wanted |= parts_of[ours]
    check_tensors(folder, found, wanted, types)
    files = {}
    for ours, parts in parts_of.items():
        stored_parts = {name: there[name] for name in parts}
        stacked = EXPERT in names[ours]
        files[ours] = WeightFiles(stored_parts, stacked, shapes[ours], layouts.get(ours))
    return files


def _names_in(folder: Path, family: Any, args: Any, there: dict[str, Stored]) -> dict[str, str]:
    """Return Hugging Face's names of our parameters, in a folder with these tensors. A tied matrix
    may be there under either of its two names, as in transformers. Raises InputError for a model
    that is not tied and has one of the two alone."""
    names = family.hf_names(args)
    embedding, head = family.hf_tied
    if args.tied_embeddings and head in there and embedding not in there:
        return {ours: head if theirs == embedding else theirs for ours, theirs in names.items()}
    if not args.tied_embeddings and embedding in there and head not in there:
        raise InputError(
            f"{folder} has no {head}, and its config.json does not say that {embedding} stands for "
            "it (tie_word_embeddings = true): transformers would make one of random numbers"
        )
    return names


def _read_slice(stored: Stored, box: tuple[slice, ...]) -> Tensor:
    """Read this box of a tensor, or all of it. The file is mapped for this read alone, so that its
    pages are freed afterwards."""
    try:
        with safe_open(stored.file, "pt") as file:
            return file.get_slice(stored.name)[box] if box else file.get_tensor(stored.name)
    except (SafetensorError, IndexError) as error:
        raise InputError(f"{stored.file}: {error}") from None


def load(
    folder: Path,
    model: nn.Module,
    families: Mapping[str, Any],
    name: str,
    args: Any,
    group: dist.ProcessGroup,
) -> str:
    """Fill a live model, on any mesh, from a folder of Hugging Face's; returns its absolute path,
    for the record.

    name: of the model's family among these. Every rank of `group` (a gloo group) calls it. Rank 0
    reads the headers for all; then each reads its own slices. Raises InputError on all ranks: after
    a folder that does not fit nothing has changed, after an unreadable byte the model is useless.
    """
    folder = Path(folder).resolve()
    live = base_of(model)
    own = {name: {"shape": list(t.shape), "dtype": CODES[t.dtype]} for name, t in live.items()}
    # of a pipeline each stage has some
    rows = storage.share_rows(own, group)
    shapes = {name: row["shape"] for name, row in rows.items()}

    def checked() -> dict[str, WeightFiles]:
        check_model(folder, families, name, asdict(args))
        return weights(folder, families[name], args, shapes)

    try:
        files = on_rank_0(group, checked)
    except InputError as failure:
        raise InputError(f"checkpoint.load_hf: {failure}") from None
    try:
        on_every_rank(group, _read_slices, folder, files, live)
    except InputError as failure:
        raise InputError(f"checkpoint.load_hf: {folder} could not be read: {failure}") from None
    logging.getLogger("plumbline").info(f"the weights of {folder}")
    return str(folder)


def base_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the live tensors of a model, without those of its adapters (models/lora.py)."""
    return {name: live for name, live in model.state_dict().items() if not is_adapter(name)}


def _read_slices(folder: Path, files: dict[str, WeightFiles], live: dict[str, Tensor]) -> None:
    """Fill this rank's shards of the live tensors. Raises InputError."""
    try:
        for parameter, tensor in live.items():
            offset, shape = storage.box_of(parameter, tensor)
            ranges = zip(offset, shape, strict=True)
            box = tuple(slice(start, start + length) for start, length in ranges)
            storage.local(tensor).copy_(files[parameter].read(box))
    except OSError as failure:
        raise InputError(f"{failure.filename or folder}: {failure.strerror or failure}") from None


# --------------------------------------------------------------------------------------------------
# out


def read_whole(path: Path | Key, manifest: dict, names: Iterable[str]) -> Iterator[Tensor]:
    """Yield these tensors of a checkpoint, in order, assembled from the parts of all ranks, each
    block verified.

    They are read in groups that need no more memory than the largest tensor, because a group opens
    each file once: the checkpoint of thousands of ranks has as many files, and a header in each.
    Raises Damaged.
    """
    tensors = manifest["tensors"]
    sizes = {}
    for name in names:
        row = tensors[name]
        sizes[name] = verify.nbytes(row["dtype"], row["shape"])
    for group in split(sizes, max(sizes.values(), default=0)):
        whole = {}
        boxes = {}
        for name in group:
            shape = tensors[name]["shape"]
            whole[name] = torch.empty(shape, dtype=DTYPES[tensors[name]["dtype"]])
            boxes[name] = ([0] * len(shape), list(shape))
        storage.read(path, manifest, boxes, whole)
        for name in group:
            yield whole.pop(name)


def write_safetensors(
    path: Path,
    shapes: dict[str, list[int]],
    dtypes: Mapping[str, torch.dtype],
    tensors: Iterator[Tensor],
) -> None:
    """Write a safetensors file of the next `tensors`, as many as there are shapes. They are taken
    one after the other: the library's own writer wants all of them in memory. Synced to disk. The
    format: https://huggingface.co/docs/safetensors."""
    table: dict = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + math.prod(shape) * dtypes[name].itemsize
        code = CODES[dtypes[name]]
        table[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            file.write(storage.as_bytes(next(tensors).to(dtypes[name])))
        file.flush()
        os.fsync(file.fileno())


def split(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Split the names, in order, into groups of at most `limit` bytes; a larger tensor is a group
    alone."""
    groups: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if groups[-1] and total + size > limit:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    return groups


def config_of(family: Any, args: Any) -> dict[str, Any]:
    """Return the fields of config.json. Raises InputError for a model that transformers does not
    have: call it before training."""
    try:
        return family.hf_config(args)
    except ValueError as error:
        raise InputError(f"the model cannot be written for Hugging Face: {error}") from None


@dataclass(frozen=True)
class TensorSource:
    """The tensors, by our names, of a model that is written for Hugging Face, and how to read
    them."""

    shapes: Shapes
    dtypes: Mapping[str, torch.dtype]
    """The types in which they are written."""
    read: Callable[[Iterable[str]], Iterator[Tensor]]
    """(names) -> these tensors, whole, in order. One is in memory at a time."""


def source_of(path: Path | Key, manifest: dict, dtype: torch.dtype) -> TensorSource:
    """Return the tensors of a checkpoint as a source that is written in this type."""
    rows = state.select(manifest["tensors"], "model", ())
    shapes = {name.removeprefix("model."): row["shape"] for name, row in rows.items()}

    def read(names: Iterable[str]) -> Iterator[Tensor]:
        return read_whole(path, manifest, [f"model.{name}" for name in names])

    return TensorSource(shapes, dict.fromkeys(shapes, dtype), read)


def export(
    path: Path | Key,
    out: Path,
    family: Any,
    dtype: torch.dtype,
    files: dict[str, dict],
    limit: int = SHARD_SIZE,
    progress: Callable[[int], object] = lambda n: None,
) -> None:
    """Write the model of one checkpoint, saved on any mesh, as a folder for `from_pretrained`, in
    one process.

    files: the tokenizer's (`data/hf_tokenizer.py::files`), by name; they may be missing. `progress`
    is called with the bytes read. The folder appears when it is whole. Raises InputError, with
    nothing left behind.
    """
    out = Path(out)
    check_is_new(out)
    with verify.refuse_damage(path):
        manifest = verify.read_manifest(path)
    numbers = manifest["facts"].get("must_match", {}).get("model")
    if not numbers:
        raise InputError(f"{path} does not say which model it holds, so it cannot be exported")
    state.check_numbers(path, manifest)
    args = family.Args(**numbers)
    source = source_of(path, manifest, dtype)
    model = Export(source, family, args, config_of(family, args), files)
    write_model(path, out, model, limit, progress)


def check_is_new(out: Path) -> None:
    """Raise InputError where the folder to write exists already, and is not empty."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"{out} exists already: give the name of a new folder")


@dataclass(frozen=True)
class Export:
    """What a model's folder for Hugging Face is made of."""

    source: TensorSource
    family: Any
    args: Any
    config: dict[str, Any]  # of config.json
    files: Mapping[str, dict | str | Path]  # a text is written as it is, the file at a path copied


def write_model(
    path: Path | Key,
    out: Path,
    model: Export,
    limit: int = SHARD_SIZE,
    progress: Callable[[int], object] = lambda n: None,
) -> None:
    """Write a model from any source, as `export` does. path: the checkpoint, for messages. Raises
    InputError, with nothing left behind."""
    with verify.refuse_damage(path, f"{path} could not be exported to {out}"):
        theirs = model.family.hf_names(model.args)
        shapes = model.source.shapes
        if unnamed := sorted(shapes.keys() - theirs.keys()):
            raise InputError(
                f"{path} cannot be exported: the published format {model.family.hf_types[0]} has no "
                f"name for {', '.join(unnamed[:4])}{', ...' * (len(unnamed) > 4)} (`hf_names` in "
                "models/formats/)"
            )
        if missing := sorted(theirs.keys() - shapes.keys()):
            raise InputError(
                f"{path} does not hold the tensors of its model: {missing[:4]} are missing"
            )
        with disk.new_folder(out) as folder:
            _write_folder(folder, model, limit, progress)


class ExportStopped(Exception):
    """Ends an export that is not to go on."""


def export_newest(
    cfg: Config, family: Any, files: dict[str, dict], stops: Callable[[], bool]
) -> bool:
    """Export the newest of a run's checkpoints to a folder of its name in hf/, unless it is there
    already: a run that has ended and is started again has nothing to do. Returns whether it is
    there. family and files: as in `export`; stops: whether the run is to stop, so that the next
    start makes the export."""
    folder = Path(cfg.run.folder)
    dtype = cfg.checkpoint.export_hf
    store = cfg.checkpoint.store
    path = verify.newest(location(store) if store else folder / "checkpoints")
    out = folder / "hf" / path.name
    if out.exists():
        return True

    def progress(_: int) -> None:
        if stops():
            raise ExportStopped

    for left in out.parent.glob(f"{disk.DRAFT}*-{path.name}"):  # by a start that was killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        progress(0)
        export(path, out, family, getattr(torch, dtype), files, progress=progress)
    except ExportStopped:
        logger.warning(f"{out} is left out, since the run is to stop: the same command makes it")
        return False
    logger.info(f"the model in {dtype} for Hugging Face: {out}")
    return True


def _write_folder(
    folder: Path, model: Export, limit: int, progress: Callable[[int], object]
) -> None:
    source = model.source
    files = model.files
    layouts = model.family.hf_layouts(model.args, ())
    ours: dict[str, list[str]] = {}  # name of theirs -> the parameters that are in it
    for name, hf in model.family.hf_names(model.args).items():
        ours.setdefault(hf, []).append(name)

    def read() -> Iterator[Tensor]:
        in_order = [name for names in ours.values() for name in names]
        tensors = source.read(in_order)
        for hf, names in ours.items():
            parts = []
            for name in names:
                tensor = next(tensors)
                progress(tensor.nbytes)
                parts.append(tensor.to(source.dtypes[name]))
            layout = layouts.get(names[0])
            if layout is not None:
                parts = [layout.join(parts)]
            yield from parts[0].unbind(0) if EXPERT in hf else parts
            del tensor, parts  # the next ones are read after these are gone

    shapes: Shapes = {}
    dtypes: dict[str, torch.dtype] = {}
    for hf, names in ours.items():
        shape = source.shapes[names[0]]
        layout = layouts.get(names[0])
        its_files = in_files(hf, shape) if layout is None else layout.files(shape)
        shapes |= its_files
        dtypes |= dict.fromkeys(its_files, source.dtypes[names[0]])
    sizes = {}  # bytes of each tensor
    for name, shape in shapes.items():
        sizes[name] = math.prod(shape) * dtypes[name].itemsize
    shards = split(sizes, limit)
    tensors = read()
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = ONE_FILE
        if len(shards) > 1:
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        of_shard = {name: shapes[name] for name in shard}
        write_safetensors(folder / file, of_shard, dtypes, tensors)
        weight_map |= dict.fromkeys(shard, file)
    generation: Any = files.get("generation_config.json", NO_TOKENS)
    tokens = {key: generation[key] for key in NO_TOKENS if key in generation}
    documents = dict(files) | {"generation_config.json": generation}
    dtype_name = str(main_dtype(sizes, dtypes)).removeprefix("torch.")
    documents["config.json"] = (
        model.config | tokens | {"dtype": dtype_name, "torch_dtype": dtype_name}
    )
    if len(shards) > 1:
        parameters = sum(math.prod(shape) for shape in shapes.values())
        totals = {"total_parameters": parameters, "total_size": sum(sizes.values())}
        documents[INDEX] = {"metadata": totals, "weight_map": weight_map}
    for name, document in documents.items():
        if isinstance(document, Path):
            shutil.copyfile(document, folder / name)
            continue
        with open(folder / name, "x", encoding="utf-8") as text:
            if isinstance(document, str):  # a template
                text.write(document)
            else:
                json.dump(document, text, indent=2, ensure_ascii=False)


def main_dtype(sizes: dict[str, int], dtypes: dict[str, torch.dtype]) -> torch.dtype:
    """Return the type in which a model has most of its bytes: the one that config.json names."""
    by_type: dict[torch.dtype, int] = {}
    for name, size in sizes.items():
        by_type[dtypes[name]] = by_type.get(dtypes[name], 0) + size
    return max(by_type, key=lambda dtype: by_type[dtype])
