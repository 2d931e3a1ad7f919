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
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tomli
import torch
from torch import Tensor

from checkpoint import hf, state
from checkpoint.storage import CODES
from checkpoint.verify import Damaged, nbytes
from configs.check import architecture
from configs.load import dump, load_config
from configs.schema import Config, InputError
from models import MODELS
from models.formats import torchtitan
from parallelisms.dp import master_dtype
from reliability import disk
from tools import adapters, dcp, new_checkpoint
from tools.dcp import Key
from tools.new_checkpoint import progress_bar
from training.optim import first_match, learning_rate

OURS = "plumbline"  # the value by which a folder is known as ours
# what of a manifest comes back
RECORDED = ("step", "progress", "facts", "optimizer", "hyperparameters")
# what else TorchTitan saves: hyperparameters, schedule and data of a run come from its configuration
LEFT_OUT = ("optimizer.param_groups.", "lr_scheduler.", "dataloader.", "train_state.")


# --------------------------------------------------------------------------------------------------
# out


@dataclass
class Written:
    """What a folder gets of a checkpoint."""

    keys: dict[str, list[Key]]  # tensor of the checkpoint -> where it goes
    values: dict[Key, Any]
    heads: dict[str, int] = field(default_factory=dict)  # tensor -> `torchtitan.rotated_heads`
    zeros: dict[Key, int] = field(default_factory=dict)  # further tensors, float32 [n]


def to_dcp(source: Path, out: Path, names: str, step: int | None) -> str:
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
    rows = {name: manifest["tensors"][name] for name in written.keys}
    size = sum(nbytes(row["dtype"], row["shape"]) for row in rows.values())
    try:
        with disk.new_folder(out) as folder, progress_bar(size, path.name) as bar:
            dcp.write(folder, tensors(path, manifest, written, bar.update), written.values)
    except Damaged as error:
        raise InputError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise InputError(
            f"{path} could not be converted to {out}: {error.filename or ''} {error.strerror}"
        ) from None
    return f"{out}: {len(written.keys)} tensors of {path}, {size / 1e9:,.2f} GB"


def tensors(
    path: Path, manifest: dict, written: Written, progress: Any
) -> Iterator[tuple[Key, Tensor]]:
    """The tensors of a folder with their keys. One is in memory at a time."""
    whole = hf.read_whole(path, manifest, written.keys)
    for name, keys in written.keys.items():
        tensor = next(whole)
        progress(tensor.nbytes)
        tensor = torchtitan.to_theirs(tensor, written.heads.get(name, 0))
        for key in keys:
            yield key, tensor
        del tensor
    for key, n in written.zeros.items():
        yield key, torch.zeros(n)


def in_our_names(path: Path, manifest: dict) -> Written:
    keys: dict[str, list[Key]] = {}
    for name in state.select(manifest["tensors"], "model+optimizer", ()):
        kind, _, rest = name.partition(".")
        key: Key = (kind, rest)
        if kind == "optimizer":
            parameter, _, last = rest.rpartition(".")
            key = (kind, parameter, last)
        keys[name] = [key]
    record = {key: manifest[key] for key in RECORDED}
    record["tensors"] = {name: manifest["tensors"][name]["shape"] for name in keys}
    return Written(keys, {("step",): manifest["step"], (OURS,): json.dumps(record)})


def in_torchtitans_names(path: Path, manifest: dict) -> Written:
    family, args = state.model_of(path, manifest, MODELS)
    check_family(str(path), family.name)
    if manifest["optimizer"] not in ("AdamW", "none"):
        raise InputError(
            f"{path} has the state of {manifest['optimizer']}, only AdamW's has TorchTitan's names"
        )
    parameters = [
        name.removeprefix("model.") for name in state.select(manifest["tensors"], "model", ())
    ]
    theirs = torchtitan.names(parameters, args)
    copies = torchtitan.copies(args)
    written = Written({}, {})
    for ours, name in theirs.items():
        keys: list[Key] = [(name,)]
        keys += [(copy,) for copy, original in copies.items() if original == ours]
        written.keys[f"model.{ours}"] = keys
    for name in state.select(manifest["tensors"], "optimizer", ()):
        ours, _, key = name.removeprefix("optimizer.").rpartition(".")
        written.keys[name] = [("optimizer", f"state.{theirs[ours]}.{key}")]
    for name in written.keys:
        kind, _, ours = name.partition(".")
        if kind == "optimizer":
            ours = ours.rpartition(".")[0]
        written.heads[name] = torchtitan.rotated_heads(family.name, ours, args)
    for bias in torchtitan.biases_that_ours_lacks(parameters, args):
        written.zeros[bias,] = args.n_experts
    if manifest["optimizer"] != "none":
        written.values = progress_of(manifest)
        trained = new_checkpoint.trained(family.name, args)
        for ours, options in param_groups(manifest, family, trained).items():
            for option, value in options.items():
                written.values["optimizer", f"param_groups.{theirs[ours]}.{option}"] = value
    return written


