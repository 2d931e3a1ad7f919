"""Know before you pay: memory, communication, time and cost of a run on GPUs that you do not have.

    python -m tools.plan configs/llama_70b.toml --gpus 256 --device h100 [--table.key=value ...]
    python -m tools.plan configs/llama_405b.toml --gpus 1024 --search --write best.toml
    python -m tools.plan configs/llama_8b.toml --gpus 64 --html runs/plan.html
    python -m tools.plan configs/llama_8b.toml --gpus 64 --compare --parallelism.tensor_parallel=4
    python -m tools.plan configs/llama_8b.toml --tokens 1e12 --days 30    # how many GPUs

Runs the same `train.build` and `train.train_step` as a run does, on a fake process group with fake
tensors (`tools/plan/trace.py`), in seconds on a laptop, and plays the traced step through on a
device's numbers (`tools/plan/estimate.py`). Exit code 0: it fits; 1: it does not; 2: wrong
configuration or arguments. `docs/planning.md` says how far off it was where it could be compared.
"""

import argparse
import signal
import sys
from pathlib import Path

from configs import program
from configs.load import dump, load_config
from configs.schema import Config, InputError
from tools.plan import compare, front
from tools.plan.cluster import answer, clusters, known_devices
from tools.plan.device import Device, load_device
from tools.plan.page import page
from tools.plan.plan import MARGIN, MTBF_GPU_HOURS, PlanInputs, make_plan
from tools.plan.report import report
from tools.plan.routing import load_routing
from tools.plan.search import search, table
from tools.plan.stack import load_stack

# The smallest mesh, where that of the file is not what is planned. expert_parallel stays, with which
# expert_chunks and expert_exchange have a meaning.
RUNS = Path("runs")  # the folder of all runs, which a page may be the first to need
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


def check_question(flags: argparse.Namespace) -> None:
    """Raise InputError where --days or --usd ask how many GPUs, or --compare asks for two plans, and
    something else contradicts."""
    for name in ("search", "stages", "write"):
        if flags.compare and getattr(flags, name):
            raise InputError(f"--compare shows two plans side by side: leave --{name} out")
    if flags.gpus is not None and flags.gpus < 1:
        raise InputError("--gpus and --gpus-per-node are numbers of GPUs, at least 1")
    if flags.days < 0 or flags.usd < 0:
        raise InputError("--days and --usd are limits, more than 0")
    if not asks_how_many(flags):
        return
    for name in ("gpus", "search", "stages", "write", "html", "compare"):
        if getattr(flags, name):
            raise InputError(f"--days and --usd ask how many GPUs it takes: leave --{name} out")
    if flags.tokens <= 0:
        raise InputError("--days and --usd need --tokens, what the run trains on, as 15e12")
    if flags.usd and flags.usd_per_gpu_hour <= 0:
        raise InputError("--usd needs --usd-per-gpu-hour, the price of a GPU")


def asks_how_many(flags: argparse.Namespace) -> bool:
    return bool(flags.days or flags.usd)


