"""Find where a recomputed step differs from the run's records, and from a second computation.

Shapes:  S sequences of the global batch   T tokens of a sequence
"""

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from models.lora import is_adapter
from tools.differences import JUDGED, Limits, relative
from tools.parity import compare
from tools.parity.trajectory import WINDOWS
from tools.replay.steps import StepNotes

Values = dict[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """Difference, and the first place where it occurs."""

    step: int
    against: str
    what: str
    where: str
    size: float  # relative; inf where something is missing
    more: int = 0  # further places


def place(got: np.ndarray, want: np.ndarray) -> str:
    """Return the smallest box of a tensor with all differences, as indices; "" if it is all."""
    if got.shape != want.shape or got.ndim == 0:
        return ""
    apart = np.abs(got.astype(np.float64) - want)
    apart[~np.isfinite(apart)] = np.inf
    # what is smaller than a thousandth of the largest is rounding
    far = np.argwhere(apart > apart.max() / 1000)
    low, high = far.min(0), far.max(0) + 1
    if (high - low == got.shape).all():
        return ""
    ranges = []
    for start, stop, size in zip(low, high, got.shape, strict=True):
        one = f"{start}" if stop == start + 1 else f"{start}:{stop}"
        ranges.append(":" if (start, stop) == (0, size) else one)
    return f" [{', '.join(ranges)}]"


def of_state(step: int, against: str, what: str, got: Values, want: Values, limit: float) -> list:
    """Return at most one row: the first tensor that differs, in the order of the model. An average of
    squares (exp_avg_sq) has twice the relative error of what is squared."""
    found = []
    for name in [*want, *(name for name in got if name not in want)]:
        a, b = got.get(name, np.empty(0)), want.get(name, np.empty(0))
        error = relative(a, b)
        if not error <= limit * (2 if name.endswith("_sq") else 1):
            found.append((name + place(a, b), error))
    return first_of(step, against, what, found)


def first_of(step: int, against: str, what: str, found: list[tuple[str, float]]) -> list[Row]:
    """Return a row of the first place, if there is one. found: places and sizes."""
    return [Row(step, against, what, *found[0], len(found) - 1)] if found else []


def from_record(
    ranks: list[StepNotes],
    metrics: dict[str, float] | None,
    gradients: dict[str, list[float]] | None,
    saved: Values | None,
    limits: Limits,
    is_first: bool,
) -> list[Row]:
    """Compare with the records that the run wrote of this step, and the checkpoint after it. Each
    may be None."""
    step, rows = ranks[0].step, []
    limit = limits.values if is_first else limits.state
    got = {"loss": ranks[0].loss[0], "grad_norm": ranks[0].norm[0]}
    for key, title in JUDGED.items():
        if key == "grad_norm" and gradients is not None:
            rows += of_gradients(ranks, gradients, limit)
        if metrics is None:
            continue
        error = relative(got[key], metrics[key])
        if not error <= limit:
            rows.append(Row(step, "record", title, f"{metrics[key]:.9g} -> {got[key]:.9g}", error))
    if saved is not None:
        weights = of_kind(saved, "model.")
        moments = of_kind(saved, "optimizer.")
        mine = compare.merged(ranks, "weights", -1), compare.merged(ranks, "moments", -1)
        if weights and all(map(is_adapter, weights)):  # their base is not saved
            mine = {name: x for name, x in mine[0].items() if is_adapter(name)}, mine[1]
        rows += of_state(step, "record", "weights after", mine[0], weights, limits.state)
        rows += of_state(step, "record", "moments after", mine[1], moments, limits.state)
    return rows


def of_gradients(
    ranks: list[StepNotes], recorded: dict[str, list[float]], limit: float
) -> list[Row]:
    """Return at most one row: the first parameter whose gradient has another norm or digest than
    the run wrote (training/digests.py)."""
    whole = compare.merged(ranks, "gradients")
    every = replace(ranks[0], outputs={}, gradients=whole)
    for seen in ranks:
        every.outputs.update(seen.outputs)
    found = []
    for name in compare.in_order_of_backward(every):
        got = ranks[0].digests[name]
        want = recorded.get(name, [np.nan, np.nan])
        error = np.abs(np.subtract(got, want)).max() / max(want[0], np.finfo(np.float32).tiny)
        error = 0.0 if got == want else float(np.nan_to_num(error, nan=np.inf))
        if error > limit:
            found.append((name, error))
    return first_of(ranks[0].step, "record", "gradient", found)


def of_kind(saved: Values, prefix: str) -> Values:
    return {n.removeprefix(prefix): x for n, x in saved.items() if n.startswith(prefix)}


def by_token(ranks: list[StepNotes], kind: str, T: int) -> np.ndarray:
    """Join tokens or labels of all ranks, [S, T]."""
    every = compare.windows(ranks)
    result = np.full((len(every), T), -1, np.int64)
    for seen in ranks:
        for samples, values in zip(seen.samples, getattr(seen, kind), strict=True):
            rows = np.searchsorted(every, samples)
            result[rows[:, None], seen.positions] = values
    return result


def of_data(ranks: list[StepNotes], other: StepNotes, against: str) -> list[Row]:
    """Return at most one row: the first sequence or token that is not the same."""
    step, T = other.step, len(other.positions)
    windows, wanted = compare.windows(ranks), compare.windows([other])
    if not np.array_equal(windows, wanted):
        strange = sorted({*windows.tolist()} ^ {*wanted.tolist()})
        where = f"window {strange[0] % WINDOWS} is read by one of them alone"
        return [Row(step, against, "data", where, float("inf"), len(strange) - 1)]
    for kind in "tokens", "labels":
        differs = np.argwhere(by_token(ranks, kind, T) != by_token([other], kind, T))
        if len(differs):
            row, position = differs[0]
            where = f"{kind} of window {wanted[row] % WINDOWS}, position {position}"
            return [Row(step, against, "data", where, len(differs) / (len(wanted) * T))]
    return []


def of_microbatches(ranks: list[StepNotes], other: StepNotes, against: str) -> list[Row]:
    """Return at most one row: a rank that has not run all of its microbatches."""
    for rank, seen in enumerate(ranks):
        expected = len(seen.samples)
        ran = min(map(len, seen.outputs.values()), default=expected)
        if ran < expected:
            where = f"rank {rank} ran {ran} of {expected}"
            return [Row(other.step, against, "microbatches", where, 1 - ran / expected)]
    return []


def computed_by(ranks: list[StepNotes], other: StepNotes, module: str) -> str:
    """Name the ranks whose tokens differ after this module; "" if all ranks are among them."""
    T = len(other.positions)
    want = compare.by_token([other], module, None, T)  # [S, T, F]
    got = compare.by_token(ranks, module, want.shape[-1], T)
    apart = np.nan_to_num(np.abs(got - want), nan=np.inf).max(-1)  # [S, T]
    far = apart > apart.max() / 1000
    every = compare.windows(ranks)
    having = [rank for rank, seen in enumerate(ranks) if module in seen.outputs]
    wrong = []
    for rank in having:
        rows = np.searchsorted(every, ranks[rank].samples.ravel())
        if far[np.ix_(rows, ranks[rank].positions)].any():
            wrong.append(rank)
    return "" if wrong == having else f" on rank {', '.join(map(str, wrong))}"


def from_other(
    ranks: list[StepNotes],
    other: StepNotes,
    against: str,
    limits: Limits,
    is_first: bool,
    same_run: bool,
) -> list[Row]:
    """Compare with the same step computed by one process: of the same run, or of another one."""
    step = other.step
    before = limits.state if not is_first else (0.0 if same_run else limits.values)
    weights, moments = (compare.merged(ranks, kind, 0) for kind in ("weights", "moments"))
    rows = of_state(step, against, "weights before", weights, other.weights[0], before)
    rows += of_state(step, against, "moments before", moments, other.moments[0], before)
    data = of_data(ranks, other, against)
    rows += data
    if data and data[0].where.startswith("window"):
        return rows  # there is nothing to compare
    lost = of_microbatches(ranks, other, against)
    rows += lost
    limit = limits.values if is_first else limits.state
    if lost:
        return rows + of_numbers(ranks, other, against, limit)
    seen = compare.compare(ranks, other, limit, limits.state, initial_limit=float("inf"))
    of_phase: dict[str, list] = defaultdict(list)
    for difference in seen.found:
        phase, _, where = difference.where.partition(", ")
        if phase.startswith("rank "):
            phase, where = "ranks", difference.where
        of_phase[phase].append((where, difference.error))
    for phase, found in of_phase.items():
        where, error = found[0]
        name = where.removeprefix("output of ").removeprefix("gradient of ")
        if phase == "backward":
            want = other.gradients[name]
            _, got = compare.furthest(ranks, "gradients", name, want)
            name += place(got, want)
        if phase == "forward":
            name += computed_by(ranks, other, name)
        rows.append(Row(step, against, phase, name or "-", error, len(found) - 1))
    moments = compare.merged(ranks, "moments", -1)
    return rows + of_state(step, against, "moments after", moments, other.moments[-1], limits.state)


def of_numbers(ranks: list[StepNotes], other: StepNotes, against: str, limit: float) -> list[Row]:
    rows = []
    for title, key in ("loss", "loss"), ("norm of the gradient", "norm"):
        got, want = getattr(ranks[0], key), getattr(other, key)
        error = relative(got, want)
        if not error <= limit:
            rows.append(Row(other.step, against, title, f"{want[0]:.9g} -> {got[0]:.9g}", error))
    return rows
