"""Records a run, once for each start, in `<run.folder>/starts/0001/`, `0002/`, ...

    start.json     command, overrides, code, versions, environment, hosts and devices, mesh
    given.toml     the configuration file as it was given
    config.toml    all options, resolved
    forecast.json  what the run was expected to reach (training/forecast.py), if that was asked
    changes.diff   how the source files differ from the commit (at most DIFF_BYTES)
    time.jsonl     seconds by kind of use: a line for each save, and a last line that every step rewrites
    end.json       exit code, step and reason; a start without this file was killed, or is still running

A restart adds a folder and changes none, so every interruption of a run is on record. Rank 0
writes. The steps of all ranks are in lockstep, so its clock is the run's (reliability/goodput.py).
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import torch

from configs import program
from configs.load import content_of
from configs.rounds import ROUND
from configs.schema import InputError, redact
from parallelisms.mesh import Mesh
from reliability import causes
from reliability.disk import NoRoom
from reliability.exit import CANNOT_WRITE, RunFailed, cannot_write
from reliability.goodput import KINDS, ORDERLY, Clock, Past, account, folders, read, read_json
from reliability.stop import Stop

logger = logging.getLogger("plumbline")

ROOT = Path(__file__).resolve().parent.parent
MOST_FAILURES = 3  # starts in a row that may fail at one step for one cause
DIFF_BYTES = 1_000_000
DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv")
FORECAST = "forecast.json"
PACKAGES = (
    "torch",
    "torchdata",
    "numpy",
    "pydantic",
    "safetensors",
    "tiktoken",
    "tokenizers",
    "rustbpe",
    "xxhash",
    "pyarrow",
    "datasets",
    "tensorboard",
    "triton",
    "wandb",
)
# The only environment variables that are recorded: none can hold a secret.
ENVIRONMENT = (
    "NGPU",
    "NNODES",
    "NODE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_RESTART_COUNT",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "NCCL_DEBUG",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "GLOO_SOCKET_IFNAME",
)
SECRET_NAME = re.compile(
    "TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE_KEY|AUTH", re.IGNORECASE
)


class Start:
    """This start of the run: a context manager around all of it. Every rank has one, but only that
    of rank 0 writes.

    code: set it to the exit code before leaving; an exception that leaves the `with` sets its own.
    reason: a few words for end.json. is_loss: whether an error comes of ranks that are lost, where the
    run goes on without them (checkpoint/rounds.py). Raises InputError if the folder cannot be written.
    """

    is_loss: ClassVar[Callable[[BaseException], bool]] = staticmethod(lambda error: False)

    def __init__(
        self,
        folder: Path,
        rank: int,
        argv: list[str],
        given: Path,
        overrides: dict,
        resolved: str,
        environ: Mapping,
    ):
        """given: the configuration file; overrides: from argv, by option; resolved: all options as
        TOML."""
        self.folder, self.code, self.reason = folder, 1, ""
        secrets = {
            value for name, value in environ.items() if SECRET_NAME.search(name) and len(value) >= 6
        }
        self.secrets = sorted(
            secrets | {json.dumps(value)[1:-1] for value in secrets}, key=len, reverse=True
        )
        self.writes = rank == 0
        self.path: Path | None = None
        if rank != 0:
            self.clock = Clock(None)
            return
        self.path, before = _new_folder(folder)
        try:
            self.clock = Clock(self.path)
            self._write("given.toml", content_of(given).decode("utf-8-sig"))
            self._write("config.toml", resolved)
            forecast = folder / FORECAST
            if forecast.is_file():
                self._write(FORECAST, forecast.read_text(encoding="utf-8", errors="replace"))
            self.facts = _facts(argv, given, overrides, environ)
            self._describe_changes(before)
            self.add()
        except OSError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            if error.errno not in CANNOT_WRITE:
                raise
            raise InputError(cannot_write(error)) from None

    def _describe_changes(self, before: Path | None) -> None:
        """Write changes.diff, or record the name of an earlier start's if the code is the same.
        before: the folder of the start before."""
        earlier = read_json(before / "start.json").get("code", {}) if before else {}
        if earlier and earlier | {"changes": ""} == self.facts["code"]:
            self.facts["code"]["changes"] = earlier["changes"]
        elif diff := changes():
            self._write("changes.diff", diff)
            self.facts["code"]["changes"] = f"{self.path.name}/changes.diff"

    def add(self, **facts: object) -> None:
        """Record facts about this start that are known only now."""
        if self.path:
            self.facts |= facts
            self.clock.record("other")
            self.clock.write()
            self._write("start.json", json.dumps(self.facts, indent=1, default=str) + "\n")

    def add_mesh(self, mesh: Mesh) -> None:
        """Record the sizes of the mesh, and its hosts. All ranks call it."""
        self.add(mesh=mesh.sizes, hosts=hosts(mesh))

    def _write(self, name: str, text: str) -> None:
        """Write a file of this start without secrets, whole or not at all."""
        text = redact(text)
        for secret in self.secrets:
            text = text.replace(secret, "***")
        new = self.path / f".{name}.tmp"
        new.write_text(text, encoding="utf-8")
        new.replace(self.path / name)

    def resume(self, step: int, origin: str = "", loaded: str = "") -> None:
        """Record that the loop goes on after this step. origin: the checkpoint of another run that
        this one started from; loaded: that of its own, or the copy of one in the memory of hosts."""
        self.clock.resume(step)
        if origin:
            self.add(origin=origin)
        if loaded:
            self.add(loaded=loaded)
        if self.path:
            total = account(read(self.folder)).seconds
            self.clock.before = {
                kind: total[kind] - self.clock.seconds.get(kind, 0.0) for kind in KINDS
            }

    def failures(self) -> tuple[int, int, str]:
        """Return the failures of the starts just before this one: (the step that none of them got
        past, how many in a row, the reason of the last). A start counts only if it had the same
        options and code as this one, so that a change of either is a new try, only if it had begun
        to train, since others say nothing about a step, if its ranks did not go on in another round
        (checkpoint/rounds.py), and only if its cause is that of the others. One that was killed
        from outside after it had done a step ends the row. (-1, 0, "") if there is none, and on
        every rank but 0."""
        none = (-1, 0, "")
        if not self.path:
            return none
        counted: list[tuple[int, str, str]] = []
        before = [past for past in read(self.folder) if past.number < int(self.path.name)]
        if before:  # what it left is written over by the next that fails
            self.add(cause_before=causes.cause(before[-1], self.facts, self.folder))
        later = self.facts
        for past in reversed(before):
            next_one, later = later, past.about
            if self._says_nothing(past) or next_one.get("round"):
                continue
            row = self._failure(past, next_one)
            if row is None or (counted and row[:2] != counted[0][:2]):
                break
            counted.append(row)
        if not counted:
            return none
        step, _, reason = counted[0]
        return step, len(counted), reason

    def _says_nothing(self, past: Past) -> bool:
        """Return whether a start did not begin to train, or ended in order before it had done a
        step."""
        steps = past.steps
        did_nothing = not steps or steps[0]["step"] == steps[-1]["step"]
        return not steps or (past.ended.get("exit_code") in ORDERLY and did_nothing)

    def _failure(self, past: Past, later: dict) -> tuple[int, str, str] | None:
        """Return the last step of a start that failed, the cause, and the reason in its words; None
        if it was another run's, did not fail, or was killed from outside while it went on."""
        config = self.path.with_name(f"{past.number:04d}") / "config.toml"
        if _set_options(config) != _set_options(self.path / "config.toml"):
            return None
        if past.about.get("code", {}).get("files") != self.facts["code"]["files"]:
            return None
        if past.ended.get("exit_code") in ORDERLY:
            return None
        first, last = past.steps[0]["step"], past.steps[-1]["step"]
        why = causes.cause(past, later, self.folder)
        if not why and last > first:
            return None
        return last, why, past.ended.get("reason", why or "a kill")

    def fails_again_and_again(self, mesh: Mesh) -> bool:
        """Return whether at least MOST_FAILURES starts in a row just before this one failed after
        the same step. Called by all ranks."""
        failed_step, count, reason = mesh.gather(self.failures())[0]
        if count < MOST_FAILURES:
            return False
        self.reason = (
            f"not started: {count} starts in a row failed after step {failed_step}, "
            f"the last one with {reason}"
        )
        if mesh.rank == 0:
            logger.error(
                f"{self.reason}. See {self.folder / 'starts'}, and {self.folder / 'logs'} for every "
                "rank; it is tried again when an option or the code has changed (after a repair of "
                "the machine any will do, such as --run.init_timeout_seconds=601)"
            )
        return True

    def summary(self) -> str:
        """Summarise in one line where the time of the whole run went. Only rank 0 calls it."""
        self.clock.record("other")
        self.clock.write()
        return account(read(self.folder)).line()

    def end(self, code: int, reason: str) -> None:
        """Write end.json and close the clock. `with` calls it; call it by hand before an exit that
        unwinds no stack."""
        program.decided(code)
        if self.path:
            try:
                # After a failure the seconds since the last step count as detecting: the run waited
                # in vain.
                if code in ORDERLY or not self.clock.started:
                    self.clock.record("other")
                    self.clock.write()
                about = {
                    "ended": _utc(),
                    "exit_code": code,
                    "step": self.clock.at,
                    "reason": reason,
                }
                self._write("end.json", json.dumps(about, indent=1) + "\n")
            except OSError as error:
                if self.path.is_dir():  # where it was removed the run ends, and says so
                    logger.warning(
                        f"{self.path / 'end.json'} cannot be written ({error.strerror}): this start, "
                        f"which ends with exit code {code}, will count as killed"
                    )
            self.clock.close()
        self.path = None

    def _leave_nothing(self) -> None:
        """Remove the record of a start that was refused because the disk has no room."""
        record = self.path
        self.end(2, "no room")
        if record:
            shutil.rmtree(record, ignore_errors=True)
            with contextlib.suppress(OSError):  # others are there
                record.parent.rmdir()

    def __enter__(self) -> "Start":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            stopped = "stopped on request with a checkpoint"
            if Stop.left_in_last:
                stopped = "goes on with the ranks that have come"
            self.end(self.code, self.reason or {0: "done", 75: stopped}.get(self.code, ""))
        elif kind is KeyboardInterrupt:
            self.end(130, "interrupted before training began")
        elif isinstance(error, SystemExit):
            self.end(error.code if isinstance(error.code, int) else 1, self.reason)
        elif isinstance(error, NoRoom):
            self._leave_nothing()
        else:
            is_full = isinstance(error, OSError) and error.errno in CANNOT_WRITE
            refused = (isinstance(error, InputError) or is_full) and not self.clock.started
            refused &= not isinstance(error, RunFailed)
            removed = self._removed()
            is_cause = removed and isinstance(error, (InputError, OSError))
            lost = "ranks were lost: " * Start.is_loss(error)
            self.end(2 if refused else 1, f"{lost}{kind.__name__}: {str(error)[:2000]}")
            if isinstance(error, RunFailed):
                return
            if is_cause and (self.writes or isinstance(error, FileNotFoundError)):
                raise RunFailed(removed) from error
            if isinstance(error, InputError) and not refused:
                raise RunFailed(str(error)) from error
            if is_full and refused:
                raise InputError(cannot_write(error)) from error

    def end_if(self, removed: bool) -> None:
        """End the run if its folder was removed. Called by all ranks after the same step, before
        it is logged: nothing is written where someone removes everything."""
        if not removed:
            return
        error = RunFailed(self._removed() or self._sentence(self.folder))
        error.is_common = True  # type: ignore[attr-defined]
        raise error

    def _removed(self) -> str:
        """Return a sentence if the run's folder was removed, or this start's record; "" if not."""
        if not self.folder.is_dir():
            return self._sentence(self.folder)
        return self._sentence(self.clock.path.parent) if self.clock.is_gone() else ""

    def _sentence(self, place: Path) -> str:
        return (
            f"{place} was removed during the run, which ends here: the same command goes on from "
            "the newest checkpoint, if one is left"
        )