NAMES = {"plumbline": in_our_names, "torchtitan": in_torchtitans_names}


def check_family(where: str, name: str) -> None:
    if name not in torchtitan.FAMILIES:
        known = ", ".join(torchtitan.FAMILIES)
        raise InputError(f"{where}: of the family {name} TorchTitan's names are not known: {known}")


def progress_of(manifest: dict) -> dict[Key, Any]:
    """How far the run is. TorchTitan counts its tokens, too."""
    step = manifest["step"]
    seen = manifest["progress"].get("samples", 0) * manifest["facts"].get("seq_len", 0)
    return {
        ("train_state", "step"): step,
        ("train_state", "ntokens_seen"): seen,
        ("lr_scheduler", "last_epoch"): step,
    }


def param_groups(manifest: dict, family: Any, trained: list[str]) -> dict[str, dict[str, Any]]:
    """AdamW's options by parameter, as torch.optim has them. The learning rate is that of the next
    step."""
    text = manifest["facts"].get("config", "")
    cfg = Config.model_validate(tomli.loads(text))
    steps = cfg.training.steps
    next_step = min(manifest["step"], steps - 1)
    lr = learning_rate(next_step, steps, cfg.optimizer.lr, cfg.lr_schedule)
    options = {
        "lr": lr,
        "initial_lr": cfg.optimizer.lr,
        "betas": tuple(cfg.optimizer.betas),
        "eps": cfg.optimizer.eps,
        "amsgrad": False,
        "maximize": False,
        "foreach": False,
        "capturable": False,
        "differentiable": False,
        "fused": True,
        "decoupled_weight_decay": True,
    }
    groups = {}
    for name in trained:
        decays = first_match(family.decay, name)
        groups[name] = options | {"weight_decay": cfg.optimizer.weight_decay if decays else 0.0}
    return groups


# --------------------------------------------------------------------------------------------------
# in


@dataclass
class Arriving:
    """What a checkpoint of ours gets of a folder."""

    keys: dict[str, str]  # tensor of the checkpoint -> key in the folder
    dtypes: dict[str, torch.dtype]  # in which it is kept
    head: dict[str, Any]  # of the manifest
    heads: dict[str, int] = field(default_factory=dict)  # tensor -> `torchtitan.rotated_heads`


def from_dcp(source: Path, out: Path, config: Path | None) -> str:
    """Returns what was done, in a sentence. Raises InputError, with nothing left behind."""
    folder = dcp.Folder(source)
    if OURS in folder.values:
        arriving = from_ours(folder)
    elif config is None:
        raise InputError(
            f"{source} does not say which model it holds: describe it with --config, in our options "
            "(`python -m tools.convert config` translates TorchTitan's TOML)"
        )
    else:
        arriving = from_torchtitans(folder, load_config([str(config)]))
    live = {}
    for name, key in arriving.keys.items():
        shape = folder.tensors[key].shape
        live[name] = torch.empty(shape, dtype=arriving.dtypes[name], device="meta")

    def read(name: str) -> Tensor:
        tensor = folder.read(arriving.keys[name]).to(arriving.dtypes[name])
        return torchtitan.to_ours(tensor, arriving.heads.get(name, 0))

    head = dict(arriving.head)
    path, size = new_checkpoint.write(out, source, live, read, head.pop("facts"), **head)
    said = f"{path}: {len(live)} tensors of {source}, {size / 1e9:,.2f} GB"
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
    dcp.check(folder.path, folder.tensors, wanted)
    of_model = {f"model.{name}": s for name, s in new_checkpoint.shapes(family.name, args).items()}
    dcp.check(folder.path, state.select(folder.tensors, "model", ()), of_model)
    dtypes = {name: folder.tensors[name].dtype for name in wanted}
    return Arriving({name: name for name in wanted}, dtypes, head)


