"""Lets this rank go on in another round when ranks of the run are lost or come (run.fault_tolerant,
configs/rounds.py): the process, the weights and the optimizer's state stay.

`run` calls `start` once a round. When ranks are lost, a collective fails, on ranks that wait for
them directly; all others are told by the store, and end their collectives by shutting down the
sockets (gloo, whose `abort` ends none) or by NCCL's abort. The step that was under way is done
again, from the state before it. A rank that is new, or not as far, gets the state from the replica
that is, by one broadcast over dp_replicate for each tensor.
"""

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint import joining, state, verify
from checkpoint.agreement import on_rank_0
from checkpoint.stages import run_stages
from checkpoint.storage import GENERATOR, local
from configs.load import keep_file, load_config
from configs.program import STOP_SIGNALS
from configs.rounds import (
    BEGUN,
    CALL,
    END,
    HOLDER,
    LATEST,
    LEASE,
    LOST,
    NO_REPLICA,
    NO_STATE,
    ORDERLY,
    OVER,
    ROLE,
    ROUND,
    START,
    RoundOfRanks,
    alive,
    come,
    key,
    report_loss,
)
from configs.schema import Config, InputError
from configs.words import number_of
from parallelisms import mesh as meshes
from parallelisms.mesh import Mesh, world
from reliability.guard import Diverged
from reliability.health import hashes, named, outliers
from reliability.objects import check_mirrored
from reliability.record import Start
from reliability.sockets import open_sockets, shut_down
from reliability.stop import Stop
from training.optimizers import materialise

logger = logging.getLogger("plumbline")

# Seconds in which ranks of a whole replica may end their step by themselves when others are lost:
# from the all-reduce of the loss on they need only each other.
GRACE = 0.5
UPDATE = 10.0  # the same while the optimizer changes the weights
AGAIN = 0.5  # seconds between attempts to end what waits
# Seconds in which a rank hears from its launcher of a loss that ends its step with another error than
# that of a connection (debug.check_collectives)
HEARS = 1.0
AT_DOOR = 0.02  # seconds between looks at the store while the next round is decided
SPARE = 0.5  # the same while this rank waits until it is needed
SCHEME = "round"  # of the URL by which the ranks of a round meet
ANSWER = timedelta(seconds=60)  # in which the launcher's store answers


@dataclass
class StateOfRank:
    """The state of this rank after a step."""

    step: int
    tensors: dict[str, Tensor]  # this rank's parts
    progress: dict
    ancestors: list[str]
    origin: str