# What is known about this process -----------------------------------------------------------------


def _facts(argv: list[str], given: Path, overrides: dict, environ: Mapping) -> dict[str, Any]:
    """Return what start.json says when a start begins."""
    return {
        "began": _utc(),
        "command": [sys.executable, sys.argv[0], *argv],
        "config": str(given),
        "overrides": overrides,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "folder": str(Path.cwd()),
        "code": code(),
        "versions": versions(),
        "memory_kills": causes.memory_kills(),
        "round": int(environ.get(ROUND, 0)),
        "environment": {name: environ[name] for name in ENVIRONMENT if name in environ},
    }


def code() -> dict:
    """Return the commit ("" outside a git checkout) and a hash of each source file, so that code
    can be compared anywhere."""
    return {"commit": _git("rev-parse", "HEAD").strip(), "changes": "", "files": source_files()}


@functools.cache  # those that this process runs: they may be edited while it does
def source_files() -> dict[str, str]:
    packages = (
        path.parent
        for path in ROOT.glob("*/__init__.py")
        if path.parent.name not in ("tests", "tools", "lab")
    )
    ours = [*ROOT.glob("*.py"), *(path for package in packages for path in package.rglob("*.py"))]
    return {
        str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for path in sorted(ours)
    }


def source_hash() -> str:
    """Hash all source files, which must be the same on every rank of a run."""
    return hashlib.sha256(json.dumps(source_files()).encode()).hexdigest()[:12]


