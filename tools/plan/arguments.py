"""Know before you pay: memory, communication, time and cost of a run on GPUs that you do not have.

    python -m tools.plan configs/llama_70b.toml --gpus 256 --device h100 [--table.key=value ...]
    python -m tools.plan configs/llama_405b.toml --gpus 1024 --search --write best.toml
    python -m tools.plan configs/llama_8b.toml --gpus 64 --trace runs/plan.json
    python -m tools.plan configs/llama_8b.toml --tokens 1e12 --days 30    # how many GPUs

Runs the same `train.build` and `train.train_step` as a run does, on a fake process group with fake
tensors (`tools/plan/trace.py`), in seconds on a laptop, and plays the traced step through on a
device's numbers (`tools/plan/estimate.py`). Exit code 0: it fits; 1: it does not; 2: wrong
configuration or arguments. `docs/planning.md` says how far off it was where it could be compared.
"""

import argparse
import math
from pathlib import Path

from configs import dropped, stages
from configs.check import derive
from configs.load import load_config
from configs.schema import Config, InputError
from tools import outbound, overrides
from tools.plan import rows

# What CUDA's caching allocator holds and cannot use, as a share of the live bytes. In TorchTitan's
# published runs reserved memory was 14 to 23 % above the live bytes that we count for the same
# configurations (docs/planning.md); this is the most.
MARGIN = 0.23
# Llama 3 405B had 419 unexpected interruptions in 54 days on 16,384 H100s (arXiv:2407.21783,
# section 3.3.4).
MTBF_GPU_HOURS = 54 * 24 * 16384 / 419
# The smallest mesh, where that of the file is not what is planned. expert_parallel stays, with which
# expert_chunks and expert_exchange have a meaning.
ONE_PROCESS = (
    "--parallelism.data_parallel_shard=-1",
    "--parallelism.data_parallel_replicate=1",
    "--parallelism.context_parallel=1",
    "--parallelism.tensor_parallel=1",
    "--parallelism.pipeline_parallel=1",
    "--parallelism.pipeline_schedule=1f1b",
    "--parallelism.pipeline_stages_per_rank=0",
    "--parallelism.pipeline_layers=[]",
)


SHARES = ("gemm_efficiency", "attention_efficiency")
RATES = ("network_gb_per_s", "mtbf_gpu_hours", "restart_minutes", "storage_gb_per_s")
AMOUNTS = ("days", "usd", "at_step")
LIMITS = (
    (("gpus", "gpus_per_node"), "at least 1", lambda value: value >= 1),
    (AMOUNTS, "a number, at least 0", lambda value: 0 <= value < math.inf),
    (RATES, "more than 0", lambda value: value > 0),
    (SHARES, "more than 0 and at most 1", lambda value: 0 < value <= 1),
)


def check_limits(flags: argparse.Namespace) -> None:
    """Raise InputError for a number that LIMITS does not allow."""
    for names, words, is_allowed in LIMITS:
        for name in names:
            value = getattr(flags, name)
            if value is not None and not is_allowed(value):
                option = f"--{name.replace('_', '-')}"
                raise InputError(f"{option}={value:g} must be {words}")


def check_question(flags: argparse.Namespace) -> None:
    """Raise InputError where --days or --usd ask how many GPUs, and something else contradicts."""
    if flags.ladder and flags.tokens:
        raise InputError(
            "--ladder forecasts the run as it is configured: leave --tokens out, or set training.steps"
        )
    if flags.usd and flags.usd_per_gpu_hour <= 0:
        raise InputError("--usd needs --usd-per-gpu-hour, the price of a GPU")
    if not asks_how_many(flags):
        return
    for name in ("gpus", "search", "stages", "write", "trace", "ladder"):
        if getattr(flags, name):
            raise InputError(f"--days and --usd ask how many GPUs it takes: leave --{name} out")
    if flags.tokens <= 0:
        raise InputError("--days and --usd need --tokens, what the run trains on, as 15e12")


def asks_how_many(flags: argparse.Namespace) -> bool:
    """Return whether the command asks for the number of GPUs. (With a ladder, --usd asks for the best
    size of the model.)"""
    return bool(flags.days or (flags.usd and not flags.ladder))


