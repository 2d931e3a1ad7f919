"""Whole runs of a pipeline, and what can go wrong in one. That it computes what one process
computes: tests/test_parallel.py."""

import contextlib
import gc
import os
import signal
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import train
from configs.load import load_config
from configs.schema import SCHEDULES
from parallelisms import mesh as meshes
from parallelisms import pp, schedules
from parallelisms.p2p_warmup import p2p_pairs
from reliability import collectives
from tests.ranks import run_ranks, step_timeout
from tests.runs import MESHES, STEPS, ends, killed, run, said, samples, tiny_run, trained
from tools import compare_runs
from training.sample import sample
from training.validate import validate

MORE = (
    "--model.n_layers=4 --model.tied_embeddings=true --checkpoint.interval=2 "
    "--validation.interval=4 --validation.steps=3 "
    "--data.validation_fraction=0.2 --debug.sample_tokens=8 --checkpoint.export_hf=float32"
).split()


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    return [*tiny_run(tmp_path_factory.mktemp("run")), *MORE]


@pytest.fixture(scope="module")
def oracle(options, tmp_path_factory) -> Path:
    """Return the uninterrupted run, on one process."""
    folder = tmp_path_factory.mktemp("oracle")
    assert run_ranks(1, run, options, folder) == [(0, "")]
    return folder


@pytest.mark.slow
@pytest.mark.cap(200)
def test_a_run_that_is_killed_on_one_depth_after_another_is_the_run_on_one_process(
    oracle, options, tmp_path
):
    """No sample is repeated or skipped. Loss, norm, validation and the export for Hugging Face are
    equal up to rounding; the sample at the end is equal. From a pipeline to one process and back:
    tests/test_any_mesh.py."""
    legs = ["pp2", "pp2xfsdp2", "pp2xtp2", "pp4"]
    more = {
        "pp2": "--parallelism.pipeline_schedule=zbv",
        "pp2xfsdp2": "--parallelism.pipeline_schedule=interleaved_1f1b",
        "pp2xtp2": "--debug.replay_interval=2 --debug.replica_check_interval=2 --run.device=cpu",
        "pp4": "--debug.check_collectives=true",
    }
    want, began = samples(oracle, 1), []
    for mesh in legs:
        ranks, extra, dp_size = MESHES[mesh]
        extra = [*extra, *more.get(mesh, "").split()]
        if mesh == legs[-1]:
            assert run_ranks(ranks, run, [*options, *extra], tmp_path) == [(0, "")] * ranks
        else:
            codes = ends(ranks, tmp_path / f"ranks-{mesh}", killed, [*options, *extra], tmp_path, 5)
            assert codes[-1] == -signal.SIGKILL and 0 not in codes, codes
        start, rows = trained(tmp_path, dp_size)
        assert rows == want[start : start + len(rows)], mesh
        began.append(start)
    assert began == sorted(set(began)), (
        f"a start has not gone on where the one before it had saved: {began}"
    )
    comparison = compare_runs.compare(oracle, tmp_path, 1e-5)
    compared = {row.metric: row.steps for row in comparison.rows}
    assert comparison.code == 0, comparison.verdict
    assert (
        compared["loss"] == compared["grad_norm"] == STEPS
        and compared["validation_loss"] == STEPS // 4
    ), compared
    assert [mesh.split(", ")[0] for mesh in comparison.environment["mesh"]] == ["pp 1", "pp 4"]
    exported, expected = (
        load_file(next(folder.glob("hf/*/model.safetensors"))) for folder in (tmp_path, oracle)
    )
    assert exported.keys() == expected.keys()
    assert (
        max(float((exported[name] - x).abs().max() / x.abs().max()) for name, x in expected.items())
        <= 1e-4
    )
    texts = [
        said(folder).split("a sample from the final weights:")[1].split("checkpoints in")[0]
        for folder in (tmp_path, oracle)
    ]
    assert texts[0] == texts[1]


VALIDATED = (
    "--model.dim=32 --model.n_layers=4 --model.n_heads=4 --model.n_kv_heads=4 --model.head_dim=8 "
    "--model.hidden_dim=36 "
    "--model.vocab_size=263 --data.tokenizer=bytes --training.param_dtype=float32 "
    "--training.seq_len=16"
).split()


