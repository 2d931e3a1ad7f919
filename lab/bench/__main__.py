"""Run a benchmark: python -m lab.bench NAME [...]

Each prints one table, with the machine that it ran on; NAME --help says what it measures. Give it an
idle machine. lab/bench/results has the tables of earlier runs, also of benchmarks that only git has.
"""

import importlib
import sys

from configs import program

BENCHES = {
    "attention": "kernels of causal attention, by the shape of a model's heads",
    "delta_net": "the gated delta rule, by what computes it on this device",
    "device.checks": "numbers on this device against a float64 model; also on ranks that share a GPU",
    "device.in_300s": "what is learned in 300 s, in bits per byte; next to autoresearch's script",
    "device.measure": "rates of this device, steps of 8B's layers",
    "device.planned": "planned memory and time against those of real steps; long sequences",
    "plan": "plans against published runs",
    "tasks": "task scores of a model against lm-evaluation-harness's",
}
FILES = {"plan": "published"}  # where the module is not called as the benchmark


@program.refuses
def main(argv: list[str] | None = None) -> int:
    """Run the benchmark that the first word names. Returns the exit code: 2 after wrong input."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, *rest = words
    if name not in BENCHES:
        print(f"{name}: no such benchmark; there are {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    sys.argv = [f"python -m lab.bench {name}", *rest]
    module = importlib.import_module(f"lab.bench.{FILES.get(name, name)}")
    return module.main() or 0


def listing() -> str:
    width = max(map(len, BENCHES))
    rows = [f"  {name:{width}}  {about}" for name, about in BENCHES.items()]
    return "\n".join([__doc__.strip(), "", *rows])


if __name__ == "__main__":
    program.run(main)
