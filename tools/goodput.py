"""Show where the time of a run went, over all its starts, and what its interruptions cost.

    python -m tools.goodput runs/llama_8b
    python -m tools.goodput --simulate --mtbf-hours=3 --stall=1 --detect=35 --restart=150
    python -m tools.goodput runs/llama_8b --simulate --mtbf-hours=3       with the times that this run measured

The first reads what each start of the run wrote (reliability/record.py). The second predicts the
goodput where failures come at random (exponential gaps, as Young and Daly assume), and the best
interval between saves.
"""

import argparse
import json
import math
import signal
from functools import partial

from configs import program
from configs.schema import InputError
from configs.words import number_of
from reliability.causes import LOST_ANOTHER
from reliability.goodput import KINDS, Account, account, read
from tools.places import run_folder

MEASURED = {  # by `Account.per_event`: what else to assume
    "stall": (1.0, "seconds that a save holds training up"),
    "detect": (35.0, "seconds from a failure to the new start"),
    "restart": (150.0, "seconds from there to the end of its first step"),
}


def table(result: Account) -> str:
    """Format seconds by kind, the interruptions, and the means per interruption as text."""
    counted = result.total - result.seconds["paused"]
    lines = [f"goodput {result.goodput:.2%}", ""]
    for kind, meaning in KINDS.items():
        seconds = result.seconds[kind]
        share = "" if kind == "paused" else f"{seconds / counted:7.2%}" if counted else ""
        lines.append(f"{seconds:14,.2f} s  {share:7}  {meaning}")
    clock = "the wall clock, from the first start to the last sign of life"
    lines += [f"{result.total:14,.2f} s           {clock}", ""]
    each = result.per_event()
    lines.append(
        f"{result.steps:,} steps count, {result.redone:,} were redone; "
        f"{number_of(result.saves, 'save')}, {each['stall']:.3f} s of stall each"
    )
    failed = [row for row in result.interruptions if row["how"] == "failed"]
    if failed:
        mtbf = (counted - result.seconds["detecting"]) / len(failed)
        lines.append(
            f"failed {number_of(len(failed), 'time')}, every {mtbf:,.0f} s of running; means: "
            f"{each['detect']:.1f} s to detect, "
            f"{each['restart']:.1f} s to restart, {each['redone_steps']:.1f} steps redone"
        )
    if result.interruptions:
        head = f"start  {'last sign of life':25}  {'step':>9}  {'redone':>6}  {'seconds lost':>12}"
        lines += ["", f"{head}  how it ended"]
    for row in result.interruptions:
        step = "-" if row["step"] is None else row["step"]
        how = row["reason"].partition("\n")[0][:160]
        if LOST_ANOTHER.search(row["reason"]):
            how = "rank 0 lost another rank, which the launcher has named"
        if row["exit_code"] is not None:
            how = f"exit code {row['exit_code']}: {how}"
        lines.append(
            f"{row['start']:5}  {row['when']:25}  {step:>9}  {row['redone']:6}  "
            f"{row['lost']:12,.2f}  {how}"
        )
    return "\n".join(lines)


def expected(
    mtbf: float, stall: float, restart: float, interval: float, write: float = 0.0
) -> float:
    """Goodput where failures come at random, in seconds all; exact, as failures during saves and
    restarts count too.

    Daly (2006), "A higher order estimate of the optimum checkpoint interval for restart dumps",
    equation 20: the wall time of a run is M e^(R/M) (e^((interval + stall)/M) - 1) per interval of
    work. restart: detection included. A save that is only published `write` seconds after its stall
    adds that to R: so much more work is lost with each failure.
    """
    work = interval + stall
    no_failure = math.exp(-(restart + write + work) / mtbf)
    failure = -math.expm1(-work / mtbf)
    return interval / mtbf * no_failure / failure


def best_interval(mtbf: float, stall: float) -> float:
    """Return the seconds of work between saves that make `expected` largest: where the derivative
    is 0, by bisection.

    Young (1974) gives sqrt(2 stall mtbf), which this approaches for a stall that is short against
    mtbf.
    """
    low = 0.0
    high = mtbf
    for _ in range(200):
        middle = (low + high) / 2
        x = (middle + stall) / mtbf
        low, high = (middle, high) if -math.expm1(-x) > middle / mtbf else (low, middle)
    return high


