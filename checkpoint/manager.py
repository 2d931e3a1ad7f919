"""Checkpoints of a run: saves them whole, chooses the one to resume from, and removes old ones.

A save is `CheckpointManager._write`: plan -> copy -> write -> gather -> publish. It runs in a thread
of each rank. The copy overlaps with the next forward and backward, which only read the state; the
optimizer's next step waits until the copy is made. Each rank then writes its file into a temporary
folder and syncs it, and rank 0 adds the manifest and renames the folder to `step-00000100`. So at
any moment a crash leaves the earlier checkpoints as they were, and at most a temporary folder that
the next start removes. `place.py` does this, on a disk or in an object store. The threads use a
separate gloo group, so that their messages do not mix with training's. One save is in flight at a
time.

It is a thread because that is simpler than a process and measures no worse: a step that never waits
for anything else takes as long during a save as while another process writes as many bytes
(`lab/bench/results/save_overhead.txt`). For that, the thread makes a few long calls into C that
release the GIL (`storage.Staged`).

A load is `CheckpointManager.load`: find -> verify -> plan -> read -> agree. Rank 0 chooses a
checkpoint, all ranks read it into buffers and verify every byte they use, and only when all agree
does the live state change. A damaged checkpoint is reported, and the newest good one before it is
used. What the user must decide is an InputError, the same on every rank.

DCP (torch.distributed.checkpoint) plans how a load is resharded (`storage.plan_reads`). `dcp.save`
and `dcp.load` are not called: they would plan for all ranks on rank 0 (`storage.py`), and talk to
it in pickled objects (`agreement.py`).
"""

import concurrent.futures
import datetime
import fnmatch
import json
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoint import adapters, branches, changes, copies, rounds, state, storage, verify
from checkpoint.agreement import NO_FILE, agree, common, gather_files, on_every_rank, on_rank_0
from checkpoint.lease import Lost
from checkpoint.peers import PeerCopies
from checkpoint.place import CheckpointFolder, open_place
from checkpoint.state import STAGING
from checkpoint.storage import GENERATOR, NotFinite, OneByOne, SavePlan, Staged
from checkpoint.stores.bucket import Bucket
from checkpoint.verify import Damaged
from configs import schema
from configs.schema import InputError
from parallelisms.mesh import Mesh, world
from reliability.guard import Diverged
from reliability.objects import Key, ask_mirror, location
from training.optimizers import materialise

# for the slowest rank to write its part; a dead process is noticed at once
PATIENCE = datetime.timedelta(minutes=30)
# Failed saves in a row after which the run ends: by then a full disk has not been emptied during two
# intervals, and each further step is one that a crash would lose.
MOST_FAILURES = 3
NOTES = {  # warnings where host memory is too short for checkpoint.async_save
    "pageable": "the buffers for checkpoints are not pinned, so copies from the GPU are slower",
    "none": (
        "training waits for each save, which copies one tensor after the other (as with "
        "checkpoint.async_save = false)"
    ),
}
logger = logging.getLogger("plumbline")


class NotCopied(Exception):
    """The copy in the memory of other hosts failed, and nothing else."""


class Saving(NamedTuple):
    """A save in flight."""

    step: int
    is_kept: bool  # in the run's folder or store, and not only in the memory of hosts
    future: concurrent.futures.Future


@dataclass
class Snapshot:
    """The state of one step, as this rank writes it."""

    name: str
    head: dict  # of the manifest
    parts: OneByOne | Staged | None = None
    error: BaseException | None = None  # of this rank, so far


