"""Plan what tools.replay computes again, have it computed, and say where it differs."""

import argparse
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from configs.load import ConfigError, load_config
from configs.schema import Config, InputError
from configs.words import aligned, number_of
from tools.differences import LIMITS, Limits
from tools.overrides import with_options
from tools.parity import meshes
from tools.parity.__main__ import refuse
from tools.parity.meshes import MeshOfRanks
from tools.parity.ranks import on_ranks
from tools.parity.trajectory import whole
from tools.replay.judge import Row, from_other, from_record
from tools.replay.run import Recorded, open_run, state_in
from tools.replay.steps import Recomputation, StepNotes, recompute

PROOF = 1e-3  # of what differs by more, a wrong step may look right
NO_PROOF = (
    "{:.0%} is the rounding of bfloat16, and no proof: a step that is wrong by less is not seen. "
    "--tolerance asks for more; --mesh with --dtype=float64 compares two computations exactly"
)
QUIET = {
    "run.device": "cpu",
    "compile.enabled": "false",
    "compile.cuda_graphs": "false",
    "validation.interval": "0",
    "evaluation.interval": "0",
}
ONE = MeshOfRanks("one process", {})


@dataclass(frozen=True)
class Side:
    """One side of the comparison: a run's options, and a mesh."""

    label: str
    task: Recomputation
    ranks: int


@dataclass(frozen=True)
class Replay:
    run: Recorded
    first: Side
    second: Side | None
    same_run: bool  # the second side begins with the same state
    begins: int  # the step of the checkpoint
    limits: Limits
    recorded: Limits  # where it is compared with what RUN has written


