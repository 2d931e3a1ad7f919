"""Pretrain a language model. `build(cfg)` makes the job, `train_step(job, batch)` does one step,
`main(argv)` is the loop.

This file reads top to bottom and knows everyone; nobody but tools and tests imports it. Start it
with ./run_train.sh, which runs it under torchrun; `python train.py configs/llama_debug.toml` is the
same thing as one process.
"""

import errno
import gc
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import configs.cpu  # noqa: F401  how threads wait: it must be known before torch is loaded

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from checkpoint import hf
from checkpoint.manager import CheckpointManager
from configs import check
from configs.load import as_given, dump, help_text, load_config
from configs.schema import Config, InputError
from data import hf_tokenizer
from data.corpora import Corpora
from data.loader import Batch, Batches, loader
from data.open import open_corpora
from data.tokenizer import Tokenizer
from data.workers import LoaderError
from models import FORMATS, MODELS
from models.family import Family
from models.moe import RouterStatistics
from parallelisms import contract, dp, parallelize, pp, tp
from parallelisms import mesh as meshes
from parallelisms.mesh import Mesh
from reliability import collectives, health
from reliability.guard import Guard
from reliability.record import Start, hosts, source_hash
from reliability.stop import STOP_SIGNALS, STOPPED, Stop  # noqa: F401  the signals are tools/preflight's too
from training import attention, init, log
from training.balance import counts_of_step, move_biases
from training.experts import ExpertLoad
from training.feed import Feed
from training.loss import IGNORE, linear_cross_entropy
from training.meter import Meter
from training.metrics import Metrics, model_summary, peak_flops
from training.optim import (
    build_optimizer,
    clip_grad_norm,
    learning_rate,
    set_learning_rate,
    step_if,
)
from training.profiler import profiler
from training.sample import sample
from training.validate import scores, validate

say = logging.getLogger("plumbline")

# Exit codes; STOPPED is 75: stopped on request with a checkpoint, run again to go on.
DONE, FAILED, WRONG_INPUT, CRASH_LOOP = 0, 1, 2, 76


@dataclass
class Job:
    """What every training step needs, and nothing else."""

    cfg: Config
    mesh: Mesh
    # the model's numbers: `Args` of its family, a row of FLAVORS with the overrides of [model]
    args: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer


def architecture(cfg: Config) -> tuple[Family, Any]:
    """The family of the model and its numbers, an instance of the family's `Args`."""
    family = MODELS[cfg.model.family]
    return family, family.Args(**check.architecture(cfg.model))


def build(cfg: Config) -> Job:
    """The mesh, the model sharded over it with its initial values, and the optimizer. The only way
    to build them.

    A parameter's life: meta constructor -> tensor parallel -> checkpointing, compile -> FSDP shard
    -> memory -> initial value -> optimizer. Nothing is allocated before it is sharded, so the whole
    model never exists anywhere. Without a pipeline there is one stage, the model itself.
    """
    family, args = architecture(cfg)
    dp_shard, has_experts = (
        check.data_parallel_shard(cfg, meshes.world().size),
        bool(getattr(args, "n_experts", 0)),
    )
    mesh = meshes.open_mesh(cfg.run, cfg.parallelism, dp_shard, has_experts)
    attention.choose(cfg.training.attention, mesh.device)
    # For a model that draws numbers: those of a tp group draw the same ones, all others do not.
    torch.manual_seed(cfg.run.seed + mesh.dp_rank * mesh.cp + mesh.cp_rank)
    layers, stages, tp_plan = pp.layers_of_stages(cfg, family, args), {}, family.tp_plan(args)
    if mesh.tp > 1:
        with torch.device("meta"):
            tp.check_rows(tp_plan, family.build(args))
    for number in pp.own_stages(cfg.parallelism, mesh.pp_rank):
        with torch.device("meta"):
            stages[number] = family.build(args, layers[number])
        parallelize(stages[number], mesh, cfg, tp_plan)
        dp.allocate(stages[number], mesh.device, cfg.parallelism.cpu_offload)
    model = pp.PipelineStages(stages, layers, mesh, cfg) if mesh.pp > 1 else stages[0]
    init.initialise(model, family.initial_values(args), cfg.run.seed)
    optimizer = build_optimizer(model, family.DECAY, cfg.optimizer)
    return Job(cfg, mesh, args, model, optimizer)


