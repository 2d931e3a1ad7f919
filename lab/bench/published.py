"""Compare the plans of `tools.plan` with published runs.

    python -m lab.bench plan [--only NAME] [--split] [--calibrate] [--svg OUT.svg]

A row of `published.toml` is one published run. It becomes a configuration with the same model, mesh, batch and
checkpointing, planned on the same devices. The planned speed over the published one, less 1, is its
error.
"""

import hashlib
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import tomli
import torch
from torch.distributed.tensor import DTensor

import train
from configs.load import load_config
from configs.schema import Config, InputError
from lab.bench import harness
from lab.bench.scatter import Point, scatter
from parallelisms import blocks
from tools.plan.device import load_device
from tools.plan.pipeline import Stages
from tools.plan.plan import Plan, PlanInputs, make_plan
from tools.plan.stack import HIDDEN_EXCHANGE, load_stack
from tools.plan.workers import in_processes
from training.loss_passes import plain_cross_entropy

TABLE = Path(__file__).resolve().parent / "published.toml"
CLASSES = ("dense", "tp", "cp", "pipeline", "experts")
SHORT = {  # key of a row's mesh -> option of [parallelism]
    "dp": "data_parallel_replicate",
    "fs": "data_parallel_shard",
    "tp": "tensor_parallel",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "pp": "pipeline_parallel",
    "vp": "pipeline_stages_per_rank",
    "sched": "pipeline_schedule",
    "acc": "accumulate_gradients",
    "async": "async_tensor_parallel",
}
# TorchTitan's H100s, where they are not those of tools/plan/devices.toml: HBM2e, and 500 W, which
# slows attention as it slows matmuls.
TITANS_H100 = {
    "memory_gib": 95.6,
    "memory_gb_per_s": 2400,
    "attention_efficiency": 0.31,
    "fast_attention_efficiency": 0.48,
}
HELD_OUT = 3  # one row of so many is held out of the calibration
GRID = np.array([0.4, 0.5, 0.6, 0.7, 0.8, 0.9])  # efficiencies that a calibration plans with
FINE = np.linspace(0.4, 0.9, 101)  # those that it chooses from


@dataclass(frozen=True)
class Published:
    """Published run: a row of published.toml with the facts that its source gives for all its rows."""

    id: str
    kind: str  # one of CLASSES
    stack: str
    model: dict
    device: str
    gpus: int
    seq: int  # tokens of a sequence
    batch: int  # sequences of a step
    micro: int  # sequences of a microbatch
    speed: float  # tokens/s per GPU
    mesh: dict
    checkpointing: str = "none"
    compile: bool = False
    reduce: str = "float32"
    float8: str = "none"
    titan: bool = False
    network: float = 0.0  # GB/s per GPU between hosts; 0: the device's
    per_node: int = 8
    overlap: bool = False
    unseen: bool = False  # its whole source is held out

    @property
    def held_out(self) -> bool:
        """Tell whether no calibration looks at this row. A hash of its name chooses it."""
        return self.unseen or int(hashlib.sha256(self.id.encode()).hexdigest(), 16) % HELD_OUT == 0

    @property
    def options(self) -> list[str]:
        """Return the command line that plans this run."""
        tables: dict[str, object] = {f"model.{name}": value for name, value in self.model.items()}
        tables |= {
            "model.max_seq_len": max(self.seq, 8192),
            "training.seq_len": self.seq,
            "training.global_batch_size": self.batch,
            "training.local_batch_size": self.micro,
            "training.param_dtype": "bfloat16",
            "training.reduce_dtype": self.reduce,
            "activation_checkpoint.mode": self.checkpointing,
            "compile.enabled": self.compile,
        }
        for name, value in self.mesh.items():
            if name == "gather":  # "once": a step
                tables["parallelism.reshard_after_forward"] = False
                tables["parallelism.reshard_after_backward"] = False
            else:
                tables[f"parallelism.{SHORT[name]}"] = value
        return [f"--{name}={as_option(value)}" for name, value in tables.items()]

    def config(self) -> Config:
        """float8 is set after the check: some of their meshes are not supported with ours."""
        cfg = load_config(self.options, self.gpus, min(self.gpus, self.per_node))
        training = cfg.training.model_copy(update={"float8": self.float8})
        return cfg.model_copy(update={"training": training})

    def inputs(self, efficiency: float | None = None) -> PlanInputs:
        """efficiency: of wide matmuls, instead of the calibrated one."""
        device = load_device(self.device)
        changes = dict(TITANS_H100) if self.titan else {}
        if self.network:
            changes["fabric_gb_per_s"] = self.network
        stack = load_stack(self.stack)
        device = stack.on(device.model_copy(update=changes), self.device)
        if efficiency is not None:
            device = device.model_copy(update={"matmul_efficiency": efficiency})
        if self.overlap:
            stack = stack.model_copy(update={"hidden_exchange": HIDDEN_EXCHANGE})
        return PlanInputs(self.gpus, min(self.gpus, self.per_node), device, stack=stack)


