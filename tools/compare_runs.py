"""Find whether a change altered the numbers of a run, from which step on, and by how much.

    python -m tools.compare_runs runs/before runs/after --picture difference.svg

compares every metric of two run folders at the steps that both have logged (floats in metrics.jsonl
are exact, so equal is bitwise equal), the newest checkpoint of a step that both have, and
everything that could explain a difference: options, data, code, versions, mesh, devices. Metrics of
time and memory are left out. Exit code 0: bitwise equal (or, with --tolerance, equal to that); 1:
they differ; 2: there is nothing to compare.

Rounding shows within a few steps and then grows, as training amplifies it: two meshes agree to 1e-7
at first. A change of meaning shows at once at 1e-3 and more, in the loss of the first step if it is
in the model, one step later if it is in the optimizer. So the verdict says "like rounding" where
loss and norm of the gradient began to differ by no more than rounding in float32 does, and no step
made a hundred times as much of it.
"""

import argparse
import json
import math
import signal
import statistics
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path

import tomli

from checkpoint import verify
from configs import dropped, program
from configs.schema import InputError
from configs.words import aligned
from reliability import goodput
from reliability.objects import Key
from tools.differences import JUDGED, LIMITS, parse_tolerance, relative
from tools.logged import logged
from tools.places import files_of, place
from tools.report import picture
from training.lines import GROUPS

PLACES = {"run.folder", "data.cache"}  # options that say where, not what
# new with every start
OF_THE_LAUNCHER = {"MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"}
# relative: between meshes in float32, 20 steps stay within 4e-7 (tests/test_resume.py compares to
# this)
ROUNDING = LIMITS["float32"].values

# What rounding does in float32 (tests/parity.py, on models that amplify it and others): the first
# difference of the loss or the norm is 6e-8 to 2e-6, and a step makes it up to 20 times as large.
FIRST_ROUNDING = 3e-6
GROWTH = 100


@dataclass(frozen=True)
class MetricRow:
    """Comparison of one metric. Differences are relative: |a - b| / max(|a|, |b|)."""

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
    apart: dict[str, dict[int, float]]  # metric -> step -> relative difference


def compare(a: Path | Key, b: Path | Key, tolerance: float | None = None) -> Comparison:
    """Raises InputError where a place is no run's, or the two have no step in common."""
    files_a, files_b = files_of(a), files_of(b)
    metrics_a, metrics_b = series(files_a), series(files_b)
    common = sorted({*chain(*metrics_a.values())} & {*chain(*metrics_b.values())})
    if not common:
        raise InputError(f"{a} and {b} have no logged step in common")
    limit = ROUNDING if tolerance is None else tolerance
    apart: dict[str, dict[int, float]] = {}
    rows = []
    for metric in dict.fromkeys([*metrics_a, *metrics_b]):
        of_a, of_b = metrics_a.get(metric, {}), metrics_b.get(metric, {})
        both = sorted(of_a.keys() & of_b.keys())
        apart[metric] = {step: relative(of_a[step], of_b[step]) for step in both}
        change = {step: of_b[step] - of_a[step] for step in both}
        rows.append(_row(metric, apart[metric], change, limit))
    differs = False
    try:
        weights, same_weights = checkpoints(a, b)
    except (InputError, verify.Damaged) as error:
        weights, same_weights = f"cannot be compared: {error}", False
        differs = True
    if any(row.first_difference is not None for row in rows):
        differs |= tolerance is None or any(row.first_beyond is not None for row in rows)
    else:
        differs |= same_weights is False
    steps = [common[0], common[-1]]
    where = f"steps {steps[0]} to {steps[1]}"
    for name, metrics in ("A", metrics_a), ("B", metrics_b):
        last = max(chain(*metrics.values()))
        if last > steps[1]:
            where += f", {name} goes on to {last}"
    explained = explanations(files_a, files_b)
    verdict = f"{_verdict(rows, apart, same_weights, limit)} ({where})"
    return Comparison(verdict, int(differs), steps, rows, weights, *explained, apart)


def _verdict(
    rows: list[MetricRow],
    apart: dict[str, dict[int, float]],
    same_weights: bool | None,
    limit: float,
) -> str:
    unequal = [row for row in rows if row.first_difference is not None]
    beyond = [row for row in rows if row.first_beyond is not None]
    if not unequal and same_weights:
        return "bitwise equal"
    if not unequal and same_weights is None:
        return "metrics bitwise equal; no checkpoints were compared"
    if not unequal:
        return "metrics bitwise equal, checkpoints not"
    differs = sorted(unequal, key=attrgetter("first_difference"))
    row = differs[0]
    if not beyond:
        worst = max(row.largest for row in rows)
        since = f"not bitwise from step {row.first_difference} on"
        return f"equal to {limit:g}: {since}, by {worst:.1e} (relative) at most"
    first = min(beyond, key=attrgetter("first_beyond"))
    size = f"{row.metric} by {row.first_size:.1e}, relative"
    verdict = f"they part at step {row.first_difference} ({size})"
    # the smaller at first, the more it is like rounding
    if first.first_beyond > row.first_difference:
        verdict += (
            f", and by more than {limit:g} from step {first.first_beyond} on ({first.metric})"
        )
    if like_rounding(apart, differs):
        verdict += ": like rounding, which began small and grew step by step"
    return verdict


