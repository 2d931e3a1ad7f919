"""The loss of a traced step, put together from four of its pieces, is that of all of them."""

from unittest import mock

import pytest
import torch

from configs.load import load_config
from tests.steps import LOSS, apart, outline
from tools.plan import pieces
from tools.plan.trace import Trace, trace_step

FEW = pieces.few


def traced(options: list[str], few=FEW) -> tuple[list, int, dict[str, int], int]:
    """Outline of a step, its peak, the most bytes by kind, and how many pieces were traced."""
    begun = []

    def counted(trace: Trace, firsts: range):
        for first in few(trace, firsts):
            begun.append(first)
            yield first

    cfg = load_config([*LOSS, *options], 4, 4)
    with mock.patch.object(pieces, "few", counted):
        step = trace_step(cfg, 4, 4, True)
    return outline(step), step.peak()[0], step.highest_by_kind(), len(begun)


def all_pieces(trace: Trace, firsts: range) -> range:
    return firsts


def compared(options: list[str]) -> tuple[bool, int, int]:
    few = traced(options)
    every = traced(options, all_pieces)
    return few[:-1] == every[:-1], few[-1], every[-1]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--parallelism.tensor_parallel=2", "--training.z_loss=0.0001"],
        [
            "--training.local_batch_size=1",
            "--training.loss_chunk_tokens=11",
            "--activation_checkpoint.mode=full",
        ],
    ],
)
def test_four_pieces_stand_for_all(options):
    same, few, every = apart(compared, options)
    assert same
    assert few < every


def with_one_copy_less() -> bool:
    with_copies = pieces.with_copies

    def less(trace, second, third, copies):
        return with_copies(trace, second, third, copies - 1)

    with mock.patch.object(pieces, "with_copies", less):
        return compared([])[0]


def with_copies_that_free_nothing() -> bool:
    with_copies = pieces.with_copies

    def keeping(trace, second, third, copies):
        rows = with_copies(trace, second, third, copies)
        return [row for row in rows if not isinstance(row, tuple) or row[0] == "+"]

    with mock.patch.object(pieces, "with_copies", keeping):
        return compared([])[0]


@pytest.mark.parametrize("broken", [with_one_copy_less, with_copies_that_free_nothing])
def test_wrong_copies_are_seen(broken):
    assert not apart(broken)


def with_more_work_in_the_third(trace: Trace, firsts: range):
    for n, first in enumerate(FEW(trace, firsts)):
        if n == 2:
            torch.zeros(3)
        yield first


def test_pieces_that_differ_are_all_traced():
    *_, every = apart(traced, [], all_pieces)
    *_, differing = apart(traced, [], with_more_work_in_the_third)
    assert differing == every
