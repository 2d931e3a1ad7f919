"""Open the checkpoints of a run when it starts: refuse what cannot be exported, claim the folder,
load the newest one."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint import adapters, branches, hf, rounds
from checkpoint.manager import CheckpointManager
from configs import stages
from parallelisms.mesh import world
from reliability import disk

DESCRIPTION = ("config.toml", "data.json", "tokenizer.json")
logger = logging.getLogger("plumbline")


def resume(
    job: Any,
    families: Mapping[str, Any],
    corpora: Any,
    options: str,
    watchdog: Any,
    place: Any,
) -> tuple[CheckpointManager, dict, Any, Callable]:
    """Return the checkpoints of this run, the progress of the one that was loaded ({} for a new
    run), the order of the batches that goes on from there, and `describe` for this run. Called by
    all ranks.

    job: a train.Job; families: what Hugging Face's files are of each family, by name; corpora: a
    data/loader.py::Corpora; options: the resolved configuration, as TOML; watchdog: a
    reliability/health.py::Watchdog; place: as place.py::claimed has made it this run's.
    """
    cfg = job.cfg
    folder = Path(cfg.run.folder)
    if stages.whole(cfg).checkpoint.export_hf:
        # what cannot be exported is refused before it is trained
        hf.config_of(hf.formats_of(families, cfg.model.family), job.args)
    tokenizer = corpora.tokenizer
    facts = {
        "family": cfg.model.family,
        "config": options,
        "seq_len": cfg.training.seq_len,
        "must_match": {"model": asdict(job.args), "tokenizer": tokenizer.fingerprint},
    }
    if cfg.lora.rank:
        facts["must_match"]["lora"] = {
            "rank": cfg.lora.rank,
            "alpha": cfg.lora.alpha,
            "targets": sorted(cfg.lora.targets),
        }
    checkpoints = CheckpointManager(cfg.checkpoint, folder / "checkpoints", job.mesh, facts, place)
    watchdog.arm(watchdog.STORAGE, "load")
    if cfg.lora.rank:
        adapters.load_base(job, families, checkpoints)
    progress = rounds.hand_over(job, checkpoints)
    if progress is None:
        progress = checkpoints.load(job.model, job.optimizer, cfg.training.last_step) or {}
    if not progress and cfg.checkpoint.load_hf and not cfg.lora.rank:
        published = Path(cfg.checkpoint.load_hf)
        checkpoints.origin = hf.load(
            published, job.model, families, cfg.model.family, job.args, checkpoints.group
        )
    if cfg.checkpoint.branch_from and checkpoints.last_step >= 0:
        say_unused(cfg.checkpoint.branch_from, folder, checkpoints)
    stages.check(cfg, progress.get("step", 0))
    order = corpora.order(progress)
    describe_run = partial(describe, folder, options, corpora, order)
    if not (folder / "config.toml").exists():
        describe_run()
    return checkpoints, progress, order, describe_run


def say_unused(branch_from: str, folder: Path, checkpoints: CheckpointManager) -> None:
    """Warn on rank 0 that a run has checkpoints already, and so does not branch off, unless
    this branch_from began it: a branch is restarted by its first command."""
    if world().rank == 0 and branches.begun_by(folder)[1] != branch_from:
        logger.warning(
            f"checkpoint.branch_from is not used: {checkpoints.folder} has checkpoints of its own, "
            f"and goes on from step {checkpoints.last_step}; name another run.folder to branch off"
        )


def describe(folder: Path, options: str, corpora: Any, order: Any, missing: bool = False) -> None:
    """Write what a reader of the run needs, its configuration, tokenizer and data, on rank 0. A run
    that goes on does it after its first step: a start that trains nothing changes nothing.

    missing: only where some of it was removed, as a checkpoint is of little use without it.
    """
    if world().rank != 0:
        return
    if missing:
        lost = [name for name in DESCRIPTION if not (folder / name).exists()]
        if not lost:
            return
        logger.warning(f"{folder}: {' and '.join(lost)} removed during the run; written again")
    files = {
        "config.toml": options,
        "data.json": json.dumps(corpora.record(order), indent=1),
    }
    try:
        for name, text in files.items():
            disk.write_whole(str(folder / name), text.encode())
        temporary = folder / "tokenizer.json.tmp"
        corpora.tokenizer.save(str(temporary))
        temporary.rename(folder / "tokenizer.json")
    except OSError as error:
        logger.warning(
            f"{error.filename or folder}: {error.strerror}: config.toml, data.json and tokenizer.json "
            f"in {folder} may be those of an earlier start"
        )
