"""Pretrain a Llama: `build(cfg)` makes the job, `train_step(job, batch)` does one optimizer step, `main(argv)` is the loop.

This file reads top to bottom and knows everyone; nobody but tools and tests imports it. Start it with ./run_train.sh,
which runs it under torchrun; `python train.py configs/llama_debug.toml` is the same thing as one process.
"""

import errno
import gc
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from checkpoint import hf
from checkpoint.manager import CheckpointManager
from configs import check
from configs.load import as_given, dump, help_text, load_config
from configs.schema import Config, InputError
from data import hf_tokenizer, order as orders, stream as streams
from data.loader import Batches, LoaderError, loader
from data.order import Order
from data.prepare import prepare
from data.tokens import Prepared, Tokens, is_prepared, verify
from models import MODELS
from models.family import Family
from parallelisms import contract, dp, mesh as meshes, parallelize
from parallelisms.mesh import Mesh
from reliability import collectives, health
from training import init, log
from training.loss import IGNORE, linear_cross_entropy
from training.metrics import Metrics, memory_gib, model_summary, peak_flops
from training.optim import build_optimizer, clip_grad_norm, learning_rate, set_learning_rate, step_if
from training.profiler import profiler
from reliability.record import Start, hosts, source_hash
from training.sample import sample
from reliability.stop import STOP_SIGNALS, STOPPED, Stop  # noqa: F401  the signals are tools/preflight's too
from training.validate import scores, validate

# Exit codes; STOPPED is 75: stopped on request with a checkpoint, run again to go on.
DONE, FAILED, WRONG_INPUT, CRASH_LOOP = 0, 1, 2, 76


@dataclass
class Job:
    """What a training step needs, and nothing else."""

    cfg: Config
    mesh: Mesh
    args: Any  # the model's numbers: `Args` of its family, a row of FLAVORS with the overrides of [model]
    model: nn.Module
    optimizer: torch.optim.Optimizer


def architecture(cfg: Config) -> tuple[Family, Any]:
    """The family of the model and its numbers, an instance of the family's `Args`."""
    family = MODELS[cfg.model.family]
    return family, family.Args(**check.architecture(cfg.model))


def build(cfg: Config) -> Job:
    """The mesh, the model sharded over it with its initial values, and the optimizer. The only way to build them.

    A parameter's life: meta constructor -> tensor parallel -> checkpointing, compile -> FSDP shard -> memory -> initial
    value -> optimizer. Nothing is allocated before it is sharded, so the whole model never exists anywhere.
    """
    family, args = architecture(cfg)
    mesh = meshes.open_mesh(cfg.run, cfg.parallelism, check.data_parallel_shard(cfg, meshes.world().size))
    torch.manual_seed(cfg.run.seed + mesh.dp_rank)  # for a model that draws numbers: alike within a tp group, else not
    with torch.device("meta"):
        model = family.build(args)
    parallelize(model, mesh, cfg, family.TP_PLAN)
    model.to_empty(device="cpu" if cfg.parallelism.cpu_offload else mesh.device)
    init.initialise(model, family.initial_values(args), cfg.run.seed)
    optimizer = build_optimizer(model, family.DECAY, cfg.optimizer)
    return Job(cfg, mesh, args, model, optimizer)


@dataclass(frozen=True)
class StepResult:
    loss: float  # nats per token, mean over the global batch
    grad_norm: float  # of the whole unsharded gradient, before clipping
    skipped: bool  # the gradient was not finite, or a spike, so no weight changed
    losses: Tensor  # float32 [A, b, T], of this rank's tokens, 0 where a label does not count
    prepare_seconds: float  # this rank's, up to the first collective
    optimizer_seconds: float
    unlike: list[int]  # ranks whose gradient was another one the second time (debug.replay_interval); no weight changed


