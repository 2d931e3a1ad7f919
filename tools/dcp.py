"""Read and write folders of torch.distributed.checkpoint (DCP): read without running code in them,
written so that PyTorch alone reads them (`torch.distributed.checkpoint.load`, `format_utils`).

    .metadata       a pickle: the shape and type of each tensor, its chunks, and the place of each chunk
    __0_0.distcp    of each rank: chunks and plain values, one archive of torch.save after the other

A pickle can run any program. So .metadata is read by an unpickler that knows DCP's own classes by
name, puts records without code in their place, and refuses every other name before it is looked up.
The archives are read with torch's `weights_only`. One tensor is in memory at a time.
"""

import io
import itertools
import math
import os
import pickle
import pickletools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from checkpoint.layout import is_counts
from checkpoint.storage import CODES
from checkpoint.verify import open_regular
from configs.schema import InputError

METADATA = ".metadata"
FILE = "__0_0.distcp"
# A value's name in parts, as DCP flattens a dict of dicts; joined by dots it is the key in the folder.
Key = tuple[str, ...]


# --------------------------------------------------------------------------------------------------
# reading .metadata


class Pickled:
    """Stand-in for a pickled object of DCP's: its pickled fields and no code. The stand-in classes
    are created per file, so a file cannot change anything outside of itself."""

    state: Any = None

    def __init__(self, *_: object):
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


OF_METADATA = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "_MEM_FORMAT_ENCODING",
    "MetadataIndex",
    "StorageMeta",
)
DCP = "torch.distributed.checkpoint"
RECORDS = {(f"{DCP}.metadata", name) for name in OF_METADATA}
RECORDS |= {(f"{DCP}.filesystem", "_StorageInfo"), (f"{DCP}.filesystem", "_StoragePrefix")}
# until torch 2.3 these two stood elsewhere
SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
RECORDS |= {(SHARDED, "TensorProperties"), (SHARDED, "MEM_FORMAT_ENCODING")}
# the path to which it was saved, which is never read
RECORDS |= {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}
RECORDS |= {("pathlib", "WindowsPath"), ("pathlib._local", "WindowsPath")}
RECORDS |= {("torch.serialization", "_get_layout")}  # with the name of a layout
# Python 3.11 pickles a member of an enumeration with it. A record replaces this, too
RECORDS |= {("builtins", "getattr")}
VALUES: dict[tuple[str, str], Any] = {("torch", "Size"): tuple}
for _dtype in CODES:
    VALUES["torch", str(_dtype).removeprefix("torch.")] = _dtype


LARGEST = 1 << 30  # bytes of .metadata
SLOTS = ("PUT", "BINPUT", "LONG_BINPUT")  # opcodes for which an unpickler grows its memo


class Refused(Exception):
    """Raised for a pickle that names a class outside DCP's list."""


class MetadataUnpickler(pickle.Unpickler):
    """Admits the names of RECORDS and VALUES, and no other: none of RECORDS is imported."""

    def __init__(self, stream: Any):
        super().__init__(stream)
        self.records: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        place = module, name
        if place in VALUES:
            return VALUES[place]
        if place not in RECORDS:
            raise Refused(
                f"it names {module}.{name}, which is none of DCP's classes and could run a program"
            )
        if place not in self.records:
            self.records[place] = type(name, (Pickled,), {})
        return self.records[place]


def check_sizes(content: bytes) -> None:
    """Raise Refused or ValueError for a pickle that would take more memory than its bytes account for:
    an opcode may say that so many bytes follow, or that a value is kept in a slot of any number."""
    if len(content) > LARGEST:
        raise Refused(f"it has more than {LARGEST:,} bytes")
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in SLOTS and int(argument) > len(content):
            raise Refused(f"it keeps a value in slot {argument:,} of a memo")


def unpickled(path: Path) -> dict[str, Any]:
    """Return the fields of DCP's Metadata. Raises InputError."""
    try:
        with open_regular(path) as stream:
            content = stream.read(LARGEST + 1)
        check_sizes(content)
        record = MetadataUnpickler(io.BytesIO(content)).load()
        if type(record).__name__ != "Metadata" or not isinstance(record.state, dict):
            raise ValueError("it holds no Metadata")
        return record.state
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except Refused as error:
        raise InputError(f"{path} is not read: {error}") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise InputError(f"{path} is not DCP's: {error!r}") from None


# --------------------------------------------------------------------------------------------------
# a folder


class Archive(NamedTuple):
    """Location of one archive: file, offset and length."""

    file: str
    start: int
    length: int


class Chunk(NamedTuple):
    offset: list[int]
    shape: list[int]
    place: Archive


class StoredTensor(NamedTuple):
    dtype: torch.dtype
    shape: list[int]
    chunks: list[Chunk]


