"""Derives the segments of a run from its configuration, and continues those of a resumed run.

A description is JSON with everything but the step that decides the order of the data. `begin` turns
it into the segments of a new run: one, and one more at every step of a schedule. `state` is what a
checkpoint and data.json record of them. `resume` continues them. If the description has changed
since the checkpoint, that is an error, or with data.allow_splice a splice: new segments begin at the
step of the resume, in which every source continues where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from configs import stages
from configs.schema import Config, InputError
from data import packing
from data.order import BLOCK, Order, Segment, Source, derived_key
from data.tokens import Tokens

OPTIONS = {
    "seed": "run.seed",
    "seq_len": "training.seq_len",
    "global_batch_size": "training.global_batch_size",
}


def describe(
    sources: Sequence[tuple],
    seed: int,
    seq_len: int,
    global_batch_size: int,
    skip: Sequence[tuple[int, int]] = (),
    lengths: Sequence[tuple[int, int, int]] = (),
) -> dict:
    """Describe as JSON all that decides the order. sources: (name, fingerprint, Tokens, [[step,
    weight], ...]) of each; a weight holds from its step on, the first from step 0. skip: data.skip.
    lengths: (step, seq_len, global_batch_size) that hold from a step on.
    Raises InputError if a source has less than one window, or is there twice."""
    described = []
    for name, fingerprint, tokens, weights in sources:
        windows = _windows(name, tokens, seq_len)
        described.append(
            {"name": name, "fingerprint": fingerprint, "windows": windows, "weights": weights}
        )
    texts = [fingerprint for _, fingerprint, *_ in sources]
    twice = next((text for text in texts if texts.count(text) > 1), None)
    if twice is not None:
        same = [name for name, text, *_ in sources if text == twice]
        raise InputError(
            f"data.mixture: {' and '.join(same)} are the same text; leave one and add their weights"
        )
    description = {
        "seed": seed,
        "seq_len": seq_len,
        "global_batch_size": global_batch_size,
        "sources": described,
    }
    if skip:
        description["skip"] = [list(entry) for entry in skip]
    if lengths:
        description["stages"] = [_stage(sources, *row) for row in lengths]
    return description


def _windows(name: str, tokens: Tokens, seq_len: int) -> int:
    """Count the windows of a source. Raises InputError where there is none."""
    windows = packing.count(tokens, seq_len)
    if windows < 1:
        raise InputError(
            f"training.seq_len = {seq_len} needs {seq_len + 1} tokens for one sequence, but "
            f"the {tokens.split} split of {name or 'the corpus'} has {len(tokens)}: shorten "
            "it, give more text (data.source), or hold out another share "
            "(data.validation_fraction)"
        )
    return windows


def _stage(sources: Sequence[tuple], step: int, seq_len: int, global_batch_size: int) -> dict:
    windows = [_windows(name, tokens, seq_len) for name, _, tokens, _ in sources]
    return {
        "step": step,
        "seq_len": seq_len,
        "global_batch_size": global_batch_size,
        "windows": windows,
    }


def begin(description: dict) -> Order:
    """Return the order of a run that starts with this description."""
    return Order(_extended((), description, 0))


def until(order: Order, cfg: Config) -> Order:
    """Return the segments that begin before the stage of `cfg` ends, the first at least. The
    batches of the last are those of the stage."""
    end = stages.own_steps(cfg).stop
    first, *later = order.segments
    return Order([first, *(segment for segment in later if segment.step < end)])


def check_run(order: Order, cfg: Config) -> None:
    """Raise InputError if the run would read a source more often than its max_epochs allows."""
    limits = {entry.name: entry.max_epochs for entry in cfg.data.mixture}
    check_epochs(order, stages.whole(cfg).training.last_step, limits)


def check_epochs(order: Order, steps: int, max_epochs: dict[str, float]) -> None:
    """Raise InputError if a source would be read more often than `max_epochs` allows (0: any)."""
    for source in order.segment(steps).sources:
        epochs = _epochs(order, steps, source.fingerprint)
        limit = max_epochs.get(source.name, 0)
        if limit and epochs > limit:
            raise InputError(
                f"source {source.name} of data.mixture would be read {epochs:.2f} times in {steps} "
                f"steps, but its max_epochs = {limit:g}: lower its weight, give it more text, "
                "train fewer steps or raise the limit"
            )


def _epochs(order: Order, steps: int, fingerprint: str) -> float:
    """Return how often `steps` steps read a text: windows of each length are counted apart."""
    read: dict[tuple, float] = {}
    for segment in order.segments:
        end = min(order.end(segment), steps)
        if end <= segment.step:
            continue
        consumed = segment.consumed((end - segment.step) * segment.global_batch_size)
        for source, count in zip(segment.sources, consumed, strict=True):
            if source.fingerprint == fingerprint:
                read[source.key, source.windows] = count / source.windows
    return sum(read.values())


# --------------------------------------------------------------------------------------------------
# what a checkpoint records, and how a run goes on from it


def state(order: Order, description: dict) -> dict:
    """Return JSON for a checkpoint, from which `resume` goes on."""
    return {"description": description, "stages": [asdict(segment) for segment in order.segments]}


def restore(saved: dict) -> Order:
    """Restore the order that `state` has saved."""
    segments = []
    for fields in saved["stages"]:
        sources = tuple(Source(**source) for source in fields["sources"])
        segments.append(Segment(**fields | {"sources": sources}))
    return Order(segments)


def resume(progress: dict, description: dict, allow_splice: bool) -> tuple[Order, list[str]]:
    """Continue the order of a run from a checkpoint's progress, {"step": ..., "data": `state`};
    returns it and sentences about what differs.

    A difference raises InputError, unless allow_splice: then a new segment begins, in which sources
    with the same text, seq_len and seed go on where they were, and others begin at their first
    sample."""
    step = progress["step"]
    saved = progress.get("data")
    if saved is None:  # a converted model, or a run of other code
        unknown = f"the checkpoint of step {step} does not say which data it has seen"
        if step and not allow_splice:
            raise InputError(
                f"{unknown}: it was written by other code; start from its weights in another "
                "run.folder, with checkpoint.load_path, or let the data begin at their first "
                "sample: data.allow_splice = true"
            )
        changes = [f"{unknown}, and they begin at their first sample"] if step else []
        return Order(_extended((), description, step)), changes
    if "stages" not in saved:
        raise InputError(
            f"the checkpoint of step {step} is of a run that streams its text: data.stream = true "
            "goes on with it"
        )
    order = restore(saved)
    changes = differences(saved["description"], description)
    if not changes:
        return order, []
    if not allow_splice:
        raise InputError(
            f"the data would change at step {step}: {'; '.join(changes)}. Restore it, set another "
            "run.folder, or let the run go on with the new data from here, which is recorded: "
            "data.allow_splice = true"
        )
    _check_skips(saved["description"], description, step)
    past = [segment for segment in order.segments if segment.step < step]
    return Order(_extended(past, description, step)), changes


def _check_skips(saved: dict, current: dict, step: int) -> None:
    """Raise InputError if a new entry of data.skip is before the checkpoint of `step`."""
    known = saved.get("skip", [])
    new = [entry for entry in current.get("skip", []) if entry not in known]
    late = [entry for entry in new if entry[0] < step]
    if late:
        raise InputError(
            f"data.skip = {late} would have been before the checkpoint of step {step}, which has "
            f"trained on these batches: go back with checkpoint.load_step = {late[0][0]}, or a "
            "step before it"
        )


def differences(saved: dict, current: dict) -> list[str]:
    """Describe in sentences where two descriptions differ."""
    lines = []
    for key, option in OPTIONS.items():
        if saved[key] != current[key]:
            lines.append(f"{option} was {saved[key]} and is {current[key]}")
    before = {source["name"]: source for source in saved["sources"]}
    now = {source["name"]: source for source in current["sources"]}
    lines += [f"source {name} is gone" for name in before if name not in now]
    lines += [f"source {name} is new" for name in now if name not in before]
    for name in now.keys() & before.keys():
        lines += _source_differences(before[name], now[name])
    for key, option, shown in ("skip", "data.skip", str), ("stages", "training.stages", _shown):
        rows_before = saved.get(key, [])
        rows_now = current.get(key, [])
        if rows_before != rows_now:
            lines.append(f"{option} was {shown(rows_before)} and is {shown(rows_now)}")
    if not lines and saved != current:
        lines.append("the order of the sources has changed")
    return sorted(lines)


def _shown(rows: list[dict]) -> str:
    """Show the stages of a description: [[step, seq_len, global_batch_size], ...]."""
    return str([list(row.values())[:3] for row in rows])


def _source_differences(before: dict, now: dict) -> list[str]:
    lines = []
    label = f"source {now['name']}" if now["name"] else "data.source"
    if before["fingerprint"] != now["fingerprint"]:
        lines.append(f"the text of {label} or how it is tokenised has changed (data)")
    if before["weights"] != now["weights"]:
        lines.append(
            f"weight or schedule of {label} was {before['weights']} and is {now['weights']}"
        )
    return lines


# --------------------------------------------------------------------------------------------------
# the segments of a description


def _extended(past: Sequence[Segment], description: dict, step: int) -> list[Segment]:
    """Return the segments `past`, followed by those of the description from `step` on."""
    segments = list(past)
    for start in _starts(description, step):
        segments.append(_segment(segments, description, start))
    return segments


def _starts(description: dict, step: int) -> list[int]:
    """Return the steps, from `step` on, at which a segment of the description begins."""
    changes = {change for change, _ in description.get("skip", [])}
    changes |= {stage["step"] for stage in description.get("stages", [])}
    for source in description["sources"]:
        changes |= {change for change, _ in source["weights"]}
    return sorted({step} | {change for change in changes if change > step})


def _segment(past: list[Segment], description: dict, start: int) -> Segment:
    """Return the segment of the description from step `start` on, after the segments `past`."""
    described = description["sources"]
    seq_len, global_batch_size, windows = _sizes(description, start)
    names = [source["name"] for source in described]
    weights = [_weight(source["weights"], start) for source in described]
    shares = _shares(names, weights, start)
    skip = dict(description.get("skip", [])).get(start, 0)
    sources = []
    for source, share, of_length in zip(described, shares, windows, strict=True):
        key, consumed = _so_far(past, start, description["seed"], seq_len, source, skip)
        sources.append(
            Source(
                name=source["name"],
                fingerprint=source["fingerprint"],
                windows=of_length,
                key=key,
                share=share,
                consumed=consumed,
            )
        )
    return Segment(
        step=start,
        sample=Order(past).samples(start) if past else 0,
        seed=description["seed"],
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        sources=tuple(sources),
    )


def _sizes(description: dict, step: int) -> tuple[int, int, list[int]]:
    """Return the sequence length, batch size, and windows of each source at `step`."""
    windows = [source["windows"] for source in description["sources"]]
    held = description["seq_len"], description["global_batch_size"], windows
    for stage in description.get("stages", []):
        if stage["step"] <= step:
            held = stage["seq_len"], stage["global_batch_size"], stage["windows"]
    return held


def _weight(schedule: list, step: int) -> float:
    """Return the weight of the last entry, [step, weight], that has begun at `step`."""
    begun = [weight for change, weight in schedule if change <= step]
    return begun[-1]


def _so_far(
    past: list[Segment], step: int, seed: int, seq_len: int, source: dict, skip: int
) -> tuple[int, int]:
    """Return the key of a source, and how many of its samples are consumed before `step`.

    They continue from the last segment with the same tokens, seed and seq_len, under any name of
    the source. If there is none, the source starts afresh. skip: further batches that count as
    consumed although no step sees them."""
    end = step  # of the segment that is looked at
    for segment in reversed(past):
        if segment.seed == seed and segment.seq_len == seq_len:
            steps = end - segment.step
            if end == step:
                steps += skip
            consumed = segment.consumed(steps * segment.global_batch_size)
            for old, count in zip(segment.sources, consumed, strict=True):
                if old.fingerprint == source["fingerprint"]:
                    return old.key, count
        end = segment.step
    name = source["name"]
    return (derived_key(seed, name) if name else seed), 0


def _shares(names: list[str], weights: list[float], step: int) -> list[int]:
    """Divide a block among the sources by largest remainder (Hamilton, 1792)."""
    total = sum(weights)
    if not total > 0:
        raise InputError(f"data.mixture: all weights are 0 from step {step} on; raise one")
    quotas = [weight / total * BLOCK for weight in weights]
    for name, weight, quota in zip(names, weights, quotas, strict=True):
        if 0 < quota < 1:
            raise InputError(
                f"data.mixture: weight {weight:g} of {name} from step {step} on is less than "
                f"1/{BLOCK} of the sum, the smallest share there is: raise it, or set it to 0"
            )
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (shares[i] - quotas[i], i))
    for i in by_remainder[: BLOCK - sum(shares)]:
        shares[i] += 1
    return shares
