"""The order of a run's data as a function of (seed, step), for one source or a mixture of sources.

Window j of a source is its tokens[j*T : j*T + T + 1]: T inputs, T labels, each token a label once
per epoch. The samples of a run are numbered in the order in which they are trained, over all ranks.
Two functions lead from such a number to a window. Neither has a table or a state, so any rank finds
its rows of any step at once:

1. Which source? Of every BLOCK samples, source i has exactly share_i. A permutation keyed by (seed,
   block) decides which source has which place of the block. So sample p is the k-th of its source,
   and k is known.
2. Which window? k = epoch * windows + index, and window = permutation(index), keyed by (seed,
   source, epoch). Every window comes once per epoch, in an order that is computed and never stored.

The permutation is a Feistel network (Luby and Rackoff, 1988) on the smallest even number of bits
that holds the windows, walked until it lands on a window (Black and Rogaway, 2002), with splitmix64
(Steele, Lea and Flood, 2014) as its round function. Four rounds measure like a true shuffle.

When shares, sources or the batch change, at a step of a schedule or by a splice on resume, a new
`Stage` begins. It says how many samples of each source were consumed before it, so each source goes
on where it was. A checkpoint has to save nothing but the list of stages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np

from configs import splitmix
from configs.schema import InputError

# samples in which the shares of a mixture are exact: a power of 4, so that the permutation needs no
# walk
BLOCK = 4096
ROUNDS = 4
# 1 to ROUNDS steps of splitmix64
GAMMAS = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(splitmix.GAMMA)
SHIFTS, FACTORS = np.array(splitmix.SHIFTS, np.uint64), np.array(splitmix.FACTORS, np.uint64)
ONE = np.uint64(1)

Ints = int | np.ndarray


def permute(index: np.ndarray, epoch: Ints, size: Ints, seed: Ints) -> np.ndarray:
    """int64 [n]: where each `index` (int64 [n], in [0, size)) goes in the order of its epoch. It is
    a bijection of [0, size) for each (seed, epoch). epoch, size (at most 2^53) and seed: one for
    all indices, or int64 [n]."""
    return _walk(index, _round_keys(epoch, seed), size)


def unpermute(index: np.ndarray, epoch: Ints, size: Ints, seed: Ints) -> np.ndarray:
    """The inverse of `permute`: the same Feistel network with its keys reversed and its halves
    exchanged."""
    return _walk(index, _round_keys(epoch, seed)[::-1], size, exchange=True)


def _round_keys(epoch: Ints, seed: Ints) -> np.ndarray:
    """uint64 [ROUNDS, n or 1]."""
    key = _mix(
        _mix(np.atleast_1d(seed).astype(np.uint64) + GAMMAS[0])
        + np.atleast_1d(epoch).astype(np.uint64)
    )
    return _mix(key + GAMMAS[:, None])


def _walk(index: np.ndarray, keys: np.ndarray, size: Ints, exchange: bool = False) -> np.ndarray:
    """Apply the network until every number is inside [0, size) again; int64 [n] in and out."""
    size = np.broadcast_to(size, index.shape).astype(np.uint64)
    bits = np.frexp(size.astype(np.float64) - 1)[1]  # int.bit_length of size - 1
    half = np.maximum(1, (bits + 1) // 2).astype(np.uint64)  # bits of a half
    keys = np.broadcast_to(keys, (ROUNDS, len(index)))
    out = _feistel(index.astype(np.uint64), keys, half, exchange)
    outside = np.flatnonzero(out >= size)
    # the walk would return to its start, which is inside, so it ends: after 4 * size steps at most
    while len(outside):
        out[outside] = moved = _feistel(out[outside], keys[:, outside], half[outside], exchange)
        outside = outside[moved >= size[outside]]
    return out.astype(np.int64)


def _feistel(x: np.ndarray, keys: np.ndarray, half: np.ndarray, exchange: bool) -> np.ndarray:
    """A bijection of [0, 4^half) for each x; uint64 [n] in and out. exchange: exchange the halves,
    before and after."""
    mask = (ONE << half) - ONE
    left, right = (x & mask, x >> half) if exchange else (x >> half, x & mask)
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    left, right = (right, left) if exchange else (left, right)
    return left << half | right


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's output function, uint64 in and out: every bit depends on every bit. Arrays wrap
    modulo 2^64."""
    x = x ^ x >> SHIFTS[0]
    x *= FACTORS[0]
    x ^= x >> SHIFTS[1]
    x *= FACTORS[1]
    x ^= x >> SHIFTS[2]
    return x