class Door:
    """The place where this rank waits between rounds."""

    here: "Door | None" = None  # that of this process

    def __init__(self) -> None:
        self.slot = world().rank
        self.node = int(os.environ["GROUP_RANK"])
        self.own: set[str] = set()  # sockets of its connections to the store
        self.store = self._connect()
        self.number = int(self.store.get(LATEST))
        os.environ[LEASE] = self.store.get(START).decode()
        self.round: RoundOfRanks | None = None  # the first has none
        self.takes_up = False  # whether the next start goes on from the state of the round before
        self.is_interrupted = False  # whether this one has
        self.run: Any = None  # a train.Session
        self.kept: StateOfRank | None = None
        self.updating = 0  # the step of which the optimizer has begun to change the weights
        self.is_lost = threading.Event()  # ranks of this round are lost
        self.is_at_door = threading.Event()
        self.leaves = False  # the round has ended in order, for others to join
        self.is_asked = False  # this process was told to stop, by a signal between two rounds
        self.is_closed = threading.Event()
        Start.is_loss = self.is_loss
        self.thread = threading.Thread(target=self._watch, name="rounds", daemon=True)
        self.thread.start()

    def _connect(self) -> dist.TCPStore:
        """Open a connection to the launcher's store that stays when the others are shut down."""
        before = set(open_sockets())
        store = _open_store()
        self.own |= set(open_sockets()) - before
        return store

    # what the thread does

    def _watch(self) -> None:
        store = self._connect()
        with contextlib.suppress(dist.DistError):  # the launcher is gone, and ends this process
            while not self.is_closed.is_set():
                self._watch_round(store, self.number)

    def _watch_round(self, store: dist.TCPStore, number: int) -> None:
        """Return when this round has ended, or after the last."""
        called = False
        # The calls are Python's: in C++ a thread that waits when Python ends is an abort.
        while self.number == number and not self.is_closed.wait(look(world().size)):
            if not called and store.check([key(number, CALL)]):
                called = True
            if self.number != number:
                return
            if called and store.check([key(number, END)]):
                if store.get(key(number, END)).decode() == LOST:
                    self.is_lost.set()
                    self._end_collectives(number)
                return
            if called and self.run:
                self.run.stop.called = True

    def _end_collectives(self, number: int) -> None:
        """End what the main thread waits for, until it is at the door."""
        began = time.monotonic()
        while not self.is_at_door.wait(0.02) and self.number == number:
            waited = time.monotonic() - began
            if waited < (UPDATE if self._updates() else GRACE):
                continue
            for name, descriptor in open_sockets().items():
                if name not in self.own:
                    shut_down(descriptor)
            self._abort_nccl()
            self.is_at_door.wait(AGAIN)

    def _abort_nccl(self) -> None:
        if dist.is_initialized() and torch.cuda.is_available():
            with contextlib.suppress(Exception):
                dist.distributed_c10d._abort_process_group()

    def _updates(self) -> bool:
        """Return whether the optimizer is changing the weights."""
        return self.run is not None and self.updating > self.run.clock.at

    # what the main thread does

    def close(self) -> None:
        """End the thread."""
        self.is_closed.set()
        self.thread.join()

    def follow(self, run: Any) -> None:
        """Keep the state of this run (train.Session) from now on."""
        self.kept = None
        self.run = run
        self.is_interrupted = self.takes_up
        self.takes_up = False
        for name in BEGUN, f"{BEGUN}/{self.slot}":
            self.store.set(name, "")
        if self.is_interrupted:  # a request to the round before holds
            run.stop.heard |= self.is_asked or Stop.asked_in_last
        run.job.optimizer.register_step_pre_hook(self._begin_update)

    def _begin_update(self, *_: object) -> None:
        self.updating = self.run.clock.at + 1

    def is_loss(self, error: BaseException) -> bool:
        """Return whether this error of a collective comes of ranks that are lost. One that is of this
        rank alone does not."""
        if isinstance(error, (InputError, Diverged)):
            return False
        words = ("gloo", "NCCL", "Connection", "onnected")
        is_of_link = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(word in str(error) for word in words)
        )
        return is_of_link or self.is_lost.wait(HEARS)

    def was_lost(self, error: Exception) -> bool:
        """The same, and tell the others."""
        if not self.is_loss(error):
            return False
        text = str(error)
        logger.warning(f"ranks are lost: {text.splitlines()[0][:200] if text else error!r}")
        report_loss(self.store, self.number)
        return True

    def pass_through(self, error: Exception | None) -> list[str]:
        """Wait for the next round that includes this rank. Returns the options of that round.
        error: what has ended the last one; it is raised again if no round follows."""
        signal.set_wakeup_fd(-1)  # by which configs/program.py would end this process
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        self._keep()
        _close_groups()
        self.is_at_door.set()
        found = self.round = self._next_with_this(error)
        self.takes_up = Stop.has_state = True
        self.leaves = False
        self.is_lost.clear()
        self.is_at_door.clear()
        os.environ |= {  # LOCAL_RANK stays: it is this process's GPU
            "RANK": str(found.slots.index(self.slot)),
            "WORLD_SIZE": str(len(found.slots)),
            "LOCAL_WORLD_SIZE": str(found.local_size),
            "INIT_METHOD": f"{SCHEME}://{self.number}",
            ROUND: str(self.number),
        }
        return found.options

    def _next_with_this(self, error: Exception | None) -> RoundOfRanks:
        """Wait until a round is decided in which this rank takes part."""
        while True:
            come(self.store, self.number, self.slot, self._step())
            found = self._next(error)
            if self.slot not in found.slots:
                self.kept = None
            elif found.steps[found.slots.index(self.slot)] == self._step():
                return found
            else:  # that of a process in whose place this one has come
                report_loss(self.store, self.number)

    def _on_signal(self, number: int, frame: object) -> None:
        """Note a signal that comes between two rounds, for the next one to stop."""
        self.is_asked = True

    def _next(self, error: Exception | None) -> RoundOfRanks:
        """Wait until the next round is decided."""
        began = time.monotonic()
        while not self.store.check([key(self.number + 1, "ranks")]):
            if self.store.check([OVER]):
                code = int(self.store.get(OVER))
                if error and code not in ORDERLY:
                    raise error
                sys.exit(code)
            soon = time.monotonic() < began + 5
            time.sleep(look(2 * world().size, AT_DOOR if soon else SPARE))
        holder = self.store.get(alive(self.node)).decode().rpartition("/")[0]
        if holder != os.environ[HOLDER]:
            logger.warning(f"{holder} has the place of this host, which did not answer")
            sys.exit(NO_REPLICA)
        self.number += 1
        return RoundOfRanks.read(self.store.get(key(self.number, "ranks")))

    def _step(self) -> int:
        return self.kept.step if self.kept else NO_STATE

    def _keep(self) -> None:
        """Keep the state of the run that has ended, unless the optimizer was changing it."""
        run, self.run = self.run, None
        if run is None:  # it had not begun: what is kept is still that of the round before
            return
        run.watchdog.rest()  # an error has given this process a last time-out
        with contextlib.suppress(Exception):
            run.batches.close()
        if self.updating > run.clock.at:
            return
        live = state.tensors(run.job.model, run.job.optimizer)
        tensors = {}
        for name, tensor in live.items():
            if not name.startswith(GENERATOR):
                part = local(tensor).detach()
                # on a GPU there is no room for both the old state and the new
                tensors[name] = part.cpu() if part.is_cuda else part
        _, _, _, progress = run.state(run.clock.at)
        self.kept = StateOfRank(
            run.clock.at, tensors, progress, run.checkpoints.ancestors, run.checkpoints.origin
        )


