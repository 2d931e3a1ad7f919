"""Measure this device:

    python -m lab.bench device.measure (rates | step NAME) [--json out.json] [--toml device.toml]

- rates: the numbers of a row of tools/plan/devices.toml; --toml writes them for
  `tools.plan --device device.toml`.
- step NAME: one of STEPS, through lab/bench/sections.py; 8B's layers are as many as fit, by the
  plan.

On a CPU the sizes are small, so that all of it takes minutes: that is how the command is tested.
Exit code 2 and a sentence where something cannot run here.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import train
from configs.load import load_config
from configs.schema import InputError
from lab.bench import harness, sections
from models.kernels.causal_attention import causal_attention
from models.kernels.document_attention import Documents, document_attention
from parallelisms.mesh import close_mesh
from tools.plan.device import MEMORY_EFFICIENCY, Device, known_device, measure_cpu
from tools.preflight.machine import best
from training.metrics import peak_flops

GPU = torch.cuda.is_available()
KIND = "cuda" if GPU else "cpu"
# a CPU that has no fast bfloat16 rehearses in float32
NARROW = getattr(torch, harness.narrow())
BFLOAT16 = f"--training.param_dtype={harness.narrow()}"
WHOLE = (  # models that one GPU holds with their training state
    f"--training.seq_len=8192 {BFLOAT16} --activation_checkpoint.mode=selective "
    "--compile.enabled=true"
)
HYBRID = (  # layers of their published widths with fewer experts, so that one GPU holds them
    "--model.vocab_size=32768 --training.seq_len=4096 --training.local_batch_size=4 "
    f"--training.global_batch_size=4 {BFLOAT16} --activation_checkpoint.mode=selective "
    "--compile.enabled=true"
)
QWEN3_NEXT = (  # three layers of gated delta nets and one of attention
    "--model.family=qwen3_next --model.flavor=80B-A3B --model.n_layers=4 --model.n_experts=128"
)
SMALL = f"--training.seq_len=256 --training.global_batch_size=2 {BFLOAT16}"
STEPS = {  # name -> options, by kind of device; a kind that is missing cannot run it
    "8B layers": {"cuda": sections.LAYERS_8B, "cpu": f"{sections.BENCH} {BFLOAT16}"},
    "1B": {
        "cuda": (
            f"--model.flavor=1B {WHOLE} --training.local_batch_size=2 "
            "--training.global_batch_size=2"
        ),
        "cpu": f"{sections.LAYERS_1B} {BFLOAT16}",
    },
    "3B": {
        "cuda": (
            f"--model.flavor=3B {WHOLE} --training.local_batch_size=1 "
            "--training.global_batch_size=1"
        )
    },
    "Qwen3-Next": {
        "cuda": f"{QWEN3_NEXT} {HYBRID}",
        "cpu": f"--model.family=qwen3_next --model.flavor=debug {SMALL}",
    },
    "Qwen3-Next with MTP": {
        "cuda": f"{QWEN3_NEXT} --model.mtp_depth=1 {HYBRID}",
        "cpu": f"--model.family=qwen3_next --model.flavor=debug --model.mtp_depth=1 {SMALL}",
    },
    "Kimi Linear": {
        "cuda": (
            "--model.family=kimi_linear --model.flavor=48B-A3B --model.n_layers=5 "
            f"--model.n_experts=64 {HYBRID}"
        ),
        "cpu": f"--model.family=kimi_linear --model.flavor=debug {SMALL}",
    },
}
ABOUT = {  # what the sizes on a CPU stand for
    "cuda": "",
    "cpu": " On a CPU a small model replaces a large one: 8 layers of width 512 for 8B's, "
    "2 layers of 1B for 1B, the flavor debug for a hybrid.",
}
ROUNDS = {"cuda": 8, "cpu": 2}
HEAT_UP_SECONDS = 1.5


def rates(toml: str = "") -> dict:
    """toml: a file to write for the planner, if there is one."""
    device = measure_gpu() if GPU else measure_cpu()
    if toml:
        Path(toml).write_text(as_toml(device), encoding="utf-8")
    numbers = device.model_dump(exclude_defaults=True)
    rows = [
        [name, f"{value:.4g}" if isinstance(value, float) else value]
        for name, value in numbers.items()
    ]
    columns = ["field of tools/plan/devices.toml", "measured"]
    return {"title": "Rates of the device", "columns": columns, "rows": rows, "numbers": numbers}


def as_toml(device: Device) -> str:
    """Return the device as a file for `tools.plan --device`."""
    lines = ["# Measured by lab.bench device.measure; tools/plan/devices.toml explains the fields."]
    lines.append("[device]")
    for field, value in device.model_dump(exclude_defaults=True).items():
        lines.append(f"{field} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def measure_gpu() -> Device:
    """Measure this GPU as a device of the planner."""
    gpu = torch.device("cuda", 0)
    memory = torch.cuda.get_device_properties(gpu).total_memory / 2**30
    return as_device(torch.cuda.get_device_name(gpu), memory, rates_of(gpu))


class Rates(NamedTuple):
    """Rates in bfloat16, at the sizes of 8B's layers. Attention: forward and backward together,
    with heads of 128 numbers unless another width is named."""

    matmul: float  # FLOP/s
    attention: float  # FLOP/s, of whole windows
    packed: float  # FLOP/s, of documents, where the kernel is FlashAttention's
    narrow: float  # FLOP/s, of whole windows with heads of 64 numbers
    copied: float  # bytes per second that a copy inside the device reads and writes
    to_host: float  # bytes per second of a copy to host memory (pinned, if the device is a GPU)


def rates_of(device: torch.device, smaller: int = 1) -> Rates:
    """Measure the rates for 8,192 tokens. smaller: a divisor of the tokens and the copies, for a
    trial on a CPU."""
    how = {"device": device, "dtype": NARROW}
    tokens = 8192 // smaller
    x = torch.randn(tokens, 4096, **how)
    w = torch.randn(4096, 14336, **how)
    matmul = 2 * tokens * 4096 * 14336 / sustained(lambda: x @ w, device)
    attention = attention_rate(device, tokens, 128)
    packed = attention_rate(device, tokens, 128, packed=True)
    narrow = attention_rate(device, tokens, 64)
    block = torch.ones((1 << 28) // smaller, device=device)  # 1 GiB
    other = torch.empty_like(block)
    on_host = torch.empty(len(block), pin_memory=device.type == "cuda")
    copied = 2 * block.nbytes / best(lambda: other.copy_(block), device)
    to_host = block.nbytes / best(lambda: on_host.copy_(block, non_blocking=True), device)
    return Rates(matmul, attention, packed, narrow, copied, to_host)


def attention_rate(device: torch.device, tokens: int, width: int, packed: bool = False) -> float:
    """FLOP/s of one window; packed: as the one document of a packed window."""
    heads = [32, 8, 8]
    shapes = [(1, tokens, n, width) if packed else (1, n, tokens, width) for n in heads]
    q, k, v = (
        torch.randn(*shape, device=device, dtype=NARROW, requires_grad=True) for shape in shapes
    )
    if packed:
        documents = Documents.of(torch.arange(tokens)[None], device)
        attend = partial(document_attention, q, k, v, documents)
    else:
        attend = partial(causal_attention, q, k, v)
    out = attend()
    backward = partial(
        torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True
    )
    seconds = sustained(attend, device) + sustained(backward, device)
    # 2 and 5 matmuls, of which causality needs half
    return (2 + 5) * heads[0] * tokens**2 * width / seconds


def sustained(fn: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one of many calls in a row. On a GPU these are slower than a call
    alone: after about a second its power limit lowers the clock, as it does in training."""
    once = best(fn, device)
    if device.type != "cuda":
        return once
    for seconds in HEAT_UP_SECONDS, HEAT_UP_SECONDS / 3:  # the first time is not used
        calls = max(1, int(seconds / once))
        began = time.perf_counter()
        for _ in range(calls):
            fn()
        torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - began) / calls
    return seconds