@dataclass(frozen=True)
class Source:
    """A source within a stage."""

    name: str  # "" if data.source is the only source
    fingerprint: str  # of its tokens
    windows: int  # samples of an epoch
    key: int  # of its permutations
    share: int  # its samples in every BLOCK
    consumed: int  # its samples in all stages before this one


@dataclass(frozen=True)
class Stage:
    """A stretch of a run, beginning at `step`, in which nothing about the order changes."""

    step: int
    sample: int  # samples of the run before it
    seed: int
    seq_len: int
    global_batch_size: int
    sources: tuple[Source, ...]

    def locate(self, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For the stage's samples (int64 [n], ascending): the source of each, and how many samples
        of that source came before it in the run; int64 [n] each."""
        if len(self.sources) == 1:
            return np.zeros_like(sample), sample + self.sources[0].consumed
        block, slot = np.divmod(sample, BLOCK)
        blocks, which = np.unique(block, return_inverse=True)
        source, rank = (
            np.stack(parts)[which, slot]
            for parts in zip(*map(self.pattern, blocks.tolist()), strict=True)
        )
        # [sources, 2]
        before = np.array([(source.consumed, source.share) for source in self.sources])
        return source, before[source, 0] + block * before[source, 1] + rank

    def pattern(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """For the places in a block: the source of each, and how many places of that source are
        before it; int64 [BLOCK] each."""
        shares = tuple(source.share for source in self.sources)
        return _pattern(shares, _key(self.seed, ""), self.sample + block * BLOCK)

    def position(self, source: int, sample: int) -> int:
        """The number, in this stage, of the sample that is number `sample` (from 0) of those it
        takes from `source`."""
        if len(self.sources) == 1:
            return sample
        block, rank = divmod(sample, self.sources[source].share)
        owner, ranks = self.pattern(block)
        return block * BLOCK + int(np.flatnonzero((owner == source) & (ranks == rank))[0])

    def consumed(self, samples: int) -> list[int]:
        """How many samples of each source the run has consumed when `samples` of this stage are
        done."""
        blocks, samples_left = divmod(samples, BLOCK)
        partial = np.zeros(len(self.sources), np.int64)
        if samples_left:
            partial = np.bincount(
                self.locate(np.arange(blocks * BLOCK, samples))[0], minlength=len(self.sources)
            )
        return [
            s.consumed + blocks * s.share + int(extra)
            for s, extra in zip(self.sources, partial, strict=True)
        ]


@lru_cache(maxsize=16)
def _pattern(shares: tuple[int, ...], key: int, start: int) -> tuple[np.ndarray, np.ndarray]:
    """`Stage.pattern` of the block whose first sample is number `start` of the run. It is cached,
    as steps share blocks."""
    place = permute(np.arange(BLOCK), start, BLOCK, key)
    source = np.searchsorted(np.cumsum(shares), place, side="right").astype(np.int16)
    by_source = np.argsort(source, kind="stable")
    rank = np.empty(BLOCK, np.int64)
    rank[by_source] = np.concatenate([np.arange(share) for share in shares])
    return source.astype(np.int64), rank


def _key(seed: int, name: str) -> int:
    """A key of 63 bits. Each source of a mixture has its own, and so has the pattern of places
    (name ""), so that all are shuffled independently."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1


class Order:
    """The stages of a run, past and planned. Every question can be asked about any step."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)
        self.last = self.stages[-1]

    def stage(self, step: int) -> Stage:
        """The stage that step `step` (the first is 0) is in."""
        return next(stage for stage in reversed(self.stages) if stage.step <= step)

    def rows(
        self, step: int, first: int, count: int, steps: int = 1
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Source, window and epoch (int64 [steps * count] each) of rows [first, first + count) of
        the global batches of `steps` steps from `step` on, fewer if the stage ends before."""
        stage = self.stage(step)
        batch = np.arange(step, min(step + steps, self.end(stage))) - stage.step
        source, sample = stage.locate(
            np.add.outer(batch * stage.global_batch_size, np.arange(first, first + count)).ravel()
        )
        windows, keys = (
            np.array([getattr(s, field) for s in stage.sources]) for field in ("windows", "key")
        )
        epoch, index = np.divmod(sample, windows[source])
        return source, permute(index, epoch, windows[source], keys[source]), epoch

    def end(self, stage: Stage) -> int:
        """The first step after a stage."""
        return min((other.step for other in self.stages if other.step > stage.step), default=2**62)

    def samples(self, step: int) -> int:
        """Samples of the run before `step`."""
        stage = self.stage(step)
        return stage.sample + (step - stage.step) * stage.global_batch_size

    def tokens(self, step: int) -> int:
        """Labels of the run before `step`, including those that do not count."""
        past = [stage for stage in self.stages if stage.step <= step]
        ends = [stage.sample for stage in past[1:]] + [self.samples(step)]
        return sum(
            (end - stage.sample) * stage.seq_len for stage, end in zip(past, ends, strict=True)
        )

    def consumed(self, step: int) -> list[int]:
        """How many samples of each source (of the stage of `step`) the run has consumed before
        `step`."""
        stage = self.stage(step)
        return stage.consumed((step - stage.step) * stage.global_batch_size)

    def check_epochs(self, steps: int, max_epochs: dict[str, float]) -> None:
        """Raises InputError if `steps` steps would read a source more often than `max_epochs`
        allows (by name; 0: any number of times)."""
        for source, consumed in zip(self.stage(steps).sources, self.consumed(steps), strict=True):
            epochs, limit = consumed / source.windows, max_epochs.get(source.name, 0)
            if limit and epochs > limit:
                raise InputError(
                    f"source {source.name} of data.mixture would be read {epochs:.2f} times in "
                    f"{steps} steps, but its "
                    f"max_epochs = {limit:g}: lower its weight, give it more text, train fewer "
                    "steps or raise the limit"
                )


def describe(
    rows: Sequence[tuple],
    seed: int,
    seq_len: int,
    global_batch_size: int,
    skip: Sequence[tuple[int, int]] = (),
) -> dict:
    """What decides the order, as JSON. rows: (name, fingerprint, Tokens, [[step, weight], ...]) of
    each source; a weight holds from its step on, the first from step 0. skip: data.skip. Raises
    InputError if a source has less than one window, or is there twice."""
    sources = []
    for name, fingerprint, tokens, weights in rows:
        windows = (len(tokens) - 1) // seq_len
        if windows < 1:
            raise InputError(
                f"training.seq_len = {seq_len} needs {seq_len + 1} tokens for one sequence, but "
                f"the {tokens.split} "
                f"split of {name or 'the corpus'} has {len(tokens)}: shorten it, give more text "
                "(data.source), or hold "
                "out another share (data.validation_fraction)"
            )
        sources.append(
            {"name": name, "fingerprint": fingerprint, "windows": windows, "weights": weights}
        )
    for source in sources:
        same = [other["name"] for other in sources if other["fingerprint"] == source["fingerprint"]]
        if len(same) > 1:
            raise InputError(
                f"data.mixture: {' and '.join(same)} are the same text; leave one and add their "
                "weights"
            )
    description = {
        "seed": seed,
        "seq_len": seq_len,
        "global_batch_size": global_batch_size,
        "sources": sources,
    }
    return description | ({"skip": [list(row) for row in skip]} if skip else {})


def begin(description: dict) -> Order:
    """The order of a run that starts with this description."""
    return Order(_extended((), description, 0))


def resume(progress: dict, description: dict, allow_splice: bool) -> tuple[Order, list[str]]:
    """The order of a run that goes on from a checkpoint's progress, {"step": ..., "data": `state`},
    and sentences about what differs.

    A difference raises InputError, unless allow_splice: then a new stage begins, in which sources
    with the same text, seq_len and seed go on where they were, and others begin at their first
    sample."""
    step, saved = progress["step"], progress.get("data")
    if saved is None:  # for example a converted model
        if step:
            raise InputError(
                f"the checkpoint of step {step} does not say which data it has seen: it was "
                "written by "
                "other code; start from its weights in another run.folder, with "
                "checkpoint.load_path"
            )
        return begin(description), []
    if "stages" not in saved:
        raise InputError(
            f"the checkpoint of step {step} is of a run that streams its text: data.stream = true "
            "goes on with it"
        )
    stages, lines = restore(saved).stages, differences(saved["description"], description)
    if not lines:
        return Order(stages), []
    if not allow_splice:
        raise InputError(
            f"the data would change at step {step}: {'; '.join(lines)}. Restore it, set another "
            "run.folder, or let the "
            "run go on with the new data from here, which is recorded: data.allow_splice = true"
        )
    if late := [
        row
        for row in description.get("skip", [])
        if row[0] < step and row not in saved["description"].get("skip", [])
    ]:
        raise InputError(
            f"data.skip = {late} would have been before the checkpoint of step {step}, which has "
            "trained on these "
            f"batches: go back with checkpoint.load_step = {late[0][0]}, or a step before it"
        )
    return Order(
        _extended([stage for stage in stages if stage.step < step], description, step)
    ), lines


def state(order: Order, description: dict) -> dict:
    """JSON for a checkpoint, from which `resume` goes on."""
    return {"description": description, "stages": [asdict(stage) for stage in order.stages]}


def restore(saved: dict) -> Order:
    """The order that `state` has saved."""
    rows = saved["stages"]
    return Order(
        [
            Stage(**row | {"sources": tuple(Source(**source) for source in row["sources"])})
            for row in rows
        ]
    )


def differences(saved: dict, current: dict) -> list[str]:
    """Sentences that say where two descriptions differ."""
    options = {
        "seed": "run.seed",
        "seq_len": "training.seq_len",
        "global_batch_size": "training.global_batch_size",
    }
    lines = [
        f"{options[key]} was {saved[key]} and is {current[key]}"
        for key in options
        if saved[key] != current[key]
    ]
    before, now = (
        {source["name"]: source for source in side["sources"]} for side in (saved, current)
    )
    lines += [f"source {name} is gone" for name in before if name not in now]
    lines += [f"source {name} is new" for name in now if name not in before]
    for name in now.keys() & before.keys():
        label = f"source {name}" if name else "data.source"
        if before[name]["fingerprint"] != now[name]["fingerprint"]:
            lines.append(f"the text of {label} or how it is tokenised has changed (data)")
        if before[name]["weights"] != now[name]["weights"]:
            lines.append(
                f"weight or schedule of {label} was {before[name]['weights']} and is "
                f"{now[name]['weights']}"
            )
    if (before := saved.get("skip", [])) != (now := current.get("skip", [])):
        lines.append(f"data.skip was {before} and is {now}")
    if not lines and saved != current:
        lines.append("the order of the sources has changed")
    return sorted(lines)


def _extended(past: Sequence[Stage], description: dict, step: int) -> list[Stage]:
    """The stages `past`, followed by those of the description from `step` on."""
    stages, sources, skips = list(past), description["sources"], dict(description.get("skip", []))
    changes = {change for source in sources for change, _ in source["weights"]} | skips.keys()
    for start in sorted({step} | {change for change in changes if change > step}):
        weights = [
            [weight for change, weight in source["weights"] if change <= start][-1]
            for source in sources
        ]
        shares = _shares([source["name"] for source in sources], weights, start)
        so_far = [
            _so_far(stages, start, description, source, skips.get(start, 0)) for source in sources
        ]
        stages.append(
            Stage(
                step=start,
                sample=Order(stages).samples(start) if stages else 0,
                seed=description["seed"],
                seq_len=description["seq_len"],
                global_batch_size=description["global_batch_size"],
                sources=tuple(
                    Source(
                        source["name"],
                        source["fingerprint"],
                        source["windows"],
                        key,
                        share,
                        consumed,
                    )
                    for source, share, (key, consumed) in zip(sources, shares, so_far, strict=True)
                ),
            )
        )
    return stages


def _so_far(
    stages: list[Stage], step: int, description: dict, source: dict, skip: int
) -> tuple[int, int]:
    """The key of a source, and how many of its samples are consumed before `step`. They continue
    from the last stage with the same tokens, seed and seq_len, whatever its name for the source
    was; if there is none, the source starts afresh. skip: further batches that count as consumed
    although no step sees them."""
    ends = [*(stage.step for stage in stages), step][1:]
    for stage, end in zip(stages[::-1], ends[::-1], strict=True):
        if (stage.seed, stage.seq_len) == (description["seed"], description["seq_len"]):
            consumed = stage.consumed(
                (end - stage.step + (skip if end == step else 0)) * stage.global_batch_size
            )
            for old, count in zip(stage.sources, consumed, strict=True):
                if old.fingerprint == source["fingerprint"]:
                    return old.key, count
    seed, name = description["seed"], source["name"]
    return (_key(seed, name) if name else seed), 0


def _shares(names: list[str], weights: list[float], step: int) -> list[int]:
    """Samples of each source in a block: BLOCK divided in proportion to the weights by largest
    remainder (Hamilton, 1792)."""
    if not sum(weights) > 0:
        raise InputError(f"data.mixture: all weights are 0 from step {step} on; raise one")
    quotas = [weight / sum(weights) * BLOCK for weight in weights]
    for name, weight, quota in zip(names, weights, quotas, strict=True):
        if 0 < quota < 1:
            raise InputError(
                f"data.mixture: weight {weight:g} of {name} from step {step} on is less than "
                f"1/{BLOCK} of "
                "the sum, the smallest share there is: raise it, or set it to 0"
            )
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (shares[i] - quotas[i], i))
    for i in by_remainder[: BLOCK - sum(shares)]:
        shares[i] += 1
    return shares
