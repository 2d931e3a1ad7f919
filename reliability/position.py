"""Writes a rank's position to a file of the run's folder that outlives the rank. You can skip this
file.

Each rank writes its step, microbatch, phase and layer into memory that is mapped to
<folder>/logs/rank-00000.position: one `pack_into` from each hook, no system call, no operator. A
thread, the heartbeat, checks twice a second whether that has changed. Only for a rank that has
stopped moving does it write more: the stacks of its threads, the collectives that it has begun and
those that have not ended, as PyTorch's flight recorder has them for gloo and for NCCL, below Python
and inside compiled graphs. `python -m tools.hang` puts the ranks' files together.
"""

import ipaddress
import json
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelisms import mesh as meshes
from reliability.position_file import (
    ABOUT_AT,
    LENGTH,
    MAGIC,
    NO_LAYER,
    PHASES,
    QUIET,
    SEEN,
    SEEN_AT,
    SIZE,
    STANDING_AT,
    WHERE,
    WHERE_AT,
    WHO,
    as_row,
    own,
)

TICK = 0.5  # seconds between two looks of the heartbeat
STANDS = 1.0  # seconds without a move after which a rank stands still
AGAIN = 2.0  # seconds after which the heartbeat looks more closely again
FLIGHTS = 32  # collectives that have ended, of which the heartbeat writes


