"""The checkpoints of a run when it starts: refuse what cannot be exported, take the folder, load
the newest one."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpoint import adapters, hf
from checkpoint.manager import CheckpointManager


def resume(
    job: Any, families: Mapping[str, Any], corpora: Any, options: str, watchdog: Any
) -> tuple[CheckpointManager, dict, Any]:
    """The checkpoints of this run, the progress of the one that was loaded ({} for a new run), and
    the order of the batches that goes on from there. Called by all ranks.

    Opening them makes the folder this run's alone, so its configuration, its tokenizer and data.json
    are written there. job: a train.Job; families: what Hugging Face's files are of each family, by
    name; corpora: a data/loader.py::Corpora; options: the resolved configuration, as TOML; watchdog:
    a reliability/health.py::Watchdog.
    """
    cfg = job.cfg
    folder = Path(cfg.run.folder)
    if cfg.checkpoint.export_hf:
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
    checkpoints = CheckpointManager(cfg.checkpoint, folder / "checkpoints", job.mesh, facts)
    if job.mesh.rank == 0:
        (folder / "config.toml").write_text(options, encoding="utf-8")
        tokenizer.save(str(folder / "tokenizer.json"))
    watchdog.arm(watchdog.STORAGE, "load")
    if cfg.lora.rank:
        adapters.load_base(job, families, checkpoints)
    progress = checkpoints.load(job.model, job.optimizer) or {}
    if not progress and cfg.checkpoint.load_hf and not cfg.lora.rank:
        published = Path(cfg.checkpoint.load_hf)
        checkpoints.origin = hf.load(
            published, job.model, families, cfg.model.family, job.args, checkpoints.group
        )
    order = corpora.order(progress)
    if job.mesh.rank == 0:
        record = json.dumps(corpora.record(order), indent=1)
        (folder / "data.json").write_text(record, encoding="utf-8")
    return checkpoints, progress, order
