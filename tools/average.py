"""Make a checkpoint of the averages of a run's weights (training/averages.py), which every tool reads as
it reads the weights."""

from pathlib import Path

import torch
from torch import Tensor

from checkpoint import hf
from checkpoint.storage import DTYPES
from configs.schema import InputError
from configs.words import number_of
from data.tokenizer import Tokenizer
from reliability.objects import Key
from tools import new_checkpoint
from training.averages import corrected

FACTS = ("family", "must_match", "base")  # of a run that are those of its average too


def write(path: Path | Key, manifest: dict, out: Path, tokenizer: Tokenizer | None) -> str:
    """Write `OUT/checkpoints/step-...` without an optimizer: the average of each trained weight, and
    each frozen weight as it is. Returns what was done, in a sentence. Raises InputError."""
    tensors = manifest["tensors"]
    weights = [name for name in tensors if name.startswith("model.")]
    averages = {name: of_average(name) for name in weights if of_average(name) in tensors}
    decay = decay_of(manifest)
    if not averages or not decay:
        raise InputError(
            f"{path} has no averages of its weights: train with optimizer.average_decay, as 0.999"
        )

    def read(name: str) -> Tensor:
        if name not in averages:
            return next(hf.read_whole(path, manifest, [name]))
        total, share = hf.read_whole(path, manifest, [averages[name], f"{averages[name]}_share"])
        if share.item() == 0:
            raise InputError(f"{path} is of step 0: there is no average yet")
        return corrected(total, share.item())

    live = {}
    for name in weights:
        row = tensors[averages.get(name, name)]
        live[name] = torch.empty(row["shape"], dtype=DTYPES[row["dtype"]], device="meta")
    facts = {key: manifest["facts"][key] for key in FACTS if key in manifest["facts"]}
    written, size = new_checkpoint.write(
        out, Path(str(path)), live, read, facts, tokenizer, parent=str(path)
    )
    return (
        f"{written}: averages of {number_of(len(averages), 'weight')} of {path} at a decay of {decay:g}, "
        f"{size / 1e9:,.2f} GB"
    )


def of_average(name: str) -> str:
    return f"optimizer.{name.removeprefix('model.')}.average"


def decay_of(manifest: dict) -> float:
    """Return the decay that the groups of the optimizer were given; 0 without one."""
    groups = manifest["hyperparameters"].values()
    return max((group.get("average_decay", 0.0) for group in groups), default=0.0)