class Position:
    """This rank's file. `begin` and the hooks of `follow` write where the rank is."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self.moves = 0
        self.step = 0
        self.phase = 0
        self.microbatch = 0
        self.layer = NO_LAYER
        self.layers: list[str] = []
        self.memory: bytearray | mmap.mmap = bytearray(SIZE)
        self.over = threading.Event()
        self.heartbeat: threading.Thread | None = None

    def open(self) -> None:
        """Create the file and map it. Its blocks are allocated here: where a full disk has none for
        a page, a write to it would kill the process (SIGBUS)."""
        # PyTorch reads this when the first process group is made
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        # A new file, instead of overwriting that of an earlier start: a process that still has
        # that one mapped would die when it is shortened (SIGBUS).
        self.path.unlink(missing_ok=True)
        with open(self.path, "xb+") as file:
            file.write(bytes(SIZE))
            file.flush()
            self.memory = mmap.mmap(file.fileno(), SIZE)
        now = time.time()
        ranks = meshes.world().size
        WHO.pack_into(self.memory, 0, MAGIC, self.rank, ranks, os.getpid(), now)
        SEEN.pack_into(self.memory, SEEN_AT, now, now, 0.0, 0.0, 0.0)
        self._about()
        self._write()
        self.heartbeat = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self.heartbeat.start()

    def close(self, failed: bool) -> None:
        """Stop the heartbeat. The file stays as it is: after a failure it says where the rank
        was."""
        self.over.set()
        if self.heartbeat:
            self.heartbeat.join(timeout=5.0)
        if not failed:
            self.begin("end")
        looked, moved, _, *gap = SEEN.unpack_from(self.memory, SEEN_AT)
        now = time.time()
        if now - looked > QUIET + 2 * TICK:  # woken, and at its end before the heartbeat looked
            gap = [looked, now]
        SEEN.pack_into(self.memory, SEEN_AT, looked, moved, now, *gap)

    # what the rank itself writes ---------------------------------------------------------------------

    def _write(self) -> None:
        self.moves += 1
        WHERE.pack_into(
            self.memory,
            WHERE_AT,
            self.moves,
            self.step,
            self.phase,
            self.microbatch,
            self.layer,
        )

    def begin(self, phase: str) -> None:
        """Record that a phase of the run begins; with "data" the next step."""
        self.phase = PHASES.index(phase)
        self.layer = NO_LAYER
        self.microbatch = 0
        self.step += phase == "data"
        self._write()

    def follow(self, stages: list[Any], optimizer: torch.optim.Optimizer, step: int) -> None:
        """Know from now on which block computes, and when the optimizer does. stages: the model, or
        this rank's parts of it (parallelisms/pp.py::stages_of); step: how many are done.

        The hooks are outside of what is compiled or recomputed (parallelisms/blocks.py), and before
        those of FSDP: a block's all-gather belongs to the block.
        """
        self.step = step
        for stage in stages:
            stage.register_forward_pre_hook(self._begin_microbatch, prepend=True)
            stage.register_forward_hook(partial(self._end_forward, NO_LAYER), prepend=True)
            for number, block in stage.layers.items():
                layer = len(self.layers)
                self.layers.append(f"layers.{number}")
                block.register_forward_pre_hook(partial(self._forward, layer), prepend=True)
                block.register_forward_hook(partial(self._end_forward, layer), prepend=True)
        optimizer.register_step_pre_hook(partial(self._optimizer, "optimizer"))
        optimizer.register_step_post_hook(partial(self._optimizer, "between steps"))
        self._about()

    def _begin_microbatch(self, module: nn.Module, args: tuple) -> None:
        self.microbatch += 1
        self._forward(NO_LAYER, module, args)

    def _forward(self, layer: int, module: nn.Module, args: tuple) -> None:
        if torch.is_grad_enabled():  # not in validation
            self.phase = FORWARD
        self.layer = layer
        self._write()

    def _end_forward(self, layer: int, module: nn.Module, args: tuple, output: Any) -> None:
        """Register the hook of the block's backward, which begins when the block's output gets its
        gradient."""
        for x in output if isinstance(output, tuple) else (output,):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(partial(self._backward, layer, self.microbatch))
                return

    def _backward(self, layer: int, microbatch: int, gradient: Tensor) -> None:
        self.phase = BACKWARD
        self.layer = layer
        self.microbatch = microbatch
        self._write()

    def _optimizer(self, phase: str, *_: Any) -> None:
        self.begin(phase)

    def _about(self) -> None:
        about = {"host": socket.gethostname(), "layers": self.layers}
        self._text(ABOUT_AT, STANDING_AT, about)

    def _text(self, at: int, end: int, content: Any) -> None:
        """Write JSON there; what is too long is left out as a whole, and a note says so."""
        data = json.dumps(content).encode()
        if len(data) > end - at - LENGTH.size:
            data = json.dumps({"too long": len(data)}).encode()
        LENGTH.pack_into(self.memory, at, 0)
        start = at + LENGTH.size
        self.memory[start : start + len(data)] = data
        LENGTH.pack_into(self.memory, at, len(data))

    # what the heartbeat writes -------------------------------------------------------------------------

    def _watch(self) -> None:
        moves = self.moves
        moved = looked_closely = last = time.time()
        gap = (0.0, 0.0)
        while not self.over.wait(TICK):
            now = time.time()
            if now - last > QUIET:  # the process was stopped: the launcher wakes it to end it
                gap = (last, now)
            last = now
            if self.moves != moves:
                moves = self.moves
                moved = looked_closely = now
                LENGTH.pack_into(self.memory, STANDING_AT, 0)
            elif now - moved >= STANDS and (
                looked_closely == moved or now - looked_closely >= AGAIN
            ):
                looked_closely = now
                self._text(STANDING_AT, SIZE, self._standing())
            SEEN.pack_into(self.memory, SEEN_AT, now, moved, 0.0, *gap)

    def _standing(self) -> dict[str, Any]:
        """Collect the diagnostics of a rank that hangs. A part that fails is replaced by the
        error."""
        parts: dict[str, Callable[[], Any]] = {
            "threads": threads,
            "state": state_of_main_thread,
            "groups": groups,
            "flights": flights,
            "children": children,
            "unanswered": unanswered,
        }
        found = {}
        for name, part in parts.items():
            try:
                found[name] = part()
            except Exception as error:
                found[f"{name} failed"] = f"{type(error).__name__}: {error}"
        return found


FORWARD, BACKWARD = PHASES.index("forward"), PHASES.index("backward")


def threads() -> list[dict[str, Any]]:
    """List the Python threads but this one, the main one first: the file of the innermost frame,
    and the two innermost lines of this repository. A thread without such a line is left out."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = frames_of_others()
    rows = []
    for number in sorted(frames, key=lambda n: n != main):
        lines = own_lines(frames[number])
        if lines or number == main:
            inner = frames[number].f_code.co_filename
            rows.append({"name": names.get(number, ""), "inner": inner, "lines": lines[:2]})
    return rows


