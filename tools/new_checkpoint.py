"""A checkpoint that no run has written: the tensors come from elsewhere, one at a time. And what the
conversions of a checkpoint share: which one is meant, and a progress bar.

The same writer, manifest and hashes as a run's, of one rank. It is published by a rename when it is
complete.
"""

import shutil
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from checkpoint import state, storage, verify
from checkpoint.storage import NotFinite, SavePlan
from configs.schema import InputError
from data.tokenizer import Tokenizer
from models import MODELS
from reliability import disk
from reliability.objects import Key


def newest(source: Path | Key) -> tuple[Path | Key, dict]:
    """Return the checkpoint that a folder given by the user refers to, and its manifest."""
    return opened(verify.newest(source))


def of_step(source: Path | Key, step: int) -> tuple[Path | Key, dict]:
    """Return the newest attempt at this step, and its manifest. Raises InputError."""
    found = verify.find(source)
    for path in found:
        name = verify.parse_name(path.name)
        if name and name[1] == step:
            return opened(path)
    raise InputError(f"{source} has no checkpoint of step {step}: {found[0].name} is its newest")


def opened(path: Path | Key) -> tuple[Path | Key, dict]:
    with verify.refuse_damage(path):
        manifest = verify.read_manifest(path)
    state.model_of(path, manifest, MODELS)
    return path, manifest


def shapes(family: str, args: Any) -> dict[str, list[int]]:
    """Return the shape of every parameter of a model, by our names."""
    with torch.device("meta"):
        model = MODELS[family].build(args)
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


def trained(family: str, args: Any) -> list[str]:
    """Return the names of the trained parameters: those for which an optimizer keeps state."""
    with torch.device("meta"):
        model = MODELS[family].build(args)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def write(
    out: Path,
    source: Path,
    live: dict[str, Tensor],
    read: Callable[[str], Tensor],
    facts: dict[str, Any],
    tokenizer: Tokenizer | None = None,
    **more: Any,
) -> tuple[Path, int]:
    """Write `OUT/checkpoints/step-...`, and return its path and the bytes of its tensors.

    source: where the tensors come from, for the record and messages. live: tensors on `meta`, by
    the names of a checkpoint. read: returns a tensor by its name, as it is in `live`; InputError
    says what is wrong with it. facts: as a run's. more: what else the manifest says than of a model
    without an optimizer at step 0. Raises InputError, with nothing left behind.
    """
    folder = out / "checkpoints"
    head: dict[str, Any] = {
        "format": verify.FORMAT,
        "step": 0,
        "progress": {"step": 0, "samples": 0},
        "mesh": {"dp_replicate": 1, "dp_shard": 1, "tp": 1},
        "facts": facts,
        "optimizer": "none",
        "hyperparameters": {},
        "parent": str(source.resolve()),
        "ancestors": [],
        "torch": str(torch.__version__),
        "saved": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    } | more
    name = verify.step_name(head["step"], 0)
    temporary = folder / f".tmp-{uuid.uuid4().hex[:8]}-0-{name}"
    size = sum(tensor.nbytes for tensor in live.values())
    try:
        if folder.exists() and verify.published(folder):
            raise InputError(f"{folder} holds checkpoints already: give the name of a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        if tokenizer:
            tokenizer.save(str(out / "tokenizer.json"))
        temporary.mkdir()
        plan = SavePlan.make(live, storage.describe(live, 1, range(1)), 0)
        with progress_bar(size, name) as bar:
            try:
                file = storage.write(temporary, plan, ConvertedParts(live, read, bar.update))
            except (InputError, NotFinite, OSError) as error:
                raise InputError(f"{source} could not be converted to {out}: {error}") from None
        verify.write_manifest(temporary, {**head, "files": [file], "tensors": plan.rows})
        temporary.rename(folder / name)
        disk.sync(folder)
    except OSError as error:
        raise InputError(
            f"{out} cannot be written: {error.filename or ''} {error.strerror}"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder / name, size


class ConvertedParts(storage.OneByOne):
    """Tensors of the source. Each is read when it is written, and then freed."""

    def __init__(
        self,
        live: Mapping[str, Tensor],
        read: Callable[[str], Tensor],
        progress: Callable[[int], object],
    ):
        self.live = live
        self.read = read
        self.progress = progress

    def bytes_of(self, name: str) -> memoryview:
        tensor = self.read(name)
        storage.check_finite({name: tensor})
        self.progress(tensor.nbytes)
        return storage.as_bytes(tensor)


def progress_bar(size: int, name: str) -> tqdm:
    """Return a progress bar over bytes; on a terminal only."""
    return tqdm(total=size, unit="B", unit_scale=True, desc=name, leave=False, disable=None)
