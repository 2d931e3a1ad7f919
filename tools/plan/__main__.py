"""Know before you pay: memory, communication, time and cost of a run on GPUs that you do not have.

    python -m tools.plan configs/llama_70b.toml --gpus 256 --device h100 [--table.key=value ...]
    python -m tools.plan configs/llama_405b.toml --gpus 1024 --search --write best.toml
    python -m tools.plan configs/llama_8b.toml --gpus 64 --html plan.html

Runs the same `train.build` and `train.train_step` as a run does, on a fake process group with fake tensors
(`tools/plan/trace.py`), in seconds on a laptop, and plays the traced step through on a device's numbers (`tools/plan/estimate.py`).
Exit code 0: it fits; 1: it does not; 2: wrong configuration or arguments. `docs/planning.md` says how far off it was where
it could be compared.
"""

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import torch

import train
from configs import check
from configs.load import dump, load_config
from configs.schema import Config, InputError
from parallelisms.dp import DTYPES
from tools.plan import page as plan_page, trace
from tools.plan.estimate import Device, Estimate, estimate, load_device
from tools.goodput import best_interval, expected
from tools.plan.page import KINDS
from tools.plan.trace import Step, Where

GIB = 2**30
# Beyond the live bytes that are counted: what CUDA's caching allocator holds and cannot use. TorchTitan published reserved
# memory that was 10 to 23 % above the live bytes of the same configurations (docs/planning.md): the most of them.
MARGIN = 0.23
CONTEXT_GIB = 1.5  # CUDA context, cuBLAS workspaces and NCCL's buffers, outside of the allocator: assumed
# Llama 3 405B had 419 unexpected interruptions in 54 days on 16,384 H100s (arXiv:2407.21783, section 3.3.4).
MTBF_GPU_HOURS = 54 * 24 * 16384 / 419


@dataclass(frozen=True)
class Question:
    """What is asked beside the configuration."""

    gpus: int
    per_host: int
    device: Device
    on_gpu: bool = True
    margin: float = MARGIN
    tokens: float = 0.0  # to train on; 0: what training.steps says
    usd_per_gpu_hour: float = 0.0
    mtbf_gpu_hours: float = MTBF_GPU_HOURS
    restart_seconds: float = 600.0
    storage_gb_per_s: float = 10.0


