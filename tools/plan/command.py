"""Make the plans of the command line, and print or write them."""

import argparse
import sys
from pathlib import Path

from configs import stages
from configs.load import dump
from configs.schema import Config, InputError
from tools.plan import timeline
from tools.plan.arguments import OVERRIDES, asks_how_many, configuration
from tools.plan.cluster import answer, clusters, known_devices
from tools.plan.device import Device, load_device
from tools.plan.plan import Plan, PlanInputs, make_plan
from tools.plan.report import report
from tools.plan.routing import load_routing
from tools.plan.search import search, table
from tools.plan.stack import load_stack
from tools.plan.trace import changed
from training import forecast as registered


def chosen_device(name: str, flags: argparse.Namespace) -> Device:
    """Return the device as --stack uses it, with the overrides of the command line. Raises
    InputError."""
    device = load_stack(flags.stack).on(load_device(name), name.lower())
    changes = {}
    for option, (field, _) in OVERRIDES.items():
        value = getattr(flags, option.replace("-", "_"))
        if value is not None:
            changes[field] = value
    if "attention_efficiency" in changes:  # overrides the choice of training.attention
        changes["fast_attention_efficiency"] = changes["attention_efficiency"]
    return device.model_copy(update=changes)


def read_inputs(flags: argparse.Namespace, rest: list[str]) -> tuple[Config, PlanInputs]:
    """Return the checked configuration and the plan's other inputs. Raises InputError, ConfigError
    with every rule that is broken."""
    per_host = min(flags.gpus, flags.gpus_per_node)
    stack = load_stack(flags.stack)
    device = chosen_device(flags.device or "h100", flags)
    cfg = configuration(flags, rest)
    on_gpu = device.kind == "gpu"
    dtype = cfg.training.param_dtype
    if on_gpu and dtype in ("float32", "float64"):
        raise InputError(
            f'training.param_dtype = "{dtype}": the device table has peaks for bfloat16 only; plan '
            'with "bfloat16" or "auto"'
        )
    if on_gpu:
        cfg = changed(cfg, training={"param_dtype": "bfloat16"})
    inputs = PlanInputs(
        flags.gpus,
        per_host,
        device,
        on_gpu,
        flags.margin,
        flags.tokens,
        flags.usd_per_gpu_hour,
        flags.mtbf_gpu_hours,
        flags.restart_minutes * 60,
        flags.storage_gb_per_s,
        load_routing(flags.routing),
        stack,
    )
    return cfg, inputs


def forecast_of(cfg: Config, ladder: Path) -> str:
    """Forecast the loss of the run, and write it into its folder. Returns what to print. Raises
    InputError."""
    from tools.ladder.forecast import forecast, words

    found = forecast(cfg, ladder)
    written = registered.write(found, cfg)
    return "\n".join(["", *words(found), f"written: {written}"])


def best_for(plan: Plan, ladder: Path, usd: float) -> str:
    """Return a table of the runs that reach the least loss for about so many dollars, at the price of
    this plan's FLOPs. Raises InputError."""
    from tools.ladder import budget
    from tools.ladder.forecast import fitted
    from tools.ladder.rungs import parameters_of, tokens_of

    done, found = fitted(ladder)
    flops = 6.0 * parameters_of(plan.cfg) * tokens_of(plan.cfg)
    price = plan.gpu_hours() * plan.inputs.usd_per_gpu_hour
    rows = budget.front(found, flops / price, usd)
    return "\n".join(budget.words(rows, max(run.parameters for run in done)))


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def planned(flags: argparse.Namespace, rest: list[str]) -> int:
    """Plan what the command line asks for, and return the exit code. Raises InputError."""
    if asks_how_many(flags):
        _, inputs = read_inputs(flags, rest)
        names = [flags.device] if flags.device else known_devices()
        devices = {name: chosen_device(name, flags) for name in names}
        found = clusters(rest, inputs, flags.gpus_per_node, devices)
        print(answer(found, flags.days, flags.usd))
        return 0 if any(one.keeps(flags.days, flags.usd) for one in found) else 1
    cfg, inputs = read_inputs(flags, rest)
    if flags.search:
        found = search(cfg, inputs, log=to_stderr)
        print(table(found) + "\n\nThe first of these:\n")
        cfg = found.ranking[0].choice.applied_to(cfg)
    if flags.write:
        stages.refuse(cfg, "--write")
    plan = make_plan(cfg, inputs)
    print(report(plan, flags.stages))
    if flags.ladder:
        print(forecast_of(configuration(flags, rest), flags.ladder))
    if flags.ladder and flags.usd:
        print(best_for(plan, flags.ladder, flags.usd))
    if flags.write:
        Path(flags.write).write_text(dump(plan.cfg), encoding="utf-8")
        print(f"\nwritten: {flags.write}")
    if flags.trace:
        Path(flags.trace).write_text(timeline.text(plan), encoding="utf-8")
        print(f"\nwritten: {flags.trace}")
    return 0 if plan.fits else 1