OVERRIDES = {  # option -> what it gives in the place of the device's number
    "gemm-efficiency": "share of the peak that wide matmuls reach, as 0.56",
    "attention-efficiency": "share of the peak that attention reaches, as 0.55",
    "network-gb-per-s": "GB/s of each GPU between hosts, one direction",
}


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m tools.plan",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=int, help="of the whole run (8)")
    parser.add_argument(
        "--days",
        type=float,
        default=0,
        help="with --tokens and without --gpus: how many GPUs finish in so many days",
    )
    parser.add_argument(
        "--usd", type=float, default=0, help="the same, or also, for at most so many dollars"
    )
    parser.add_argument("--gpus-per-node", type=int, default=8, help="of each host (8)")
    parser.add_argument(
        "--device",
        help="a row of tools/plan/devices.toml, a TOML file of your own, or cpu (h100)",
    )
    parser.add_argument(
        "--stack",
        default="plumbline",
        help="a row of tools/plan/stacks.toml: plan as that software would run it (plumbline)",
    )
    for name, about in OVERRIDES.items():
        parser.add_argument(f"--{name}", type=float, help=f"{about} (the device's)")
    parser.add_argument(
        "--margin",
        type=float,
        default=MARGIN,
        help=f"what the allocator adds to live bytes ({MARGIN})",
    )
    parser.add_argument(
        "--tokens", type=float, default=0, help="to train on, as 15e12 (what training.steps says)"
    )
    parser.add_argument("--usd-per-gpu-hour", type=float, default=0)
    parser.add_argument(
        "--mtbf-gpu-hours",
        type=float,
        default=MTBF_GPU_HOURS,
        help="GPU-hours between interruptions (Llama 3's, %(default).0f)",
    )
    parser.add_argument(
        "--restart-minutes",
        type=float,
        default=10,
        help="from an interruption to the next step (10)",
    )
    parser.add_argument(
        "--storage-gb-per-s",
        type=float,
        default=10,
        help="of the checkpoint folder, all ranks together (10)",
    )
    parser.add_argument(
        "--routing",
        default="balanced",
        help="of MoE layers: balanced; a number, how many times the mean the fullest "
        "rank gets; or the "
        "folder of a run that recorded the loads of its experts (balanced)",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="try meshes, checkpointing modes and microbatches; rank those that fit",
    )
    parser.add_argument("--stages", action="store_true", help="of a pipeline show every rank")
    parser.add_argument(
        "--write",
        metavar="OUT.toml",
        help="the configuration planned, or with --search the best found",
    )
    parser.add_argument(
        "--html",
        metavar="OUT.html",
        help="one page with the memory curve, the time line and the mesh",
    )
    parser.add_argument(
        "--compare",
        action="append",
        metavar="OTHER",
        help="a second plan to compare with: a TOML file, or an option to add to this plan's, as "
        "--parallelism.tensor_parallel=4; may be repeated",
    )
    flags, rest = parser.parse_known_args(with_values(argv))
    check_question(flags)
    flags.gpus = flags.gpus or 8
    if flags.gpus < 1 or flags.gpus_per_node < 1:
        raise InputError("--gpus and --gpus-per-node are numbers of GPUs, at least 1")
    for name in ("write", "html"):
        path = getattr(flags, name)
        if path and Path(path).parent == RUNS:
            RUNS.mkdir(exist_ok=True)
        if path and (Path(path).is_dir() or not Path(path).parent.is_dir()):
            raise InputError(
                f"--{name} {path}: this is a folder, or its folder does not exist: name a file "
                "that can be written"
            )
    for name in ("mtbf_gpu_hours", "restart_minutes", "storage_gb_per_s"):
        if getattr(flags, name) <= 0:
            raise InputError(f"--{name.replace('_', '-')} must be more than 0")
    return flags, rest


def with_values(argv: list[str]) -> list[str]:
    """Return the arguments with "--compare" and its value as one, since the value may begin with
    dashes."""
    joined: list[str] = []
    for argument in argv:
        if joined and joined[-1] == "--compare":
            joined[-1] = f"--compare={argument}"
        else:
            joined.append(argument)
    return joined


def second(flags: argparse.Namespace, rest: list[str]) -> list[str]:
    """Return the arguments of the second plan, that --compare asks for."""
    files = [value for value in flags.compare if not value.startswith("--")]
    if len(files) > 1:
        raise InputError(f"--compare takes one file, not {len(files)}: {', '.join(files)}")
    return flags.compare if files else [*rest, *flags.compare]


def compared(cfg: Config, inputs: PlanInputs, flags: argparse.Namespace, rest: list[str]) -> int:
    """Plans two configurations and shows them side by side. Returns the exit code. Raises
    InputError."""
    other, _ = read_inputs(flags, second(flags, rest))
    compare.changes(cfg, other)
    plans = make_plan(cfg, inputs), make_plan(other, inputs)
    print(compare.table(*plans))
    if flags.html:
        reports = "\n\n".join(f"Plan {name}\n\n{report(p)}" for name, p in zip("AB", plans))
        text = page(plans[0], reports, plans[1], compare.section(*plans))
        Path(flags.html).write_text(text, encoding="utf-8")
        print(f"\nwritten: {flags.html}")
    return 0 if all(plan.fits for plan in plans) else 1


