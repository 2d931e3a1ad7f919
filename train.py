"""Pretrain a Llama: `build(cfg)` makes the job, `train_step(job, batch)` does one optimizer step, `main(argv)` is the loop.

This file reads top to bottom and knows everyone; nobody but tools and tests imports it. Start it with ./run_train.sh,
which runs it under torchrun; `python train.py configs/llama_debug.toml` is the same thing as one process.
"""

import errno
import gc
import math
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from checkpoint import hf
from checkpoint.manager import CheckpointManager
from configs import check
from configs.load import dump, help_text, load_config
from configs.schema import Config, InputError
from data import hf_tokenizer
from data.loader import Batches, loader
from data.prepare import Prepared, prepare
from models import MODELS
from parallelisms import contract, dp, mesh as meshes, parallelize
from parallelisms.mesh import Mesh
from training import init, log
from training.loss import IGNORE, linear_cross_entropy
from training.metrics import Metrics, flops_per_token, memory_gib, model_summary, peak_flops
from training.optim import build_optimizer, clip_grad_norm, learning_rate, set_learning_rate
from training.profiler import profiler
from training.sample import sample
from training.validate import validation_loss

# Exit codes. 75 is EX_TEMPFAIL: stopped on request with a checkpoint, run again to go on.
DONE, FAILED, WRONG_INPUT, STOPPED = 0, 1, 2, 75
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@dataclass
class Job:
    """What a training step needs, and nothing else."""

    cfg: Config
    mesh: Mesh
    arch: dict  # the model's numbers: a FLAVORS row with the overrides of [model]
    model: nn.Module
    optimizer: torch.optim.Optimizer


def build(cfg: Config) -> Job:
    """The mesh, the model sharded over it with its initial values, and the optimizer. The only way to build them.

    A parameter's life: meta constructor -> tensor parallel -> checkpointing, compile -> FSDP shard -> memory -> initial
    value -> optimizer. Nothing is allocated before it is sharded, so the whole model never exists anywhere.
    """
    family, arch = MODELS[cfg.model.family], check.architecture(cfg.model)
    mesh = meshes.open_mesh(cfg.run, cfg.parallelism, check.data_parallel_shard(cfg, meshes.world().size))
    torch.manual_seed(cfg.run.seed + mesh.dp_rank)  # for a model that draws numbers: alike within a tp group, else not
    with torch.device("meta"):
        model = family.build(arch)
    parallelize(model, mesh, cfg, family.TP_PLAN)
    model.to_empty(device="cpu" if cfg.parallelism.cpu_offload else mesh.device)
    init.initialise(model, family.initial_values(arch), cfg.run.seed)
    optimizer = build_optimizer(model, family.DECAY, cfg.optimizer)
    return Job(cfg, mesh, arch, model, optimizer)


@dataclass(frozen=True)
class StepResult:
    loss: float  # nats per token, mean over the global batch
    grad_norm: float  # of the whole unsharded gradient, before clipping
    skipped: bool  # the gradient was not finite, so no weight changed


def train_step(job: Job, batch: dict[str, Tensor]) -> StepResult:
    """One optimizer step on this rank's share of the global batch: tokens and labels, int64 [A, b, T] in A micro-batches.

    The loss is a sum over tokens divided by the tokens of the *global* batch, which are counted first: so loss and
    gradient are the same numbers however the batch is split over ranks and micro-batches, even unevenly.
    """
    cfg, mesh, model = job.cfg, job.mesh, job.model
    tokens = batch["tokens"].to(mesh.device, non_blocking=True)
    labels = batch["labels"].to(mesh.device, non_blocking=True)
    counted = mesh.sum_over_dp((labels != IGNORE).sum())
    total = torch.zeros((), device=mesh.device)
    for a in range(len(tokens)):
        dp.synchronise_gradients(model, now=a == len(tokens) - 1)
        head = partial(linear_cross_entropy, labels=labels[a], chunk_tokens=cfg.training.loss_chunk_tokens)
        loss = model(tokens[a], head)
        (loss * (mesh.dp_size / counted)).backward()  # FSDP averages over dp_size ranks; this makes it the sum
        total += loss.detach()
    loss = (mesh.sum_over_dp(total) / counted).item()
    grad_norm = clip_grad_norm(model.parameters(), cfg.training.max_norm).item()
    skipped = not (math.isfinite(grad_norm) and math.isfinite(loss))  # the same on every rank: both are global numbers
    if not skipped:
        job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, grad_norm, skipped)


