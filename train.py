"""Pretrain a language model. `build(cfg)` makes the job, `train_step(job, batch)` does one step,
`train` is the loop, and `main(argv)` a whole run.

This file reads top to bottom and imports all packages; only tools and tests import it. Start it
with ./run_train.sh, which starts one process for each GPU (tools/launch);
`python train.py configs/llama_debug.toml` is the same thing as one process.
"""

import gc
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import configs.cpu  # noqa: F401  how threads wait: it must be known before torch is loaded

import torch
from torch import Tensor
from torch.profiler import record_function

from checkpoint import hf, rounds
from checkpoint.place import claimed
from checkpoint.resume import resume
from configs import check, program
from configs.load import as_given, dump, help_asked_for, ignored
from configs.schema import Config, InputError
from data import turns
from data.loader import Corpora, PreparedBatches
from data.open import open_corpora
from data.workers import LoaderError
from models import FORMATS, MODELS, lora, transfer
from models.family import Family
from models.terms import AuxiliaryTerms
from parallelisms import contract, dp, family_check, parallelize, pp, qk_clip
from parallelisms import mesh as meshes
from reliability import collectives, health
from reliability.exit import CRASH_LOOP, DONE, STOPPED, refuse
from reliability.guard import Guard
from reliability.record import Start, same_on_all_ranks
from reliability.stop import Stop
from tools.parity import proved
from training import attention, digests, graphs, init, log
from training.balance import move_biases, sum_counts
from training.counted import count
from training.evaluate import open_tasks, run_evaluation
from training.further import open_further
from training.loss import linear_cross_entropy
from training.loss_passes import compiled_loss
from training.meter import open_metrics
from training.microbatches import Microbatches, raise_flags, to_host_async
from training.optim import (
    build_optimizer,
    clip_grad_norm,
    learning_rate,
    set_learning_rate,
    step_if,
)
from training.profiler import profiler
from training.room import check_room
from training.summary import summarise
from training.validate import run_validation
from training.z_loss import open_z_loss

logger = logging.getLogger("plumbline")


@dataclass
class Job:
    """The state that every training step needs, and nothing else."""

    cfg: Config
    mesh: meshes.Mesh
    # the model's numbers: `Args` of its family, those of model.flavor with the overrides of [model]
    args: Any
    model: Any  # a models/layers.py::Decoder, or the stages of a pipeline (parallelisms/pp.py)
    optimizer: torch.optim.Optimizer
    compute: graphs.Compute = graphs.directly  # how gradients are computed: `gradients` below


def architecture(cfg: Config) -> tuple[Family, Any]:
    """Return the family of the model and its numbers, an instance of the family's `Args`."""
    family = lora.adapted(MODELS[cfg.model.family], cfg.lora)
    args = family.Args(**check.architecture(cfg.model))
    return transfer.adapted(family, args, cfg.model), args


def build(cfg: Config) -> Job:
    """Build the mesh, the model sharded over it with its initial values, and the optimizer. There
    is no other way to build them. Weights are sharded before they have memory, so the whole model
    never exists anywhere."""
    family, args = architecture(cfg)
    has_experts = bool(getattr(args, "n_experts", 0))
    dp_shard = check.data_parallel_shard(cfg, meshes.world().size)
    mesh = meshes.open_mesh(cfg.run, cfg.parallelism, dp_shard, has_experts)
    attention.choose(cfg.training.attention, mesh.device)
    compute = graphs.open_recorder(cfg, mesh.device, args)
    # For a model that draws random numbers: the same within a tp group, others everywhere else.
    torch.manual_seed(cfg.run.seed + mesh.dp_rank * mesh.cp + mesh.cp_rank)
    layers = pp.layers_of_stages(cfg, family, args)
    family_check.check(family, args, mesh, cfg, layers)
    stages = {}  # this rank's; without a pipeline there is one, the model itself
    for number in pp.own_stages(cfg.parallelism, mesh.pp_rank):
        with torch.device("meta"):
            stage = family.build(args, layers[number])
            stages[number] = stage.to(dp.master_dtype(cfg.training))
        parallelize(stages[number], mesh, cfg, family.tp_plan(args))
        dp.allocate(stages[number], mesh.device, cfg.parallelism.cpu_offload)
    model = pp.PipelineStages(stages, layers, mesh, cfg) if mesh.pp > 1 else stages[0]
    init.initialise(model, family.initial_values(args), cfg.run.seed)
    optimizer = build_optimizer(
        model, family.decay, cfg.optimizer, family.matrices, mesh, family.scales
    )
    return Job(cfg, mesh, args, model, optimizer, compute)


