"""A batch is a function of (seed, step) alone: the same on any ranks, workers and microbatches,
after any resume, of one source or of a mixture; and what cannot be read ends the run with a
sentence."""

import copy
import errno
import itertools
import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.program import STOP_SIGNALS
from configs.schema import Data, InputError
from data import splice
from data import workers as workers_of
from data.loader import IGNORE, Batches, loader
from data.order import BLOCK, Order
from data.shuffle import permute, unpermute
from data.workers import LoaderError
from tests.programs import lives

ONCE = [[0, 1.0]]


class Places:
    """n tokens in place of data/tokens.py::Tokens: each names its source and its own position."""

    split = "train"
    is_stored = False

    def __init__(self, n: int, source: int = 0, starts: tuple[int, ...] = (0,)) -> None:
        self.n, self.source, self.document_starts = n, source, np.array(starts)

    def __len__(self) -> int:
        return self.n

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start < stop <= self.n
        return np.arange(start, stop) + self.source * 10**6


def single(
    tokens, T: int, G: int, local: int, rank: int, dp: int, seed: int, mask: bool = False
) -> Batches:
    order = splice.begin(splice.describe([("", "x", tokens, ONCE)], seed, T, G))
    return Batches([tokens], order, local, rank, dp, mask)


# windows at T = 13: 37, 211, 5
MIXED = [Places(13 * 37 + 5, 0), Places(13 * 211 + 1, 1), Places(13 * 5 + 13, 2)]
WEIGHTS = [
    [[0, 0.5], [30, 0.1]],
    [[0, 0.45], [30, 0.2], [47, 3.0]],
    [[0, 0.05], [30, 0.7], [47, 0.0]],
]


def mixture(
    seed: int = 5, T: int = 13, G: int = 240, weights: list = WEIGHTS, names: str = "abc"
) -> dict:
    """Return the description of a mixture with a schedule: weights change after 30 steps and after
    47."""
    rows = [
        (name, f"text {name}", MIXED["abc".index(name)], w)
        for name, w in zip(names, weights, strict=True)
    ]
    return splice.describe(rows, seed, T, G)


# --------------------------------------------------------------------------------------------------
# the permutation


def test_permutation_is_a_bijection_with_an_inverse() -> None:
    for size in range(1, 401):
        index = np.arange(size)
        there = permute(index, size % 3, size, seed=size)
        assert np.array_equal(np.sort(there), index), size
        assert np.array_equal(unpermute(there, size % 3, size, seed=size), index), size
    index = np.arange(1_000_000)
    assert np.array_equal(np.sort(permute(index, 0, 1_000_000, 1)), index)


PINNED = [
    [7, 0, 2, 6, 9, 8, 1, 3, 5, 4],
    [4, 5, 2, 9, 7, 1, 6, 0, 3, 8],
    [210973089991, 1004628295449, 589215988311, 619073520393, 452120419976],
]
PINNED_MIXTURE = [  # sources, windows, epochs of six rows
    [[0, 2, 1, 1, 1, 0], [1, 4, 0, 178, 92, 0], [0, 0, 0, 0, 0, 0]],
    [[1, 1, 0, 0, 1, 1], [181, 39, 29, 16, 64, 78], [14, 14, 93, 93, 14, 14]],
    [[2, 2, 2, 1, 2, 2], [2, 4, 3, 135, 2, 0], [72, 73, 73, 15, 73, 73]],
    [
        [1, 1, 1, 1, 1, 1],
        [85, 153, 2, 149, 101, 186],
        [1100752, 1100752, 1100752, 1100752, 1100752, 1100752],
    ],
]


def test_orders_are_pinned_forever() -> None:
    """Another order here is another order in every run that resumes."""
    index = np.arange(10)
    assert permute(index, 0, 10, 0).tolist() == PINNED[0]
    assert permute(index, 7, 10, 2**63 - 1).tolist() == PINNED[1]
    assert permute(index[:5] * 10**11, 1, 2**40, 3).tolist() == PINNED[2]
    batches = single(Places(10 * 4 + 1), 4, 10, 10, 0, 1, seed=0)
    assert batches[0]["window"].tolist() == PINNED[0], (
        "a single source is permuted by run.seed alone"
    )
    order = splice.begin(mixture())
    found = [
        [array[:6].tolist() for array in order.rows(step, 3, 6)] for step in (0, 29, 30, 10**6)
    ]
    assert found == PINNED_MIXTURE


