"""Load the adapters of a run together with their base, for tools: one process, one tensor in memory
at a time.

A base with its adapters is one model: W + alpha / rank * B A for every adapted weight W, computed in
float32. `python -m tools.convert lora-merge` writes it for Hugging Face in the types of the base, and
`tools.generate` samples from it. The base is hashed while it is read, and refused
if it is not the one that the run has recorded.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from checkpoint import adapters, hf, state
from checkpoint.storage import DTYPES
from configs.schema import InputError
from models import FORMATS, MODELS
from reliability.objects import Key
from tools import new_checkpoint, places

# of the files in a Hugging Face folder that say how its model is used: no code, and no weights
COPIED = (".json", ".jinja", ".model", ".txt")


class Adapter(NamedTuple):
    """Adapter of one parameter W: the model computes with W + alpha / rank * B A."""

    a: Tensor  # [rank, in], of experts [X, rank, in]
    b: Tensor  # [out, rank], of experts [X, out, rank]


def by_parameter(tensors: dict[str, Tensor]) -> dict[str, Adapter]:
    """Return the adapters by the name of the parameter that they adapt.

    tensors: `N.lora_a` and `N.lora_b` of a linear layer N, whose parameter is `N.weight`;
    `N_lora_a` and `N_lora_b` of a parameter N of experts (models/lora.py).
    """
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith("lora_a"):
            continue
        stem = name.removesuffix("lora_a")
        parameter = stem + "weight" if stem.endswith(".") else stem.removesuffix("_")
        found[parameter] = Adapter(tensor, tensors[stem + "lora_b"])
    return found


def add(weight: Tensor, adapter: Adapter, scale: float) -> Tensor:
    """weight [out, in], or [X, out, in] of experts -> float32. scale: alpha / rank."""
    a = adapter.a.float()
    b = adapter.b.float()
    if weight.ndim == 3:
        return torch.baddbmm(weight.float(), b, a, alpha=scale)
    return torch.addmm(weight.float(), b, a, alpha=scale)


def has_adapters(manifest: dict) -> bool:
    """Return True for a checkpoint that holds adapters and no model."""
    return "base" in manifest["facts"]


@dataclass(frozen=True)
class AdaptedRun:
    """Facts that a checkpoint of adapters records about itself and its base."""

    path: Path | Key
    family: Any  # a models/family.py::Family
    args: Any
    rank: int
    alpha: float
    base: dict[str, str]  # folder, dtype and hash of the base that they were trained on
    tensors: dict[str, Tensor]  # by our names

    @property
    def formats(self) -> Any:
        """Return the model family's mapping to Hugging Face names. Raises InputError."""
        return hf.formats_of(FORMATS, self.family.name)

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the base, on `meta`."""
        with torch.device("meta"):
            return dict(self.family.build(self.args).named_parameters())

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which the run kept this parameter of the base: a parameter that is
        trained elsewhere has the run's dtype, a router's bias its own
        (parallelisms/lora.py::keep_in)."""
        parameter = self.parameters[name]
        return DTYPES[self.base["dtype"]] if parameter.requires_grad else parameter.dtype

    def size_of(self, source: hf.TensorSource) -> int:
        """Return the bytes of all the tensors that a source which `merged` returned reads."""
        adapted = by_parameter(self.tensors)
        total = 0
        for name, parameter in self.parameters.items():
            dtype = torch.float32 if name in adapted else source.dtypes[name]
            total += parameter.numel() * dtype.itemsize
        return total

    def merged(self, folder: Path | Key) -> hf.TensorSource:
        """Return the whole model, base and adapters merged, as tensors that are read one at a time.
        The base has all the digits of its files, also where the run has rounded it to compute.

        folder: the base, wherever it is now. Raises InputError, also later, while it is read.
        """
        if places.is_hugging_face(folder):
            source = self.of_hugging_face(folder)
        else:
            source = of_checkpoint(folder, self.parameters)
        adapter_of = by_parameter(self.tensors)
        scale = self.alpha / self.rank

        def read(names: Iterable[str]) -> Iterator[Tensor]:
            digest = 0
            left = set(source.shapes)
            names = list(names)
            for name, weight in zip(names, source.read(names), strict=True):
                trained_on = weight.to(self.dtype_of(name))
                digest += int(adapters.hash_of({name: trained_on}, None, None), 16)
                left.remove(name)
                if not left:
                    self.check_base(folder, digest)
                adapter = adapter_of.get(name)
                yield weight if adapter is None else add(weight, adapter, scale)

        return hf.TensorSource(source.shapes, source.dtypes, read)

    def check_base(self, folder: Path | Key, digest: int) -> None:
        """Raise InputError unless the hashes of all weights add up to that of the run's base."""
        found = f"{digest % 2**64:016x}"
        if found != self.base["hash"]:
            raise InputError(
                f"the adapters of {self.path} were trained on the weights of "
                f"{self.base['folder']} (hash {self.base['hash']}), and those of {folder} are others "
                f"(hash {found})"
            )

    def of_hugging_face(self, folder: Path) -> hf.TensorSource:
        """Read a folder's weights as they are; quantised ones as bfloat16. Raises InputError."""
        hf.check_model(folder, FORMATS, self.family.name, asdict(self.args))
        shapes = {name: list(parameter.shape) for name, parameter in self.parameters.items()}
        files = hf.weights(folder, self.formats, self.args, shapes)
        dtypes = {}
        for name, of_parameter in files.items():
            stored = next(iter(of_parameter.parts.values()))
            dtypes[name] = DTYPES[stored.dtype] if stored.dtype in hf.WIDENED else torch.bfloat16

        def read(names: Iterable[str]) -> Iterator[Tensor]:
            for name in names:
                yield files[name].read()

        return hf.TensorSource(shapes, dtypes, read)


def files_of_base(folder: Path) -> tuple[dict[str, Any], dict[str, dict | Path]]:
    """Return config.json of an unquantised Hugging Face folder and its other files except the
    weights, for `hf.write_model`. Raises InputError."""
    config = hf.read_json(folder / "config.json")
    config.pop("quantization_config", None)
    files: dict[str, dict | Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in COPIED and path.name not in ("config.json", hf.INDEX) and path.is_file():
            files[path.name] = path
    name = "generation_config.json"
    tokens = {key: config[key] for key in hf.NO_TOKENS if key in config}
    files[name] = hf.read_json(folder / name) if name in files else tokens
    return config, files


def of_checkpoint(folder: Path | Key, parameters: dict[str, Tensor]) -> hf.TensorSource:
    """Return the weights of a checkpoint in the types that it stores. Raises InputError."""
    path, manifest = new_checkpoint.newest(folder)
    adapters.check_whole(path, manifest)
    wanted = {f"model.{name}": parameter for name, parameter in parameters.items()}
    state.check_fits(path, manifest, adapters.in_stored_types(wanted, manifest), "model")
    rows = state.select(manifest["tensors"], "model", ())
    dtypes = {name.removeprefix("model."): DTYPES[row["dtype"]] for name, row in rows.items()}
    source = hf.source_of(path, manifest, torch.float32)
    return hf.TensorSource(source.shapes, dtypes, source.read)


def open_run(folder: Path | Key) -> AdaptedRun:
    """Open the adapters of a run's newest checkpoint, or of one checkpoint. Raises InputError."""
    path, manifest = new_checkpoint.newest(folder)
    tensors = adapters.read(path)
    family, args = state.model_of(path, manifest, MODELS)
    facts = manifest["facts"]
    numbers = facts["must_match"]["lora"]
    return AdaptedRun(path, family, args, numbers["rank"], numbers["alpha"], facts["base"], tensors)
