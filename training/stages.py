"""Computes the learning rate of a run whose stages begin schedules of their own."""

from configs import stages
from configs.schema import Config
from training import optim


def learning_rate(step: int, cfg: Config) -> float:
    """Return the learning rate of optimizer step `step` (0-based) of the run, by the schedule that
    holds in its stage."""
    steps = stages.schedule_steps(cfg)
    return optim.learning_rate(step - steps.start, len(steps), cfg.optimizer.lr, cfg.lr_schedule)
