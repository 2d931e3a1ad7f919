"""Checkpoints of ours as folders of torch.distributed.checkpoint (DCP), and back: the model, AdamW's
moments and the step, under our names or TorchTitan's.

    model.<parameter>, optimizer.<parameter>.<key>, step, plumbline     our names; `plumbline` is JSON:
                                                what else the manifest says, so that it comes back whole
    <parameter>, optimizer.state.<parameter>.<key>, train_state.step    TorchTitan's
    optimizer.param_groups.<parameter>.<option>, lr_scheduler.last_epoch

`dcp.py` reads and writes such folders. The states of random generators stay behind: they mean nothing
on a different mesh.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import tomli
import torch
from torch import Tensor

from checkpoint import hf, state, verify
from checkpoint.storage import CODES, DTYPES
from checkpoint.verify import nbytes
from configs import dropped, stages
from configs.check import architecture, derive
from configs.load import dump, load_config
from configs.schema import Config, InputError
from configs.words import number_of
from models import MODELS, transfer
from models.formats import torchtitan
from parallelisms.dp import master_dtype
from reliability import disk, objects
from tools import adapters, dcp, new_checkpoint
from tools.dcp import Key
from tools.new_checkpoint import progress_bar
from training.optim import first_match, learning_rate
from training.optimizers import ADAMW
from training.rates import rates_of

OURS = "plumbline"  # the value by which a folder is known as ours
KEPT = ("exp_avg", "exp_avg_sq", "step")  # by AdamW, of each parameter
# what of a manifest comes back
RECORDED = ("step", "progress", "facts", "optimizer", "hyperparameters")
STATE = "optimizer.state."
# what else TorchTitan saves: hyperparameters, schedule and data of a run come from its configuration
LEFT_OUT = ("optimizer.param_groups.", "lr_scheduler.", "dataloader.", "train_state.")


# --------------------------------------------------------------------------------------------------
# out


class FolderTensor(NamedTuple):
    """Tensor of a folder."""

    keys: list[Key]  # where it goes
    parts: list[str]  # tensors of the checkpoint that are in it
    join: Callable[[list[Tensor]], Tensor]


@dataclass
class Written:
    """Parts of a checkpoint as they are written into a folder."""

    items: list[FolderTensor]
    values: dict[Key, Any]
    zeros: dict[Key, int] = field(default_factory=dict)  # further tensors, float32 [n]

    @property
    def parts(self) -> list[str]:
        return [part for item in self.items for part in item.parts]


def to_dcp(source: Path | objects.Key, out: Path, names: str, step: int | None) -> str:
    """Returns what was done, in a sentence. Raises InputError, with nothing left behind."""
    path, manifest = new_checkpoint.newest(source)
    if step is not None:
        path, manifest = new_checkpoint.of_step(source, step)
    if adapters.has_adapters(manifest):
        raise InputError(
            f"{path} holds adapters and no model: lora-merge writes them with their base"
        )
    hf.check_is_new(out)
    written = NAMES[names](path, manifest)
    rows = [manifest["tensors"][name] for name in written.parts]
    size = sum(nbytes(row["dtype"], row["shape"]) for row in rows)
    with (
        verify.refuse_damage(path, f"{path} could not be converted to {out}"),
        disk.new_folder(out) as folder,
        progress_bar(size, path.name) as bar,
    ):
        dcp.write(folder, tensors(path, manifest, written, bar.update), written.values)
    return f"{out}: {number_of(len(rows), 'tensor')} of {path}, {size / 1e9:,.2f} GB"


def tensors(
    path: Path, manifest: dict, written: Written, progress: Callable[[int], object]
) -> Iterator[tuple[Key, Tensor]]:
    """Yield the tensors of a folder with their keys. Those of one item are in memory at a time."""
    whole = hf.read_whole(path, manifest, written.parts)
    for item in written.items:
        parts = [next(whole) for _ in item.parts]
        tensor = item.join(parts)
        progress(sum(part.nbytes for part in parts))
        del parts
        for key in item.keys:
            yield key, tensor
        del tensor
    for key, n in written.zeros.items():
        yield key, torch.zeros(n)


def in_our_names(path: Path, manifest: dict) -> Written:
    items = []
    for name in state.select(manifest["tensors"], "model+optimizer", ()):
        kind, _, rest = name.partition(".")
        key: Key = (kind, rest)
        if kind == "optimizer":
            parameter, _, last = rest.rpartition(".")
            key = (kind, parameter, last)
        items.append(FolderTensor([key], [name], itemgetter(0)))
    record = {key: manifest[key] for key in RECORDED}
    shapes = {item.parts[0]: manifest["tensors"][item.parts[0]]["shape"] for item in items}
    record["tensors"] = shapes
    return Written(items, {("step",): manifest["step"], (OURS,): json.dumps(record)})


def in_torchtitans_names(path: Path, manifest: dict, fused: bool) -> Written:
    family, args = state.model_of(path, manifest, MODELS)
    check_model(str(path), family.name, args)
    if manifest["optimizer"] not in ("AdamW", "none"):
        raise InputError(
            f"{path} has the state of {manifest['optimizer']}, only AdamW's has TorchTitan's names"
        )
    parameters = new_checkpoint.shapes(family.name, args)
    theirs = torchtitan.names(parameters, args)

    written = Written([], {})
    for ours, name in theirs.items():
        keys: list[Key] = [(name,)]
        copies = torchtitan.copies(args).items()
        keys += [(copy,) for copy, original in copies if original == ours]
        join = partial(torchtitan.join, family.name, [ours], args=args)
        written.items.append(FolderTensor(keys, [f"model.{ours}"], join))
    for bias in torchtitan.biases_that_ours_lacks(parameters, args):
        written.zeros[bias,] = args.n_experts
    if manifest["optimizer"] == "none":
        return written
    trained = new_checkpoint.trained(family.name, args)
    options = param_groups(path, manifest, family, args, {n: parameters[n] for n in trained})
    states = torchtitan.states({ours: theirs[ours] for ours in trained}, fused)
    for name, group in states.items():
        join = partial(torchtitan.join, family.name, group, args=args)
        for kept in KEPT:
            key = ("optimizer", f"state.{name}.{kept}")
            parts = [f"optimizer.{ours}.{kept}" for ours in group]
            if kept == "step":
                parts = parts[:1]
            written.items.append(FolderTensor([key], parts, join))
        if any(options[ours] != options[group[0]] for ours in group):
            raise InputError(
                f"{path}: optimizer.lr_multipliers gives {' and '.join(group)} different learning "
                "rates, and TorchTitan has them as one parameter: use --names plumbline"
            )
        for option, value in options[group[0]].items():
            written.values["optimizer", f"param_groups.{name}.{option}"] = value
    written.values |= progress_of(manifest)
    return written


NAMES: dict[str, Callable[[Path, dict], Written]] = {
    "plumbline": in_our_names,
    "torchtitan": partial(in_torchtitans_names, fused=True),
    "torchtitan-unfused": partial(in_torchtitans_names, fused=False),
}


def check_model(where: str, name: str, args: Any) -> None:
    """Raise InputError for a model whose parameters have no names of TorchTitan's."""
    if name not in torchtitan.FAMILIES:
        known = ", ".join(torchtitan.FAMILIES)
        raise InputError(f"{where}: of the family {name} TorchTitan's names are not known: {known}")
    if getattr(args, "mtp_depth", 0):
        raise InputError(
            f"{where}: TorchTitan's names of the layers of model.mtp_depth = {args.mtp_depth} are not "
            "known: train without them, or keep our names (--names plumbline)"
        )