def batches(job: Job, data: Prepared, split: str) -> Batches:
    """The training or validation batches of this rank: item i is step i's, a function of (seed, i) alone. Validation is in
    the order of seed 0 whatever the run's seed, so that every run and every mesh is measured on the same sequences."""
    t = job.cfg.training
    return Batches(
        getattr(data, split), seq_len=t.seq_len, global_batch_size=t.global_batch_size, local_batch_size=t.local_batch_size,
        dp_rank=job.mesh.dp_rank, dp_size=job.mesh.dp_size, seed=job.cfg.run.seed if split == "train" else 0,
    )  # fmt: skip


def train(cfg: Config) -> int:
    """A whole run, from the newest checkpoint in cfg.run.folder if there is one. Returns the exit code."""
    stop = threading.Event()  # set by a signal, acted on at the end of the step, by all ranks at the same one

    def on_signal(number: int, frame: object) -> None:
        if number == signal.SIGINT and stop.is_set():
            raise KeyboardInterrupt  # a person who presses Ctrl-C again does not want to wait for a checkpoint
        stop.set()

    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP, and so do we then
            signal.signal(number, on_signal)
    folder, steps = Path(cfg.run.folder), cfg.training.steps
    here = meshes.world()
    say = log.setup(folder, here.rank)
    if cfg.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with a fixed workspace
        torch.use_deterministic_algorithms(True)

    data = prepare(cfg.data, log=say.info)
    job = build(cfg)
    mesh, model, optimizer = job.mesh, job.model, job.optimizer
    if data.tokenizer.n_vocab > job.arch["vocab_size"]:
        raise InputError(
            f"the tokenizer {cfg.data.tokenizer!r} has {data.tokenizer.n_vocab} tokens, the model's vocabulary only "
            f"{job.arch['vocab_size']}: set model.vocab_size to at least {data.tokenizer.n_vocab}"
        )
    if here.rank == 0:
        (folder / "config.toml").write_text(dump(cfg), encoding="utf-8")
        data.tokenizer.save(str(folder / "tokenizer.json"))
    if cfg.debug.self_check:
        same = {"config": dump(cfg), "torch": torch.__version__, "data": data.fingerprint}
        contract.verify(model, optimizer, mesh, same)

    must_match = {
        "model": job.arch, "data": data.fingerprint, "tokenizer": data.tokenizer.fingerprint, "run.seed": cfg.run.seed,
        "training.seq_len": cfg.training.seq_len, "training.global_batch_size": cfg.training.global_batch_size,
    }  # fmt: skip
    facts = {"family": cfg.model.family, "config": dump(cfg), "must_match": must_match}
    checkpoints = CheckpointManager(cfg.checkpoint, folder / "checkpoints", mesh, facts)
    progress = checkpoints.load(model, optimizer)
    start = progress["step"] if progress else 0
    names = MODELS[cfg.model.family].HF_NAMES
    if not progress and cfg.checkpoint.load_hf:
        checkpoints.origin = hf.load(Path(cfg.checkpoint.load_hf), model, job.arch, names, checkpoints.group)

    train_batches = batches(job, data, "train")
    held_out = batches(job, data, "validation") if cfg.validation.interval else None
    tokens_per_step = cfg.training.global_batch_size * cfg.training.seq_len
    flops = flops_per_token(job.arch, cfg.training.seq_len)
    dtype = dp.param_dtype(cfg.training, mesh.device)
    device_name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    peak = peak_flops(device_name, cfg.metrics.peak_tflops, dtype)
    metrics = Metrics(cfg.metrics, folder, here.rank == 0, start, steps, peak)
    say.info(model_summary(job.arch, model, mesh, dtype, tokens_per_step, optimizer))
    say.info("a fresh start" if not progress else f"resumed after step {start} of {steps}")

    first_loss = last_loss = None
    spent = waited = 0.0  # seconds in steps, and of those waiting for data, since the last log line
    since_log = skipped_in_a_row = 0
    code, step = DONE, start
    gc.disable()  # a collection at a random moment on one rank makes all ranks wait
    with profiler(cfg.profiler, folder, here.rank) as profile, metrics, checkpoints:
        stream = loader(train_batches, start, steps, cfg.data, pin_memory=mesh.device.type == "cuda")
        while step < steps:
            began = time.perf_counter()
            batch = next(stream)
            waited += time.perf_counter() - began
            lr = learning_rate(step, steps, cfg.optimizer.lr, cfg.lr_schedule)
            set_learning_rate(optimizer, lr)
            result = train_step(job, batch)
            step += 1
            spent += time.perf_counter() - began
            since_log += 1
            profile.step()
            if step == start + 1:
                mesh.set_timeout(cfg.run.step_timeout_seconds)

            skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
            if result.skipped:
                say.warning(f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}: skipped, no weight changed")
                if skipped_in_a_row > cfg.training.max_skipped_steps:
                    raise RuntimeError(f"{skipped_in_a_row} steps in a row without a finite gradient: the run has diverged")
            last_loss = result.loss
            first_loss = result.loss if first_loss is None else first_loss
            last, stopping = step == steps, mesh.any_rank(stop.is_set())
            if every(step, cfg.metrics.interval) or step == start + 1 or last or stopping:
                rate = tokens_per_step * since_log / spent
                metrics.log(step, {
                    "loss": result.loss, "grad_norm": result.grad_norm, "lr": lr, "tokens_per_second": rate,
                    "tokens_seen": step * tokens_per_step, "tflops_per_device": rate * flops / mesh.size / 1e12,
                    "memory_gib": memory_gib(mesh.device), "data_wait": waited / spent, "step_seconds": spent / since_log,
                })  # fmt: skip
                spent, waited, since_log = 0.0, 0.0, 0
            if cfg.validation.interval and (every(step, cfg.validation.interval) or last):
                held_out_stream = loader(held_out, 0, cfg.validation.steps, cfg.data, pin_memory=False)
                value = validation_loss(model, mesh, held_out_stream, cfg.training.loss_chunk_tokens)
                dp.reshard(model)
                metrics.log(step, {"validation_loss": value})
            if every(step, cfg.checkpoint.interval) or last or stopping:
                checkpoints.save(step, model, optimizer, {"step": step, "samples": step * cfg.training.global_batch_size})
            checkpoints.poll()
            if every(step, cfg.run.gc_interval):
                gc.collect()
            if stopping and not last:
                code = STOPPED
                break

    text = ""
    if cfg.debug.sample_tokens and code == DONE:
        prompt = data.tokenizer.encode(cfg.debug.sample_prompt).tolist()
        ids = sample(model, prompt, cfg.debug.sample_tokens, cfg.training.seq_len, mesh.device, stop=data.tokenizer.eot_id)
        text = data.tokenizer.decode(ids)
    if cfg.checkpoint.export_hf and code == DONE and here.rank == 0:  # of the files, so on any mesh and by one rank
        words = hf_tokenizer.files(data.tokenizer, job.arch["max_seq_len"])
        hf.export_newest(folder / "checkpoints", folder / "hf", names, cfg.checkpoint.export_hf, words, say.info)
    say.info(closing_words(cfg, code, step, first_loss, last_loss, metrics.summary(), text))
    return code


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
    request with a checkpoint saved (run again to go on), 1 no room to write; any other failure raises."""
    argv = sys.argv[1:] if argv is None else argv
    here = meshes.world()
    if "--help" in argv or "-h" in argv:
        print(help_text())
        return DONE
    try:
        return train(load_config(argv, here.size, here.local_size))
    except InputError as error:
        print(f"rank {here.rank}: {error}" if here.size > 1 else error, file=sys.stderr, flush=True)
        return WRONG_INPUT
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