def look(calls: int, least: float = 0.2) -> float:
    """Return the seconds that a rank waits between two queries of the launcher's store, which answers
    some 10,000 calls a second. calls: of all ranks in one round of queries."""
    return max(least, calls / 10_000)


def run(argv: list[str], start: Callable[[list[str], Config], int]) -> int:
    """Do the run that these arguments describe: call start(arguments, configuration) for each of its
    stages, in each round in which this rank takes part. Returns the exit code. Raises what `start`
    does, and InputError."""
    if ROLE not in os.environ:
        return _round(argv, start)
    dist.register_rendezvous_handler(SCHEME, _meet)
    keep_file(argv)
    door = Door.here = Door()
    try:
        joining.check(door.store, argv)
        return _rounds(door, argv, start)
    finally:
        door.close()


def _round(argv: list[str], start: Callable[[list[str], Config], int]) -> int:
    here = world()
    cfg = load_config(argv, here.size, here.local_size)
    check_mirrored(cfg.run.mirror)
    meshes.open_group(cfg.run)
    code = run_stages(cfg, partial(start, argv))
    meshes.close_mesh()
    return code


def _rounds(door: Door, given: list[str], start: Callable[[list[str], Config], int]) -> int:
    argv = given
    if os.environ[ROLE] == "newcomer":
        argv = [*given, *door.pass_through(None)]
    while True:
        error = None
        try:
            code = _round(argv, start)
            if not door.leaves:
                return code
        except Exception as failure:
            if not door.was_lost(failure):
                raise
            error = failure.with_traceback(None)  # frames refer to the old model
            error.__context__ = None
        argv = [*given, *door.pass_through(error)]


def follow(run: Any) -> None:
    """Keep the state of this run, if others may go on with it."""
    if Door.here:
        Door.here.follow(run)
    elif run.job.cfg.run.fault_tolerant and run.job.mesh.rank == 0:
        logger.warning(
            "run.fault_tolerant has no effect: it needs several replicas "
            "(parallelism.data_parallel_replicate) and the launcher of ./run_train.sh"
        )


def is_interrupted() -> bool:
    """Return whether the round before may have ended before all was done that was due after its last
    step."""
    return Door.here is not None and Door.here.is_interrupted


def save_may_take(seconds: float) -> float:
    """Return how many seconds a failed run waits for the save in flight: fewer where
    it goes on, and saves again."""
    return min(seconds, 5.0) if Door.here else seconds


def leaves(mesh: Mesh) -> bool:
    """Return whether this round ends now so that others can join; then nothing has to be saved. False
    if the run was asked to stop or has done its last step. All ranks call this after a step."""
    door = Door.here
    if door is None:
        return False
    stop, run = door.run.stop, door.run
    is_over = stop.heard or time.monotonic() > stop.deadline
    is_over |= run.clock.at >= run.job.cfg.training.last_step
    if mesh.any_rank(is_over):
        return False
    stop.leaves = door.leaves = mesh.any_rank(stop.called)
    return door.leaves