def progress_of(manifest: dict) -> dict[Key, Any]:
    """Return the progress of the run. TorchTitan counts its tokens, too."""
    step = manifest["step"]
    seen = manifest["progress"].get("samples", 0) * manifest["facts"].get("seq_len", 0)
    return {
        ("train_state", "step"): step,
        ("train_state", "ntokens_seen"): seen,
        ("lr_scheduler", "last_epoch"): step,
    }


def param_groups(
    path: Path, manifest: dict, family: Any, args: Any, trained: dict[str, tuple[int, ...]]
) -> dict[str, dict[str, Any]]:
    """Return AdamW's options by parameter, as torch.optim has them. The learning rate is that of
    the next step. trained: shapes of these parameters. Raises InputError for a checkpoint that does
    not know its configuration."""
    try:
        tables = dropped.without(tomli.loads(manifest["facts"]["config"]))
        cfg = derive(Config.model_validate(tables), None)
    except (KeyError, ValueError) as error:
        raise InputError(
            f"{path} does not say how its optimizer was configured: {error!r}"
        ) from None
    next_step = min(manifest["step"], cfg.training.steps - 1)
    lr = learning_rate(next_step, stages.at(cfg, next_step))
    options = {
        "betas": tuple(cfg.optimizer.betas),
        "amsgrad": False,
        "maximize": False,
        "foreach": False,
        "capturable": False,
        "differentiable": False,
        "fused": True,
        "decoupled_weight_decay": True,
    }
    scales = transfer.adapted(family, args, cfg.model).scales
    groups = {}
    for name, shape in trained.items():
        rates = rates_of(cfg.optimizer, ADAMW, name, shape, scales.get(name))
        groups[name] = options | {
            "lr": lr * rates.lr,
            "initial_lr": cfg.optimizer.lr * rates.lr,
            "eps": cfg.optimizer.eps * rates.eps,
            "weight_decay": 0.0,
        }
        if first_match(family.decay, name):
            groups[name]["weight_decay"] = cfg.optimizer.weight_decay * rates.decay
    return groups


