"""Know the loss before you pay: train a ladder of small models, and fit a law to their losses.

    python -m tools.ladder configs/llama_debug.toml --smallest 1e5 --largest 2e6 --out runs/ladder
    python -m tools.plan configs/llama_debug.toml --ladder runs/ladder   # the loss of this run

Makes the models of the ladder from one configuration (tools/ladder/rungs.py has the rules), runs
what is missing on this machine (--slurm: in an array of jobs), fits L(N, D) = E + A / N^a + B / D^b, and
writes OUT/ladder.html. A ladder that was stopped goes on where it was. Exit code 0: done; 75:
stopped, start it again; 2: wrong arguments.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from configs import dropped, program
from configs.load import load_config
from configs.schema import InputError
from data.stores.places import out_folder
from tools import overrides
from tools.ladder import rungs
from tools.ladder.rungs import Rung

RUNGS = 5
RATIO = 20.0  # tokens per weight: Hoffmann et al., arXiv:2203.15556
SHARES = (0.25, 0.5, 1.0)  # of a single --ratio: the law needs several
SMALLEST, LARGEST = 1 / 50, 1 / 2.5  # of the configuration's N


@program.refuses
def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 2 for a mistake in the call or the configuration, or that of a run."""
    flags, rest = arguments(sys.argv[1:] if argv is None else argv)
    return climb(flags, rest)


def climb(flags: argparse.Namespace, rest: list[str]) -> int:
    """Train the models that are missing, and write the page. Raises InputError."""
    made = planned(flags, rest)
    print(listing(made))
    if flags.dry_run:
        return 0
    from tools.ladder import runs

    runs.write(flags.out, rest, made)
    if flags.slurm:
        script = flags.out / "array.sh"
        script.write_text(runs.array_script(flags.out, made), encoding="utf-8")
        print(f"written: {script}; from this folder: sbatch -N 1 {script}")
        return 0
    if code := runs.run_missing(flags.out, made):
        return code
    from tools.ladder.page import write

    print(write(flags.out))
    return 0


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = overrides.parser("python -m tools.ladder", __doc__)
    parser.add_argument("--rungs", type=int, default=RUNGS, help="models of the ladder (5)")
    parser.add_argument(
        "--ratio",
        type=float,
        nargs="+",
        default=[RATIO],
        help="tokens per weight; of one number a quarter, a half and the whole are taken (20)",
    )
    parser.add_argument("--smallest", type=float, help="weights of the first (1/50 of CONFIG's)")
    parser.add_argument("--largest", type=float, help="weights of the last (1/2.5 of CONFIG's)")
    parser.add_argument(
        "--budget", type=float, help="FLOPs of all runs; the models are made smaller"
    )
    parser.add_argument(
        "--out", type=out_folder, default=Path("runs/ladder"), help="folder (runs/ladder)"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs, write nothing")
    parser.add_argument("--slurm", action="store_true", help="write a Slurm array, run nothing")
    dropped.flag(
        parser, "--ray", "--slurm writes a job array, and each run has its TOML file in --out"
    )
    flags, rest = parser.parse_known_args(argv)
    if flags.rungs < 3:
        raise InputError(f"--rungs {flags.rungs}: a law of sizes needs 3 or more")
    if min(flags.ratio) <= 0:
        raise InputError("--ratio: tokens per weight, more than 0")
    if len(flags.ratio) == 1:
        flags.ratio = [flags.ratio[0] * share for share in SHARES]
    if len(set(flags.ratio)) < len(flags.ratio):
        raise InputError("--ratio names a number twice")
    flags.ratio.sort()
    return flags, rest


def planned(flags: argparse.Namespace, rest: list[str]) -> list[Rung]:
    """Return the runs of the ladder. Raises InputError."""
    whole = rungs.parameters_of(load_config(rest))
    smallest = flags.smallest or whole * SMALLEST
    largest = flags.largest or whole * LARGEST
    if not 0 < smallest < largest <= whole:
        raise InputError(
            f"--smallest {smallest:,.0f} --largest {largest:,.0f}: give numbers of weights, the first "
            f"below the second, and this below the {whole:,} of the configuration"
        )
    sizes = rungs.spaced(smallest, largest, flags.rungs)
    if flags.budget:
        sizes = rungs.within_budget(rest, sizes, flags.ratio, flags.budget)
    return rungs.ladder(rest, sizes, flags.ratio, flags.out, ranks())


def ranks() -> int:
    """Return the ranks of ./run_train.sh. Raises InputError."""
    try:
        return int(os.environ.get("NGPU") or 1) * int(os.environ.get("NNODES") or 1)
    except ValueError:
        raise InputError("NGPU and NNODES in the environment are numbers of processes") from None


def listing(made: Sequence[Rung]) -> str:
    head = f"{'run':10}{'weights':>12}{'width':>7}{'layers':>7}{'tokens':>14}{'batch':>7}{'rate':>10}{'FLOPs':>10}"
    rows = [head]
    for rung in made:
        model, training = rung.cfg.model, rung.cfg.training
        rows.append(
            f"{rung.name:10}{rung.parameters:12,}{model.dim:7}{model.n_layers:7}{rung.tokens:14,}"
            f"{training.global_batch_size:7}{rung.cfg.optimizer.lr:10.2e}{rung.flops:10.2e}"
        )
    total = sum(rung.flops for rung in made)
    return "\n".join([*rows, f"{len(made)} runs, {total:.3g} FLOPs"])


if __name__ == "__main__":
    program.run(main)