class Flags(NamedTuple):
    """Control bits that a rank shares with all others in a step. They are all-reduced together with
    the loss, so they cost no extra message."""

    stop: bool = False  # a stop was requested
    saving: bool = False  # it has not finished its part of the checkpoint that is being written
    # its stream of text cannot be read, so its batch is empty and the step must not count
    no_data: bool = False
    removed: bool = False  # the run's folder is not there any more


NO_DATA = Flags._fields.index("no_data")

# Steps between collections of Python garbage, on all ranks at once: where Python chooses the moment,
# the other ranks wait. TorchTitan's number.
GC_STEPS = 50
STRAGGLER_STEPS = 50  # between reports of the ranks for which the others wait
EXPERT_STEPS = 50  # between reports of how tokens are spread over experts


class Gradients(NamedTuple):
    """Results that accompany the gradient of a step. The gradient itself is in the weights'
    `.grad`."""

    loss: Tensor  # float32, a scalar: nats per token, mean over the global batch
    raised: Tensor  # float64 [flags]: on how many ranks each of the flags is raised
    losses: Tensor  # this and the rest as in StepResult
    terms: AuxiliaryTerms
    prepare_seconds: float


@dataclass(frozen=True)
class StepResult:
    loss: float  # nats per token, mean over the global batch
    grad_norm: float  # of the whole unsharded gradient, before clipping
    skipped: bool  # the gradient was not finite, or a spike, so no weight changed
    losses: Tensor  # float32 [A, b, T], of this rank's tokens, 0 where a label does not count
    # of this rank's tokens, but "expert_counts": of the global batch
    terms: AuxiliaryTerms
    prepare_seconds: float  # this rank's, up to the first collective
    optimizer_seconds: float
    # ranks on which recomputing the gradient gave a different result; then no weight changed
    mismatching_ranks: list[int]
    flags: Flags  # whether each was raised on any rank: the same on all ranks
    gradient_digests: digests.Digests  # of the gradients before clipping; empty unless asked for


