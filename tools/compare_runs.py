"""Did my change alter the numbers? From which step, and by how much?

    python -m tools.compare_runs runs/before runs/after --png difference.png

compares every metric of two run folders at the steps that both have logged (floats in metrics.jsonl
are exact, so equal is bitwise equal), the newest checkpoint of a step that both have, and whatever
could explain a difference: options, data, code, versions, mesh, devices. What only measures time
and memory is left out. Exit code 0: bitwise equal (or, with --tolerance, equal to that); 1: they
differ; 2: there is nothing to compare.

Rounding shows within a few steps and then grows, as training amplifies it: two meshes agree to 1e-7
at first. A change of meaning shows at once at 1e-3 and more, in the loss of the first step if it is
in the model, one step later if it is in the optimizer. So the verdict says "like rounding" where
loss and norm of the gradient began to differ by no more than rounding in float32 does, and no step
made a hundred times as much of it.
"""

import argparse
import json
import math
import operator
import signal
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import tomli

from checkpoint import verify
from configs.schema import InputError
from reliability import goodput

# Metrics that measure the machine, not the model.
TIMINGS = {
    "tokens_per_second",
    "tflops_per_device",
    "mfu",
    "memory_gib",
    "data_wait",
    "step_seconds",
    "goodput",
}
TIMING_PREFIXES = ("seconds/", "late/")
PLACES = {"run.folder", "data.cache"}  # options that say where, not what
# new with every start
OF_THE_LAUNCHER = {"MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"}
# relative: between meshes in float32, 20 steps stay within 4e-7 (tests/test_resume.py compares to
# this)
ROUNDING = 1e-5

# What rounding does in float32 (tests/parity.py, on models that amplify it and others): the first
# difference of the loss or the norm is 6e-8 to 2e-6, and a step makes it up to 20 times as large.
JUDGED, FIRST_ROUNDING, GROWTH = ("loss", "grad_norm"), 3e-6, 100


@dataclass(frozen=True)
class MetricRow:
    """How one metric compares. Differences are relative: |a - b| / max(|a|, |b|)."""

    metric: str
    steps: int  # that both runs have
    first_difference: int | None  # the first step where the two are not bitwise equal
    first_size: float  # the difference there
    first_beyond: int | None  # ... and not equal to the tolerance
    largest: float
    largest_at: int | None
    last_tenth: float  # mean of B - A over the last tenth of the steps: what it came to


@dataclass(frozen=True)
class Comparison:
    verdict: str
    code: int
    steps: list[int]  # common steps, first and last
    rows: list[MetricRow]
    checkpoint: str
    config: dict[str, list]  # option -> [A's, B's]
    environment: dict[str, list]


def compare(a: Path, b: Path, tolerance: float | None = None) -> Comparison:
    """Raises InputError where a folder is no run's, or the two have no step in common."""
    metrics_a, metrics_b = series(a), series(b)
    common = sorted(set().union(*metrics_a.values()) & set().union(*metrics_b.values()))
    if not common:
        raise InputError(f"{a} and {b} have no logged step in common")
    rows, limit = [], ROUNDING if tolerance is None else tolerance
    for metric in dict.fromkeys([*metrics_a, *metrics_b]):
        both = sorted(metrics_a.get(metric, {}).keys() & metrics_b.get(metric, {}).keys())
        rows.append(_row(metric, both, metrics_a.get(metric, {}), metrics_b.get(metric, {}), limit))
    weights, same_weights = checkpoints(a, b)
    differs = sorted(
        (row for row in rows if row.first_difference is not None),
        key=lambda row: row.first_difference,
    )
    beyond = [row for row in rows if row.first_beyond is not None]
    if not differs and same_weights is not False:
        verdict, code = "bitwise equal", 0
    elif not differs:
        verdict, code = "metrics bitwise equal, checkpoints not", 1
    elif not beyond:
        worst = max(row.largest for row in rows)
        verdict = (
            f"equal to {limit:g}: not bitwise from step {differs[0].first_difference} on, "
            f"by {worst:.1e} at most"
        )
        code = 1 if tolerance is None else 0
    else:
        row, first = differs[0], min(beyond, key=lambda row: row.first_beyond)
        verdict = f"they part at step {row.first_difference} ({row.metric} by {row.first_size:.1e})"
        # the smaller at first, the more it is like rounding
        if first.first_beyond > row.first_difference:
            verdict += (
                f", and by more than {limit:g} from step {first.first_beyond} on ({first.metric})"
            )
        if like_rounding(metrics_a, metrics_b, differs):
            verdict += ": like rounding, which began small and grew step by step"
        code = 1
    steps = [common[0], common[-1]]
    more = [
        f"{name} goes on to {last}"
        for name, last in (("A", _last(metrics_a)), ("B", _last(metrics_b)))
        if last > steps[1]
    ]
    where = ", ".join([f"steps {steps[0]} to {steps[1]}", *more])
    return Comparison(f"{verdict} ({where})", code, steps, rows, weights, *explanations(a, b))


