"""Train a configuration on simulated GPUs, to find its mistakes before you pay for a node.

    python -m lab.simulate [--gpus N] CONFIG [--table.key=value ...]
    python -m lab.simulate --gpus 4 configs/llama_debug.toml --parallelism.tensor_parallel=2

Runs train.py on N simulated GPUs of one host: PyTorch's own code for CUDA and for NCCL above
stand-ins for both, with the CPU's kernels (docs/simulate.md). It trains 3 steps unless
training.steps is given, in a separate folder, and compares the losses with those of one process on
the CPU. Exit code 0: nothing was found; 1: something was; 2: wrong configuration, or no simulated
GPU is possible here.
"""

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from configs import program
from configs.load import ConfigError, as_given, load_config
from configs.ranks import default, one_process, written
from configs.schema import Config, InputError
from configs.words import number_of
from lab.simulate import build
from lab.simulate.ranks import Outcome, Simulator
from tools import overrides
from tools.logged import logged
from tools.parity.meshes import refuse_larger, value_of

MOST_PARAMETERS = 200_000_000  # one processor core computes for each GPU
# of the first step's loss with the CPU's, relative
AGREEMENT = {"float32": 1e-5, "bfloat16": 1e-2}
SHORT = {  # unless the person says otherwise
    "training.steps": "3",
    "lr_schedule.warmup_steps": "1",
    "debug.sample_tokens": "8",
    "metrics.interval": "1",
}
ON_THE_CPU = one_process() | {  # the same run without a GPU
    "training.attention": "auto",
    "training.delta_rule": "auto",
    "debug.sample_tokens": "0",
    "run.device": "cpu",
}
# What no simulation can do: option -> (the value that it has instead, why). Of the first ones it is
# taken as that where a file of a configuration says otherwise. Said on the command line, it is refused.
NOT_SIMULATED = {
    "compile.enabled": ("false", "a simulated GPU cannot run what inductor makes for CUDA"),
    "compile.cuda_graphs": ("false", "a simulated GPU records no kernels"),
    "parallelism.expert_exchange": ("flat", "the simulated GPUs are those of one host"),
}
REFUSED = NOT_SIMULATED | {
    "training.float8": ("none", "a simulated GPU has no float8 matmuls"),
    "parallelism.async_tensor_parallel": ("false", "a simulated GPU has no symmetric memory"),
}
UNSEEN = (
    "Not shown by a simulation: speed, the rounding of a GPU's kernels, NCCL itself, code "
    "that inductor makes for a GPU."
)


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = overrides.parser("python -m lab.simulate", __doc__)
    parser.add_argument("--gpus", type=int, default=1, help="of the one host (1)")
    parser.add_argument(
        "--seconds", type=float, default=600, help="after which the ranks are ended (600)"
    )
    parser.add_argument(
        "--sanitize",
        action="store_true",
        help="look for races between streams with PyTorch's CUDA sanitizer",
    )
    flags, rest = parser.parse_known_args(argv)
    if not 1 <= flags.gpus <= 16:
        raise InputError(f"--gpus {flags.gpus}: between 1 and 16 can be simulated on one machine")
    return flags, rest


def refuse(cfg: Config) -> None:
    """Raise InputError for options that no simulated GPU supports."""
    for option, (value, why) in REFUSED.items():
        if written(value_of(cfg, option)) != value:
            raise InputError(f"{option}: {why}; leave it out")
    if cfg.training.attention == "flash3":
        raise InputError(
            'training.attention = "flash3" is a package that calls CUDA itself; take "flash" or '
            '"auto"'
        )
    refuse_larger(cfg, MOST_PARAMETERS, "this machine's processor would compute for every GPU")


def series(folder: Path, key: str) -> dict[int, float]:
    if not (folder / "metrics.jsonl").exists():
        return {}
    return {step: values[key] for step, values in logged(folder) if key in values}


