"""Costs that grow with the number of ranks: messages of a step, process groups, sockets."""

import itertools
import os
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh

import train
from checkpoint import storage
from configs.load import load_config
from configs.schema import Run
from parallelisms import dp
from parallelisms import mesh as meshes
from reliability.collectives import Watch
from tests.ranks import run_ranks
from tests.runs import MESHES, free_port, run, tiny_run
from tools.launch import launcher as launch
from training import log


class Collectives(Watch):
    """Counts the collectives of this thread, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def see(self, name, func, args) -> None:
        self.names[name] += 1


def counted(folder: Path, options: list[str]) -> tuple[int, str, list[Counter], list[Counter]]:
    """Do a run whose saves last for several steps. Returns its exit code, its errors, and the
    collectives inside of each `train_step`, and between it and the one before."""
    inside, between = [], []
    real_step, real_write = train.train_step, storage.write

    def step(job, batch, *options):
        between.append(Counter(watch.names))
        watch.names.clear()
        result = real_step(job, batch, *options)
        inside.append(Counter(watch.names))
        watch.names.clear()
        return result

    def write(*parts):
        time.sleep(0.1)  # shorter than the four steps that come after
        return real_write(*parts)

    train.train_step, storage.write = step, write
    with Collectives() as watch:
        code, errors = run(options, folder)
    return code, errors, inside, between


@pytest.mark.slow
def test_a_step_costs_no_collective_for_what_the_ranks_agree_on(tmp_path):
    """Stopping, a save in flight, a stream that may end: all of it travels with the loss."""
    options = [
        *tiny_run(tmp_path),
        "--data.stream=true",
        "--data.streams=4",
        "--training.steps=8",
        "--checkpoint.interval=4",
        "--metrics.interval=1",
    ]
    results = run_ranks(2, counted, tmp_path / "run", options)
    for code, errors, inside, between in results:
        assert (code, errors) == (0, ""), errors
        assert all(step == inside[0] for step in inside), "every step has the same collectives"
        assert inside[0]["allreduce_"] == 3, (
            "the count of tokens, the loss with the flags, the norm"
        )
        # the names of auxiliary terms, once, at the first line; for the checkpoint of step 4; when
        # it is written
        named, gathered, reported = between[1], between[4], sum(between[5:], Counter())
        assert (
            named == {"allgather_": 2}
            and gathered == {"allgather_": 2}
            and reported == {"allreduce_": 1}
            and not sum(between[2:4], Counter())
        ), between


def replayed(options: list[str]) -> tuple[list[int], train.Flags]:
    """A step whose gradient is computed twice, while a signal comes between the two passes."""
    job = train.build(load_config(options, 2, 2))
    window = torch.arange(2 * 2 * 17).view(2, 2, 17)
    batch = {"tokens": window[..., :-1].contiguous(), "labels": window[..., 1:].contiguous()}
    asked = itertools.cycle([train.Flags(), train.Flags(stop=True)])
    result = train.train_step(job, batch, replay=True, flags=lambda: next(asked))
    return result.mismatching_ranks, result.flags


def test_a_signal_between_two_passes_is_no_difference_of_the_gradient(tmp_path):
    options = [*tiny_run(tmp_path), *MESHES["fsdp2"][1]]
    assert run_ranks(2, replayed, options) == [([], train.Flags())] * 2


# ------------------------------------------------------------------------------------------- who
# forks the ranks


# --------------------------------------------------------------------------------------------------
# groups and sockets


@contextmanager
def groups_opened() -> Iterator[list[int]]:
    """Yield the size of each process group that is opened inside, by this rank or by others."""
    opened, real = [], dist.new_group

    def new_group(ranks, *args, **kwargs):
        opened.append(len(ranks))
        return real(ranks, *args, **kwargs)

    with mock.patch.object(device_mesh, "new_group", new_group):
        yield opened


def first_steps(options: list[str]) -> list[list[tuple[int, float]]]:
    """Return for models of 2 and of 5 layers the number of groups that each opens, and the loss of
    its first step: with weights that are freed, with weights that are kept over 2 ranks, and with the
    latter in groups of each block."""
    seen, kept = [], "--parallelism.reshard_after_forward=2"
    for more in [], [kept], [kept]:
        if len(seen) == 2:
            dp.shared_groups = nullcontext
        seen.append([first_step([*options, *more], layers) for layers in (2, 5)])
    return seen


def first_step(options: list[str], layers: int) -> tuple[int, float]:
    size = dist.get_world_size()
    with groups_opened() as opened:
        job = train.build(load_config([*options, f"--model.n_layers={layers}"], size, size))
    window = torch.arange(17).expand(1, 1, 17)
    batch = {"tokens": window[..., :-1].contiguous(), "labels": window[..., 1:].contiguous()}
    return len(opened), train.train_step(job, batch).loss


@pytest.mark.slow
def test_the_number_of_groups_does_not_grow_with_the_layers(tmp_path):
    """All blocks keep their weights over the same groups of 2 ranks. The loss is that of weights
    that are freed. Negative control: each block opens its own groups."""
    options = [*tiny_run(tmp_path), "--training.local_batch_size=1"]
    freed, kept, own = run_ranks(4, first_steps, options)[0]
    for (groups, loss), (more_groups, other_loss) in zip(freed, kept, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-6) and more_groups == groups + 4
    assert own[1][0] - own[0][0] == 3 * 4


def open_files() -> list[str]:
    """Their numbers, except that of the folder which is read here."""
    return [
        number for number in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{number}").exists()
    ]


def sockets(folder: Path, ports: list[int]) -> list[int]:
    """Return the sockets of this rank after a sum and a gathered object: in groups as `torch` opens
    them, and as a run on GPUs does."""
    counts = []
    for port, lazy in zip(ports, "01", strict=True):
        dist.destroy_process_group()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCH_GLOO_LAZY_INIT=lazy)
        meshes.open_group(Run(device="cpu"))
        dist.new_group(backend="gloo")
        dist.all_reduce(torch.ones(3))
        dist.all_gather_object([None] * dist.get_world_size(), "an object")
        counts.append(sum(stat.S_ISSOCK(os.fstat(int(number)).st_mode) for number in open_files()))
        # a rank that goes on closes its sockets, and another may still be in a collective
        (folder / f"{port}-{dist.get_rank()}").touch()
        while len(list(folder.glob(f"{port}-*"))) < dist.get_world_size():
            time.sleep(0.02)
    return counts


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts the open files of Linux")
def test_a_rank_has_no_socket_to_every_other(tmp_path):
    """In two groups of 10 ranks: 18 sockets if all are connected, and only those that are used if
    not."""
    counts = run_ranks(10, sockets, tmp_path, [free_port(), free_port()])
    everyone, used = zip(*counts, strict=True)
    assert min(everyone) >= 18 and max(used) <= max(everyone) - 10, (everyone, used)


# --------------------------------------------------------------------------------------------------
# logs


def logged(folder: Path) -> list[str]:
    """Return the log file of a rank that normally writes none: after 300 records, after an error,
    and after one more record."""
    logger, path, seen = log.setup(folder, 7, writes=False), folder / "logs" / "rank-00007.log", []
    for i in range(300):
        logger.info(f"record {i}")
    seen.append(path.read_text() if path.exists() else "no file")
    logger.error("it fails", extra={"console": False})
    seen.append(path.read_text())
    logger.info("the end")
    return [*seen, path.read_text()]


def test_a_rank_without_a_log_leaves_its_last_lines_when_it_fails(tmp_path):
    before, failed, after = run_ranks(1, logged, tmp_path)[0]
    assert (
        before == "no file"
        and "record 100" not in failed
        and failed.count("record") == log._OnceItFails.RECORDS - 1
    )
    assert failed.splitlines()[-1].endswith("ERROR it fails") and after.splitlines()[-1].endswith(
        "INFO the end"
    )


def test_which_ranks_write_a_log():
    writing = [
        [log.writes_log(ranks, local_rank) for local_rank in (0, 3)] for ranks in (8, 1023, 1024)
    ]
    assert writing == [[True, True], [True, True], [True, False]]


# --------------------------------------------------------------------------------------------------
# who is behind in a hang


@pytest.mark.slow
def test_launchers_tell_each_other_which_rank_is_behind(capfd):
    """Three nodes of two ranks. Rank 3 had begun 7 collectives, all others 9; every node says so.
    The launcher of a fourth is gone, and is not waited for long."""
    store = dist.HashStore()
    store.set("members", "[0, 1, 2, 3]")
    began = {0: {0: 9, 1: 9}, 1: {2: 9, 3: 7}, 2: {4: 9, 5: 9}}
    with mock.patch.object(launch, "COMPARED", 0.5):
        nodes = [
            threading.Thread(target=launch.say_who_is_behind, args=(counts, store, node))
            for node, counts in began.items()
        ]
        for node in nodes:
            node.start()
        for node in nodes:
            node.join()
    said = capfd.readouterr().err.splitlines()
    host = socket.gethostname()
    assert (
        said
        == [f"launch: rank 3 on {host} is behind: it had begun 7 collectives, the others 9"] * 3
    )
    launch.say_who_is_behind({0: 9, 1: 9}, None, 0)
    launch.say_who_is_behind({}, None, 0)
    assert capfd.readouterr().err == "", "no rank is behind"