def train_step(job: Job, batch: dict[str, Tensor], skip_above: float = math.inf, replay: bool = False) -> StepResult:
    """One optimizer step on this rank's share of the global batch: tokens and labels, int64 [A, b, T] in A micro-batches.

    A gradient whose norm is above `skip_above` changes no weight (training.skip_spikes). With `replay` the gradient is
    computed twice and compared with itself (debug.replay_interval).

    `record_function` names the phases of a step, here and in `gradients`: forward, loss, backward, clip, optimizer. The
    profiler shows these names, and tools/plan/trace.py and tools/bench/sections.py find the phases by them alone.
    """
    if replay:
        (loss, losses, prepare_seconds), unlike = collectives.twice(lambda: gradients(job, batch), job.optimizer, job.mesh)
    else:
        (loss, losses, prepare_seconds), unlike = gradients(job, batch), []
    with record_function("clip"):
        grad_norm = clip_grad_norm(job.model.parameters(), job.cfg.training.max_norm).to(loss.device)
    fine = grad_norm.isfinite() & loss.isfinite() & (grad_norm <= skip_above)  # the same on every rank: all are global
    fine &= not unlike
    numbers = read_later(torch.stack((loss, grad_norm, fine)))
    began = time.monotonic()
    with record_function("optimizer"):
        step_if(fine, job.optimizer)
    optimizer_seconds = time.monotonic() - began
    job.optimizer.zero_grad(set_to_none=True)
    loss, grad_norm, stepped = numbers()  # a GPU has the optimizer's step to do meanwhile
    return StepResult(loss, grad_norm, not stepped, losses, prepare_seconds, optimizer_seconds, unlike)


def gradients(job: Job, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, float]:
    """The gradient of the mean loss over the global batch into the weights' `.grad`; `StepResult.loss`, `.losses` and
    `.prepare_seconds`.

    The loss is a sum over tokens divided by the tokens of the *global* batch, which are counted first: so loss and
    gradient are the same numbers however the batch is split over ranks and micro-batches, even unevenly.
    """
    cfg, mesh, model = job.cfg, job.mesh, job.model
    began = time.monotonic()
    tokens = batch["tokens"].to(mesh.device, non_blocking=True)
    labels = batch["labels"].to(mesh.device, non_blocking=True)
    counted = (labels != IGNORE).sum()
    prepare_seconds = time.monotonic() - began
    counted = mesh.sum_over_dp(counted)
    # int64 [A, b, T], on the CPU, with data.mask_documents; otherwise every sequence has the same, [T].
    within_documents = batch.get("positions")
    positions = torch.arange(tokens.shape[-1], device=mesh.device)
    total, losses = torch.zeros((), device=mesh.device), torch.empty(labels.shape, device=mesh.device)

    def summed_loss(a: int, h: Tensor, weight: Tensor) -> Tensor:
        """The loss of micro-batch a. The model calls it inside its forward, where FSDP has gathered `weight`."""
        with record_function("loss"):
            return linear_cross_entropy(h, weight, labels[a], cfg.training.loss_chunk_tokens, losses[a])

    for a in range(len(tokens)):
        dp.synchronise_gradients(model, a == len(tokens) - 1, cfg.parallelism.accumulate_gradients)
        documents = None
        if within_documents is not None:
            documents = model.documents(within_documents[a], mesh.device)
            positions = within_documents[a].to(mesh.device, non_blocking=True)
        with record_function("forward"):
            loss = model(tokens[a], positions, partial(summed_loss, a), documents)
            scaled = loss * (mesh.dp_size / counted)  # FSDP averages over dp_size ranks; this makes it the sum
        with record_function("backward"):
            scaled.backward()
        total += loss.detach()
    return mesh.sum_over_dp(total) / counted, losses, prepare_seconds


def read_later(x: Tensor) -> Callable[[], list[float]]:
    """The numbers of x [n] for whoever calls what is returned. They leave a GPU now, and the call waits for them alone, not
    for what was queued since: to read x itself would leave the GPU without work until the host has given it some more."""
    host = x.to("cpu", non_blocking=True)  # into pinned memory
    arrived = torch.cuda.current_stream().record_event() if x.is_cuda else None

    def numbers() -> list[float]:
        if arrived:
            arrived.synchronize()
        return host.tolist()

    return numbers