OVERRIDES = {  # option -> the field of the device that it replaces, and what that is
    "gemm-efficiency": ("matmul_efficiency", "share of the peak that wide matmuls reach, as 0.56"),
    "attention-efficiency": (
        "attention_efficiency",
        "share of the peak that attention reaches, as 0.55",
    ),
    "network-gb-per-s": ("fabric_gb_per_s", "GB/s of each GPU between hosts, one direction"),
}


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command line, and check what only it says. Returns the flags, and the other arguments:
    the file and the options of the run."""
    parser = overrides.parser("python -m tools.plan", __doc__)
    add_machine(parser)
    add_run(parser)
    add_outputs(parser)
    flags, rest = parser.parse_known_args(argv)
    check_limits(flags)
    check_question(flags)
    flags.gpus = flags.gpus or 8
    for name in ("write", "trace"):
        path = getattr(flags, name)
        if path:
            outbound.check_file(f"--{name}", Path(path))
    rows.stack_row(flags.stack)
    rows.check_device(flags.device or "h100")
    rows.check_routing(flags.routing)
    return flags, rest


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what the run would have."""
    add = parser.add_argument
    add("--gpus", type=int, help="of the whole run (8)")
    text = "with --tokens and without --gpus: how many GPUs finish in so many days"
    add("--days", type=float, default=0, help=text)
    text = "the same, or also, for at most so many dollars; with --ladder, the size and the tokens that "
    text += "reach the least loss for them"
    add("--usd", type=float, default=0, help=text)
    add("--gpus-per-node", type=int, default=8, help="of each host (8)")
    text = "a row of tools/plan/devices.toml, a TOML file of your own, or cpu (h100)"
    add("--device", help=text)
    text = "a row of tools/plan/stacks.toml: plan as that software would run it (plumbline)"
    add("--stack", default="plumbline", help=text)
    for name, (_, about) in OVERRIDES.items():
        add(f"--{name}", type=float, help=f"{about} (the device's)")
    text = f"what the allocator adds to live bytes ({MARGIN})"
    add("--margin", type=float, default=MARGIN, help=text)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what the run would meet."""
    add = parser.add_argument
    text = "to train on, as 15e12 (what training.steps says)"
    add("--tokens", type=float, default=0, help=text)
    add("--usd-per-gpu-hour", type=float, default=0)
    text = "GPU-hours between interruptions (Llama 3's, %(default).0f)"
    add("--mtbf-gpu-hours", type=float, default=MTBF_GPU_HOURS, help=text)
    text = "from an interruption to the next step (10)"
    add("--restart-minutes", type=float, default=10, help=text)
    text = "of the checkpoint folder, all ranks together (10)"
    add("--storage-gb-per-s", type=float, default=10, help=text)
    text = (
        "of MoE layers: balanced; a number, how many times the mean the fullest rank gets; or the "
    )
    text += "folder of a run that recorded the loads of its experts (balanced)"
    add("--routing", default="balanced", help=text)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is planned, shown and written."""
    add = parser.add_argument
    text = "of a run with [[training.stages]] plan the stage that goes on after this step (0)"
    add("--at-step", type=int, default=0, metavar="STEP", help=text)
    text = "try meshes, checkpointing modes and microbatches; rank those that fit"
    add("--search", action="store_true", help=text)
    add("--stages", action="store_true", help="of a pipeline show every rank")
    text = "the configuration planned, or with --search the best found"
    add("--write", metavar="OUT.toml", help=text)
    text = "the time line and the memory of the step in Chrome's trace format, for ui.perfetto.dev"
    add("--trace", metavar="OUT.json", help=text)
    dropped.flag(
        parser, "--html", "--trace OUT.json writes the time line and the memory for Perfetto"
    )
    for name in ("--peers", "--replace-minutes", "--rebuild-seconds", "--lost-together"):
        dropped.flag(
            parser,
            name,
            "docs/reliability.md says what copies in memory and going on without a restart are worth",
        )
    dropped.flag(
        parser, "--compare", "plan each, and compare the two reports; --search ranks meshes"
    )
    text = "forecast the loss from this ladder (tools.ladder), and write it into the run's folder"
    add("--ladder", type=Path, metavar="DIR", help=text)


def configuration(flags: argparse.Namespace, rest: list[str]) -> Config:
    """Return the configuration to plan, checked; the mesh of the file only where it is what is
    planned. Raises ConfigError with every rule that is broken."""
    if flags.search or asks_how_many(flags):
        cfg = load_config([*rest, *ONE_PROCESS])
    else:
        cfg = load_config(rest, flags.gpus, min(flags.gpus, flags.gpus_per_node))
    if not cfg.training.stages:
        return cfg
    return derive(stages.at(cfg, flags.at_step), flags.gpus)
