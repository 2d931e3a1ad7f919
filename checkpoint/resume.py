"""The checkpoints of a run when it starts: refuse what cannot be exported, take the folder, load
the newest one."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpoint import hf
from checkpoint.manager import CheckpointManager


def resume(
    job: Any, families: Mapping[str, Any], tokenizer: Any, options: str, watchdog: Any
) -> tuple[CheckpointManager, dict]:
    """The checkpoints of this run, and the progress of the one that was loaded: {} for a new run.
    Called by all ranks.

    Opening them makes the folder this run's alone, so its configuration and its tokenizer are
    written there. job: a train.Job; families: what Hugging Face's files are of each family, by
    name; tokenizer: a data/tokenizer.py::Tokenizer; options: the resolved configuration, as TOML;
    watchdog: a reliability/health.py::Watchdog.
    """
    cfg = job.cfg
    folder = Path(cfg.run.folder)
    if cfg.checkpoint.export_hf:
        # what cannot be exported is refused before it is trained
        hf.config_of(families[cfg.model.family], job.args)
    facts = {
        "family": cfg.model.family,
        "config": options,
        "seq_len": cfg.training.seq_len,
        "must_match": {"model": asdict(job.args), "tokenizer": tokenizer.fingerprint},
    }
    checkpoints = CheckpointManager(cfg.checkpoint, folder / "checkpoints", job.mesh, facts)
    if job.mesh.rank == 0:
        (folder / "config.toml").write_text(options, encoding="utf-8")
        tokenizer.save(str(folder / "tokenizer.json"))
    watchdog.arm(watchdog.STORAGE)
    progress = checkpoints.load(job.model, job.optimizer)
    if not progress and cfg.checkpoint.load_hf:
        published = Path(cfg.checkpoint.load_hf)
        checkpoints.origin = hf.load(
            published, job.model, families, cfg.model.family, job.args, checkpoints.group
        )
    return checkpoints, progress or {}
