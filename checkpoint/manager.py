"""Checkpoints of a run: saves them whole, chooses the one to resume from, and removes old ones.

To save, a thread copies the state (`state.stage`) while training goes on with the next forward and
backward, which only read it. The optimizer's next step waits until the copy is made. The thread of
each rank then writes the rank's file into a temporary folder and syncs it, and rank 0 adds the
manifest and renames the folder to `step-00000100`. So at any moment a crash leaves the earlier
checkpoints as they were, and at most a temporary folder that the next start removes. The threads
use a gloo group of their own, because their messages and training's would otherwise mix. One save
is in flight at a time.

It is a thread because that is simpler than a process and measures no worse: a step that never waits
for anything else takes as long beside a save as beside another process that writes as many bytes
(`tools/bench/beside.py`). For that, what the thread does is a few long calls of C, in which
training has Python's lock (`storage.Staged`).

To resume, rank 0 chooses a checkpoint, all ranks read it into buffers and verify every byte they
use, and only when all agree does the live state change. A damaged checkpoint is reported, and the
newest good one before it is used. Whatever a person must decide is an InputError, the same on every
rank.
"""

import concurrent.futures
import datetime
import fnmatch
import json
import logging
import re
import shutil
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from checkpoint import state, storage, verify
from checkpoint.lease import Lease, Lost
from checkpoint.protocol import FileWriter, OwnParts, on_every_rank
from checkpoint.retention import Retention
from checkpoint.state import STAGING
from checkpoint.storage import GENERATOR, NotFinite, OneByOne, Plan, Staged
from checkpoint.verify import Damaged
from configs import schema
from configs.schema import InputError
from parallelisms.mesh import Mesh, world
from reliability import disk

# for the slowest rank to write its part; a dead process is noticed at once
PATIENCE = datetime.timedelta(minutes=30)
TEMPORARY = re.compile(r"\.(tmp|del)-[0-9a-f]{8}-[0-9]+-step-[0-9]{8,}(\.[0-9]+)?")
NOTES = {  # what is said where host memory is too short for checkpoint.async_save as it is meant
    "pageable": "the buffers for checkpoints are not pinned, so copies from the GPU are slower",
    "none": (
        "training waits for each save, which copies one tensor after the other (as with "
        "checkpoint.async_save = false)"
    ),
}
say = logging.getLogger("plumbline")