def train_step(
    job: Job,
    batch: dict[str, Tensor],
    skip_above: float = math.inf,
    replay: bool = False,
    flags: Callable[[], Flags] = Flags,
    digest: bool = False,
) -> StepResult:
    """Do one optimizer step on this rank's share of the global batch: tokens and labels, int64 [A,
    b, T] in A microbatches (with context parallelism T is this rank's part of a sequence).

    A gradient whose norm is above `skip_above` changes no weight (training.skip_spikes). With
    `replay` the gradient is computed twice and compared with itself (debug.replay_interval).
    `flags()` is called after the backward pass, so that a signal counts in the step in which it
    came. With `digest` the result has two numbers of every gradient (metrics.gradient_interval).

    The names in `record_function` are the phases of a step: forward, loss (in training/microbatches.py),
    backward, clip, optimizer. The profiler, tools/plan and lab/bench/sections.py find the phases
    by these names alone.
    """
    if replay:
        own_flags = flags()  # both passes must send the same
        step, mismatching_ranks = collectives.twice(
            lambda: gradients(job, batch, lambda: own_flags), job.optimizer, job.mesh
        )
    else:
        step, mismatching_ranks = job.compute(gradients, job, batch, flags), []
    of_gradients: digests.Digests = {}
    if digest:
        of_gradients = digests.of_gradients(job.model.named_parameters(), job.mesh.device)
    with record_function("clip"):
        grad_norm = clip_grad_norm(
            job.model.parameters(), job.cfg.training.max_norm, job.mesh.sum_over_pp
        )
    # with offloaded weights the norm is on the CPU
    grad_norm = grad_norm.to(step.loss.device, non_blocking=True)

    # Whether the step counts. All of these numbers are global, so every rank decides the same. The
    # decision stays on the device: no host-device sync.
    fine = grad_norm.isfinite() & step.loss.isfinite() & (grad_norm <= skip_above)
    fine &= step.raised[NO_DATA] == 0
    fine &= not mismatching_ranks
    scalars = torch.stack((step.loss, grad_norm, fine))
    numbers = to_host_async(torch.cat((scalars, step.raised)))

    began = time.monotonic()
    with record_function("optimizer"):
        step_if(fine, job.optimizer)
        qk_clip.rescale(job.model, fine, job.mesh, job.cfg.optimizer.qk_clip)
        move_biases(job.model, step.terms, fine, job.cfg.training.expert_bias_speed)
    optimizer_seconds = time.monotonic() - began
    job.optimizer.zero_grad(set_to_none=True)
    # The host waits here, while a GPU still has the optimizer's kernels to run.
    loss, norm, stepped, *raised = numbers()
    return StepResult(
        loss=loss,
        grad_norm=norm,
        skipped=not stepped,
        losses=step.losses,
        terms=step.terms,
        prepare_seconds=step.prepare_seconds,
        optimizer_seconds=optimizer_seconds,
        mismatching_ranks=mismatching_ranks,
        flags=Flags(*map(bool, raised)),
        gradient_digests=of_gradients,
    )


def gradients(
    job: Job,
    batch: dict[str, Tensor],
    flags: Callable[[], Flags] = Flags,
) -> Gradients:
    """Compute the gradient of the mean loss over the global batch, in the weights' `.grad`.

    The loss is a sum over tokens, divided by the tokens of the *global* batch, which are counted
    first. So loss and gradient do not depend on how the batch is split over ranks and
    microbatches, not even where it is split unevenly.
    """
    cfg = job.cfg
    mesh = job.mesh
    began = time.monotonic()
    loss_of = compiled_loss(linear_cross_entropy, cfg.compile)
    microbatches = Microbatches(job.model, batch, mesh, loss_of, cfg.training.loss_chunk_tokens)
    counts = count(microbatches)
    prepare_seconds = time.monotonic() - began
    counted, tokens = mesh.sum_over_tokens(counts)
    # FSDP averages the gradient over these ranks; times their number it is the sum
    ranks = mesh.fsdp_mesh.size()
    dtype = dp.master_dtype(cfg.training)
    scale = ranks / counted.to(dtype)
    scale_of_terms = ranks / tokens.to(dtype)
    microbatches.terms = terms = AuxiliaryTerms(scale_of_terms, tokens, counted, mesh.tp)
    microbatches.z_loss = open_z_loss(cfg.training.z_loss, terms)
    microbatches.further = open_further(batch, mesh.device, loss_of, cfg.training)

    # the loss and the flags travel in one all-reduce
    sums = torch.zeros(1 + len(Flags._fields), dtype=torch.float64, device=mesh.device)
    total, raised = sums[0], sums[1:]
    if mesh.pp > 1:
        total += job.model.gradients(microbatches, scale)
    else:
        total += accumulate_gradients(job, microbatches, scale)
    raise_flags(raised, flags())
    mesh.sum_over_ranks(sums)
    sum_counts(terms, mesh)
    loss = total / (mesh.tp * counted)  # the ranks of a tp group have the same loss
    return Gradients(
        loss=loss.to(dp.master_dtype(cfg.training)),
        raised=raised,
        losses=microbatches.losses,
        terms=terms,
        prepare_seconds=prepare_seconds,
    )