def frames_of_others() -> dict[int, FrameType]:
    """Return the innermost frame of each Python thread but this one, by the thread's number. This
    one's would hold the frames that hold it: a cycle, and while `gc` is off every tensor of every
    frame would stay."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return frames


def own_lines(frame: FrameType | None) -> list[str]:
    lines = []
    while frame:
        file = own(frame.f_code.co_filename)
        if file and frame.f_code.co_filename != __file__:
            lines.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return lines


def state_of_main_thread() -> str:
    """Read the state of the main thread: R, S, D or T, as in proc(5)."""
    return _stat(os.getpid(), f"/task/{os.getpid()}")[0]


def _stat(process: int, task: str = "") -> list[str]:
    """Read the fields of a process's or thread's stat from its state on."""
    text = Path(f"/proc/{process}{task}/stat").read_text()
    return text.rpartition(")")[2].split()


def groups() -> list[list[Any]]:
    """Return [name, description, ranks, collectives begun] of each process group of this rank."""
    if not dist.is_initialized():
        return []
    world = dist.distributed_c10d._world
    rows = []
    for group, name in list(world.pg_names.items()):
        ranks = sorted(world.pg_group_ranks[group])
        begun = group._get_sequence_number_for_group()
        rows.append([name, group.group_desc, as_range(ranks), begun])
    return rows


def as_range(ranks: list[int]) -> dict[str, int] | list[int]:
    """Shorten ranks at equal distances to the arguments of range: a group may have thousands."""
    if len(ranks) > 8:
        step = ranks[1] - ranks[0]
        if ranks == list(range(ranks[0], ranks[-1] + 1, step)):
            return {"start": ranks[0], "stop": ranks[-1] + 1, "step": step}
    return ranks


def flights() -> list[list[Any]]:
    """List the last collectives of every group, and all that have not ended: [group, sequence
    number, kind, sizes, types, has it ended]."""
    if os.environ.get("TORCH_FR_BUFFER_SIZE") == "0":
        raise RuntimeError("TORCH_FR_BUFFER_SIZE is 0, so no collective is recorded")
    rows = []
    for dump in "_dump_fr_trace_json", "_dump_nccl_trace_json":
        dump_json = getattr(dist.distributed_c10d, dump, None) or getattr(
            torch._C._distributed_c10d, dump, None
        )
        if dump_json:
            rows += [
                as_row(entry) for entry in json.loads(dump_json(True, False)).get("entries", [])
            ]
    open_rows = [row for row in rows if not row[-1]][:FLIGHTS]
    last = {(row[0], row[2].partition(":")[0]): row for row in rows if row[-1]}
    recent = [row for row in rows[-FLIGHTS:] if row[-1]]
    kept = []
    for row in [*last.values(), *recent, *open_rows]:
        if row not in kept:
            kept.append(row)
    return kept


def children() -> list[list[Any]]:
    """List the processes that this one has started (data workers): [process, state, share of a
    processor over a tenth of a second]."""
    processes = []
    for file in Path("/proc/self/task").glob("*/children"):
        processes += map(int, file.read_text().split())
    before = {process: _ticks(process) for process in processes}
    time.sleep(0.1)
    rows = []
    for process in processes:
        ticks = _ticks(process) - before[process]
        share = ticks / os.sysconf("SC_CLK_TCK") / 0.1
        rows.append([process, _stat(process)[0], round(min(share, 1.0), 2)])
    return rows


def _ticks(process: int) -> int:
    fields = _stat(process)
    return int(fields[11]) + int(fields[12])


TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))


def unanswered() -> list[str]:
    """List the addresses that acknowledge nothing of what this process has written.

    The kernel sends again what was under way when the network failed (`retrnsmt`, the column that
    /proc/net/tcp names so). Where the route is gone, it sends nothing, and probes (`timeout`, the
    number of probes without an answer). A receiver whose window is full answers each probe.
    """
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue
    peers = set()
    tables = [table for table in TABLES if table.exists()]
    for table in tables:
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            waiting = int(fields[4].partition(":")[0], 16)
            sent_again, probes = int(fields[6], 16), int(fields[8])
            silent = sent_again or probes > 1
            if f"socket:[{fields[9]}]" in own and waiting and silent:
                peers.add(_address(fields[2].partition(":")[0]))
    return sorted(peers)


def _address(words: str) -> str:
    """Return the address that /proc/net/tcp shows as 32-bit words in the order of this machine."""
    packed = b"".join(
        int(words[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(words), 8)
    )
    address = ipaddress.ip_address(packed)
    return str(getattr(address, "ipv4_mapped", None) or address)