# --------------------------------------------------------------------------------------------------
# in


@dataclass
class Arriving:
    """Parts of a folder as they enter a checkpoint of ours."""

    live: dict[str, Tensor]  # on `meta`, by the names of a checkpoint
    read: Callable[[str], Tensor]
    head: dict[str, Any]  # of the manifest


def from_dcp(source: Path, out: Path, config: Path | None) -> str:
    """Returns what was done, in a sentence. Raises InputError, with nothing left behind."""
    folder = dcp.Folder(source)
    if OURS in folder.values:
        arriving = from_ours(folder)
    elif config is None:
        raise InputError(
            f"{source} does not say which model it holds: describe it with --config, in our options"
        )
    else:
        arriving = from_torchtitans(folder, load_config([str(config)]))
    live, head = arriving.live, arriving.head
    path, size = new_checkpoint.write(out, source, live, arriving.read, **head)
    said = f"{path}: {number_of(len(live), 'tensor')} of {source}, {size / 1e9:,.2f} GB"
    if head["step"] and "data" not in head["progress"]:
        said += (
            f"\nit does not say which data it has seen: to go on from step {head['step']}, set "
            "data.allow_splice = true, and the data begin at their first sample"
        )
    return said


def from_ours(folder: dcp.Folder) -> Arriving:
    try:
        record = json.loads(folder.value(OURS))
        head = {key: record[key] for key in RECORDED}
        family, args = state.model_of(folder.path, head, MODELS)
        wanted = {name: list(shape) for name, shape in record["tensors"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{folder.path}: {OURS} is not as `to-dcp` writes it: {error!r}") from None
    check(folder.path, folder.tensors, wanted, tuple(DTYPES))
    of_model = {f"model.{name}": s for name, s in new_checkpoint.shapes(family.name, args).items()}
    check(folder.path, state.select(folder.tensors, "model", ()), of_model, tuple(DTYPES))
    live = {}
    for name, shape in wanted.items():
        live[name] = torch.empty(shape, dtype=folder.tensors[name].dtype, device="meta")
    return Arriving(live, folder.read, head)


# tensor of our checkpoint -> its key, and the parameters of ours that are in the tensor there
Places = dict[str, tuple[str, list[str]]]


def of_moments(
    states: dict[str, list[str]], shapes: dict[str, list[int]]
) -> tuple[Places, dict[str, list[int]]]:
    """Return the places of AdamW's state, and the shape of each key. states: what TorchTitan has a
    state for -> the parameters of ours that are in it."""
    places: Places = {}
    wanted = {}
    for name, group in states.items():
        for kept in KEPT:
            key = f"{STATE}{name}.{kept}"
            places |= {f"optimizer.{ours}.{kept}": (key, group) for ours in group}
            of_group = [shapes[ours] for ours in group]
            wanted[key] = [] if kept == "step" else torchtitan.joined_shape(of_group)
    return places, wanted


def from_torchtitans(folder: dcp.Folder, cfg: Config) -> Arriving:
    family = MODELS[cfg.model.family]
    args = family.Args(**architecture(cfg.model))
    check_model("--config", cfg.model.family, args)
    shapes = new_checkpoint.shapes(family.name, args)
    release = release_of(folder, shapes, args)
    theirs = torchtitan.names(shapes, args, release)
    places = {f"model.{ours}": (name, [ours]) for ours, name in theirs.items()}
    wanted = {name: shapes[ours] for ours, name in theirs.items()}  # key -> shape
    has_moments = any(key.startswith(STATE) for key in folder.tensors)
    if has_moments:
        trained = {ours: theirs[ours] for ours in new_checkpoint.trained(family.name, args)}
        fused = any(torchtitan.FUSED in key for key in folder.tensors)
        more_places, more_wanted = of_moments(torchtitan.states(trained, fused), shapes)
        places |= more_places
        wanted |= more_wanted
    # keys that may exist, and have no parameter here
    copies = {}
    for key, original in torchtitan.copies(args, release).items():
        if key in folder.tensors:
            copies[key] = theirs[original]
            wanted[key] = shapes[original]
    biases = []
    for key in torchtitan.biases_that_ours_lacks(shapes, args, release):
        if key in folder.tensors:
            biases.append(key)
            wanted[key] = [args.n_experts]
    found = {}
    for key, stored in folder.tensors.items():
        is_table = re.fullmatch(torchtitan.TABLES, key)
        if not key.startswith(LEFT_OUT) and not is_table:
            found[key] = stored
    dtype = master_dtype(cfg.training)
    check(folder.path, found, wanted, (*hf.WIDENED, CODES[dtype]))
    check_further(folder, copies, biases)

    live = {name: empty(name, shapes, dtype) for name in places}

    def read(name: str) -> Tensor:
        key, group = places[name]
        parts = torchtitan.split(family.name, group, folder.read(key), args)
        return parts[parameter_of(name)].to(live[name].dtype)

    step = folder.value("train_state.step") if has_moments else 0
    if type(step) is not int or step < 0:
        raise InputError(f"{folder.path}: train_state.step is {step!r}, which is no step")
    facts = {
        "family": family.name,
        "config": dump(cfg),
        "seq_len": cfg.training.seq_len,
        "must_match": {"model": asdict(args)},
    }
    head = {
        "step": step,
        "progress": {"step": step},
        "facts": facts,
        "optimizer": "AdamW" if has_moments else "none",
    }
    return Arriving(live, read, head)


def check(
    path: Path,
    found: dict[str, dcp.StoredTensor],
    wanted: dict[str, list[int]],
    types: tuple[str, ...],
) -> None:
    """Raise InputError unless a folder has the tensors wanted and no others, in some of these
    types."""
    there = {key: (CODES[stored.dtype], stored.shape) for key, stored in found.items()}
    hf.check_tensors(path, there, wanted, dict.fromkeys(wanted, types))


def empty(name: str, shapes: dict[str, list[int]], dtype: torch.dtype) -> Tensor:
    """Return a tensor of our checkpoint without memory."""
    if name.endswith(".step") and name.startswith("optimizer."):
        # torch.optim counts steps in float32 for weights of every dtype
        return torch.empty([], dtype=torch.float32, device="meta")
    return torch.empty(shapes[parameter_of(name)], dtype=dtype, device="meta")


def parameter_of(name: str) -> str:
    """Return the parameter that a tensor of a checkpoint belongs to: `model.<parameter>` or
    `optimizer.<parameter>.<key>`."""
    kind, _, rest = name.partition(".")
    return rest if kind == "model" else rest.rpartition(".")[0]


def release_of(folder: dcp.Folder, parameters: Iterable[str], args: Any) -> str:
    """Return the release of TorchTitan's whose names the folder has, or most of them."""
    shared = {}
    for release in torchtitan.RENAMED:
        names = torchtitan.names(parameters, args, release).values()
        shared[release] = len(folder.tensors.keys() & names)
    return max(shared, key=lambda release: shared[release])


def check_further(folder: dcp.Folder, copies: dict[str, str], biases: list[str]) -> None:
    """Raise InputError if a tensor without a parameter here carries information: a copy that
    differs from its original, or a bias that is not 0. copies: by key, the key of the original."""
    for key, original in copies.items():
        if not torch.equal(folder.read(key), folder.read(original)):
            raise InputError(
                f"{folder.path}: {key} differs from {original}, and the model ties them "
                "(model.tied_embeddings)"
            )
    for key in biases:
        if folder.read(key).count_nonzero():
            raise InputError(
                f"{folder.path}: {key} is not 0, and the routers of this family have no bias here"
            )
