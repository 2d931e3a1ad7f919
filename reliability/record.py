"""What a run writes about itself, once for each start, in `<run.folder>/starts/0001/`, `0002/`, ...

    start.json     command, overrides, code, versions, environment, hosts and devices, mesh
    given.toml     the configuration file as it was given; `config.toml` is the configuration as it was resolved
    changes.diff   what the code has beyond its commit (sources alone, at most DIFF_BYTES)
    time.jsonl     what the seconds went into: one line for each save, and a last one that is rewritten at every step
    end.json       exit code, step and reason. A start without it was killed, or is still running

A restart adds a folder and changes none, so every interruption of a run is on record. Rank 0 writes; the steps of all
ranks are in lockstep, so its clock is the run's (reliability/goodput.py).
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from configs.schema import InputError, redact
from parallelisms.mesh import Mesh
from reliability.goodput import KINDS, ORDERLY, Clock, account, folders, read, read_json

ROOT = Path(__file__).resolve().parent.parent
DIFF_BYTES = 1_000_000
PACKAGES = (
    "torch", "torchdata", "numpy", "pydantic", "safetensors", "tiktoken", "tokenizers", "rustbpe", "xxhash", "pyarrow",
    "datasets", "tensorboard", "triton", "wandb",
)  # fmt: skip
# The only environment variables that are recorded: none can hold a secret.
ENVIRONMENT = (
    "NGPU", "NNODES", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT", "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "NCCL_DEBUG", "NCCL_ALGO", "NCCL_PROTO", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "GLOO_SOCKET_IFNAME",
)  # fmt: skip
SECRET_NAME = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE_KEY|AUTH", re.IGNORECASE)


class Start:
    """This start of the run; a context manager around all of it. Every rank has one, only rank 0's writes.

    code: set it to the exit code before leaving; an exception that passes gives its own. reason: a few words for
    end.json. Raises InputError if the folder cannot be written.
    """

    def __init__(
        self, folder: Path, rank: int, argv: list[str], given: Path, overrides: dict, resolved: str, environ: Mapping
    ):
        """given: the configuration file; overrides: by option, from argv; resolved: all options as TOML."""
        self.folder, self.code, self.reason = folder, 1, ""
        secrets = {value for name, value in environ.items() if SECRET_NAME.search(name) and len(value) >= 6}
        self.secrets = sorted(secrets | {json.dumps(value)[1:-1] for value in secrets}, key=len, reverse=True)
        self.path: Path | None = None
        if rank == 0:
            self.path, before = _new_folder(folder)
        self.clock = Clock(self.path)
        if rank != 0:
            return
        self._write("given.toml", given.read_text(encoding="utf-8-sig"))
        self._write("config.toml", resolved)
        self.facts = {
            "began": _utc(), "command": [sys.executable, sys.argv[0], *argv], "config": str(given), "overrides": overrides,
            "host": socket.gethostname(), "pid": os.getpid(), "folder": str(Path.cwd()), "code": code(),
            "versions": versions(), "environment": {name: environ[name] for name in ENVIRONMENT if name in environ},
        }  # fmt: skip
        self._describe_changes(before)
        self.add()

    def _describe_changes(self, before: Path | None) -> None:
        """changes.diff, or the name of an earlier start's that is the same."""
        earlier = read_json(before / "start.json") if before else {}
        if earlier.get("code", {}) | {"changes": ""} == self.facts["code"] | {"changes": ""} and earlier.get("code"):
            self.facts["code"]["changes"] = earlier["code"]["changes"]
        elif diff := changes():
            self._write("changes.diff", diff)
            self.facts["code"]["changes"] = f"{self.path.name}/changes.diff"

    def add(self, **facts: object) -> None:
        """More about this start, known only later."""
        if self.path:
            self.facts |= facts
            self.clock.lap("other")
            self.clock.write()
            self._write("start.json", json.dumps(self.facts, indent=1, default=str) + "\n")

    def _write(self, name: str, text: str) -> None:
        """Without secrets; whole or not at all."""
        text = redact(text)
        for secret in self.secrets:
            text = text.replace(secret, "***")
        new = self.path / f".{name}.tmp"
        new.write_text(text, encoding="utf-8")
        new.replace(self.path / name)

    def resume(self, step: int) -> None:
        """The loop goes on after this step: at the start, and where a run goes back to a checkpoint by itself."""
        self.clock.resume(step)
        if self.path:
            total = account(read(self.folder)).seconds
            self.clock.before = {kind: total[kind] - self.clock.seconds.get(kind, 0.0) for kind in KINDS}

    def failures(self) -> tuple[int, int, str]:
        """How the starts just before this one failed: (the step that none of them came beyond, how many in a row, the reason
        of the last). Only those with the options and the code of this one count, so a change of either is another try, and
        only those that had begun to train: others say nothing about a step. On rank 0; elsewhere (-1, 0, "")."""
        step, times, reason = -1, 0, ""
        before = [past for past in read(self.folder) if past.number < int(self.path.name)] if self.path else []
        for past in reversed(before):
            orderly, steps = past.ended.get("exit_code") in ORDERLY, past.steps
            if not steps or (orderly and steps[0]["step"] == steps[-1]["step"]):
                continue
            theirs = self.path.with_name(f"{past.number:04d}") / "config.toml"
            same = _set_options(theirs) == _set_options(self.path / "config.toml")
            if not same or past.about.get("code", {}).get("files") != self.facts["code"]["files"]:
                break
            if orderly or step not in (-1, steps[-1]["step"]):
                break
            step, times, reason = steps[-1]["step"], times + 1, reason or past.ended.get("reason", "a kill")
        return step, times, reason

    def summary(self) -> str:
        """One line about where the time of the whole run went, for a person. On rank 0."""
        self.clock.lap("other")
        self.clock.write()
        return account(read(self.folder)).line()

    def end(self, code: int, reason: str) -> None:
        """The last word of this start. Called by `with`; by hand before an exit that unwinds no stack."""
        if self.path:
            with contextlib.suppress(OSError):  # a full disk has had its sentence
                if code in ORDERLY or not self.clock.started:  # else it waited in vain: from the last step on that is detecting
                    self.clock.lap("other")
                    self.clock.write()
                about = {"ended": _utc(), "exit_code": code, "step": self.clock.at, "reason": reason}
                self._write("end.json", json.dumps(about, indent=1) + "\n")
            self.clock.close()
        self.path = None

    def __enter__(self) -> "Start":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            self.end(self.code, self.reason or {0: "done", 75: "stopped on request with a checkpoint"}.get(self.code, ""))
        elif kind is KeyboardInterrupt:
            self.end(130, "interrupted before training began")
        elif isinstance(error, SystemExit):
            self.end(error.code if isinstance(error.code, int) else 1, self.reason)
        else:
            self.end(2 if isinstance(error, InputError) else 1, f"{kind.__name__}: {str(error)[:2000]}")