def as_device(name: str, memory_gib: float, rates: Rates) -> Device:
    """Return the planner's row of a GPU with these rates. The links to other GPUs are those of the
    table's row of that name, if there is one, because one GPU cannot measure them."""
    row = known_device(name)
    known = peak_flops(name)
    peak = known or rates.matmul
    links = (
        {field: getattr(row, field) for field in ("link_gb_per_s", "fabric_gb_per_s")}
        if row
        else {}
    )
    return Device(
        **{"link_gb_per_s": 32.0, "fabric_gb_per_s": 12.5} | links,
        name=name,
        memory_gib=memory_gib,
        peak_tflops=0.0 if known else rates.matmul / 1e12,
        memory_gb_per_s=rates.copied / 1e9 / MEMORY_EFFICIENCY,
        host_gb_per_s=rates.to_host / 1e9,
        matmul_efficiency=min(1.0, rates.matmul / peak),
        attention_efficiency=min(1.0, rates.packed / peak),
        fast_attention_efficiency=min(1.0, rates.attention / peak),
        narrow_attention=min(1.0, rates.narrow / rates.attention),
        source="measured by lab.bench device.measure; links "
        f"{'of the table' if row else 'assumed: PCIe gen4, 100 Gb/s'}",
    )


def one_step(name: str) -> dict:
    """name: of STEPS. Raises InputError if this kind of device has no such step."""
    if KIND not in STEPS.get(name, {}):
        names = ", ".join(name for name, kinds in STEPS.items() if KIND in kinds)
        raise InputError(f"{name!r} is no step of a {KIND}; there are {names}")
    options = STEPS[name][KIND].split()
    if GPU and name == "8B layers":
        options.append(f"--model.n_layers={layers_that_fit(options)}")
    seen = sections.one(options, ROUNDS[KIND])
    close_mesh()
    planned = ask_plan(options)["live"]
    layers = train.architecture(load_config(options))[1].n_layers
    row = [*sections.row(name if GPU else f"{name} (small)", seen), str(layers), f"{planned:.2f}"]
    columns = [*sections.COLUMNS, "layers", "plan GiB"]
    notes = (
        f"{ROUNDS[KIND]} rounds. The plan is for live GiB, without Python and PyTorch.{ABOUT[KIND]}"
    )
    return {
        "title": "Training steps",
        "columns": columns,
        "rows": [row],
        "notes": notes,
        "numbers": seen,
    }


