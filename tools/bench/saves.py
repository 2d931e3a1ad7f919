"""What saving and resuming cost on many ranks, measured as rank 0 of a world that does not exist.

    python -m tools.bench.saves [configs/llama_405b.toml] [--ranks 8 512 16384] [--table.key=value ...]

The run is built as the planner builds it, on PyTorch's fake process group, so the plan, the manifest and rank 0's file
are those of a real run of so many ranks; the file holds zeros, and the rows of other ranks' files are made up. What the
network takes is not measured; the collectives are counted. `phases` returns the numbers, for `tools.bench.ranks`.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import train
from checkpoint import state, storage, verify
from checkpoint.protocol import FileReader, FileWriter, OwnBoxes, OwnParts, load
from checkpoint.storage import Plan
from configs.load import load_config
from configs.schema import Config
from tools.bench import harness
from tools.plan.trace import pretend, tracing
from training import init


@dataclass
class Phase:
    """What one phase costs rank 0."""

    collectives: list[tuple[str, int]] = field(default_factory=list)  # kind, and bytes that one rank gives or receives
    seconds: float = 0.0  # processor time of the Python process
    read: int = 0  # bytes of files
    written: int = 0
    details: dict[str, float] = field(default_factory=dict)  # parts of `seconds`


def phases(cfg: Config, ranks: int, per_host: int = 8) -> dict[str, Phase]:
    """The phases "plan" (once in a run), "save" and "resume" of a run of `cfg` on so many ranks. The parallelism in
    `cfg` must fit that number. Writes rank 0's file into a temporary folder."""
    cfg = tracing(cfg)
    to_empty, fake = nn.Module.to_empty, FakeTensorMode(allow_non_fake_inputs=True)

    def fake_to_empty(module: nn.Module, **how: object) -> nn.Module:
        with fake:
            return to_empty(module, **how)

    with (
        pretend(ranks, per_host),
        mock.patch.object(nn.Module, "to_empty", fake_to_empty),
        mock.patch.object(init, "fill", lambda *_: None),
        tempfile.TemporaryDirectory() as folder,
    ):
        job = train.build(cfg)
        state.materialise(job.optimizer)
        return _measure(job, ranks, Path(folder))


def _measure(job: train.Job, ranks: int, folder: Path) -> dict[str, Phase]:
    plan, save, resume = Phase(), Phase(), Phase()
    with _timed(plan, "tensors by name"):
        live = state.tensors(job.model, job.optimizer)
    with _timed(plan, "rows"):
        rows = storage.share_rows(storage.describe(live, ranks, range(ranks)), dist.group.WORLD)
    with _timed(plan, "own parts"):
        own = Plan.make(live, rows, 0)
        header_bytes = len(own.head)
    empty = {name: (box[1], storage.DTYPES[rows[name]["dtype"]]) for name, box in own.boxes.items()}
    buffers = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in empty.items()}
    staged = {name: storage.as_bytes(buffer) for name, buffer in buffers.items()}
    kind = storage.kind_of(live)

    def prepare() -> tuple[Plan, dict[str, memoryview]]:
        with _timed(save, "is the plan still right", inside=True):
            assert kind == storage.kind_of(live)
        with _timed(save, "finite", inside=True):
            storage.check_finite(buffers)
        return own, staged

    def publish(files: list) -> None:
        with _timed(save, "manifest", inside=True):
            verify.write_manifest(folder, _head() | {"files": files, "tensors": rows})

    with _timed(save, "tensors by name"):
        live = state.tensors(job.model, job.optimizer)
    with _timed(save, "dcp.save"):
        writer = FileWriter(folder, dist.group.WORLD, publish)
        dcp.save({}, storage_writer=writer, planner=OwnParts(prepare), use_collectives=False)
    manifest_bytes = (folder / verify.MANIFEST).stat().st_size
    save.written = manifest_bytes + (folder / verify.file_name(0)).stat().st_size
    save.details |= {"MB of the manifest": manifest_bytes / 1e6, "MB of the header": header_bytes / 1e6}

    resume.collectives.append(("broadcast", manifest_bytes))
    with _timed(resume, "manifest"):
        manifest = verify.read_manifest(folder)
    planner = OwnBoxes({name: live[name] for name in own.boxes}, buffers)
    with _timed(resume, "dcp.load"):
        load(FileReader(folder, manifest), planner, dist.group.WORLD)
    resume.read = save.written
    plan.details["tensors"] = len(live)
    return {"plan": plan, "save": save, "resume": resume}


@contextmanager
def _everybody_answers_alike(sink: list[tuple[str, int]]) -> Iterator[None]:
    """Let the collectives on a fake group return what they would if every rank gave what this one gives, and note the
    kind and the bytes of each in `sink`."""

    def note(kind: str, tensor: torch.Tensor) -> None:
        sink.append((kind, tensor.nbytes))

    def all_gather(tensor_list: list, tensor: torch.Tensor, *_: object, **__: object) -> None:
        note("all_gather", tensor)
        for answer in tensor_list:
            answer.copy_(tensor)

    def gather(tensor: torch.Tensor, gather_list: list, *_: object, **__: object) -> None:
        note("gather", tensor)
        for answer in gather_list:
            answer.copy_(tensor)

    def scatter(tensor: torch.Tensor, scatter_list: list, *_: object, **__: object) -> None:
        note("scatter", tensor)
        tensor.copy_(scatter_list[0])

    def unchanged(kind: str) -> Callable:
        return lambda tensor, *_, **__: note(kind, tensor)

    answers = {
        "all_gather": all_gather, "gather": gather, "scatter": scatter,
        "broadcast": unchanged("broadcast"), "all_reduce": unchanged("all_reduce"),
        "barrier": lambda *_, **__: sink.append(("barrier", 0)),
    }  # fmt: skip
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(dist, name, answer))
            stack.enter_context(mock.patch.object(dist.distributed_c10d, name, answer))
        yield


def _head() -> dict:
    empty = {dict: {}, list: [], str: "", int: 0}
    return {key: empty[kind] for key, kind in verify.HEAD.items()} | {"format": verify.FORMAT}


@contextmanager
def _timed(phase: Phase, name: str, inside: bool = False) -> Iterator[None]:
    """Add the processor time of the body to the phase, unless it is inside of another such body, and its collectives."""
    began = time.process_time()
    with nullcontext() if inside else _everybody_answers_alike(phase.collectives):
        yield
    phase.details[name] = time.process_time() - began
    if not inside:
        phase.seconds += phase.details[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="configs/llama_405b.toml")
    parser.add_argument("--ranks", type=int, nargs="+", default=[512, 16384])
    parser.add_argument("--json")
    args, options = parser.parse_known_args()
    table = []
    for ranks in args.ranks:
        cfg = load_config([args.config, *options], ranks, 8)
        for name, phase in phases(cfg, ranks).items():
            sent = ", ".join(f"{kind} of {size:,} B" for kind, size in phase.collectives)
            details = ", ".join(f"{what} {value:.3g}" for what, value in phase.details.items())
            table.append([f"{ranks:,}", name, f"{phase.seconds:.3f} s", sent, details])
    harness.report("Saving and resuming, rank 0", ["ranks", "phase", "processor time", "collectives", "of it"], table, "", args.json)


if __name__ == "__main__":
    main()