def same_on_all_ranks(options: str, corpora: Any) -> dict[str, str]:
    """Return all that must be equal on the ranks of a run: configuration, data and code. options:
    the resolved configuration, as TOML; corpora: a data/loader.py::Corpora."""
    return {
        "config": options,
        "torch": torch.__version__,
        "data": json.dumps(corpora.description),
        "code": source_hash(),
        "tokenizer": corpora.tokenizer.fingerprint,
    }


def changes() -> str:
    """Return the diff of the source files, new ones included, from the commit: at most DIFF_BYTES
    characters."""
    sources = ("--", ".", ":!tests", ":!tools", ":!docs")
    diff = _git(*DIFF, "HEAD", *sources)
    new = _git("ls-files", "--others", "--exclude-standard", "--", "*.py", ":!tests", ":!tools")
    for name in new.splitlines():
        if len(diff) < DIFF_BYTES:
            diff += _git(*DIFF, "--no-index", "--", os.devnull, name)
    if len(diff) <= DIFF_BYTES:
        return diff
    return (
        diff[:DIFF_BYTES]
        + f"\n[cut: this diff has {len(diff):,} characters; the first {DIFF_BYTES:,} are here]\n"
    )


def _git(*arguments: str) -> str:
    """Return git's output about this checkout; "" if there is no git, no checkout, or no answer
    within 20 seconds."""
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace")


