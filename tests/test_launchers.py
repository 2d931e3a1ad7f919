"""The launchers around run_train.sh: Slurm on a real controller and two real node daemons,
Kubernetes manifests against the published schemas, Ray Train on a local Ray, SkyPilot's file.

    python -m pytest tests/test_launchers.py -m slow         what is not installed is skipped, and says so

Slurm: Debian's slurm-wlm and munge, and root; .ci/run installs them where it can. The rest is in
requirements-test.txt.
"""

import fcntl
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Template

import pytest

from configs.load import load_config
from tests.programs import environment
from tests.ranks import WORKERS, step_timeout, wait_until
from tests.runs import as_typed, free_port, in_mid_run, losses_of_four, series, tiny_run

ROOT = Path(__file__).resolve().parent.parent
STEPS = 60
# On a node, for jobs whose numbers nothing is compared with.
ONE_RANK_EACH, ON_ONE_RANK = "--export=ALL,NGPU=1", "--parallelism.tensor_parallel=1"
pytestmark = pytest.mark.waits


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return a tiny run of four ranks over a small corpus, prepared once."""
    return [
        *tiny_run(tmp_path_factory.mktemp("data")),
        f"--training.steps={STEPS}",
        "--parallelism.tensor_parallel=2",
        step_timeout(30),
    ]


@pytest.fixture(scope="module")
def unbroken(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of the same mesh by run_train.sh on one node, computed by the first worker
    of pytest that asks for them."""
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent
    with open(place / "unbroken.json", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if not (text := file.read()):
            text = json.dumps(losses_of_four(tmp_path_factory.mktemp("one") / "run", options))
            file.write(text)
            file.flush()
    return {int(step): loss for step, loss in json.loads(text).items()}


# Slurm --------------------------------------------------------------------------------------------

# A job that is requeued starts cred_expire + 1 seconds later: sooner, the nodes refuse its
# credential. That is longer than KillWait. When a job is to end, its node waits KillWait seconds,
# kills what is left of the job, and may take its next start for that.
SLURM_CONF = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={place}/munge.sock,cred_expire=20
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool/%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,batch_sched_delay=0
ReturnToService=2
KillWait=20
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 RealMemory=100000 Gres=gpu:8
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 RealMemory=100000 Gres=gpu:8
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A controller and two node daemons on this host; the nodes have eight GPUs each that are none."""

    def __init__(self, place: Path) -> None:
        self.place, self.daemons = place, []
        conf = place / "slurm.conf"
        conf.write_text(
            SLURM_CONF.format(
                host=socket.gethostname(), place=place, ports=[free_port() for _ in range(3)]
            )
        )
        (place / "gres.conf").write_text("NodeName=n[0-1] Name=gpu Count=8 File=/dev/tty[1-8]\n")
        for name in ("state", "spool/n0", "spool/n1"):
            (place / name).mkdir(parents=True)
        key = place / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.environment = environment(
            SLURM_CONF=str(conf),
            NGPU="2",
            OMP_NUM_THREADS="1",
            MASTER_ADDR="127.0.0.1",
            GLOO_SOCKET_IFNAME="lo",
        )
        self.environment["PATH"] += ":/usr/sbin"
        kinds = ("key", "pid", "log", "seed")
        files = [f"--{kind}-file={place}/munge.{kind}" for kind in kinds]
        self.daemon("munged", "--force", "--foreground", f"--socket={place / 'munge.sock'}", *files)
        wait_until((place / "munge.sock").exists, 30, lambda: (place / "munge.log").read_text())
        self.daemon("slurmctld", "-D", "-f", str(conf))
        for name in ("n0", "n1"):
            self.daemon("slurmd", "-D", "-f", str(conf), "-N", name)
        idle = ("sinfo", "--noheader", "--format=%T %D")
        wait_until(lambda: self(*idle) == "idle 2", 90, self.logs, every=1)

    def daemon(self, *command: str) -> None:
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        process = subprocess.Popen(command, env=self.environment, start_new_session=True, **quiet)
        self.daemons.append(process)

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.place.glob("*.log")
        )

    def __call__(self, *command: str) -> str:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60 * WORKERS,
        )
        return (done.stdout + done.stderr).strip()

    def submit(self, log: Path, *words: str) -> str:
        said = self("sbatch", "-N2", "--cpus-per-task=2", f"--output={log}", *as_typed(words))
        assert said.startswith("Submitted batch job "), said + self.logs()
        return said.split()[-1]

    def state(self, job: str) -> dict[str, str]:
        shown = self("scontrol", "--oneliner", "show", "job", job)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def train(self, job: str, folder: Path, step: int, log: Path) -> None:
        """Until the run has come to that step and has a checkpoint."""
        said = lambda: f"{self.state(job)}\n{log.exists() and log.read_text()}"  # noqa: E731
        wait_until(lambda: in_mid_run(folder, step), 60, said)

    def wait(self, job: str, log: Path) -> dict[str, str]:
        """Until the job has ended."""
        ended = ("COMPLETED", "FAILED", "CANCELLED")
        wait_until(
            lambda: self.state(job)["JobState"] in ended,
            120,
            lambda: f"{self.state(job)}\n{log.exists() and log.read_text()}\n{self.logs()}",
            every=1,
        )
        return self.state(job)

    def end_jobs(self) -> None:
        """Cancel the jobs that a failed test has left, which would keep the nodes from the next."""
        self("scancel", "--user=root", "--signal=KILL")
        self("scancel", "--user=root")
        wait_until(lambda: not self("squeue", "--noheader"), 30, self.logs, every=0.5)

    def stop(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    path = os.environ["PATH"] + ":/usr/sbin"
    needed = ("munged", "slurmctld", "slurmd", "sbatch")
    missing = [name for name in needed if not shutil.which(name, path=path)]
    if missing or os.geteuid() != 0:
        pytest.skip(
            f"a Slurm of our own needs root and {', '.join(missing) or 'nothing more'} "
            "(Debian, Ubuntu: apt-get install slurm-wlm munge)"
        )
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    yield slurm
    slurm.stop()


@pytest.fixture
def slurm(cluster: Slurm) -> Iterator[Slurm]:
    yield cluster
    cluster.end_jobs()


@pytest.mark.slow
@pytest.mark.cap(500)
def test_slurm_saves_before_the_time_limit_requeues_and_goes_on(slurm, options, unbroken, tmp_path):
    log, folder = tmp_path / "job.log", tmp_path / "run"
    job = slurm.submit(log, "tools/launch/slurm.sh", *options, f"--run.folder={folder}")
    slurm.train(job, folder, 6, log)
    # what --signal=B:USR1@120 does when its time has come
    slurm("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: "stopped on request: requeued" in log.read_text(), 30, log.read_text)
    reached = len(series(folder))
    assert reached < STEPS and (folder / "checkpoints" / f"step-{reached:08d}").is_dir()
    state = slurm.wait(job, log)
    text = log.read_text()
    ended = state["JobState"], state["ExitCode"], state["Restarts"]
    assert ended == ("COMPLETED", "0:0", "1"), text
    assert f"resumed after step {reached} of {STEPS}" in text and "start 2, on n[0-1]" in text
    assert series(folder) == unbroken, "bitwise: it is the same mesh"
    assert sorted(path.name for path in (folder / "logs").glob("rank-*.log")) == [
        f"rank-0000{rank}.log" for rank in range(4)
    ]


@pytest.mark.slow
@pytest.mark.cap(500)
def test_slurm_requeues_after_a_node_failure(slurm, options, unbroken, tmp_path):
    log, folder = tmp_path / "job.log", tmp_path / "run"
    job = slurm.submit(log, "tools/launch/slurm.sh", *options, f"--run.folder={folder}")
    slurm.train(job, folder, 8, log)
    slurm("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    wait_until(lambda: slurm.state(job)["JobState"] == "PENDING", 30, lambda: str(slurm.state(job)))
    slurm("scontrol", "update", "nodename=n1", "state=resume")
    state = slurm.wait(job, log)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), log.read_text()
    assert "resumed after step" in log.read_text() and series(folder) == unbroken


@pytest.mark.slow
@pytest.mark.cap(500)
def test_slurm_a_cancelled_job_has_saved_and_does_not_come_back(slurm, options, tmp_path):
    log, folder = tmp_path / "job.log", tmp_path / "run"
    endless = [*options, ON_ONE_RANK, "--training.steps=100000", f"--run.folder={folder}"]
    job = slurm.submit(log, ONE_RANK_EACH, "tools/launch/slurm.sh", *endless)
    slurm.train(job, folder, 6, log)
    slurm("scancel", job)
    queued = ("squeue", "--noheader", f"--jobs={job}")
    wait_until(lambda: not slurm(*queued), 40, lambda: str(slurm.state(job)), every=0.5)
    last = max(series(folder))
    assert (folder / "checkpoints" / f"step-{last:08d}").is_dir(), "saved at the step it stopped at"
    assert slurm.state(job)["JobState"] == "CANCELLED" and "requeued" not in log.read_text()


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.parametrize(
    "wrong, code, restarts", [("--training.step=5", "2:0", "0"), ("crash", "1:0", "1")]
)
def test_slurm_a_failure_is_handed_on(slurm, options, tmp_path, wrong, code, restarts):
    """A wrong option is code 2 and not tried again; a crash soon after the start is, MAX_RESTARTS
    times."""
    log, folder = tmp_path / "job.log", tmp_path / "run"
    if wrong == "crash":  # rank 0 cannot open the file that says where it is
        (folder / "logs" / "rank-00000.position").mkdir(parents=True)
    added = [f"--run.folder={folder}", *([] if wrong == "crash" else [wrong])]
    settings = f"{ONE_RANK_EACH},MAX_RESTARTS=1"
    job = slurm.submit(log, settings, "tools/launch/slurm.sh", *options, ON_ONE_RANK, *added)
    state = slurm.wait(job, log)
    text = log.read_text()
    ended = state["JobState"], state["ExitCode"], state["Restarts"]
    assert ended == ("FAILED", code, restarts), text
    assert ("Traceback" in text) == (wrong == "crash")
    soon = "soon after its start, 2 times now: not requeued"
    assert (soon if wrong == "crash" else "training.steps") in text


# Kubernetes ---------------------------------------------------------------------------------------

VALUES = {
    "NAME": "llama-8b",
    "CONFIG": "configs/llama_8b.toml",
    "IMAGE": "registry/plumbline:1",
    "NODES": "4",
    "GPUS": "8",
    "RUN": "s3://bucket/llama-8b",
    "RUNS": "emptyDir: {}",
}
SHARED = {"RUN": "/runs/llama-8b", "RUNS": "persistentVolumeClaim: {claimName: runs}"}


def manifest(**changed: str) -> list[dict]:
    import yaml

    text = Template((ROOT / "tools" / "launch" / "kubernetes.yaml").read_text())
    return list(yaml.safe_load_all(text.substitute(VALUES | changed)))


def test_the_kubernetes_manifest_fits_the_published_schemas():
    """Kubernetes 1.31, the oldest that has all of it, and the newest that the validator knows."""
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="pip install -r requirements-test.txt"
    )
    for version in ("1.31", kubernetes_validate.latest_version()):
        for document in [*manifest(), *manifest(**SHARED)]:
            kubernetes_validate.validate(document, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):  # negative control: it does look
        kubernetes_validate.validate(manifest(NODES="four")[1], "1.31", strict=True)


def test_the_kubernetes_manifest_says_what_the_documents_say():
    service, job = manifest()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    rules = [rule for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    rules = {tuple(rule["onExitCodes"]["values"]): rule["action"] for rule in rules}
    assert rules == {(2, 76): "FailJob", (75,): "Ignore"}, "train.py's exit codes"
    assert spec["completions"] == spec["parallelism"] == 4 and pod["restartPolicy"] == "Never"
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    sizes = {"NGPU": "8", "NNODES": "4", "NODE_RANK": None}
    assert environment.items() >= sizes.items() and pod["subdomain"] == "llama-8b"
    assert environment["MASTER_ADDR"] == f"llama-8b-0.{service['metadata']['name']}"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    words = (ROOT / "run_train.sh").read_text()
    assert all(f"#   {name} " in words for name in environment), "run_train.sh knows every variable"


@pytest.mark.parametrize("values", ({}, SHARED), ids=("bucket", "shared volume"))
def test_the_kubernetes_manifest_keeps_checkpoints_where_all_pods_find_them(values):
    _, job = manifest(**values)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = [word for word in container["command"] if word.startswith("--")]
    config = load_config([str(ROOT / "configs" / "llama_8b.toml"), *given])
    volume = next(volume for volume in pod["volumes"] if volume["name"] == "runs")
    assert bool(config.checkpoint.store) != ("persistentVolumeClaim" in volume)
    assert bool(config.run.mirror) == bool(config.checkpoint.store)
    assert config.run.folder.startswith("/runs/")


def test_the_skypilot_file_names_what_run_train_needs():
    import yaml

    task = yaml.safe_load((ROOT / "tools" / "launch" / "skypilot.yaml").read_text())
    assert {"resources", "num_nodes", "workdir", "setup", "run"} <= task.keys()
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert all(f"{name}=" in task["run"] for name in ("NGPU", "NNODES", "NODE_RANK", "MASTER_ADDR"))
    assert (ROOT / task["envs"]["CONFIG"]).exists()
    assert '--run.folder="$STORE"' in task["run"] and "file_mounts" not in task
    load_config([str(ROOT / task["envs"]["CONFIG"]), f"--run.folder={task['envs']['STORE']}"])
    pins = (ROOT / "requirements.txt").read_text()
    assert re.search(r"obstore==[\d.]+", task["setup"])[0] in pins
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True).returncode == 0


# Ray Train ----------------------------------------------------------------------------------------


class Ray:
    """Run tools.launch.ray_train with two workers of two ranks on a new Ray cluster. said: its
    output."""

    def __init__(self, log: Path, *words: str) -> None:
        given = as_typed(["--nodes=2", "--ranks=2", *words])
        command = [sys.executable, "-m", "tools.launch.ray_train", *given]
        here = environment(
            OMP_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME="lo",
            RAY_memory_monitor_refresh_ms="0",
            RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S=str(60 * WORKERS),
            # Ray gives a node up that has not answered five times: on a busy machine, its own
            RAY_health_check_timeout_ms=str(10_000 * WORKERS),
            RAY_health_check_failure_threshold="20",
        )
        self.log = log
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=here, stdout=file, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> "Ray":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        """Return all but the lines that Ray repeats every second."""
        lines = self.log.read_text().splitlines()
        return "\n".join(line for line in lines if "PlacementGroupCleaner" not in line)

    def train(self, folder: Path, step: int) -> None:
        """Until the run has come to that step and has a checkpoint."""
        wait_until(
            lambda: in_mid_run(folder, step) or self.process.poll() is not None, 90, self.said
        )
        assert self.process.poll() is None, self.said()

    def wait(self, seconds: float) -> int:
        """The exit code."""
        wait_until(lambda: self.process.poll() is not None, seconds, self.said)
        return self.process.returncode


# A mark and not a call in the test: without Ray the fixtures, four ranks for 100 s of processor
# time, are not made either.
RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason='Ray is not installed: pip install "ray[default,train]"',
)


@RAY
@pytest.mark.slow
@pytest.mark.alone  # on a busy machine Ray takes minutes until its first worker runs
@pytest.mark.cap(500)
def test_ray_starts_again_after_a_failure_and_goes_on(options, unbroken, tmp_path):
    """Two workers of two ranks on a local Ray; in mid-run rank 0 is killed, which is the one that
    publishes checkpoints."""
    folder = tmp_path / "run"
    with Ray(tmp_path / "said", "--max-failures=2", *options, f"--run.folder={folder}") as ray:
        ray.train(folder, 8)
        processes = map(int, filter(str.isdigit, os.listdir("/proc")))
        ranks = {pid for pid in processes if is_rank_of(pid, folder)}
        assert len(ranks) == 4, ray.said()
        about = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in ranks}
        (first,) = (pid for pid in ranks if b"\0RANK=0\0" in about[pid])
        os.kill(first, signal.SIGKILL)
        code = ray.wait(150 * WORKERS)
    assert code == 0, ray.said()
    assert "was killed by SIGKILL" in ray.said() and "resumed after step" in ray.said(), ray.said()
    assert series(folder) == unbroken


@RAY
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.cap(400)
def test_ray_stopped_by_sigterm_has_saved(options, tmp_path):
    folder = tmp_path / "run"
    endless = [*options, ON_ONE_RANK, "--training.steps=100000", f"--run.folder={folder}"]
    with Ray(tmp_path / "said", "--ranks=1", *endless) as ray:
        ray.train(folder, 8)
        ray.process.terminate()
        code = ray.wait(60 * WORKERS)
    assert code == 75, ray.said()
    assert (folder / "checkpoints" / f"step-{max(series(folder)):08d}").is_dir(), ray.said()


def is_rank_of(pid: int, folder: Path) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
    return "tools.launch.rank" in command and str(folder) in command


def test_ray_train_says_what_is_wrong_before_it_starts_ray(tmp_path):
    with Ray(tmp_path / "said", "--training.step=5", f"--run.folder={tmp_path / 'run'}") as ray:
        assert ray.wait(60 * WORKERS) == 2
        assert "training.steps" in ray.said() and "Traceback" not in ray.said()
    assert not (tmp_path / "run").exists()
