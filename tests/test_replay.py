"""`python -m tools.replay`: faults, each put into a run's record or into one of two computations, and
each located by name. Without a fault there is nothing to find, and the run is not touched."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import train
from checkpoint import state, verify
from checkpoint.storage import local
from configs.load import load_config
from configs.schema import InputError
from data import loader
from models.kernels.ruled_attention import AttentionSpec
from parallelisms import dp, pp
from parallelisms.mesh import world
from tests.checkpoints import open_manager
from tests.programs import PYTHON, finished
from tests.ranks import run_ranks
from tests.runs import run, series, tiny_run
from tools.replay import __main__ as tool
from tools.replay import command, judge, steps
from training import microbatches
from training.optimizers import materialise

Patch = pytest.MonkeyPatch
BEGINS, STEPS = 2, 4  # faults are in the checkpoint after BEGINS + 1, or in the step to it
EXPERTS = (
    "--model.family=deepseek_v3 --model.dim=32 --model.n_layers=3 --model.n_dense_layers=1 "
    "--model.n_heads=2 --model.hidden_dim=36 --model.n_experts=8 --model.experts_per_token=2 "
    "--model.expert_dim=12 --model.vocab_size=263 --training.expert_bias_speed=0.01 "
    f"--training.steps={STEPS} --checkpoint.interval=1 --checkpoint.keep_last=0 "
    "--metrics.gradient_interval=1"
).split()


# In the record: the run has saved something else than what its step computes -----------------------

Tensors = dict[str, torch.Tensor]


def flipped_bit(now: Tensors, before: Tensors) -> str:
    now["model.layers.0.feed_forward.w1.weight"].view(torch.int32)[3, 5] ^= 1 << 24
    return "weights after   layers.0.feed_forward.w1.weight [3, 5] "


def stale_shard(now: Tensors, before: Tensors) -> str:
    name = "model.layers.1.attention.wo.weight"
    now[name][16:] = before[name][16:]
    return "weights after   layers.1.attention.wo.weight [16:32, :] "


def wrong_bias(now: Tensors, before: Tensors) -> str:
    now["model.layers.2.feed_forward.router.bias"][5] += 0.01
    return "weights after   layers.2.feed_forward.router.bias [5] "


def scaled_expert(now: Tensors, before: Tensors) -> str:
    now["model.layers.2.feed_forward.experts.w2"][3] *= 1.01
    return "weights after   layers.2.feed_forward.experts.w2 [3, :, :] "


def damaged_moment(now: Tensors, before: Tensors) -> str:
    now["optimizer.layers.1.ffn_norm.weight.exp_avg_sq"] *= 1.5
    return "moments after   layers.1.ffn_norm.weight.exp_avg_sq "


RECORDED = [flipped_bit, stale_shard, wrong_bias, scaled_expert, damaged_moment]


# In the computation: one of two sides computes the step wrongly -------------------------------------


def swapped_token(patch: Patch) -> str:
    real = loader.as_batch

    def as_batch(tokens: Any, *rest: Any) -> dict[str, torch.Tensor]:
        batch = real(tokens, *rest)
        first = batch["tokens"][0, 0]
        first[[8, 9]] = first[[9, 8]]
        return batch

    patch.setattr(loader, "as_batch", as_batch)
    return "data "


def wrong_mask(patch: Patch) -> str:
    real = train.build

    def build(cfg: Any) -> train.Job:
        job = real(cfg)
        job.model.layers["1"].attention.core.spec = AttentionSpec(window=7)
        return job

    patch.setattr(train, "build", build)
    return "forward   layers.1.attention.core "


class WrongOperator(TorchDispatchMode):
    """Make one call of an operator give a wrong number."""

    def __init__(self, name: str, call: int) -> None:
        super().__init__()
        self.name, self.left = name, call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented
        self.left -= func._schema.name == self.name
        is_wrong = self.left == 0 and func._schema.name == self.name
        result = func(*args, **(kwargs or {}))
        if is_wrong:
            torch.ops._c10d_functional.wait_tensor(result)
            result.view(-1)[5] += 1.0
        return result


def of_operator(patch: Patch, name: str, call: int) -> None:
    """In each step that is noted."""
    real = steps.noted_step

    def noted_step(*arguments: Any) -> steps.StepNotes:
        with WrongOperator(name, call):
            return real(*arguments)

    patch.setattr(steps, "noted_step", noted_step)


def dropped_reduction(patch: Patch) -> str:
    real = dp.synchronise_gradients

    def synchronise(model: Any, last: bool, accumulate: str) -> None:
        real(model, last, accumulate)
        model.layers["1"].set_requires_gradient_sync(False, recurse=False)

    patch.setattr(dp, "synchronise_gradients", synchronise)
    return "backward   layers.1."


def wrong_product(patch: Patch) -> str:
    """Rank 1 multiplies wrongly, once."""
    if world().rank == 1:
        of_operator(patch, "aten::mm", 6)
    return "forward   "


def wrong_exchange(patch: Patch) -> str:
    """Rank 1 gets a wrong row in a dispatch of tokens."""
    if world().rank == 1:
        of_operator(patch, "_c10d_functional::all_to_all_single", 2)
    return "forward   layers.1.feed_forward "


def wrong_message(patch: Patch) -> str:
    """A number changes on the way to the second stage, in the second microbatch."""
    real = pp.Link.receive
    received = []

    def receive(self: pp.Link, name: str, tensor: torch.Tensor, rank: int) -> Any:
        work = real(self, name, tensor, rank)
        received.append(name)
        if "hidden" not in name or len(received) != 2:
            return work

        def wait(*limit: Any) -> None:
            work.wait(*limit)
            tensor.view(-1)[5] += 1.0

        return SimpleNamespace(wait=wait)

    patch.setattr(pp.Link, "receive", receive)
    return "forward   layers.2"


def skipped_microbatch(patch: Patch) -> str:
    patch.setattr(microbatches.Microbatches, "__len__", lambda self: len(self.tokens) - 1)
    return "microbatches   rank 0 ran 1 of 2 "


COMPUTED = {  # fault -> the tool's arguments
    swapped_token: ["--against", "RUN"],
    wrong_mask: ["--against", "RUN"],
    dropped_reduction: ["--mesh", "fsdp2"],
    skipped_microbatch: ["--mesh", "fsdp2"],
    wrong_product: ["--mesh", "fsdp2"],
    wrong_exchange: ["--mesh", "ep2"],
    wrong_message: ["--mesh", "pp2"],
}


def recompute_wrongly(fault: Callable, task: steps.Recomputation) -> list[steps.StepNotes]:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        return steps.recompute(task)


# The runs -----------------------------------------------------------------------------------------


def damage(folder: Path, copies: dict[Callable, Path]) -> dict[Callable, str]:
    """Put each fault into the checkpoint after BEGINS + 1 of its copy; what is to be said of it."""
    expected = {}
    older, newer = (folder / "checkpoints" / f"step-{n:08d}" for n in (BEGINS, BEGINS + 1))
    job = train.build(load_config([str(folder / "config.toml")], 1, 1))
    materialise(job.optimizer)
    live = {n: local(t) for n, t in state.tensors(job.model, job.optimizer).items()}
    facts = verify.read_manifest(newer)["facts"]
    steps.load(job, older)
    before = {name: tensor.detach().clone() for name, tensor in live.items()}
    for fault, copy in copies.items():
        progress = steps.load(job, newer)
        with torch.no_grad():
            expected[fault] = fault(live, before)
        manager = open_manager(job, copy.parent / f"{copy.name}-saved", facts)
        manager.save(BEGINS + 1, job.model, job.optimizer, progress)
        manager.close()
        saved = copy.parent / f"{copy.name}-saved" / newer.name
        shutil.rmtree(copy / "checkpoints" / newer.name)
        shutil.move(saved, copy / "checkpoints")
    return expected


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("replay")
    given = [option for option in tiny_run(place) if not option.startswith("--model.")]
    assert run_ranks(1, run, [*given, *EXPERTS], place / "run") == [(0, "")]
    return place / "run"


def ask(
    arguments: list[str], capsys: pytest.CaptureFixture, fault: Callable | None = None
) -> tuple[int, str]:
    """Return the tool's output. fault: of the first side alone."""
    asked: list[steps.Recomputation] = []

    def compute(ranks: int, seconds: float, work: Callable, task: steps.Recomputation) -> list:
        asked.append(task)
        if fault is not None and len(asked) == 1:  # the first side
            return run_ranks(ranks, recompute_wrongly, fault, task)
        return run_ranks(ranks, work, task)

    code = tool.replay(arguments, compute=compute)
    return code, squeezed(capsys.readouterr().out)


