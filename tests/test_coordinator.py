"""Node 0 decides on a round with as many calls to the launchers' store for many ranks as for few."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from checkpoint.rounds import Door
from configs.load import load_config
from configs.rounds import (
    CALL,
    END,
    ENDED,
    HOLDER,
    LATEST,
    LOST,
    NO_STATE,
    OVER,
    RoundOfRanks,
    at_door,
    come,
    key,
    report_death,
    report_loss,
)
from tools.launch import rounds
from tools.launch.rounds import Coordinator, alive, connect

RANKS = 4  # of a node
OPTIONS = [
    "--parallelism.data_parallel_replicate=4",
    "--training.global_batch_size=144",
    "--training.local_batch_size=1",
]


class Counted:
    """A store that counts its calls."""

    def __init__(self, store: TCPStore) -> None:
        self.store = store
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self.store, name)


def serve() -> TCPStore:
    seconds = timedelta(seconds=20)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=seconds)


def coordinator(server: TCPStore, nodes: int) -> Coordinator:
    where = ("127.0.0.1", server.port)
    cfg = load_config(OPTIONS, nodes * RANKS, RANKS)
    found = Coordinator(where, OPTIONS, cfg, nodes, RANKS)
    store = connect(where)
    store.set(LATEST, "0")
    for node in range(nodes):
        store.set(alive(node), "1")
    found.store = Counted(store)
    return found


def calls_of_a_round(server: TCPStore, nodes: int) -> int:
    """Lose a rank of the second replica, go on without it, and let it come back. Returns the calls."""
    node0 = coordinator(server, nodes)
    here = node0.store.store  # one connection, whose calls are done in order
    ranks = nodes * RANKS
    second = range(ranks // 4, ranks // 2)
    assert node0._look(0) == 0 and not node0._have_come({})
    report_death(here, 0, second[0])
    report_loss(here, 0)
    for slot in range(ranks):
        if slot != second[0]:
            come(here, 0, slot, 7)
    come(here, 0, second[0], -1)  # the process in its place is no member of this round
    assert node0._end(0) == 1
    chosen = RoundOfRanks.read(server.get(key(1, "ranks")))
    assert node0.members == chosen.slots == [slot for slot in range(ranks) if slot not in second]
    for slot in second[1:]:
        come(here, 1, slot, 7)
    assert not node0._have_come(at_door(here, 1))
    come(here, 1, second[0], -1)
    assert node0._have_come(at_door(here, 1)) and not node0._have_come(at_door(here, 1))
    return node0.store.calls


def test_calls_do_not_grow_with_the_ranks():
    assert calls_of_a_round(serve(), 12) == calls_of_a_round(serve(), 4) < 40


def test_a_launcher_that_has_not_begun_is_waited_for():
    server = serve()
    node0 = coordinator(server, 4)
    node0.store.store.delete_key(alive(2))
    slots = range(4 * RANKS)
    assert not node0._silent(slots)
    time.sleep(0.1)
    assert node0._silent(slots, 0.05) == {0, 1, 3}


def test_a_launcher_that_stood_still_itself_calls_no_other_silent(monkeypatch):
    """As one that was stopped, or whose virtual machine was: it hears of no sign meanwhile."""
    clock = [0.0]
    monkeypatch.setattr(rounds.time, "monotonic", lambda: clock[0])
    signs = rounds.Signs()
    seconds = []
    for clock[0] in (100.0, 100.2, 130.0, 130.2):
        seconds.append(signs.silence(b"host/7"))
    assert seconds == pytest.approx([0.0, 0.2, 0.7, 0.9])
    assert signs.silence(b"host/8") == 0.0


def test_who_comes_twice_is_as_far_as_it_said_last():
    server = serve()
    come(server, 3, 5, 9)
    come(server, 3, 5, 10)
    assert at_door(server, 3) == {5: 10} and not at_door(server, 4)


def test_a_host_that_is_back_before_it_was_missed_is_a_loss():
    server = serve()
    node0 = coordinator(server, 4)
    come(node0.store.store, 0, 3, NO_STATE)
    assert node0._look(0) == 0 and server.get(key(0, END)).decode() == LOST


def with_a_replica_at_the_door(server: TCPStore) -> tuple[Coordinator, TCPStore]:
    """Return the coordinator of a round of three replicas whose fourth has come, and its store."""
    node0 = coordinator(server, 4)
    here = node0.store.store
    node0.members = list(range(3 * RANKS))
    for slot in range(3 * RANKS, 4 * RANKS):
        come(here, 0, slot, NO_STATE)
    return node0, here


@pytest.mark.parametrize("how", ["is silent", "is back before it was missed"])
def test_a_host_that_is_lost_while_others_are_to_join_is_a_loss(how, monkeypatch):
    """All others wait for its ranks in the groups of the round."""
    server = serve()
    node0, here = with_a_replica_at_the_door(server)
    assert node0._look(0) == 0
    assert server.check([key(0, CALL)]) and not server.check([key(0, END)])
    if how == "is silent":
        monkeypatch.setattr(node0, "_silent", lambda slots, seconds=0: {1})
    else:
        come(here, 0, RANKS, NO_STATE)
    assert node0._look(0) == 0 and server.get(key(0, END)).decode() == LOST


def test_a_round_ends_in_order_when_all_its_ranks_have_left():
    server = serve()
    node0, here = with_a_replica_at_the_door(server)
    for slot in range(3 * RANKS):
        assert node0._look(0) == 0
        come(here, 0, slot, 7)
    assert node0._look(0) == 1 and server.get(key(0, END)).decode() == ENDED
    assert node0.members == list(range(4 * RANKS))


def test_rounds_that_do_no_step_end():
    """A link between two hosts stays cut, while both reach node 0. A process that ends is counted by
    its launcher."""
    server = serve()
    node0 = coordinator(server, 4)
    here = node0.store.store
    steps = [6, *[7] * rounds.IN_VAIN, 8, 8, *[8] * rounds.IN_VAIN]
    for number, step in enumerate(steps):
        report_loss(here, number)
        if number == len(steps) - rounds.IN_VAIN:
            report_death(here, number, 0)
        for slot in node0.members:
            come(here, number, slot, step)
        assert node0._end(number) == number + 1 and not server.check([OVER])
    report_loss(here, len(steps))
    for slot in node0.members:
        come(here, len(steps), slot, 8)
    assert node0._end(len(steps)) == len(steps) and server.get(OVER) == b"1"


def test_a_process_is_not_taken_for_the_one_before_it(monkeypatch):
    """Its host was lost while it waited with its state, and has come back."""
    server = serve()
    monkeypatch.setenv(HOLDER, "here")
    server.set(alive(0), "here/1")
    rest = {"replicas": 1, "options": [], "source": 0, "whole": True, "local_size": 2}
    for number, step in (1, 7), (2, NO_STATE):
        ranks = RoundOfRanks(slots=[0, 1], steps=[7, step], step=7, **rest)
        server.set(key(number, "ranks"), ranks.text())
    door = Door.__new__(Door)
    door.store, door.node, door.slot, door.number, door.kept = server, 0, 1, 0, None
    assert door._next_with_this(None).steps == [7, NO_STATE]
    assert server.get(key(1, END)).decode() == LOST
    assert at_door(server, 0) == at_door(server, 1) == {1: NO_STATE}


@pytest.mark.parametrize("computes", [True, False])
def test_a_rank_that_compiles_gets_more_time(computes, monkeypatch):
    used = iter([3.0, 3.0 + 0.9 * computes * 2 * rounds.PATIENCE])
    monkeypatch.setattr(rounds, "processor_seconds", lambda pid: next(used))
    seen = rounds.LossSeen(4, [7])
    seen.since -= 2 * rounds.PATIENCE
    assert seen.is_over_for(7) is not computes


SPIN = """
import os, subprocess, sys, threading, time
def spin():
    while True:
        pass
if sys.argv[1] == "its main thread":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # with the others
    spin()
if sys.argv[1] == "a child":
    subprocess.run([sys.executable, sys.argv[0], "its main thread"])
if sys.argv[1] == "another thread":
    threading.Thread(target=spin).start()
time.sleep(60)
"""


@pytest.mark.slow
def test_what_computes(tmp_path):
    """A rank that waits for a processor does, and one that waits for a compiler: one whose gloo
    threads spin does not."""
    kinds = ["its main thread", "its main thread", "a child", "another thread", "nothing"]
    script = tmp_path / "spin.py"
    script.write_text(SPIN)
    started = [
        subprocess.Popen([sys.executable, script, kind], start_new_session=True) for kind in kinds
    ]
    try:
        time.sleep(2.0)
        seen = rounds.LossSeen(4, [process.pid for process in started])
        time.sleep(1.5)
        seconds = [rounds.processor_seconds(pid) - before for pid, before in seen.before.items()]
        assert min(seconds[:3]) > 1.0 and max(seconds[3:]) < 0.3, seconds
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