def like_rounding(apart: dict[str, dict[int, float]], differs: list[MetricRow]) -> bool:
    """Return True if the differences look like rounding: every metric among the first to differ
    began with a difference as small as rounding, and loss and gradient norm then grew without a
    jump.

    apart: metric -> step -> relative difference; differs: the rows that are not bitwise equal, the
    earliest first.
    """
    earliest = differs[0].first_difference
    begins = [row.first_size for row in differs if row.first_difference == earliest]
    if max(begins) > FIRST_ROUNDING:
        return False
    for metric in JUDGED:
        # loss and norm are float32: of a difference below 1e-7 nothing is seen
        largest = ROUNDING / GROWTH
        for size in apart.get(metric, {}).values():
            if size > GROWTH * largest:
                return False
            largest = max(largest, size)
    return True


def series(folder: Path) -> dict[str, dict[int, float]]:
    """Read metrics.jsonl as metric -> step -> value, without timings."""
    metrics: dict[str, dict[int, float]] = defaultdict(dict)
    for step, values in logged(folder):
        for key, value in values.items():
            if not key.startswith(GROUPS["perf"]):  # those measure the machine, not the model
                metrics[key][step] = value
    return dict(metrics)


def _row(metric: str, apart: dict[int, float], change: dict[int, float], limit: float) -> MetricRow:
    """apart: by step, the relative difference; change: the same as B - A."""
    first = next((step for step, size in apart.items() if size > 0), None)
    first_beyond = next((step for step, size in apart.items() if size > limit), None)
    largest = max(apart, key=apart.get, default=None)
    last_tenth = list(change.values())[-math.ceil(len(change) / 10) :]
    tail = [size for size in last_tenth if math.isfinite(size)]
    return MetricRow(
        metric,
        len(apart),
        first,
        apart.get(first, 0.0),
        first_beyond,
        apart.get(largest, 0.0),
        largest if apart.get(largest) else None,
        statistics.fmean(tail) if tail else 0.0,
    )


def checkpoints(a: Path | Key, b: Path | Key) -> tuple[str, bool | None]:
    """Compares the newest step that both have saved: a sentence, and whether the state is the same
    (None: there is nothing to compare). Raises InputError and Damaged for one that cannot be read.

    It compares the hashes in the files' headers and reads nothing else, so both runs must have had
    the same mesh.
    """
    saved_a = _saved_steps(a)
    saved_b = _saved_steps(b)
    step = max(saved_a.keys() & saved_b.keys(), default=None)
    if step is None:
        return "no checkpoint of the same step", None
    manifest_a = verify.read_manifest(saved_a[step])
    manifest_b = verify.read_manifest(saved_b[step])
    names = manifest_a["tensors"].keys()
    if manifest_a["mesh"] != manifest_b["mesh"] or names != manifest_b["tensors"].keys():
        return f"step {step}: the mesh or the tensors differ, so hashes cannot be compared", None
    hashes_a = verify.part_hashes(saved_a[step], manifest_a)
    hashes_b = verify.part_hashes(saved_b[step], manifest_b)
    different = [name for name in names if hashes_a[name] != hashes_b[name]]
    if not different:
        return f"step {step}: all {len(names)} tensors are bitwise equal", True
    count = f"{len(different)} of {len(names)} tensors differ"
    return f"step {step}: {count}, the first of them {different[0]}", False


def _saved_steps(run: Path | Key) -> dict[int, Path | Key]:
    steps = {}
    for path in reversed(verify.look(run)):
        steps[verify.parse_name(path.name)[1]] = path
    return steps


def explanations(a: Path, b: Path) -> tuple[dict[str, list], dict[str, list]]:
    """List the differences that could explain diverging metrics: options; and code, data, versions,
    mesh and devices of each run's last start."""
    return _unlike(_options(a), _options(b)), _unlike(_about(a), _about(b))