class Flags(NamedTuple):
    """What one rank has to tell all others in a step. The flags travel with the loss, so they cost
    no message of their own."""

    stop: bool = False  # it was asked to stop
    saving: bool = False  # it has not finished its part of the checkpoint that is being written
    # its stream of text has ended, so its batch is empty and the step must not count
    no_data: bool = False


class Gradients(NamedTuple):
    """What comes with the gradient of a step. The gradient itself is in the weights' `.grad`."""

    loss: Tensor  # float32, a scalar: nats per token, mean over the global batch
    raised: Tensor  # float64 [flags]: on how many ranks each of the flags is raised
    losses: Tensor  # this and the rest as in StepResult
    expert_counts: dict[int, Tensor]
    router_sums: dict[int, Tensor]
    prepare_seconds: float


@dataclass(frozen=True)
class StepResult:
    loss: float  # nats per token, mean over the global batch
    grad_norm: float  # of the whole unsharded gradient, before clipping
    skipped: bool  # the gradient was not finite, or a spike, so no weight changed
    losses: Tensor  # float32 [A, b, T], of this rank's tokens, 0 where a label does not count
    # number of a layer -> int64 [X], tokens of the global batch that each expert got
    expert_counts: dict[int, Tensor]
    # number of a layer -> float32 [2], of this rank's tokens: see models/moe.py::RouterStatistics
    router_sums: dict[int, Tensor]
    prepare_seconds: float  # this rank's, up to the first collective
    optimizer_seconds: float
    # ranks on which recomputing the gradient gave a different result; then no weight changed
    mismatching_ranks: list[int]
    flags: Flags  # whether each was raised on any rank: the same on all ranks


def train_step(
    job: Job,
    batch: dict[str, Tensor],
    skip_above: float = math.inf,
    replay: bool = False,
    flags: Callable[[], Flags] = Flags,
) -> StepResult:
    """One optimizer step on this rank's share of the global batch: tokens and labels, int64 [A, b,
    T] in A microbatches (with context parallelism T is this rank's part of a sequence).

    A gradient whose norm is above `skip_above` changes no weight (training.skip_spikes). With
    `replay` the gradient is computed twice and compared with itself (debug.replay_interval).
    `flags()`, what this rank has to tell the others, is called after the backward pass, so that a
    signal counts in the step in which it came.

    `record_function` names the phases of a step: forward, loss (in training/feed.py), backward,
    clip, optimizer. The profiler shows these names, and tools/plan and tools/bench/sections.py find
    the phases by them alone.
    """
    if replay:
        flags_now = flags()  # what is sent must be the same both times
        step, mismatching_ranks = collectives.twice(
            lambda: gradients(job, batch, lambda: flags_now), job.optimizer, job.mesh
        )
    else:
        step, mismatching_ranks = gradients(job, batch, flags), []
    with record_function("clip"):
        grad_norm = clip_grad_norm(
            job.model.parameters(), job.cfg.training.max_norm, job.mesh.sum_over_pp
        )
    # it is on the CPU where the weights are offloaded
    grad_norm = grad_norm.to(step.loss.device, non_blocking=True)
    # the same on every rank: all are global
    fine = grad_norm.isfinite() & step.loss.isfinite() & (grad_norm <= skip_above)
    fine &= (step.raised[Flags._fields.index("no_data")] == 0) & (not mismatching_ranks)
    numbers = read_later(torch.cat((torch.stack((step.loss, grad_norm, fine)), step.raised)))
    began = time.monotonic()
    with record_function("optimizer"):
        step_if(fine, job.optimizer)
        move_biases(job.model, step.expert_counts, fine, job.cfg.training.expert_bias_speed)
    optimizer_seconds = time.monotonic() - began
    job.optimizer.zero_grad(set_to_none=True)
    loss, grad_norm, stepped, *raised = numbers()  # a GPU has the optimizer's step to do meanwhile
    any_rank = Flags(*map(bool, raised))
    return StepResult(
        loss,
        grad_norm,
        not stepped,
        step.losses,
        step.expert_counts,
        step.router_sums,
        step.prepare_seconds,
        optimizer_seconds,
        mismatching_ranks,
        any_rank,
    )


