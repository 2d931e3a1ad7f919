"""Compare a layer of gated delta net with one of attention by the length of a sequence: processor seconds
and memory of a forward and a backward, on one thread of a CPU.

    python -m lab.bench delta_net [--tokens 2048 4096 ...] [--rounds 3] [--kernels] [--json out.json]

Both have a quarter of the width of Qwen3-Next-80B-A3B's. The rows of cp, of the whole width, are the work
of one rank of so many: its tokens in two parts, each with the map that ranks exchange, without the
exchange. That is to be the work of the sequence, divided by the ranks.
"""

import json
import resource
import statistics
import time
from functools import partial
from types import SimpleNamespace

from configs.cpu import keep_memory

import torch
from torch import Tensor, nn

from lab.bench import harness
from lab.bench.device.checks import delta_inputs
from models import layers
from models.delta_net import GatedDeltaCore, GatedDeltaNet
from parallelisms import delta_kernel
from training import init

QUARTER = SimpleNamespace(
    dim=512,
    n_layers=1,
    norm_eps=1e-6,
    n_heads=4,
    n_kv_heads=1,
    head_dim=256,
    delta_key_heads=4,
    delta_value_heads=8,
    delta_key_dim=128,
    delta_value_dim=128,
    conv_width=4,
)
WIDE = SimpleNamespace(
    **vars(QUARTER) | {"dim": 2048, "delta_key_heads": 16, "delta_value_heads": 32},
)
LAYERS = {  # -> sizes, ranks
    "attention": (QUARTER, 1),
    "delta net": (QUARTER, 1),
    "whole width": (WIDE, 1),
    "whole width, cp 2": (WIDE, 2),
    "whole width, cp 4": (WIDE, 4),
}
# beyond it takes minutes
LONGEST = {"attention": 65536} | dict.fromkeys([name for name in LAYERS if "whole" in name], 4096)
PARTS = 2  # of a rank, as `parallelisms/mesh.py::Mesh.token_ranges` cuts with the method "gather"


class OfOneRank(nn.Module):
    """Computes a state core as `parallelisms/cp_state.py::SharedState` does, without the exchange."""

    def __init__(self, core: nn.Module):
        super().__init__()
        self.core = core

    def forward(self, *inputs: Tensor, documents: None = None) -> Tensor:
        begun = [self.core.begin(*part) for part in zip(*(x.chunk(PARTS, 1) for x in inputs))]
        state = torch.zeros_like(begun[0][1])
        outputs = []
        for move, added, read in begun:
            outputs.append(read(state))
            state = move @ state + added
        return torch.cat(outputs, 1)


def layer(name: str) -> nn.Module:
    args, ranks = LAYERS[name]
    if name == "attention":
        made = layers.Attention(args)
    else:
        made = GatedDeltaNet(args)
        if ranks > 1:
            made.core = OfOneRank(made.core)
    rows = [("*norm.weight", "ones", 0.0), ("*A_log", "decay_rates", 0.0)]
    rows += [("*dt_bias", "time_steps", 0.0), ("*", "normal", 0.02)]
    init.initialise(made, rows, seed=0)
    return made.to(getattr(torch, harness.narrow()))


def measure(name: str, tokens: int, rounds: int) -> dict[str, float]:
    """Return processor seconds of a forward and backward, and by how many MiB the process grew."""
    torch.set_num_threads(1)
    keep_memory()
    made = layer(name)
    args, ranks = LAYERS[name]
    here = tokens // ranks
    x = torch.randn(1, here, args.dim, dtype=made.wo.weight.dtype, requires_grad=True)
    cos, sin = torch.ones(2, here, args.head_dim)
    before = peak()
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        made(x, cos, sin).sum().backward()
        seconds.append(time.process_time() - began)
    return {"seconds": statistics.median(seconds), "MiB": peak() - before}


def kernels(rounds: int, tokens: int = 0) -> tuple[list[list[str]], str]:
    """Time forward and backward of the whole width's recurrence, on the device at hand, by all that
    can compute it there: rows, and notes. tokens: of a sequence; 0: 8,192 on a GPU."""
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


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**n for n in range(11, 18)])
    parser.add_argument("--one", choices=LAYERS, help="measure this layer alone, in this process")
    parser.add_argument(
        "--kernels", action="store_true", help="time what can compute the recurrence on this device"
    )
    args = parser.parse_args()
    if args.kernels:
        rows, notes = kernels(args.rounds)
        columns = ["recurrence", "computed by", "forward and backward", "to the reference"]
        harness.report("The gated delta rule by what computes it", columns, rows, notes, args.json)
        return
    if args.one:
        print(json.dumps(measure(args.one, args.tokens[0], args.rounds)))
        return
    rows = []
    for tokens in args.tokens:
        whole = 0.0
        for name, (_, ranks) in LAYERS.items():
            if tokens > LONGEST.get(name, tokens):
                continue
            words = [f"--one={name}", f"--tokens={tokens}", f"--rounds={args.rounds}"]
            seen = harness.child("delta_net", *words)
            seconds = seen["seconds"]
            if ranks == 1:
                whole = seconds
            of_token = seconds * ranks / tokens * 1e6
            share = f"{seconds * ranks / whole:.2f}" if ranks > 1 else ""
            row = [f"{tokens:,}", name, f"{seconds:.2f} s", f"{of_token:.0f} us"]
            rows.append([*row, share, f"{seen['MiB']:,.0f} MiB"])
            print(" | ".join(rows[-1]), flush=True)
    columns = ["tokens", "layer", "processor time", "of a token", "x ranks, to whole", "memory"]
    notes = f"{harness.narrow()}, one thread, {args.rounds} rounds, forward and backward."
    harness.report("A gated delta net by the length of a sequence", columns, rows, notes, args.json)