def versions() -> dict[str, str]:
    installed = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda or "",
    }
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    installed["torch"] = torch.__version__  # the metadata do not say which build it is
    if torch.cuda.is_available():
        installed["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return installed


def hosts(mesh: Mesh) -> list[dict]:
    """List each host with its ranks and their kind of device. All ranks call it."""
    name = "cpu" if mesh.device.type == "cpu" else torch.cuda.get_device_name(mesh.device)
    ranks_by_host: dict[tuple, list[int]] = {}
    for rank, host_and_device in enumerate(mesh.gather((socket.gethostname(), name))):
        ranks_by_host.setdefault(host_and_device, []).append(rank)
    return [
        {"host": host, "device": device, "ranks": ranks}
        for (host, device), ranks in ranks_by_host.items()
    ]


def _new_folder(folder: Path) -> tuple[Path, Path | None]:
    """Make the folder of this start; returns it and the folder of the start before."""
    try:
        (folder / "starts").mkdir(parents=True, exist_ok=True)
        while True:
            others = folders(folder)
            path = folder / "starts" / f"{int(others[-1].name) + 1 if others else 1:04d}"
            # two runs started at once: one of them will be refused
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path, others[-1] if others else None
    except OSError as error:
        raise InputError(
            f"run.folder = {str(folder)!r} cannot be written ({error.filename}: "
            f"{error.strerror}): choose another"
        ) from None


def _set_options(config: Path) -> list[str]:
    """Return the lines of a resolved configuration that set something. Its comments are left out:
    they have numbers that follow from the mesh, and a run on a different mesh has the same
    configuration. [] for a file that is missing."""
    try:
        lines = config.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if not line.startswith("#")]


def _utc() -> str:
    return datetime.now(timezone.utc).isoformat(" ", "seconds")
