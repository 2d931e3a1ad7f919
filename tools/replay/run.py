"""Read a run's options, its checkpoints, and its records of the steps.

All of it is read. Nothing is written into a run's folder.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import torch

from checkpoint import branches, hf, state, verify
from checkpoint.storage import GENERATOR
from configs.load import load_config
from configs.schema import InputError
from models import MODELS
from reliability import goodput
from reliability.objects import Key, location
from tools import places
from tools.logged import logged
from training import digests

# the tables of options that determine the result of a step on any machine
computed = attrgetter("model", "training", "optimizer", "lr_schedule", "data", "lora")


@dataclass(frozen=True)
class Recorded:
    """Run, or a checkpoint of it, on a disk or in a store."""

    place: Path | Key
    files: Path  # a folder with its metrics and gradients, if it has any
    options: Path  # a TOML file
    # by step; of the newest attempt. A branch begins with the one of its parent
    checkpoints: dict[int, Path | Key]
    is_branch: bool = False

    def metrics(self) -> dict[int, dict[str, float]]:
        """Return the run's metrics by step; of a step that was trained again, the last record."""
        rows = logged(self.files) if (self.files / "metrics.jsonl").exists() else ()
        return {step: values for step, values in rows if {"loss", "grad_norm"} <= values.keys()}

    def gradients(self) -> dict[int, dict[str, list[float]]]:
        """Return two numbers of every gradient, by step (training/digests.py). Raises InputError."""
        return digests.recorded(self.files)

    def trained_by(self, steps: range) -> dict[int, list[int]]:
        """Return the steps of these that each start has trained, by its number; a step that was
        trained again belongs to the last start."""
        newest: dict[int, int] = {}
        if not goodput.folders(self.files):
            return {}
        for past in goodput.read(self.files):
            reached = [line["step"] for line in past.steps]
            if reached:
                trained = range(reached[0] + 1, reached[-1] + 1)
                newest |= {step: past.number for step in steps if step in trained}
        by_start: dict[int, list[int]] = defaultdict(list)
        for step, number in sorted(newest.items()):
            by_start[number].append(step)
        return by_start

    def as_trained(self, steps: range) -> "Recorded":
        """Return the run with the options of the start that trained these steps: a run's folder has
        those of its newest. Raises InputError for steps of starts that computed something else."""
        by_start = self.trained_by(steps)
        files = [self.files / "starts" / f"{number:04d}" / "config.toml" for number in by_start]
        found = [path for path in files if path.exists()]
        if not found:
            return self
        configs = [load_config([str(path)], None, None) for path in found]
        if all(computed(cfg) == computed(configs[0]) for cfg in configs):
            return replace(self, options=found[-1])
        parts = [f"{rows[0]}:{rows[-1]} by start {number}" for number, rows in by_start.items()]
        raise InputError(
            f"{self.place}: its starts had different options, and trained steps {', '.join(parts)}: "
            "name steps of one start that come after a checkpoint of it, or before one"
        )

    def before(self, step: int) -> set[int]:
        """Return the steps after which there is a state to begin from; 0: the initial values."""
        return {0, *(number for number in self.checkpoints if number < step)}


def open_run(place: Path | Key, temporary: Path) -> Recorded:
    """place: of a run or of a checkpoint. temporary: for the options of a checkpoint that has lost
    its run. Raises InputError."""
    places.check_run(place)
    if (place / "manifest.json").exists():
        manifest = manifest_of(place)
        options = write_options(place, manifest, temporary)
        return Recorded(place, temporary, options, {manifest["step"]: place})
    files = places.files_of(place)
    checkpoints: dict[int, Path | Key] = {}
    for path in verify.look(place):
        checkpoints.setdefault(verify.parse_name(path.name)[1], path)
    origin, _ = branches.begun_by(files)
    parent = location(origin)
    named = verify.parse_name(parent.name)
    if named and (isinstance(parent, Key) or parent.is_dir()):
        checkpoints.setdefault(named[1], parent)
    return Recorded(place, files, files / "config.toml", checkpoints, bool(origin))


def write_options(path: Path | Key, manifest: dict, temporary: Path) -> Path:
    """Write the options with which a checkpoint was saved to a file."""
    text = manifest["facts"].get("config")
    if not text:
        raise InputError(f"{path} does not say with which options its run was trained")
    options = temporary / f"{path.name}.toml"
    options.write_text(text, encoding="utf-8")
    return options


def manifest_of(path: Path | Key) -> dict:
    with verify.refuse_damage(path):
        return verify.read_manifest(path)


def state_in(path: Path | Key) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a checkpoint, every block verified. Raises InputError."""
    manifest = manifest_of(path)
    state.model_of(path, manifest, MODELS)
    names = [name for name in manifest["tensors"] if not name.startswith(GENERATOR)]
    with verify.refuse_damage(path):
        return dict(zip(names, hf.read_whole(path, manifest, names), strict=True))
