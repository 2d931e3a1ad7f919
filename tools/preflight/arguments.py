"""Check in minutes, before the queue slot is spent, that this cluster can do this run, on the
machines and ranks of the run itself:

    ./run_train.sh --preflight configs/llama_8b.toml [--table.key=value ...]      on every host, as the run is started
    torchrun ... -m tools.preflight configs/llama_8b.toml [--only=bandwidth,step] [--skip=save] [--json=out.json]

Exit code 0: all well; 1: something failed; 2: wrong config or input. docs/preflight.md lists what
is checked, with its limits. The run's folder is neither created nor changed. checks.py runs the
checks; here are their names and the arguments, without torch.
"""

import argparse
from pathlib import Path

from configs.load import load_config
from configs.schema import InputError
from tools import outbound
from tools.plan import rows

NEEDS = {  # check -> those that it is left out without
    "ranks": (),
    "config": ("ranks",),
    "devices": ("config",),
    "host": ("devices",),
    "copies": ("devices",),
    "same": ("devices",),
    "compute": ("devices",),
    "folder": ("config",),
    "data": ("config",),
    "connect": ("same", "host"),
    "clock": ("connect",),
    "build": ("connect",),
    "bandwidth": ("build",),
    "step": ("build", "data"),
    "save": ("build", "folder", "copies"),
}

# A rate below this share of the median of all ranks (or of all links of a kind) is slow. Healthy
# machines of one kind are within a few per cent of each other in arithmetic, and further apart on a
# network and on a shared file system.
SLOW = {"matmul": 0.8, "memory": 0.8, "group": 0.7, "link": 0.5, "write": 0.25}
# seconds that a check may take without --timeout; those in LONG get what the run allows its first
# step
TIMEOUT = 120
LONG = ("build", "step", "save")


def expected(text: str) -> dict[str, float]:
    """Parse --expect into GB/s by mesh dimension. Raises InputError."""
    rates = {}
    for part in filter(None, text.split(",")):
        dim, _, number = part.partition(":")
        try:
            rates[dim] = float(number)
        except ValueError:
            rates[dim] = 0
        if dim not in ("pp", "dp_replicate", "dp_shard", "tp") or not 0 < rates[dim] < float("inf"):
            raise InputError(f"--expect={part}: must be DIMENSION:GB/s, such as tp:300,dp_shard:40")
    return rates


def check_device(name: str) -> None:
    """Raise InputError for a --device that describes no machine but this one."""
    if name == "cpu":
        raise InputError(
            "--device=cpu: would be measured on this very machine; name what the machines should be"
        )
    if name:
        rows.device_row(name)


def chosen(only: str, skip: str) -> list[str]:
    """Return the names of the checks to run: `only` and their dependencies, or all; without `skip`
    and the checks that depend on those."""
    for option, names in ("--only", only), ("--skip", skip):
        for name in filter(None, names.split(",")):
            if name not in NEEDS:
                raise InputError(f"{option}={name}: no such check; there are {', '.join(NEEDS)}")
    wanted = set(filter(None, only.split(","))) or set(NEEDS)
    without = set(filter(None, skip.split(",")))
    for name in reversed(NEEDS):  # a check comes after those that it needs
        if name in wanted:
            wanted |= set(NEEDS[name])
    for name, needs in NEEDS.items():
        if without & set(needs):
            without.add(name)
    return [name for name in NEEDS if name in wanted - without]


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments and those of the run, checked. Raises InputError."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.preflight",
        allow_abbrev=False,
        description="Is this cluster fit for this run? See docs/preflight.md",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="CHECKS",
        help=f"these and what they need, of {', '.join(NEEDS)}",
    )
    parser.add_argument(
        "--skip", default="", metavar="CHECKS", help="all but these and what needs them"
    )
    parser.add_argument(
        "--expect",
        default="",
        metavar="DIM:GB/S",
        help="bus bandwidth that a mesh dimension must come "
        f"near ({SLOW['group']:g} of it): tp:300,dp_shard:40",
    )
    parser.add_argument(
        "--device",
        default="",
        metavar="NAME",
        help="what the machines should be, a row of tools/plan/devices.toml "
        "or a TOML file: matmuls, memory and what --expect leaves out must come near its rates",
    )
    parser.add_argument(
        "--json",
        default="",
        metavar="FILE",
        help="also write the rows and every rank's answers there",
    )
    parser.add_argument(
        "--timeout",
        type=int,
        metavar="SECONDS",
        help=f"of each check; default: {TIMEOUT}, and run.init_"
        f"timeout_seconds for {', '.join(LONG)}",
    )
    options, rest = parser.parse_known_args(argv)
    chosen(options.only, options.skip)
    expected(options.expect)
    check_device(options.device)
    if options.json:
        outbound.check_file("--json", Path(options.json))
    load_config(rest)
    return options, rest
