"""What the plan says that failures cost where the replicas that are left go on: by hand, against a run
that is played, and against who does go on."""

import dataclasses
import math
import random
from types import SimpleNamespace

import pytest

from configs.load import load_config
from configs.rounds import WholeMesh, next_round
from data import uneven
from tools.plan.__main__ import main
from tools.plan.survivors import Survivors, lines

RUN = Survivors(
    gpus=16_384,
    hosts=2048,
    replicas=4,
    batch=12,
    ranks=1,
    mtbf=10_800.0,
    step=10.0,
    held=10e9,
    to_host=50e9,
    network=40e9,
    built=30.0,
    back=600.0,
    gradients=5e9,
)


def test_the_parts_by_hand():
    agreed = 0.5 + 1.6384 + 3 * 1.6384
    of_round = 0.39 + agreed + 265 * 16_384 / 96_000 + 2 * 10 / 50 + 30
    assert RUN.stop == pytest.approx(5 + 10 / 2 + of_round)
    assert RUN.at_return == pytest.approx(of_round + 10 / 40)
    assert RUN.missing == pytest.approx(600 - RUN.stop)
    assert [RUN.training(missing) for missing in range(5)] == [1, 0.75, 0.5, 0.25, 0]
    padded = dataclasses.replace(RUN, batch=8)
    assert [padded.training(missing) for missing in range(5)] == [1, 2 / 3, 0.5, 0.25, 0]
    at_once = dataclasses.replace(RUN, back=0.0)
    stops = at_once.stop + at_once.at_return
    assert at_once.kept() == pytest.approx(math.exp(-stops / 10_800))
    mean = RUN.missing / 10_800
    share = math.exp(-mean) * (1 + mean * 0.75 + mean**2 / 2 * 0.5 + mean**3 / 6 * 0.25)
    assert RUN.kept() == pytest.approx(share * at_once.kept())


def played(run: Survivors, failures: int, seed: int) -> float:
    """Return the share of the time that trains, of a run that is played failure by failure."""
    draw = random.Random(seed)
    now = work = 0.0
    stopped = 0.0  # until when
    returns: list[float] = []
    fails = draw.expovariate(1 / run.mtbf)
    while failures:
        event = min([fails, *returns])
        share = run.training(min(len(returns), run.replicas))
        work += share * max(0.0, event - max(now, stopped))
        now = event
        if event == fails:
            failures -= 1
            stopped = now + run.stop
            returns.append(now + run.back)
            fails = now + draw.expovariate(1 / run.mtbf)
        else:
            returns.remove(event)
            stopped = max(stopped, now + run.at_return)
    return work / now


def test_the_formula_is_what_a_run_has_that_is_played():
    """Failures each half hour; and, as a control, not if nothing were lost while one is missing."""
    often = dataclasses.replace(RUN, mtbf=1800.0)
    found = played(often, failures=40_000, seed=1)
    assert often.kept() == pytest.approx(found, abs=0.01)
    assert dataclasses.replace(often, batch=1).kept() > found + 0.05
    assert dataclasses.replace(often, back=0.0).kept() > found + 0.05


@pytest.mark.parametrize("batch", [24, 16, 8])
def test_a_round_is_as_fast_as_planned(batch):
    options = [
        "--run.fault_tolerant=true",
        "--parallelism.data_parallel_replicate=4",
        f"--training.global_batch_size={batch}",
        "--training.local_batch_size=1",
    ]
    cfg = load_config(options, 8, 8)
    steps = dict.fromkeys(range(6), 7)  # those of three replicas of two ranks
    found = next_round(options, cfg, WholeMesh.of(cfg, 8), steps, 8)
    planned = dataclasses.replace(RUN, batch=batch, ranks=2)
    assert found.replicas == 3
    rounds = load_config([*options, *found.options], 6, 8).training
    order = SimpleNamespace(last=SimpleNamespace(global_batch_size=batch))
    share = uneven.share(order, 0, 6, rounds.local_batch_size)
    assert share.count + share.padding == batch // 8 / planned.training(1)


@pytest.mark.slow
def test_the_plan_shows_it(capsys):
    small = ["--training.seq_len=64", "--model.n_layers=2", "--gpus=4", "--gpus-per-node=2"]
    two = ["--parallelism.data_parallel_replicate=2", "--peers=1"]
    assert main([*small, *two, "--replace-minutes=3", "--rebuild-seconds=7"]) == 0
    first, said = capsys.readouterr().out.split("No restart (run.fault_tolerant)")
    assert first.count("copies, no restart") == 5  # the plan's own number of GPUs, too
    row = said.splitlines()[2].split("  ")
    assert row[0] == "4" and "7.0 s" in row and "50%" in row
    assert "with --replace-minutes" in said
    assert "needs two replicas of 65,536 GPUs" in lines([], 65_536, 8, False)[0]