def hand_over(job: Any, checkpoints: Any) -> dict | None:
    """Give a job the state of the round before, and return its progress; None where this start is
    not the first of a later round. Called by all ranks. checkpoints: a checkpoint/manager.py::CheckpointManager."""
    door = Door.here
    if door is None or not door.takes_up:
        return None
    began = time.monotonic()
    mesh, kept = job.mesh, door.kept
    if kept and kept.step != door.round.step:
        kept = None
    materialise(job.optimizer)
    live = {
        name: local(tensor)
        for name, tensor in state.tensors(job.model, job.optimizer).items()
        if not name.startswith(GENERATOR)
    }
    with torch.no_grad():
        if kept:
            for name, part in live.items():
                part.copy_(kept.tensors[name])
        if not door.round.whole:
            if job.cfg.debug.replica_check_interval:
                _compare(live, mesh, door, job.cfg.debug.leave_out_odd_replica)
            _broadcast(live, mesh, door.round.source)
    about = (kept.progress, kept.ancestors, kept.origin) if kept else None
    progress, ancestors, origin = next(one for one in mesh.gather(about) if one)
    names = on_rank_0(checkpoints.group, checkpoints.place.names)
    _take_up(checkpoints, progress["step"], ancestors, names)
    checkpoints.origin = origin
    checkpoints.loaded = f"the ranks that were left after step {progress['step']}"
    if mesh.rank == 0:
        how = "kept" if door.round.whole else "sent to the ranks that are new"
        logger.warning(
            f"round {door.number} goes on with {number_of(door.round.replicas, 'replica')} after step "
            f"{progress['step']}, whose state was {how} in {time.monotonic() - began:.2f} s"
        )
    return progress


def _compare(live: dict[str, Tensor], mesh: Mesh, door: Door, leaves_out: bool) -> None:
    """Compare the states of the replicas that have one, before all get that of one of them: after that
    an odd one could not be told from the others. Raises Diverged where they differ; if it `leaves_out`
    an odd one, only on the ranks that differ from the majority."""
    group = mesh.device_mesh.get_group("dp_replicate")
    own = hashes((live[name] for name in sorted(live)), mesh.device)
    of_all = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(of_all, own, group=group)
    states = {}
    for rank, of_rank in zip(dist.get_process_group_ranks(group), of_all, strict=True):
        if door.round.steps[rank] == door.round.step:
            states[rank] = tuple(of_rank.tolist())
    odd = [[*states][place] for place in outliers([*states.values()])]
    if odd and not (leaves_out and mesh.rank not in odd):
        raise Diverged(
            f"step {door.round.step}: state that must be the same on several ranks is not, which was "
            f"seen before ranks that are new got it: {named(odd)} of dp_replicate. A device computes "
            "or remembers wrong"
        )


def _broadcast(live: dict[str, Tensor], mesh: Mesh, source: int) -> None:
    """Send this rank's parts from the replica `source` to the same ranks of all replicas."""
    group = mesh.device_mesh.get_group("dp_replicate")
    sender = dist.get_global_rank(group, source)
    for name in sorted(live):
        part = live[name]
        sent = part.contiguous()
        dist.broadcast(sent, sender, group=group)
        if sent is not part:
            part.copy_(sent)


def _take_up(checkpoints: Any, step: int, ancestors: list[str], names: list[str]) -> None:
    """Let checkpoints go on from those that the state descends from, one that was published when its
    round ended included."""
    known = verify.parse_name(ancestors[-1]) if ancestors else (0, -1)
    for name in sorted(names, key=verify.parse_name):
        attempt, at = verify.parse_name(name)
        if known[1] < at <= step and attempt == known[0]:
            ancestors = [*ancestors, name]
    checkpoints.ancestors = [name for name in ancestors if name in names]
    if checkpoints.ancestors:
        checkpoints.attempt, checkpoints.last_step = verify.parse_name(checkpoints.ancestors[-1])


def _meet(url: str, **_: object) -> Iterator[tuple[dist.Store, int, int]]:
    """Give the process group of a round its own prefix in the store: under a shared one gloo would
    find the addresses of lost ranks."""
    here = world()
    yield dist.PrefixStore(url, _open_store()), here.rank, here.size


def _open_store() -> dist.TCPStore:
    """Connect to the launcher's store."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=ANSWER)


def _close_groups() -> None:
    """Drop the process groups, what DTensor has planned for their meshes, and the old model."""
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.distributed_c10d._abort_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()
    # a group that could not be opened was counted, and its number is a part of its keys
    dist.distributed_c10d._world.group_count = 0
    if "torch._inductor.compile_fx" in sys.modules:  # else `reset` imports it, for seconds
        torch._dynamo.reset()  # after eight models of one kind it would compile no more
    gc.collect()  # the old model, which the loop has not collected
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError):
        torch._C._clear_DTensor_sharding_propagator_cache()