def shares(
    mtbf: float, stall: float, detect: float, restart: float, interval: float, write: float
) -> dict[str, float]:
    """Return the shares of the time that each kind of reliability/goodput.py::KINDS takes, on
    average, with the assumptions of `expected`, which is the productive one."""
    work = interval + stall
    failure = -math.expm1(-work / mtbf)  # before the next save begins
    back = math.exp(-(detect + restart) / mtbf)  # without another failure meanwhile
    worked = -math.expm1(-interval / mtbf) / failure
    published = interval / mtbf * math.exp(-(write + work) / mtbf) / failure
    return {
        "productive": back * published,
        "save": back * (1 - worked),
        "redone": back * (worked - published),
        "detecting": -math.expm1(-detect / mtbf),
        "starting": math.exp(-detect / mtbf) - back,
    }


def predict(options: argparse.Namespace) -> dict:
    mtbf = options.mtbf_hours * 3600
    back = options.detect + options.restart
    best = best_interval(mtbf, options.stall) if options.stall else 0.0
    interval = options.interval or best
    if not interval:
        raise InputError("--stall=0 has no best interval, the shorter the better: give --interval")
    at_best = expected(mtbf, options.stall, back, best, options.write) if best else None
    return {
        "interval": interval,
        "shares": shares(
            mtbf, options.stall, options.detect, options.restart, interval, options.write
        ),
        "expected": expected(mtbf, options.stall, back, interval, options.write),
        "best_interval": best,
        "expected_at_best": at_best,
    }


def predicted(prediction: dict, options: argparse.Namespace) -> str:
    lines = [
        f"an interruption per {options.mtbf_hours:g} h; a save every {prediction['interval']:,.1f} s "
        f"that stalls {options.stall:.3g} s; {options.detect:.3g} s to detect, "
        f"{options.restart:.3g} s to restart"
    ]
    lines += [f"{share:8.2%}  {KINDS[kind]}" for kind, share in prediction["shares"].items()]
    lines.append(f"goodput: {prediction['expected']:.2%} expected (Daly 2006)")
    if best := prediction["best_interval"]:
        at_best = f"{prediction['expected_at_best']:.2%} expected"
        lines.append(f"the best interval is {best:,.1f} s of work between saves: {at_best}")
    return "\n".join(lines)


@program.refuses
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.goodput", description="Where the time of a run went."
    )
    parser.add_argument("run", type=run_folder, nargs="?", help="the folder or the URL of a run")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--simulate", action="store_true", help="a run with these times instead of one that was"
    )
    number = partial(parser.add_argument, type=float)
    number("--mtbf-hours", default=3.0, help="mean time between failures [%(default)g]")
    for name, (default, meaning) in MEASURED.items():
        number(f"--{name}", help=f"{meaning} [the run's, or {default:g}]")
    number("--interval", default=0.0, help="seconds of work between saves; 0: the best [0]")
    number("--write", default=0.0, help="seconds from a save's stall until it is published [0]")
    options = parser.parse_args(argv)
    if not options.simulate and not options.run:
        parser.error("give the folder of a run, or --simulate")
    measured = account(read(options.run)) if options.run else None
    for name, (default, _) in MEASURED.items():
        if getattr(options, name) is None:
            setattr(options, name, measured.per_event()[name] if measured else default)
    times = (options.stall, options.detect, options.restart, options.interval, options.write)
    sound = all(0 <= value < math.inf for value in times) and 0 < options.mtbf_hours < math.inf
    if not sound:
        parser.error("times must not be negative, and --mtbf-hours must be above 0")
    result = predict(options) if options.simulate else measured
    if options.json:
        if not options.simulate:
            more = {"goodput": result.goodput, "total": result.total}
            result = vars(result) | more | result.per_event()
        print(json.dumps(result, indent=1))
    else:
        print(predicted(result, options) if options.simulate else table(result))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends quietly
    program.run(main)
