"""What a checkpoint holds, and how it goes back into a run on any mesh.

Tensors only, under flat names: `model.<parameter>`, `optimizer.<parameter>.<key>`, `rng.<device>.<rank>`; everything
else (the step, the samples consumed, the config) is JSON in the manifest. Names and global shapes do not depend on
the mesh, so any mesh can load what any other saved. Hyperparameters are not state: they always come from the config.
"""

import json
import warnings
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from checkpoint import verify
from checkpoint.storage import CODES, ShardReader, StagedLoad
from checkpoint.verify import Damaged
from configs.schema import InputError

LIKE, SCALAR = "like the parameter", "one float32"

# What each optimizer keeps per parameter, all zero before its first step: key -> its form.
KEPT = {
    "AdamW": {"exp_avg": LIKE, "exp_avg_sq": LIKE, "step": SCALAR},
    "SGD": {"momentum_buffer": LIKE},
}


def materialise(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that its first step would give it, so that a run has all its memory from the start
    and a checkpoint of step 0 the same names as any other.

    Not by a step with zero gradients, as `get_optimizer_state_dict` does: that leaves AdamW's `step` at 1
    (pytorch#164929). Raises KeyError for an optimizer without a row in KEPT.
    """
    for group in optimizer.param_groups:
        if group.get("momentum") == 0:
            continue  # SGD without momentum keeps nothing
        for param in group["params"]:
            state = optimizer.state[param]
            for key, form in KEPT[type(optimizer).__name__].items():
                if form == LIKE and key not in state:
                    state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)
                elif form == SCALAR and key not in state:
                    # A fused optimizer reads the number on the device of its parameter, the others on the CPU.
                    device = local(param).device if group.get("fused") or group.get("capturable") else "cpu"
                    state[key] = torch.zeros((), dtype=torch.float32, device=device)


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, rank: int = 0) -> dict[str, Tensor]:
    """The live tensors by name; DTensors where they are sharded. Without an optimizer: the model's alone.

    `state_dict` first: it makes FSDP re-shard what a forward without backward left gathered. Tied weights appear under
    each of their names, buffers too unless they are not persistent.
    """
    found = {f"model.{name}": t for name, t in model.state_dict().items()}
    if optimizer is not None:
        names = {id(param): name for name, param in model.named_parameters()}
        for param, state in optimizer.state.items():
            found |= {f"optimizer.{names[id(param)]}.{key}": t for key, t in state.items() if isinstance(t, Tensor)}
        found |= {f"rng.{device}.{rank}": t for device, t in _rng().items()}
    return found


def _rng() -> dict[str, Tensor]:
    """This rank's generators: for dropout and the like in a model that draws numbers. On another mesh they mean
    nothing."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def buffers(live: dict[str, Tensor], pin: bool) -> dict[str, Tensor]:
    """Memory for a copy of every shard, as views into one block of host memory, which is touched here and not during
    the first save: fresh pages cost several times the copy itself.

    pin: for a GPU to copy into without waiting; then CUDA rounds the block up to a power of two.
    """
    shards = {name: local(tensor) for name, tensor in live.items()}
    size = sum(_padded(shard.nbytes) for shard in shards.values())
    block, views, start = torch.zeros(size, dtype=torch.uint8, pin_memory=pin), {}, 0
    for name, shard in shards.items():
        views[name] = block[start : start + shard.nbytes].view(shard.dtype).view(shard.shape)
        start += _padded(shard.nbytes)
    return views


def _padded(n: int) -> int:
    return -(-n // 64) * 64


def stage(live: dict[str, Tensor], into: dict[str, Tensor], computed: torch.cuda.Event | None) -> torch.cuda.Event | None:
    """Copy every shard into its buffer, from a thread beside training.

    computed: on a GPU, when the values to copy exist. The copies are then queued on a stream of their own, beside the
    kernels of the next step, and the event that tells when they are done is returned; the values must not change
    before.
    """
    if computed is None:
        for name, tensor in live.items():
            into[name].copy_(local(tensor))
        return None
    stream = torch.cuda.Stream(computed.device)
    stream.wait_event(computed)
    with torch.cuda.stream(stream):
        for name, tensor in live.items():
            into[name].copy_(local(tensor), non_blocking=True)
    return stream.record_event()


@torch.no_grad()
def put_back(loaded: dict[str, Tensor], live: dict[str, Tensor]) -> None:
    """Copy the buffers that were read into the live tensors, and set the generators. The buffers may be reused
    after."""
    for name, tensor in live.items():
        if name.startswith("rng.cpu."):
            torch.set_rng_state(loaded[name].clone())  # of a view, torch 2.13 reads from the start of the storage
        elif name.startswith("rng.cuda."):
            torch.cuda.set_rng_state(loaded[name].clone())
        else:
            local(tensor).copy_(loaded[name])


def select(by_name: dict[str, Any], content: str, exclude: tuple[str, ...]) -> dict[str, Any]:
    """Those of the kinds in `content` ("model+optimizer"), less the excluded names (patterns as in fnmatch)."""
    chosen = {name: value for name, value in by_name.items() if name.partition(".")[0] in content.split("+")}
    return {name: value for name, value in chosen.items() if not any(fnmatchcase(name, pattern) for pattern in exclude)}


def hyperparameters(optimizer: torch.optim.Optimizer) -> dict:
    """What the optimizer was told, for the record and for a note when it is told otherwise after a resume: JSON, by
    group. The learning rate is left out: its schedule changes it at every step."""
    groups = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]
    return json.loads(json.dumps({f"group {i}": group for i, group in enumerate(groups)}))  # lists for tuples


def mismatches(there: Any, here: Any, key: str = "") -> list[str]:
    """Where two JSON values differ, as sentences. Of nested ones, keys that only one of them has are not compared:
    either was written by code that does not know them."""
    if isinstance(there, dict) and isinstance(here, dict):
        return [
            line for k in there if k in here for line in mismatches(there[k], here[k], f"{key}.{k}" if key else k)
        ]
    return [] if there == here else [f"{key} is {json.dumps(there)} in the checkpoint and {json.dumps(here)} here"]


def check_fits(
    path: Path, manifest: dict, wanted: dict, content: str, exclude: tuple[str, ...] = (), group: dist.ProcessGroup | None = None
) -> None:
    """Raises InputError, naming some of the differences, if the tensors of a checkpoint are not those that are wanted.

    Nothing is cast, cropped or left out silently: a type, a shape, a name too many or too few is a difference. `wanted` are
    this rank's tensors. With a group, every rank of it calls this and all come to the same verdict: a rank may hold a part of
    the model only, as a stage of a pipeline does, so a tensor is too many if no rank wants it.
    """
    lines, stored = [], manifest["tensors"]
    for name, tensor in wanted.items():
        if name not in stored:
            lines.append(f"{name} is missing from it")
        elif (there := stored[name]["shape"]) != list(tensor.shape):
            lines.append(f"{name} has shape {there} there and {list(tensor.shape)} here")
        elif (there := stored[name]["dtype"]) != CODES[tensor.dtype]:
            lines.append(f"{name} has type {there} there and {CODES[tensor.dtype]} here")
    names = list(select(stored, content, exclude))
    flags = torch.tensor([bool(lines), *(name in wanted for name in names)], dtype=torch.uint8)
    if group is not None:
        dist.all_reduce(flags, dist.ReduceOp.MAX, group)
    differs, *is_wanted = flags.tolist()
    if differs and group is not None:
        of_ranks: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_ranks, lines[:1000], group)
        lines = list(dict.fromkeys(line for of_rank in of_ranks for line in of_rank))
    lines += [f"{name} is in it and not in this run" for name, flag in zip(names, is_wanted, strict=True) if not flag]
    if lines:
        more = f" and {len(lines) - 4} more" if len(lines) > 4 else ""
        raise InputError(f"{path} does not fit this model and optimizer: {'; '.join(lines[:4])}{more}")


def read(path: Path, manifest: dict, wanted: dict, buffers: dict, check: bool, group: dist.ProcessGroup | None) -> None:
    """Fill `wanted`, through buffers, when every rank has read all of its part. Raises Damaged on all ranks, with
    nothing changed; without a process group it reads for this process alone."""
    reader, planner = ShardReader(path, manifest, check), StagedLoad(buffers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.load(dict(wanted), storage_reader=reader, planner=planner, process_group=group)
        except CheckpointException as error:
            if all(isinstance(e, (Damaged, OSError)) for e, _ in error.failures.values()):
                raise Damaged(cause(error)) from None
            raise RuntimeError(f"{path} could not be loaded: {error}") from None
    put_back(buffers, wanted)


def load_model(folder: Path, model: nn.Module, check: bool = True) -> dict:
    """The weights of a checkpoint (or the newest in a folder of them, or of a run) into a model on any mesh or none;
    returns the manifest. For tools; a run resumes with `CheckpointManager.load`. Raises InputError."""
    path = verify.newest(Path(folder))
    try:
        manifest = verify.read_manifest(path)
        live = tensors(model)
        check_fits(path, manifest, live, "model")
        read(path, manifest, live, buffers(live, pin=False), check, None)
    except Damaged as error:
        raise InputError(f"{path} is damaged: {error}") from None
    return manifest


def cause(error: BaseException | None) -> str:
    """The first error of each of the first ranks, without the traceback that CheckpointException shows."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in list(error.failures.items())[:3])
    return f"{type(error).__name__}: {error}" if error else "another rank failed"


def gather_to_rank_0(model: nn.Module) -> dict[str, Tensor] | None:
    """The whole model in the CPU memory of rank 0, by our names; None on the others. Every rank calls it and holds one
    whole tensor at a time. For people who need one dict: `python -m tools.convert` makes files without it."""
    whole = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        if dist.get_rank() == 0:
            whole[name] = tensor.to("cpu", copy=True)
    return whole if dist.get_rank() == 0 else None


def scatter_from_rank_0(whole: dict[str, Tensor] | None, model: nn.Module) -> None:
    """The counterpart: rank 0's dict into the model, on any mesh; the others give None. The dict is not changed.

    Raises InputError on all ranks, before anything changes, if names, shapes or types are not the model's.
    """
    live = model.state_dict()
    answer = [""]
    if dist.get_rank() == 0:
        form = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in live.items()}
        given = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in whole.items()}
        wrong = [name for name in form | given if form.get(name) != given.get(name)]
        answer = [f"these tensors are not the model's: {', '.join(wrong[:4])} ({len(wrong)} in all)" if wrong else ""]
    dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
    if answer[0]:
        raise InputError(answer[0])
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(whole or {}), options=options)
