"""The checks of the run itself: its data, the sharded model, real steps, a checkpoint and back."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
from dataclasses import asdict
from types import SimpleNamespace

import torch

import train
from checkpoint import state
from checkpoint.manager import CheckpointManager
from configs.schema import Config, InputError
from data import inputs
from data.open import open_corpora
from data.prepare import is_tokenised, kept_in
from data.sources import find
from parallelisms import contract
from tools.preflight import bucket
from tools.preflight.machine import checkpoint_bytes, device_table, synchronise
from tools.preflight.network import limit_collectives
from tools.preflight.probe import (
    Probe,
    ProbeRow,
    differences,
    failed,
    fine,
    in_seconds,
    least,
    most,
)
from training.metrics import in_bytes, memory_gib
from training.optim import learning_rate, set_learning_rate

# bytes that are tokenised here and now if they are not yet: it takes seconds
SMALL_CORPUS = 64_000_000
# what all ranks must find in the data -> its name on the page
MUST_AGREE = {
    "tokenizer": "tokenizer",
    "corpora": "corpora",
    "description": "order of the data",
    "held_out": "held_out",
    "digests": "batch content",
}


# data: the same tokens for all --------------------------------------------------------------------


def measure_data(probe: Probe) -> dict:
    """Read batches of the beginning and the end as the run does. Raises InputError as it does."""
    cfg = probe.cfg
    if cfg.data.stream:
        raise InputError(
            "data.stream = true: what a stream will read cannot be checked beforehand; check the "
            "cluster with --data.stream=false and a prepared part of the source"
        )
    absent, size = not_tokenised(cfg)
    if size > SMALL_CORPUS:
        return {"absent": absent, "size": size}
    began = time.perf_counter()
    probe.corpora = corpora = open_corpora(cfg, log=lambda line: None)
    opened = time.perf_counter() - began
    probe.order = corpora.order({})
    p = cfg.parallelism
    # the ranks that read the same rows, in one stage
    shared = p.tensor_parallel * p.context_parallel
    dp_size = probe.world.size // (shared * p.pipeline_parallel)
    digests = []
    seconds = []
    count = 0
    # facts equal on all ranks, then this rank's own
    for dp_rank in (0, probe.world.rank // shared % dp_size):
        mesh = SimpleNamespace(
            dp_rank=dp_rank, dp_size=dp_size, token_ranges=lambda seq_len: [range(seq_len)]
        )
        rows = corpora.training_batches(probe.order, mesh, probe.args.vocab_size)
        for step in sorted({0, 1, cfg.training.steps - 1}):
            began = time.perf_counter()
            batch = rows[step]
            seconds.append(time.perf_counter() - began)
            count += batch["tokens"].numel()
            digest = ""
            if dp_rank == 0:
                content = batch["tokens"].numpy().tobytes()
                digest = hashlib.sha256(content).hexdigest()[:12]
            digests.append(digest)
    tokenizer = corpora.tokenizer
    sources = corpora.sources
    return {
        "tokenizer": tokenizer.fingerprint,
        "lacking": inputs.tokens_without_row(tokenizer, cfg.data, probe.args.vocab_size),
        "digests": digests[:2],
        "opened": opened,
        "corpora": {name or "data.source": c.fingerprint for name, c in sources.items()},
        "description": corpora.description,
        "held_out": {
            name: [len(tokens), os.path.basename(tokens.folder)]
            for name, tokens in corpora.sets.items()
        },
        "folders": [c.folder for c in sources.values()],
        "tokens": sum(len(c.train) for c in sources.values()),
        "rate": count / sum(seconds),
        "batch": max(seconds),
        "made": absent,
    }


def not_tokenised(cfg: Config) -> tuple[list[str], float]:
    """Return the sources that this host would have to tokenise first, and their bytes."""
    trained = [row.source for row in cfg.data.mixture] or [cfg.data.source]
    fractions = [(source, cfg.data.validation_fraction) for source in trained]
    fractions += [(row.source, 0.0) for row in cfg.validation.sets]
    absent = []
    size = 0.0
    for source, fraction in fractions:
        data = cfg.data.model_copy(update={"source": source, "validation_fraction": fraction})
        if not is_tokenised(source) and not os.path.isdir(kept_in(data)):
            absent.append(source)
            # the size of a stream is unknown
            size += sum(file.size for file in find(source)) or math.inf
    return absent, size


def judge_data(probe: Probe, answers: list[dict]) -> list[ProbeRow]:
    rows = []
    if lacking := [r for r, a in enumerate(answers) if "absent" in a]:
        a = answers[lacking[0]]
        much = in_bytes(a["size"]) if math.isfinite(a["size"]) else "of unknown size"
        text = (
            f"{', '.join(a['absent'])} ({much}) is not tokenised yet where {probe.named(lacking)} can "
            "see it: the run would begin with that; do it once before, with python -m data.prepare, "
            "into a folder that all hosts share"
        )
        return [failed(text)]
    for what, name in MUST_AGREE.items():
        if text := differences(probe, [json.dumps(a[what]) for a in answers]):
            text += "; all hosts must read the same files (share one data.cache)"
            rows.append(failed(f"{name}: {text}"))
            break
    a = answers[0]
    if a["lacking"]:
        rows.append(failed(f"{a['lacking']}: raise model.vocab_size"))
    if rows:
        return rows
    low = least(a["rate"] for a in answers)
    made = f" (tokenised now: {', '.join(a['made'])})" if any(a["made"] for a in answers) else ""
    text = (
        f"{a['tokens']:,} tokens in {', '.join(a['folders'][:3])}{made}, the same for all, tokenizer "
        f"{a['tokenizer'][:12]}; slowest reader {answers[low]['rate'] / 1e6:.3g} M tokens/s, "
        f"{probe.named([low])}, opened within {in_seconds(max(a['opened'] for a in answers))}"
    )
    return [fine(text)]


# build: the sharded model -------------------------------------------------------------------------


def measure_build(probe: Probe) -> dict:
    began = time.perf_counter()
    run = probe.cfg.run.model_copy(update={"init_timeout_seconds": probe.limit("build")})
    probe.job = train.build(probe.cfg.model_copy(update={"run": run}))
    limit_collectives(probe, probe.limit("build"))
    contract.verify(probe.job.model, probe.job.optimizer, probe.job.mesh, {})
    seconds = time.perf_counter() - began
    mine = sum(state.local(p).nbytes for p in probe.job.model.parameters())
    return {"seconds": seconds, "weights": mine}


def judge_build(probe: Probe, answers: list[dict]) -> list[ProbeRow]:
    mesh = probe.job.mesh
    sizes = " x ".join(f"{name} {getattr(mesh, name)}" for name in mesh.device_mesh.mesh_dim_names)
    largest = in_bytes(max(a["weights"] for a in answers))
    seconds = in_seconds(max(a["seconds"] for a in answers))
    return [fine(f"mesh {sizes}; initial weights in {seconds}, at most {largest} on a rank")]


# step: the real one -------------------------------------------------------------------------------


def measure_step(probe: Probe) -> dict:
    """Run steps of the run on its own batches: the first, and three more that are timed."""
    cfg = probe.cfg
    job = probe.job
    limit_collectives(probe, probe.limit("step"))
    batches = probe.corpora.training_batches(probe.order, job.mesh, probe.args.vocab_size)
    losses = []
    seconds = []
    finite = True
    skipped = False
    if job.mesh.device.type == "cuda":
        torch.cuda.empty_cache()  # the memory of earlier checks must not count
        torch.cuda.reset_peak_memory_stats(job.mesh.device)
        torch.cuda.reset_accumulated_memory_stats(job.mesh.device)
    for step in range(min(4, cfg.training.steps)):
        batch = batches[step]
        rate = learning_rate(step, cfg)
        set_learning_rate(job.optimizer, rate)
        synchronise(job.mesh.device)
        began = time.perf_counter()
        result = train.train_step(job, batch)
        synchronise(job.mesh.device)
        seconds.append(time.perf_counter() - began)
        losses += [result.loss.hex(), result.grad_norm.hex()]
        finite = finite and bool(torch.isfinite(result.losses).all())
        skipped = skipped or result.skipped
    return {
        "losses": losses,
        "finite": finite,
        "skipped": skipped,
        "seconds": seconds,
        **memory(job.mesh.device),
    }


def memory(device: torch.device) -> dict[str, float]:
    """Return bytes: of the device, in tensors and reserved at the peak, left on the device."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        stats = torch.cuda.memory_stats(device)
        return {
            "total": total,
            "tensors": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
            "left": free,
            "retries": stats.get("num_alloc_retries", 0),
        }
    table = device_table(device)
    peak = memory_gib(device) * 2**30
    taken = {"tensors": peak, "reserved": peak}
    return {"total": table["total"], **taken, "left": table["free"], "retries": 0}


