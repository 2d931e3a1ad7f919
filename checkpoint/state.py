"""The state that a checkpoint holds, and how a run on any mesh loads it again.

It holds tensors under flat names: `model.<parameter>`, `optimizer.<parameter>.<key>`,
`rng.<device>` (one row per rank); everything else (the step, the samples consumed, the config) is
JSON in the manifest. Names and global shapes do not depend on the mesh, so any mesh can load what
any other saved. Hyperparameters are not state: they always come from the config.
"""

import itertools
import json
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoint import storage, verify
from checkpoint.agreement import gather_objects, on_every_rank
from checkpoint.storage import CODES, GENERATOR, local
from checkpoint.verify import Damaged
from configs.schema import InputError
from models.lora import is_adapter
from reliability.objects import Key, location


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Return the live tensors by name, as DTensors where they are sharded. Without an optimizer,
    only those of the model.

    `state_dict` comes first: it makes FSDP re-shard what a forward without backward left gathered.
    Tied weights appear under each of their names. Persistent buffers are included. The frozen
    weights of a model with adapters are not.
    """
    # keep_vars: to detach DTensors takes long
    saved = only_adapters(model.state_dict(keep_vars=True))
    live = {f"model.{name}": t for name, t in saved.items()}
    if optimizer is None:
        return live
    names = {id(param): name for name, param in model.named_parameters()}
    for param, state in optimizer.state.items():
        prefix = f"optimizer.{names[id(param)]}"
        for key, value in state.items():
            if isinstance(value, Tensor):
                live[f"{prefix}.{key}"] = value
    for device, generator in _rng().items():
        live[f"{GENERATOR}{device}"] = generator[None]  # [n] -> [1, n]
    return live


def only_adapters(by_name: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a model that are saved: its adapters (models/lora.py) alone, if it has
    any."""
    adapters = {name: tensor for name, tensor in by_name.items() if is_adapter(name)}
    return adapters or by_name


def _rng() -> dict[str, Tensor]:
    """Return the states of this rank's random generators, for a model that draws numbers (dropout,
    say). They mean nothing on a different mesh."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def buffers(live: dict[str, Tensor]) -> dict[str, Tensor]:
    """Allocate host memory for a copy of every shard, to read a checkpoint into."""
    copies = {}
    for name, tensor in live.items():
        shard = local(tensor)
        copies[name] = torch.empty(shard.shape, dtype=shard.dtype)
    return copies


LAYERS = 1000  # that a model may have without as many tensors in its checkpoint
NUMBER = 1 << 31  # no number of a model is larger: a vocabulary, a width, a base of rotations
STAGING = ("pinned", "pageable", "none")  # kinds of buffers for copies, the best one first


def staging(size: int, free: int | None, local_ranks: int, pin: bool) -> str:
    """Return the best kind of buffers that fits when each of `local_ranks` ranks of a host wants
    `size` bytes of the `free` ones (None: unknown). A fifth of the free memory is left to others.
    pin: whether copies come from a GPU."""
    share = math.inf if free is None else 0.8 * free / local_ranks
    if pin and pinned_size(size) <= share:
        return "pinned"
    return "pageable" if size <= share else "none"


def pinned_size(size: int) -> int:
    """Return the bytes that CUDA takes for a pinned buffer of so many: PyTorch's caching host
    allocator rounds them up to a power of two (aten/src/ATen/core/CachingHostAllocator.h)."""
    return 1 << (size - 1).bit_length() if size else 0


def free_host_memory() -> int | None:
    """Return the bytes that this host can still give to processes, page cache included; None where
    Linux does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            kib = line.split()[1]
            return int(kib) * 1024
    return None


