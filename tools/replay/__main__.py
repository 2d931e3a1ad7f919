"""Recompute steps of a run somewhere else, and say where they differ.

    python -m tools.replay RUN --steps 1041:1044
    python -m tools.replay RUN --steps 1041:1044 --mesh fsdp2xtp2
    python -m tools.replay RUN --steps 1041:1044 --against OTHER

Begins at the newest checkpoint before these steps, on the CPU, in one process, and compares loss
and norm with RUN's metrics.jsonl, gradients with its gradients.jsonl (metrics.gradient_interval),
and weights and moments with each checkpoint that RUN has saved after one of these steps. With
--mesh (named as in tools.parity) the steps are recomputed on a mesh and in one process, and with
--against by OTHER too, which is another run's folder, or a checkpoint: then the state before the
step, the batch, the output of every module, and all gradients are compared. RUN is only read.
Prints a table: step, what differs, the first module or parameter where it does, on which rank, and
by how much relative to the value. Exit code 0: equal; 1: it differs; 2: a mistake in the call.
docs/reliability.md says more.
"""

import argparse
import sys
from collections.abc import Callable

from configs import program
from configs.schema import InputError
from tools import overrides
from tools.differences import parse_tolerance
from tools.places import check_run, place

DTYPES = ("bfloat16", "float32", "float64")


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = overrides.parser(
        "python -m tools.replay",
        __doc__,
        "Further --table.key=value change the options of both sides: --data.cache=...",
    )
    parser.add_argument("run", type=place, help="a run or a checkpoint: its folder or its URL")
    parser.add_argument("--steps", required=True, help="FIRST:LAST, or one step; the first is 1")
    parser.add_argument("--mesh", help="as fsdp2xtp2 (one process)")
    parser.add_argument("--against", type=place, metavar="OTHER", help="another run, or checkpoint")
    parser.add_argument("--dtype", choices=DTYPES, help="compute in it (the run's)")
    parser.add_argument(
        "--tolerance", type=parse_tolerance, help="relative; 0: every bit (by the type)"
    )
    parser.add_argument("--seconds", type=float, default=600, help="for each side (600)")
    flags, rest = parser.parse_known_args(argv)
    flags.steps = steps_of(flags.steps)
    return flags, rest


def steps_of(text: str) -> range:
    first, _, last = text.partition(":")
    if not first.isdigit() or not (last or first).isdigit():
        raise InputError(f"--steps {text}: give FIRST:LAST, as 1041:1044, or one step")
    steps = range(int(first), int(last or first) + 1)
    if not steps or steps.start < 1:
        raise InputError(f"--steps {text}: the first step is 1, and LAST is not before FIRST")
    return steps


def replay(argv: list[str], **compute: Callable) -> int:
    """Print the table. compute: as of command.py::replay. Raises InputError."""
    flags, rest = arguments(argv)
    check_run(flags.run)
    if flags.against is not None:
        check_run(flags.against)
    from tools.parity.ranks import Failed  # here, because it imports torch
    from tools.replay import command

    try:
        return command.replay(flags, rest, **compute)
    except Failed as error:
        raise InputError(str(error)) from None


@program.refuses
def main(argv: list[str] | None = None) -> int:
    return replay(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    program.run(main)