def squeezed(table: str) -> str:
    """With three spaces between columns."""
    lines = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        lines.append("   ".join(cells))
    return "\n".join(lines)


def contents(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


ASKED = f"--steps={BEGINS + 1}:{STEPS}"


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(["--tolerance=0"], id="every bit"),
        pytest.param(["--mesh=pp2", "--dtype=float64"], marks=pytest.mark.slow, id="pp2"),
        pytest.param(["--mesh=ep2"], marks=pytest.mark.slow, id="ep2"),
    ],
)
def test_a_healthy_run_is_equal_and_is_not_touched(more, healthy, capsys) -> None:
    before = contents(healthy)
    code, said = ask([str(healthy), ASKED, *more], capsys)
    assert code == 0 and "metrics of steps [3, 4], checkpoints of [3, 4]" in said, said
    assert contents(healthy) == before


THREADS = """
import configs.cpu
import torch
from tools.parity.ranks import on_ranks
if __name__ == "__main__":
    print(*on_ranks(1, 60, torch.get_num_threads), *on_ranks(2, 60, torch.get_num_threads))
"""


def test_one_process_has_the_threads_of_a_run_so_that_every_bit_is_equal() -> None:
    """A GEMM of two threads adds in another order than one of one. Ranks share the processor."""
    counted = finished(PYTHON, "-c", THREADS, OMP_NUM_THREADS="2")
    assert counted.stdout.split() == ["2", "1", "1"], counted