def stage(
    live: dict[str, Tensor], into: dict[str, Tensor], computed: torch.cuda.Event | None
) -> torch.cuda.Event | None:
    """Copy the shards that have a buffer into it, from a thread, while training goes on.

    computed: on a GPU, the event that is set when the values to copy exist. The copies are then
    queued on a separate stream, and overlap with the kernels of the next step. The event that is
    returned is set when they are done; the values must not change before that.
    """
    shards = [local(live[name]) for name in into]
    if computed is None:
        # one call, so that training has the GIL meanwhile
        torch._foreach_copy_(list(into.values()), shards)
        return None
    stream = torch.cuda.Stream(computed.device)
    stream.wait_event(computed)
    with torch.cuda.stream(stream):
        torch._foreach_copy_(list(into.values()), shards, non_blocking=True)
    return stream.record_event()


@torch.no_grad()
def put_back(loaded: dict[str, Tensor], live: dict[str, Tensor]) -> None:
    """Copy the buffers that were read into the live tensors, and set the random generators. The
    buffers may be reused afterwards."""
    for name, tensor in live.items():
        if name == "rng.cpu":
            # given a view, torch 2.13 reads from the start of its storage
            torch.set_rng_state(loaded[name][0].clone())
        elif name == "rng.cuda":
            torch.cuda.set_rng_state(loaded[name][0].clone())
        else:
            local(tensor).copy_(loaded[name])


def select(by_name: dict[str, Any], content: str, exclude: tuple[str, ...]) -> dict[str, Any]:
    """Return the entries of the kinds in `content` ("model+optimizer") whose names match no pattern
    (fnmatch) in `exclude`."""
    kinds = content.split("+")
    chosen = {}
    for name, value in by_name.items():
        excluded = any(fnmatchcase(name, pattern) for pattern in exclude)
        if name.partition(".")[0] in kinds and not excluded:
            chosen[name] = value
    return chosen


def hyperparameters(optimizer: torch.optim.Optimizer) -> dict:
    """Return the optimizer's options by group, as JSON: for the record, and for a note if they
    differ after a resume. The learning rate is left out, because its schedule changes it at every
    step."""
    groups = {}
    other = ("params", "param_names", "lr")
    for i, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in other}
        groups[f"group {i}"] = options
    return json.loads(json.dumps(groups))  # as it will be read back, with lists for tuples