def numbers_text(values: list[str]) -> str:
    return " ".join(f"{float.fromhex(value):.9g}" for value in values)


def judge_step(probe: Probe, answers: list[dict]) -> list[ProbeRow]:
    rows = []
    bad = [r for r, a in enumerate(answers) if not a["finite"]]
    losses = [float.fromhex(a["losses"][0]) for a in answers]
    if bad:
        text = (
            f"the loss of the tokens of {probe.named(bad)} is not finite: compute there what another "
            "rank computes (a bad device?), or look at its data"
        )
        rows.append(failed(text))
    elif any(a["skipped"] for a in answers):
        text = f"the gradient is not finite (loss {losses[0]:.4f}), though the loss of each rank is"
        rows.append(failed(text))
    elif text := differences(probe, [numbers_text(a["losses"]) for a in answers]):
        rows.append(failed(f"loss and gradient norm must be the same on all ranks, but are {text}"))
    of_ranks = zip(*(a["seconds"] for a in answers), strict=True)  # by step
    first, *later_steps = map(max, of_ranks)
    usual = statistics.median(later_steps) if later_steps else first
    t = probe.cfg.training
    rate = t.global_batch_size * t.seq_len / usual
    if not rows:
        expected = math.log(probe.args.vocab_size)
        text = (
            f"loss {losses[0]:.3f} on all ranks (of random weights {expected:.3f} is expected); the "
            f"first takes {in_seconds(first)}, then {in_seconds(usual)}: {rate:,.0f} tokens/s"
        )
        rows.append(fine(text))
    fullest = most(a["reserved"] for a in answers)
    a = answers[fullest]
    detail = f"memory: at most {in_bytes(a['reserved'])} of {in_bytes(a['total'])}, on "
    detail += probe.named([fullest])
    if probe.device.type == "cuda":
        tightest = least(a["left"] for a in answers)
        detail += (
            f" ({in_bytes(a['tensors'])} in tensors); least left "
            f"{in_bytes(answers[tightest]['left'])} on {probe.named([tightest])}"
        )
    tight = [r for r, a in enumerate(answers) if a["retries"]]
    if tight:
        detail += f"; the allocator had to start over on {probe.named(tight)}: too tight, so steps "
        detail += "will be slow"
    rows.append(ProbeRow("warn" if tight else "ok", detail))
    return rows