def _options(run: Path) -> dict[str, object]:
    try:
        tables = tomli.loads((run / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = {}
    for table, options in tables.items():
        for key, value in options.items():
            name = f"{table}.{key}"
            is_old = name in dropped.DROPPED and dropped.holds(name, value)
            if name not in PLACES and not is_old:
                found[name] = value
    return found


def _about(run: Path) -> dict[str, object]:
    """Name -> a fact about the run that can be compared and printed."""
    facts: dict[str, object] = {}
    try:
        starts = [start for start in goodput.read(run) if start.about and not start.did_nothing]
    except InputError:
        starts = []
    if starts:
        last = starts[-1].about
        facts["commit"] = last["code"]["commit"][:12] or "(no git)"
        facts |= {f"code {path}": digest for path, digest in last["code"]["files"].items()}
        facts |= {f"version of {name}": version for name, version in last["versions"].items()}
        for name, value in last["environment"].items():
            if name not in OF_THE_LAUNCHER:
                facts[f"environment {name}"] = value
        facts["mesh"] = _counts(verify.all_dimensions(last.get("mesh", {})))
        facts["devices"] = _counts(devices(last))
        files = [start.about["code"]["files"] for start in starts]
        facts["versions of the code"] = len({json.dumps(one, sort_keys=True) for one in files})
    try:
        data = json.loads((run / "data.json").read_text(encoding="utf-8"))
        facts |= {
            f"data {source['name'] or 'source'}": source["fingerprint"]
            for source in data["description"]["sources"]
        }
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return facts


def devices(about: dict) -> Counter[str]:
    """Return the number of ranks on each kind of device that a start has recorded."""
    found: Counter[str] = Counter()
    for host in about.get("hosts", []):
        found[host["device"]] += len(host["ranks"])
    return found


def _counts(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


def _unlike(a: dict, b: dict) -> dict[str, list]:
    both = {key: [a.get(key), b.get(key)] for key in dict.fromkeys([*a, *b])}
    return {key: values for key, values in both.items() if values[0] != values[1]}


def table(a: Path | Key, b: Path | Key, comparison: Comparison, tolerance: float) -> str:
    head = ("steps", "first differs", f"by > {tolerance:g}", "largest", "at step")
    rows = [("metric", *head, "B - A at the end")]
    for row in comparison.rows:
        cells = ["-"] * 5
        if not row.steps:
            cells = [*[""] * 4, "in one run only"]
        elif row.largest:
            beyond = "-" if row.first_beyond is None else str(row.first_beyond)
            worst = f"{row.largest:.1e}", str(row.largest_at), f"{row.last_tenth:+.3g}"
            cells = [str(row.first_difference), beyond, *worst]
        rows.append((row.metric, str(row.steps), *cells))
    table_of_metrics = aligned(rows, right=range(1, 6))
    lines = [f"A {a}", f"B {b}", comparison.verdict, "", *table_of_metrics]
    lines += ["", f"checkpoints: {comparison.checkpoint}"]
    environment = comparison.environment
    code = [key for key in environment if key.startswith("code ") and key.endswith(".py")]
    rest = {key: values for key, values in environment.items() if key not in code}
    for title, differences in (("options", comparison.config), ("environment", rest)):
        lines.append(f"{title}: " + ("the same" if not differences else ""))
        for key, (one, other) in differences.items():
            lines.append(f"  {key}: A {_shown(one)}, B {_shown(other)}")
    changed = ", ".join(key.removeprefix("code ") for key in code)
    lines.append(f"code: differs in {changed}" if code else "code: the same")
    return "\n".join(lines)


def _shown(value: object) -> str:
    if value is None:
        return "(none)"
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def draw(a: Path | Key, b: Path | Key, comparison: Comparison, limit: float) -> str:
    """Return as SVG the relative differences over the steps, and dotted what passes as equal."""
    unequal = [row for row in comparison.rows if row.largest]
    shown = sorted(unequal, key=attrgetter("largest"), reverse=True)
    curves = []
    for row, color in zip(shown, picture.COLORS[:-1], strict=False):
        of_metric = comparison.apart[row.metric].items()
        sizes = {step: size for step, size in of_metric if 0 < size < math.inf}
        if sizes:
            curves.append(picture.curve(row.metric, color, "none", sizes))
    if curves:
        ends = dict.fromkeys(comparison.steps, limit)
        curves.append(picture.curve("equal below", picture.COLORS[-1], "2 3", ends))
    title = f"{a.name} and {b.name}: {comparison.verdict}"
    return picture.plot(title, "|A - B| / max(|A|, |B|)", curves, picture.LOG)


@program.refuses
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare_runs", description="Did my change alter the numbers?"
    )
    parser.add_argument("a", type=place, help="the folder or the URL of a run")
    parser.add_argument("b", type=place, help="of another")
    parser.add_argument(
        "--tolerance",
        type=parse_tolerance,
        help="relative difference that passes as equal (exit code 0)",
    )
    parser.add_argument("--picture", type=Path, help="write the differences as this SVG file, too")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    limit = ROUNDING if options.tolerance is None else options.tolerance
    comparison = compare(options.a, options.b, options.tolerance)
    if options.picture:
        picture.write(options.picture, draw(options.a, options.b, comparison, limit))
    if options.json:
        about = asdict(comparison)
        del about["apart"]
        print(json.dumps(about, indent=1, default=str))
    else:
        print(table(options.a, options.b, comparison, limit))
    return comparison.code


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends quietly
    program.run(main)
