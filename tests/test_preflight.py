"""Preflight finds faults and names them: every fault is put into real ranks, and must be on the
page.

Four forked ranks play two hosts, a (ranks 0, 1) and b (ranks 2, 3). They run the faults one after
another, each a separate preflight with a rank or two sabotaged; the tests then read the pages.
Faults that kill or hang a rank have separate ranks.
"""

import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from argparse import Namespace
from collections import namedtuple
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import train
from configs.load import load_config
from configs.schema import Checkpoint, InputError
from parallelisms.mesh import World
from tests.hosts import hosts  # noqa: F401  a fixture
from tests.programs import ROOT, finished, started
from tests.ranks import WORKERS, run_ranks
from tests.runs import as_typed
from tools.plan.device import load_device
from tools.preflight import answers, arguments, copies, job, machine, network
from tools.preflight import checks as preflight
from tools.preflight.__main__ import main
from tools.preflight.probe import Probe

ROOT = Path(__file__).resolve().parent.parent
TINY = (
    "--model.dim=32 --model.n_layers=2 --model.n_heads=4 --model.n_kv_heads=4 --model.head_dim=8 "
    "--model.hidden_dim=36 "
    "--model.vocab_size=263 --data.tokenizer=bytes --training.param_dtype=float32 "
    "--training.seq_len=16 "
    "--training.global_batch_size=8 --training.local_batch_size=2 --training.steps=16 "
    "--lr_schedule.warmup_steps=3 --checkpoint.interval=5 "
    "--data.source=corpus --data.cache=cache --run.folder=runs/x --parallelism.tensor_parallel=2"
).split()
MEMORY = 80 * 10**9


# The faults ---------------------------------------------------------------------------------------


def environ(**names: str) -> Callable:
    return lambda patch, place: [patch.setenv(name, value) for name, value in names.items()]


def replaced(module: object, name: str, new: Callable) -> Callable:
    """Replace a function by `new`, which is called with the original first, and then as the
    original."""
    return lambda patch, place: patch.setattr(
        module, name, lambda *a, real=getattr(module, name), **k: new(real, *a, **k)
    )


def elsewhere(patch: pytest.MonkeyPatch, place: Path) -> None:
    """The same relative paths, on another file system so to speak."""
    patch.chdir(place / "elsewhere")


def with_copies(exists: bool, free: int) -> Callable:
    """Let each host keep copies in a folder of its own; on host b it is not there, or has no room."""

    def sabotage(patch: pytest.MonkeyPatch, place: Path) -> None:
        memory = place / f"memory-{socket.gethostname()}"
        patch.setenv("PLUMBLINE_HOST_MEMORY", str(memory))
        option("--checkpoint.peers=1")(patch, place)
        if exists or memory.name == "memory-a":
            memory.mkdir(exist_ok=True)
        if memory.name == "memory-b":
            patch.setattr(shutil, "disk_usage", lambda path: USAGE(9, 9, free))

    return sabotage


def table(rank_to: dict[int, dict]) -> Callable:
    """Return a device table of 8 GPUs; with other entries for some ranks."""

    def new(real: Callable, device: torch.device) -> dict:
        rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        gpu = {
            "name": "H200",
            "uuid": f"gpu-{rank}",
            "bus": f"0{local}:00.0",
            "visible": None,
            "driver": "1",
            "total": MEMORY,
            "free": MEMORY - 10**9,
        }
        return gpu | rank_to.get(rank, {})

    return replaced(machine, "device_table", new)


def not_finite(real: Callable, *args: object, each: torch.Tensor, **kwargs: object) -> torch.Tensor:
    loss = real(*args, each=each, **kwargs)
    each.fill_(float("nan"))
    return loss * float("nan")


def sleeping(seconds: float) -> Callable:
    def new(real: Callable, *args: object) -> object:
        time.sleep(seconds)
        return real(*args)

    return new


