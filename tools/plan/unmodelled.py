"""List the options of a configuration that a plan does not model, so that a report can name them."""

from configs.schema import Config
from tools.plan.device import Device

ROWS = {  # option -> the values that are not modelled (None: all that are set), and the consequence
    "data.mask_documents": (None, "computes less attention than this: the time is an upper bound"),
    "training.attention": (
        ("cudnn", "flash3"),
        "this device has no fast_attention_efficiency: planned as the other kernels",
    ),
    "training.delta_rule": (("flash",), "planned as plain PyTorch, which is slower"),
    "training.float8": (
        ("tensorwise", "rowwise"),
        "its time is assumed (tools/plan/stack.py::FLOAT8), its memory is that of bfloat16",
    ),
    "compile.backend": (None, "planned as inductor"),
    "compile.cuda_graphs": (None, "the host's time is counted as without them"),
    "parallelism.cpu_offload": (
        None,
        "weights and optimizer state are counted as the GPU's, and copies to the host cost nothing",
    ),
    "run.deterministic": (None, "deterministic kernels are slower"),
    "validation.interval": (None, "the time of validation"),
    "evaluation.tasks": (None, "the time of evaluation"),
    "data.stream": (None, "the time of tokenising, if it is slower than training"),
}


def not_modelled(cfg: Config, device: Device) -> list[str]:
    """Return a line for each option of `cfg` that the plan does not model, with the consequence for
    its figures."""
    modelled = set()
    if device.fast_attention_efficiency:
        modelled.add("training.attention")
    if not cfg.compile.enabled or cfg.compile.backend == "inductor":
        modelled.add("compile.backend")
    lines = []
    for option, (values, consequence) in ROWS.items():
        table, name = option.split(".")
        value = getattr(getattr(cfg, table), name)
        is_set = value if values is None else value in values
        if is_set and option not in modelled:
            lines.append(f"{option}: {consequence}")
    return lines