@dataclass(frozen=True)
class Plan:
    cfg: Config
    ask: Question
    step: Step
    time: Estimate

    @cached_property
    def peak(self) -> tuple[int, Where, dict[str, int]]:
        return self.step.peak()

    @property
    def live(self) -> int:
        """Bytes, at the most."""
        return self.peak[0]

    @property
    def needed(self) -> float:
        """Bytes of the device, with what the allocator and the context add."""
        return self.live * (1 + self.ask.margin) + CONTEXT_GIB * GIB if self.ask.on_gpu else self.live

    @property
    def usable(self) -> float:
        """Bytes that may be live, the rest of the device being the allocator's and the context's."""
        room = self.ask.device.memory_gib * GIB
        return (room - CONTEXT_GIB * GIB) / (1 + self.ask.margin) if self.ask.on_gpu else room

    @property
    def fits(self) -> bool:
        return self.needed <= self.ask.device.memory_gib * GIB

    @property
    def room_for_gathered(self) -> int:
        """Blocks whose weights have room to stay gathered from forward to backward (parallelism.keep_gathered)."""
        p, layers = self.cfg.parallelism, self.step.layers
        if not self.fits or p.reshard_after_forward is False or len(self.step.groups["dp_shard"]) == 1:
            return 0
        narrow = DTYPES.get(self.cfg.training.param_dtype, torch.bfloat16).itemsize
        block = self.step.parameters[layers - 1].elements // p.tensor_parallel * narrow
        return min(layers, p.keep_gathered + int((self.usable - self.live) // block))

    @property
    def tokens_per_step(self) -> int:
        return self.cfg.training.global_batch_size * self.cfg.training.seq_len

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.time.seconds

    @property
    def micro_batches(self) -> int:
        p = self.cfg.parallelism
        return trace.accumulation(self.cfg, self.ask.gpus // p.tensor_parallel)

    def flops(self) -> tuple[float, float, float]:
        """FLOPs per token: derived, counted on this rank and multiplied up, and recomputed ones beside those."""
        counted = again = 0
        for _, times, op in self.step.ops():
            counted += times * (op.product_flops + op.attention_flops - op.again)
            again += times * op.again
        share = self.tokens_per_step * self.cfg.parallelism.tensor_parallel / self.ask.gpus
        up = self.cfg.parallelism.tensor_parallel / share
        family, args = train.architecture(self.cfg)
        return family.flops_per_token(args, self.cfg.training.seq_len), counted * up, again * up

    @property
    def mfu(self) -> float:
        """Model FLOPs per second over the peak of all devices; training/metrics.py computes a run's in the same way."""
        return self.flops()[0] * self.tokens_per_second / self.ask.gpus / self.ask.device.peak

    @property
    def steps(self) -> float:
        return self.ask.tokens / self.tokens_per_step if self.ask.tokens else self.cfg.training.steps

    @property
    def checkpoint_bytes(self) -> int:
        """Weights and optimizer state of the whole model, float32."""
        o = self.cfg.optimizer
        moments = 2 if o.kind == "adamw" else int(o.momentum > 0)
        return sum(p.elements for p in self.step.parameters.values()) * 4 * (1 + moments)

    def saving(self) -> tuple[float, float, float]:
        """Seconds to copy one rank's share to host memory, to write all of it, and that training stands still."""
        share = sum(size for kind, size in self.step.before().items() if kind in ("parameters", "optimizer state"))
        copy, write = share / self.ask.device.host_gb_per_s / 1e9, self.checkpoint_bytes / self.ask.storage_gb_per_s / 1e9
        return copy, write, max(0.0, copy - self.time.seconds) if self.cfg.checkpoint.async_save else copy + write

    @property
    def mtbf(self) -> float:
        """Seconds between interruptions of the whole job, on average."""
        return self.ask.mtbf_gpu_hours * 3600 / self.ask.gpus

    def goodput(self, interval: float) -> float:
        """Share of the time that trains, with so many seconds of work between saves."""
        _, write, stall = self.saving()
        return expected(self.mtbf, stall, self.ask.restart_seconds, interval, write)

    @property
    def best_interval(self) -> float:
        """Seconds of work between saves that lose least; a save is written before the next begins."""
        _, write, stall = self.saving()
        return max(best_interval(self.mtbf, stall), write)


def make_plan(cfg: Config, ask: Question) -> Plan:
    """Trace one step of this configuration and estimate its time. `cfg` has been checked for `ask.gpus` processes."""
    with quiet():
        step = trace.traced(cfg, ask.gpus, ask.per_host, ask.on_gpu)
    selective = cfg.activation_checkpoint.mode == "selective"
    return Plan(cfg, ask, step, estimate(step, ask.device, ask.per_host, cfg.compile.enabled and ask.on_gpu, selective))


class quiet(warnings.catch_warnings):
    """Without PyTorch's remarks on a mesh that does not exist."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
        logging.getLogger("torch.distributed").setLevel(logging.ERROR)


# What a person reads.
def size(count: float) -> str:
    for unit, length, least in (("GiB", GIB, GIB / 10), ("MiB", 2**20, 2**20), ("KiB", 2**10, 10 * 2**10)):
        if count >= least:
            return f"{count / length:,.{1 if unit == 'KiB' else 2}f} {unit}"
    return f"{count:.0f} B"


def span(seconds: float) -> str:
    for unit, length, least in (("days", 86400, 2), ("h", 3600, 2), ("min", 60, 2), ("s", 1, 1), ("ms", 1e-3, 0)):
        if seconds >= least * length:
            return f"{seconds / length:,.1f} {unit}"
    raise AssertionError


def tokens(count: float) -> str:
    for unit, length in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("", 1)):
        if count >= length or not unit:
            return f"{count / length:,.4g}{unit} tokens"
    raise AssertionError


def place(where: Where, step: Step) -> str:
    """Where in the step, in words."""
    if where.phase not in ("forward", "backward"):
        return {"start": "before the first forward", "clip": "clipping", "optimizer": "the optimizer"}[where.phase]
    block = f"block {where.block + 1} of {step.layers}"
    if not 0 <= where.block < step.layers:
        block = "the embedding" if where.block < 0 else "the output and loss"
    micro = ""
    if step.micro_batches > 1:
        last = where.micro == step.micro_batches - 1
        micro = f", {'last' if last else 'first' if where.micro == 0 else 'a middle'} micro-batch"
    return f"{where.phase} of {block}{micro}"


def report(plan: Plan) -> str:
    """The whole plan as text."""
    cfg, ask, step, t = plan.cfg, plan.ask, plan.step, plan.time
    p, d, live = cfg.parallelism, ask.device, plan.peak[2]
    most: dict[str, int] = dict(step.before())
    now = dict(most)
    for _, kind, change in step.curve():
        now[kind] = now.get(kind, 0) + change
        most[kind] = max(most.get(kind, 0), now[kind])
    total = sum(q.elements for q in step.parameters.values())
    sizes = {dim: len(ranks) for dim, ranks in step.groups.items()}
    lines = [
        f"{cfg.model.family} {cfg.model.flavor}, {total / 1e9:,.2f}B parameters, on {ask.gpus:,} x {d.name} "
        f"({ask.gpus // ask.per_host:,} host{'s' * (ask.gpus > ask.per_host)} of {ask.per_host})",
        f"mesh {' x '.join(f'{dim} {n}' for dim, n in sizes.items())}; sequences {cfg.training.global_batch_size:,} x "
        f"{cfg.training.seq_len:,} tokens = {plan.micro_batches} micro-batch{'es' * (plan.micro_batches > 1)} of "
        f"{cfg.training.local_batch_size} per data-parallel rank"
        f"{f', gradients kept {p.accumulate_gradients} in between' if plan.micro_batches > 1 else ''}; checkpointing {cfg.activation_checkpoint.mode}; "
        f"compile {'on' if cfg.compile.enabled else 'off'}",
        "",
        "Memory of rank 0, which has the largest shards".ljust(48) + "at the peak".rjust(14) + "at most".rjust(14),
    ]
    lines += [f"  {KINDS[k][0]:44}{size(live.get(k, 0)):>16}{size(most[k]):>14}" for k in KINDS if most.get(k)]
    lines += [f"  {'live at the peak':44}{size(plan.live):>16}   in {place(plan.peak[1], step)}"]
    if ask.on_gpu:
        lines += [
            f"  {f'+ {ask.margin:.0%} that the caching allocator holds idle':44}{size(plan.live * ask.margin):>16}"
            "   (published runs: 10 to 23 %)",
            f"  {'+ context, cuBLAS, NCCL (assumed)':44}{size(CONTEXT_GIB * GIB):>16}",
        ]
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines += [f"  {'needed':44}{size(plan.needed):>16}   of {d.memory_gib:.1f} GiB: {verdict}", ""]
    if (room := plan.room_for_gathered) > p.keep_gathered:
        lines += [f"  Room for the gathered weights of the last {room} blocks: parallelism.keep_gathered = "
                  f"{room} would save as many gathers with each micro-batch (now {p.keep_gathered}).", ""]  # fmt: skip
    if cfg.compile.enabled:
        lines += ["  Traced uncompiled: compiled blocks keep no more, often less.", ""]

    lines.append("Communication of a step".ljust(34) + f"{'count':>8}{'bytes':>14}{'a message':>26}{'time':>11}{'exposed':>11}")
    for (dim, kind), line in sorted(t.lines.items()):
        if sizes.get(dim, 2) > 1:
            message = " - ".join(dict.fromkeys((size(line.smallest), size(line.largest))))
            lines.append(f"  {dim + ' ' + kind:32}{line.count:>8,}{size(line.sent):>14}{message:>26}"
                         f"{span(line.seconds):>11}{span(line.exposed):>11}")  # fmt: skip
    if not t.lines:
        lines.append("  none")
    derived, counted, again = plan.flops()
    lines += [
        "",
        f"FLOPs per token  {derived:.4g} derived (6N + 12LHET), {counted:.4g} counted ({counted / derived - 1:+.2%}); "
        f"recomputed beside those {again:.3g} ({again / derived:.1%})",
        f"Time of a step   {span(t.seconds)}: matrix products {span(t.products)} at {d.matmul_efficiency:.0%} of "
        f"{d.peak / 1e12:,.{0 if d.peak > 1e13 else 2}f} TFLOP/s, attention {span(t.attention)} at {d.attention_efficiency:.0%} (causal: half), "
        f"memory-bound {span(t.memory_bound)}, "
        f"of which recomputed {span(t.again)}; communication exposed {span(t.exposed)}",
        f"Speed            {plan.tokens_per_second:,.0f} tokens/s, {plan.tokens_per_second / ask.gpus:,.0f} per GPU; "
        f"MFU {plan.mfu:.1%}",
    ]
    seconds = plan.steps * t.seconds
    copy, write, stall = plan.saving()
    interval = cfg.checkpoint.interval * t.seconds or seconds
    share, best = plan.goodput(max(interval, write)), plan.best_interval
    hours = ask.gpus * seconds / share / 3600 if share else float("inf")
    money = f"; ${hours * ask.usd_per_gpu_hour:,.0f} at ${ask.usd_per_gpu_hour:g} per GPU-hour" if ask.usd_per_gpu_hour else ""
    steps = f"{plan.steps:,.0f} steps, {tokens(plan.steps * plan.tokens_per_step)}"
    lines += [
        f"The run          {steps}: {span(seconds)} of training, {span(seconds / share) if share else 'never'} with what "
        f"interruptions cost; {hours:,.0f} GPU-hours{money}",
        f"Checkpoints      {size(plan.checkpoint_bytes)} each; copy to the host {span(copy)}, training waits {span(stall)}; "
        f"written in {span(write)} at {ask.storage_gb_per_s:g} GB/s",
        f"Interruptions    {hours / ask.mtbf_gpu_hours:,.1f} expected, one in {span(plan.mtbf)} "
        f"({ask.mtbf_gpu_hours:,.0f} GPU-hours each); checkpoint every {span(interval)} as configured: {share:.1%} goodput; "
        f"best: every {max(1, round(best / t.seconds)):,} steps ({span(best)}), {plan.goodput(best):.1%}",
    ]
    if write > interval:
        lines.append(f"  A checkpoint takes longer to write than checkpoint.interval = {cfg.checkpoint.interval} steps: "
                     "save less often, or to faster storage.")  # fmt: skip
    if cfg.data.mask_documents:
        lines.append("  data.mask_documents computes less attention than this: the time is an upper bound.")
    if not plan.fits:
        lines += ["", f"It does not fit: {advice(plan)}"]
    return "\n".join(lines)


def advice(plan: Plan) -> str:
    """What to change, by what fills the memory."""
    words, live = [], plan.peak[2]
    if live.get("whole gradients", 0) > plan.live / 4 and plan.micro_batches > 1:
        words.append("accumulation keeps every gradient whole in float32 until the last micro-batch: "
                     'parallelism.accumulate_gradients = "sharded" keeps shards, for a reduce-scatter with each micro-batch')  # fmt: skip
    if live.get("activations", 0) > plan.live / 4:
        words.append("activations fill it: activation_checkpoint.mode = \"full\", a smaller training.local_batch_size, "
                     "more tensor_parallel")  # fmt: skip
    if sum(live.get(k, 0) for k in ("parameters", "optimizer state")) > plan.live / 4:
        words.append("weights and optimizer state fill it: more GPUs to shard them over")
    words.append("--search tries them all")
    return "; ".join(words)


# The search.
MODES = ("full", "selective", "none")  # by what they keep


def with_choice(cfg: Config, tp: int, replicate: int, mode: str, local: int, accumulate: str) -> Config:
    return cfg.model_copy(update={
        "parallelism": cfg.parallelism.model_copy(update={
            "tensor_parallel": tp, "data_parallel_replicate": replicate, "data_parallel_shard": -1,
            "accumulate_gradients": accumulate}),
        "activation_checkpoint": cfg.activation_checkpoint.model_copy(update={"mode": mode}),
        "training": cfg.training.model_copy(update={"local_batch_size": local}),
    })  # fmt: skip


def legal(cfg: Config, ask: Question) -> bool:
    return not check.broken_rules(cfg, ask.gpus, ask.per_host)


def _summary(cfg: Config, ask: Question) -> dict:
    """What the table shows of one choice; small enough to travel between processes."""
    plan = make_plan(cfg, ask)
    p, mode, local = cfg.parallelism, cfg.activation_checkpoint.mode, cfg.training.local_batch_size
    return {
        "choice": (p.tensor_parallel, p.data_parallel_replicate, mode, local, p.accumulate_gradients), "micro": plan.micro_batches,
        "needed": plan.needed, "fits": plan.fits, "seconds": plan.time.seconds,
        "tokens_per_second": plan.tokens_per_second, "mfu": plan.mfu, "exposed": plan.time.exposed,
    }  # fmt: skip


def _column(arguments: tuple[Config, Question, int]) -> list[dict]:
    """All choices of one tensor_parallel; those that cannot fit are passed over.

    With everything else equal, a mode that keeps more needs more, and so does a larger micro-batch (but for the last one,
    which ends accumulation and with it the gradients that it keeps). Sharded accumulation needs less than whole, but exchanges
    gradients once per micro-batch: it is tried where whole does not fit.
    """
    cfg, ask, tp = arguments
    torch.set_num_threads(1)
    most = cfg.training.global_batch_size * tp // ask.gpus
    sizes = sorted({most, *(2**i for i in range(12) if 2**i < most)} - {0})
    found, too_much = [], []
    for mode, local in product(MODES, sizes):
        for accumulate in ("whole", "sharded") if local < most else ("whole",):
            choice = with_choice(cfg, tp, 1, mode, local, accumulate)
            kind = (accumulate, local < most)
            if any(m in MODES[: MODES.index(mode) + 1] and l <= local and k == kind for m, l, k in too_much):
                continue
            if not legal(choice, ask):
                break
            found.append(_summary(choice, ask))
            if found[-1]["fits"]:
                break
            too_much.append((mode, local, kind))
    return found


def search(cfg: Config, ask: Question) -> list[dict]:
    """The choices that fit, fastest first. Raises InputError, naming the nearest, where none does."""
    tps = [tp for tp in range(1, ask.per_host + 1) if ask.per_host % tp == 0 and ask.gpus % tp == 0]
    found = [summary for column in _in_processes(_column, [(cfg, ask, tp) for tp in tps]) for summary in column]
    if not found:
        raise InputError(f"no mesh of {ask.gpus} GPUs is legal, training.global_batch_size = {cfg.training.global_batch_size}: "
                         f"it must be a multiple of the data-parallel ranks, {ask.gpus} / tensor_parallel")  # fmt: skip
    fit = [s for s in found if s["fits"]]
    if not fit:
        nearest = min(found, key=lambda s: s["needed"])
        raise InputError(
            f"nothing fits {ask.device.memory_gib:.1f} GiB on {ask.gpus} GPUs; the nearest is {_named(nearest)}, which needs "
            f"{nearest['needed'] / GIB:.1f} GiB: {_nearest_that_works(cfg, ask, nearest)}"
        )
    # Replicas on top of shards (HSDP): of the best three.
    replicas = [2**i for i in range(1, 12) if 2**i <= ask.gpus // ask.per_host and ask.gpus % 2**i == 0][:3]
    best = [s["choice"] for s in sorted(fit, key=lambda s: -s["tokens_per_second"])[:3]]
    hybrids = [with_choice(cfg, tp, r, *rest) for tp, _, *rest in best for r in replicas]
    found += _in_processes(_apart, [(choice, ask) for choice in hybrids if legal(choice, ask)])
    return sorted((s for s in found if s["fits"]), key=lambda s: -s["tokens_per_second"])


def _apart(arguments: tuple[Config, Question]) -> dict:
    torch.set_num_threads(1)
    return _summary(*arguments)


def _in_processes(run: Callable, work: list) -> list:
    """A process for each piece: PyTorch keeps what belongs to a mesh for as long as a process lives."""
    if not work:
        return []
    with multiprocessing.get_context("fork").Pool(min(len(work), os.cpu_count() or 1), maxtasksperchild=1) as pool:
        return list(pool.imap(run, work))


def _named(summary: dict) -> str:
    tp, replicate, mode, local, accumulate = summary["choice"]
    hsdp = f", data_parallel_replicate = {replicate}" if replicate > 1 else ""
    sharded = ", accumulate_gradients = sharded" if accumulate == "sharded" else ""
    return f"tensor_parallel = {tp}{hsdp}, activation_checkpoint.mode = {mode}, local_batch_size = {local}{sharded}"


def _nearest_that_works(cfg: Config, ask: Question, nearest: dict) -> str:
    """The fewest GPUs, in doublings, on which the nearest choice fits; and the smallest device of the table that takes it."""
    tp, replicate, *_, accumulate = nearest["choice"]
    gpus, words = ask.gpus, []
    for _ in range(6):
        gpus *= 2
        more = Question(**(vars(ask) | {"gpus": gpus}))
        rows = [with_choice(cfg, tp, replicate, "full", l, accumulate) for l in {1, cfg.training.global_batch_size * tp // gpus} if l]
        works = [c for c in rows if legal(c, more) and make_plan(c, more).fits]
        if works:
            choice = (tp, replicate, "full", works[0].training.local_batch_size, accumulate)
            words.append(f"{gpus} GPUs would do ({_named({'choice': choice})})")
            break
    words.append(f"or a device with {nearest['needed'] / GIB:.0f} GiB")
    return ", ".join(words)


def table(found: list[dict], shown: int = 20) -> str:
    rows = [f"{'tp':>4}{'replicas':>10}{'checkpointing':>15}{'micro-batch':>13}{'accumulation':>14}{'memory GiB':>12}"
            f"{'s/step':>9}{'exposed':>9}{'tokens/s':>14}{'MFU':>7}"]  # fmt: skip
    for s in found[:shown]:
        tp, replicate, mode, local, accumulate = s["choice"]
        steps = f"{s['micro']} {accumulate}" if s["micro"] > 1 else "1"
        rows.append(f"{tp:>4}{replicate:>10}{mode:>15}{local:>13}{steps:>14}{s['needed'] / GIB:>12.1f}{s['seconds']:>9.2f}"
                    f"{s['exposed'] / s['seconds']:>9.0%}{s['tokens_per_second']:>14,.0f}{s['mfu']:>7.1%}")  # fmt: skip
    if len(found) > shown:
        rows.append(f"and {len(found) - shown} more that fit")
    return "\n".join(rows)


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m tools.plan", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--gpus", type=int, default=8, help="of the whole run (8)")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="of each host (8)")
    parser.add_argument("--device", default="h100", help="a row of tools/plan/devices.toml, a TOML file of your own, or cpu (h100)")
    parser.add_argument("--margin", type=float, default=MARGIN, help=f"what the allocator adds to live bytes ({MARGIN})")
    parser.add_argument("--tokens", type=float, default=0, help="to train on, as 15e12 (what training.steps says)")
    parser.add_argument("--usd-per-gpu-hour", type=float, default=0)
    parser.add_argument("--mtbf-gpu-hours", type=float, default=MTBF_GPU_HOURS,
                        help="GPU-hours between interruptions (Llama 3's, %(default).0f)")  # fmt: skip
    parser.add_argument("--restart-minutes", type=float, default=10, help="from an interruption to the next step (10)")
    parser.add_argument("--storage-gb-per-s", type=float, default=10, help="of the checkpoint folder, all ranks together (10)")
    parser.add_argument("--search", action="store_true",
                        help="try meshes, checkpointing modes and micro-batches; rank those that fit")  # fmt: skip
    parser.add_argument("--write", metavar="OUT.toml", help="the configuration planned, or with --search the best found")
    parser.add_argument("--html", metavar="OUT.html", help="one page with the memory curve, the time line and the mesh")
    flags, rest = parser.parse_known_args(argv)
    if flags.gpus < 1 or flags.gpus_per_node < 1:
        raise InputError("--gpus and --gpus-per-node are numbers of GPUs, at least 1")
    if flags.gpus > flags.gpus_per_node and flags.gpus % flags.gpus_per_node:
        low = flags.gpus - flags.gpus % flags.gpus_per_node
        high = low + flags.gpus_per_node
        raise InputError(f"--gpus {flags.gpus} is no whole number of hosts of {flags.gpus_per_node}: take {low} or {high}")
    for name in ("mtbf_gpu_hours", "restart_minutes", "storage_gb_per_s"):
        if getattr(flags, name) <= 0:
            raise InputError(f"--{name.replace('_', '-')} must be more than 0")
    return flags, rest


def asked(flags: argparse.Namespace, rest: list[str]) -> tuple[Config, Question]:
    """The checked configuration and the question. Raises InputError, ConfigError with every rule that is broken."""
    per_host, device = min(flags.gpus, flags.gpus_per_node), load_device(flags.device)
    if flags.search:  # the mesh is what is looked for: what the file says of it must not be in the way
        one = ("data_parallel_shard=-1", "data_parallel_replicate=1", "tensor_parallel=1")
        cfg = load_config([*rest, *(f"--parallelism.{option}" for option in one)])
    else:
        cfg = load_config(rest, flags.gpus, per_host)
    on_gpu = flags.device != "cpu"
    if on_gpu and cfg.training.param_dtype == "float32":
        raise InputError('training.param_dtype = "float32": the device table has peaks for bfloat16 only; plan with "bfloat16" '
                         'or "auto"')  # fmt: skip
    if on_gpu:
        cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update={"param_dtype": "bfloat16"})})
    ask = Question(
        flags.gpus, per_host, device, on_gpu, flags.margin, flags.tokens, flags.usd_per_gpu_hour, flags.mtbf_gpu_hours,
        flags.restart_minutes * 60, flags.storage_gb_per_s,
    )  # fmt: skip
    return cfg, ask


def main(argv: list[str] | None = None) -> int:
    """The command line in this file's first lines. Returns the exit code."""
    try:
        flags, rest = arguments(sys.argv[1:] if argv is None else argv)
        cfg, ask = asked(flags, rest)
        if flags.search:
            found = search(cfg, ask)
            print(table(found) + "\n\nThe first of these:\n")
            cfg = with_choice(cfg, *found[0]["choice"])
        plan = make_plan(cfg, ask)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(report(plan))
    if flags.write:
        Path(flags.write).write_text(dump(plan.cfg), encoding="utf-8")
        print(f"\nwritten: {flags.write}")
    if flags.html:
        Path(flags.html).write_text(plan_page.page(plan, report(plan)), encoding="utf-8")
        print(f"\nwritten: {flags.html}")
    return 0 if plan.fits else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends quietly
    sys.exit(main())
