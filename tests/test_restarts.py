"""Coming back without a scheduler: the launcher starts the ranks again, and the run is the one that
nobody disturbed.

The ranks are processes of their own under tools.launch; a fault is put into them by a script around
train.py (tools/bench/faults.py, which measures what each costs): FAULT is "RANK WHAT STEP STARTS".
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reliability.goodput import account, read
from tests.ranks import NEIGHBOURS, run_ranks, step_timeout
from tests.runs import ROOT, STEPS, environment, free_port, logged, run, samples, series, tiny_run
from tools.bench.faults import WRAPPER


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    place = tmp_path_factory.mktemp("run")
    made = tiny_run(place)
    (place / "whole").mkdir()
    (place / "wrapper.py").write_text(WRAPPER)
    assert run_ranks(2, run, made, place / "whole") == [(0, "")] * 2
    return made


def place(options: list[str]) -> Path:
    return Path(next(o for o in options if o.startswith("--data.cache=")).partition("=")[2]).parent


def nodes(
    options: list[str],
    folder: Path,
    fault: str,
    *flags: str,
    each: int = 2,
    script: str = "wrapper.py",
) -> list[subprocess.Popen]:
    """The launchers, one for each `--node-rank` in flags, or the only one."""
    ranks = [flag for flag in flags if flag.startswith("--node-rank")] or ["--node-rank=0"]
    flags = [flag for flag in flags if flag not in ranks]
    here = environment(
        FAULT=fault, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"
    )
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tools.launch",
                f"--nproc-per-node={each}",
                *flags,
                rank,
                str(place(options) / script),
                f"--run.folder={folder}",
                *options,
            ],
            cwd=ROOT,
            env=here,
            text=True,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        for rank in ranks
    ]


def ended(launchers: list[subprocess.Popen], seconds: float = 150) -> tuple[list[int], str]:
    """Exit codes, and what was said."""
    said = []
    for launcher in launchers:
        try:
            said.append(launcher.communicate(timeout=seconds * NEIGHBOURS)[1])
        except subprocess.TimeoutExpired:
            for other in launchers:
                other.kill()
            said.append("--- had to be killed ---" + launcher.communicate()[1])
    return [launcher.returncode for launcher in launchers], "\n".join(said)


def how_it_went(folder: Path) -> str:
    found = account(read(folder)).per_event()
    return "; ".join(f"{name} {value:.2f}" for name, value in found.items())


@pytest.mark.slow
@pytest.mark.cap(200)
def test_k6_the_launcher_restarts_a_killed_rank_and_the_run_is_the_unbroken_one(options, tmp_path):
    """... bitwise. Prints (-s) the seconds of stall, detection and restart, and the steps that were
    redone."""
    codes, said = ended(nodes(options, tmp_path / "run", "1 SIGKILL 8 1", "--max-restarts=2"))
    assert codes == [0], said
    assert (
        "launch: rank 1 on" in said
        and "was killed by SIGKILL" in said
        and "launch: restart 1 of 2" in said
    )
    for key in "loss", "grad_norm", "tokens_seen":
        assert series(tmp_path / "run", key) == series(place(options) / "whole", key)
    found = account(read(tmp_path / "run"))
    # of 7 done, 5 were saved
    assert [row["redone"] for row in found.interruptions] == [2] and found.steps == STEPS
    print("\n" + how_it_went(tmp_path / "run"))


@pytest.mark.slow
def test_without_restarts_it_ends(options, tmp_path):
    """The control: --max-restarts=0, the default."""
    codes, said = ended(nodes(options, tmp_path / "run", "1 SIGKILL 8 1"))
    assert (
        codes == [128 + signal.SIGKILL]
        and "launch: restart" not in said
        and max(series(tmp_path / "run")) == 7
    )


@pytest.mark.slow
@pytest.mark.cap(300)
def test_what_fails_at_one_step_again_and_again_is_not_restarted_for_ever(options, tmp_path):
    codes, said = ended(nodes(options, tmp_path / "run", "1 SIGKILL 8 99", "--max-restarts=9"), 250)
    assert codes == [76] and "restart 3 of 9" in said and "restart 4" not in said, said
    assert len(list((tmp_path / "run" / "starts").iterdir())) == 4


@pytest.mark.slow
def test_a_signal_to_one_rank_before_the_first_step_is_done_is_75(options, tmp_path):
    """... although the other ranks fail for want of it; nothing is restarted."""
    codes, said = ended(nodes(options, tmp_path / "run", "1 SIGTERM 1 9", "--max-restarts=2"))
    assert (
        codes == [75]
        and "launch: restart" not in said
        and "Traceback" not in said.partition("launch:")[2]
    ), said
    assert not (tmp_path / "run" / "checkpoints").is_dir() or not list(
        (tmp_path / "run" / "checkpoints").glob("step-*")
    )


def two(port: int, least: int = 2) -> list[str]:
    return [
        f"--nnodes={least}:2",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
        "--node-rank=0",
        "--node-rank=1",
    ]


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.parametrize("fault", ["1 SIGKILL 8 1", "0 SIGKILL 8 1", "1 SIGTERM 1 9"])
def test_two_nodes_restart_together(fault, options, tmp_path):
    launchers = nodes(
        options, tmp_path / "run", fault, "--max-restarts=1", *two(free_port()), each=1
    )
    codes, said = ended(launchers, 200)
    if "SIGTERM" in fault:
        assert codes == [75, 75] and "launch: restart" not in said, said
        return
    assert codes == [0, 0] and said.count("launch: restart 1 of 1") == 2, said
    assert series(tmp_path / "run") == series(place(options) / "whole")
    print("\n" + how_it_went(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.cap(400)
def test_a_node_that_does_not_come_back_leaves_a_smaller_run_and_a_returned_one_joins_the_next(
    options, tmp_path
):
    """1:2 nodes of two ranks each: two, then node 0 alone, and after the next failure two again.
    The same batches: equal to rounding."""
    folder, port = tmp_path / "run", free_port()
    # With Adam's default epsilon, rounding alone grows to 1.4e-3 in 60 steps between meshes; with
    # this one to 7e-5.
    longer = [
        *options,
        "--training.steps=60",
        "--lr_schedule.kind=constant",
        "--training.local_batch_size=1",
        "--optimizer.eps=1e-3",
    ]
    flags = [
        "--max-restarts=2",
        "--last-call=5",
        f"--join-timeout={60 * NEIGHBOURS}",
        *two(port, least=1),
    ]
    first = nodes(longer, folder, "0 SIGKILL 40 2", *flags)

    def reached(step: int) -> None:
        deadline = time.monotonic() + 90 * NEIGHBOURS
        while not logged(folder, step):
            assert time.monotonic() < deadline and first[0].poll() is None, ended(first)
            time.sleep(0.05)

    reached(12)
    first[1].kill()  # its ranks die with it
    first[1].communicate()
    reached(25)
    second = nodes(longer, folder, "0 SIGKILL 40 2", *[f for f in flags if f != "--node-rank=0"])
    codes, said = ended([first[0], *second], 200)
    assert codes == [0, 0], said
    sizes = [start.about["mesh"]["dp_shard"] for start in read(folder)]
    assert sizes == [4, 2, 4], sizes
    whole = tmp_path / "whole"
    whole.mkdir()
    assert run_ranks(2, run, longer, whole) == [(0, "")] * 2
    want, got = series(whole), series(folder)
    assert want.keys() == got.keys() and max(abs(got[s] / want[s] - 1) for s in want) < 3e-4
    print("\n" + how_it_went(folder))


# Back over bad data


@pytest.mark.slow
def test_going_back_and_around_bad_batches_is_a_run_that_never_met_them(options, tmp_path):
    """The command of docs/reliability.md: steps 11 to 13 of a run are not to have been; then it
    goes on, restarts included."""
    back, never, options = (
        tmp_path / "back",
        tmp_path / "never",
        [*options, "--lr_schedule.kind=constant"],
    )
    around = "--data.skip=[[10,3]]"
    for folder in back, never:
        folder.mkdir()
    assert run_ranks(2, run, options, back) == [(0, "")] * 2  # all 16 steps
    command = [*options, around, "--checkpoint.load_step=10"]
    (code, said), _ = run_ranks(2, run, command, back)
    assert (
        code == 2
        and "data.skip was [] and is [[10, 3]]" in said
        and "data.allow_splice = true" in said
    )
    (code, said), _ = run_ranks(
        2, run, [*options, around, "--data.allow_splice=true", "--training.steps=20"], back
    )
    assert code == 2 and "go back with checkpoint.load_step = 10" in said
    assert run_ranks(2, run, [*command, "--data.allow_splice=true"], back) == [(0, "")] * 2
    seen = samples(back, 2)
    assert seen[STEPS : STEPS + 3] == seen[13:16] and len(seen) == STEPS + 6, (
        "after step 10 comes what was step 14's"
    )
    assert not {n for batch in seen[10:13] for n in batch} & {
        n for batch in seen[STEPS:] for n in batch
    }
    # one goes on, now without going back; the other jumps as it comes by
    for folder in back, never:
        assert run_ranks(2, run, [*options, around, "--training.steps=20"], folder) == [(0, "")] * 2
    assert samples(never, 2)[10:] == samples(back, 2)[STEPS:], "the same batches"
    assert all(
        series(back, key) == series(never, key) for key in ("loss", "grad_norm", "tokens_seen")
    ), "bitwise"


# What the launcher makes of a rank that does not end by itself


@pytest.mark.slow
@pytest.mark.cap(200)
@pytest.mark.parametrize("what", ["SIGSTOP", "spin"])
def test_s4_a_rank_that_is_frozen_or_hangs_is_named_and_the_run_goes_on(what, options, tmp_path):
    more = [*options, step_timeout(5)]
    codes, said = ended(nodes(more, tmp_path / "run", f"1 {what} 8 1", "--max-restarts=1"))
    assert codes == [0] and "launch: restart 1 of 1" in said, said
    first = next(line for line in said.splitlines() if line.startswith("launch: rank"))
    assert (
        first.startswith("launch: rank 1 on")
        and ("is frozen" if what == "SIGSTOP" else "is behind") in first
    ), said
    assert what == "SIGSTOP" or "rank 1 on" in said and "was killed by SIGALRM" in said, said
    assert series(tmp_path / "run") == series(place(options) / "whole")


SLOW_SAVES = """
import time
from checkpoint import verify
real = verify.write_manifest
def slow(folder, manifest):
    time.sleep(30 * (manifest["step"] > 5))
    return real(folder, manifest)
verify.write_manifest = slow
"""


@pytest.mark.slow
@pytest.mark.cap(200)
def test_s3_a_save_that_takes_longer_than_the_grace_leaves_the_one_before(options, tmp_path):
    (place(options) / "slow.py").write_text(SLOW_SAVES + WRAPPER)
    flags = ("--shutdown-timeout=2", "--max-restarts=2")
    codes, said = ended(
        nodes(options, tmp_path / "run", "1 launcher:SIGTERM 8 1", *flags, script="slow.py")
    )
    assert (
        codes == [128 + signal.SIGKILL] and "not stopped after 2 s: the ranks are killed" in said
    ), said
    assert "launch: restart" not in said, "it was asked to stop"
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000005"]
    assert ended(nodes(options, tmp_path / "run", "1 launcher:SIGTERM 8 1"))[0] == [0]
    assert series(tmp_path / "run") == series(place(options) / "whole")