def sums_of_validation(options: list[str], counts: list[int]) -> list[list[float]]:
    """Return the sums of `validate` for one batch of so many microbatches."""
    job = train.build(
        load_config([*VALIDATED, *options], meshes.world().size, meshes.world().local_size)
    )
    sizes = torch.ones(263, dtype=torch.int64)
    sums = []
    for count in counts:
        windows = torch.randint(
            0, 263, (count, 2, 17), generator=torch.Generator().manual_seed(count)
        )
        batch = {"tokens": windows[..., :-1], "labels": windows[..., 1:]}
        sums.append(validate(job.model, job.mesh, [batch], 64, sizes).tolist())
    return sums


def test_validation_counts_every_microbatch_whether_the_ranks_divide_them_or_not():
    """One that the pipeline left out would count with its tokens and without its loss."""
    counts = [1, 2, 3, 5]
    batches = ["--training.global_batch_size=12", "--training.local_batch_size=2"]
    pipeline = [*batches, "--parallelism.pipeline_parallel=2"]
    alone = run_ranks(1, sums_of_validation, batches, counts)[0]
    for seen in run_ranks(2, sums_of_validation, pipeline, counts):
        for (loss, *tokens), (want, *others) in zip(seen, alone, strict=True):
            assert tokens == others and loss == pytest.approx(want, rel=1e-5)


def troubled(options: list[str], folder: Path, kind: str) -> tuple[int, str]:
    """Do a run of two stages, the second of which has trouble in step 3. If it fails, it takes a
    while until it ends."""
    real, calls = train.linear_cross_entropy, []

    def loss(*args, **more):
        calls.append(1)
        if len(calls) == 9:  # of four microbatches a step
            if kind == "hangs":
                os.kill(os.getpid(), signal.SIGSTOP)
            raise ValueError("the loss of the second stage is broken")
        return real(*args, **more)

    def close_and_save():
        close_mesh()
        time.sleep(0.3 * int(os.environ["RANK"]))

    close_mesh, train.meshes.close_mesh = train.meshes.close_mesh, close_and_save
    train.linear_cross_entropy = loss
    try:
        return run([o for o in options if "validation" not in o], folder)
    except Exception as error:
        (folder / f"failed-{os.environ['RANK']}").write_text(str(error.failed_at))
        raise


@pytest.mark.parametrize("kind", ["fails", "hangs"])
def test_a_stage_that_fails_or_hangs_ends_the_others_which_name_it(kind, options, tmp_path):
    given = [*options, *MESHES["pp2"][1], step_timeout(4)]
    codes = ends(
        2,
        tmp_path / "ranks",
        troubled,
        given,
        tmp_path,
        kind,
        seconds=40,
        last_hangs=kind == "hangs",
    )
    assert codes[0] not in (0, None) and (codes[1] is None) == (kind == "hangs"), codes
    stacks = {
        rank: (tmp_path / "logs" / f"rank-0000{rank}.stacks").read_text()
        for rank in range(1 if kind == "hangs" else 2)
    }
    if kind == "fails":
        assert "rank 0 of the pipeline did not receive the gradient of stage 1" in stacks[0], (
            stacks[0]
        )
        assert "from rank 1, which has failed or hangs" in stacks[0]
        assert "the loss of the second stage is broken" in stacks[1]
        neighbour, cause = (float((tmp_path / f"failed-{rank}").read_text()) for rank in range(2))
        # so the launcher shows the traceback of the cause last (tests/test_scripts.py)
        assert cause < neighbour


# What one of two ranks does instead of its part of a step, for debug.check_collectives.


def other_type(job: train.Job, batch: dict[str, torch.Tensor]) -> None:
    job.model.dtype = torch.float64


def other_order(job: train.Job, batch: dict[str, torch.Tensor]) -> None:
    """Take the first two microbatches in the other order."""
    model, count, other = job.model, len(batch["tokens"]), {0: 1, 1: 0}
    first, second = model.table(count).of_all_ranks
    second = [
        action._replace(microbatch=other.get(action.microbatch, action.microbatch))
        for action in second
    ]
    model.rank_tables[count, False] = pp.RankTable([first, second], model.placement, 1)


def step_with(options: list[str], fault: Callable | None, is_checked: bool) -> float | str:
    """Return the gradient norm of a step on two stages, the second of which has the fault; or this
    rank's error."""
    job = train.build(load_config([*options, *MESHES["pp2"][1]], 2, 2))
    tokens = torch.randint(263, (4, 2, 16), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "labels": tokens}
    if fault and job.mesh.pp_rank == 1:
        fault(job, batch)
    try:
        with collectives.checked(job.model, job.mesh) if is_checked else contextlib.nullcontext():
            return train.train_step(job, batch).grad_norm
    except (RuntimeError, collectives.Drift) as error:
        return f"{type(error).__name__}: {error}"