def slow_link_of_four(patch: pytest.MonkeyPatch, place: Path) -> None:
    """All four on one host, so that there is a median, and rank 2 slow in talking to rank 3."""
    environ(GROUP_RANK="0", LOCAL_RANK=os.environ["RANK"], LOCAL_WORLD_SIZE="4")(patch, place)
    option("--parallelism.tensor_parallel=1")(patch, place)
    patch.setattr(socket, "gethostname", lambda: "a")
    real = network.ping_pong

    def ping_pong(message: torch.Tensor, other: int, *args: object) -> None:
        time.sleep(0.3 if other == 3 and os.environ["RANK"] == "2" else 0)
        real(message, other, *args)

    patch.setattr(network, "ping_pong", ping_pong)


def other_file(patch: pytest.MonkeyPatch, place: Path) -> None:
    patch.setattr(machine, "files", lambda: "0ther")


def option(*more: str) -> Callable:
    return lambda patch, place: patch.setattr(
        machine, "load_config", lambda argv, *a: load_config([*argv, *more], *a)
    )


def corpus_of_its_own(patch: pytest.MonkeyPatch, place: Path) -> None:
    """Same paths, other text; only the corpus: the run's folder is the shared one."""
    patch.setattr(job, "open_corpora", in_folder(place / "elsewhere", job.open_corpora))
    patch.setattr(job, "not_tokenised", lambda cfg: ([], 0))


def in_folder(folder: Path, fn: Callable) -> Callable:
    def new(*args: object, **kwargs: object) -> object:
        before = Path.cwd()
        os.chdir(folder)
        try:
            return fn(*args, **kwargs)
        finally:
            os.chdir(before)

    return new


