"""What grows with the number of ranks: messages of a step, process groups, sockets."""

import itertools
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import train
from checkpoint.storage import ShardWriter
from reliability.collectives import Watch
from tests.ranks import run_ranks
from tests.runs import MESHES, run, tiny_run


class Collectives(Watch):
    """Counts the collectives of this thread, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def see(self, name, func, args) -> None:
        self.names[name] += 1


def counted(folder: Path, options: list[str]) -> tuple[int, str, list[Counter], list[Counter]]:
    """A run whose saves last for several steps. Returns its exit code, its errors, and the collectives inside of each
    `train_step`, and between it and the one before."""
    inside, between = [], []
    real_step, real_write = train.train_step, ShardWriter.write_data

    def step(job, batch, *options):
        between.append(Counter(watch.names))
        watch.names.clear()
        result = real_step(job, batch, *options)
        inside.append(Counter(watch.names))
        watch.names.clear()
        return result

    def write(writer, *plan):
        time.sleep(0.3)
        return real_write(writer, *plan)

    train.train_step, ShardWriter.write_data = step, write
    with Collectives() as watch:
        code, errors = run(options, folder)
    return code, errors, inside, between


@pytest.mark.parametrize("mesh", ["fsdp2", "tp2"])
def test_a_step_costs_no_collective_for_what_the_ranks_agree_on(mesh, tmp_path):
    """Stopping, a save in flight, a stream that may end: all of it travels with the loss."""
    options = [
        *tiny_run(tmp_path), *MESHES[mesh][1], "--data.stream=true", "--data.streams=4", "--training.steps=8",
        "--checkpoint.interval=4", "--metrics.straggler_interval=0", "--metrics.interval=1",
    ]  # fmt: skip
    results = run_ranks(2, counted, tmp_path / "run", options)
    for code, errors, inside, between in results:
        assert (code, errors) == (0, ""), errors
        assert all(step == inside[0] for step in inside), "every step has the same collectives"
        assert mesh == "tp2" or inside[0]["allreduce_"] == 3, "the count of tokens, the loss with the flags, the norm"
        gathered, reported = between[4], sum(between[5:], Counter())  # for the checkpoint of step 4; when it is written
        assert gathered == {"allgather_": 2} and reported == {"allreduce_": 1} and not sum(between[1:4], Counter()), between


def replayed(options: list[str]) -> tuple[list[int], train.Flags]:
    """A step whose gradient is computed twice, while a signal comes between the two passes."""
    job = train.build(train.load_config(options, 2, 2))
    window = torch.arange(2 * 2 * 17).view(2, 2, 17)
    batch = {"tokens": window[..., :-1].contiguous(), "labels": window[..., 1:].contiguous()}
    asked = itertools.cycle([train.Flags(), train.Flags(stop=True)])
    result = train.train_step(job, batch, replay=True, flags=lambda: next(asked))
    return result.unlike, result.flags


def test_a_signal_between_two_passes_is_no_difference_of_the_gradient(tmp_path):
    options = [*tiny_run(tmp_path), *MESHES["fsdp2"][1]]
    assert run_ranks(2, replayed, options) == [([], train.Flags())] * 2