def steps_with(options: list[str], cases: list[tuple]) -> list[float | str]:
    return [step_with(options, *case) for case in cases]


@pytest.mark.slow
def test_messages_that_are_not_the_expected_ones_are_named(options):
    """Negative control: unchecked, gradients that come in a different order are taken for each
    other in silence."""
    right, checked, crossed = run_ranks(
        2, steps_with, options, [(None, False), (None, True), (other_order, False)]
    )[0]
    assert right == checked and abs(crossed / right - 1) > 1e-3, (right, checked, crossed)
    hidden, gradient = "hidden of stage 0, microbatch", "gradient of stage 1, microbatch"
    for fault, rank, expected, sent in [
        (other_type, 1, f"{hidden} 0, float64[2, 16, 32]", f"{hidden} 0, float32[2, 16, 32]"),
        (other_order, 0, f"{gradient} 0, float32[2, 16, 32]", f"{gradient} 1, float32[2, 16, 32]"),
    ]:
        said = run_ranks(2, step_with, options, fault, True)[rank]
        assert (
            f"Drift: rank {rank} of the pipeline expects the {expected}, but rank {1 - rank} "
            f"sends the {sent}: "
        ) in said, said


def seconds_of_a_step(options: list[str]) -> float:
    """Return the seconds of this rank's second step; the layers of the first stage take half a
    second more for each of four microbatches."""
    job = train.build(load_config([*options, *MESHES["pp2"][1]], 2, 2))
    tokens = torch.randint(263, (4, 2, 16), generator=torch.Generator().manual_seed(0))
    if job.mesh.pp_rank == 0:
        next(iter(job.model.layers.values())).register_forward_pre_hook(lambda *_: time.sleep(0.5))
    for _ in range(2):
        train.train_step(job, {"tokens": tokens, "labels": tokens})
    return sum(job.model.seconds.values())


@pytest.mark.waits
def test_a_stage_that_waits_for_another_does_not_count_as_slow(options):
    slow, waits = run_ranks(2, seconds_of_a_step, options)
    assert waits < slow / 2 and slow > 2.0