USAGE = namedtuple("usage", "total used free")
Fault = namedtuple("Fault", "ranks sabotage only words code", defaults=[1])
ALL = (0, 1, 2, 3)
B3 = r"rank 3 \(host b\)"
FAULTS = {
    "healthy": Fault((), None, "", r"ranks +ok +4, 2 on each of 2 hosts", 0),
    # C3 of the torture suite: one rank with another ...
    "config": Fault(
        (3,),
        option("--optimizer.lr=0.5"),
        "config",
        rf"optimizer.lr is 0.0015 on ranks 0-2 .*but 0.5 on {B3}",
    ),
    "commit": Fault(
        (2,),
        replaced(machine, "commit", lambda real: "abc"),
        "same",
        r"commit is \w+ on ranks 0-1, 3 .*but abc on rank 2",
    ),
    "data": Fault((3,), corpus_of_its_own, "data", rf"corpora: .* on ranks 0-2 .*but .* on {B3}"),
    "environment": Fault(
        (3,),
        environ(NCCL_ALGO="Tree"),
        "same",
        rf"NCCL_ALGO is not set on ranks 0-2 .*but Tree on {B3}",
    ),
    "code": Fault((1,), other_file, "same", r"files is \w+ on ranks 0, 2-3 .*but 0ther on rank 1"),
    # C4
    "local rank twice": Fault(
        (3,), environ(LOCAL_RANK="0"), "ranks", r"LOCAL_RANK 0 was given to ranks 2-3 \(host b\)"
    ),
    "one GPU for two": Fault(
        ALL, table({3: {"uuid": "gpu-2"}}), "devices", r"ranks 2-3 \(host b\) share GPU gpu-2"
    ),
    "someone else's memory": Fault(
        ALL,
        table({1: {"free": MEMORY // 2}}),
        "devices",
        r"rank 1 \(host a\): 40 GB of 80 GB are taken before the start",
    ),
    "uneven hosts": Fault(
        (3,),
        environ(GROUP_RANK="2"),
        "ranks",
        r"ranks on a host is 2 on ranks 0-1 \(host a\), but 1 on ranks 2-3",
    ),
    # The host
    "few files": Fault(
        (2, 3),
        lambda patch, place: patch.setattr(resource, "getrlimit", lambda kind: (256, 256)),
        "host",
        r"ranks 2-3 \(host b\): at most 256 files may be open, and 512 are needed",
    ),
    "loopback": Fault(
        (2, 3),
        lambda patch, place: patch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1"),
        "host",
        r"the host name of rank 2 \(host b\) resolves to 127.0.1.1 there",
    ),
    "no memory for copies": Fault(
        ALL,
        with_copies(False, 10**9),
        "copies",
        r"memory-b of rank 2 \(host b\) cannot be written \(No such file or directory\): set PLUMB",
    ),
    "no room for copies": Fault(
        ALL,
        with_copies(True, 50_000),
        "copies",
        r"memory-b of rank 2 \(host b\) has room for 50 kB, and 2 copies of 2 hosts' state need 7\d\d kB",
    ),
    "slow arithmetic": Fault(
        (2,),
        replaced(machine, "multiply", sleeping(0.05)),
        "compute",
        r"compute +warn +matmul: rank 2 \(host b\)",
        0,
    ),
    "folder not shared": Fault(
        (2, 3),
        elsewhere,
        "folder",
        r"rank 0 \(host a\) does not see in \S+ what ranks 2-3 \(host b\) wrote",
    ),
    "folder not writable": Fault(
        ALL,
        lambda patch, place: patch.chdir(place / "blocked"),
        "folder",
        r"ranks 0-3 .*: run.folder = 'runs/x': \S+ cannot be written \(Not a directory\)",
        2,
    ),
    "disk full": Fault(
        (1,),
        lambda patch, place: patch.setattr(shutil, "disk_usage", lambda path: USAGE(9, 9, 50_000)),
        "folder",
        r"has 50 kB free \(rank 1 \(host a\)\), but 4 checkpoints of 390 kB",
    ),
    "no locks": Fault(
        (3,),
        replaced(machine, "Lease", lambda real, path: SimpleNamespace(release=lambda: None)),
        "folder",
        rf"{B3} was given the lease that rank 0 holds",
    ),
    "not tokenised": Fault(
        ALL,
        lambda patch, place: (
            patch.setattr(job, "SMALL_CORPUS", 0) or option("--data.cache=nothing")(patch, place)
        ),
        "data",
        r"corpus \(\S+ kB\) is not tokenised yet where ranks 0-3",
    ),
    "wrong option": Fault(
        ALL, option("--training.step=3"), "config", r"training.step: no such option", 2
    ),
    "clock": Fault(
        (2, 3),
        replaced(network, "wall_clock", lambda real: real() + 5),
        "clock",
        r"clocks differ by (5|5.0\d|4.9\d) s .* most on rank [02]",
    ),
    "slow link": Fault(
        ALL, slow_link_of_four, "bandwidth", r"warn +link rank 2 \(host a\) - rank 3", 0
    ),
    "expert parallel": Fault(
        ALL,
        option(
            "--parallelism.tensor_parallel=1",
            "--model.family=qwen3",
            "--model.flavor=debug_moe",
            "--parallelism.expert_parallel=2",
        ),
        "bandwidth",
        r"edp, 2 groups of 2(.|\n)* ep, 2 groups of 2, [^\n]*: all-to-all \S+ GB/s(.|\n)*links ep "
        r"within hosts: 2",
        0,
    ),
    # No fault: two stages on two hosts, and a batch of which no other mesh of four ranks could make
    # microbatches of 8.
    "pipeline": Fault(
        ALL,
        option("--parallelism.pipeline_parallel=2", "--training.local_batch_size=8"),
        "bandwidth,step",
        r"links pp between hosts: 2, median \S+ GB/s, least \S+ between ranks \d and \d; latency "
        r"\S+ ms(.|\n)*step +ok",
        0,
    ),
    "NaN": Fault(
        (1,),
        replaced(train, "linear_cross_entropy", not_finite),
        "step",
        r"tokens of rank 1 \(host a\) is not finite",
    ),
    "bit flip": Fault(
        (2,),
        replaced(
            job, "fingerprints", lambda real, j: real(j) | {"model.norm.weight": time.time_ns()}
        ),
        "save",
        r"rank 2 \(host b\) read back other values than were saved \(model.norm.weight",
    ),
}


def play(name: str, place: Path, timeout: int = 60) -> tuple[int, str]:
    """One preflight on this rank, sabotaged if the fault says so: its exit code, and the page if
    this is rank 0."""
    fault, rank = FAULTS[name], int(os.environ["RANK"])
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        host = "ab"[rank // 2]
        sizes = {"GROUP_RANK": rank // 2, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
        environ(**{name: str(value) for name, value in sizes.items()})(patch, place)
        patch.setattr(socket, "gethostname", lambda: host)
        if rank in fault.ranks:
            fault.sabotage(patch, place)
        # half of which a rank waits to see what others wrote
        timeout = 4 if name == "folder not shared" else timeout
        to = f"{place}/{name}.json" if rank == 0 else ""
        none = dict.fromkeys(("skip", "expect", "device"), "")
        options = Namespace(only=fault.only, json=to, timeout=timeout, **none)
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        with redirect_stdout(out):
            code = preflight.run(options, TINY, store)
    return code, out.getvalue()


def play_all(place: Path) -> dict[str, tuple[int, str]]:
    return {name: play(name, place) for name in FAULTS}


def corpus(folder: Path, words: str) -> None:
    folder.mkdir(parents=True)
    for i in range(40):
        (folder / f"{i:02d}.txt").write_text(
            f"document {i}: {words} " + " ".join(str(n * (i + 7) % 97) for n in range(60))
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("preflight")
    corpus(place / "corpus", "this")
    corpus(place / "elsewhere" / "corpus", "that")
    (place / "blocked").mkdir()
    (place / "blocked" / "runs").write_text("a file where a folder should be")
    return place


@pytest.fixture(scope="module")
def played(place: Path) -> list[dict[str, tuple[int, str]]]:
    """Return the results of every rank for every fault."""
    return run_ranks(4, play_all, place, timeout=240)


@pytest.mark.slow
@pytest.mark.cap(260)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(played, name):
    codes, page = [rank[name][0] for rank in played], played[0][name][1]
    assert re.search(FAULTS[name].words, re.sub(r"\n {20}", " ", page)), page
    assert codes == [FAULTS[name].code] * 4, f"all ranks know how it ended\n{page}"
    assert not any(rank[name][1] for rank in played[1:]), "rank 0 alone speaks"


@pytest.mark.slow
@pytest.mark.cap(260)
def test_a_healthy_cluster_passes_every_check_and_nothing_stays_behind(played, place):
    page = json.loads((place / "healthy.json").read_text())
    assert {row["check"] for row in page["rows"]} == set(preflight.CHECKS)
    assert {row["result"] for row in page["rows"]} <= {"ok", "warn"}, page["rows"]
    assert len(page["answers"]["step"]) == 4 and page["code"] == 0
    assert not (place / "runs").exists() and not list(place.rglob(".preflight-*"))


@pytest.mark.slow
@pytest.mark.cap(260)
def test_what_needs_a_failed_check_is_left_out_and_the_rest_goes_on(played):
    assert "bandwidth" not in played[0]["config"][1], "only what was asked for"
    assert re.search(r"commit.*\n(.*\n)*same|same +FAIL +commit", played[0]["commit"][1])


# Ranks that do not answer -------------------------------------------------------------------------


def play_badly(name: str, place: Path, how: Callable, only: str, timeout: int) -> tuple[int, str]:
    """Run the healthy run like `play`, with rank 2 doing `how` instead of measuring `only`."""
    if dist.get_rank() == 2 and only == "ranks":
        return 0, ""
    check = preflight.CHECKS[only]
    if dist.get_rank() == 2:
        preflight.CHECKS[only] = preflight.HealthCheck(how, check.judge)
    preflight.SLACK = 1
    FAULTS[name] = Fault((), None, only, "")
    return play(name, place, timeout)


def die(probe: Probe) -> None:
    os._exit(0)


def hang(probe: Probe) -> None:
    time.sleep(600)


def fail(probe: Probe) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


LOST = {  # name: (what rank 2 does, in which check, what is said)
    "never came": (hang, "ranks", r"ranks +FAIL +rank 2 \(host number 1\): gave no answer"),
    "died": (die, "compute", r"compute +FAIL +rank 2 \(host b\): gave no answer: it died, hangs"),
    "out of memory": (
        fail,
        "build",
        r"build +FAIL +rank 2 \(host b\): OutOfMemoryError: CUDA out of memory",
    ),
    "hangs together": (
        hang,
        "step",
        r"step +FAIL +rank 2 \(host b\): did not finish within 20 s; it is in .*\(hang\)",
    ),
}


@pytest.mark.cap(90)
@pytest.mark.parametrize(
    "name", ["died", *(pytest.param(n, marks=pytest.mark.slow) for n in LOST if n != "died")]
)
def test_a_rank_that_does_not_answer_is_named(place, name):
    how, only, words = LOST[name]
    timeout = 20 if name in ("out of memory", "hangs together") else 4
    results = run_ranks(4, play_badly, f"lost {name}", place, how, only, timeout, timeout=60)
    page = re.sub(r"\n {20}", " ", results[0][1])
    assert re.search(words, page), page
    assert {results[rank][0] for rank in (0, 1, 3)} == {1}, "no rank waits for ever"


def test_a_crash_of_rank_0_is_told_by_another(capfd, monkeypatch):
    """Rank 0 reads no answers and gives no verdict: the others end by themselves."""
    monkeypatch.setattr(preflight, "SLACK", 0.1)
    probe = Probe([], World(1, 2, 1, 2), "a", "0", 1)
    results = answers.ResultStore(dist.HashStore(), 1, 2)
    assert preflight.run_checks(probe, results, ["ranks"], None) == 1
    assert "rank 0 gave no verdict on ranks" in capfd.readouterr().err


# Judging, without ranks ---------------------------------------------------------------------------


def host_of(ranks: int, device: str = "cuda") -> Probe:
    """Rank 0 of a run on hosts of 8 GPUs."""
    hosts = {r: f"node{r // 8}" for r in range(ranks)}
    kind = {"device": torch.device(device), "dtype": torch.bfloat16}
    return Probe([], World(0, ranks, 0, 8), "node0", "0", None, hosts=hosts, **kind)


def test_memory_for_copies_that_is_a_disk_or_another_hosts_is_named():
    probe = host_of(24)
    probe.cfg = load_config(TINY).model_copy(update={"checkpoint": Checkpoint(peers=1)})
    _, probe.args = train.architecture(probe.cfg)
    probe.leaders = [0, 8, 16]
    found = {"folder": "/dev/shm", "why": "", "type": "tmpfs", "room": 10**9, "memory": ["x", 1, 1]}
    answers = [found | {"memory": ["y", 1, 1]}] * 8 + [found] * 8 + [found | {"type": "nfs4"}] * 8
    disk, shared = copies.judge_copies(probe, answers)
    assert disk.result == "warn" and "of rank 16 (host node2) is on nfs4, not in" in disk.detail
    assert shared.result == "FAIL" and "ranks 8, 16 (hosts node1, node2) have one" in shared.detail
    assert copies.file_system(Path("/proc")) == "proc"


def test_a_slow_gpu_fails_and_says_why():
    """On GPUs a slow rank is a failure; 0.79 of the median is slow, 0.81 is not."""
    rates = [700e12] * 13 + [0.79 * 700e12, 0.81 * 700e12, 700e12]
    same = {"bytes": 4e12, "shape": [8, 8, 8], "peak": 989e12}
    same |= {"hint": "91 °C, slowed down by heat or power"}
    found = machine.judge_compute(host_of(16), [same | {"flops": rate} for rate in rates])
    assert [row.result for row in found] == ["FAIL", "ok"]
    words = "rank 13 (host node1): 553 TFLOP/s, 0.79 of the median 700, 91 °C, slowed down"
    assert words in found[0].detail


def test_links_that_are_all_too_slow_have_no_median_but_the_table():
    """The table's rate is that of this message: small ones reach less."""
    said = bandwidths()
    for answer in said:
        answer["dims"]["dp_shard"] |= {"bytes": 1 << 30, "all-gather": 5e9, "all-reduce": 5e9}
    probe = host_of(24)
    assert failures(probe, said) == []
    probe.table = load_device("h100")
    bad = failures(probe, said)
    words = r"dp_shard: .* 5 GB/s, but NVIDIA H100 80GB HBM3 should make 40:"
    assert len(bad) == 2 and all(re.match(words, text) for text in bad)
    probe.expect = {"dp_shard": 6}  # says otherwise
    assert failures(probe, said) == []


def failures(probe: Probe, said: list[dict]) -> list[str]:
    """Return the rows about bandwidth that are not ok."""
    rows = network.judge_bandwidth(probe, said)
    assert {row.result for row in rows} <= {"ok", "FAIL"}
    return [row.detail for row in rows if row.result == "FAIL"]


def bandwidths(slow_link: tuple | None = None, slow_group: int = -1) -> list[dict]:
    """Return the bandwidths of 24 ranks, tp 8 within each host, dp_shard 3 between them, as if the
    first host and the last had stages of pipelines, too."""
    said = []
    for r in range(24):
        tp, dp = list(range(r // 8 * 8, r // 8 * 8 + 8)), [r % 8, r % 8 + 8, r % 8 + 16]
        rate = 100e9 if r % 8 == slow_group else 300e9
        dims = {"dp_shard": {"ranks": dp, "bytes": 1, "all-gather": rate, "all-reduce": rate}}
        dims["tp"] = {"ranks": tp, "bytes": 1, "all-gather": 300e9, "all-reduce": 300e9}
        pairs = [["tp", r, tp[(r + 1) % 8]], ["dp_shard", r, dp[(r // 8 + 1) % 3]]]
        pairs += [["pp", r, r + 16]] if r < 8 else []
        links = [[*pair, 5e9 if tuple(pair[1:]) == slow_link else 40e9, 9e-6] for pair in pairs]
        said.append({"dims": dims, "links": links, "stage_bytes": 64 << 20})
    return said


def test_the_slow_link_and_the_slow_group_are_named():
    probe = host_of(24)
    assert failures(probe, bandwidths()) == []
    *of_groups, of_link = failures(probe, bandwidths((8, 16), 3))
    assert len(of_groups) == 2
    assert all("ranks 3, 11, 19 (hosts node0, node1, node2)" in text for text in of_groups)
    where = "link rank 8 (host node1) - rank 16 (host node2): 5 GB/s, "
    assert of_link.startswith(f"{where}0.12 of the median of dp_shard between hosts")
    probe.expect = {"tp": 400, "dp_shard": 450}  # 300 are 0.75 and 0.67 of these
    bad = failures(probe, bandwidths())
    assert len(bad) == 2 and all("300 GB/s, but --expect=dp_shard:450" in text for text in bad)


def test_bus_bandwidth_is_what_nccl_tests_call_so(monkeypatch):
    """A message of S bytes over n ranks in t seconds: S/t (n-1)/n gathered or exchanged, S/t
    2(n-1)/n summed (nccl-tests, doc/PERFORMANCE.md)."""
    monkeypatch.setattr(network, "collective_seconds", lambda *args: 0.5)
    monkeypatch.setattr(network, "ring_links", lambda *args: [])
    monkeypatch.setattr(
        network, "messages", lambda probe: dict.fromkeys(("tp", "ep"), (4000, torch.float32))
    )
    monkeypatch.setattr(network.dist, "get_process_group_ranks", lambda group: [0, 1, 2, 3, 4])
    groups = SimpleNamespace(get_group=lambda dim: None)
    mesh = SimpleNamespace(
        device=torch.device("cpu"),
        device_mesh=groups,
        experts_mesh=groups,
        fsdp_mesh=SimpleNamespace(mesh_dim_names=("dp_shard",)),
    )
    dims = network.measure_bandwidth(SimpleNamespace(job=SimpleNamespace(mesh=mesh)))["dims"]
    message = {"ranks": [0, 1, 2, 3, 4], "bytes": 4000}
    gathered, summed = pytest.approx(8000 * 4 / 5), pytest.approx(8000 * 8 / 5)
    assert dims["ep"] == message | {"all-to-all": gathered}
    assert dims["tp"] == message | {"all-gather": gathered, "all-reduce": summed}


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_no_rank_is_in_two_pairs_at_once(n):
    """In each of the phases of `ring_links`, and every link of the ring is measured once."""
    pairs = [(i, (i + 1) % n) for i in range(n if n > 2 else 1)]
    phases = [[p for p in pairs if network.phase(p, n) == number] for number in range(3)]
    assert sorted(sum(phases, [])) == sorted(pairs)
    for phase in phases:
        assert len({rank for pair in phase for rank in pair}) == 2 * len(phase)


def test_losses_that_differ_are_named():
    same = {"losses": [(1.5).hex(), (2.0).hex()], "finite": True, "skipped": False}
    same |= {"seconds": [2.0, 1.0, 1.0, 1.0], "retries": 0}
    same |= {"total": MEMORY, "tensors": 1e9, "reserved": 2e9, "left": 9e9}
    probe = host_of(16)
    probe.cfg, probe.args = load_config(TINY), SimpleNamespace(vocab_size=263)
    other = same | {"losses": [(1.25).hex(), (2.0).hex()], "retries": 3}
    rows = job.judge_step(probe, [same] * 15 + [other])
    assert [row.result for row in rows] == ["FAIL", "warn"]
    words = "are 1.5 2 on ranks 0-14 (hosts node0, node1), but 1.25 2 on rank 15 (host node1)"
    assert words in rows[0].detail
    assert "the allocator had to start over on rank 15" in rows[1].detail


def test_a_checkpoint_is_as_large_as_the_run_writes_it(place):
    """The size that preflight computes on meta is that of a save: weights, two moments, AdamW's
    step of each, a generator."""
    cfg = load_config(TINY)
    family, args = train.architecture(cfg)
    with torch.device("meta"):
        weights = sum(p.numel() for p in family.build(args).parameters())
    tensors = len(family.build(args).state_dict())
    generator = torch.get_rng_state().nbytes
    assert machine.checkpoint_bytes(cfg, args) == 4 * (3 * weights + tensors) + generator
    adapters = ["--lora.rank=1", '--lora.targets=["wq"]', "--checkpoint.load_path=runs/base"]
    size = machine.checkpoint_bytes(load_config([*TINY, *adapters]), args)
    of_adapters = 4 * (3 * 2 * (32 + 32) + 4)  # of two layers
    assert size == of_adapters + generator


@pytest.mark.parametrize(
    "options, kept",
    [
        ([], 4),
        (["--checkpoint.keep_last=0"], 5),
        (["--checkpoint.keep_last=1", "--checkpoint.keep_every=5"], 5),
        (["--checkpoint.interval=0"], 2),
    ],
)
def test_checkpoints_that_must_have_room(options, kept):
    """16 steps with one save every 5: saves after 5, 10, 15, 16; and one that is being written."""
    assert machine.checkpoints_kept(load_config([*TINY, *options])) == kept


def test_hosts_compare_every_package_of_the_code(tmp_path, monkeypatch):
    """A package that is left out lets two hosts run different code without a word, as reliability/
    was once."""
    copies = [
        path.relative_to(ROOT) for path in ROOT.glob("[a-z]*/*.py") if path.parent.name != "tests"
    ]
    for path in (Path("train.py"), *copies):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    for name in {path.parts[0] for path in copies} | {"train.py"}:
        before = machine.files()
        changed = tmp_path / (name if name == "train.py" else f"{name}/__init__.py")
        changed.write_bytes(changed.read_bytes() + b"# changed")
        assert machine.files() != before, f"{name} is not compared"


def test_secrets_of_the_environment_stay_there(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TORCH_HUB_TOKEN", "canary")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    settings = machine.settings()
    assert settings["NCCL_DEBUG"] == "INFO" and "canary" not in settings.values()


def test_only_and_skip():
    whole = "ranks config devices host copies same folder data connect clock".split()
    assert preflight.chosen("", "build,compute") == whole
    needed = [name for name in whole if name not in ("copies", "folder", "data")]
    assert preflight.chosen("clock", "") == needed
    with pytest.raises(InputError, match="--skip=sleep: no such check; there are ranks, config"):
        preflight.chosen("", "sleep")


# As a user starts it ------------------------------------------------------------------------------


ON_THREE = ["--parallelism.tensor_parallel=1", "--training.global_batch_size=6"]


def in_place(place: Path) -> list[str]:
    """TINY with absolute paths."""
    return [
        option.replace("=corpus", f"={place}/corpus").replace("=cache", f"={place}/cache")
        for option in TINY
    ]


def asked(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    words = ROOT / "run_train.sh", "--preflight", *as_typed(arguments)
    return finished(*words, seconds=150, **settings)


@pytest.mark.slow
@pytest.mark.cap(160)
def test_run_train_sh_preflight(place):
    """Two ranks under our launcher: all checks of a data-parallel run."""
    json_path = place / "two.json"
    more = [f"--run.folder={place}/runs/two", "--parallelism.tensor_parallel=1"]
    done = asked(*in_place(place), *more, f"--json={json_path}", NGPU="2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "preflight: fit for this run" in done.stdout
    rows = json.loads(json_path.read_text())["rows"]
    assert {row["check"] for row in rows} == set(preflight.CHECKS)
    assert done.stderr == "" and not (place / "runs").exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--only=sleep"], "--only=sleep: no such check"),
        (["--expect=tp"], "--expect=tp: must be DIMENSION:GB/s"),
        (["--device=h10"], "--device h10: unknown; did you mean"),
        (["--device=cpu"], "--device=cpu: would be measured"),
    ],
)
def test_a_wrong_argument(arguments, words, capfd):
    assert main([*TINY, *arguments]) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err.startswith(words)


def ranks_of(marker: str) -> dict[int, int]:
    """Process ids by rank, of the processes whose environment has FLIGHT=marker."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            pairs = path.read_text(errors="replace").split("\0")
        except OSError:
            continue
        environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if environ.get("FLIGHT") == marker and "TORCHELASTIC_RUN_ID" in environ:
            found[int(environ["RANK"])] = int(path.parent.name)
    return found


@pytest.mark.slow
@pytest.mark.cap(120)
def test_kill_9_of_a_rank_is_named_on_the_page_at_once(place, tmp_path):
    """The launcher then tells the other ranks to end: rank 0 still gets its page out, and nothing
    stays behind."""
    options = as_typed([*in_place(place), *ON_THREE, f"--run.folder={tmp_path}/runs/x"])
    words = ROOT / "run_train.sh", "--preflight", *options
    process = started(*words, NGPU="3", FLIGHT=str(tmp_path))
    said = [process.stdout.readline() for _ in range(3)]
    assert "ranks" in said[2], said
    began = time.monotonic()
    os.kill(ranks_of(str(tmp_path))[1], signal.SIGKILL)
    out, err = process.communicate(timeout=60 * WORKERS)
    assert time.monotonic() - began < 30 * WORKERS
    # Rank 2 is missing too where the launcher's SIGTERM reaches it before its first answer.
    lost = rf"FAIL +ranks? 1(-2)? \(host {socket.gethostname()}\): gave no answer: it died"
    assert re.search(lost, out), out
    assert re.search(r"rank 1 on \S+ was killed by SIGKILL", err)
    assert process.returncode == 128 + signal.SIGKILL
    assert not list(tmp_path.rglob(".preflight-*")) and not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.cap(240)
def test_two_hosts(hosts, place, tmp_path):
    """Two network namespaces, two ranks in each; then with a cable of 20 Mbit/s, which --expect
    does not take for fast."""
    options = [*in_place(place), f"--run.folder={tmp_path}/runs/x"]

    def checked(said: str, *more: str) -> list[int | None]:
        running = hosts.launch("tools.preflight", [*options, *more], tmp_path / said, "-m")
        return [launcher.wait(90 * WORKERS) for launcher in running]

    assert checked("well") == [0, 0]
    page = (tmp_path / "well-0").read_text()
    assert "4, 2 on each of 2 hosts" in page and "the hosts' clocks differ by" in page
    assert "links dp_shard between hosts: 2" in page
    assert "preflight" not in (tmp_path / "well-1").read_text(), "rank 0 alone speaks"
    hosts.limit("20mbit")
    try:
        assert checked("slow", "--only=bandwidth", "--expect=dp_shard:1") == [1, 1]
    finally:
        hosts.cable("down"), hosts.cable("up")
    assert "but --expect=dp_shard:1" in (tmp_path / "slow-0").read_text()


def test_run_train_passes_every_option_on(capsys):
    """It checks the configuration first, for which it leaves the options of preflight out."""
    with pytest.raises(SystemExit):
        arguments.parse(["--help"])
    options = set(re.findall(r"^  --([\w-]+)", capsys.readouterr().out, re.MULTILINE))
    left_out = re.search(r"\^--\(([\w|-]+)\)=", (ROOT / "run_train.sh").read_text())[1]
    assert set(left_out.split("|")) == options and "device" in options