# save: a checkpoint and back ----------------------------------------------------------------------


def measure_save(probe: Probe) -> dict:
    """Save a checkpoint into the temporary folder, and read it back into the emptied weights."""
    job = probe.job
    limit_collectives(probe, probe.limit("save"))
    fresh = {"load_step": -1, "load_path": "", "load_hf": "", "exclude_from_loading": ()}
    # not the run's own, which another start may be writing
    in_store = bucket.prefix(probe.cfg, probe.id)
    fresh |= {"store": f"{in_store}/checkpoints" if in_store else ""}
    cfg = probe.cfg.checkpoint.model_copy(update=fresh)
    must_match = {"model": asdict(probe.args)}
    facts = {"family": probe.cfg.model.family, "must_match": must_match}
    folder = probe.place / "checkpoints"
    seconds = {}
    writer = CheckpointManager(cfg, folder, job.mesh, facts)
    writer.load(job.model, job.optimizer)
    before = fingerprints(job)
    began = time.perf_counter()
    writer.save(1, job.model, job.optimizer, {"step": 1, "samples": 0})
    writer.wait_for_copy()
    synchronise(job.mesh.device)
    seconds["stall"] = time.perf_counter() - began
    writer.close()
    seconds["save"] = time.perf_counter() - began
    with torch.no_grad():
        for tensor in state.tensors(job.model, job.optimizer).values():
            if tensor.is_floating_point():
                state.local(tensor).zero_()
    began = time.perf_counter()
    reader = CheckpointManager(cfg, folder, job.mesh, facts)
    reader.load(job.model, job.optimizer)
    synchronise(job.mesh.device)
    seconds["load"] = time.perf_counter() - began
    after = fingerprints(job)
    reader.close()
    return seconds | {"wrong": [name for name in before if after.get(name) != before[name]]}


def fingerprints(job: train.Job) -> dict[str, int]:
    """Return a number for each of this rank's shards that changes with any bit of it."""
    hashes = {}
    for name, tensor in state.tensors(job.model, job.optimizer).items():
        shard = state.local(tensor)
        if shard.numel() and not name.startswith("rng."):
            hashes[name] = torch.hash_tensor(shard).view(torch.int64).item()
    return hashes


def judge_save(probe: Probe, answers: list[dict]) -> list[ProbeRow]:
    wrong = [r for r, a in enumerate(answers) if a["wrong"]]
    if wrong:
        name = answers[wrong[0]]["wrong"][0]
        text = (
            f"{probe.named(wrong)} read back other values than were saved ({name} ...): the file "
            "system or the memory of that host is not to be trusted"
        )
        return [failed(text)]
    stall, save, load = (max(a[key] for a in answers) for key in ("stall", "save", "load"))
    size = checkpoint_bytes(probe.cfg, probe.args)
    text = (
        f"{in_bytes(size)} saved in {in_seconds(save)} ({in_bytes(size / save)}/s), of which "
        f"{in_seconds(stall)} before the next step may begin; read back whole in {in_seconds(load)}"
    )
    return [fine(text)]