class Products(TorchDispatchMode):
    """Count of matmuls that have run, by name, and the rows of experts that are still in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.rows = Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "mm" or name.startswith("grouped_product"):
            self.counts[name] += 1
        if name == "grouped_product":
            self.rows.append(weakref.ref(args[0].untyped_storage()))
        return func(*args, **(kwargs or {}))


def products_of_halves(options: list[str]) -> tuple[dict[str, Counter], list[int]]:
    """Return, for a step of the last stage, the matmuls of each kind of action, and how many rows
    of experts are in memory after each second half of a backward."""
    gc.disable()  # as in a run: what hangs in a circle is not free
    job = train.build(load_config([*options, *MESHES["pp2"][1]], 2, 2))
    seen: dict[str, Counter] = {}
    forwards, alive = [], []

    def watched(real: Callable) -> Callable:
        def play(step, action, stage):
            with Products() as mode:
                real(step, action, stage)
            seen.setdefault(action.kind, Counter()).update(mode.counts)
            forwards.extend(mode.rows)
            if action.kind == schedules.BACKWARD_WEIGHT:
                alive.append(sum(rows() is not None for rows in forwards))

        return play

    for kind in schedules.RESULTS:
        setattr(pp.PipelineStep, kind, watched(getattr(pp.PipelineStep, kind)))
    tokens = torch.randint(263, (4, 2, 16), generator=torch.Generator().manual_seed(0))
    train.gradients(job, {"tokens": tokens, "labels": tokens})
    return seen, alive


EXPERTS = (
    "--model.family=qwen3 --model.n_experts=4 --model.experts_per_token=2 --model.expert_dim=12"
).split()
ONE_STAGE = (
    "--parallelism.pipeline_schedule=zero_bubble --parallelism.pipeline_stages_per_rank=1".split()
)


@pytest.mark.slow
def test_each_half_of_a_backward_has_the_products_of_its_own_gradients(options):
    """The last of two stages has two blocks, each with seven matmuls or, with experts, with five
    and three grouped ones; and a step has four microbatches. The matmuls of the loss are in its
    forward."""
    given, blocks = [*options, *ONE_STAGE], 4 * 2
    dense, _ = run_ranks(2, products_of_halves, given)[1]
    assert dense["backward_input"] == dense["backward_weight"] == {"mm": 7 * blocks}
    experts, alive = run_ranks(2, products_of_halves, [*given, *EXPERTS])[1]
    of_rows, of_weight = "grouped_product_backward_rows", "grouped_product_backward_weight"
    assert experts["backward_input"] == {"mm": 5 * blocks, of_rows: 3 * blocks}
    assert experts["backward_weight"] == {"mm": 5 * blocks, of_weight: 3 * blocks}
    assert alive[-1] == 0, f"rows of experts that are in memory after each microbatch: {alive}"


def connect_as_nccl_does() -> None:
    """From now on the first message between two ranks of a group, whether it is sent or received,
    blocks until the other rank comes to one as well. NCCL makes the pair's communicator then. (With
    TORCH_GLOO_LAZY_INIT, a first send alone blocks.)"""
    store, met = dist.distributed_c10d._get_default_store(), set()
    send, receive = dist.isend, dist.irecv

    def meet(group: dist.ProcessGroup, other: int) -> None:
        pair = (group.group_name, *sorted((group.rank(), other)))
        if pair in met:
            return
        met.add(pair)
        store.add(f"met {pair}", 1)
        while store.add(f"met {pair}", 0) < 2:
            time.sleep(0.002)

    def meet_and_send(tensor, group, group_dst):
        meet(group, group_dst)
        return send(tensor, group=group, group_dst=group_dst)

    def meet_and_receive(tensor, group, group_src):
        meet(group, group_src)
        return receive(tensor, group=group, group_src=group_src)

    dist.isend, dist.irecv = meet_and_send, meet_and_receive


def sample_and_step(
    options: list[str], lazy: Callable | None = None, meets: bool = True
) -> tuple[list[int], float]:
    """Return the initial model's sample, and the norm of a step. lazy: opens connections so; meets:
    whether `open_mesh` lets the ranks meet."""
    if lazy:
        lazy()
    if not meets:
        meshes.warm_up_p2p = lambda *_: None
    ranks = dist.get_world_size()
    job = train.build(load_config(options, ranks, ranks))
    text = sample(job.model, [1, 2, 3], 2, 16, job.mesh.device)
    shape = (job.cfg.training.microbatches(1), 2, 16)
    tokens = torch.randint(263, shape, generator=torch.Generator().manual_seed(0))
    return text, train.train_step(job, {"tokens": tokens, "labels": tokens}).grad_norm


# A tied weight would be sent first, and connect the ranks.
UNTIED = "--model.tied_embeddings=false"
LAZY = {
    "one microbatch": [UNTIED, "--training.global_batch_size=2"],
    "two stages per rank": [UNTIED, "--parallelism.pipeline_schedule=interleaved_1f1b"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAZY)
def test_ranks_whose_connections_are_lazy_do_not_wait_for_each_other(name, options, monkeypatch):
    given = [*options, *MESHES["pp2"][1], *LAZY[name]]
    want = run_ranks(2, sample_and_step, given)
    assert run_ranks(2, sample_and_step, given, connect_as_nccl_does) == want
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    assert run_ranks(2, sample_and_step, given) == want


@pytest.mark.slow
def test_negative_control_ranks_that_have_not_met_wait_for_each_other(options):
    given = [*options, *MESHES["pp2"][1], *LAZY["one microbatch"]]
    stuck = "rank 0 did not end in time\nrank 1 did not end in time"
    with pytest.raises(AssertionError, match=stuck):
        run_ranks(2, sample_and_step, given, connect_as_nccl_does, False, timeout=2)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_all_ranks_that_send_each_other_something_meet(ranks):
    pairs = p2p_pairs(ranks)
    assert len(set(pairs)) == len(pairs)
    for schedule in SCHEDULES:
        placement = schedules.placement(schedule, ranks)
        table = schedules.table(schedule, ranks, 0, 4 * ranks)
        transfers = schedules.transfers(table, placement)
        messages = {tuple(sorted((t.sender, t.receiver))) for t in transfers}
        of_tied_weight = {tuple(sorted((placement[0], placement[-1])))} - {(0, 0)}
        assert messages | of_tied_weight <= set(pairs), schedule