def accumulate_gradients(job: Job, microbatches: Microbatches, scale: Tensor) -> Tensor:
    """Run forward and backward of one microbatch after the other. The gradients of `scale` times
    their losses add up in `.grad`. Which backward reduces them over the ranks depends on
    parallelism.accumulate_gradients. Returns the summed loss, a float64 scalar."""
    # float32 would round at every microbatch
    total = torch.zeros((), dtype=torch.float64, device=job.mesh.device)
    cfg = job.cfg.parallelism
    for a in range(len(microbatches)):
        is_last = a == len(microbatches) - 1
        dp.synchronise_gradients(job.model, is_last, cfg.accumulate_gradients)
        dp.keep_gathered(job.model, not (is_last or cfg.reshard_after_backward))
        inputs = microbatches(a)
        with record_function("forward"):
            loss = job.model(*inputs)
            scaled = loss * scale
        with record_function("backward"):
            scaled.backward()
        total += loss.detach()
    return total


class Session:
    """The state that the loop keeps around a job: text, checkpoints, metrics, guard and time.

    It begins where the newest checkpoint in cfg.run.folder ends, or with step 0.
    """

    def __init__(
        self,
        job: Job,
        corpora: Corpora,
        place: Any,
        this_start: Start,
        stop: Stop,
        watchdog: health.Watchdog,
    ) -> None:
        """place: where the run's checkpoints are (checkpoint/place.py::claimed)."""
        cfg = job.cfg
        self.job = job
        self.corpora = corpora
        self.stop = stop
        self.watchdog = watchdog
        self.clock = this_start.clock
        self.checkpoints, progress, self.order, self.describe = resume(
            job, FORMATS, corpora, dump(cfg), watchdog, place
        )
        self.start: int = progress.get("step", 0)  # steps that are done already
        self.held_out = corpora.held_out(job.mesh, job.args.vocab_size)
        self.tasks = open_tasks(cfg, corpora.tokenizer)
        self.left_out: list[Callable] = []  # the scores of the last step that wait for its save
        family, _ = architecture(cfg)
        self.metrics, self.meter = open_metrics(job, family, self.start, len(corpora.sources))
        spikes = progress.get("spikes", {})
        self.guard = Guard(cfg, job.mesh, job.model, job.optimizer, spikes)
        self.patience = cfg.run.init_timeout_seconds  # for a step; the first one compiles
        this_start.resume(self.start, self.checkpoints.origin, self.checkpoints.loaded)
        watchdog.position.follow(pp.stages_of(job.model), job.optimizer, self.start)

    def open_batches(self) -> PreparedBatches:
        """Return this rank's batches of the steps that are left."""
        job = self.job
        left = range(self.start, job.cfg.training.last_step)
        pin_memory = job.mesh.device.type == "cuda"
        self.batches = self.corpora.batches(
            self.order, left, job.mesh, job.args.vocab_size, pin_memory
        )
        return self.batches

    def flags(self) -> Flags:
        """Return this rank's control bits for this step."""
        return Flags(
            self.stop.asked(),
            self.checkpoints.writing(),
            self.batches.problem is not None,
            self.clock.is_gone(),
        )

    def end_first_step(self) -> None:
        """Give the steps that follow their own time limit, and describe the run in its folder."""
        cfg = self.job.cfg
        self.patience = cfg.run.step_timeout_seconds
        self.job.mesh.set_timeout(self.patience)
        self.stop.at_once = False  # from now on there is something to save
        self.describe()

    def save(self, step: int, last: bool) -> None:
        """Save the state after `step`, the `last` one of this start or not. One that is not finite
        is not published (checkpoint/storage.py::NotFinite)."""
        self.watchdog.arm(self.watchdog.STORAGE, "save")
        self.describe(missing=True)
        self.checkpoints.save(*self.state(step), last)

    def state(self, step: int) -> tuple[int, Any, Any, dict]:
        """Return what is saved after `step`, with what is no tensor as JSON."""
        progress = {
            "step": step,
            "samples": self.order.samples(step),
            "data": self.batches.state(),
            "spikes": self.guard.state(),
        }
        return step, self.job.model, self.job.optimizer, progress

    def validate(self, step: int) -> bool:
        """Score the held-out sets. Returns True if a stop was requested meanwhile."""
        return run_validation(self, step, self.stop)

    def evaluate(self, step: int) -> bool:
        """Score the tasks. Returns True if a stop was requested meanwhile."""
        return run_evaluation(self, step, self.stop)

    def score_left_out(self, step: int) -> None:
        """Compute the scores of the last step that a stop has put off until all is saved."""
        for scoring in self.left_out:
            scoring(self, step)