class CheckpointManager:
    """Every method is called by all ranks at the same step.

    facts: JSON put into every manifest; `facts["must_match"]`, nested or not, must be equal in a
    checkpoint that is resumed.
    """

    def __init__(self, cfg: schema.Checkpoint, folder: Path, mesh: Mesh, facts: dict):
        self.cfg, self.folder, self.mesh = cfg, Path(folder), mesh
        self.facts = json.loads(json.dumps(facts))  # as it will be read back, with lists for tuples
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.in_flight: tuple[int, concurrent.futures.Future] | None = None
        self.plan: Plan | None = None  # of the parts that this rank writes
        self.kind: list[tuple] = []  # of the state that the plan is for
        # memory for a copy of those parts; None if they are written one by one
        self.staged: Staged | None = None
        self.copied = threading.Event()  # the state that is being saved may change
        self.copied.set()
        # set when the GPU's part of that copy is made
        self.on_device: torch.cuda.Event | None = None
        self.waits: Any = None  # the handle of the optimizer's hook
        self.stalled, self.marks = 0.0, []  # seconds it has waited; GPU events around pending waits
        self.attempt = self.saves = self.failures = 0
        self.last_step = -1  # of the checkpoint that was loaded or saved last
        # checkpoints that this run's state descends from, oldest first
        self.ancestors: list[str] = []
        self.origin = ""  # the checkpoint of another run that this one started from
        self.lease: Lease | None = None  # rank 0 only, as is the next
        self.retention: Retention | None = None
        self.run_id = self._on_rank_0(self._open_folder)

    def _open_folder(self) -> str:
        """Become the only run that writes here, and have the thread remove what an earlier run left
        unfinished."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for parent in (self.folder.parent, self.folder.parent.parent):
            # a folder whose name a power cut takes away is lost with all that was synced in it
            disk.sync(parent)
        self.lease = Lease(self.folder / ".lease")
        self.retention = Retention(self.folder, self.lease, self.cfg)
        ours, leftovers = {".lease", *verify.published(self.folder)}, []
        for path in self.folder.iterdir():
            if TEMPORARY.fullmatch(path.name) and not path.is_symlink():
                leftovers.append(path)
            elif path.name not in ours:
                say.warning(f"{path} is not a checkpoint of this run and is left alone")
        self.retention.remove_leftovers(leftovers)
        return self.lease.id

    def _on_rank_0(self, fn: Callable, *args: object) -> Any:
        """Call fn(*args) on rank 0. Every rank returns its result, or raises the exception that it
        raised."""
        answer: list[Any] = [None, None]
        if self.mesh.rank == 0:
            try:
                answer[0] = fn(*args)
            except (InputError, Damaged) as error:
                answer[1] = error
            except OSError as error:
                failure = f"{error.filename or self.folder}: {error.strerror or error}"
                answer[1] = InputError(f"checkpoints cannot be kept in {self.folder}: {failure}")
            # any error: the other ranks must not wait for an answer that never comes
            except Exception:
                answer[1] = RuntimeError(traceback.format_exc())
        dist.broadcast_object_list(answer, src=0, group=self.group)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    # Saving

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict
    ) -> None:
        """Save the state as it is at this call. Returns at once, unless the previous save is still
        being written or cfg.async_save is off. A step that is saved already is not saved again.

        After this call `optimizer.step()` waits for the copy of the state by itself. Code that
        changes the state in any other way must call `wait_for_copy` first. `poll` reports failures.
        Raises InputError as `poll` does.
        """
        began = time.monotonic()
        self._finish()
        if (waited := time.monotonic() - began) > 1:
            self._say(
                logging.WARNING,
                f"step {step} waited {waited:.1f} s for the checkpoint before it to be written",
            )
        if step == self.last_step:
            return
        live = state.tensors(model, optimizer)
        self.waits = self.waits or optimizer.register_step_pre_hook(lambda *_: self.wait_for_copy())
        self.copied.clear()
        computed = (
            torch.cuda.current_stream().record_event() if self.mesh.device.type == "cuda" else None
        )
        head = self._manifest_head(step, optimizer, progress)
        self.in_flight = step, self.thread.submit(self._write, step, live, computed, head)
        if not self.cfg.async_save or (self.plan and not self.staged):
            self._finish()

    def _copy(self, live: dict, computed: torch.cuda.Event | None) -> None:
        """Runs in the thread, and returns when the copy is made. The optimizer may go on once the
        GPU has it queued."""
        self.on_device = state.stage(live, self.staged.tensors, computed)
        self.copied.set()
        if self.on_device:
            self.on_device.synchronize()

    def wait_for_copy(self) -> None:
        """Wait until the state that is being saved is copied. On a GPU the stream waits, not the
        caller."""
        began = time.monotonic()
        self.copied.wait()
        self.stalled += time.monotonic() - began
        if self.on_device and not self.on_device.query():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            torch.cuda.current_stream().wait_event(self.on_device)
            after.record()
            self.marks.append((before, after))

    def stall(self) -> float:
        """Seconds that `optimizer.step()` (on a GPU: its stream) has waited for copies since the
        last call of this."""
        while self.marks and self.marks[0][1].query():
            before, after = self.marks.pop(0)
            self.stalled += before.elapsed_time(after) / 1000
        seconds, self.stalled = self.stalled, 0.0
        return seconds

    def _manifest_head(self, step: int, optimizer: torch.optim.Optimizer, progress: dict) -> dict:
        head = {
            "format": verify.FORMAT,
            "step": step,
            "progress": progress,
            "mesh": self.mesh.sizes,
            "facts": self.facts,
            "optimizer": type(optimizer).__name__,
            "hyperparameters": state.hyperparameters(optimizer),
            "parent": self.ancestors[-1] if self.ancestors else self.origin,
            "ancestors": list(self.ancestors),
            "torch": torch.__version__,
            "saved": datetime.datetime.now(datetime.timezone.utc).isoformat(" ", "seconds"),
        }
        # a copy as it will be read back; what is not JSON fails here, on all ranks
        return json.loads(json.dumps(head))

    def _write(self, step: int, live: dict, computed: torch.cuda.Event | None, head: dict) -> None:
        """Runs in the thread, on all ranks: copy, write and publish, then ask for the removal of
        what has expired. If it fails, all ranks raise the same kind of error."""
        self.saves += 1
        name = verify.step_name(step, self.attempt)
        temporary = self.folder / f".tmp-{self.run_id}-{self.saves}-{name}"
        planner = OwnParts(lambda: self._prepare(live, computed))
        writer = FileWriter(
            temporary, self.group, lambda files: self._publish(temporary, name, head, files)
        )
        try:
            dcp.save(
                {},
                storage_writer=writer,
                planner=planner,
                process_group=self.group,
                use_collectives=False,
            )
        except BaseException:
            if self.retention:  # what has been written so far may be what fills the disk
                self.retention.remove_leftovers([temporary])
            raise
        finally:
            self.copied.set()  # if the save failed before the copy, training must not wait for it
        self.ancestors.append(name)
        if self.retention:
            self.ancestors = [name for name in self.ancestors if name not in self.retention.gone]
            self.retention.remove_expired(self.ancestors, self.saves)

    def _make_plan(self, live: dict) -> None:
        """Choose the parts that this rank writes, unless the state is of the same kind as at the
        last call. All ranks call this with states of the same kind."""
        if (kind := storage.kind_of(live)) == self.kind:
            return
        # ranks that have the same layers; they are neighbours
        stage = self.mesh.size // self.mesh.pp
        holders = range(self.mesh.pp_rank * stage, (self.mesh.pp_rank + 1) * stage)
        rows = on_every_rank(self.group, storage.describe, live, self.mesh.size, holders)
        rows = storage.share_rows(rows, self.group)
        self.plan = on_every_rank(self.group, Plan.make, live, rows, self.mesh.rank)
        self.kind, self.staged = kind, self._host_memory() if self.cfg.async_save else None

    def _host_memory(self) -> Staged | None:
        """Host memory for copies of this rank's parts, as far as it goes: the ranks agree on the
        kind that fits on all."""
        kind = state.staging(
            self.plan.nbytes,
            state.free_host_memory(),
            world().local_size,
            pin=self.mesh.device.type == "cuda",
        )
        least = torch.tensor(STAGING.index(kind))
        dist.all_reduce(least, dist.ReduceOp.MAX, self.group)
        if (agreed := STAGING[least]) != (
            "pinned" if self.mesh.device.type == "cuda" else "pageable"
        ):
            self._say(logging.WARNING, f"host memory is short: {NOTES[agreed]}")
        return None if agreed == "none" else Staged(self.plan, pin=agreed == "pinned")

    def _prepare(
        self, live: dict, computed: torch.cuda.Event | None
    ) -> tuple[Plan, OneByOne | Staged]:
        """The parts that this rank writes, and their bytes. If there is memory for a copy, this
        makes it, and then training goes on."""
        self._make_plan(live)
        if not self.staged:
            return self.plan, OneByOne(live)
        self._copy(live, computed)
        self.staged.check_finite()
        return self.plan, self.staged

    def _publish(self, temporary: Path, name: str, head: dict, files: list) -> None:
        """Runs on rank 0 when every rank's file is written and synced."""
        verify.write_manifest(temporary, {**head, "files": files, "tensors": self.plan.table})
        self.lease.check()
        temporary.rename(self.folder / name)
        disk.sync(self.folder)

    def writing(self) -> bool:
        """Whether this rank has not finished its part of the save in flight."""
        return self.in_flight is not None and not self.in_flight[1].done()

    def poll(self, any_rank_writing: bool | None = None) -> None:
        """Report a save that has ended. All ranks call this after every step, and before the next
        `save`.

        any_rank_writing: whether `writing()` was true on any rank when they last told each other
        (`train.Flags`); if None, this asks all ranks, which is a collective.

        Raises InputError after cfg.max_failures failed saves in a row, and NotFinite at once if the
        state to be saved is not finite, so that training on is pointless: on every rank, at the
        same step.
        """
        if self.in_flight is not None:
            writing = (
                self.mesh.any_rank(self.writing()) if any_rank_writing is None else any_rank_writing
            )
            if not writing:
                self._finish()

    def _finish(self) -> None:
        """Wait for the save in flight, and report it. All ranks call it."""
        if self.in_flight is None:
            return
        step, future = self.in_flight
        concurrent.futures.wait([future])
        self.in_flight, error = None, future.exception()
        if not self.mesh.any_rank(error is not None):
            self.failures, self.last_step = 0, step
            return
        cause = f"{error}" if error else "another rank failed"
        if isinstance(error, NotFinite):
            raise NotFinite(
                f"step {step} left a state that is not finite, so it is not saved: {cause}"
            )
        self.failures += 1
        reason = f"the checkpoint of step {step} could not be written to {self.folder}: {cause}"
        if isinstance(error, Lost):
            raise InputError(reason)
        if self.cfg.max_failures and self.failures >= self.cfg.max_failures:
            raise InputError(
                f"{reason} ({self.failures} in a row: checkpoint.max_failures); the others are "
                "untouched"
            )
        self._say(
            logging.ERROR,
            f"{reason}. Training goes on, and the next checkpoint is tried when it is due",
        )

    def wait(self, seconds: float) -> None:
        """Let the save in flight end, on the way out after an error. It asks no other rank, and
        raises nothing."""
        if self.in_flight:
            concurrent.futures.wait([self.in_flight[1]], timeout=seconds)

    def close(self) -> None:
        """Wait for the save in flight, and give the folder back. Raises InputError if the last save
        failed."""
        try:
            self._finish()
        finally:
            self.thread.shutdown()
            if self.lease:
                self.retention.close()
                self.lease.release()
        if self.failures:
            raise InputError(
                f"the run has ended, but its last checkpoint could not be written to {self.folder}"
            )

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """The loop that saves is the body of a `with`: an error in it must not cost the save in
        flight."""
        if kind is None:
            self.close()
        else:
            self.wait(60)

    # Loading

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict | None:
        """Resume from the newest whole checkpoint of this run, or from that of cfg.load_step, and
        return its progress. Returns None for a fresh start, which takes the weights of
        cfg.load_path if it is set.

        Raises InputError where a fresh start would hide a mistake: the step is missing, none of the
        checkpoints can be read, or the checkpoint is of a different model, data or seed.
        """
        state.materialise(optimizer)
        live = state.tensors(model, optimizer)
        names = self._on_rank_0(
            self._choose, sum(t.numel() * t.element_size() for t in live.values())
        )
        self._make_plan(live)
        manifest = self._resume(names, live, optimizer) if names else self._start_from(live)
        return manifest["progress"] if names else None

    def _choose(self, size: int) -> list[str]:
        """Names of this run's checkpoints, newest first. size: bytes of one checkpoint. Raises
        InputError if the disk has no room for one."""
        if shutil.disk_usage(self.folder).free < size:
            # what an earlier run left may be what fills the disk
            self.retention.wait(PATIENCE.total_seconds() / 2)
        if (free := shutil.disk_usage(self.folder).free) < size:
            raise InputError(
                f"{self.folder} has {free / 1e6:,.1f} MB free, one checkpoint of this run takes "
                f"{size / 1e6:,.1f} MB: "
                "make room"
            )
        names, step = verify.published(self.folder), self.cfg.load_step
        steps = sorted({_step(name) for name in names})
        if step >= 0 and step not in steps:
            raise InputError(
                f"checkpoint.load_step = {step}, but {self.folder} holds only steps {steps}"
            )
        return names

    def _resume(self, names: list[str], live: dict, optimizer: torch.optim.Optimizer) -> dict:
        """Load the first of `names` that is whole. If one is damaged, only its ancestors are tried
        next, never steps of a future that the run had abandoned."""
        step = self.cfg.load_step
        candidates = names if step < 0 else [name for name in names if _step(name) == step][:1]
        while candidates:
            name, manifest = candidates[0], None
            try:
                manifest = self._on_rank_0(self._manifest_of, name)
                self._check_same_run(name, manifest, optimizer)
                same_mesh = manifest["mesh"] == self.mesh.sizes
                self._read(self.folder / name, manifest, live, "model+optimizer", rng=same_mesh)
                break
            except Damaged as error:
                if step >= 0:
                    raise InputError(
                        f"checkpoint.load_step = {step}, but {name} is damaged: {error}"
                    ) from None
                self._say(logging.ERROR, f"{name} is damaged and not used: {error}")
                earlier = [n for n in candidates if _step(n) < _step(name)]
                candidates = [n for n in earlier if not manifest or n in manifest["ancestors"]]
        else:
            raise InputError(
                f"none of the checkpoints in {self.folder} that this run could go on from can be "
                "read (see above): "
                "look at them with `python -m checkpoint.verify --all`; to start afresh, move "
                "them away"
            )
        self.attempt = verify.parse_name(names[0])[0] + (name != names[0])
        self.ancestors = [n for n in manifest["ancestors"] if n in names] + [name]
        self.last_step = manifest["step"]
        if step >= 0 and name != names[0]:
            self._say(
                logging.WARNING,
                f"checkpoint.load_step = {step} goes back from {names[0]}, now and at every "
                "restart: remove it once "
                "there is a newer checkpoint",
            )
        for line in state.mismatches(manifest["hyperparameters"], state.hyperparameters(optimizer)):
            self._say(logging.WARNING, f"optimizer {line}: the config's value is used")
        return manifest

    def _start_from(self, live: dict) -> None:
        """A new run from the weights of another: its newest checkpoint, or the one that load_path
        names."""
        if not self.cfg.load_path:
            return
        for pattern in self.cfg.exclude_from_loading:
            if not fnmatch.filter(live, pattern):
                raise InputError(
                    f"checkpoint.exclude_from_loading: no tensor of this run is called {pattern!r}"
                )
        path = self._on_rank_0(verify.newest, Path(self.cfg.load_path))
        try:
            manifest = self._on_rank_0(verify.read_manifest, path)
            self._read(
                path,
                manifest,
                live,
                self.cfg.load_path_content,
                exclude=self.cfg.exclude_from_loading,
            )
        except Damaged as error:
            raise InputError(f"checkpoint.load_path: {path} is damaged: {error}") from None
        self.origin = str(path)
        self._say(logging.INFO, f"a new run from the {self.cfg.load_path_content} of {path}")
        for line in self._unlike(manifest):
            self._say(logging.WARNING, f"checkpoint.load_path: {line}")

    def _unlike(self, manifest: dict) -> list[str]:
        return state.mismatches(
            manifest["facts"].get("must_match", {}), self.facts.get("must_match", {})
        )

    def _manifest_of(self, name: str) -> dict:
        manifest = verify.read_manifest(self.folder / name)
        if manifest["step"] != _step(name):
            raise Damaged(f"{self.folder / name}: its manifest is of step {manifest['step']}")
        return manifest

    def _check_same_run(self, name: str, manifest: dict, optimizer: torch.optim.Optimizer) -> None:
        lines = self._unlike(manifest) + state.mismatches(
            manifest["optimizer"], type(optimizer).__name__, "optimizer"
        )
        if lines:
            raise InputError(
                f"{self.folder / name} is of another run: {'; '.join(lines)}. Restore those "
                "options, or set another "
                "run.folder (with checkpoint.load_path to start from these weights)"
            )

    def _read(
        self,
        path: Path,
        manifest: dict,
        live: dict,
        content: str,
        exclude: tuple[str, ...] = (),
        rng: bool = False,
    ) -> None:
        wanted = state.select(live, content, exclude)
        state.check_fits(path, manifest, wanted, content, exclude, self.group)
        if rng:
            wanted |= {
                name: t
                for name, t in live.items()
                if name.startswith(GENERATOR) and name in manifest["tensors"]
            }
        buffers = self.staged.tensors if self.staged else {}
        buffers = buffers | state.buffers(
            {name: tensor for name, tensor in wanted.items() if name not in buffers}
        )
        state.read(path, manifest, wanted, buffers, self.cfg.verify_on_load, self.group)

    def _say(self, level: int, text: str) -> None:
        if self.mesh.rank == 0:
            say.log(level, text)


def _step(name: str) -> int:
    return verify.parse_name(name)[1]
