"""Goes through the stages of a run (configs/stages.py), each of which is a start in this process."""

import contextlib
import gc
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from checkpoint import branches, verify
from checkpoint.agreement import gather_objects, on_rank_0
from checkpoint.place import open_place
from configs import check, stages
from configs.schema import Config
from parallelisms.mesh import world
from reliability.exit import DONE, STOPPED
from reliability.stop import Stop

logger = logging.getLogger("plumbline")


def run_stages(cfg: Config, start: Callable[[Config], int]) -> int:
    """Call start(configuration) for each stage that is left. Returns the exit code of the last.
    Called by all ranks."""
    if not cfg.training.stages:
        return start(cfg)
    last = stages.steps_of(cfg)[-1]
    step = on_rank_0(None, _newest, cfg)
    while True:
        stage = stages.at(cfg, step)
        try:
            code = start(check.derive(stage, world().size))
            step = stage.training.last_step
            if code != DONE or step == last.stop:
                return code
            if any(gather_objects(Stop.asked_in_last, None)):
                logger.warning(f"stopped where a stage ends: step {step} is saved")
                return STOPPED
            cfg = _goes_on(cfg)
        except stages.OtherStage as other:
            logger.warning(str(other))
            step = other.step
        _forget()


def _newest(cfg: Config) -> int:
    """Return the step of the checkpoint from which the run goes on, if that is whole. On rank 0."""
    if cfg.checkpoint.load_step >= 0:
        return cfg.checkpoint.load_step
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a new run, or refused later
        names = open_place(cfg.checkpoint, Path(cfg.run.folder) / "checkpoints").names()
    if not names and cfg.checkpoint.branch_from:
        names = [branches.find(cfg.checkpoint.branch_from).name]
    parsed = verify.parse_name(names[0]) if names else None
    return parsed[1] if parsed else 0


def _goes_on(cfg: Config) -> Config:
    """Return the configuration without the step to go back to, which one stage has done."""
    checkpoint = cfg.checkpoint.model_copy(update={"load_step": -1})
    return cfg.model_copy(update={"checkpoint": checkpoint})


def _forget() -> None:
    """Free what a stage has left: its model and optimizer, and what was compiled for its shapes,
    which the next one would otherwise take for dynamic."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