def gradients(job: Job, batch: dict[str, Tensor], flags: Callable[[], Flags] = Flags) -> Gradients:
    """Compute the gradient of the mean loss over the global batch, in the weights' `.grad`.

    The loss is a sum over tokens, divided by the tokens of the *global* batch, which are counted
    first. So loss and gradient do not depend on how the batch is split over ranks and
    microbatches, not even where it is split unevenly.
    """
    cfg, mesh, model = job.cfg, job.mesh, job.model
    began = time.monotonic()
    feed = Feed(model, batch, mesh, linear_cross_entropy, cfg.training.loss_chunk_tokens)
    counted = (feed.labels != IGNORE).sum()
    prepare_seconds = time.monotonic() - began
    counted = mesh.sum_over_tokens(counted)
    # FSDP averages over so many ranks; this makes it the sum
    scale = mesh.fsdp_mesh.size() / counted
    feed.router_statistics = RouterStatistics(scale)
    # of the losses, then of each flag
    sums = torch.zeros(1 + len(Flags._fields), dtype=torch.float64, device=mesh.device)
    total, raised = sums[0], sums[1:]
    total += model.gradients(feed, scale) if mesh.pp > 1 else one_after_another(job, feed, scale)
    for i, flag in enumerate(flags()):
        if flag:
            # `raised[i] = 1.0` would copy the number from the host, and wait for the copy
            raised[i].fill_(1.0)
    mesh.sum_over_ranks(sums)
    loss = total / (mesh.tp * counted)  # the ranks of a tp group have the same loss
    return Gradients(
        loss.float(),
        raised,
        feed.losses,
        counts_of_step(feed.router_statistics, mesh),
        feed.router_statistics.sums,
        prepare_seconds,
    )


def one_after_another(job: Job, feed: Feed, scale: Tensor) -> Tensor:
    """Compute the gradient of `scale` times the summed loss of all microbatches. Returns that sum,
    a float64 scalar."""
    # float32 would round at every microbatch
    total = torch.zeros((), dtype=torch.float64, device=job.mesh.device)
    for a in range(len(feed)):
        dp.synchronise_gradients(
            job.model, a == len(feed) - 1, job.cfg.parallelism.accumulate_gradients
        )
        inputs = feed(a)
        with record_function("forward"):
            loss = job.model(*inputs)
            scaled = loss * scale
        with record_function("backward"):
            scaled.backward()
        total += loss.detach()
    return total


def read_later(x: Tensor) -> Callable[[], list[float]]:
    """A function that returns the numbers of x [n]. They begin to leave a GPU now, and a call of
    the function waits for them alone, not for the work that was queued since. Reading x itself
    would wait for that work, and leave the GPU idle."""
    host = x.to("cpu", non_blocking=True)  # into pinned memory
    arrived = torch.cuda.current_stream().record_event() if x.is_cuda else None

    def numbers() -> list[float]:
        if arrived:
            arrived.synchronize()
        return host.tolist()

    return numbers


