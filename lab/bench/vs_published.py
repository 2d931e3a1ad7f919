"""Compare this trainer's plan with the fastest published bfloat16 run of a model on the same GPUs:
`python -m lab.bench plan vs_published` prints what this file computes.

The model, the batch, the sequences and the GPUs are those of the published run, a row of
`published.toml`. Mesh, checkpointing and kernels are ours: the table [ours] there has the options
that `tools.plan --search` and a few trials found. The plan is made twice, with the share of the peak
that `tools/plan/devices.toml` assumes for our GEMMs, and with the share that the published runs of
the other software imply: what is left between the second and them is not the GEMMs.
"""

from dataclasses import replace
from pathlib import Path

import tomli

from configs.load import load_config
from lab.bench import harness
from lab.bench.published import TABLE, Published, load_runs
from tools.plan.plan import Plan, make_plan
from tools.plan.stack import load_stack
from tools.plan.step import GIB
from tools.plan.workers import in_processes

COLUMNS = [
    "run",
    "GPUs",
    "published",
    "by",
    "ours",
    "of it",
    "with their GEMMs",
    "of it",
    "needed GiB",
    "exposed",
    "bubble",
]


def load_options(path: Path = TABLE) -> dict[str, list[str]]:
    """Name of a published run -> the options with which this trainer is fastest there."""
    return tomli.loads(path.read_text(encoding="utf-8"))["ours"]


def plan_of_ours(run: Published, options: list[str], efficiency: float | None = None) -> Plan:
    """efficiency: of wide matmuls, instead of the device's."""
    ours = replace(
        run, stack="plumbline", mesh={}, checkpointing="none", compile=True, float8="none", micro=1
    )
    cfg = load_config([*ours.options, *options], run.gpus, min(run.gpus, run.per_node))
    return make_plan(cfg, ours.inputs(efficiency))


def compared(run: Published, options: list[str]) -> list[str]:
    """Return the line of one run."""
    plan = plan_of_ours(run, options)
    speed = plan.tokens_per_second / run.gpus
    theirs = load_stack(run.stack).gemm[run.device]
    equal = plan_of_ours(run, options, theirs).tokens_per_second / run.gpus
    return [
        run.id,
        f"{run.gpus:,} {run.device}",
        f"{run.speed:,.0f}",
        run.stack,
        f"{speed:,.0f}",
        f"{speed / run.speed:.2f}",
        f"{equal:,.0f}",
        f"{equal / run.speed:.2f}",
        f"{plan.needed / GIB:.0f}" if plan.fits else f"{plan.needed / GIB:.0f}: too much",
        f"{plan.time.exposed / plan.time.seconds:.0%}",
        f"{plan.pipeline.bubble:.0%}" if plan.pipeline else "",
    ]


def report(only: str = "") -> None:
    """Return the table of all runs of [ours] that have `only` in their name."""
    runs = {run.id: run for run in load_runs()}
    chosen = {name: options for name, options in load_options().items() if only in name}
    lines = in_processes(compared, [(runs[name], options) for name, options in chosen.items()])
    notes = "\n".join(f"{name}: {' '.join(options)}" for name, options in chosen.items())
    title = "Our plan against the fastest published bfloat16 run, tokens/s per GPU"
    harness.report(title, COLUMNS, lines, notes)