def train(cfg: Config, place: Any, this_start: Start, stop: Stop, watchdog: health.Watchdog) -> int:
    """Train from the newest checkpoint in cfg.run.folder, if there is one, to the last step.
    Returns the exit code. place: where its checkpoints are (checkpoint/place.py::claimed)."""
    steps = cfg.training.last_step
    clock = this_start.clock
    corpora, job = open_run(cfg, this_start, watchdog)
    if this_start.fails_again_and_again(job.mesh):
        return CRASH_LOOP

    run = Session(job, corpora, place, this_start, stop, watchdog)
    rounds.follow(run)
    checkpoints, guard, meter, metrics = run.checkpoints, run.guard, run.meter, run.metrics
    step = run.start
    stopping = step >= steps
    gc.disable()  # a collection at a random moment on one rank makes all ranks wait
    with (
        profiler(cfg.profiler, Path(cfg.run.folder), job.mesh.rank) as profile,
        metrics,
        checkpoints,
        collectives.checked(job.model, job.mesh, cfg.debug.check_collectives),
        health.failure_time(watchdog.position),
    ):
        batches = run.open_batches()
        if rounds.is_interrupted():
            stopping = finish_step(run, step, stopping)
        while not stopping:
            clock.record("other")
            watchdog.arm(run.patience + cfg.data.timeout_seconds, "data")
            batch = next(batches)
            data_seconds = clock.record("data")

            watchdog.arm(run.patience, "forward")
            lr = learning_rate(step, cfg)
            set_learning_rate(job.optimizer, lr)
            replay = every(step + 1, cfg.debug.replay_interval)
            digest = every(step + 1, cfg.metrics.gradient_interval)
            result = train_step(job, batch, guard.skip_above(), replay, run.flags, digest)
            this_start.end_if(result.flags.removed)
            if result.flags.no_data:  # some rank cannot read its text: no weight has changed
                batches.end()
                break
            step += 1
            guard.check_replay(step, result.mismatching_ranks)
            step_seconds = clock.end_step(step, result.skipped, checkpoints.stall())
            meter.add(batch, result, data_seconds, step_seconds)
            guard.add_seconds(data_seconds, result)
            profile.step()
            stopping = result.flags.stop
            if step == run.start + 1:
                run.end_first_step()

            guard.judge(step, result, batch["window"], corpora.audit_hint)
            checkpoints.poll(result.flags.saving)
            if every(step, cfg.debug.replica_check_interval):
                guard.check_replicas(step, result.loss, result.grad_norm)
            if every(step, STRAGGLER_STEPS):
                meter.reported |= guard.late_ranks(step, STRAGGLER_STEPS)
            if every(step, EXPERT_STEPS):
                meter.report_experts(step, job.model, metrics)
            metrics.record_gradients(step, result.gradient_digests, job.mesh)
            if every(step, cfg.metrics.interval) or step in (run.start + 1, steps) or stopping:
                line = meter.line(step, run.order, result.loss, result.grad_norm, lr)
                metrics.log(step, line | clock.metrics())
            stopping = finish_step(run, step, stopping)
            if every(step, GC_STEPS):
                gc.collect()
        batches.close()
        if batches.problem and step > run.start:
            run.save(step, True)
        run.score_left_out(step)
        clock.record("other")
    stop.saved = step
    clock.record("save")  # the one in flight
    watchdog.rest()
    batches.check(step)
    return finish(run, this_start, step, summarise(run, step))


