"""Is a model right, and does it compute on many ranks what it computes in one process?

    python -m tools.parity CONFIG [--meshes fsdp2 tp2 pp2xfsdp2 ...] [--table.key=value ...]
    python -m tools.parity CONFIG --properties       the first question alone, in seconds

First it proves properties of the model on a tiny copy (tools/parity/properties.py): that no token
sees a later one, no document another, that a cache changes nothing, that gradients are slopes, and
that what the family declares is what it computes. A line each says which module breaks one first.

Then it trains a few steps on the CPU, on one process and on each mesh, from the same weights and the same
random tokens, and compares the output of every module, loss, norm, all gradients, and the weights
after each step. In float64 two right meshes agree to 1e-12, so nothing hides in rounding. Prints a
table, and for a mesh that differs the first place where it does. Exit code 0: all properties hold
and all meshes are equal; 1: one is not; 2: a mistake in the call. docs/forking.md says more.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs import check, program
from configs.load import load_config
from configs.schema import MUONS, Config, InputError
from configs.words import number_of
from tools import differences, overrides
from tools.parity import meshes
from training.lines import json_number

if TYPE_CHECKING:
    from tools.parity.compare import Parity
    from tools.parity.trajectory import Notes

MOST_PARAMETERS = 100_000_000  # all outputs and gradients are kept, and compared
SEQ_LEN = 64  # unless the person says otherwise
# Relative errors of right meshes. float64: 1e-15 to 1e-13 were seen (tests/test_parity_tool.py).
# float32: training amplifies rounding, by how much depends on the model, so later steps are judged
# by what no rounding explains.
LIMITS = {"float64": differences.LIMITS["float64"], "float32": differences.Limits(1e-5, 1e-2)}
ERRORS = ("loss", "norm", "outputs", "gradients", "weights")  # numbers of a Parity
CLIPPED = 0.01  # less than a norm of a gradient at the start
QUIET = {
    # AdamW divides by the size of a gradient and this: where one is near 0, by rounding alone
    "optimizer.eps": "1e-5",
    "data.tokenizer": "bytes",  # no text is read
    "run.device": "cpu",
    "compile.enabled": "false",
    "compile.cuda_graphs": "false",
    "training.float8": "none",
    "training.attention": "auto",
    "training.delta_rule": "auto",
    "lr_schedule.warmup_steps": "0",
    "validation.interval": "0",
}


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = overrides.parser("python -m tools.parity", __doc__)
    parser.add_argument("--meshes", nargs="+", default=[], metavar="MESH", help="as fsdp2xtp2")
    parser.add_argument("--properties", action="store_true", help="no meshes, properties alone")
    parser.add_argument("--ranks", type=int, default=4, help="the most, without --meshes (4)")
    parser.add_argument("--dtype", choices=sorted(LIMITS), default="float64")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (3)")
    parser.add_argument("--seconds", type=float, default=600, help="for one mesh (600)")
    parser.add_argument("--json", metavar="FILE", help="write every verdict there, too")
    flags, rest = parser.parse_known_args(argv)
    # a configuration given after the names of meshes
    configs = [name for name in flags.meshes if name.endswith(".toml")]
    flags.meshes = [name for name in flags.meshes if name not in configs]
    if flags.steps < 1 or flags.ranks < 2:
        raise InputError("--steps must be at least 1, and --ranks at least 2")
    if flags.json and not Path(flags.json).parent.is_dir():
        raise InputError(f"--json {flags.json}: there is no folder {Path(flags.json).parent}")
    if flags.properties and flags.meshes:
        raise InputError("--properties tries no mesh: leave out --meshes, or --properties")
    return flags, [*configs, *rest]


def refuse(cfg: Config, smaller: str = meshes.SMALLER) -> None:
    """Raise InputError for a model that is too large for this machine. smaller: how to get one."""
    why = "several copies of it are compared here"
    meshes.refuse_larger(cfg, MOST_PARAMETERS, why, smaller)


def row(name: str, result: Parity) -> str:
    verdict = "equal" if result.first is None else "DIFFERENT"
    errors = "".join(f"{getattr(result, kind):11.1e}" for kind in ERRORS)
    return f"{name:16}{errors}   {verdict}"


def properties_of(cfg: Config, verdicts: dict[str, list]) -> int:
    """Print a line for each property of the model, and return the exit code."""
    from models import MODELS, lora  # here, because it imports torch
    from tools.parity import properties

    family = lora.adapted(MODELS[cfg.model.family], cfg.lora)
    args = family.Args(**check.architecture(cfg.model))
    table = list(properties.TABLE)
    if cfg.model.width_base:
        table.append(properties.COORDINATES)
    code = 0
    for verdict in properties.report(family, args, cfg.lora, table):
        verdicts["properties"].append(
            {
                "property": verdict.of.name,
                "holds": not (verdict.failure or verdict.left_out),
                "failure": verdict.failure,
                "not tried": verdict.left_out,
            }
        )
        code |= bool(verdict.failure)
    return int(code)


def resolved(flags: argparse.Namespace, rest: list[str]) -> tuple[list[str], Config]:
    """Return the options of a comparison: those of the configuration, without what hides
    differences; and the configuration itself."""
    rest = overrides.with_options(rest, QUIET | {"training.param_dtype": flags.dtype})
    # checking the configuration's own mesh needs as many ranks as it has
    given = load_config(rest, None, None)
    if given.optimizer.kind in MUONS:  # in bfloat16 its iteration would enlarge rounding
        rest = overrides.with_options(rest, {"optimizer.ns_dtype": flags.dtype})
    if given.training.max_norm > 0:  # every step is clipped
        rest = overrides.with_options(rest, {"training.max_norm": str(CLIPPED)})
    return rest, given


def plain_run(flags: argparse.Namespace, rest: list[str]) -> Notes:
    """Train on one process. Raises InputError if that fails, or gives no numbers."""
    from tools.parity.ranks import Failed, train_on

    try:
        options = overrides.with_options(rest, meshes.PLAIN)
        plain = train_on(1, options, flags.steps, flags.seconds)[0]
    except Failed as error:
        raise InputError(f"one process cannot train this configuration: {error}") from None
    if not all(map(math.isfinite, [*plain.loss, *plain.norm])):
        raise InputError(f"one process computes the losses {plain.loss}: nothing can be compared")
    return plain


def compare_meshes(
    flags: argparse.Namespace, rest: list[str], given: Config, verdicts: dict[str, list]
) -> int:
    """Train on one process and on each mesh, print a row for each, and return the exit code."""
    tried, refused = meshes.those_that_fit(rest, given, flags.meshes, flags.ranks)
    refuse(given)
    code = properties_of(given, verdicts)
    from tools.parity.compare import compare
    from tools.parity.ranks import Failed, train_on

    for name, reason in refused.items():
        print(f"{name} is left out: {reason}")
    rest = overrides.with_options(rest, meshes.small(rest, tried, SEQ_LEN))
    shown = load_config(overrides.with_options(rest, meshes.PLAIN), 1, 1)
    print(
        f"{shown.model.family} {shown.model.flavor}, {number_of(flags.steps, 'step')} of "
        f"{number_of(shown.training.global_batch_size, 'sequence')} of {shown.training.seq_len} tokens, "
        f"{flags.dtype}; the largest relative differences from one process:",
        flush=True,
    )
    plain = plain_run(flags, rest)
    print(f"{'mesh':16}" + "".join(f"{kind:>11}" for kind in ERRORS), flush=True)
    limits = LIMITS[flags.dtype]
    different = []
    for mesh in tried:
        options = meshes.on_mesh(rest, mesh, given)
        try:
            seen = train_on(mesh.ranks, options, flags.steps, flags.seconds)
        except InputError as error:
            print(f"{mesh.name} is left out: {error}", flush=True)
            refused[mesh.name] = str(error)
            continue
        except Failed as error:
            print(f"{mesh.name:16} failed: {error}", flush=True)
            different.append(f"{mesh.name}: {error}")
            verdicts["meshes"].append({"mesh": mesh.name, "equal": False, "first": str(error)})
            continue
        result = compare(seen, plain, limits.values, limits.state)
        print(row(mesh.name, result), flush=True)
        verdicts["meshes"].append(entry(mesh.name, result))
        if result.first is not None:
            different.append(f"{mesh.name}: {result.first}")
    verdicts["left out"] = [{"mesh": name, "reason": why} for name, why in refused.items()]
    if refused.keys() >= {mesh.name for mesh in tried}:
        raise InputError("every mesh was left out, so nothing was compared")
    if not different:
        print("all are equal" + (f"; not compared: {', '.join(refused)}" if refused else ""))
        return code
    print("\nwhere they differ first, and by how much relative to the value:")
    print("\n".join(f"  {line}" for line in different))
    return 1


def entry(name: str, result: Parity) -> dict[str, Any]:
    """Return a mesh's row of the file that --json names."""
    errors = {kind: json_number(getattr(result, kind)) for kind in ERRORS}
    first = None if result.first is None else str(result.first)
    return {"mesh": name, "equal": first is None, "first": first, **errors}


@program.refuses
def main(argv: list[str] | None = None) -> int:
    """Print the tables, and return the exit code."""
    flags, rest = arguments(sys.argv[1:] if argv is None else argv)
    rest, given = resolved(flags, rest)
    verdicts: dict[str, list] = {"properties": [], "meshes": [], "left out": []}
    if flags.properties:
        code = properties_of(given, verdicts)
    else:
        for line in meshes.dropped(given):
            print(line)
        code = compare_meshes(flags, rest, given, verdicts)
    if flags.json:
        write(flags.json, verdicts)
    return code


def write(file: str, verdicts: dict[str, list]) -> None:
    """Write the verdicts as JSON. Raises InputError if that is not possible."""
    try:
        Path(file).write_text(json.dumps(verdicts, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--json {file}: {error.strerror}") from None


if __name__ == "__main__":
    program.run(main)