def on_mesh(argv: list[str], mesh: MeshOfRanks, given: Config) -> list[str]:
    """Return the command line on this mesh, with microbatches no larger. Raises ConfigError."""
    argv = with_options(argv, mesh.options(given))
    batches = [given.training.global_batch_size]
    batches += [row.global_batch_size for row in given.training.stages if row.global_batch_size]
    rows = max(1, math.gcd(*batches) // mesh.data_parallel)
    largest = min(given.training.local_batch_size or rows, rows)
    if "pp" in mesh.sizes:
        largest = max(1, min(largest, rows // (2 * mesh.sizes["pp"])))
    size = max(n for n in range(1, largest + 1) if rows % n == 0)
    argv = with_options(argv, {"training.local_batch_size": str(size)})
    load_config(argv, mesh.ranks, mesh.ranks)
    return argv


def check_comparable(run: Recorded, other: Recorded, more: list[str]) -> None:
    """Raise InputError for runs whose steps cannot be compared."""
    one, two = (
        load_config([str(each.options), *more], None, None).training.seq_len
        for each in (run, other)
    )
    if one != two:
        raise InputError(
            f"{run.place} has sequences of {one} tokens and {other.place} of {two}: their steps "
            "cannot be compared"
        )


def side(
    label: str, run: Recorded, mesh: MeshOfRanks, begins: int, steps: range, more: list
) -> Side:
    """Raises InputError for options that the mesh refuses, or without the run's initial state."""
    given = load_config([str(run.options), *more], None, None)
    if steps.stop - 1 > given.training.steps:
        raise InputError(f"--steps {steps.stop - 1}: {run.place} has {given.training.steps} steps")
    loads = given.checkpoint.load_path or given.checkpoint.load_hf
    branches_off = run.is_branch or given.checkpoint.branch_from
    if not begins and (branches_off or (loads and not given.lora.rank)):
        raise InputError(
            f"{run.place} has no checkpoint before step {steps.start}, and began with the weights "
            "of another: name later steps"
        )
    refuse(given, smaller="")
    try:
        argv = on_mesh([str(run.options), *more], mesh, given)
    except ConfigError as error:
        raise InputError(f"{label} on {mesh.name}: {error}") from None
    return Side(label, Recomputation(argv, run.checkpoints.get(begins), steps), mesh.ranks)


def plan_of(flags: argparse.Namespace, rest: list[str], temporary: Path) -> Replay:
    """Plan the recomputation. Raises InputError for a mistake in the call."""
    steps = flags.steps
    run = open_run(flags.run, temporary)
    other = run if flags.against is None else open_run(flags.against, temporary)
    # the newest state before them that both have
    begins = max({*run.before(steps.start)} & {*other.before(steps.start)})
    wanted = range(begins + 1, steps.stop)
    run, other = run.as_trained(wanted), other.as_trained(wanted)
    check_comparable(run, other, rest)
    mesh = ONE if flags.mesh is None else meshes.parse(flags.mesh, "--mesh")
    own = load_config([str(run.options), *rest], None, None).training.param_dtype
    dtype = flags.dtype or own
    more = with_options(rest, QUIET | {"training.param_dtype": dtype})
    first = side(str(flags.run), run, mesh, begins, steps, more)
    second = None
    if flags.against is not None:
        second = side(str(flags.against), other, ONE, begins, steps, more)
    elif flags.mesh is not None:
        second = side(ONE.name, run, ONE, begins, steps, more)
    elif not {*run.metrics(), *run.gradients(), *run.checkpoints} & {*steps}:
        raise InputError(
            f"{flags.run} has recorded nothing of these steps: compare with --mesh or --against"
        )
    limits, recorded = LIMITS[dtype], LIMITS[own]
    if flags.tolerance is not None:
        limits = recorded = Limits(flags.tolerance, flags.tolerance)
    return Replay(run, first, second, flags.against is None, begins, limits, recorded)


def judge(plan: Replay, first: list, second: list | None) -> list[Row]:
    """List the differences. first, second: the notes of each rank of a side, a list of steps."""
    metrics = plan.run.metrics()
    gradients = plan.run.gradients()
    rows = []
    for number, step in enumerate(plan.first.task.asked):
        ranks = [of_rank[number] for of_rank in first]
        is_first = step == plan.begins + 1
        path = plan.run.checkpoints.get(step)
        saved = None if path is None else {n: whole(x) for n, x in state_in(path).items()}
        if second is not None:
            theirs: StepNotes = second[0][number]
            label = plan.second.label
            rows += from_other(ranks, theirs, label, plan.limits, is_first, plan.same_run)
        written = metrics.get(step), gradients.get(step)
        rows += from_record(ranks, *written, saved, plan.recorded, is_first)
    return rows


def table(rows: list[Row]) -> str:
    lines = [("step", "against", "what differs", "first at", "size")]
    for row in rows:
        where = row.where + (f" and {row.more} more" if row.more else "")
        lines.append((str(row.step), row.against, row.what, where, f"{row.size:.1e}"))
    return "\n".join(aligned(lines))


def begin(plan: Replay) -> str:
    steps = plan.first.task.asked
    logged = [step for step in steps if step in plan.run.metrics()]
    gradients = [step for step in steps if step in plan.run.gradients()]
    saved = [step for step in steps if step in plan.run.checkpoints]
    ranks = plan.first.ranks
    line = f"from the state after step {plan.begins}, on {number_of(ranks, 'rank')}; recorded: "
    line += f"metrics of steps {logged}, checkpoints of {saved}, gradients of {gradients}"
    return line + ("" if plan.second is None else f"; computed again by: {plan.second.label}")


def replay(flags: argparse.Namespace, rest: list[str], compute: Callable = on_ranks) -> int:
    """Print the table, and return the exit code. compute: tools/parity/ranks.py::on_ranks."""
    with tempfile.TemporaryDirectory(prefix="plumbline-replay-") as temporary:
        plan = plan_of(flags, rest, Path(temporary))
        print(begin(plan), flush=True)
        sides = [plan.first] if plan.second is None else [plan.first, plan.second]
        noted = [compute(each.ranks, flags.seconds, recompute, each.task) for each in sides]
        rows = judge(plan, noted[0], noted[1] if plan.second else None)
    if not rows:
        print(f"equal to {plan.limits.values:g}, and to {plan.limits.state:g} after the optimizer")
        if plan.second is None and plan.recorded.values > PROOF:
            print(NO_PROOF.format(plan.recorded.values))
        return 0
    print(table(rows))
    return 1