def finish_step(run: Session, step: int, stopping: bool) -> bool:
    """Do what is due after a step: scores, and a save or a copy. Returns whether the run stops."""
    cfg = run.job.cfg
    clock = run.clock
    clock.record("other")
    is_last = step == cfg.training.last_step
    if is_last or every(step, cfg.validation.interval):
        stopping |= run.validate(step)
    if is_last or every(step, cfg.evaluation.interval):
        stopping |= run.evaluate(step)
    stopping |= is_last
    if stopping or every(step, cfg.checkpoint.interval):
        run.save(step, stopping)
        clock.record("save")
        clock.saved()
    elif cfg.checkpoint.peers and every(step, cfg.checkpoint.peer_interval):
        run.checkpoints.copy_to_peers(*run.state(step))
    return stopping


def open_run(cfg: Config, this_start: Start, watchdog: health.Watchdog) -> tuple[Corpora, Job]:
    """Open the text and build the job, which fit together and are the same on all ranks."""
    if cfg.run.deterministic:
        # cuBLAS repeats itself only with a fixed workspace
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # tokenising the text may take hours: so a model without room is refused before it, and the
    # watchdog is armed after it
    check_room(cfg, *architecture(cfg))
    corpora = open_corpora(cfg, logger.info)
    watchdog.arm(cfg.run.init_timeout_seconds, "build")
    job = build(cfg)
    this_start.add_mesh(job.mesh)
    corpora.check_vocabulary(job.args.vocab_size)
    if cfg.debug.self_check:
        facts = same_on_all_ranks(dump(cfg), corpora)
        contract.verify(job.model, job.optimizer, job.mesh, facts)
        proved.at_start(cfg, *architecture(cfg))
    return corpora, job


def every(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def finish(run: Session, this_start: Start, step: int, summary: str) -> int:
    """Export the weights if the run is done, and log the summary. Returns the exit code."""
    job = run.job
    cfg = job.cfg
    is_done = step >= cfg.training.last_step
    # an export reads files, so one rank can do it for any mesh
    if is_done and cfg.checkpoint.export_hf and job.mesh.rank == 0:
        files = turns.files(Path(cfg.run.folder), run.corpora.tokenizer, job.args.max_seq_len)
        is_done = hf.export_newest(cfg, FORMATS[cfg.model.family], files, run.stop.asked)
    logger.info(summary)
    if job.mesh.rank == 0:
        logger.info(this_start.summary())
    return DONE if is_done else STOPPED


def start(argv: list[str], cfg: Config) -> int:
    """Do one start of the run, or of one of its stages. Returns the exit code."""
    here = meshes.world()
    folder = Path(cfg.run.folder)
    with (
        claimed(cfg) as place,
        Start(folder, here.rank, argv, *as_given(argv), dump(cfg), os.environ) as this_start,
    ):
        log.setup(folder, here.rank, log.writes_log(here.size, here.local_rank), ignored(argv))
        with (
            Stop(this_start.clock.born, cfg.run.max_minutes, this_start.end) as stop,
            health.Watchdog(folder, here.rank) as watchdog,
            health.failure_time(),
        ):
            this_start.code = train(cfg, place, this_start, stop, watchdog)
    return this_start.code


def main(argv: list[str] | None = None) -> int:
    """Run `train.py [CONFIG.toml] [--table.key=value ...]`. Returns the exit code:

     0  done
     1  no room to write, or data that end or cannot be read. Any other failure raises
     2  wrong configuration or input, and no step was done
    75  stopped on request with a checkpoint: run the same command again to go on
    76  the starts before failed at the same step again and again, so nothing was tried

    A stream that ends leaves a checkpoint of the last whole step.
    """
    argv = sys.argv[1:] if argv is None else argv
    if text := help_asked_for(argv):
        print(text)
        return DONE
    try:
        return rounds.run(argv, start)
    except (InputError, LoaderError, OSError) as error:
        return refuse(error)


if __name__ == "__main__":
    program.run(main)