def losses(
    here: dict[int, float], there: dict[int, float], limit: float
) -> tuple[list[str], list[str]]:
    """Return the table of losses, and its mistakes."""
    lines = ["step   simulated GPUs   one CPU process   difference"]
    wrong = []
    for number, step in enumerate(sorted(here)):
        loss = here[step]
        if step not in there:
            lines.append(f"{step:4}   {loss:14.7f}   {'none':>15}")
            continue
        wanted = there[step]
        apart = abs(loss / wanted - 1)
        lines.append(f"{step:4}   {loss:14.7f}   {wanted:15.7f}   {apart:10.1e}")
        if number == 0 and not apart <= limit:
            wrong.append(
                f"the first loss differs from the CPU's by {apart:.1e}; rounding explains "
                f"{limit:.0e}"
            )
    if not here:
        wrong.append("no step was trained")
    return lines, wrong


def necessary(cfg: Config) -> dict[str, str]:
    """Return the files in which a step of this configuration needs a host-device sync, and why."""
    offloads = cfg.parallelism.cpu_offload
    reasons = {}
    if cfg.parallelism.expert_parallel > 1:
        reasons["parallelisms/ep.py"] = "the host has to know how many rows it sends"
    if offloads or cfg.optimizer.kind == "sgd":
        reasons["training/optim.py"] = "the host decides whether the optimizer steps"
    if offloads:
        reasons["train.py"] = "the norm comes from weights on the CPU"
    if cfg.training.param_dtype == "float32":
        reasons["models/kernels/grouped_product.py"] = "GPUs have no grouped GEMM in float32"
    return reasons


def waits(outcome: Outcome, steps: int, expected: dict[str, str]) -> tuple[list[str], list[str]]:
    """Host-device syncs by line of the program, of the rank that has most of them; what is wrong:
    those in a step. expected: as `necessary` makes it."""
    in_step = Counter()
    outside = Counter()
    late = Counter()
    for record in outcome.records:
        for inside, why, where, times in record.get("waits", []):
            counter = in_step if inside and why != "an event" else outside
            counter[f"{where}: {why}"] = max(counter[f"{where}: {why}"], times)
        for inside, why, where, times in record.get("late", []):
            if inside:
                late[f"{where}: {why}"] = max(late[f"{where}: {why}"], times)
    lines = [f"host-device syncs in a training step: {sum(in_step.values()) / max(steps, 1):g}"]
    wrong = []
    for line, times in (in_step + late).most_common():
        reason = expected.get(line.partition(":")[0])
        since = f", since {reason}" if reason else ""
        lines.append(f"    {line} ({times} in {number_of(steps, 'step')}){since}")
        if not reason:
            wrong.append(f"a training step has a host-device sync at {line}")
    lines.append("outside of steps, and for an event that is read late:")
    lines += [f"    {line} ({times})" for line, times in outside.most_common(8)]
    return lines, wrong


def collectives(outcome: Outcome) -> list[str]:
    """Return the collectives of rank 0 in the whole run, by group and kind."""
    import torch  # here, because `--help` is answered without it

    groups = (outcome.results[0] or {}).get("groups", {})
    times = Counter()
    sizes = Counter()
    for collective in outcome.records[0].get("collectives", []):
        ranks = collective["ranks"]
        whole = len(ranks.split()) == len(outcome.codes)
        group = groups.get(ranks, "all" if whole else "other")
        key = f"{group} (ranks {ranks}) {collective['kind']}"
        times[key] += collective["times"]
        width = getattr(torch, collective["type"], torch.int8).itemsize  # float8 has other names
        sizes[key] += collective["times"] * collective["count"] * width
    lines = ["collectives of rank 0 in the whole run:"]
    lines += [
        f"    {key}: {number_of(n, 'time')}, {sizes[key] / 2**20:.2f} MiB"
        for key, n in sorted(times.items())
    ]
    return lines if times else ["collectives of rank 0: none"]


def problems(outcome: Outcome) -> list[str]:
    wrong = list(outcome.findings)
    for rank, code in enumerate(outcome.codes):
        if code != 0 and outcome.errors[rank]:
            wrong.append(f"rank {rank} raised: {outcome.errors[rank].strip().splitlines()[-1]}")
        elif code != 0:
            how = "had to be ended" if code is None else f"ended with {code}"
            wrong.append(f"rank {rank} {how}")
        elif returned := outcome.results[rank]["code"]:
            log = outcome.logs[rank]
            wrong.append(f"rank {rank}: train.py returned {returned}; its log is in {log}")
    return wrong