def add_by_source(sums: Tensor, batch: dict[str, Tensor], losses: Tensor) -> None:
    """Add a step's `StepResult.losses` to `sums`, float64 [2, sources]: loss and tokens of this rank's rows, by source."""
    labels = batch["labels"].to(sums.device, non_blocking=True)
    rows = torch.stack((losses, labels != IGNORE)).double().sum(-1)  # [2, A, b]
    sums.index_add_(1, batch["source"].to(sums.device, non_blocking=True), rows.flatten(1))


def corpora(cfg: Config, log: Callable[[str], object]) -> tuple[dict[str, Prepared | streams.Source], dict[str, Tokens]]:
    """By name, tokenised first where they are not yet: the sources to train on (only one: called ""; with data.stream
    just opened), and the sets to validate on, which are the held-out documents of each source and [[validation.sets]]."""
    rows = {row.name: row.source for row in cfg.data.mixture} or {"": cfg.data.source}
    further = {row.name: row.source for row in cfg.validation.sets}
    new = [source for source in (rows | further).values() if not is_prepared(source)]
    if cfg.data.tokenizer == "bpe" and len(rows | further) > 1 and new:
        raise InputError(
            f'data.tokenizer = "bpe" is trained on one source, but there are several, and {new[0]} is not prepared yet: '
            'give the path of a tokenizer (python -m data.train_tokenizer makes one), or "bytes"'
        )

    def prepared(source: str, fraction: float) -> Prepared:
        return prepare(cfg.data.model_copy(update={"source": source, "validation_fraction": fraction}), log=log)

    if cfg.data.stream:
        sources = {"": streams.open_source(cfg.data, log)}
    else:
        sources = {name: prepared(source, cfg.data.validation_fraction) for name, source in rows.items()}
    whole = {name: prepared(source, 0.0) for name, source in further.items()}
    first = next(iter(sources.values()))
    for other in (*sources.values(), *whole.values()):
        if cfg.data.verify and isinstance(other, Prepared) and meshes.world().local_rank == 0:
            verify(other.folder)
        if other.tokenizer.fingerprint != first.tokenizer.fingerprint:
            raise InputError(f"{other.folder} and {first.folder} are of different tokenizers: prepare them with the same")
    sets = {name: corpus.validation for name, corpus in sources.items() if len(corpus.validation)}
    sets |= {name: corpus.validation if len(corpus.validation) else corpus.train for name, corpus in whole.items()}
    if cfg.validation.interval and not sets:
        raise InputError(f"validation.interval = {cfg.validation.interval}, but {first.folder} was prepared without "
                         "held-out documents: set it to 0, or name [[validation.sets]]")  # fmt: skip
    return sources, sets


def describe_data(cfg: Config, sources: dict[str, Prepared]) -> dict:
    """What decides the order of the training data, beside the step; see data/order.py::describe."""
    if cfg.data.stream:
        return streams.describe(sources[""], cfg.run.seed, cfg.training.seq_len, cfg.training.global_batch_size)
    weights = {row.name: [[0, row.weight], *map(list, row.schedule)] for row in cfg.data.mixture} or {"": [[0, 1.0]]}
    rows = [(name, corpus.fingerprint, corpus.train, weights[name]) for name, corpus in sources.items()]
    return orders.describe(rows, cfg.run.seed, cfg.training.seq_len, cfg.training.global_batch_size, cfg.data.skip)


def batches(job: Job, sources: list[Tokens], order: Order) -> Batches:
    """This rank's batches: item i is step i's, a function of (order, i) alone."""
    local, mask = job.cfg.training.local_batch_size, job.cfg.data.mask_documents
    return Batches(sources, order, local, job.mesh.dp_rank, job.mesh.dp_size, mask, job.args.vocab_size)


def validation_batches(job: Job, name: str, tokens: Tokens) -> Batches:
    """In the order of seed 0 whatever the run's seed: every run and every mesh is measured on the same sequences."""
    t = job.cfg.training
    description = orders.describe([(name, name, tokens, [[0, 1.0]])], 0, t.seq_len, t.global_batch_size)
    return batches(job, [tokens], orders.begin(description))


