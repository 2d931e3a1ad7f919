"""Promises of docs/security.md about a run on one node: it cannot be reached from outside, and it
gives no secret away.

One real run of two ranks by run_train.sh, in an environment full of canaries, under a careless
umask.
"""

import contextlib
import os
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.programs import environment
from tests.ranks import WORKERS
from tests.runs import as_typed, tiny_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
CANARY = "canary-8f3b1c"
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": f"{CANARY}-aws",
    "HF_TOKEN": f"hf_{CANARY}",
    "WANDB_API_KEY": f"{CANARY}-wandb",
    "FTP_PROXY": f"http://user:{CANARY}@proxy.invalid:3128",
    "PLUMBLINE_ANYTHING": f"{CANARY}-other",
}


def listening(pids: list[int]) -> set[str]:
    """Addresses (hexadecimal, as Linux's tables have them) on which these processes accept TCP
    connections."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):  # it has ended
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):  # it has closed that file
                    sockets.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            local, state = words[1], words[3]
            if state == "0A" and f"socket:[{words[9]}]" in sockets:  # 0A: LISTEN
                found.add(local.partition(":")[0])
    return found


LOOPBACK = f"{int.from_bytes(socket.inet_aton('127.0.0.1'), 'little'):08X}"


def descendants(pid: int) -> list[int]:
    parents = {}
    for other in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(other)] = int(
                Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[1]
            )
        except OSError:
            pass
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found


@pytest.fixture(scope="module", params=[1, 2])
def a_run(
    request, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, str, set[str]]]:
    """(its place, all it said, where it listened) of a run that is stopped after it has saved."""
    place = tmp_path_factory.mktemp("run")
    options = [*tiny_run(place), "--training.steps=2000", "--metrics.tensorboard=true"]
    command = [str(ROOT / "run_train.sh"), *as_typed(options), f"--run.folder={place / 'run'}"]
    here = environment(NGPU=str(request.param), OMP_NUM_THREADS="1", **SECRETS)
    with open(place / "said", "w") as file:
        process = subprocess.Popen(
            ["sh", "-c", 'umask 000; exec "$@"', "_", *command], env=here, stdout=file, stderr=file
        )
    found, deadline = set(), time.monotonic() + 60 * WORKERS
    while not list((place / "run" / "checkpoints").glob("step-*")):
        assert process.poll() is None and time.monotonic() < deadline, (place / "said").read_text()
        found |= listening(descendants(process.pid))
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60 * WORKERS) == 75, (place / "said").read_text()
    return place, (place / "said").read_text(), found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_a_run_on_one_node_listens_on_the_loopback_alone(a_run):
    assert a_run[2] == {LOOPBACK}, "and it does listen: gloo's ranks connect to each other"


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_control_torchs_own_store_listens_everywhere():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert listening([os.getpid()]) - {LOOPBACK}, store


def test_no_secret_of_the_environment_is_written_anywhere(a_run):
    place, said, _ = a_run
    assert CANARY not in said
    files = [path for path in place.rglob("*") if path.is_file()]
    kinds = {path.suffix for path in files}
    assert {".safetensors", ".json", ".log", ".toml"} <= kinds and any(
        "tfevents" in path.name for path in files
    )
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]


def test_not_everyone_can_write_what_a_run_leaves(a_run):
    place = a_run[0]
    made = [
        path
        for path in place.rglob("*")
        if path.relative_to(place).parts[0] in ("run", "cache") and not path.is_symlink()
    ]
    assert len(made) > 5 and not [path for path in made if path.stat().st_mode & stat.S_IWOTH]
