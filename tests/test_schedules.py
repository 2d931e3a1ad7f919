"""Pipeline schedules as tables: complete, possible, within their memory, and with the bubbles that
were published."""

from collections import Counter
from types import SimpleNamespace

import pytest

from configs.schema import SCHEDULES
from parallelisms import schedules
from parallelisms.pp import forward_table
from parallelisms.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    bubble,
    consecutive,
    least_microbatches,
    placement,
    stage_layers,
    table,
    timeline,
    transfers,
)


def ticks(action: Action) -> float:
    return 2.0 if action.kind == BACKWARD else 1.0


def cases(ranks: int, most_microbatches: int) -> list[tuple[str, int, int]]:
    """(schedule, stages per rank, microbatches) of every schedule on so many ranks."""
    return [
        (name, stages, microbatches)
        for name, row in SCHEDULES.items()
        for stages in range(row.stages_per_rank[0], min(row.stages_per_rank[1], 3) + 1)
        for microbatches in range(least_microbatches(name, ranks), most_microbatches + 1)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_table_is_complete_and_never_deadlocks(ranks):
    """Try fewer microbatches than stages, and numbers that the ranks do not divide, too."""
    for name, stages, microbatches in cases(ranks, 9):
        rank_of = placement(name, ranks, stages)
        actions = table(name, ranks, stages, microbatches)
        count = Counter(action for of_rank in actions for action in of_rank)
        assert set(count.values()) == {1}
        every = {(stage, m) for stage in range(ranks * stages) for m in range(microbatches)}
        by_kind = {
            kind: {(a.stage, a.microbatch) for a in count if a.kind == kind}
            for kind in schedules.RESULTS
        }
        assert by_kind[FORWARD] == every
        assert by_kind[BACKWARD] | by_kind[BACKWARD_INPUT] == every
        assert (
            not by_kind[BACKWARD] & by_kind[BACKWARD_INPUT]
            and by_kind[BACKWARD_INPUT] == by_kind[BACKWARD_WEIGHT]
        )
        if ranks > 1:
            assert bool(by_kind[BACKWARD_INPUT]) == SCHEDULES[name].splits_backward
        # no stage waits for a gradient of tokens
        assert 0 not in {stage for stage, _ in by_kind[BACKWARD_INPUT]}
        assert all(
            rank_of[a.stage] == rank for rank, of_rank in enumerate(actions) for a in of_rank
        )
        timeline(actions, rank_of, ticks, lambda *_: 0.5)  # raises where ranks wait for each other


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_forwards_alone_take_every_microbatch_through_every_stage(ranks):
    """Validation has as many microbatches as a batch has, whether the ranks divide them or not.
    One that is left out would count tokens without their loss."""
    for name, row in SCHEDULES.items():
        rank_of = placement(name, ranks, row.stages_per_rank[0])
        for microbatches in range(1, 10):
            actions = forward_table(rank_of, ranks, microbatches)
            stages = range(len(rank_of))
            every = Counter(Action(FORWARD, s, m) for s in stages for m in range(microbatches))
            assert Counter(action for of_rank in actions for action in of_rank) == every
            assert all(rank_of[a.stage] == r for r, of_rank in enumerate(actions) for a in of_rank)
            # raises where ranks wait for each other
            timeline(actions, rank_of, ticks, lambda *_: 0.5)


def test_placement():
    assert placement("1f1b", 3) == [0, 1, 2]
    assert placement("interleaved_1f1b", 3) == placement("zero_bubble", 3, 2) == [0, 1, 2, 0, 1, 2]
    assert placement("zbv", 3) == placement("dualpipe_v", 3) == [0, 1, 2, 2, 1, 0]


def test_schedule_1f1b_is_the_table_of_the_paper():
    """Figure 4 of arXiv:2104.04473: rank r begins with p - r forwards, then one backward follows
    one forward."""
    for rank, actions in enumerate(table("1f1b", 4, 1, 8)):
        ahead = 4 - rank
        kinds = [FORWARD] * ahead + [BACKWARD, FORWARD] * (8 - ahead) + [BACKWARD] * ahead
        assert [a.kind for a in actions] == kinds
        for kind in FORWARD, BACKWARD:
            assert [a.microbatch for a in actions if a.kind == kind] == list(range(8))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bubbles_are_those_that_were_published(ranks):
    """Counted in ticks on top of the work: v stages on a rank, of which a forward takes 1 tick and
    a whole backward 2."""
    for microbatches in (2 * ranks, 5 * ranks):
        for name, stages, ticks_published in (
            # arXiv:2104.04473, section 2.2.1: (p - 1) / m of the work
            ("1f1b", 1, 3 * (ranks - 1)),
            ("interleaved_1f1b", 2, 3 * (ranks - 1)),  # section 2.2.2: (p - 1) / (v m)
            ("interleaved_1f1b", 3, 3 * (ranks - 1)),
            ("zero_bubble", 1, ranks - 1),  # ZB-H1, arXiv:2401.10241, table 1: (p - 1) (F + B - W)
            ("zero_bubble", 2, ranks - 1),
            # section 6: none, but the last rank begins p - 1 ticks after the first one
            ("zbv", 2, ranks - 1),
            # github.com/deepseek-ai/DualPipe: at most (p - 1) (F + B + B - 3W) = 2 (p - 1)
            ("dualpipe_v", 2, ranks - 1),
        ):
            actions = table(name, ranks, stages, microbatches)
            work = 3 * stages * microbatches
            share = bubble(timeline(actions, placement(name, ranks, stages), ticks))
            assert share == pytest.approx(ticks_published / (work + ticks_published)), (
                name,
                stages,
                microbatches,
            )


def most_held(actions: list[Action]) -> int:
    """Activations, in microbatches of a stage, that a rank holds at most: from forward until the
    end of backward."""
    held, most = 0, 0
    for action in actions:
        held += {FORWARD: 1, BACKWARD_INPUT: 0}.get(action.kind, -1)
        most = max(most, held)
    return most


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_activations_held_are_those_of_the_papers(ranks):
    def held(name: str, stages: int) -> list[int]:
        return [most_held(actions) for actions in table(name, ranks, stages, 5 * ranks)]

    assert held("1f1b", 1) == [ranks - rank for rank in range(ranks)]
    assert held("interleaved_1f1b", 3) == [
        2 * (ranks - 1 - rank) + 2 * ranks + 1 for rank in range(ranks)
    ]
    assert max(held("zero_bubble", 1)) == ranks  # as 1F1B
    # of half the size: as 1F1B
    assert max(held("zero_bubble", 2)) == max(held("zbv", 2)) == 2 * ranks
    assert max(held("dualpipe_v", 2)) == 2 * ranks + 1


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_transfers_can_be_started_in_one_order_by_all_ranks(ranks):
    """The runtime does so on NCCL: where a rank's next action needs a result, everything that comes
    before that in the list has been started, and a rank starts a send only after it has made its
    contents."""
    for name, stages, microbatches in cases(ranks, 7):
        rank_of = placement(name, ranks, stages)
        actions = table(name, ranks, stages, microbatches)
        travels = transfers(actions, rank_of)
        hidden = [s for s in range(ranks * stages - 1) if rank_of[s] != rank_of[s + 1]]
        assert len(travels) == 2 * len(hidden) * microbatches
        for rank, of_rank in enumerate(actions):
            position = {action: i for i, action in enumerate(of_rank)}
            own = [t for t in travels if rank in (t.sender, t.receiver)]
            sent = -1  # position of the last action whose result is sent
            for transfer in own:
                if transfer.sender == rank:
                    assert position[transfer.made_by] > sent
                    sent = position[transfer.made_by]
                else:
                    assert position[transfer.needed_by] > sent, (name, transfer)


@pytest.mark.slow
def test_negative_controls_a_wrong_table_is_seen():
    actions = table("1f1b", 2, 1, 4)
    actions[1].reverse()
    with pytest.raises(ValueError, match="wait for each other"):
        timeline(actions, [0, 1], ticks)
    late = table("1f1b", 2, 1, 4)
    late[0].sort(key=lambda a: a.kind != FORWARD)  # all forwards first: possible, but it holds more
    timeline(late, [0, 1], ticks)
    assert most_held(late[0]) == 4 != most_held(table("1f1b", 2, 1, 4)[0])


def test_seconds_of_p2p_and_unequal_stages():
    """Two ranks, one microbatch: nothing overlaps, so all times add up."""
    played = timeline(
        table("1f1b", 2, 1, 1), [0, 1], lambda a: 3.0 if a.stage else 1.0, lambda *_: 0.25
    )
    assert [(begin, end) for _, begin, end in played[0]] == [(0, 1), (7.5, 8.5)]
    assert [(begin, end) for _, begin, end in played[1]] == [(1.25, 4.25), (4.25, 7.25)]
    assert bubble(played) == pytest.approx(1 - 8 / (2 * 8.5))


def test_too_few_microbatches():
    with pytest.raises(
        ValueError, match="dualpipe_v on 4 ranks needs at least 8 microbatches, not 7"
    ):
        table("dualpipe_v", 4, 2, 7)


@pytest.mark.parametrize(
    "layers, stages, ends, counts",
    [
        (8, 4, (0, 0), [2, 2, 2, 2]),
        (5, 2, (0, 0), [3, 2]),  # the early stage takes the rest
        (3, 2, (0, 1), [2, 1]),
        # Llama 3 405B, as arXiv:2407.21783 section 3.3.2 says
        (126, 16, (0.66, 0.61), [7, *[8] * 14, 7]),
        (4, 4, (3, 3), [1, 1, 1, 1]),
        (6, 2, (0, 2.5), [4, 2]),
    ],
)
def test_layers_of_stages_by_cost(layers, stages, ends, counts):
    assert stage_layers(layers, stages, *ends) == consecutive(counts)
    assert [n for of_stage in consecutive(counts) for n in of_stage] == list(range(layers))


def test_the_embedding_counts_by_its_memory_and_the_head_by_its_matmuls():
    args, more = (SimpleNamespace(vocab_size=1000, dim=8, n_layers=n) for n in (2, 3))
    ends = schedules.end_weights(
        args, more, lambda a: 3000 + 2000 * a.n_layers, lambda a: 7000 + 6000.0 * a.n_layers
    )
    assert ends == (4.0, 8.0)


def test_more_stages_than_layers():
    with pytest.raises(ValueError, match="3 layers are too few for 4 stages"):
        stage_layers(3, 4, 0, 0)