def model_of(path: Path | Key, manifest: dict, families: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the family, one of these, of the model that a checkpoint holds, and its Args. Raises
    InputError."""
    facts = manifest["facts"]
    name = facts.get("family")
    numbers = facts.get("must_match", {}).get("model")
    if name is None or not numbers:
        raise InputError(f"{path} does not say which model it holds")
    if name not in families:
        known = ", ".join(families)
        raise InputError(
            f"{path} holds a model of the family {json.dumps(name)}, which is not among those "
            f"here: {known}"
        )
    family = families[name]
    check_numbers(path, manifest)
    try:
        return family, family.Args(**numbers)
    except TypeError as error:
        raise InputError(
            f"{path} holds a {name} with other numbers than those here: {error}"
        ) from None


def check_numbers(path: Path | Key, manifest: dict) -> None:
    """Raise InputError for a model that no machine could build, before building takes hours or all
    memory. A checkpoint has separate tensors for each layer."""
    numbers = manifest["facts"]["must_match"]["model"]
    if not isinstance(numbers, dict):
        raise InputError(f"{path} does not say which model it holds")
    layers = max(LAYERS, len(manifest.get("tensors", ())))
    for name, number in numbers.items():
        most = layers if name in ("n_layers", "n_dense_layers") else NUMBER
        if isinstance(number, int) and not -1 <= number <= most:
            raise InputError(f"{path}: model.{ascii(name)[1:-1]} = {number!r:.40} is no model's")


# Where the weights fit, and what the optimizer keeps for them does not.
HINT = (
    ". What is kept follows from optimizer.* and training.freeze: leave them as they were, or begin "
    "a new run with these weights by checkpoint.load_path"
)


def check_fits(
    path: Path,
    manifest: dict,
    wanted: dict,
    content: str,
    exclude: tuple[str, ...] = (),
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise InputError, naming some of the differences, if a checkpoint does not have exactly the
    `wanted` tensors.

    Nothing is cast, cropped or left out silently: a different type or shape, and a missing or
    superfluous name, all count as differences. `wanted` are this rank's tensors. With a group, all
    its ranks call this and come to the same verdict. A rank may then want a part of the model only,
    as a stage of a pipeline does: a name is superfluous if no rank wants it.
    """
    stored = manifest["tensors"]
    lines = _differences(stored, wanted)
    names = list(select(stored, content, exclude))
    # uint8 [1 + names]: does it differ on this rank; does this rank want the tensor
    flags = [bool(lines)] + [name in wanted for name in names]
    on_any_rank = torch.tensor(flags, dtype=torch.uint8)
    if group is not None:
        dist.all_reduce(on_any_rank, dist.ReduceOp.MAX, group)
    differs, *is_wanted = on_any_rank.tolist()
    if differs and group is not None:
        in_order = itertools.chain.from_iterable(gather_objects(lines[:1000], group))
        lines = list(dict.fromkeys(in_order))  # each once
    for name, flag in zip(names, is_wanted, strict=True):
        if not flag:
            lines.append(f"{name} is in it and not in this run")
    if lines:
        more = f" and {len(lines) - 4} more" if len(lines) > 4 else ""
        raise InputError(
            f"{path} does not fit this model and optimizer: {'; '.join(lines[:4])}{more}"
            f"{HINT if all(line.startswith('optimizer.') for line in lines) else ''}"
        )


def _differences(stored: dict, wanted: dict) -> list[str]:
    """Return sentences that say which of the wanted tensors are stored with another type or shape,
    or missing."""
    lines = []
    for name, tensor in wanted.items():
        if name not in stored:
            lines.append(f"{name} is missing from it")
            continue
        shape = list(tensor.shape)
        dtype = CODES[tensor.dtype]
        saved = stored[name]
        if saved["shape"] != shape:
            lines.append(f"{name} has shape {saved['shape']} there and {shape} here")
        elif saved["dtype"] != dtype:
            lines.append(f"{name} has type {saved['dtype']} there and {dtype} here")
    return lines


def read(
    path: Path,
    manifest: dict,
    wanted: dict,
    buffers: dict,
    group: dist.ProcessGroup | None,
) -> None:
    """Fill the `wanted` tensors, once every rank has read all of its part into the buffers. Raises
    Damaged on all ranks, with nothing changed. Without a process group, this process reads for
    itself alone.

    Every block that is read is verified. The manifest has been (`verify.read_manifest`).
    """
    on_every_rank(group, _read_into_buffers, path, manifest, wanted, buffers)
    put_back(buffers, wanted)


def files_of(wanted: dict, manifest: dict) -> list[int]:
    """Return the ranks whose files hold the parts of a checkpoint that this rank reads. Raises
    Damaged where the checkpoint has another state."""
    boxes = {name: storage.box_of(name, tensor) for name, tensor in wanted.items()}
    return sorted(storage.plan_reads(manifest, boxes))


def _read_into_buffers(path: Path, manifest: dict, wanted: dict, buffers: dict) -> None:
    boxes = {name: storage.box_of(name, tensor) for name, tensor in wanted.items()}
    try:
        storage.read(path, manifest, boxes, buffers)
    except OSError as error:
        raise Damaged(f"{error.filename or path}: {error.strerror or error}") from None


def load_model(folder: Path | Key, model: nn.Module) -> dict:
    """Load the weights of a checkpoint into a model on any mesh or none, and return the manifest.
    `folder` may also hold several checkpoints, or be a run's folder: the newest is taken. This is
    for tools; a run resumes with `CheckpointManager.load`. Raises InputError."""
    path = verify.newest(location(folder))
    with verify.refuse_damage(path):
        manifest = verify.read_manifest(path)
        live = tensors(model)
        check_fits(path, manifest, live, "model")
        read(path, manifest, live, buffers(live), None)
    return manifest