class Folder:
    """Contents of a DCP folder: tensors and plain values by key, with their locations in the files.
    Raises InputError for a folder that is not one."""

    def __init__(self, path: Path):
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        self.values: dict[str, Archive] = {}
        metadata = path / METADATA
        if not metadata.exists():
            raise InputError(f"{path} has no {METADATA}")
        fields = unpickled(metadata)
        try:
            self._take(fields)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{metadata} is not DCP's: {error}") from None

    def _take(self, fields: dict[str, Any]) -> None:
        places: dict[tuple[str, tuple], Archive] = {}
        for index, info in fields["storage_data"].items():
            offset = index.state.get("offset")
            places[index.state["fqn"], tuple(offset or ())] = self._place(info.state)
        for name, stored in fields["state_dict_metadata"].items():
            if type(name) is not str:
                raise ValueError(f"{name!r} is no name")
            if type(stored).__name__ == "BytesStorageMetadata":
                self.values[name] = places[name, ()]
                continue
            shape = list(stored.state["size"])
            dtype = stored.state["properties"].state[0]
            if not is_counts(shape) or dtype not in CODES:
                raise ValueError(f"{name} has the shape {shape} and the type {dtype}")
            chunks = []
            for chunk in stored.state["chunks"]:
                offset = list(chunk.state["offsets"])
                sizes = list(chunk.state["sizes"])
                chunks.append(Chunk(offset, sizes, places[name, tuple(offset)]))
            self.tensors[name] = StoredTensor(dtype, shape, chunks)
            check_chunks(name, shape, chunks)

    def _place(self, info: dict[str, Any]) -> Archive:
        """Raise ValueError for a name that leads out of the folder."""
        if info.get("transform_descriptors"):
            raise ValueError(f"it is transformed by {info['transform_descriptors']}")
        place = Archive(info["relative_path"], info["offset"], info["length"])
        if not re.fullmatch(r"\w[\w.-]*", place.file) or not is_counts(list(place[1:])):
            raise ValueError(f"it names {place.file!r}, which is not a file in its folder")
        return place

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, put together from its chunks. Raises InputError."""
        stored = self.tensors[name]
        # a gap between chunks would stay NaN, and what is not finite is not published
        empty = math.nan if stored.dtype.is_floating_point else 0
        whole = torch.full(stored.shape, empty, dtype=stored.dtype)
        for chunk in stored.chunks:
            part = self._load(name, chunk.place)
            if type(part) is not Tensor or part.dtype != stored.dtype:
                raise InputError(f"{self.path / chunk.place.file}: {name} has another type there")
            if list(part.shape) != chunk.shape:
                raise InputError(f"{self.path / chunk.place.file}: {name} has another shape there")
            target = whole
            for dim, (start, length) in enumerate(zip(chunk.offset, chunk.shape, strict=True)):
                target = target.narrow(dim, start, length)
            target.copy_(part)
        return whole

    def value(self, name: str) -> Any:
        """Return a plain value, or a one-element tensor as a number. Raises InputError."""
        if name in self.values:
            return self._load(name, self.values[name])
        if name in self.tensors and self.tensors[name].shape == []:
            return self.read(name).item()
        raise InputError(f"{self.path} has no {name}")

    def _load(self, name: str, place: Archive) -> Any:
        path = self.path / place.file
        try:
            with open_regular(path) as stream:
                archive: Any = _create_file_view(cast(Any, stream), place.start, place.length)
                return torch.load(archive, map_location="cpu", weights_only=True)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
        except Exception as error:  # torch raises many types for what is no such archive
            first = str(error).strip().splitlines() or [type(error).__name__]
            raise InputError(f"{path}: {name} is damaged: {first[0]}") from None


def check_chunks(name: str, shape: list[int], chunks: list[Chunk]) -> None:
    """Raise ValueError unless the chunks lie inside a tensor of this shape and have as many elements
    as it."""
    total = 0
    for offset, sizes, _ in chunks:
        if not is_counts(offset) or not is_counts(sizes):
            raise ValueError(f"{name} has a chunk at {offset} of shape {sizes}")
        for start, length, whole in zip(offset, sizes, shape, strict=True):
            if start + length > whole:
                raise ValueError(f"{name} has a chunk outside of its shape {shape}")
        total += math.prod(sizes)
    if total != math.prod(shape):
        raise ValueError(f"the chunks of {name} do not have the elements of its shape {shape}")


# --------------------------------------------------------------------------------------------------
# writing


def write(folder: Path, tensors: Iterable[tuple[Key, Tensor]], values: Mapping[Key, Any]) -> None:
    """Write a folder of one rank, in these classes of DCP's, and sync its files. Raises OSError."""
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, Key] = {}
    with open(folder / FILE, "xb") as stream:
        for key, item in itertools.chain(tensors, values.items()):
            name = ".".join(key)
            paths[name] = key
            index = MetadataIndex(name)
            described[name] = BytesStorageMetadata()
            if isinstance(item, Tensor):
                origin = torch.Size([0] * item.ndim)
                index = MetadataIndex(name, origin, 0)
                properties = TensorProperties(item.dtype)
                chunk = ChunkStorageMetadata(origin, item.shape)
                described[name] = TensorStorageMetadata(properties, item.shape, [chunk])
            start = stream.tell()
            # in memory first: an error of the disk would be lost in torch's own writer
            archive = io.BytesIO()
            torch.save(item, archive)
            stream.write(archive.getbuffer())
            places[index] = _StorageInfo(FILE, start, stream.tell() - start)
            del item, archive  # the next tensor is read after this one is gone
        stream.flush()
        os.fsync(stream.fileno())
    metadata = Metadata(described, paths, places, StorageMeta(), CURRENT_DCP_VERSION)
    with open(folder / METADATA, "xb") as stream:
        pickle.dump(metadata, stream)
        stream.flush()
        os.fsync(stream.fileno())