def like_rounding(
    a: dict[str, dict[int, float]], b: dict[str, dict[int, float]], differs: list[MetricRow]
) -> bool:
    """Whether the differences began as small as rounding, in every metric that was among the first
    to differ, and then grew by no jump in loss and norm. `differs`: the rows that are not bitwise
    equal, the earliest first."""
    begins = [
        row.first_size for row in differs if row.first_difference == differs[0].first_difference
    ]
    if max(begins) > FIRST_ROUNDING:
        return False
    for metric in JUDGED:
        # loss and norm are float32: of a difference below 1e-7 nothing is seen
        largest = ROUNDING / GROWTH
        for step in sorted(a.get(metric, {}).keys() & b.get(metric, {}).keys()):
            size = difference(a[metric][step], b[metric][step])
            if size > GROWTH * largest:
                return False
            largest = max(largest, size)
    return True


def _last(metrics: dict[str, dict[int, float]]) -> int:
    return max(step for by_step in metrics.values() for step in by_step)


def logged(folder: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, metric -> value) of each line of metrics.jsonl, oldest first. Raises InputError."""
    path = folder / "metrics.jsonl"
    damaged = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if damaged:  # the last line may be cut: the run was killed, or is writing it
                    raise InputError(f"{path}: line {damaged} is not an object with a step")
                try:
                    line = json.loads(text)
                    step = operator.index(line.pop("step"))
                    values = {key: float(value) for key, value in line.items()}
                except (ValueError, KeyError, AttributeError, TypeError):
                    damaged = number
                    continue
                yield step, values
    except OSError as error:
        raise InputError(
            f"{folder} is not the folder of a run: {path.name}: {error.strerror}"
        ) from None


def series(folder: Path) -> dict[str, dict[int, float]]:
    """metric -> step -> value, of metrics.jsonl, without timings."""
    metrics: dict[str, dict[int, float]] = {}
    for step, values in logged(folder):
        for key, value in values.items():
            if key not in TIMINGS and not key.startswith(TIMING_PREFIXES):
                metrics.setdefault(key, {})[step] = value
    return metrics


def difference(a: float, b: float) -> float:
    """Relative; 0 only if bitwise equal, also for two that are not a number; infinite if one is not
    finite."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a) and math.isfinite(b) else math.inf


def _row(
    metric: str, steps: list[int], a: dict[int, float], b: dict[int, float], limit: float
) -> MetricRow:
    by_step = {step: difference(a[step], b[step]) for step in steps}
    first = next((step for step in steps if by_step[step] > 0), None)
    largest = max(steps, key=by_step.get, default=None)
    tail = [
        b[step] - a[step]
        for step in steps[-math.ceil(len(steps) / 10) :]
        if math.isfinite(b[step] - a[step])
    ]
    return MetricRow(
        metric,
        len(steps),
        first,
        by_step.get(first, 0.0),
        next((step for step in steps if by_step[step] > limit), None),
        by_step.get(largest, 0.0),
        largest if by_step.get(largest) else None,
        statistics.fmean(tail) if tail else 0.0,
    )