class CheckpointManager:
    """Saves and loads the checkpoints of a run; all ranks call every method at the same step.

    facts: JSON put into every manifest; `facts["must_match"]`, nested or not, must be equal in a
    checkpoint that is resumed.
    """

    def __init__(
        self,
        cfg: schema.Checkpoint,
        folder: Path,
        mesh: Mesh,
        facts: dict,
        place: CheckpointFolder | Bucket | None = None,
    ):
        """place: the folder, if this run has claimed it already (place.py::claimed); it is then not
        released here."""
        self.cfg = cfg
        self.place = place or open_place(cfg, folder)
        self.gives_back = place is None
        self.folder = self.place.path  # a folder, or a prefix of a store
        self.mesh = mesh
        self.facts = json.loads(json.dumps(facts))  # as it will be read back, with lists for tuples
        self.group = _group()
        self.thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.in_flight: Saving | None = None

        self.plan: SavePlan | None = None  # of the parts that this rank writes
        self.kind: list[tuple] = []  # of the state that the plan is for
        # memory for a copy of those parts; None if they are written one by one
        self.staged: Staged | None = None

        self.copied = threading.Event()  # set when the state that is being saved may change
        self.copied.set()
        # set when the GPU's part of that copy is made
        self.on_device: torch.cuda.Event | None = None
        self.waits: Any = None  # the handle of the optimizer's hook
        self.stalled = 0.0  # seconds that it has waited
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # around pending waits

        self.attempt = 0
        self.saves = 0
        self.failures = 0
        self.last_step = -1  # of the checkpoint that was loaded or saved last
        # checkpoints that this run's state descends from, oldest first
        self.ancestors: list[str] = []
        self.origin = ""  # the checkpoint of another run that this one started from
        self.loaded = ""  # the checkpoint, or the copy of one, that this start goes on from
        self.run_id = self._on_rank_0(self.place.take)
        self.retention = self.place.retention  # rank 0 only
        # copies in the memory of hosts, or None
        self.peers = PeerCopies(cfg, self.folder, world(), self.group) if cfg.peers else None
        self.record = copies.CopyRecord(folder.parent, writes=mesh.rank == 0)

    def _on_rank_0(self, fn: Callable, *args: object) -> Any:
        """Call fn(*args) on rank 0. Every rank returns its result, or raises the exception that it
        raised."""
        return on_rank_0(self.group, self._or_sentence, fn, *args)

    def _or_sentence(self, fn: Callable, *args: object) -> Any:
        """Call fn(*args), and raise InputError for a folder that cannot be used."""
        try:
            return fn(*args)
        except OSError as error:
            cause = f"{error.filename or self.folder}: {error.strerror or error}"
            raise InputError(f"checkpoints cannot be kept in {self.folder}: {cause}") from None

    # Saving

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: dict,
        last: bool = False,
    ) -> None:
        """Save the state as it is at this call. Returns at once, unless the previous save is still
        being written or cfg.async_save is off. A step that is saved already is not saved again.
        The `last` save of a run is waited for by `close`, and not copied to other hosts.

        After this call `optimizer.step()` waits for the copy of the state by itself. Code that
        changes the state in any other way must call `wait_for_copy` first. `poll` reports failures.
        Raises InputError as `poll` does.
        """
        if last and rounds.leaves(self.mesh):
            return
        began = time.monotonic()
        is_copy = self.in_flight is not None and not self.in_flight.is_kept
        self._finish()
        waited = time.monotonic() - began
        if waited > 1:
            earlier = (
                "copy to other hosts before it" if is_copy else "checkpoint before it to be written"
            )
            self._say(logging.WARNING, f"step {step} waited {waited:.1f} s for the {earlier}")
        if step == self.last_step:
            return
        self._begin(step, model, optimizer, progress, is_kept=True, is_copied=not last)
        if not last and (not self.cfg.async_save or (self.plan and not self.staged)):
            self._finish()

    def copy_to_peers(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict
    ) -> None:
        """Copy the state as it is at this call into the memory of hosts, as `save` does. While a
        save is in flight there is no copy: the next one is newer."""
        if self.in_flight is None:
            self._begin(step, model, optimizer, progress, is_kept=False, is_copied=True)
            if self.plan and not self.staged:
                self._finish()

    def _begin(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: dict,
        is_kept: bool,
        is_copied: bool,
    ) -> None:
        live = state.tensors(model, optimizer)
        if self.waits is None:
            self.waits = optimizer.register_step_pre_hook(lambda *_: self.wait_for_copy())
        self.copied.clear()
        computed = None
        if self.mesh.device.type == "cuda":
            computed = torch.cuda.current_stream().record_event()
        head = self._manifest_head(step, optimizer, progress)
        is_copied = is_copied and self.peers is not None
        future = self.thread.submit(self._write, live, computed, head, is_kept, is_copied)
        self.in_flight = Saving(step, is_kept, future)

    def wait_for_copy(self) -> None:
        """Wait until the state that is being saved is copied. On a GPU the stream waits, not the
        caller."""
        began = time.monotonic()
        self.copied.wait()
        self.stalled += time.monotonic() - began
        if self.on_device and not self.on_device.query():
            before = torch.cuda.Event(enable_timing=True)
            after = torch.cuda.Event(enable_timing=True)
            before.record()
            torch.cuda.current_stream().wait_event(self.on_device)
            after.record()
            self.marks.append((before, after))

    def stall(self) -> float:
        """Return the seconds that `optimizer.step()` (on a GPU: its stream) has waited for copies
        since the last call of this."""
        while self.marks and self.marks[0][1].query():
            before, after = self.marks.pop(0)
            self.stalled += before.elapsed_time(after) / 1000
        seconds = self.stalled
        self.stalled = 0.0
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

    def _write(
        self,
        live: dict,
        computed: torch.cuda.Event | None,
        head: dict,
        is_kept: bool,
        is_copied: bool,
    ) -> None:
        """Copy to the memory of hosts (if `is_copied`), save, and start the removal of expired
        checkpoints. Runs in the thread, on all ranks."""
        saved = Snapshot(verify.step_name(head["step"], self.attempt), head)
        not_copied = None
        try:
            # plan: which parts this rank writes. Once in a run, by messages between all ranks
            self._make_plan(live)
            # copy: to host memory. From here on training may change the state
            saved.parts = self._copy(live, computed)
        except BaseException as failure:
            saved.error = failure
        try:
            if is_copied:
                not_copied = self._copy_to_hosts(saved)
            if is_kept:
                self._write_kept(saved)
        finally:
            self.copied.set()  # if the save failed before the copy, training must not wait for it
        if not_copied:
            raise not_copied

    def _copy_to_hosts(self, saved: Snapshot) -> NotCopied | None:
        """Make a copy in the memory of hosts. Returns its failure, which must not end the save."""
        began = time.monotonic()
        try:
            agree(saved.error, self.group)
            size = self.peers.keep(saved.name, self.plan, saved.parts, saved.head, self.group)
            seconds = round(time.monotonic() - began, 3)
            self.record.add(step=saved.head["step"], seconds=seconds, bytes=size)
        except NotFinite:
            raise
        except Exception as failure:
            return NotCopied(f"{type(failure).__name__}: {failure}")
        return None

    def _write_kept(self, saved: Snapshot) -> None:
        """Save in the run's folder or store, then start the removal of expired checkpoints."""
        self.saves += 1
        draft = self.place.draft(self.run_id, self.saves, saved.name)
        try:
            self._save(draft, saved)
        except BaseException:
            if self.retention:
                self.place.discard(draft)
            raise
        self.ancestors.append(saved.name)
        if self.retention:
            self.ancestors = [name for name in self.ancestors if name not in self.retention.gone]
            self.retention.remove_expired(self.ancestors, self.saves)

    def _save(self, draft: Path | Key, saved: Snapshot) -> None:
        """Write, gather, publish. Runs in the thread, on all ranks.

        An error on one rank, at any phase, is raised on all: until `agree`, the rank keeps it and
        takes part in what the others wait for.
        """
        file = NO_FILE
        if saved.error is None:
            try:
                # write: this rank's file, and sync it
                file = self.place.write(draft, self.plan, saved.parts)
            except BaseException as failure:
                saved.error = failure

        # gather: the size and the hash of each file, on rank 0
        files = gather_files(file, self.group)

        # publish: the manifest, and the folder's name
        if files and NO_FILE not in files:
            try:
                self._publish(draft, saved.name, saved.head, files)
            except BaseException as failure:
                saved.error = failure
        agree(saved.error, self.group)
        ask_mirror()

    def _make_plan(self, live: dict) -> None:
        """Choose the parts that this rank writes, unless the state is of the same kind as at the
        last call. All ranks call this with states of the same kind."""
        kind = storage.kind_of(live)
        if kind == self.kind:
            return
        # ranks that have the same layers; their numbers are consecutive
        stage = self.mesh.size // self.mesh.pp
        holders = range(self.mesh.pp_rank * stage, (self.mesh.pp_rank + 1) * stage)
        rows = on_every_rank(self.group, storage.describe, live, self.mesh.size, holders)
        rows = storage.share_rows(rows, self.group)
        self.plan = on_every_rank(self.group, SavePlan.make, live, rows, self.mesh.rank)
        self.kind = kind
        self.staged = self._host_memory() if self.cfg.async_save else None

    def _host_memory(self) -> Staged | None:
        """Allocate host memory for copies of this rank's parts, if there is enough: the ranks agree
        on the kind that fits on all."""
        on_gpu = self.mesh.device.type == "cuda"
        free = state.free_host_memory()
        kind = state.staging(self.plan.nbytes, free, world().local_size, pin=on_gpu)
        least = torch.tensor(STAGING.index(kind))
        dist.all_reduce(least, dist.ReduceOp.MAX, self.group)
        agreed = STAGING[least]
        best = "pinned" if on_gpu else "pageable"
        if agreed != best:
            self._say(logging.WARNING, f"host memory is short: {NOTES[agreed]}")
        if agreed == "none":
            return None
        return Staged(self.plan, pin=agreed == "pinned")

    def _copy(self, live: dict, computed: torch.cuda.Event | None) -> OneByOne | Staged:
        """Return the bytes of the parts that this rank writes: copied to host memory, or, where
        there is none for a copy, the live tensors, which are then copied as they are written.

        Returns when the copy is made. The optimizer may go on once the GPU has it queued.
        """
        if self.staged is None:
            return OneByOne(live)
        self.on_device = state.stage(live, self.staged.tensors, computed)
        self.copied.set()
        if self.on_device:
            self.on_device.synchronize()
        self.staged.check_finite()
        return self.staged

    def _publish(self, draft: Path | Key, name: str, head: dict, files: list) -> None:
        """Make the draft a checkpoint: on rank 0, when every rank's file is written and synced.
        Raises Lost if another run has taken the folder over."""
        for earlier in self.place.found():
            self._say(logging.WARNING, f"{earlier} is published after all: its answer was lost")
            if earlier == name:
                self.place.discard(draft)
                return
            self.ancestors.append(earlier)
            head = {**head, "parent": earlier, "ancestors": list(self.ancestors)}
        self.place.publish(draft, name, {**head, "files": files, "tensors": self.plan.table})

    def writing(self) -> bool:
        """Return whether this rank has not finished its part of the save in flight."""
        return self.in_flight is not None and not self.in_flight.future.done()

    def poll(self, any_rank_writing: bool | None = None) -> None:
        """Report a save that has ended. All ranks call this after every step, and before the next
        `save`.

        any_rank_writing: whether `writing()` was true on any rank at the last exchange
        (`train.Flags`); if None, this exchanges it, which is a collective.

        Raises InputError after MOST_FAILURES failed saves in a row, and NotFinite at once if the
        state to be saved is not finite, so that training on is pointless: on every rank, at the
        same step.
        """
        if self.in_flight is None:
            return
        if any_rank_writing is None:
            any_rank_writing = self.mesh.any_rank(self.writing())
        if not any_rank_writing:
            self._finish()

    def _finish(self, last: bool = False) -> None:
        """Wait for the save in flight, and report it. All ranks call it. Raises InputError if it
        failed and was the `last`, which nothing comes after."""
        if self.in_flight is None:
            return
        step, is_kept, future = self.in_flight
        concurrent.futures.wait([future])
        self.in_flight = None
        error = future.exception()
        has_failed = self.mesh.any_rank(error is not None)
        if is_kept and not (has_failed and self.mesh.any_rank(_of_kept(error))):
            self.failures = 0
            self.last_step = step
        if not has_failed:
            return
        cause = f"{error}" if error else "another rank failed, and its log says why"
        if self.mesh.any_rank(error is None):
            # It failed in the messages of the group, which no longer pair up between the ranks.
            self.group = _group()
            if error and self.mesh.rank != 0:
                logger.error(f"this rank failed in the checkpoint of step {step}", exc_info=error)
        if isinstance(error, NotFinite):
            raise NotFinite(
                f"step {step} left a state that is not finite, so it is not saved: {cause}"
            )
        if not is_kept or self.last_step == step:
            self.record.add(step=step, failed=cause[:500])
            self._say(
                logging.ERROR,
                f"step {step} could not be copied to the memory of other hosts: {cause}. Training goes "
                "on, and the next copy is tried when it is due",
            )
            return
        self.failures += 1
        reason = f"the checkpoint of step {step} could not be written to {self.folder}: {cause}"
        if isinstance(error, Lost):
            raise common(InputError(reason))
        if last:
            raise common(InputError(f"{reason}; {self._after_the_last()}"))
        if self.failures >= MOST_FAILURES:
            raise common(
                InputError(f"{reason} ({self.failures} in a row); the others are untouched")
            )
        self._say(
            logging.ERROR,
            f"{reason}. Training goes on, and the next checkpoint is tried when it is due",
        )

    def _after_the_last(self) -> str:
        """Say what to do when the last save of a run has failed."""
        where = f"goes on from step {self.last_step}" if self.last_step >= 0 else "begins anew"
        return f"the run has ended without it: mend that, and the same command {where}"

    def wait(self, seconds: float) -> None:
        """Wait for the save in flight, on the way out after an error. Calls no other rank, and
        raises nothing."""
        if self.in_flight:
            concurrent.futures.wait([self.in_flight.future], timeout=seconds)

    def close(self) -> None:
        """Wait for the save in flight, and release the folder. Raises InputError if the last save
        failed."""
        try:
            self._finish(last=True)
        finally:
            self.thread.shutdown()
            if self.gives_back:
                self.place.release()
        if self.failures:
            raise InputError(
                f"the run has ended, but its last checkpoint could not be written to {self.folder}"
            )
        if self.peers:
            self.peers.close(self.last_step)

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """Wait for the save in flight: the loop that saves is the body of a `with`, and an error in
        it must not lose that save."""
        if kind is None:
            self.close()
            return
        # Copies are made more often than what raises this is looked for: an earlier checkpoint is
        # what it left alone.
        is_worthless = self.peers is not None and issubclass(kind, Diverged)
        if is_worthless:
            self.peers.discard()
        self.wait(rounds.save_may_take(60))
        if is_worthless:  # the one that was in flight
            self.peers.discard()

    # Loading

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, last: int | None = None
    ) -> dict | None:
        """Resume from the newest whole checkpoint of this run, or from that of cfg.load_step, and
        return its progress; a new run goes on from cfg.branch_from, if that is set. Returns None
        for a fresh start, which takes the weights of cfg.load_path if it is set.
        last: the run's last step, if that is known.

        Raises InputError where a fresh start would hide a mistake: the step is missing, none of the
        checkpoints can be read, or the checkpoint is of a different model, data or seed.
        """
        began = time.monotonic()
        materialise(optimizer)
        live = state.tensors(model, optimizer)
        size = sum(tensor.numel() * tensor.element_size() for tensor in live.values())
        names = self._on_rank_0(self._choose, size, last)
        self._make_plan(live)
        candidates = [self.folder / name for name in names]
        if self.peers:
            candidates = self._with_copies(candidates, last)
            self.peers.check_room(self.plan.nbytes, self.group)
        if candidates:
            path, manifest = self._resume(candidates, live, optimizer)
            if self.peers:
                self._say_source(path, manifest["step"], time.monotonic() - began)
            return manifest["progress"]
        if self.peers:
            nothing = "none" if self.peers.held else "new"
            self.record.add(source=nothing, **self.peers.found())
            # parts of a copy that is not whole are of steps that this start does anew
            self.peers.forget(self.group)
        if self.cfg.branch_from:
            return self._branch(live, optimizer)
        self._start_from(live)
        return None

    def _say_source(self, path: Path | Key, step: int, seconds: float) -> None:
        """Say and record where the state of a run with copies comes from."""
        where = "the memory of the hosts" if self._is_copy(path) else self.folder
        self._say(logging.INFO, f"step {step} comes from {where}, in {seconds:.2f} s")
        self.record.add(
            source=copies.place_of(str(path)),
            step=step,
            seconds=round(seconds, 3),
            sent=self.peers.sent,
            **self.peers.found(),
        )

    def _with_copies(self, kept: list[Path | Key], last: int | None) -> list[Path | Key]:
        """Return these checkpoints and the copies in the memory of hosts, newest first. Not a copy of
        the `last` step, after which nothing would save it; and none if load_step goes back."""
        if self.cfg.load_step >= 0:
            self.peers.forget(self.group)
            return kept
        found = []
        for name in self.peers.find(self.group):
            if last is None or _step(name) < last:
                found.append(self.peers.folder / name)
            else:
                why = f"the run ends at step {last}"
                self.peers.unused.append(f"{name}: {why}")
                self._say(
                    logging.WARNING, f"the copy {name} in the memory of hosts is not used: {why}"
                )
        # at the same step the copy comes first, for it is nearer
        return sorted([*found, *kept], key=lambda path: verify.parse_name(path.name), reverse=True)

    def _choose(self, size: int, last: int | None) -> list[str]:
        """Return the names of this run's checkpoints, newest first. size: bytes of one checkpoint;
        last: as in `load`. Raises InputError if the disk has no room for those that are kept, or
        there are none."""
        names = self.place.names()
        count = 1
        if self.cfg.keep_last:  # and the one that is written before the oldest goes
            count = max(1, self.cfg.keep_last + 1 - len(names))
        if last is not None:
            done = max(map(_step, names), default=0)
            to_come = math.ceil((last - done) / (self.cfg.interval or last))
            count = min(count, max(1, to_come))
        self.place.check_room(size, count)
        step = self.cfg.load_step
        steps = sorted({_step(name) for name in names})
        if step >= 0 and step not in steps:
            raise InputError(
                f"checkpoint.load_step = {step}, but {self.folder} holds only steps {steps}"
            )
        return names

    def _resume(
        self, found: list[Path | Key], live: dict, optimizer: torch.optim.Optimizer
    ) -> tuple[Path | Key, dict]:
        """Load the first of these checkpoints that is whole; return its path and its manifest."""
        step = self.cfg.load_step
        candidates = found
        if step >= 0:
            candidates = [path for path in found if _step(path.name) == step][:1]
        path, manifest = self._load_first_whole(candidates, live, optimizer)
        names = [one.name for one in found]
        kept = [one.name for one in found if not self._is_copy(one)]
        went_back = path.name != names[0]
        self.attempt = verify.parse_name(names[0])[0] + went_back
        self.ancestors = [n for n in [*manifest["ancestors"], path.name] if n in kept]
        self.last_step = manifest["step"] if path.name in kept else -1
        self.loaded = str(path)
        if self.peers:
            self.peers.forget(self.group, but=path.name)
        if step >= 0 and went_back:
            self._say(
                logging.WARNING,
                f"checkpoint.load_step = {step} goes back from {names[0]}, now and at every "
                "restart: remove it once there is a newer checkpoint",
            )
        self._say_changes(manifest)
        return path, manifest

    def _say_changes(self, manifest: dict) -> None:
        """Log in one line the options that have changed since a checkpoint was written."""
        if line := changes.line(manifest, self.facts, self.mesh.sizes):
            self._say(logging.WARNING, line)

    def _branch(self, live: dict, optimizer: torch.optim.Optimizer) -> dict:
        """Continue from the checkpoint of another run that branch_from names, as that run would,
        and return its progress."""
        path = self._on_rank_0(branches.find, self.cfg.branch_from)
        with verify.refuse_damage(f"checkpoint.branch_from: {path}"):
            manifest = self._on_rank_0(verify.read_manifest, path)
            self._check_same_run(path, manifest, optimizer)
            self._read(path, manifest, live, "model+optimizer")
        self.origin = str(path)
        self._say(logging.INFO, f"a branch of {path}")
        self._say_changes(manifest)
        return manifest["progress"]

    def _load_first_whole(
        self, candidates: list[Path | Key], live: dict, optimizer: torch.optim.Optimizer
    ) -> tuple[Path | Key, dict]:
        """Load the first of these checkpoints that is whole; return its path and its manifest. If
        one is damaged, only its ancestors are tried next, never steps of a future that the run had
        abandoned."""
        while candidates:
            path = candidates[0]
            manifest = None
            try:
                manifest = self._manifest_of(path, live)
                self._check_same_run(path, manifest, optimizer)
                self._check_after(path, manifest, candidates)
                self._read(path, manifest, live, "model+optimizer")
                return path, manifest
            except Damaged as error:
                if self.cfg.load_step >= 0:
                    raise InputError(
                        f"checkpoint.load_step = {self.cfg.load_step}, but {path.name} is damaged: "
                        f"{error}"
                    ) from None
                where = ""
                if self._is_copy(path):
                    where = "the copy in the memory of hosts "
                    self.peers.unused.append(f"{path.name}: {error}")
                self._say(logging.ERROR, f"{where}{path.name} is damaged and not used: {error}")
                candidates = self._before(candidates, manifest)
        raise InputError(
            f"none of the checkpoints in {self.folder} that this run could go on from can be "
            "read (see above): look at them with `python -m checkpoint.verify --all`; to start "
            f"afresh, move them away{self.peers.with_copies() if self.peers else ''}"
        )

    def _before(self, candidates: list[Path | Key], manifest: dict | None) -> list[Path | Key]:
        """Return which of these may be tried when the first, with this manifest, is damaged. Where
        the manifest cannot be read, all that are older. Copies are of the newest attempt alone."""
        first, *others = candidates
        if self._is_copy(first) and first.name in [path.name for path in others]:
            return others
        older = [path for path in others if _step(path.name) < _step(first.name)]
        if not manifest:
            return older
        return [p for p in older if p.name in manifest["ancestors"] or self._is_copy(p)]

    def _check_after(self, path: Path | Key, manifest: dict, candidates: list[Path | Key]) -> None:
        """Raise Damaged for a copy in the memory of hosts that does not come after the newest of
        the run's checkpoints: they were made without it."""
        kept = [one.name for one in candidates if not self._is_copy(one)]
        if not self._is_copy(path) or not kept or _step(kept[0]) >= _step(path.name):
            return
        if kept[0] not in manifest["ancestors"]:
            raise Damaged(f"it does not come after {kept[0]}, the newest checkpoint")

    def _is_copy(self, path: Path | Key) -> bool:
        """Return whether a checkpoint is in the memory of hosts."""
        return self.peers is not None and path.parent == self.peers.folder

    def _start_from(self, live: dict) -> None:
        """Start a new run from the weights of another: its newest checkpoint, or the one that
        load_path names."""
        if not self.cfg.load_path or "base" in self.facts:  # new adapters, on their base
            return
        for pattern in self.cfg.exclude_from_loading:
            if not fnmatch.filter(live, pattern):
                raise InputError(
                    f"checkpoint.exclude_from_loading: no tensor of this run is called {pattern!r}"
                )

        def fill(path: Path | Key, manifest: dict) -> None:
            self._read(path, manifest, live, "model", self.cfg.exclude_from_loading)

        self.origin = str(self._take_weights(fill, "a new run from"))

    def load_base(self, base: dict[str, Tensor]) -> str:
        """Fill the frozen weights of a run that trains adapters (adapters.py) from the checkpoint of
        load_path, in their own types, and return its path. base: by the names of the parameters.
        Raises InputError."""
        live = {f"model.{name}": tensor for name, tensor in base.items()}

        def fill(path: Path | Key, manifest: dict) -> None:
            wanted = adapters.in_stored_types(live, manifest)
            state.check_fits(path, manifest, wanted, "model", (), self.group)
            state.read(path, manifest, live, state.buffers(live), self.group)

        return str(self._take_weights(fill, "adapters of").resolve())

    def _take_weights(self, fill: Callable[[Path | Key, dict], None], what: str) -> Path | Key:
        """Call fill(path, manifest) for the checkpoint that load_path names, and return its path.
        what: of its model this run is."""
        path = self._on_rank_0(verify.newest, location(self.cfg.load_path))
        with verify.refuse_damage(f"checkpoint.load_path: {path}"):
            manifest = self._on_rank_0(verify.read_manifest, path)
            adapters.check_whole(path, manifest)
            fill(path, manifest)
        self._say(logging.INFO, f"{what} the model of {path}")
        for line in changes.refused(manifest["facts"], self.facts):
            self._say(logging.WARNING, f"checkpoint.load_path: {line}")
        return path

    def _manifest_of(self, path: Path | Key, live: dict) -> dict:
        """Return the manifest of a checkpoint; of a copy in the memory of hosts, when the files that
        this host needs are here."""
        if self._is_copy(path):
            return self.peers.fetch(path.name, partial(state.files_of, live), self.group)
        return self._on_rank_0(self._read_manifest, path)

    def _read_manifest(self, path: Path | Key) -> dict:
        manifest = verify.read_manifest(path)
        if manifest["step"] != _step(path.name):
            raise Damaged(f"{path}: its manifest is of step {manifest['step']}")
        return manifest

    def _check_same_run(
        self, path: Path | Key, manifest: dict, optimizer: torch.optim.Optimizer
    ) -> None:
        lines = changes.refused(manifest["facts"], self.facts)
        lines += changes.mismatches(manifest["optimizer"], type(optimizer).__name__, "optimizer")
        lines += adapters.other_base(manifest["facts"], self.facts)
        if lines:
            # adapters without their base are no model to start from
            start = " (with checkpoint.load_path to start from these weights)"
            raise InputError(
                f"{path} is of another run: {'; '.join(lines)}. Restore those options, or set another "
                f"run.folder{start if 'base' not in manifest['facts'] else ''}"
            )

    def _read(
        self,
        path: Path | Key,
        manifest: dict,
        live: dict,
        content: str,
        exclude: tuple[str, ...] = (),
    ) -> None:
        """Fill the live tensors of the kinds in `content` from a checkpoint, on all ranks or on
        none; with the optimizer, and on the same mesh, the random generators too. Raises Damaged, or
        InputError if it does not fit."""
        wanted = state.select(live, content, exclude)
        state.check_fits(path, manifest, wanted, content, exclude, self.group)
        if content == "model+optimizer" and manifest["mesh"] == self.mesh.sizes:
            for name, tensor in live.items():
                if name.startswith(GENERATOR) and name in manifest["tensors"]:
                    wanted[name] = tensor
        # the memory for copies, and more where this rank reads parts that it does not write
        buffers = dict(self.staged.tensors) if self.staged else {}
        missing = {name: tensor for name, tensor in wanted.items() if name not in buffers}
        buffers |= state.buffers(missing)
        state.read(path, manifest, wanted, buffers, self.group)

    def _say(self, level: int, text: str) -> None:
        if self.mesh.rank == 0:
            logger.log(level, text)


def _group() -> dist.ProcessGroup:
    """Open a gloo group of all ranks, for the messages of the checkpoints' threads."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def _of_kept(error: BaseException | None) -> bool:
    """Return whether this is an error of a save in the run's folder or store."""
    return error is not None and not isinstance(error, NotCopied)


def _step(name: str) -> int:
    return verify.parse_name(name)[1]