def command_lines(rest: list[str], gpus: int, place: Path) -> tuple[list[str], list[str]]:
    """Return the command lines of the run on the simulated GPUs and of the same run as one process
    on the CPU, and print the changed options. Raises InputError for a configuration that one of the
    two refuses."""
    _, given = as_given(rest)
    short = {option: value for option, value in SHORT.items() if option not in given}
    argv = overrides.with_options(
        rest, short | {"run.folder": str(place / "run"), "checkpoint.store": ""}
    )
    wanted = load_config(argv, None, None)
    for option, (value, why) in NOT_SIMULATED.items():
        if option not in given and value_of(wanted, option) != default(option):
            print(f"{option} is taken as {value}: {why}")
            argv = overrides.with_options(argv, {option: value})
    plain = overrides.with_options(argv, ON_THE_CPU | {"run.folder": str(place / "cpu")})
    load_config(argv, gpus, gpus)
    try:
        load_config(plain, 1, 1)
    except ConfigError as error:
        raise InputError(f"as one process on the CPU, to compare with: {error}") from None
    return argv, plain


def simulate(flags: argparse.Namespace, rest: list[str], place: Path) -> int:
    """Train, print the report, and return the exit code."""
    argv, plain = command_lines(rest, flags.gpus, place)
    cfg = load_config(argv, flags.gpus, flags.gpus)
    refuse(cfg)
    from lab.simulate.job import train_here

    with Simulator() as simulator:
        print(
            f"{number_of(flags.gpus, 'simulated GPU')}: {cfg.model.family} {cfg.model.flavor}, "
            f"{number_of(cfg.training.steps, 'step')} ...",
            flush=True,
        )
        outcome = simulator.run(
            flags.gpus,
            train_here,
            argv,
            folder=place / "gpus",
            seconds=flags.seconds,
            sanitize=flags.sanitize,
        )
        on_cpu = simulator.run(
            0, train_here, plain, folder=place / "processor", seconds=flags.seconds
        )
    dtype = "float32" if cfg.training.param_dtype == "float32" else "bfloat16"
    wrong = problems(outcome)
    if not on_cpu.whole or on_cpu.results[0]["code"]:
        wrong.append(
            "one process on the CPU fails too: "
            f"{on_cpu.explain()[-1500:] or on_cpu.logs[0].read_text()[-1500:]}"
        )
    here = series(place / "run", "loss")
    table, different = losses(here, series(place / "cpu", "loss"), AGREEMENT[dtype])
    syncs, waiting = waits(outcome, len(here), necessary(cfg))
    wrong += different + waiting
    peak = max((result["peak"] for result in outcome.results if result), default=0)
    races = "none was found" if flags.sanitize else "not looked for (--sanitize)"
    print(*table, *syncs, *collectives(outcome), sep="\n")
    print(f"most memory that a GPU held: {peak / 2**20:.1f} MiB")
    print(f"races between streams: {races}")
    print(UNSEEN)
    print("\nfound:" if wrong else "\nnothing was found", *wrong, sep="\n  - ")
    return 1 if wrong else 0


def main(argv: list[str] | None = None) -> int:
    place = None
    try:
        flags, rest = arguments(sys.argv[1:] if argv is None else argv)
        if reason := build.missing():
            raise InputError(reason)
        place = Path(tempfile.mkdtemp(prefix="plumbline-simulate-"))
        code = simulate(flags, rest, place)
        if code == 0:
            shutil.rmtree(place, ignore_errors=True)
        else:
            print(f"what the ranks printed: {place}/gpus/log-*")
        return code
    except (InputError, build.CannotSimulate) as error:
        print(error, file=sys.stderr)
        if place:
            shutil.rmtree(place, ignore_errors=True)
        return 2


if __name__ == "__main__":
    program.run(main)