def test_permutation_looks_like_a_shuffle() -> None:
    size = 100_003
    index = np.arange(size)
    shuffles = [permute(index, e, size, s) for e, s in ((0, 0), (1, 0), (0, 1), (1, 1))]
    for shuffle in shuffles:
        distinct = len(np.unique(np.diff(shuffle) % size)) / size
        # 0.632 of the differences, as for a random order
        assert abs(distinct - (1 - np.exp(-1))) < 0.01
        assert abs(np.corrcoef(index, shuffle)[0, 1]) < 0.02
    # epochs and seeds: one equal place expected, by chance
    for one, other in itertools.combinations(shuffles, 2):
        assert np.count_nonzero(one == other) < 10
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.02


# --------------------------------------------------------------------------------------------------
# any mesh


def assert_same_on_any_mesh(
    order: Order, sources: list, G: int, steps: tuple[int, ...], T: int
) -> None:
    whole = Batches(sources, order, G, 0, 1)
    reference = {step: whole[step] for step in steps}
    for dp in (1, 2, 3, 5, 16, 48):
        for local in {1, G // dp}:
            ranks = [Batches(sources, order, local, rank, dp) for rank in range(dp)]
            for step in steps:
                parts = [rank[step] for rank in ranks]
                assert all(part["tokens"].shape == (G // dp // local, local, T) for part in parts)
                for name, want in reference[step].items():
                    joined = torch.cat([part[name].flatten() for part in parts])
                    assert torch.equal(joined, want.flatten()), (dp, local, step, name)


@pytest.mark.parametrize("mask", [False, True])
def test_ranks_that_do_not_divide_a_batch_share_it_with_padding(mask: bool) -> None:
    order, G, T = splice.begin(mixture()), 240, 13
    whole = Batches(MIXED, order, G, 0, 1, mask)[3]
    for dp, local in (7, 4), (31, 3), (239, 1), (2, 50):
        ranks = [Batches(MIXED, order, local, rank, dp, mask)[3] for rank in range(dp)]
        shape = ranks[0]["tokens"].shape
        assert shape == (-(-G // (dp * local)), local, T)
        for name, want in whole.items():
            parts = []
            for part in ranks:
                assert part["tokens"].shape == shape
                is_real = part["length"] > 0
                rows = part[name].flatten(0, 1) if part[name].dim() > 1 else part[name]
                parts.append(rows[is_real])
                assert name != "labels" or (rows[~is_real] == IGNORE).all()
            assert torch.equal(torch.cat(parts).flatten(), want.flatten()), (dp, local, name)


def test_batches_are_the_same_for_any_ranks_and_microbatches() -> None:
    """Order included, across the steps of a schedule, blocks and epochs: a step has more rows than
    two of the sources have windows; T prime."""
    order = splice.begin(mixture())
    batch = Batches(MIXED, order, 240, 0, 1)[29]
    assert set(batch["source"].tolist()) == {0, 1, 2}
    start = batch["window"] * 13 + batch["source"] * 10**6
    assert torch.equal(batch["tokens"][0], start[:, None] + torch.arange(13))
    assert torch.equal(batch["labels"], batch["tokens"] + 1)
    assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in batch.values())
    assert_same_on_any_mesh(order, MIXED, 240, (0, 16, 17, 29, 30, 47, 1000), 13)


def test_every_window_is_seen_once_per_epoch_in_a_new_order() -> None:
    windows, G, steps = 101, 7, 100
    batches = single(Places(windows * 4 + 1), 4, G, G, 0, 1, seed=9)
    assert batches.order.last.sources[0].windows == windows
    seen = torch.cat([batches[step]["window"] for step in range(steps)])
    counts = torch.bincount(seen, minlength=windows)
    assert set(counts.tolist()) <= {G * steps // windows, G * steps // windows + 1}
    epochs = seen[: windows * 6].view(6, windows)
    assert torch.equal(epochs.sort().values, torch.arange(windows).expand(6, -1))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 6
    other = single(Places(windows * 4 + 1), 4, G, G, 0, 1, seed=10)
    assert not torch.equal(other[0]["window"], batches[0]["window"])


# --------------------------------------------------------------------------------------------------
# mixtures


def ledger(order: Order, first: int, stop: int) -> list[tuple[str, int, int]]:
    """(text, window, epoch) of every sample of steps [first, stop), in order."""
    rows = []
    for step in range(first, stop):
        segment = order.segment(step)
        source, window, epoch = order.rows(step, 0, segment.global_batch_size)
        rows += [
            (segment.sources[s].fingerprint, w, e)
            for s, w, e in zip(source.tolist(), window.tolist(), epoch.tolist())
        ]
    return rows


def assert_each_once_per_epoch(rows: list[tuple[str, int, int]], windows: dict[str, int]) -> None:
    """No window twice in an epoch, and none left out of one that another follows."""
    assert len(set(rows)) == len(rows), "repeated"
    for text, count in windows.items():
        epochs = [epoch for name, _, epoch in rows if name == text]
        sizes = np.bincount(epochs) if epochs else np.zeros(1, int)
        assert (sizes[:-1] == count).all(), "skipped"
        assert epochs == sorted(epochs), "an epoch began before the last one ended"


WINDOWS = {"text a": 37, "text b": 211, "text c": 5}


def test_shares_are_exact_in_every_block_and_epochs_whole() -> None:
    order = splice.begin(mixture(weights=[[[0, 0.5]], [[0, 0.3]], [[0, 0.2]]]))
    shares = [source.share for source in order.last.sources]
    assert shares == [2048, 1229, 819] and sum(shares) == BLOCK
    rows = ledger(order, 0, 100)
    for start in range(0, len(rows) - BLOCK, BLOCK):
        names = [text for text, _, _ in rows[start : start + BLOCK]]
        assert [names.count(text) for text in WINDOWS] == shares
    assert_each_once_per_epoch(rows, WINDOWS)


def test_a_schedule_changes_the_shares_at_its_steps_and_loses_nothing() -> None:
    order = splice.begin(mixture())
    assert [segment.step for segment in order.segments] == [0, 30, 47]
    assert [segment.sample for segment in order.segments] == [0, 30 * 240, 47 * 240]
    assert [[source.share for source in segment.sources] for segment in order.segments] == [
        [2048, 1843, 205],
        [410, 819, 2867],
        [132, 3964, 0],
    ]
    rows = ledger(order, 0, 80)
    assert_each_once_per_epoch(rows, WINDOWS)
    assert not [text for text, _, _ in rows[47 * 240 :] if text == "text c"]
    for step in (0, 1, 29, 30, 46, 47, 48, 80):
        counts = [sum(text == name for text, _, _ in rows[: step * 240]) for name in WINDOWS]
        assert order.consumed(step) == counts
        assert order.samples(step) == sum(counts) and order.tokens(step) == 13 * sum(counts)


def test_max_epochs_are_checked_before_the_run() -> None:
    order = splice.begin(mixture())
    splice.check_epochs(order, 80, {"a": 200, "b": 100, "c": 0})
    epochs = order.consumed(80)[2] / 5
    with pytest.raises(
        InputError,
        match=rf"source c of data.mixture would be read {epochs:.2f} times in 80 .* = 3:",
    ):
        splice.check_epochs(order, 80, {"c": 3})


def test_what_a_mixture_cannot_be_is_a_sentence() -> None:
    with pytest.raises(InputError, match="weight 0.0001 of c from step 30 on is less than 1/4096"):
        splice.begin(mixture(weights=[ONCE, ONCE, [[0, 1.0], [30, 0.0001]]]))
    with pytest.raises(InputError, match="all weights are 0 from step 0 on"):
        splice.begin(mixture(weights=[[[0, 0.0]]] * 3))
    with pytest.raises(InputError, match="a and b are the same text"):
        splice.describe([("a", "x", MIXED[0], ONCE), ("b", "x", MIXED[0], ONCE)], 0, 13, 8)
    with pytest.raises(
        InputError, match="needs 101 tokens for one sequence, but the train split of c has 78"
    ):
        mixture(T=100)
    assert mixture(T=77)["sources"][2]["windows"] == 1  # 78 tokens


# --------------------------------------------------------------------------------------------------
# resume and splices


def saved(order: Order, description: dict, step: int) -> dict:
    """Return the state that a checkpoint keeps, through JSON."""
    return json.loads(json.dumps({"step": step, "data": splice.state(order, description)}))


def interrupted(trial: int, resume=splice.resume, order_of=None) -> tuple[list, list]:
    """Do a run of 12 steps that is killed at random, resumed from a random earlier checkpoint on
    another number of ranks, and resumed again from the same one; (what it trained on, what the
    uninterrupted run trains on)."""
    draw = random.Random(trial)
    weights = [
        [[0, draw.random() + 0.1], [draw.randrange(1, 12), draw.random() + 0.01]] for _ in "abc"
    ]
    description = mixture(seed=trial, G=48, weights=weights)
    oracle = ledger(splice.begin(description), 0, 12)
    order, rows, step, checkpoint = splice.begin(description), [], 0, None
    while step < 12:
        dp = draw.choice([1, 2, 3, 4, 6, 8, 12])
        killed = min(12, step + draw.randrange(1, 9))
        seen_by = order_of(order, dp) if order_of else order
        ranks = [Batches(MIXED, seen_by, 48 // dp, rank, dp) for rank in range(dp)]
        while step < killed:
            for batch in (batches[step] for batches in ranks):
                segment = order.segment(step)
                names = [segment.sources[s].fingerprint for s in batch["source"].tolist()]
                rows += list(
                    zip(
                        names,
                        batch["window"].tolist(),
                        batch["tokens"][..., 0].flatten().tolist(),
                        strict=True,
                    )
                )
            step += 1
            if draw.random() < 0.3:
                checkpoint = saved(order, description, step)
        if step < 12 and checkpoint:
            for _ in range(2):  # the first of the two resumes is killed before it trains
                order, _ = resume(checkpoint, description, False)
            step = checkpoint["step"]
            rows = rows[: step * 48]
    return [(text, window) for text, window, _ in rows], [
        (text, window) for text, window, _ in oracle
    ]


def test_kills_reshards_and_resumes_repeat_and_skip_nothing() -> None:
    for trial in range(40):
        rows, oracle = interrupted(trial)
        assert rows == oracle, trial


def shifted(progress: dict, *rest) -> tuple:
    progress["step"] += 1
    return splice.resume(progress, *rest)


def by_ranks(order: Order, dp: int) -> Order:
    other = copy.copy(order)
    other.rows = lambda step, first, count, steps: order.rows(step, (first + dp) % 48, count, steps)
    return other


@pytest.mark.parametrize(
    "bug", [{"resume": shifted}, {"order_of": by_ranks}], ids=["shifted by one", "knows the ranks"]
)
def test_a_shifted_or_rank_dependent_order_would_be_caught(bug: dict) -> None:
    assert any(rows != oracle for rows, oracle in (interrupted(trial, **bug) for trial in range(3)))


def test_what_changes_on_resume_is_named_and_refused() -> None:
    before = mixture()
    progress = saved(splice.begin(before), before, 40)
    assert splice.resume(progress, before, False)[1] == []
    for words, now in {
        "run.seed was 5 and is 6": mixture(seed=6),
        "run.seed was 5 and is 4": mixture(seed=4),
        "training.seq_len was 13 and is 11": mixture(T=11),
        "training.global_batch_size was 240 and is 48": mixture(G=48),
        "weight or schedule of source a": mixture(weights=[[[0, 0.4]], *WEIGHTS[1:]]),
        "source c is gone": mixture(weights=WEIGHTS[:2], names="ab"),
        "the text of source b or how it is tokenised has changed": before
        | {
            "sources": [
                s | {"fingerprint": "new"} if s["name"] == "b" else s for s in before["sources"]
            ]
        },
        "the order of the sources has changed": before | {"sources": before["sources"][::-1]},
        r"data.skip was \[\] and is \[\[50, 3\]\]": before | {"skip": [[50, 3]]},
    }.items():
        with pytest.raises(
            InputError, match=f"the data would change at step 40: .*{words}.*data.allow_splice"
        ):
            splice.resume(progress, now, False)
        order, lines = splice.resume(progress, now, True)
        assert lines and order.last.step >= 40
        assert ledger(order, 0, 40) == ledger(splice.begin(before), 0, 40), (
            "the past stays as it was"
        )
    with pytest.raises(InputError, match="does not say which data"):
        splice.resume({"step": 3}, before, False)
    order, lines = splice.resume({"step": 3}, before, True)
    assert "begin at their first sample" in lines[0] and order.segments[0].step == 3
    assert ledger(order, 3, 6) == ledger(splice.begin(before), 0, 3)
    with pytest.raises(
        InputError,
        match=r"checkpoint of step 40, which .*: go back with checkpoint.load_step = 10, or a "
        r"step before",
    ):
        splice.resume(progress, before | {"skip": [[10, 3]]}, True)


def test_batches_that_are_skipped_are_counted_once_and_seen_by_no_step() -> None:
    """Batches that were skipped are not skipped again where the weights change later."""
    whole = mixture(weights=[[[0, 1.0], [70, 2.0]]], names="b")
    order = splice.begin(whole | {"skip": [[50, 3]]})
    assert [segment.step for segment in order.segments] == [0, 50, 70]
    for first, stop, skipped in (0, 50, 0), (50, 70, 3), (70, 80, 3):
        for step in range(first, stop):
            rows = order.rows(step, 0, 240)
            expected = splice.begin(whole).rows(step + skipped, 0, 240)
            assert all(map(np.array_equal, rows[:2], expected[:2])), step


def test_a_splice_goes_on_with_each_text_where_it_was() -> None:
    """Other weights, another name, another batch size, a source that goes and comes back: nothing
    repeats or is left out within an epoch of any of them. A new seed begins at the first sample."""
    first = mixture(G=48)
    order = splice.begin(first)
    steps = [0]
    for step, now in (
        (41, mixture(G=240, weights=[[[0, 0.2]], [[0, 0.8]]], names="ab")),
        (60, mixture(G=240, weights=[[[0, 0.7], [70, 0.1]], [[0, 0.1]], [[0, 0.2]]], names="cba")),
        (75, mixture(G=48, weights=[ONCE], names="b")),
    ):
        order, _ = splice.resume(saved(order, first, step), now, True)
        first, steps = now, [*steps, step]
        assert splice.resume(saved(order, now, step + 1), now, False)[0].segments == order.segments
    assert [segment.step for segment in order.segments] == [0, 30, 41, 60, 70, 75]
    rows = ledger(order, 0, 120)
    assert len(rows) == order.samples(120) == 48 * 41 + 240 * 34 + 48 * 45
    assert_each_once_per_epoch(rows, WINDOWS)
    order, _ = splice.resume(saved(order, first, 80), mixture(seed=6, G=48), True)
    assert [source.consumed for source in order.last.sources] == order.consumed(order.last.step)
    assert [source.consumed for source in order.segment(80).sources] == [0, 0, 0]


# --------------------------------------------------------------------------------------------------
# documents


def test_masked_documents_have_positions_of_their_own_and_no_label_across_a_border() -> None:
    rng = np.random.default_rng(3)
    T, starts = 13, (0, *np.flatnonzero(rng.random(13 * 37 + 5) < 0.15).tolist()[1:])
    tokens = Places(13 * 37 + 5, starts=starts)
    unmasked, with_mask = (
        single(tokens, T, 6, 2, 1, 3, seed=2, mask=mask) for mask in (False, True)
    )
    borders = set()  # places in a window at which a document begins
    for step, row in itertools.product(range(12), range(2)):
        plain, masked = unmasked[step], with_mask[step]
        assert (
            masked["positions"].shape == masked["tokens"].shape == (1, 2, T)
            and "positions" not in plain
        )
        first = int(masked["tokens"][0, row, 0])
        borders |= {start - first for start in starts if first <= start <= first + T}
        for t in range(T):
            begin = max(first, max(start for start in starts if start <= first + t))
            assert masked["positions"][0, row, t] == first + t - begin
            label = IGNORE if first + t + 1 in starts else first + t + 1
            assert (
                masked["labels"][0, row, t] == label and plain["labels"][0, row, t] == first + t + 1
            )
    assert {0, 1, T - 1, T} <= borders


# --------------------------------------------------------------------------------------------------
# loaders and workers


def test_loaders_agree_for_any_workers_and_resume_anywhere(monkeypatch) -> None:
    order = splice.begin(mixture(G=12))
    for dp, rank in ((1, 0), (3, 1)):
        batches = Batches(MIXED, order, 2, rank, dp, mask_documents=True)
        whole = [batches[step] for step in range(24, 33)]
        for workers, start, ahead in (0, 0, 2), (0, 4, 2), (1, 0, 1), (3, 5, 1), (3, 8, 4):
            before = torch.get_rng_state()
            monkeypatch.setattr(workers_of, "AHEAD", ahead)
            found = list(loader(batches, 24 + start, 33, Data(workers=workers)))
            assert torch.equal(before, torch.get_rng_state()), (
                "reading data drew from the global generator"
            )
            assert len(found) == 9 - start
            for one, other in zip(found, whole[start:], strict=True):
                assert one.keys() == other.keys() and all(
                    torch.equal(one[name], other[name]) for name in other
                )


def test_a_late_step_needs_no_replay() -> None:
    batches, read = single(Places(100_000), 16, 512, 8, 3, 8, seed=0), []
    real = batches.sources[0].read
    batches.sources[0].read = lambda start, stop: read.append(start) or real(start, stop)
    batch = next(loader(batches, 10**12, 10**12 + 1, Data()))
    assert len(read) == 64, "this rank's rows of one step"
    assert torch.equal(batch["labels"], batch["tokens"] + 1)


def test_a_token_beyond_the_vocabulary_is_an_error_that_names_its_corpus() -> None:
    # the ids of the second begin at a million
    sources = [Places(13 * 40 + 1, source) for source in (0, 1)]
    for tokens in sources:
        tokens.folder = f"corpus {tokens.source}"
    order = splice.begin(
        splice.describe([(name, name, t, ONCE) for name, t in zip("ab", sources)], 0, 13, 8)
    )
    highest = Batches(sources, order, 4, 0, 1, vocab_size=2 * 10**6)[0]["tokens"].max().item()
    assert highest >= 10**6
    with pytest.raises(
        ValueError, match=r"^corpus 1 has token 1\d{6}, the model's vocabulary 1000000: .* damaged"
    ):
        Batches(sources, order, 4, 0, 1, vocab_size=10**6)[0]


class Failing(Batches):
    """Step 6 cannot be read, in one of these ways."""

    how = ""

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        if step == 6:
            match self.how:
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "killed slowly":
                    os.closerange(3, 1000)  # as the kernel does before the end
                    time.sleep(0.5)
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "slow":
                    time.sleep(60)
                case "raises":
                    raise OSError(5, "Input/output error", "tokens.bin")
        return super().__getitem__(step)


STEP = r"step 7 \(of sources a, b, c\)"
WORDS = {
    "killed": rf"data worker \d+ died \(SIGKILL\), while it read {STEP}",
    "killed slowly": rf"data worker \d+ died \(SIGKILL\), while it read {STEP}",
    "stopped": rf"data worker \d+ sent nothing for 2 s .*, while it read {STEP}: it is stopped",
    "slow": rf"data worker \d+ sent nothing for 2 s .*, while it read {STEP}: it hangs",
    "raises": rf"data worker \d+: {STEP} cannot be read: OSError: .*tokens.bin",
}


@pytest.mark.parametrize("how", WORDS)
@pytest.mark.cap(20)
def test_a_worker_that_dies_stops_hangs_or_fails_ends_the_run(how: str) -> None:
    """With the worker's number, the step and its sources; no worker is left behind."""
    batches = Failing(MIXED, splice.begin(mixture()), 8, 0, 1)
    batches.how = how
    before = all_children()
    stream = loader(batches, 0, 20, Data(workers=2, timeout_seconds=2))
    with pytest.raises(LoaderError, match=WORDS[how]):
        list(stream)
    assert all_children() == before


def test_a_worker_that_dies_does_not_interrupt_the_trainer() -> None:
    """In the main thread the loader's handler of SIGCHLD would raise wherever the trainer is. Here
    the next batch that does not come raises, and those that were received before are still
    given."""
    handler = signal.getsignal(signal.SIGCHLD)
    stream = loader(Batches(MIXED, splice.begin(mixture()), 8, 0, 1), 0, 50, Data(workers=2))
    next(stream)
    assert signal.getsignal(signal.SIGCHLD) is handler
    for pid in children():
        os.kill(int(pid), signal.SIGKILL)
    computed = 0
    for i in range(300_000):  # what the handler would interrupt
        computed += i
    with pytest.raises(
        LoaderError, match=r"data worker \d+ died \(SIGKILL\), while .*step \d+ \(of sources "
    ):
        list(stream)


def test_a_trainer_that_is_slower_than_its_workers_gets_every_batch(monkeypatch) -> None:
    """The thread that receives them has to wait more than once for room."""
    batches = Batches(MIXED, splice.begin(mixture()), 8, 0, 1)
    monkeypatch.setattr(workers_of, "AHEAD", 1)
    stream = loader(batches, 0, 12, Data(workers=1))
    seen = [next(stream)]
    time.sleep(1.3)
    seen += stream
    assert [batch["window"].tolist() for batch in seen] == [
        batches[step]["window"].tolist() for step in range(12)
    ]


def test_what_cannot_be_read_in_process_is_named_too() -> None:
    batches = Failing(MIXED, splice.begin(mixture()), 8, 0, 1)
    batches.how = "raises"
    with pytest.raises(LoaderError, match=WORDS["raises"].partition(": ")[2]):
        list(loader(batches, 0, 20, Data()))


def test_a_file_that_was_removed_is_named_alone() -> None:
    gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "cache/validation-00000.bin")
    batches = Batches(MIXED, splice.begin(mixture()), 8, 0, 1)
    said = workers_of.cannot_read(batches, 0, gone)
    assert said.startswith("cache/validation-00000.bin was removed during the run"), said


def test_signals_that_ask_a_run_to_stop_do_not_reach_its_workers() -> None:
    """A scheduler sends them to every process; the trainer still needs batches until it has saved."""
    stream = loader(Batches(MIXED, splice.begin(mixture()), 8, 0, 1), 0, 20, Data(workers=3))
    for _ in range(3):  # all three run
        next(stream)
    for number in STOP_SIGNALS:
        for pid in children():
            os.kill(int(pid), number)
    assert len(list(stream)) == 17


def children() -> list[str]:
    """Process ids of the workers: this process's children but the server that forks ranks and
    multiprocessing's tracker, which are started as programs."""
    return [pid for pid in all_children() if not _is_program(pid)]


def all_children() -> set[str]:
    """Process ids. Linux lists a child under the thread that forked it."""
    return {
        pid
        for tasks in Path("/proc/self/task").glob("*/children")
        for pid in tasks.read_text().split()
    }


def _is_program(pid: str) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return command != Path("/proc/self/cmdline").read_bytes()


def orphaned(folder: Path) -> None:
    """A trainer that is killed while its workers are full and wait."""
    stream = loader(Batches(MIXED, splice.begin(mixture()), 8, 0, 1), 0, 20, Data(workers=3))
    next(stream)
    (folder / "pids").write_text(" ".join(children()))
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_end_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        orphaned(tmp_path)
    os.waitpid(pid, 0)
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 3
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (alive := [pid for pid in pids if lives(pid)]):
        time.sleep(0.02)
    assert not alive
