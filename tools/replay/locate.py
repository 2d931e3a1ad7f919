"""The first operator, collective or message that is wrong, of what all ranks have noted of a step
(tools/replay/operators.py)."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tools.differences import Limits, relative
from tools.parity import compare
from tools.replay.judge import Row, computed_by
from tools.replay.operators import CheckedCollective, Operation, Summary
from tools.replay.steps import StepNotes

# With tensor parallelism each rank looks up what is in its part of the vocabulary, and what it finds
# for other tokens is masked afterwards; and autograd adds up gradients in another order.
OTHERWISE_WITH_TP = (
    ("forward", "aten.embedding"),
    ("forward", "aten.gather"),
    ("backward", "aten.add"),
)
DOUBLE = 1e-14  # how far sums in float64 are apart, as a part of the norm: 1e-16 was seen


def located(
    ranks: list[StepNotes], other: StepNotes, against: str, limits: Limits, is_first: bool
) -> list[Row]:
    """Locate the operator or collective at fault in a step that a mesh, or one process, and `other`
    began with the same state."""
    limit = limits.values if is_first else limits.state
    rows = of_collectives(ranks, other.step) + of_messages(ranks, other.step)
    if rows:
        return rows  # what operators make of it is no news
    if len(ranks) == 1:
        return in_order(ranks[0], other, against, limit)
    return by_token(ranks, other, against, limit)


# Collectives, by their definition ------------------------------------------------------------------


def error_of(got: Summary, wanted: list[Summary], factor: float = 1.0) -> float:
    """Return the distance of a part from the sum of these, relative to their norms."""
    want = sum(part.digest for part in wanted) * factor
    size = sum(part.norm for part in wanted) * factor
    apart = abs(got.digest - want)
    if len(wanted) == 1:
        apart = max(apart, abs(got.norm - wanted[0].norm * factor))
    strange = any(part.strange for part in wanted)
    if bool(got.strange) != strange:
        return float("inf")
    return 0.0 if apart == 0 or strange else apart / max(size, np.finfo(np.float32).tiny)


def reduce(calls: list[CheckedCollective], i: int) -> list[tuple[Summary, list[Summary]]]:
    return [(calls[i].got[0], [call.sent[0] for call in calls])]


def reduce_scatter(calls: list[CheckedCollective], i: int) -> list[tuple[Summary, list[Summary]]]:
    return [(calls[i].got[0], [call.sent[i] for call in calls])]


def gather(calls: list[CheckedCollective], i: int) -> list[tuple[Summary, list[Summary]]]:
    return [(part, [call.sent[0]]) for part, call in zip(calls[i].got, calls, strict=True)]


def exchange(calls: list[CheckedCollective], i: int) -> list[tuple[Summary, list[Summary]]]:
    return [(part, [call.sent[i]]) for part, call in zip(calls[i].got, calls, strict=True)]


# kind -> of the rank number i of a group: each part that it got, and the parts it should be the sum of
DEFINITIONS: dict[str, Callable] = {
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "gather": gather,
    "exchange": exchange,
}


def of_collectives(ranks: list[StepNotes], step: int) -> list[Row]:
    """Return at most two rows: the first collective whose result contradicts its definition, and
    the modules whose gradient no collective has reduced."""
    rows = []
    wrong: list[tuple[int, CheckedCollective, list[int], float]] = []
    for group, calls_of in calls_by_group(ranks).items():
        for calls in zip(*calls_of, strict=False):  # one of each rank of the group
            errors = {}
            for i, rank in enumerate(group):
                error = error_of_call(list(calls), i)
                if error > (len(group) + 2) * max(calls[0].eps, DOUBLE):
                    errors[rank] = error
            if errors:
                wrong.append((calls[0].number, calls[0], list(errors), max(errors.values())))
    if wrong:
        _, call, of_ranks, error = min(wrong, key=first_of)
        where = f"{call.name} of {call.module or 'the step'} on {named(of_ranks)}, {call.line}"
        rows.append(Row(step, "its definition", "collective", where, error, len(wrong) - 1))
    missing: dict[str, list[int]] = {}
    for rank, seen in enumerate(ranks):
        for module in seen.operators.unreduced:
            missing.setdefault(module, []).append(rank)
    if missing:
        module, of_ranks = next(iter(missing.items()))
        where = f"no {usual_reduction(ranks)} of {module or 'the root'} on {named(of_ranks)}"
        more = len(missing) - 1
        rows.append(Row(step, "other modules", "collective", where, float("inf"), more))
    return rows


def first_of(found: tuple) -> int:
    return found[0]


def named(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


def usual_reduction(ranks: list[StepNotes]) -> str:
    names: Counter[str] = Counter()
    for seen in ranks:
        for call in seen.operators.collectives:
            if call.kind == "reduce_scatter":
                names[call.name] += 1
    return names.most_common(1)[0][0] if names else "all-reduce"


def calls_by_group(ranks: list[StepNotes]) -> dict[tuple[int, ...], list[list[CheckedCollective]]]:
    """Return the ranks of a group -> the calls of each in that group."""
    groups: dict[tuple[int, ...], list[list[CheckedCollective]]] = {}
    for rank, seen in enumerate(ranks):
        for call in seen.operators.collectives:
            of_ranks = groups.setdefault(call.ranks, [[] for _ in call.ranks])
            of_ranks[call.ranks.index(rank)].append(call)
    return groups


def error_of_call(calls: list[CheckedCollective], i: int) -> float:
    """Return the largest error in the result of rank number i of the group. 0 for calls that are
    not compared: a maximum, and calls that are not the same on all ranks."""
    if len({(call.name, call.reduction) for call in calls}) > 1:
        return 0.0
    if calls[i].reduction not in ("", "sum", "avg"):
        return 0.0
    factor = 1 / len(calls) if calls[i].reduction == "avg" else 1.0
    pairs = DEFINITIONS[calls[i].kind](calls, i)
    return max(error_of(got, wanted, factor) for got, wanted in pairs)


# Messages of a pipeline ----------------------------------------------------------------------------


def of_messages(ranks: list[StepNotes], step: int) -> list[Row]:
    """Return at most one row: the first message that did not arrive as it was sent, in the order of
    the first rank that got a wrong one."""
    wrong: list[tuple[str, float]] = []
    for receiver, seen in enumerate(ranks):
        for (sender, name), parts in seen.messages.got.items():
            sent = ranks[sender].messages.sent[receiver, name]
            for got, want in zip(parts, sent, strict=True):
                error = error_of(got, [want])
                if error > 0:
                    wrong.append((f"{name}, from rank {sender} to rank {receiver}", error))
    if not wrong:
        return []
    where, error = wrong[0]
    return [Row(step, "what was sent", "message", where, error, len(wrong) - 1)]


# Operators ----------------------------------------------------------------------------------------


def apart(got: Summary, want: Summary) -> float:
    """Return the relative difference of two tensors, from their noted numbers."""
    if got.shape != want.shape or got.strange != want.strange:
        return float("inf")
    error = max(abs(got.norm - want.norm), abs(got.digest - want.digest))
    return error / max(want.norm, np.finfo(np.float32).tiny) if error else 0.0


def in_order(seen: StepNotes, other: StepNotes, against: str, limit: float) -> list[Row]:
    """Return at most one row: the first operator of two processes with a different result."""
    mine, theirs = seen.operators.operations, other.operators.operations
    for got, want in zip(mine, theirs, strict=False):
        same = (got.name, len(got.outputs)) == (want.name, len(want.outputs))
        if not same or got.module != want.module:
            where = f"{got.name} in place of {want.name} in {got.module or 'the step'}, {got.line}"
            return [Row(other.step, against, "operator", where, float("inf"))]
        error = max(map(apart, got.outputs, want.outputs), default=0.0)
        if error > limit:
            where = (
                f"{got.name} in {got.module or 'the step'}{because(got, want, limit)}, {got.line}"
            )
            return [Row(other.step, against, "operator", where, error)]
    if len(mine) == len(theirs):
        return []
    longer = max(mine, theirs, key=len)
    extra = longer[min(len(mine), len(theirs))]
    where = f"{extra.name} in {extra.module or 'the step'}, which only one side has, {extra.line}"
    return [Row(other.step, against, "operator", where, float("inf"))]


def because(got: Operation, want: Operation, limit: float) -> str:
    """Describe differing inputs of the two, where nothing before was wrong."""
    for mine, theirs in zip(got.constants, want.constants, strict=False):
        if mine != theirs:
            return f" ({mine} in place of {theirs})"
    for i, (mine, theirs) in enumerate(zip(got.inputs, want.inputs, strict=False)):
        if apart(mine, theirs) > limit:
            return f" (its input {i + 1}, {list(mine.shape)}, comes from elsewhere and differs)"
    return ""


def by_token(ranks: list[StepNotes], other: StepNotes, against: str, limit: float) -> list[Row]:
    """Return at most one row: the first operator, in the order of one process, after which the
    tokens of a mesh, or a weight's gradient, differ."""
    mine = [replace(seen, outputs=seen.operators.by_token) for seen in ranks]
    plain = replace(other, outputs=other.operators.by_token)
    passed: list[
        str
    ] = []  # operators of one process that no rank has, since the last that is equal
    for key, line in other.operators.keys.items():
        _, module, name, *_ = key.split("\t")
        without = ranks_without(ranks, key)
        running = ranks_that_run(ranks, key)
        if without and len(without) < len(running):
            instead = added(ranks[without[0]], other, key)
            where = f"{instead or 'nothing'} in place of {name} in {module} on {named(without)}, "
            return [Row(other.step, against, "operator", where + line, float("inf"))]
        if without:
            passed.append(key)
            continue
        error, suffix = error_at(mine, plain, key)
        if error is None:
            continue
        if error > limit:
            instead = in_place(ranks[running[0]], other, passed, key)
            where = f"{instead}{name} in {module}{suffix}, {line}"
            return [Row(other.step, against, "operator", where, error)]
        passed = []
    return []


