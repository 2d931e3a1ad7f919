"""Measure the cost of saving and resuming on many ranks, as rank 0 of a world that does not exist.

    python -m lab.bench saves [configs/llama_405b.toml] [--ranks 8 512 16384] [--table.key=value ...]

The run is built as the planner builds it, on PyTorch's fake process group, so the plan, the
manifest and rank 0's file are those of a real run of so many ranks; the file holds zeros, and the
rows of other ranks' files are made up. What the network takes is not measured; the collectives are
counted. `lab.bench ranks` has the other phases of a run.
"""

import tempfile
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import train
from checkpoint import state, storage, verify
from checkpoint.agreement import agree, gather_files
from checkpoint.storage import SavePlan, Staged
from configs.load import load_config
from configs.schema import Config
from lab.bench import harness
from lab.bench.rank_zero import RANKS_PER_HOST, Collective, Phase, everyone_is_like_rank_0
from tools.plan.trace import pretend, tracing
from training import init
from training.optimizers import materialise


def phases(cfg: Config, ranks: int, per_host: int = RANKS_PER_HOST) -> dict[str, Phase]:
    """Return the phases "plan" (once in a run), "save" and "resume" of a run of `cfg` on so many
    ranks. The parallelism in `cfg` must fit that number. Writes rank 0's file into a temporary
    folder."""
    cfg = tracing(cfg)
    to_empty = nn.Module.to_empty
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def fake_to_empty(module: nn.Module, **how: object) -> nn.Module:
        with fake:
            return to_empty(module, **how)

    with (
        pretend(ranks, per_host),
        everyone_is_like_rank_0(),
        mock.patch.object(nn.Module, "to_empty", fake_to_empty),
        mock.patch.object(init, "fill", lambda *_: None),
        tempfile.TemporaryDirectory() as folder,
    ):
        job = train.build(cfg)
        materialise(job.optimizer)
        return _measure(job, ranks, Path(folder))


def _measure(job: train.Job, ranks: int, folder: Path) -> dict[str, Phase]:
    plan = Phase()
    save = Phase()
    resume = Phase()
    with plan.measured("tensors by name"):
        live = state.tensors(job.model, job.optimizer)
    with plan.measured("rows"):
        rows = storage.share_rows(storage.describe(live, ranks, range(ranks)), dist.group.WORLD)
    with plan.measured("own parts"):
        own = SavePlan.make(live, rows, 0)
        header_bytes = len(own.head)
    with plan.measured("the manifest's rows"):
        own.table.check(ranks)
        plan.details["MB of the rows"] = len(own.table.text) / 1e6
    staged = Staged(own, pin=False)
    kind = storage.kind_of(live)

    with save.measured("tensors by name"):
        live = state.tensors(job.model, job.optimizer)
    # as CheckpointManager._save; the copy is not measured
    with save.measured("plan, write, gather, publish"):
        with save.timed("is the plan still right"):
            assert kind == storage.kind_of(live)
        with save.timed("finite"):
            staged.check_finite()
        file = storage.write(folder, own, staged)
        files = gather_files(file, dist.group.WORLD)
        with save.timed("manifest"):
            verify.write_manifest(folder, _head() | {"files": files, "tensors": own.table})
        agree(None, dist.group.WORLD)
    manifest_bytes = (folder / verify.MANIFEST).stat().st_size
    save.details |= {
        "MB of the manifest": manifest_bytes / 1e6,
        "MB of the header": header_bytes / 1e6,
    }

    resume.collectives.append(Collective("broadcast", ranks, manifest_bytes))
    with resume.measured("manifest"):
        manifest = verify.read_manifest(folder)
    wanted = {name: live[name] for name in own.boxes}
    with resume.measured("plan and read"):
        boxes = {name: storage.box_of(name, tensor) for name, tensor in wanted.items()}
        storage.read(folder, manifest, boxes, staged.tensors)
        agree(None, dist.group.WORLD)
    plan.details["tensors"] = len(live)
    return {"plan": plan, "save": save, "resume": resume}


def _head() -> dict:
    empty = {dict: {}, list: [], str: "", int: 0}
    return {key: empty[kind] for key, kind in verify.HEAD.items()} | {"format": verify.FORMAT}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("config", nargs="?", default="configs/llama_405b.toml")
    parser.add_argument("--ranks", type=int, nargs="+", default=[512, 16384])
    args, options = parser.parse_known_args()
    table = []
    for ranks in args.ranks:
        # fits any number; nothing is trained
        batch = ["--training.local_batch_size=1", f"--training.global_batch_size={ranks}"]
        cfg = load_config([args.config, *batch, *options], ranks, RANKS_PER_HOST)
        for name, phase in phases(cfg, ranks).items():
            sent = ", ".join(f"{c.kind} of {c.bytes:,} B" for c in phase.collectives)
            details = ", ".join(f"{what} {value:.3g}" for what, value in phase.details.items())
            table.append([f"{ranks:,}", name, f"{phase.seconds:.3f} s", sent, details])
    harness.report(
        "Saving and resuming, rank 0",
        ["ranks", "phase", "processor time", "collectives", "of it"],
        table,
        "",
        args.json,
    )
