"""Prove a configuration before it gets GPUs: is it complete, does it fit, and does it compute on its mesh
what one process computes?

    python -m tools.prove CONFIG --gpus 256 [--device h100] [--only types ...] [--table.key=value ...]

Four proofs, one after the other, each of what the others cannot show:

    configuration  every rule of configs/check.py, on so many GPUs
    plan           memory and time of a GPU at full size                     (python -m tools.plan)
    types          on the run's own mesh at full size: no term of a sum is used as the sum, and
                   every gradient is summed      (tools/prove/types.py; pip install spmd_types==0.3.1)
    numbers        a small model of the family: its properties, and on meshes of a few ranks, in
                   float64, the numbers of one process                     (python -m tools.parity)

Exit code 0: all hold; 1: one does not; 2: a mistake in the call or in the configuration. Without
the package spmd_types its proof is left out, and the last lines say so.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

from configs import check, program
from configs.load import load_config
from configs.schema import Config, InputError
from models import NUMBERS
from tools import overrides
from tools.plan import rows

PACKAGE = "spmd_types"
HOLDS, FAILS = 0, 1
LEFT_OUT = -1
MOST_DIMENSIONS = 3  # of two ranks each: 8 ranks


class Call(NamedTuple):
    """One call of this tool."""

    flags: argparse.Namespace
    options: list[str]  # CONFIG --table.key=value ...
    cfg: Config


def arguments(argv: list[str]) -> Call:
    parser = overrides.parser("python -m tools.prove", __doc__)
    parser.add_argument("--gpus", type=int, required=True, help="of the whole run")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="of each host (8)")
    parser.add_argument("--device", default="h100", help="as in tools.plan (h100)")
    parser.add_argument("--only", nargs="+", choices=list(PROOFS), default=list(PROOFS))
    flags, options = parser.parse_known_args(argv)
    if flags.gpus < 1 or flags.gpus_per_node < 1:
        raise InputError("--gpus and --gpus-per-node must be at least 1")
    rows.check_device(flags.device)
    flags.gpus_per_node = min(flags.gpus, flags.gpus_per_node)
    return Call(flags, options, load_config(options, flags.gpus, flags.gpus_per_node))


def configuration(call: Call) -> int:
    """Report that `load_config` found no mistake: it raises all of them at once."""
    print(f"complete, and right on {call.flags.gpus} GPUs, {call.flags.gpus_per_node} on a host")
    return HOLDS


def plan(call: Call) -> int:
    """Run `tools.plan` at full size."""
    flags = call.flags
    sizes = [f"--gpus={flags.gpus}", f"--gpus-per-node={flags.gpus_per_node}"]
    return run("tools.plan", *call.options, *sizes, f"--device={flags.device}")


def types(call: Call) -> int:
    """Follow the types of one forward pass on the run's mesh."""
    if importlib.util.find_spec(PACKAGE) is None:
        print(f"left out: the package {PACKAGE} is not installed (pip install {PACKAGE}==0.3.1)")
        return LEFT_OUT
    from tools.prove.types import first_mistake  # imports torch

    mistake = first_mistake(call.cfg, call.flags.gpus, call.flags.gpus_per_node)
    print(mistake or "every operator of a forward pass takes what it is given")
    return FAILS if mistake else HOLDS


def numbers(call: Call) -> int:
    """Run `tools.parity` on the family's small model of the same kind, on the dimensions of the run's
    mesh."""
    options = overrides.with_options(call.options, {"model.flavor": small(call)})
    meshes = few_ranks(call.cfg, call.flags.gpus)
    return run("tools.parity", *options, *(["--meshes", *meshes] if meshes else ["--properties"]))


def few_ranks(cfg: Config, gpus: int) -> list[str]:
    """Return meshes of at most 8 ranks with the dimensions of the run's, as tools.parity names them."""
    p = cfg.parallelism
    sizes = {
        "ddp": p.data_parallel_replicate,
        "fsdp": check.data_parallel_shard(cfg, gpus),
        "pp": p.pipeline_parallel,
        "cp": p.context_parallel,
        "tp": p.tensor_parallel,
    }
    used = [name for name, size in sizes.items() if size > 1]
    groups = combinations(used, min(len(used), MOST_DIMENSIONS))
    return [name_of(group, p.expert_parallel > 1) for group in groups if group]


def name_of(dimensions: tuple[str, ...], has_experts: bool) -> str:
    """Return the name of a mesh with two ranks in each of these dimensions."""
    words = [f"{name}2" for name in dimensions]
    if {"ddp", "fsdp"} <= set(dimensions):
        words = ["hsdp2x2", *words[2:]]
    if has_experts and set(dimensions) & {"fsdp", "cp", "tp"}:
        words.append("ep2")
    return "x".join(words)


def small(call: Call) -> str:
    """Return the flavor that two CPU cores can train: with experts, if the model has some."""
    model = call.cfg.model
    flavors = NUMBERS[model.family].flavors
    has_experts = bool(flavors.get(model.flavor, {}).get("n_experts"))
    for name, row in flavors.items():
        if "debug" in name and bool(row.get("n_experts")) == has_experts:
            return name
    return model.flavor


def run(module: str, *argv: str) -> int:
    """Run another tool and return its exit code; it prints for itself."""
    sys.stdout.flush()
    code = subprocess.run([sys.executable, "-m", module, *argv]).returncode
    return program.exit_code_of(code)


PROOFS: dict[str, Callable[[Call], int]] = {
    "configuration": configuration,
    "plan": plan,
    "types": types,
    "numbers": numbers,
}
WORDS = {HOLDS: "holds", FAILS: "FAILS", LEFT_OUT: "left out"}


def prove(argv: list[str]) -> int:
    """Print every proof and a table of them, and return the exit code."""
    call = arguments(argv)
    codes = {}
    table = []
    for name in call.flags.only:
        print(f"--- {name}", flush=True)
        began = time.monotonic()
        codes[name] = PROOFS[name](call)
        seconds = time.monotonic() - began
        table.append(f"{name:14} {WORDS.get(codes[name], 'not tried'):10} {seconds:6.1f} s")
    print("---", *table, sep="\n")
    bad = [code for code in codes.values() if code not in (HOLDS, LEFT_OUT)]
    return max(bad, default=HOLDS)


@program.refuses
def main(argv: list[str] | None = None) -> int:
    return prove(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    program.run(main)