def ranks_that_run(ranks: list[StepNotes], key: str) -> list[int]:
    """Return the ranks that run anything in the module of this key, in the same phase."""
    prefix = key.split("\t")[:2]
    return [
        rank
        for rank, seen in enumerate(ranks)
        if any(other.split("\t")[:2] == prefix for other in seen.operators.keys)
    ]


def ranks_without(ranks: list[StepNotes], key: str) -> list[int]:
    running = ranks_that_run(ranks, key)
    return [rank for rank in running if key not in ranks[rank].operators.keys]


def added(seen: StepNotes, other: StepNotes, key: str) -> str:
    """Return the first operator that this rank runs in the module of this key and one process does
    not."""
    prefix = key.split("\t")[:2]
    for own in seen.operators.keys:
        if own.split("\t")[:2] == prefix and own not in other.operators.keys:
            return own.split("\t")[2]
    return ""


def in_place(seen: StepNotes, other: StepNotes, passed: list[str], key: str) -> str:
    """Describe other changes since the last equal operator, as the beginning of a sentence."""
    prefix = key.split("\t")[:2]
    of_module = [name for name in passed if name.split("\t")[:2] == prefix]
    instead = added(seen, other, key)
    if not of_module or not instead:
        return ""
    name = of_module[0].split("\t")[2]
    return f"{instead} in place of {name}, then "


