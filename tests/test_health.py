"""Numbers that are not finite, numbers that jump, replicas that part, ranks that are late; and a
crash that comes again."""

import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import data.loader
import train
from checkpoint import storage
from configs.load import load_config
from reliability import health, record
from reliability.guard import Diverged, Guard
from reliability.health import Spikes, Stragglers, mismatching_replicas, outliers
from tests.checkpoints import saved_state
from tests.ranks import WORKERS, run_ranks
from tests.runs import MESHES, STEPS, run, samples, series, stopped_at, tiny_run

TWO = MESHES["fsdp2"][1]
BAD = 4  # the step that goes wrong


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    place = tmp_path_factory.mktemp("run")
    made = [*tiny_run(place), *TWO]
    (place / "first").mkdir()
    assert run_ranks(2, run, made, place / "first") == [(0, "")] * 2
    return made


# A batch that gives no number


def in_gradient_alone(loss: torch.Tensor, value: float) -> torch.Tensor:
    loss.register_hook(lambda gradient: gradient * value)
    return loss


def in_both(loss: torch.Tensor, value: float) -> torch.Tensor:
    return loss * value


def poisoned(
    options: list[str], folder: Path, where, value: float, gate: bool = True
) -> tuple[int, str]:
    """Do a run in which rank 1's loss is spoilt in step BAD."""
    real_loss, real_step, steps = train.linear_cross_entropy, train.train_step, []

    def loss(*args, **kwargs):
        result = real_loss(*args, **kwargs)
        return where(result, value) if len(steps) == BAD and dist.get_rank() == 1 else result

    def step(job, batch, *options):
        steps.append(1)
        return real_step(job, batch, *options)

    train.linear_cross_entropy, train.train_step = loss, step
    if not gate:
        real_clip = train.clip_grad_norm
        train.clip_grad_norm = lambda *args: real_clip(*args).nan_to_num(1.0)
        train.step_if = lambda fine, optimizer: optimizer.step()
        storage.check_finite = lambda _: None
    return run(options, folder)


def without_update(options: list[str], folder: Path) -> tuple[int, str]:
    """The oracle: a run whose step BAD is computed, and not applied."""
    real, steps = train.train_step, []

    def step(job, batch, *options):
        steps.append(1)
        update = job.optimizer.step
        if len(steps) == BAD:
            job.optimizer.step = lambda: None
        try:
            return real(job, batch, *options)
        finally:
            job.optimizer.step = update

    train.train_step = step
    return run(options, folder)


