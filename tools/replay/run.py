"""What a run has left behind: its options, its checkpoints, and what it wrote of its steps.

All of it is read. Nothing is written into a run's folder.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint import hf, state, verify
from checkpoint.storage import GENERATOR
from checkpoint.verify import Damaged
from configs.schema import InputError
from models import MODELS
from reliability.objects import Key
from tools import places
from training import digests

JUDGED = {"loss": "loss", "grad_norm": "norm of the gradient"}


@dataclass(frozen=True)
class Recorded:
    """A run, or a checkpoint of it, on a disk or in a store."""

    place: Path | Key
    files: Path  # a folder with its metrics and gradients, if it has any
    options: Path  # a TOML file
    checkpoints: dict[int, Path | Key]  # by step; of the newest attempt

    def metrics(self) -> dict[int, dict[str, float]]:
        """What the run wrote of each step: the last word, where a step was trained again."""
        path = self.files / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines if line.strip()]
        return {row["step"]: row for row in rows if "loss" in row and "grad_norm" in row}

    def gradients(self) -> dict[int, dict[str, list[float]]]:
        """Two numbers of every gradient, by step (training/digests.py). Raises InputError."""
        return digests.recorded(self.files)

    def before(self, step: int) -> list[int]:
        """The steps after which there is a state to begin from, newest first. 0 is that of the
        initial values."""
        saved = [number for number in self.checkpoints if number < step]
        return sorted({*saved, 0}, reverse=True)


def open_run(place: Path | Key, temporary: Path) -> Recorded:
    """place: of a run or of a checkpoint. temporary: for the options of a checkpoint that has lost
    its run. Raises InputError."""
    if (place / "manifest.json").exists():
        manifest = manifest_of(place)
        options = write_options(place, manifest, temporary)
        return Recorded(place, temporary, options, {manifest["step"]: place})
    if not (place / "config.toml").exists():
        raise InputError(f"{place} is neither the folder of a run nor a checkpoint: name one")
    files = places.files_of(place)
    checkpoints: dict[int, Path | Key] = {}
    for path in verify.look(place):
        checkpoints.setdefault(verify.parse_name(path.name)[1], path)
    return Recorded(place, files, files / "config.toml", checkpoints)


def write_options(path: Path | Key, manifest: dict, temporary: Path) -> Path:
    """The options with which a checkpoint was saved, as a file."""
    text = manifest["facts"].get("config")
    if not text:
        raise InputError(f"{path} does not say with which options its run was trained")
    options = temporary / f"{path.name}.toml"
    options.write_text(text, encoding="utf-8")
    return options


def manifest_of(path: Path | Key) -> dict:
    try:
        return verify.read_manifest(path)
    except Damaged as error:
        raise InputError(f"{path} is damaged: {error}") from None


def state_in(path: Path | Key) -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint, every block verified. Raises InputError."""
    manifest = manifest_of(path)
    state.model_of(path, manifest, MODELS)
    names = [name for name in manifest["tensors"] if not name.startswith(GENERATOR)]
    try:
        return dict(zip(names, hf.read_whole(path, manifest, names), strict=True))
    except Damaged as error:
        raise InputError(f"{path} is damaged: {error}") from None