def test_an_average_of_squares_has_twice_the_error() -> None:
    want = np.ones(4)
    for name, error, is_seen in (
        ("a.exp_avg", 1.5, True),
        ("a.exp_avg_sq", 1.5, False),
        ("a.exp_avg_sq", 3, True),
    ):
        found = judge.of_state(
            1, "record", "moments after", {name: want + 0.01 * error}, {name: want}, 0.01
        )
        assert bool(found) == is_seen, name


@pytest.mark.slow
def test_what_the_record_has_lost_is_located(healthy, tmp_path, capsys) -> None:
    """Faults of memory or disk: the step computes something else than what was saved after it."""
    copies = {fault: tmp_path / fault.__name__ for fault in RECORDED}
    for copy in copies.values():
        shutil.copytree(healthy, copy)
    (expected,) = run_ranks(1, damage, healthy, copies)
    for fault, copy in copies.items():
        code, said = ask([str(copy), f"--steps={BEGINS + 1}"], capsys)
        rows = said.splitlines()[2:]
        assert code == 1 and len(rows) == 1, f"{fault.__name__}: {said}"
        assert rows[0].startswith(f"{BEGINS + 1}   record   {expected[fault]}"), said


def run_with_a_passing_fault(options: list[str], folder: Path) -> tuple[int, str]:
    """In step 2 the gradient of one row has the wrong sign, which its norm does not show."""
    real = train.gradients
    calls = []

    def gradients(job: train.Job, *rest: Any) -> train.Gradients:
        result = real(job, *rest)
        calls.append(1)
        if len(calls) == 2:
            job.model.layers["1"].attention.wo.weight.grad[3].neg_()
        return result

    train.gradients = gradients
    return run(options, folder)


@pytest.mark.slow
def test_a_fault_that_has_passed_before_the_next_checkpoint_is_located(
    tmp_path, capsys, monkeypatch
) -> None:
    """By the gradients that the run has recorded: its one checkpoint comes two steps later."""
    given = [option for option in tiny_run(tmp_path) if not option.startswith("--model.")]
    options = [*given, *EXPERTS, "--checkpoint.interval=4"]
    folder = tmp_path / "run"
    assert run_ranks(1, run_with_a_passing_fault, options, folder) == [(0, "")]
    code, said = ask([str(folder), "--steps=1:4"], capsys)
    rows = said.splitlines()[2:]
    assert code == 1, said
    assert rows[0].startswith("2   record   gradient   layers.1.attention.wo.weight   "), said
    assert not any(row.startswith("1   ") for row in rows), said
    (folder / "gradients.jsonl").unlink()  # the control: without it the step is not known
    code, said = ask([str(folder), "--steps=1:4"], capsys)
    assert code == 1 and said.splitlines()[2].startswith("3   record   "), said