@pytest.fixture(scope="module")
def oracle(options, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("oracle")
    assert run_ranks(2, without_update, options, folder) == [(0, "")] * 2
    return folder


def equals_oracle(folder: Path, oracle: Path) -> bool:
    after = range(BAD + 1, STEPS + 1)
    keys = ("loss", "grad_norm", "tokens_seen")
    same = all(series(folder, key)[s] == series(oracle, key)[s] for key in keys for s in after)
    assert samples(folder, 2) == samples(oracle, 2)
    a, b = saved_state(folder), saved_state(oracle)
    return same and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_batch_with_a_non_finite_loss_leaves_the_weights_unchanged(options, oracle, tmp_path):
    bad = in_gradient_alone, math.inf
    assert run_ranks(2, poisoned, options, tmp_path, *bad) == [(0, "")] * 2
    assert equals_oracle(tmp_path, oracle)
    said = (tmp_path / "logs" / "rank-00000.log").read_text()
    assert f"step {BAD}: loss" in said
    assert f"`python -m data.audit {tmp_path} --steps={BAD}`" in said


@pytest.mark.torture
def test_negative_control_without_the_gate_such_a_batch_changes_the_weights(
    options, oracle, tmp_path
):
    """The negative control."""
    options = [*options, "--training.max_skipped_steps=99"]
    assert run_ranks(2, poisoned, options, tmp_path, in_both, math.nan, False) == [(0, "")] * 2
    assert not equals_oracle(tmp_path, oracle)


# It comes again at every start


def always_bad(folder: Path, options: list[str], steps: int) -> str:
    """Start a run in which no loss after so many of its steps is a number; return how it ends."""
    real, real_rate, at = train.linear_cross_entropy, train.learning_rate, []
    train.learning_rate = lambda step, *rest: (at.append(step), real_rate(step, *rest))[1]
    train.linear_cross_entropy = lambda *args, **kwargs: (
        real(*args, **kwargs) * (math.nan if at[-1] >= steps else 1.0)
    )
    try:
        return f"exit code {run(options, folder)[0]}"
    except RuntimeError as error:
        return str(error)


@pytest.mark.slow
def test_a_step_that_fails_at_every_start_is_not_retried_for_ever(options, tmp_path):
    options = [*options, "--training.max_skipped_steps=1", "--checkpoint.keep_last=1"]
    for _ in range(3):
        assert "2 steps in a row" in run_ranks(1, always_bad, tmp_path, options, 8)[0]
        assert [p.name for p in tmp_path.glob("checkpoints/step-*")] == ["step-00000005"]
    for number in 4, 5:
        assert run_ranks(1, always_bad, tmp_path, options, 8) == ["exit code 76"]
        end = json.loads((tmp_path / "starts" / f"{number:04d}" / "end.json").read_text())
        assert end["exit_code"] == 76, end
        assert "3 starts in a row failed after step 10" in end["reason"], end
    floats = [tensor for tensor in saved_state(tmp_path).values() if tensor.is_floating_point()]
    assert all(tensor.isfinite().all() for tensor in floats)
    # Another try: with an option changed, and because the count is then another run's, again when
    # it has failed once.
    more = [*options, "--optimizer.lr=0.005"]
    assert "2 steps in a row" in run_ranks(1, always_bad, tmp_path, more, 8)[0]
    assert run_ranks(1, run, more, tmp_path) == [(0, "")]


def harmed(
    options: list[str], folder: Path, harm: Callable[[torch.Tensor], None], ends: type[Exception]
) -> str:
    """Do a run in which rank 1's first weights come to harm after step 5's update; return how it
    ends."""
    real, steps = train.train_step, []

    def step(job, batch, *options):
        result = real(job, batch, *options)
        steps.append(1)
        if len(steps) == 5 and dist.get_rank() == 1:
            with torch.no_grad():
                harm(next(job.model.parameters()).to_local().view(-1))
        return result

    train.train_step = step
    try:
        return f"exit code {run(options, folder)[0]}"
    except ends as error:
        return str(error)


def spoil(weights: torch.Tensor) -> None:
    """Make a weight no number (a device that computed wrong)."""
    weights[3].fill_(math.inf)


def test_a_state_that_is_not_finite_is_never_published(options, tmp_path):
    # the losses that follow shall not end it before the writer does
    options = [*options, "--training.max_skipped_steps=99"]
    for end in run_ranks(2, harmed, options, tmp_path, spoil, storage.NotFinite):
        assert "not finite, so it is not saved: rank 1: NotFinite: model." in end
    assert not list(tmp_path.glob("checkpoints/step-*"))


# ranks whose settings differ


def mismatching_ranks(options: list[str], folder: Path, what: str) -> tuple[int, str]:
    """Rank 1 has other code or another option."""
    if dist.get_rank() == 1 and what == "code":
        record.source_hash = lambda: "another"
    elif dist.get_rank() == 1:
        options = [*options, "--optimizer.lr=0.5"]
    return run(options, folder)


@pytest.mark.parametrize("what", ["code", pytest.param("config", marks=pytest.mark.slow)])
def test_ranks_whose_settings_differ_do_not_start(what, options, tmp_path):
    for code, said in run_ranks(2, mismatching_ranks, options, tmp_path, what):
        assert code == 2 and f"{what} differs: rank 0 has" in said and "ranks [1] do not" in said, (
            said
        )
    assert not list((tmp_path / "checkpoints").glob("step-*"))


# Spikes


def test_a_spike_is_one_and_noise_is_not():
    numbers, spikes = random.Random(3), Spikes(6.0, {})
    for step in range(1000):
        loss = 8 - step / 200 + numbers.gauss(0, 0.05)
        assert spikes.add(loss=loss, grad_norm=1 + abs(numbers.gauss(0, 0.2))) == ""
    assert "loss 9 (the median is" in spikes.add(loss=9.0, grad_norm=1.0)
    for _ in range(10):  # those that are in the window already hide nothing
        assert "grad_norm 30" in spikes.add(loss=3.0, grad_norm=30.0)
    assert spikes.add(loss=math.nan, grad_norm=math.inf) == ""  # another matter
    again = Spikes(6.0, json.loads(json.dumps(spikes.state())))
    assert all(again.limit(name) == spikes.limit(name) < math.inf for name in ("loss", "grad_norm"))
    assert Spikes(0.0, spikes.state()).limit("loss") == math.inf and Spikes(0.0, {}).state() == {}


def test_a_deviation_is_at_least_one_percent_of_the_median():
    """Values that hardly differ would make each next one a spike."""
    steady = Spikes(6.0, {"loss": [2.0] * 30, "grad_norm": [1.0, 1.0001] * 15})
    assert steady.add(loss=2.11, grad_norm=1.05) == ""
    assert "loss 2.13" in steady.add(loss=2.13, grad_norm=1.05)


def test_after_a_lasting_change_of_level_the_new_level_is_no_spike():
    """Spikes are in the window like every other step, skipped or not, so they become what is usual."""
    numbers = random.Random(5)
    cfg = load_config(["--training.spike_threshold=6.0", "--training.skip_spikes=true"])
    guard = Guard(cfg, None, None, None, {})

    def said(level: float) -> bool:
        norm = level + numbers.gauss(0, 0.05)
        skipped = norm > guard.skip_above()
        return guard.note(loss=3.0, grad_norm=norm, skipped=skipped) != ""

    assert not any(said(3.0) for _ in range(200))
    after = [said(5.0) for _ in range(2 * Spikes.WINDOW)]
    assert all(after[:10]) and not any(after[Spikes.WINDOW :])
    assert 10 < sum(after) <= Spikes.WINDOW // 2 + 1


def spiking(options: list[str], folder: Path, stop_at: int | None) -> tuple[int, str]:
    """Do a run of which the gradient of step 11 is a hundred times what it should be."""
    Spikes.LEAST = 5
    real_loss, real_rate, at = train.linear_cross_entropy, train.learning_rate, []
    train.learning_rate = lambda step, *rest: (at.append(step), real_rate(step, *rest))[1]

    def loss(*args, **kwargs):
        result = real_loss(*args, **kwargs)
        if at[-1] == 10:
            result.register_hook(lambda gradient: gradient * 100)
        return result

    train.linear_cross_entropy = loss
    if stop_at:
        return stopped_at(stop_at, options, folder), ""
    return run(options, folder)


def test_a_spike_is_named_and_skipped_also_after_a_resume(options, tmp_path):
    options = [*options, "--training.spike_threshold=8.0", "--training.skip_spikes=true"]
    for name in "whole", "stopped":
        (tmp_path / name).mkdir()
    assert run_ranks(1, spiking, options, tmp_path / "whole", None) == [(0, "")]
    said = (tmp_path / "whole" / "logs" / "rank-00000.log").read_text()
    for words in ("step 11: grad_norm", "skipped: no weight changed", "--steps=11"):
        assert words in said
    assert said.count("a spike begins at") == 1
    assert run_ranks(1, spiking, options, tmp_path / "stopped", 9) == [(75, "")]
    assert run_ranks(1, spiking, options, tmp_path / "stopped", None) == [(0, "")]
    assert series(tmp_path / "stopped") == series(tmp_path / "whole")
    assert "step 11: grad_norm" in (tmp_path / "stopped" / "logs" / "rank-00000.log").read_text()


def test_only_steps_that_are_skipped_one_after_the_other_end_a_run():
    cfg = load_config(["--training.max_skipped_steps=2", "--training.skip_spikes=false"])
    guard = Guard(cfg, None, None, None, {})
    for skipped in (True, True, False, True, True):
        said = guard.note(loss=math.nan if skipped else 1.0, grad_norm=1.0, skipped=skipped)
        assert said == "loss nan, gradient norm 1.0, skipped: no weight changed" * skipped
        guard.check_skipped(5)
    guard.note(loss=math.nan, grad_norm=1.0, skipped=True)
    too_many = "3 steps in a row without a gradient to use: diverged at step 6"
    with pytest.raises(Diverged, match=too_many):
        guard.check_skipped(6)
    assert guard.skip_above() == math.inf


# Silent corruption


def clean_and_flipped(options: list[str]) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the messages of 10 clean steps, and those after each of 20 flips of one bit of one
    rank: (that rank, messages)."""
    job = train.build(load_config(options, dist.get_world_size()))
    numbers, clean, found = random.Random(7), [], []
    tokens = torch.randint(
        0, 263, (10, 1, 2, 17), generator=torch.Generator().manual_seed(job.mesh.dp_rank)
    )
    for step in range(10):
        batch = {"tokens": tokens[step, ..., :-1], "labels": tokens[step, ..., 1:]}
        result = train.train_step(job, batch)
        clean += mismatching_replicas(
            job.model, job.optimizer, job.mesh, loss=result.loss, grad_norm=result.grad_norm
        )
    for _ in range(20):
        parameters = dict(job.model.named_parameters())
        names = sorted(name for name in parameters if job.mesh.tp == 1 or "norm" in name)
        weight = parameters[numbers.choice(names)]
        key = numbers.choice(("", "exp_avg", "exp_avg_sq"))
        rank, bit = numbers.randrange(job.mesh.size), numbers.randrange(32)
        whole = job.optimizer.state[weight][key] if key else weight.data
        tensor = whole.to_local().view(-1).view(torch.int32)
        place = numbers.randrange(len(tensor))
        flip = torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
        if job.mesh.rank == rank:
            tensor[place] ^= flip
        found.append((rank, mismatching_replicas(job.model, job.optimizer, job.mesh)))
        if job.mesh.rank == rank:
            tensor[place] ^= flip
    clean += mismatching_replicas(job.model, job.optimizer, job.mesh, loss=1.0)
    clean_number = mismatching_replicas(
        job.model, job.optimizer, job.mesh, loss=float(job.mesh.rank == 1)
    )
    assert clean_number and "loss" in clean_number[0].text
    return clean, found


@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [
        ("data_parallel_replicate=3", 3),
        pytest.param("tensor_parallel=2", 2, marks=pytest.mark.torture),
    ],
)
def test_every_flipped_bit_is_detected_and_its_rank_named(mesh, ranks, options):
    kept = ("--model", "--training.param", "--data.tok", "--training.local_batch")
    model = [option for option in options if option.startswith(kept)]
    batch = ["--training.seq_len=16", f"--training.global_batch_size={2 * ranks}"]
    given = [*model, *batch, f"--parallelism.{mesh}"]
    for clean, found in run_ranks(ranks, clean_and_flipped, given):
        assert clean == [] and len(found) == 20
        for rank, said in found:
            assert len(said) == 1, said
            found_ranks = said[0].ranks
            assert rank in found_ranks, said
            assert len(found_ranks) == (1 if ranks == 3 else 2), said
            assert said[0].text.startswith(f"{health.named(found_ranks)} of ")


def test_who_is_the_odd_one():
    assert outliers([5, 5, 5]) == [] and outliers([5, 6, 5]) == [1] and outliers([5, 6]) == [0, 1]
    assert outliers([5, 5, 6, 6]) == [0, 1, 2, 3] and outliers([1, 2, 2, 2, 3]) == [0, 4]


def flip_a_bit(weights: torch.Tensor) -> None:
    weights.view(torch.int32)[3].bitwise_xor_(1)


def test_a_run_whose_replicas_diverge_stops_before_it_saves(options, tmp_path):
    mesh = ["--parallelism.data_parallel_replicate=2", "--parallelism.data_parallel_shard=1"]
    options = [*options, *mesh, "--debug.replica_check_interval=5"]
    odd = "step 5: state that must be the same on several ranks is not: ranks 0, 1 of dp_replicate"
    for end in run_ranks(2, harmed, options, tmp_path, flip_a_bit, Diverged):
        assert odd in end
    assert not list(tmp_path.glob("checkpoints/step-*"))


# Stragglers


LATE = 0.3 * WORKERS  # seconds, which other tests on the machine do not outweigh


def slow(options: list[str], folder: Path) -> tuple[int, str]:
    """Rank 1 waits for its data."""
    real_loader = data.loader.loader

    def loader(*args):
        for batch in real_loader(*args):
            time.sleep(LATE)
            yield batch

    if dist.get_rank() == 1:
        data.loader.loader = loader
    train.STRAGGLER_STEPS = 4
    return run(options, folder)


def test_a_slow_rank_and_its_slow_phase_are_named(options, tmp_path):
    given = [*options, "--training.steps=5"]
    assert run_ranks(2, slow, given, tmp_path) == [(0, "")] * 2
    said = (tmp_path / "logs" / "rank-00000.log").read_text()
    assert "step 4: rank 1 is late: the others wait" in said and "for its data" in said
    assert 0.7 * LATE < series(tmp_path, "late/data/rank-1")[4]


def table_of(mine: dict[str, float]) -> list:
    found = Stragglers()
    found.since -= 10.0
    found.add(**mine)
    job = train.build(
        load_config(["--model.n_layers=1", "--training.local_batch_size=1"], dist.get_world_size())
    )
    return found.report(job.mesh, 10)


def uneven(seconds: dict[int, dict[str, float]]) -> list:
    return table_of(
        {"data": 0.01, "prepare": 0.01, "optimizer": 2.0} | seconds.get(dist.get_rank(), {})
    )


@pytest.mark.slow
def test_what_is_small_or_the_same_everywhere_is_no_straggler():
    """The factor alone would name a rank that takes 20 us instead of 10."""
    (none, *_), (late, *others) = (
        run_ranks(4, uneven, seconds)
        for seconds in (
            {2: {"data": 0.9, "optimizer": 2.5}},
            {1: {"optimizer": 3.5}, 3: {"data": 5.0}},
        )
    )
    assert none == [] and all(other == late for other in others)
    assert [(rank, section) for rank, section, _ in late] == [(1, "optimizer"), (3, "data")]
    assert late[0][2] == pytest.approx(0.15) and late[1][2] == pytest.approx(0.499)
