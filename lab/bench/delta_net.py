"""Time the gated delta rule by all that can compute it on the device at hand, forward and backward.

python -m lab.bench delta_net [--rounds 3] [--json out.json]
"""

import statistics
from functools import partial

import torch
from torch import Tensor

from lab.bench import harness
from lab.bench.device.checks import delta_inputs
from models.delta_net import GatedDeltaCore
from parallelisms import delta_kernel


def kernels(rounds: int, tokens: int = 0) -> tuple[list[list[str]], str]:
    """Time the recurrence of a layer of Qwen3-Next-80B-A3B: rows, and notes. tokens: of a sequence;
    0: 8,192 on a GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = tokens or (8192 if device.type == "cuda" else 256)
    cores = {"reference": GatedDeltaCore()}
    if delta_kernel.is_flash("auto", device):
        cores["flash-linear-attention"] = delta_kernel.FlashDeltaCore()
    rows = []
    for of in ("heads", "channels"):
        given, _ = delta_inputs(1, tokens, of, device, 16, 32, 128)

        def step(core: GatedDeltaCore, given: list[Tensor] = given) -> None:
            out, _ = core.run(*given)
            torch.autograd.grad(out.sum(), given)

        contenders = {name: partial(step, core) for name, core in cores.items()}
        seconds = harness.alternate(contenders, rounds)
        for name in cores:
            middle = statistics.median(seconds[name]) * 1e3
            times = f"{harness.ratio(seconds, name, 'reference'):.2f}"
            rows.append([f"decays of {of}", name, f"{middle:.1f} ms", times])
    return rows, f"bfloat16, {tokens:,} tokens, 32 heads of 128, {rounds} rounds."


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows, notes = kernels(args.rounds)
    columns = ["recurrence", "computed by", "forward and backward", "to the reference"]
    harness.report("The gated delta rule by what computes it", columns, rows, notes, args.json)