def as_option(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def load_runs(path: Path = TABLE) -> list[Published]:
    """Return the rows of the table."""
    table = tomli.loads(path.read_text(encoding="utf-8"))
    runs = []
    for source in table["sources"].values():
        for row in source["runs"]:
            numbers = dict(row, unseen=source.get("held_out", False))
            model = table["models"][numbers.pop("model")]
            kind = numbers.pop("class")
            mesh = numbers.pop("mesh", {})
            runs.append(
                Published(kind=kind, stack=source["stack"], model=model, mesh=mesh, **numbers)
            )
    return runs


# Differences of TorchTitan from our trainer.
def whole_loss(h, weight, labels, chunk_tokens, **more):
    """Compute their loss: logits of all tokens at once. Under tensor parallelism ours, whose
    matmuls are the same."""
    if isinstance(weight, DTensor):
        return our_loss(h, weight, labels, chunk_tokens, **more)
    return plain_cross_entropy(h @ weight.t(), labels)


our_loss = train.linear_cross_entropy
our_policy = blocks._policy


class EverySecondMatmul:
    """Their selective policy: every second matmul is recomputed. The count restarts in forward and
    in recomputation."""

    def __init__(self) -> None:
        self.counts = {False: 0, True: 0}

    def __call__(self, ctx, op, *args, **kwargs):
        if op is not torch.ops.aten.mm.default:
            return our_policy(ctx, op, *args, **kwargs)
        number = self.counts[ctx.is_recompute]
        self.counts[ctx.is_recompute] += 1
        if number % 2 == 0:
            return blocks.CheckpointPolicy.MUST_SAVE
        return blocks.CheckpointPolicy.PREFER_RECOMPUTE


def like_titan(make: Callable[[], Plan]) -> Plan:
    """Plan with TorchTitan's loss and its selective checkpointing in place of ours."""
    with (
        mock.patch.object(train, "linear_cross_entropy", whole_loss),
        mock.patch.object(blocks, "_policy", EverySecondMatmul()),
    ):
        return make()


@dataclass(frozen=True)
class Planned:
    """Run with its plan; small enough to travel between processes."""

    run: Published
    speed: float  # tokens/s per GPU
    # with other efficiencies of wide matmuls: GRID
    speeds: tuple[float, ...] = ()

    @property
    def error(self) -> float:
        return self.speed / self.run.speed - 1

    def errors(self) -> np.ndarray:
        """Absolute errors on the fine grid of efficiencies FINE. Seconds are linear in the
        inverse of an efficiency, nearly."""
        seconds = np.interp(1 / FINE[::-1], 1 / GRID[::-1], 1 / np.array(self.speeds)[::-1])[::-1]
        return np.abs(1 / seconds / self.run.speed - 1)


def planned(run: Published, calibrating: bool = False) -> Planned:
    torch.set_num_threads(1)
    cfg = run.config()
    stages = Stages()

    def speed(efficiency: float | None = None) -> float:
        def make() -> Plan:
            return make_plan(cfg, run.inputs(efficiency), stages)

        plan = like_titan(make) if run.titan else make()
        return plan.tokens_per_second / run.gpus

    speeds = tuple(speed(value) for value in GRID) if calibrating else ()
    return Planned(run, speed(), speeds)


def plan_all(runs: list[Published], calibrating: bool = False) -> list[Planned]:
    """Plan all runs. A pipeline's stages are traced in separate processes, any other run is planned
    in one."""
    alone = [run for run in runs if "pp" not in run.mesh]
    calls = [(run, calibrating) for run in alone]
    done = {one.run.id: one for one in in_processes(planned, calls)}
    for run in runs:
        if run.id not in done:
            done[run.id] = planned(run, calibrating)
    return [done[run.id] for run in runs]


def calibration(rows: list[Planned]) -> list[list[str]]:
    """Return for each device and stack the efficiency whose mean absolute error is smallest, over
    the rows that are not held out, without float8, and without experts if there are others; and the
    value of tools/plan/stacks.toml."""
    groups: dict[tuple[str, str], list[Planned]] = {}
    for row in rows:
        if not row.run.held_out and row.run.float8 == "none":
            groups.setdefault((row.run.stack, row.run.device), []).append(row)
    lines = []
    for (stack, device), of_group in groups.items():
        members = [row for row in of_group if row.run.kind != "experts"] or of_group
        errors = np.mean([row.errors() for row in members], axis=0)
        best = FINE[errors.argmin()]
        known = load_stack(stack).gemm.get(device, load_device(device).matmul_efficiency)
        lines.append([stack, device, str(len(members)), f"{best:.3f}", f"{known:.3f}"])
    return lines


def errors_of(rows: Iterable[Planned]) -> list[str]:
    """Number of runs, median and worst absolute error, how many are within 20%."""
    errors = [abs(row.error) for row in rows]
    if not errors:
        return ["0", "", "", ""]
    within = sum(error <= 0.2 for error in errors)
    return [
        str(len(errors)),
        f"{statistics.median(errors):.1%}",
        f"{max(errors):.0%}",
        f"{within / len(errors):.0%}",
    ]


def summary(rows: list[Planned], split: bool = False) -> list[list[str]]:
    """Return a line for all, for each class and for each device. split: the third that is held out,
    and the others, separately."""
    lines = [["all", *errors_of(rows)]]
    if split:
        lines.append(["held out", *errors_of(row for row in rows if row.run.held_out)])
        lines.append(["calibrated on", *errors_of(row for row in rows if not row.run.held_out)])
    for kind in CLASSES:
        lines.append([kind, *errors_of(row for row in rows if row.run.kind == kind)])
    for device in dict.fromkeys(row.run.device for row in rows):
        lines.append([device, *errors_of(row for row in rows if row.run.device == device)])
    return lines


SUMMARY = ["runs", "number", "median error", "worst", "within 20%"]
ROWS = ["run", "class", "stack", "device", "GPUs", "published", "planned", "error", ""]


def cells(row: Planned) -> list[str]:
    """Return the line of one run; the last cell marks rows that the calibration has not seen."""
    run = row.run
    return [
        run.id,
        run.kind,
        run.stack,
        run.device,
        f"{run.gpus:,}",
        f"{run.speed:,.0f}",
        f"{row.speed:,.0f}",
        f"{row.error:+.1%}",
        "held out" if run.held_out else "",
    ]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", default="", help="runs with this in their name or class")
    parser.add_argument("--split", action="store_true", help="the held-out third apart")
    parser.add_argument("--calibrate", action="store_true", help="fit the efficiencies again")
    parser.add_argument(
        "--stack", default="", help="plan all as this row of tools/plan/stacks.toml"
    )
    parser.add_argument("--svg", type=harness.in_a_folder, help="planned over published, drawn")
    args = parser.parse_args()
    if args.stack:
        load_stack(args.stack)
    runs = [run for run in load_runs() if args.only in f"{run.id} {run.kind}"]
    if not runs:
        raise InputError(
            f"--only {args.only}: no run of published.toml has this in its name or class"
        )
    if args.stack:
        runs = [replace(run, stack=args.stack) for run in runs]
    rows = plan_all(runs, args.calibrate)
    if args.calibrate:
        columns = ["stack", "device", "runs", "calibrated", "stacks.toml"]
        harness.report("Efficiency of wide matmuls", columns, calibration(rows))
    title = "Planned against published runs, tokens/s per GPU"
    harness.report(title, ROWS, list(map(cells, rows)), "", args.json)
    harness.report("Errors", SUMMARY, summary(rows, args.split))
    if args.svg:
        points = [Point(row.run.id, row.run.kind, row.run.speed, row.speed) for row in rows]
        Path(args.svg).write_text(scatter(points, CLASSES), encoding="utf-8")