def train(cfg: Config, this_start: Start, stop: Stop, watchdog: health.Watchdog) -> int:
    """A whole run, from the newest checkpoint in cfg.run.folder if there is one. Returns the exit
    code."""
    folder, steps, clock = Path(cfg.run.folder), cfg.training.steps, this_start.clock
    if cfg.run.deterministic:
        # cuBLAS repeats itself only with a fixed workspace
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    corpora = open_corpora(cfg, say.info, verifies=meshes.world().local_rank == 0)
    watchdog.arm(cfg.run.init_timeout_seconds)
    job = build(cfg)
    mesh, model, optimizer, vocab_size = job.mesh, job.model, job.optimizer, job.args.vocab_size
    this_start.add(mesh=mesh.sizes, hosts=hosts(mesh))
    if fails_again_and_again(job, this_start):
        return CRASH_LOOP
    corpora.check_vocabulary(vocab_size)
    if cfg.debug.self_check:
        contract.verify(model, optimizer, mesh, shared_by_all_ranks(cfg, corpora))

    checkpoints, progress = resume(job, corpora.tokenizer, watchdog)
    start = step = progress.get("step", 0)
    order = corpora.order(progress)
    if mesh.rank == 0:
        (folder / "data.json").write_text(
            json.dumps(corpora.record(order), indent=1), encoding="utf-8"
        )
    held_out = corpora.held_out(mesh, vocab_size)
    metrics, meter = open_metrics(job, start, len(corpora.sources))
    guard = Guard(cfg, mesh, model, optimizer, progress.get("spikes", {}))
    say.info("a fresh start" if not progress else f"resumed after step {start} of {steps}")

    def flags() -> Flags:
        """What this rank has to tell the others in this step."""
        return Flags(stop.asked(), checkpoints.writing(), batches.problem is not None)

    def save() -> None:
        """The state after this step. One that is not finite is not published
        (checkpoint/storage.py::NotFinite)."""
        watchdog.arm(watchdog.STORAGE)
        progress = {
            "step": step,
            "samples": order.samples(step),
            "data": batches.state(),
            "spikes": guard.state(),
        }
        checkpoints.save(step, model, optimizer, progress)

    # seconds for a step, of which the first one compiles
    patience, stopping = cfg.run.init_timeout_seconds, False
    this_start.resume(start)
    gc.disable()  # a collection at a random moment on one rank makes all ranks wait
    watched = collectives.checked(model, mesh) if cfg.debug.check_collectives else nullcontext()
    with (
        profiler(cfg.profiler, folder, mesh.rank) as profile,
        metrics,
        checkpoints,
        watched,
        health.FailureTime(),
    ):
        batches = corpora.batches(
            order, range(start, steps), mesh, vocab_size, pin_memory=mesh.device.type == "cuda"
        )
        while step < steps and not stopping:
            clock.lap("other")
            watchdog.arm(patience + cfg.data.timeout_seconds)
            batch = next(batches)
            meter.waited += (data_seconds := clock.lap("data"))
            watchdog.arm(patience)
            lr = learning_rate(step, steps, cfg.optimizer.lr, cfg.lr_schedule)
            set_learning_rate(optimizer, lr)
            result = train_step(
                job, batch, guard.skip_above(), every(step + 1, cfg.debug.replay_interval), flags
            )
            if result.flags.no_data:  # the stream of some rank has ended: no weight has changed
                batches.end()
                break
            step += 1
            guard.check_replay(step, result.mismatching_ranks)
            meter.add(batch, result)
            meter.worked += clock.lap("other" if result.skipped else "productive")
            clock.move(checkpoints.stall(), "productive", "save")
            clock.step(step)
            profile.step()
            first, last, stopping = step == start + 1, step == steps, result.flags.stop
            checkpoints.poll(result.flags.saving)
            if first:
                mesh.set_timeout(patience := cfg.run.step_timeout_seconds)
                stop.at_once = False  # from now on there is something to save
            if trouble := guard.note(result.loss, result.grad_norm, result.skipped):
                say.warning(
                    f"step {step}: {trouble}; "
                    f"{corpora.whereabouts(step, mesh.gather(batch['window'].tolist()))}"
                )
            guard.check_skipped(step)
            if every(step, cfg.debug.replica_check_interval) and not result.skipped:
                guard.check_replicas(step, result.loss, result.grad_norm)
            guard.stragglers.add(
                data=data_seconds,
                prepare=result.prepare_seconds,
                optimizer=result.optimizer_seconds,
                **(model.seconds if mesh.pp > 1 else {}),
            )
            if every(step, cfg.metrics.straggler_interval) and mesh.size > 1:
                meter.reported |= guard.late_ranks(step, cfg.metrics.straggler_interval)
            if every(step, cfg.metrics.expert_interval):
                meter.report_experts(step, model, metrics)
            if every(step, cfg.metrics.interval) or first or last or stopping:
                metrics.log(
                    step,
                    meter.line(step, order, result.loss, result.grad_norm, lr) | clock.metrics(),
                )
            clock.lap("other")
            if held_out and (every(step, cfg.validation.interval) or last):
                stopping = (
                    run_validation(job, held_out, corpora.tokenizer, metrics, step, stop, watchdog)
                    or stopping
                )
                clock.lap("validation")
            if every(step, cfg.checkpoint.interval) or last or stopping:
                save()
                clock.lap("save")
                clock.saved()
            if every(step, cfg.run.gc_interval):
                gc.collect()
        batches.close()
        if batches.problem and step > start:
            save()
        clock.lap("other")
    clock.lap("save")  # the one in flight
    watchdog.rest()
    if batches.problem:
        say.warning(
            f"the stream has ended before step {step + 1}; everything up to step {step} is saved"
        )
        raise batches.problem
    return conclude(job, corpora.tokenizer, this_start, step, meter, metrics)


def fails_again_and_again(job: Job, this_start: Start) -> bool:
    """Whether the starts before this one all failed after the same step, as often as
    run.max_failures_at_step allows. Called by all ranks."""
    folder, limit = Path(job.cfg.run.folder), job.cfg.run.max_failures_at_step
    failed_step, count, reason = job.mesh.gather(this_start.failures())[0]
    if not limit or count < limit:
        return False
    this_start.reason = (
        f"not started: {count} starts in a row failed after step {failed_step}, "
        f"the last one with {reason}"
    )
    if job.mesh.rank == 0:
        say.error(
            f"{this_start.reason}. See {folder / 'starts'}, and {folder / 'logs'} for every rank; "
            "it is tried again "
            "when an option or the code has changed, or with run.max_failures_at_step = 0"
        )
    return True