class Diverged(RuntimeError):
    """There is no point in training on from this state."""


def train(cfg: Config, this_start: Start, stop: Stop, watchdog: health.Watchdog) -> int:
    """A whole run, from the newest checkpoint in cfg.run.folder if there is one. Returns the exit code."""
    folder, steps = Path(cfg.run.folder), cfg.training.steps
    here = meshes.world()
    say = logging.getLogger("plumbline")
    if cfg.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with a fixed workspace
        torch.use_deterministic_algorithms(True)

    sources, sets = corpora(cfg, log=say.info)
    data = describe_data(cfg, sources)
    tokenizer = next(iter(sources.values())).tokenizer
    watchdog.arm(cfg.run.init_timeout_seconds)
    job = build(cfg)
    mesh, model, optimizer = job.mesh, job.model, job.optimizer
    this_start.add(mesh=mesh.sizes, hosts=hosts(mesh))
    at, times, why = mesh.gather(this_start.failures())[0]
    if cfg.run.max_failures_at_step and times >= cfg.run.max_failures_at_step:
        this_start.reason = f"not started: {times} starts in a row failed after step {at}, the last one with {why}"
        if here.rank == 0:
            say.error(f"{this_start.reason}. See {folder / 'starts'}, and {folder / 'logs'} for every rank; it is tried again "
                      "when an option or the code has changed, or with run.max_failures_at_step = 0")  # fmt: skip
        return CRASH_LOOP
    if tokenizer.n_vocab > job.args.vocab_size:
        raise InputError(
            f"the tokenizer {cfg.data.tokenizer!r} has {tokenizer.n_vocab} tokens, the model's vocabulary only "
            f"{job.args.vocab_size}: set model.vocab_size to at least {tokenizer.n_vocab}"
        )
    if cfg.debug.self_check:
        same = {"config": dump(cfg), "torch": torch.__version__, "data": json.dumps(data), "code": source_hash(),
                "tokenizer": tokenizer.fingerprint}  # fmt: skip
        contract.verify(model, optimizer, mesh, same)

    must_match = {"model": asdict(job.args), "tokenizer": tokenizer.fingerprint}
    facts = {
        "family": cfg.model.family, "config": dump(cfg), "seq_len": cfg.training.seq_len, "must_match": must_match,
    }  # fmt: skip
    checkpoints = CheckpointManager(cfg.checkpoint, folder / "checkpoints", mesh, facts)
    if here.rank == 0:  # the folder is ours now
        (folder / "config.toml").write_text(dump(cfg), encoding="utf-8")
        tokenizer.save(str(folder / "tokenizer.json"))
    watchdog.arm(watchdog.STORAGE)
    progress = checkpoints.load(model, optimizer)
    start = progress["step"] if progress else 0
    family = MODELS[cfg.model.family]
    if not progress and cfg.checkpoint.load_hf:
        checkpoints.origin = hf.load(Path(cfg.checkpoint.load_hf), model, family, job.args, checkpoints.group)

    plan = streams if cfg.data.stream else orders
    order, changes = plan.begin(data), []
    if progress:
        order, changes = plan.resume(progress, data, cfg.data.allow_splice)
    if cfg.data.mixture:
        order.check_epochs(steps, {row.name: row.max_epochs for row in cfg.data.mixture})
    if changes:
        say.warning(f"the data changes at step {start} (data.allow_splice): {'; '.join(changes)}")
    if here.rank == 0:
        folders = {corpus.fingerprint: corpus.folder for corpus in sources.values()}
        record = plan.state(order, data) | {"steps": steps, "folders": folders}
        (folder / "data.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    held_out = {name: validation_batches(job, name, tokens) for name, tokens in sets.items() if cfg.validation.interval}
    token_bytes = torch.tensor(tokenizer.byte_lengths)
    tokens_per_step = cfg.training.global_batch_size * cfg.training.seq_len
    flops = family.flops_per_token(job.args, cfg.training.seq_len)
    dtype = dp.param_dtype(cfg.training, mesh.device)
    device_name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    peak = peak_flops(device_name, cfg.metrics.peak_tflops, dtype)
    metrics = Metrics(cfg.metrics, folder, here.rank == 0, start, steps, peak)
    say.info(model_summary(family, job.args, model, mesh, dtype, cfg.training, optimizer))
    say.info("a fresh start" if not progress else f"resumed after step {start} of {steps}")

    def position() -> dict:
        """Where the run is, for a checkpoint. All ranks call it."""
        where = stream.state() if cfg.data.stream else orders.state(order, data)
        return {"step": step, "samples": order.samples(step), "data": where, "spikes": spikes.state()}

    def save() -> None:
        """The state after this step; one that is not finite is not published (checkpoint/storage.py::NotFinite)."""
        watchdog.arm(watchdog.STORAGE)
        checkpoints.save(step, model, optimizer, position())

    def asked() -> bool:
        """Whether any rank has been asked to stop. All ranks call it."""
        return mesh.any_rank(stop.asked())

    def until_asked(batches: Iterable[dict]) -> Iterator[dict]:
        for batch in batches:
            if asked():
                return
            watchdog.arm(cfg.run.step_timeout_seconds + cfg.data.timeout_seconds)
            yield batch

    first_loss = last_loss = None
    worked = waited = 0.0  # seconds in steps, and waiting for data before them, since the last log line
    since_log = skipped_in_a_row = 0
    spikes = health.Spikes(cfg.training.spike_threshold, progress.get("spikes", {}) if progress else {})
    stragglers, late = health.Stragglers(), {}  # late: since the last log line too, seconds per step by section and rank
    patience = cfg.run.init_timeout_seconds  # for a step; the first one compiles
    by_source = torch.zeros(2, len(sources), dtype=torch.float64, device=mesh.device)  # loss and tokens, since then too
    code, step, clock = DONE, start, this_start.clock
    this_start.resume(step)
    gc.disable()  # a collection at a random moment on one rank makes all ranks wait
    watched = collectives.Checked() if cfg.debug.check_collectives else nullcontext()
    with profiler(cfg.profiler, folder, here.rank) as profile, metrics, checkpoints, watched:
        pinned = mesh.device.type == "cuda"
        if cfg.data.stream:
            stream = streams.Batches(
                sources[""], order, range(start, steps), cfg.training.local_batch_size, mesh.dp_rank, mesh.dp_size,
                mesh.any_rank, mesh.gather, job.args.vocab_size, pinned,
            )  # fmt: skip
        else:
            train_batches = batches(job, [corpus.train for corpus in sources.values()], order)
            stream = loader(train_batches, start, steps, cfg.data, pinned)
        while step < steps:
            clock.lap("other")
            watchdog.arm(patience + cfg.data.timeout_seconds)
            batch = next(stream, None)
            waited += (data_seconds := clock.lap("data"))
            watchdog.arm(patience)
            if batch is None:  # data.stream has ended, for all ranks at this step
                break
            lr = learning_rate(step, steps, cfg.optimizer.lr, cfg.lr_schedule)
            set_learning_rate(optimizer, lr)
            skip_above = spikes.limit("grad_norm") if cfg.training.skip_spikes else math.inf
            result = train_step(job, batch, skip_above, every(step + 1, cfg.debug.replay_interval))
            step += 1
            if result.unlike:
                raise Diverged(f"step {step}: the gradient of {health.named(result.unlike)} is another one when it is computed "
                               "again: a device computes wrong, or not deterministically; nothing of it is saved")  # fmt: skip
            if len(sources) > 1 and not result.skipped:
                add_by_source(by_source, batch, result.losses)
            worked += clock.lap("other" if result.skipped else "productive")
            clock.move(checkpoints.stall(), "productive", "save")
            clock.step(step)
            since_log += 1
            profile.step()
            last, stopping = step == steps, asked()
            if step == start + 1:
                mesh.set_timeout(patience := cfg.run.step_timeout_seconds)
                stop.at_once = False  # from now on there is something to save

            skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
            spike = spikes.add(loss=result.loss, grad_norm=result.grad_norm)
            if result.skipped or spike:
                did = ", skipped: no weight changed" if result.skipped else ""
                numbers = spike or f"loss {result.loss}, gradient norm {result.grad_norm}"
                say.warning(f"step {step}: {numbers}{did}; {whose(cfg, step, mesh.gather(batch['sample'].tolist()))}")
            if skipped_in_a_row > cfg.training.max_skipped_steps:
                raise Diverged(f"{skipped_in_a_row} steps in a row without a gradient to use: diverged at step {step}")
            if every(step, cfg.debug.replica_check_interval) and not result.skipped:
                if parted := health.unlike_replicas(model, optimizer, mesh, loss=result.loss, grad_norm=result.grad_norm):
                    raise Diverged(f"step {step}: state that must be the same on several ranks is not: {'; '.join(parted)}. "
                                   "A device computes or remembers wrong; nothing of this state is saved")  # fmt: skip
            stragglers.add(data=data_seconds, prepare=result.prepare_seconds, optimizer=result.optimizer_seconds)
            if every(step, cfg.metrics.straggler_interval) and mesh.size > 1:
                for rank, section, seconds in stragglers.report(mesh, cfg.metrics.straggler_interval):
                    say.warning(f"step {step}: rank {rank} is late: the others wait {seconds:.3f} s per step for its {section}")
                    late[f"late/{section}/rank-{rank}"] = seconds
            last_loss = result.loss
            first_loss = result.loss if first_loss is None else first_loss
            if every(step, cfg.metrics.interval) or step == start + 1 or last or stopping:
                spent = waited + worked
                rate = tokens_per_step * since_log / spent
                metrics.log(step, {
                    "loss": result.loss, "grad_norm": result.grad_norm, "lr": lr, "tokens_per_second": rate,
                    "tokens_seen": order.tokens(step), "tflops_per_device": rate * flops / mesh.size / 1e12,
                    "memory_gib": memory_gib(mesh.device), "data_wait": waited / spent, "step_seconds": spent / since_log,
                    **(source_metrics(order, step, mesh.sum_over_dp(by_source)) if len(sources) > 1 else {}),
                    **late, **clock.metrics(),
                })  # fmt: skip
                worked, waited, since_log, late = 0.0, 0.0, 0, {}
                by_source.zero_()
            clock.lap("other")
            if cfg.validation.interval and (every(step, cfg.validation.interval) or last):
                sums = {}
                for name, of in held_out.items():
                    held_out_stream = until_asked(loader(of, 0, cfg.validation.steps, cfg.data))
                    sums[name] = validate(model, mesh, held_out_stream, cfg.training.loss_chunk_tokens, token_bytes)
                dp.reshard(model)
                stopping = asked()
                if stopping:
                    say.warning(f"step {step}: no validation, since the run is to stop")
                else:
                    metrics.log(step, scores(sums))
                clock.lap("validation")
            if every(step, cfg.checkpoint.interval) or last or stopping:
                save()
                clock.lap("save")
                clock.saved()
            checkpoints.poll()
            if every(step, cfg.run.gc_interval):
                gc.collect()
            if stopping and not last:
                code = STOPPED
                break
        if cfg.data.stream:
            stream.close()
            if stream.problem and step > start:
                save()
        clock.lap("other")
    clock.lap("save")  # the one in flight
    watchdog.rest()
    if cfg.data.stream and stream.problem:
        say.warning(f"the stream has ended before step {step + 1}; everything up to step {step} is saved")
        raise stream.problem

    text = ""
    if cfg.debug.sample_tokens and code == DONE:
        prompt = tokenizer.encode(cfg.debug.sample_prompt).tolist()
        length = cfg.training.seq_len
        ids = sample(model, prompt, cfg.debug.sample_tokens, length, mesh.device, tokenizer.eot_id, multiple=mesh.tp)
        text = tokenizer.decode(ids)
    if cfg.checkpoint.export_hf and code == DONE and here.rank == 0:  # of the files, so on any mesh and by one rank
        words = hf_tokenizer.files(tokenizer, job.args.max_seq_len)
        hf.export_newest(folder / "checkpoints", folder / "hf", family, cfg.checkpoint.export_hf, words, say.info)
    say.info(closing_words(cfg, code, step, first_loss, last_loss, metrics.summary(), text))
    if here.rank == 0:
        say.info(this_start.summary())
    return code


def whose(cfg: Config, step: int, samples: list[list]) -> str:
    """Where to look for the text of a step. samples: of each rank, as in its batch."""
    if not cfg.data.stream:
        return f"`python -m data.audit {cfg.run.folder} --steps={step}` shows its documents"
    return f"its samples: {sorted({number for rows in samples for number in rows})}"


def source_metrics(order: Order, step: int, sums: Tensor) -> dict[str, float]:
    """For each source of a mixture: its mean loss since the last log line (none if it had no token), the tokens seen of it
    in the whole run, and how often it has been read. sums: of `add_by_source`, over all ranks."""
    stage, values = order.stage(step), {}
    for source, consumed, loss, tokens in zip(stage.sources, order.consumed(step), *sums.tolist(), strict=True):
        values |= {f"loss/{source.name}": loss / tokens} if tokens else {}
        values |= {f"tokens_seen/{source.name}": consumed * stage.seq_len, f"epochs/{source.name}": consumed / source.windows}
    return values


def every(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def closing_words(cfg: Config, code: int, step: int, first: float | None, last: float | None, speed: str, text: str) -> str:
    """What a person reads when the run ends."""
    folder = Path(cfg.run.folder)
    lines = []
    if first is None:
        lines.append(f"nothing to do: {folder} has already trained {step} steps; raise training.steps to go on")
    else:
        lines.append(f"loss {first:.3f} -> {last:.3f} nats per token; {speed}")
    if text:
        lines += ["a sample from the final weights:", *("    " + line for line in text.splitlines())]
    lines.append(f"tensorboard --logdir {folder / 'tensorboard'}")
    lines.append(f"checkpoints in {folder / 'checkpoints'}; try: python -m tools.generate {folder} --prompt 'class '")
    if code == STOPPED:
        lines.append(f"stopped on request after step {step} of {cfg.training.steps}; run the same command again to go on")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """`train.py [CONFIG.toml] [--table.key=value ...]`. Returns 0 done, 2 wrong configuration or input, 75 stopped on
    request with a checkpoint saved (run again to go on), 76 one step fails again and again (nothing was tried), 1 no room to
    write or data that cannot be read; any other failure raises. With data.stream 1 and 2 (data.stream_epochs are over) leave
    a checkpoint of the last whole step."""
    argv = sys.argv[1:] if argv is None else argv
    here = meshes.world()
    if "--help" in argv or "-h" in argv:
        print(help_text())
        return DONE
    try:
        cfg = load_config(argv, here.size, here.local_size)
        folder = Path(cfg.run.folder)
        with Start(folder, here.rank, argv, *as_given(argv), dump(cfg), os.environ) as this_start:
            log.setup(folder, here.rank)
            with (
                Stop(this_start.clock.born, cfg.run.max_minutes, this_start.end) as stop,
                health.Watchdog(folder, here.rank) as watchdog,
            ):
                this_start.code = train(cfg, this_start, stop, watchdog)
        return this_start.code
    except (InputError, LoaderError) as error:
        print(f"rank {here.rank}: {error}" if here.size > 1 else error, file=sys.stderr, flush=True)
        return WRONG_INPUT if isinstance(error, InputError) else FAILED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            raise
        print(f"rank {here.rank}: cannot write {error.filename or 'to the run folder'}: {error.strerror}. What was saved "
              "before is untouched; make room and run the same command again", file=sys.stderr, flush=True)  # fmt: skip
        return FAILED
    finally:
        meshes.close_mesh()


if __name__ == "__main__":
    sys.exit(main())