# What is known about this process ---------------------------------------------------------------------------------------


def code() -> dict:
    """The commit (empty outside of a git checkout) and a hash of each source file, so that code can be compared anywhere."""
    return {"commit": _git("rev-parse", "HEAD").strip(), "changes": "", "files": source_files()}


def source_files() -> dict[str, str]:
    packages = (path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name not in ("tests", "tools"))
    ours = [*ROOT.glob("*.py"), *(path for package in packages for path in package.rglob("*.py"))]
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in sorted(ours)}


def source_hash() -> str:
    """One for all source files: what every rank of a run must have alike."""
    return hashlib.sha256(json.dumps(source_files()).encode()).hexdigest()[:12]


def changes() -> str:
    """What the sources have beyond the commit, new files included, as a diff of at most DIFF_BYTES characters."""
    sources = ("--", ".", ":!tests", ":!tools", ":!docs")
    diff = _git("diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv", *sources)
    for name in _git("ls-files", "--others", "--exclude-standard", "--", "*.py", ":!tests", ":!tools").splitlines():
        if len(diff) < DIFF_BYTES:
            diff += _git("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-index", "--", os.devnull, name)
    if len(diff) <= DIFF_BYTES:
        return diff
    return diff[:DIFF_BYTES] + f"\n[cut: this diff has {len(diff):,} characters; the first {DIFF_BYTES:,} are here]\n"


def _git(*arguments: str) -> str:
    """What git says about this checkout; nothing if there is no git, no checkout, or no answer within seconds."""
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform(), "cuda": torch.version.cuda or ""}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def hosts(mesh: Mesh) -> list[dict]:
    """Each host with its ranks and their kind of device. Called by all ranks."""
    name = "cpu" if mesh.device.type == "cpu" else torch.cuda.get_device_name(mesh.device)
    found: dict[tuple, list[int]] = {}
    for rank, who in enumerate(mesh.gather((socket.gethostname(), name))):
        found.setdefault(who, []).append(rank)
    return [{"host": host, "device": device, "ranks": ranks} for (host, device), ranks in found.items()]


def _new_folder(folder: Path) -> tuple[Path, Path | None]:
    """The folder of this start, made here, and that of the start before."""
    try:
        (folder / "starts").mkdir(parents=True, exist_ok=True)
        while True:
            others = folders(folder)
            path = folder / "starts" / f"{int(others[-1].name) + 1 if others else 1:04d}"
            with contextlib.suppress(FileExistsError):  # two runs that start at once: one of them will be refused
                path.mkdir()
                return path, others[-1] if others else None
    except OSError as error:
        raise InputError(
            f"run.folder = {str(folder)!r} cannot be written ({error.filename}: {error.strerror}): choose another one"
        ) from None


def _set_options(config: Path) -> list[str]:
    """The lines of a resolved configuration that set something. Its comments have numbers that follow from the mesh, and
    another mesh is not another configuration."""
    return [line for line in config.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]


def _utc() -> str:
    return datetime.now(timezone.utc).isoformat(" ", "seconds")