QUICK = (wrong_mask,)


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in COMPUTED]
)
def test_what_is_computed_wrongly_is_located(fault, healthy, capsys) -> None:
    arguments = [str(healthy) if word == "RUN" else word for word in COMPUTED[fault]]
    code, said = ask([str(healthy), ASKED, *arguments], capsys, fault)
    with pytest.MonkeyPatch.context() as patch:
        expected = fault(patch)
    first = said.splitlines()[2]
    other = str(healthy) if "RUN" in COMPUTED[fault] else "one process"
    assert code == 1 and first.startswith(f"{BEGINS + 1}   {other}   {expected}"), said


def options_of(run: Path) -> list[Path]:
    """Return the files with a run's options: those of its newest start, and those of each."""
    return [run / "config.toml", *sorted(run.glob("starts/*/config.toml"))]


@pytest.mark.slow
def test_another_rope_base_is_located(healthy, tmp_path, capsys) -> None:
    other = tmp_path / "other"
    shutil.copytree(healthy, other)
    for path in options_of(other):
        options = path.read_text()
        assert options.count("rope_theta = 10000.0") <= 1
        path.write_text(options.replace("[model]", "[model]\nrope_theta = 10500.0"))
    code, said = ask([str(healthy), ASKED, "--against", str(other)], capsys)
    first = said.splitlines()[2]
    assert code == 1, said
    assert first.startswith(f"3   {other}   forward   layers.0.attention.latents "), said