def from_torchtitans(folder: dcp.Folder, cfg: Config) -> Arriving:
    check_family("--config", cfg.model.family)
    family = MODELS[cfg.model.family]
    args = family.Args(**architecture(cfg.model))
    shapes = new_checkpoint.shapes(family.name, args)
    release = release_of(folder, shapes, args)
    theirs = torchtitan.names(shapes, args, release)
    has_moments = any(key.startswith("optimizer.state.") for key in folder.tensors)
    arriving = Arriving({}, {}, {})
    wanted = {}  # key -> shape
    for ours, shape in shapes.items():
        arriving.keys[f"model.{ours}"] = theirs[ours]
        wanted[theirs[ours]] = shape
    for ours in new_checkpoint.trained(family.name, args) if has_moments else ():
        for kept, shape in {
            "exp_avg": shapes[ours],
            "exp_avg_sq": shapes[ours],
            "step": [],
        }.items():
            key = f"optimizer.state.{theirs[ours]}.{kept}"
            arriving.keys[f"optimizer.{ours}.{kept}"] = key
            wanted[key] = shape
    further = dict(torchtitan.copies(args, release))
    further |= dict.fromkeys(torchtitan.biases_that_ours_lacks(shapes, args, release), "")
    found = {}
    for key, stored in folder.tensors.items():
        is_table = re.fullmatch(torchtitan.TABLES, key)
        if key not in further and not key.startswith(LEFT_OUT) and not is_table:
            found[key] = stored
    dcp.check(folder.path, found, wanted)
    check_further(folder, further, theirs)
    check_types(folder, wanted, master_dtype(cfg.training))
    for name in arriving.keys:
        kind, _, ours = name.partition(".")
        arriving.dtypes[name] = master_dtype(cfg.training)
        if kind == "optimizer":
            ours, _, kept = ours.rpartition(".")
            if kept == "step":
                arriving.dtypes[name] = (
                    torch.float32
                )  # as torch.optim has it, whatever the weights are
        arriving.heads[name] = torchtitan.rotated_heads(family.name, ours, args)
    step = folder.value("train_state.step") if has_moments else 0
    if type(step) is not int or step < 0:
        raise InputError(f"{folder.path}: train_state.step is {step!r}, which is no step")
    arriving.head = {
        "step": step,
        "progress": {"step": step},
        "facts": {
            "family": family.name,
            "config": dump(cfg),
            "seq_len": cfg.training.seq_len,
            "must_match": {"model": asdict(args)},
        },
        "optimizer": "AdamW" if has_moments else "none",
    }
    return arriving


def release_of(folder: dcp.Folder, parameters: Iterable[str], args: Any) -> str:
    """The release of TorchTitan's whose names the folder has, or most of them."""
    shared = {}
    for release in torchtitan.RENAMED:
        names = torchtitan.names(parameters, args, release).values()
        shared[release] = len(folder.tensors.keys() & names)
    return max(shared, key=lambda release: shared[release])


def check_further(folder: dcp.Folder, further: dict[str, str], theirs: dict[str, str]) -> None:
    """Raises InputError if a tensor that has no parameter of its own here says something: a copy that
    is none, or a bias that is not 0. further: by key, the parameter of which it is a copy."""
    for key, original in further.items():
        if key not in folder.tensors:
            continue
        tensor = folder.read(key)
        if original and not torch.equal(tensor, folder.read(theirs[original])):
            raise InputError(
                f"{folder.path}: {key} differs from {theirs[original]}, and the model ties them "
                "(model.tied_embeddings)"
            )
        if not original and tensor.count_nonzero():
            raise InputError(
                f"{folder.path}: {key} is not 0, and the routers of this family have no bias here"
            )


def check_types(folder: dcp.Folder, keys: Iterable[str], dtype: torch.dtype) -> None:
    """Raises InputError for a tensor that this type does not hold exactly."""
    widened = [*hf.WIDENED, CODES[dtype]]
    for key in keys:
        code = CODES[folder.tensors[key].dtype]
        if code not in widened:
            raise InputError(f"{folder.path}: {key} has type {code}, which is none of {widened}")
