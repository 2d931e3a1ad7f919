"""Run the checks of tools/preflight/arguments.py on every rank. Each row of CHECKS measures
something there; rank 0 judges all answers together and prints one line each, with the ranks and
hosts concerned and what to do.

Answers and verdicts go through the launcher's key-value store, which lives outside the ranks: so a
rank that died, hangs or never came is named on the page and does not block it. Each check runs in
its own thread, so a rank that hangs can report where. A check that depends on a failed one is
skipped, with a line that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from configs.schema import InputError, redact
from parallelisms import mesh as meshes
from reliability.exit import DONE, FAILED, WRONG_INPUT
from reliability.stop import STOP_SIGNALS
from tools.plan.device import load_device
from tools.preflight import bucket, copies, host, job, machine, network
from tools.preflight.answers import ResultStore, Stopped, Worker, judge_trouble
from tools.preflight.arguments import NEEDS, chosen, expected
from tools.preflight.probe import Probe, ProbeRow, failed, in_seconds, spans
from training import log

# seconds from a collective's limit to that of its check: so a rank that waits for another can say
# it
SLACK = 5
RESULTS = ("FAIL", "warn", "ok", "left out")  # in the order of the page
VERDICTS = ("fit for this run", "NOT fit for this run", "wrong configuration or input")


@dataclass(frozen=True)
class HealthCheck:
    measure: Callable[[Probe], dict]  # on every rank; what it returns is JSON
    judge: Callable[[Probe, list[dict]], list[ProbeRow]]  # on rank 0, of the answers of all ranks


CHECKS = {
    "ranks": HealthCheck(machine.measure_ranks, machine.judge_ranks),
    "config": HealthCheck(machine.measure_config, machine.judge_config),
    "devices": HealthCheck(machine.measure_devices, machine.judge_devices),
    "host": HealthCheck(host.measure_host, host.judge_host),
    "copies": HealthCheck(copies.measure_copies, copies.judge_copies),
    "same": HealthCheck(machine.measure_same, machine.judge_same),
    "compute": HealthCheck(machine.measure_compute, machine.judge_compute),
    "folder": HealthCheck(machine.measure_folder, machine.judge_folder),
    "data": HealthCheck(job.measure_data, job.judge_data),
    "connect": HealthCheck(network.measure_connect, network.judge_connect),
    "clock": HealthCheck(network.measure_clock, network.judge_clock),
    "build": HealthCheck(job.measure_build, job.judge_build),
    "bandwidth": HealthCheck(network.measure_bandwidth, network.judge_bandwidth),
    "step": HealthCheck(job.measure_step, job.judge_step),
    "save": HealthCheck(job.measure_save, job.judge_save),
}


class Page:
    """Page of rank 0. Each row is printed as soon as it is known."""

    def __init__(self, title: str) -> None:
        self.rows: list[ProbeRow] = []
        self.answers: dict[str, list[dict]] = {}
        self.title = redact(title)
        self.began = time.monotonic()
        self.wrong_input = False
        print(f"{self.title}\n{'check':<10} {'result':<8} detail", flush=True)

    def add(self, check: str, rows: list[ProbeRow]) -> None:
        margin = "\n" + " " * 20
        order = sorted(rows, key=lambda row: RESULTS.index(row.result))
        for row in order:
            row.check = check
            row.detail = redact(row.detail)
            text = textwrap.wrap(row.detail, 101, break_long_words=False, break_on_hyphens=False)
            print(f"{check:<10} {row.result:<8} {margin.join(text)}", flush=True)
        self.rows += order

    @property
    def code(self) -> int:
        if self.wrong_input:
            return WRONG_INPUT
        return FAILED if any(row.result == "FAIL" for row in self.rows) else DONE

    def close(self, json_path: str) -> None:
        counts = Counter(row.result for row in self.rows)
        summary = ", ".join(f"{n} {result}" for result, n in sorted(counts.items()))
        seconds = in_seconds(time.monotonic() - self.began)
        print(f"preflight: {VERDICTS[self.code]}: {summary}; {seconds}", flush=True)
        if not json_path:
            return
        rows = [asdict(row) for row in self.rows]
        about = {"title": self.title, "code": self.code, "rows": rows, "answers": self.answers}
        try:
            Path(json_path).write_text(redact(json.dumps(about, indent=1)) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"--json={json_path} cannot be written: {error.strerror}", file=sys.stderr)


def run_checks(probe: Probe, results: ResultStore, names: list[str], page: Page | None) -> int:
    """Run every check in turn on this rank; `page` on rank 0. Returns the exit code."""
    worker = Worker()
    blocked: dict[str, str] = {}  # check -> the failed check that it depends on
    code = FAILED
    for name in names:
        check = CHECKS[name]
        limit = probe.limit(name)
        if cause := next((n for n in NEEDS[name] if n in blocked), None):
            blocked[name] = blocked[cause]
            if page:
                page.add(name, [ProbeRow("left out", f"because {blocked[cause]} failed")])
            continue
        stopped = None
        try:
            answer = worker.call(check.measure, probe, limit + SLACK)
        except Stopped as signalled:
            stopped = signalled
            answer = {"stopped": f"was told to stop ({signalled})"}
        results.answer(name, answer)
        try:
            if page:
                verdict = _judge(probe, results, page, name, 3 if stopped else limit + 2 * SLACK)
            else:
                verdict = None if stopped else results.verdict(name, limit + 4 * SLACK)
        except Stopped as signalled:
            stopped = signalled
            verdict = _judge(probe, results, page, name, 3) if page else None
        if stopped and page:
            text = f"stopped by {stopped}: a rank has ended, or someone wants it"
            page.add("all else", [failed(text)])
        elif not stopped and verdict is None:
            text = f"rank 0 gave no verdict on {name}: it died or hangs"
            print(f"preflight: {spans([probe.world.rank])}: {text}", file=sys.stderr)
        if stopped or verdict is None:
            return FAILED
        probe.id = verdict["id"]
        code = verdict["code"]
        if verdict["blocks"]:
            blocked[name] = name
        if verdict["end"]:
            if page and name != names[-1]:
                left = ", ".join(names[names.index(name) + 1 :])
                text = f"{left}: the ranks above would be waited for again"
                page.add("all else", [ProbeRow("left out", text)])
            return code
    return code


def _judge(probe: Probe, results: ResultStore, page: Page, name: str, seconds: float) -> dict:
    """Judge a check on rank 0. Returns its rows and the verdict, which all ranks receive."""
    answers = page.answers[name] = results.collect(name, seconds)
    if name == "ranks":
        there = {r: a["value"] for r, a in enumerate(answers) if "value" in a}
        probe.hosts = machine.host_names(there)
    if all("value" in a for a in answers):
        rows = CHECKS[name].judge(probe, [a["value"] for a in answers])
        end = False
    else:
        rows = judge_trouble(probe, name, answers)
        end = any(
            not a or "hangs" in a or "stopped" in a or a.get("kind") == "wait" for a in answers
        )
        page.wrong_input = page.wrong_input or all(a.get("kind") == "input" for a in answers)
    page.add(name, rows)
    blocks = any(row.result == "FAIL" and row.blocks for row in rows)
    verdict = {"id": probe.id, "blocks": blocks, "end": end, "code": page.code}
    results.decide(name, verdict)
    return verdict


def clean(probe: Probe) -> None:
    """Remove what was written: rank 0 all of it, each host its own where no folder is shared."""
    with suppress(Exception):
        if probe.lease:
            probe.lease.release()
    if probe.place and (probe.world.rank == 0 or probe.world.local_rank == 0):
        shutil.rmtree(probe.place, ignore_errors=True)
    in_store = bucket.prefix(probe.cfg, probe.id) if probe.cfg else None
    if probe.place and probe.world.local_rank == 0:
        copies.remove((in_store or probe.place) / "checkpoints")
    if in_store and probe.place and probe.world.rank == 0:
        with suppress(InputError):
            in_store.remove_below()


def run(options: argparse.Namespace, argv: list[str], store: dist.Store | None = None) -> int:
    """store: reaches all ranks; without one, the launcher's is used. Raises InputError."""
    names = chosen(options.only, options.skip)
    world = meshes.world()
    host = socket.gethostname()
    probe = Probe(
        argv,
        world,
        host,
        os.environ.get("GROUP_RANK", host),
        options.timeout,
        expected(options.expect),
        load_device(options.device) if options.device else None,
    )
    page = None
    if world.rank == 0:
        probe.id = os.urandom(6).hex()
        page = Page(
            f"preflight of {' '.join(argv) or 'configs/llama_debug.toml'}, world size {world.size}"
        )
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)
    log.leave_out_harmless()
    results = ResultStore(
        store or launcher_store(world, probe.limit("ranks")), world.rank, world.size
    )
    try:
        code = run_checks(probe, results, names, page)
        if page:
            page.close(options.json)
    except Stopped:  # between two checks
        code = FAILED
    finally:
        clean(probe)
    return code


def _stop(number: int, frame: object) -> None:
    for other in STOP_SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # told once is enough: there is an answer to give
    raise Stopped(signal.Signals(number).name)


def launcher_store(world: meshes.World, seconds: int) -> dist.Store:
    """Open the launcher's store, which the process group will use too; one process has its own."""
    if world.size == 1:
        return dist.HashStore()
    if dist.is_initialized():
        return dist.PrefixStore("preflight", dist.distributed_c10d._get_default_store())
    store, *_ = next(
        dist.rendezvous("env://", world.rank, world.size, timeout=timedelta(seconds=seconds))
    )
    return dist.PrefixStore("preflight", store)


def answered(options: argparse.Namespace, argv: list[str]) -> int:
    """Run the preflight with the launcher's store. Returns the exit code."""
    try:
        return run(options, argv)
    except dist.DistError as error:
        who = spans([meshes.world().rank])
        why = str(error).splitlines()[0]
        print(f"preflight: {who}: the launcher's store is out of reach: {why}", file=sys.stderr)
        return FAILED