LORA = "--lora.rank=3 --lora.alpha=6 --checkpoint.interval=1 --checkpoint.keep_last=0".split()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Run a whole model, and adapters on it; of streamed text."""
    place = tmp_path_factory.mktemp("adapters")
    options = [*tiny_run(place), "--training.steps=3", "--metrics.gradient_interval=1"]
    options += ["--data.stream=true", "--data.streams=4"]
    base, trained = place / "base", place / "trained"
    assert run_ranks(1, run, options, base) == [(0, "")]
    more = [*LORA, '--lora.targets=["wq", "wo"]', f"--checkpoint.load_path={base}"]
    assert run_ranks(1, run, [*options, *more], trained) == [(0, "")]
    return base, trained


@pytest.mark.slow
def test_a_run_of_adapters_is_replayed(adapters, capsys) -> None:
    code, said = ask([str(adapters[1]), "--steps=3", "--tolerance=0"], capsys)
    assert code == 0 and "checkpoints of [3], gradients of [3]" in said, said


@pytest.mark.slow
def test_adapters_on_another_base_are_refused(adapters, tmp_path, capsys) -> None:
    other = tmp_path / "other"
    shutil.copytree(adapters[1], other)
    given = [str(adapters[0] / "config.toml"), "--run.seed=5"]
    assert run_ranks(1, run, given, tmp_path / "another") == [(0, "")]
    for path in options_of(other):
        options = path.read_text()
        assert options.count(f'load_path = "{adapters[0]}"') == 1
        path.write_text(options.replace(str(adapters[0]), str(tmp_path / "another")))
    with pytest.raises(AssertionError, match="load_path or load_hf are no longer these"):
        ask([str(other), "--steps=3"], capsys)


@pytest.mark.slow
def test_steps_are_recomputed_with_the_options_of_their_start(tmp_path, capsys, monkeypatch):
    given = [*tiny_run(tmp_path), "--checkpoint.interval=2", "--checkpoint.keep_last=0"]
    first = [*given, "--training.steps=4", "--lr_schedule.warmup_steps=0"]
    longer = [*given, "--training.steps=6", "--lr_schedule.warmup_steps=6"]
    assert run_ranks(1, run, first, tmp_path / "run") == [(0, "")]
    assert run_ranks(1, run, longer, tmp_path / "run") == [(0, "")]
    place = str(tmp_path / "run")
    for asked in "3:4", "5:6":
        code, said = ask([place, f"--steps={asked}", "--tolerance=0"], capsys)
        assert code == 0, said
    with pytest.raises(InputError, match="trained steps 3:4 by start 1, 5:5 by start 2: name"):
        tool.replay([place, "--steps=3:5"])
    # the negative control: with the newest start's options right steps are called wrong
    monkeypatch.setattr(command.Recorded, "as_trained", lambda self, steps: self)
    code, said = ask([place, "--steps=3:4", "--tolerance=0"], capsys)
    assert code == 1 and "lr" not in said, said


def window_of_spikes(task: steps.Recomputation) -> dict[str, list[float]]:
    """Recompute, and return the values of earlier steps with which the replay begins to judge."""
    begun: list[dict] = []
    real = steps.Guard

    def guard(*given: Any) -> Any:
        begun.append(given[-1])
        return real(*given)

    steps.Guard = guard
    steps.recompute(task)
    return begun[0]


@pytest.mark.slow
def test_a_replay_judges_spikes_by_the_steps_before_its_checkpoint(tmp_path):
    """Without them no step is skipped that the run has skipped (training.skip_spikes)."""
    given = [*tiny_run(tmp_path), "--training.steps=4", "--checkpoint.interval=2"]
    folder = tmp_path / "run"
    spikes = ["--training.spike_threshold=6", "--training.skip_spikes=true"]
    assert run_ranks(1, run, [*given, *spikes, "--checkpoint.keep_last=0"], folder) == [(0, "")]
    checkpoint = folder / "checkpoints" / "step-00000002"
    argv = [str(folder / "config.toml"), "--run.device=cpu"]
    (found,) = run_ranks(1, window_of_spikes, steps.Recomputation(argv, checkpoint, range(4, 5)))
    losses = series(folder)
    assert found["loss"] == [losses[1], losses[2]] and len(found["grad_norm"]) == 2


def test_a_tolerance_that_proves_nothing_is_said(healthy, tmp_path, capsys):
    warning = "5% is the rounding of bfloat16, and no proof"
    _, said = ask([str(healthy), "--steps=3"], capsys)
    assert warning not in said
    given = [*tiny_run(tmp_path), "--training.steps=3", "--training.param_dtype=bfloat16"]
    assert run_ranks(1, run, given, tmp_path / "run") == [(0, "")]
    code, said = ask([str(tmp_path / "run"), "--steps=1"], capsys)
    assert code == 0 and warning in said, said


def test_runs_of_other_sequences_are_refused(healthy, tmp_path, capsys) -> None:
    options = (healthy / "config.toml").read_text()
    assert options.count("seq_len = 16") == 1
    (tmp_path / "config.toml").write_text(options.replace("seq_len = 16", "seq_len = 32"))
    assert tool.main([str(healthy), "--steps=3", "--against", str(tmp_path)]) == 2
    assert "sequences of 16 tokens and" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["nothing", "--steps=1"], "nothing is neither the folder of a run nor a checkpoint"),
        (["RUN", "--steps=4:3"], "--steps 4:3: the first step is 1, and LAST is not before FIRST"),
        (["RUN", "--steps=x"], "--steps x: give FIRST:LAST"),
        (["RUN", "--steps=5"], "--steps 5: "),
        (["RUN", "--steps=3", "--mesh=gpu8"], "--mesh gpu8: not a mesh"),
        (["RUN", "--steps=3", "--mesh=fsdp3"], "run on fsdp3: 1 mistake"),
        (["RUN/checkpoints/step-00000003", "--steps=4"], "has recorded nothing of these steps"),
        (["RUN", "--steps=3", "--against=nothing"], "nothing is neither"),
    ],
)
def test_a_mistake_in_the_call_is_a_sentence(arguments, said, healthy, capsys) -> None:
    given = [word.replace("RUN", str(healthy)) for word in arguments]
    assert tool.main(given) == 2
    assert said in capsys.readouterr().err


def test_a_run_that_is_too_large_is_not_answered_with_options(healthy, capsys, monkeypatch):
    """Another model cannot take its weights."""
    monkeypatch.setattr("tools.parity.__main__.MOST_PARAMETERS", 1000)
    assert tool.main([str(healthy), "--steps=3"]) == 2
    said = capsys.readouterr().err
    assert "several copies of it are compared here: 1,000 are the most" in said
    assert "--model." not in said