def shared_by_all_ranks(cfg: Config, corpora: Corpora) -> dict[str, str]:
    """What no two ranks may differ in, for parallelisms/contract.py."""
    return {
        "config": dump(cfg),
        "torch": torch.__version__,
        "data": json.dumps(corpora.description),
        "code": source_hash(),
        "tokenizer": corpora.tokenizer.fingerprint,
    }


def resume(
    job: Job, tokenizer: Tokenizer, watchdog: health.Watchdog
) -> tuple[CheckpointManager, dict]:
    """The checkpoints of this run, and the progress of the one that was loaded: {} for a new run.
    Called by all ranks.

    Opening them makes the folder this run's alone, so its configuration and its tokenizer are
    written there.
    """
    cfg, folder = job.cfg, Path(job.cfg.run.folder)
    if cfg.checkpoint.export_hf:
        # what cannot be exported is refused before it is trained
        hf.config_of(FORMATS[cfg.model.family], job.args)
    facts = {
        "family": cfg.model.family,
        "config": dump(cfg),
        "seq_len": cfg.training.seq_len,
        "must_match": {"model": asdict(job.args), "tokenizer": tokenizer.fingerprint},
    }
    checkpoints = CheckpointManager(cfg.checkpoint, folder / "checkpoints", job.mesh, facts)
    if job.mesh.rank == 0:
        (folder / "config.toml").write_text(dump(cfg), encoding="utf-8")
        tokenizer.save(str(folder / "tokenizer.json"))
    watchdog.arm(watchdog.STORAGE)
    progress = checkpoints.load(job.model, job.optimizer)
    if not progress and cfg.checkpoint.load_hf:
        folder = Path(cfg.checkpoint.load_hf)
        checkpoints.origin = hf.load(
            folder, job.model, FORMATS, cfg.model.family, job.args, checkpoints.group
        )
    return checkpoints, progress or {}


def open_metrics(job: Job, start: int, sources: int) -> tuple[Metrics, Meter]:
    """Where a run that goes on after step `start` reports its numbers, and what counts them; says
    what is about to be trained, and how large it is. sources: how many it trains on."""
    cfg, mesh = job.cfg, job.mesh
    dtype = dp.param_dtype(cfg.training, mesh.device)
    device_name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    peak = peak_flops(device_name, cfg.metrics.peak_tflops, dtype)
    metrics = Metrics(
        cfg.metrics, Path(cfg.run.folder), mesh.rank == 0, start, cfg.training.steps, peak
    )
    tokens_per_step = cfg.training.global_batch_size * cfg.training.seq_len
    family = MODELS[cfg.model.family]
    say.info(model_summary(family, job.args, job.model, mesh, dtype, cfg.training, job.optimizer))
    if mesh.pp > 1:
        say.info(job.model.describe(cfg.training.microbatches(mesh.dp_size)))
    experts = ExpertLoad(mesh, job.args) if getattr(job.args, "n_experts", 0) else None
    return metrics, Meter(
        mesh,
        sources,
        tokens_per_step,
        family.flops_per_token(job.args, cfg.training.seq_len),
        experts,
    )


def run_validation(
    job: Job,
    held_out: dict[str, Batches],
    tokenizer: Tokenizer,
    metrics: Metrics,
    step: int,
    stop: Stop,
    watchdog: health.Watchdog,
) -> bool:
    """Log the scores on the held-out sets after `step`, unless a rank is asked to stop meanwhile.
    Returns whether one is."""
    cfg, sums = job.cfg, {}

    def ask() -> Callable[[], list[float]]:
        """Ask all ranks how many of them are to stop. The answer comes when the result is called.
        All ranks call both."""
        return read_later(
            job.mesh.sum_over_ranks(torch.full((1,), float(stop.asked()), device=job.mesh.device))
        )

    def until_asked(batches: Iterator[Batch]) -> Iterator[Batch]:
        answer = ask()
        for batch in batches:
            if any(answer()):
                return
            answer = ask()  # read after the next batch, so that a GPU works on it meanwhile
            watchdog.arm(cfg.run.step_timeout_seconds + cfg.data.timeout_seconds)
            yield batch

    token_bytes = torch.tensor(tokenizer.byte_lengths)
    for name, rows in held_out.items():
        batches = until_asked(loader(rows, 0, cfg.validation.steps, cfg.data))
        sums[name] = validate(
            job.model, job.mesh, batches, cfg.training.loss_chunk_tokens, token_bytes
        )
    for stage in pp.stages_of(job.model):
        dp.reshard(stage)
    if stopping := any(ask()()):
        say.warning(f"step {step}: no validation, since the run is to stop")
    else:
        metrics.log(step, scores(sums))
    return stopping