def overridden(device: Device, flags: argparse.Namespace) -> Device:
    """Return the device with the numbers of the command line. Raises InputError."""
    changes = {}
    shares = {
        "gemm_efficiency": "matmul_efficiency",
        "attention_efficiency": "attention_efficiency",
    }
    for name, field in shares.items():
        value = getattr(flags, name)
        if value is None:
            continue
        if not 0 < value <= 1:
            raise InputError(
                f"--{name.replace('_', '-')} {value:g}: give a share of the device's peak, more "
                "than 0 and at most 1"
            )
        changes[field] = value
    if "attention_efficiency" in changes:  # overrides the choice of training.attention
        changes["fast_attention_efficiency"] = changes["attention_efficiency"]
    if flags.network_gb_per_s is not None:
        if flags.network_gb_per_s <= 0:
            raise InputError("--network-gb-per-s must be more than 0")
        changes["fabric_gb_per_s"] = flags.network_gb_per_s
    return device.model_copy(update=changes)


def chosen_device(name: str, flags: argparse.Namespace) -> Device:
    """Return the device as --stack uses it, with the overrides of the command line. Raises
    InputError."""
    return overridden(load_stack(flags.stack).on(load_device(name), name.lower()), flags)


def read_inputs(flags: argparse.Namespace, rest: list[str]) -> tuple[Config, PlanInputs]:
    """Return the checked configuration and the plan's other inputs. Raises InputError, ConfigError
    with every rule that is broken."""
    per_host = min(flags.gpus, flags.gpus_per_node)
    stack = load_stack(flags.stack)
    device = chosen_device(flags.device or "h100", flags)
    # the search chooses the mesh, so the file's mesh is not checked
    if flags.search or asks_how_many(flags):
        cfg = load_config([*rest, *ONE_PROCESS])
    else:
        cfg = load_config(rest, flags.gpus, per_host)
    on_gpu = device.kind == "gpu"
    dtype = cfg.training.param_dtype
    if on_gpu and dtype in ("float32", "float64"):
        raise InputError(
            f'training.param_dtype = "{dtype}": the device table has peaks for bfloat16 only; plan '
            'with "bfloat16" '
            'or "auto"'
        )
    if on_gpu:
        training = cfg.training.model_copy(update={"param_dtype": "bfloat16"})
        cfg = cfg.model_copy(update={"training": training})
    inputs = PlanInputs(
        flags.gpus,
        per_host,
        device,
        on_gpu,
        flags.margin,
        flags.tokens,
        flags.usd_per_gpu_hour,
        flags.mtbf_gpu_hours,
        flags.restart_minutes * 60,
        flags.storage_gb_per_s,
        load_routing(flags.routing),
        stack,
    )
    return cfg, inputs


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command line in this file's first lines. Returns the exit code."""
    try:
        flags, rest = arguments(sys.argv[1:] if argv is None else argv)
        if asks_how_many(flags):
            _, inputs = read_inputs(flags, rest)
            names = [flags.device] if flags.device else known_devices()
            devices = {name: chosen_device(name, flags) for name in names}
            found = clusters(rest, inputs, flags.gpus_per_node, devices)
            print(answer(found, flags.days, flags.usd))
            return 0 if any(one.keeps(flags.days, flags.usd) for one in found) else 1
        cfg, inputs = read_inputs(flags, rest)
        if flags.compare:
            return compared(cfg, inputs, flags, rest)
        section = ""
        if flags.search:
            # a separate command has computed nothing yet, unless it has measured a CPU
            fresh = argv is None and inputs.on_gpu
            found = search(cfg, inputs, log=to_stderr, fresh=fresh)
            print(table(found) + "\n\nThe first of these:\n")
            cfg = found.ranking[0].choice.applied_to(cfg)
            section = front.section(found.traced, inputs.gpus, found.covered)
        plan = make_plan(cfg, inputs)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    text = report(plan, flags.stages)
    print(text)
    if flags.write:
        Path(flags.write).write_text(dump(plan.cfg), encoding="utf-8")
        print(f"\nwritten: {flags.write}")
    if flags.html:
        Path(flags.html).write_text(page(plan, text, section=section), encoding="utf-8")
        print(f"\nwritten: {flags.html}")
    return 0 if plan.fits else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends quietly
    program.run(main)