def checkpoints(a: Path, b: Path) -> tuple[str, bool | None]:
    """Compares the newest step that both have saved: a sentence, and whether the state is the same
    (None: unknown).

    It compares the hashes in the files' headers and reads nothing else, so both runs must have had
    the same mesh.
    """
    try:
        saved = [
            {verify.parse_name(path.name)[1]: path for path in reversed(verify.find(run))}
            for run in (a, b)
        ]
        step = max(saved[0].keys() & saved[1].keys(), default=None)
        if step is None:
            return "no step that both have", None
        one, other = (verify.read_manifest(by_step[step]) for by_step in saved)
        if one["mesh"] != other["mesh"] or one["tensors"].keys() != other["tensors"].keys():
            return (
                f"step {step}: the mesh or the tensors differ, so hashes cannot be compared",
                None,
            )
        hashes = [
            verify.part_hashes(by_step[step], manifest)
            for by_step, manifest in zip(saved, (one, other), strict=True)
        ]
    except (InputError, verify.Damaged) as error:
        return str(error), None
    different = [name for name in one["tensors"] if hashes[0][name] != hashes[1][name]]
    if not different:
        return f"step {step}: all {len(one['tensors'])} tensors are bitwise equal", True
    return (
        f"step {step}: {len(different)} of {len(one['tensors'])} tensors differ, the first of them "
        f"{different[0]}",
        False,
    )


def explanations(a: Path, b: Path) -> tuple[dict[str, list], dict[str, list]]:
    """What differs between the two runs: the options; and the code, data, versions, mesh and
    devices of the last start."""
    return _unlike(_options(a), _options(b)), _unlike(_about(a), _about(b))