def every(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def conclude(
    job: Job, tokenizer: Tokenizer, this_start: Start, step: int, meter: Meter, metrics: Metrics
) -> int:
    """The end of a run after `step`: a sample and an export if it is done, and what a person reads
    last. Called by all ranks. Returns the exit code."""
    cfg, folder, lines = job.cfg, Path(job.cfg.run.folder), []
    code = STOPPED if step < cfg.training.steps else DONE
    if meter.last_loss is None:
        lines.append(
            f"nothing to do: {folder} has already trained {step} steps; raise training.steps to "
            "go on"
        )
    else:
        lines.append(
            f"loss {meter.first_loss:.3f} -> {meter.last_loss:.3f} nats per token; "
            f"{metrics.summary()}"
        )
    if cfg.debug.sample_tokens and code == DONE:
        prompt = tokenizer.encode(cfg.debug.sample_prompt).tolist()
        tokens, context = cfg.debug.sample_tokens, cfg.training.seq_len
        ids = sample(
            job.model,
            prompt,
            tokens,
            context,
            job.mesh.device,
            tokenizer.eot_id,
            multiple=job.mesh.tp,
        )
        if text := tokenizer.decode(ids):
            lines += [
                "a sample from the final weights:",
                *("    " + line for line in text.splitlines()),
            ]
    # reads files, so one rank can do it on any mesh
    if cfg.checkpoint.export_hf and code == DONE and job.mesh.rank == 0:
        family, files = (
            FORMATS[cfg.model.family],
            hf_tokenizer.files(tokenizer, job.args.max_seq_len),
        )
        hf.export_newest(
            folder / "checkpoints", folder / "hf", family, cfg.checkpoint.export_hf, files, say.info
        )
    lines.append(f"tensorboard --logdir {folder / 'tensorboard'}")
    lines.append(
        f"checkpoints in {folder / 'checkpoints'}; try: python -m tools.generate {folder} "
        "--prompt 'class '"
    )
    if code == STOPPED:
        lines.append(
            f"stopped on request after step {step} of {cfg.training.steps}; run the same command "
            "again to go on"
        )
    say.info("\n".join(lines))
    if job.mesh.rank == 0:
        say.info(this_start.summary())
    return code


def main(argv: list[str] | None = None) -> int:
    """`train.py [CONFIG.toml] [--table.key=value ...]`. Returns the exit code:

     0  done
     1  no room to write, or data that cannot be read. Any other failure raises
     2  wrong configuration or input
    75  stopped on request with a checkpoint: run the same command again to go on
    76  the starts before failed at the same step again and again, so nothing was tried

    A stream that ends (1: it cannot be read, 2: data.stream_epochs are over) leaves a checkpoint of
    the last whole step.
    """
    argv = sys.argv[1:] if argv is None else argv
    here = meshes.world()
    if "--help" in argv or "-h" in argv:
        print(help_text())
        return DONE
    try:
        cfg = load_config(argv, here.size, here.local_size)
        folder = Path(cfg.run.folder)
        with Start(folder, here.rank, argv, *as_given(argv), dump(cfg), os.environ) as this_start:
            log.setup(folder, here.rank, log.writes_log(cfg.run.logs, here.size, here.local_rank))
            with (
                Stop(this_start.clock.born, cfg.run.max_minutes, this_start.end) as stop,
                health.Watchdog(folder, here.rank) as watchdog,
                health.FailureTime(),
            ):
                this_start.code = train(cfg, this_start, stop, watchdog)
        meshes.close_mesh()
        return this_start.code
    except (InputError, LoaderError) as error:
        print(f"rank {here.rank}: {error}" if here.size > 1 else error, file=sys.stderr, flush=True)
        meshes.abort_mesh()
        return WRONG_INPUT if isinstance(error, InputError) else FAILED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            raise
        print(
            f"rank {here.rank}: cannot write {error.filename or 'to the run folder'}: "
            f"{error.strerror}. What was saved "
            "before is untouched; make room and run the same command again",
            file=sys.stderr,
            flush=True,
        )
        meshes.abort_mesh()
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