def layers_that_fit(options: list[str]) -> int:
    """Return how many layers of these options one GPU's memory holds, by the
    plan, which adds the allocator's waste. Raises InputError if not even one fits."""
    room = torch.cuda.mem_get_info()[1] / 2**30

    def needed(layers: int) -> float:
        return ask_plan([*options, f"--model.n_layers={layers}"])["needed"]

    return most_layers(room, needed)


def most_layers(room: float, needed: Callable[[int], float]) -> int:
    """Extrapolate from the memory of 2 and 4 layers, since it grows by the same amount with each
    layer. Raises InputError."""
    at_two = needed(2)
    at_four = needed(4)
    layers = int(2 + (room - at_two) / ((at_four - at_two) / 2))
    if layers < 1:
        raise InputError(
            f"not even one layer fits: two need {at_two:.1f} GiB, and there are {room:.1f}"
        )
    return layers


def ask_plan(options: list[str]) -> dict:
    """Return GiB of tensors that the plan expects to live at one time, and the same with the
    allocator's waste and CUDA's context; "live" and "needed"."""
    rates = ("memory_gb_per_s", "link_gb_per_s", "fabric_gb_per_s", "peak_tflops")
    device = Device(memory_gib=1, **dict.fromkeys(rates, 1.0))  # times do not count
    numbers = f"--device={device.model_dump_json()}"
    return harness.child("device.planned", "planned", numbers, *options)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--toml", type=harness.in_a_folder, help="also write the rates, for tools.plan"
    )
    parser.add_argument("subject", choices=("rates", "step"))
    parser.add_argument("name", nargs="?", default="", help="of a step, with _ for spaces")
    args = parser.parse_args()
    if args.subject == "rates":
        report = rates(args.toml)
    else:
        report = one_step(args.name.replace("_", " "))
    harness.report(**report, json_path=args.json)