def _options(run: Path) -> dict[str, object]:
    try:
        tables = tomli.loads((run / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    options_of_run = {
        f"{table}.{key}": value
        for table, options in tables.items()
        for key, value in options.items()
    }
    return {key: value for key, value in options_of_run.items() if key not in PLACES}


def _about(run: Path) -> dict[str, object]:
    """Name -> a fact about the run that can be compared and printed."""
    facts: dict[str, object] = {}
    try:
        starts = [start for start in goodput.read(run) if start.about and not start.refused]
    except InputError:
        starts = []
    if starts:
        last = starts[-1].about
        facts["commit"] = last["code"]["commit"][:12] or "(no git)"
        facts |= {f"code {path}": digest for path, digest in last["code"]["files"].items()}
        facts |= {f"version of {name}": version for name, version in last["versions"].items()}
        variables = last["environment"].items()
        facts |= {
            f"environment {name}": value for name, value in variables if name not in OF_THE_LAUNCHER
        }
        facts["mesh"] = _counts(verify.all_dimensions(last.get("mesh", {})))
        devices: dict[str, int] = {}
        for row in last.get("hosts", []):
            devices[row["device"]] = devices.get(row["device"], 0) + len(row["ranks"])
        facts["devices"] = _counts(devices)
        facts["versions of the code"] = len(
            {json.dumps(start.about["code"]["files"], sort_keys=True) for start in starts}
        )
    try:
        data = json.loads((run / "data.json").read_text(encoding="utf-8"))
        facts |= {
            f"data {source['name'] or 'source'}": source["fingerprint"]
            for source in data["description"]["sources"]
        }
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return facts


def _counts(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


def _unlike(a: dict, b: dict) -> dict[str, list]:
    return {
        key: [a.get(key), b.get(key)] for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)
    }


def table(a: Path, b: Path, comparison: Comparison, tolerance: float) -> str:
    """For a person: the verdict first."""
    lines = [f"A {a}", f"B {b}", comparison.verdict, ""]
    width = max(len(row.metric) for row in comparison.rows)
    limit = f"by > {tolerance:g}"
    lines.append(
        f"{'metric':{width}}   steps  first differs  {limit:>11}   largest   at step  B - A at "
        "the end"
    )
    for row in comparison.rows:
        if not row.steps:
            lines.append(f"{row.metric:{width}}  {0:6}  in one run only")
            continue
        first, beyond = (
            "-" if step is None else step for step in (row.first_difference, row.first_beyond)
        )
        worst = (
            f"{row.largest:8.1e}  {row.largest_at:8}  {row.last_tenth:+.3g}"
            if row.largest
            else f"{'-':>8}  {'-':>8}  -"
        )
        lines.append(f"{row.metric:{width}}  {row.steps:6}  {first:>13}  {beyond:>11}  {worst}")
    lines += ["", f"checkpoints: {comparison.checkpoint}"]
    code = [
        key for key in comparison.environment if key.startswith("code ") and key.endswith(".py")
    ]
    rest = {key: values for key, values in comparison.environment.items() if key not in code}
    for title, differences in (("options", comparison.config), ("environment", rest)):
        lines.append(f"{title}: " + ("the same" if not differences else ""))
        lines += [
            f"  {key}: A {_shown(one)}, B {_shown(other)}"
            for key, (one, other) in differences.items()
        ]
    lines.append(
        "code: "
        + (
            "the same"
            if not code
            else "differs in " + ", ".join(key.removeprefix("code ") for key in code)
        )
    )
    return "\n".join(lines)


def _shown(value: object) -> str:
    if value is None:
        return "(none)"
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def plot(a: Path, b: Path, comparison: Comparison, limit: float, path: Path) -> None:
    """The losses of both runs, and below, the relative difference of each metric that differs.
    Needs matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise InputError(
            "--png needs matplotlib: pip install matplotlib, or leave the option out"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    one, other = series(a), series(b)
    figure, (top, below) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 7), layout="constrained")
    for title, run, line, dots in (
        (f"A: {a.name}", one, "C0-", "C0o"),
        (f"B: {b.name}", other, "C1--", "C1x"),
    ):
        for metric, style, label in (
            ("loss", line, title),
            ("validation_loss", dots, f"{title}, validation"),
        ):
            if points := sorted(run.get(metric, {}).items()):
                top.plot(
                    *zip(*points, strict=True), style, label=label, linewidth=1.2, markersize=6
                )
    top.set_title(comparison.verdict, fontsize="medium", wrap=True)
    top.set_ylabel("loss, nats per token")
    top.legend()
    shown = sorted((row for row in comparison.rows if row.largest), key=lambda row: -row.largest)[
        :8
    ]
    for row in shown:
        steps = sorted(one[row.metric].keys() & other[row.metric].keys())
        apart = {step: difference(one[row.metric][step], other[row.metric][step]) for step in steps}
        points = [(step, value) for step, value in apart.items() if 0 < value < math.inf]
        if points:
            below.plot(
                *zip(*points, strict=True), ".-", label=row.metric, linewidth=0.8, markersize=4
            )
    below.set_ylabel("|A - B| / max(|A|, |B|)")
    below.set_xlabel("step")
    if shown:
        below.set_yscale("log")
        below.axhline(limit, color="grey", linestyle=":", label=f"{limit:g}")
        below.legend()
    else:
        below.text(0.5, 0.5, "bitwise equal", transform=below.transAxes, ha="center", va="center")
        below.set_yticks([])
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise InputError(f"--png={path} cannot be written: {error}") from None
    finally:
        pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare_runs", description="Did my change alter the numbers?"
    )
    parser.add_argument("a", type=Path, help="the folder of a run")
    parser.add_argument("b", type=Path, help="the folder of another")
    parser.add_argument(
        "--tolerance", type=float, help="relative difference that passes for equal (exit code 0)"
    )
    parser.add_argument(
        "--png", type=Path, help="write a plot of the differences to this file (needs matplotlib)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    if options.tolerance is not None and not 0 <= options.tolerance < math.inf:
        parser.error("--tolerance must be a number, not negative")
    limit = ROUNDING if options.tolerance is None else options.tolerance
    try:
        comparison = compare(options.a, options.b, options.tolerance)
        if options.png:
            plot(options.a, options.b, comparison, limit, options.png)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(
        json.dumps(asdict(comparison), indent=1, default=str)
        if options.json
        else table(options.a, options.b, comparison, limit)
    )
    return comparison.code


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends quietly
    sys.exit(main())