def error_at(ranks: list[StepNotes], other: StepNotes, key: str) -> tuple[float | None, str]:
    """Return the error of a mesh after this operator, and the ranks with it; None if it cannot be
    compared."""
    if key in other.outputs:
        return error_of_tokens(ranks, other, key)
    want = other.operators.summed.get(key)
    having = [seen.operators.summed[key] for seen in ranks if key in seen.operators.summed]
    if want is None or not having or any(x.shape != want.shape for x in having):
        return None, ""
    return relative(sum(having), want), ""


def error_of_tokens(ranks: list[StepNotes], other: StepNotes, key: str) -> tuple[float | None, str]:
    for seen in [*ranks, other]:
        if len(seen.outputs.get(key, seen.samples)) != len(seen.samples):
            return None, ""  # it does not run once in each microbatch
    T = len(other.positions)
    phase, _, name, *_ = key.split("\t")
    want = compare.by_token([other], key, None, T)
    got = compare.by_token(ranks, key, want.shape[-1], T)
    if got is None or got.shape != want.shape:
        return None, ""
    error = relative(got, want)
    if phase == "backward":  # most of it is a gradient, and was divided; some is not
        error = min(error, relative(got * ranks[0].operators.ranks_of_loss, want))
    partial = summed_over_tp(ranks, key)
    if partial and (phase, name) in OTHERWISE_WITH_TP:
        return None, ""
    if partial:
        error = min(error, relative(compare.by_token(partial, key, want.shape[-1], T), want))
    return error, computed_by(ranks, other, key)


def summed_over_tp(ranks: list[StepNotes], key: str) -> list[StepNotes]:
    """Sum over each tp group, if every rank has a part of each sum; [] without tensor parallelism,
    and where their outputs differ in shape."""
    groups: dict[bytes, dict[int, StepNotes]] = {}
    for seen in ranks:
        if key in seen.outputs:
            group = groups.setdefault(seen.samples.tobytes() + seen.positions.tobytes(), {})
            group[seen.tp_rank] = seen
    result = []
    for group in groups.values():
        of_group = [seen.outputs[key] for seen in group.values()]
        if len(of_group) == 1 or len({outputs[0].shape for outputs in of_group}) > 1:
            return []
        total = [sum(of_ranks) for of_ranks in zip(*of_group, strict=True)]
        first = next(iter(group.values()))
        result.append(replace(first, outputs={key: total}))
    return result
