"""List the options of a configuration that a plan does not model, so that a report can name them."""

from collections.abc import Callable
from typing import NamedTuple

from configs.schema import Config
from tools.plan.device import Device


class Unmodelled(NamedTuple):
    option: str
    is_set: Callable[[Config, Device], bool]
    consequence: str


def kernel_without_number(cfg: Config, device: Device) -> bool:
    """Return True if the chosen kernel of attention has no number in the device's row."""
    chosen = cfg.training.attention in ("cudnn", "flash3")
    return chosen and not device.fast_attention_efficiency


def other_backend(cfg: Config, device: Device) -> bool:
    return cfg.compile.enabled and cfg.compile.backend != "inductor"


ROWS = (
    Unmodelled(
        "data.mask_documents",
        lambda cfg, _: cfg.data.mask_documents,
        "computes less attention than this: the time is an upper bound",
    ),
    Unmodelled(
        "training.attention",
        kernel_without_number,
        "this device has no fast_attention_efficiency: planned as the other kernels",
    ),
    Unmodelled(
        "training.delta_rule",
        lambda cfg, _: cfg.training.delta_rule == "flash",
        "planned as plain PyTorch, which is slower",
    ),
    Unmodelled(
        "training.float8",
        lambda cfg, _: cfg.training.float8 != "none",
        "its time is assumed (tools/plan/stack.py::FLOAT8), its memory is that of bfloat16",
    ),
    Unmodelled("compile.backend", other_backend, "planned as inductor"),
    Unmodelled(
        "compile.cuda_graphs",
        lambda cfg, _: cfg.compile.cuda_graphs,
        "the host's time is counted as without them",
    ),
    Unmodelled(
        "parallelism.cpu_offload",
        lambda cfg, _: cfg.parallelism.cpu_offload,
        "weights and optimizer state are counted as the GPU's, and copies to the host cost nothing",
    ),
    Unmodelled(
        "run.deterministic",
        lambda cfg, _: cfg.run.deterministic,
        "deterministic kernels are slower",
    ),
    Unmodelled(
        "validation.interval",
        lambda cfg, _: cfg.validation.interval > 0,
        "the time of validation",
    ),
    Unmodelled(
        "evaluation.tasks",
        lambda cfg, _: bool(cfg.evaluation.tasks),
        "the time of evaluation",
    ),
    Unmodelled(
        "data.stream",
        lambda cfg, _: cfg.data.stream,
        "the time of tokenising, if it is slower than training",
    ),
)


def not_modelled(cfg: Config, device: Device) -> list[str]:
    """Return a line for each option of `cfg` that the plan does not model, with the consequence for
    its figures."""
    return [f"{row.option}: {row.consequence}" for row in ROWS if row.is_set(cfg, device)]
