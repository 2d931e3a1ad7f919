"""Measure the subjects of `lab.bench device`, one per process:

    python -m lab.bench device.measure (rates | step NAME | compare NAME | saves) [--json out.json]

- rates: the numbers of a row of tools/plan/devices.toml, for `tools.plan`.
- step NAME: one of STEPS, through lab/bench/sections.py; 8B's layers are as many as fit, by the
  plan.
- compare NAME: our step compared with that of the bare loop (bare), or of an installed peer: one of
  COMPARISONS, through lab/bench/step.py.
- saves: how long training waits for a save, how much longer the steps during it take, and a load.

On a CPU the sizes are small, so that all of it takes minutes: that is how the command is tested.
Exit code 2 and a sentence where something cannot run here.
"""

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

import train
from checkpoint import state
from checkpoint.manager import CheckpointManager
from configs.load import load_config
from configs.schema import Checkpoint, InputError
from lab.bench import harness, sections
from lab.bench import step as others
from models.kernels.causal_attention import causal_attention
from models.kernels.document_attention import Documents, document_attention
from parallelisms.mesh import close_mesh
from tools.plan.device import MEMORY_EFFICIENCY, Device, known_device, measure_cpu
from tools.plan.plan import PlanInputs, make_plan
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
}
ABOUT = {  # what the sizes on a CPU stand for
    "cuda": "",
    "cpu": " On a CPU a small model replaces a large one: 8 layers of width 512 for 8B's and "
    "for saves, 2 layers of "
    "1B for 1B.",
}
ROUNDS = {"cuda": 8, "cpu": 2}
SAVED = {
    "cuda": (
        f"--model.flavor=1B {WHOLE} --training.local_batch_size=2 --training.global_batch_size=2"
    ),
    "cpu": (
        f"{sections.BENCH} {BFLOAT16} --training.local_batch_size=2 --training.global_batch_size=2"
    ),
}
# A smaller vocabulary, so that all fit and the loss has its share of 8B's FLOPs. The layers of these
# few fit 80 GB.
SMALL_8B = f"{sections.LAYERS_8B} --model.vocab_size=32768 --optimizer.lr=3e-6"
NONE = "--activation_checkpoint.mode=none"
OF_1B = (
    f"--model.flavor=1B {WHOLE} {NONE} --training.local_batch_size=1 "
    "--training.global_batch_size=1 --model.tied_embeddings=false --model.vocab_size=32768 "
    "--optimizer.lr=3e-6"
)
ON_A_CPU = "--training.local_batch_size=2 --training.global_batch_size=2"
TITANS = ("torchtitan", "torchtitan_autocast")
COMPARISONS = {  # name -> contenders against ours, options by kind of device
    # no recomputation, because these two do none
    "bare": (("bare",), {"cuda": f"{SMALL_8B} {NONE}", "cpu": ON_A_CPU}),
    "hf": (("hf",), {"cuda": f"{SMALL_8B} {NONE}", "cpu": ON_A_CPU}),
    "torchtitan": (
        TITANS,
        {"cuda": f"{SMALL_8B} {NONE} --model.n_layers=4", "cpu": ON_A_CPU},
    ),
    "torchtitan selective": (
        TITANS,
        {
            "cuda": f"{SMALL_8B} --model.n_layers=4",
            "cpu": f"{ON_A_CPU} --activation_checkpoint.mode=selective",
        },
    ),
    "torchtitan 1B": (("torchtitan_autocast",), {"cuda": OF_1B}),
    "torchtitan vocabulary": (
        ("torchtitan_autocast",),
        {"cuda": f"{sections.LAYERS_8B} {NONE} --model.n_layers=3 --optimizer.lr=3e-6"},
    ),
}
TITAN_ROUNDS = {"cuda": 18, "cpu": 2}  # with two to warm up, 20 losses
HEAT_UP_SECONDS = 1.5


def rates() -> dict:
    device = measure_gpu() if GPU else measure_cpu()
    numbers = device.model_dump(exclude_defaults=True)
    rows = [
        [name, f"{value:.4g}" if isinstance(value, float) else value]
        for name, value in numbers.items()
    ]
    columns = ["field of tools/plan/devices.toml", "measured"]
    return {"title": "Rates of the device", "columns": columns, "rows": rows, "numbers": numbers}


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
    """Measure the rates for 8,192 tokens. smaller: divides the tokens and the copies, so that a CPU
    can rehearse it."""
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
        source="measured by lab.bench device; links "
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
    planned = planned_gib(options)
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


def layers_that_fit(options: list[str], share: float = 1.0) -> int:
    """Return how many layers of these options one GPU's memory (or a share of it) holds, by the
    plan, which adds the allocator's waste. Raises InputError if not even one fits."""
    room = torch.cuda.mem_get_info()[1] / 2**30 * share
    return most_layers(room, lambda layers: needed_gib([*options, f"--model.n_layers={layers}"]))


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


def planned_gib(options: list[str]) -> float:
    """GiB of tensors that the plan expects to live at one time."""
    return ask_plan(options)["live"]


def needed_gib(options: list[str]) -> float:
    """Return that memory with the allocator's waste and CUDA's context."""
    return ask_plan(options)["needed"]


def ask_plan(options: list[str]) -> dict:
    """Plan in a separate process, because PyTorch keeps the meshes of the plan's fake group in
    caches."""
    return harness.child("device.measure", "plan", *options)


def plan(options: list[str]) -> dict:
    """Plan, in a separate process, since it replaces the process group by a fake one."""
    times_do_not_count = dict.fromkeys(
        ("memory_gb_per_s", "link_gb_per_s", "fabric_gb_per_s", "peak_tflops"), 1.0
    )
    device = Device(memory_gib=1, **times_do_not_count)
    made = make_plan(load_config(options, 1, 1), PlanInputs(1, 1, device, on_gpu=GPU))
    return {"live": made.live / 2**30, "needed": made.needed / 2**30}


def compare(name: str) -> dict:
    """name: of COMPARISONS. Raises InputError if this kind of device has no such comparison, or the
    peer's package is not installed."""
    contenders, by_kind = COMPARISONS.get(name, ((), {}))
    if KIND not in by_kind:
        names = ", ".join(name for name, (_, kinds) in COMPARISONS.items() if KIND in kinds)
        raise InputError(f"{name!r} is not compared on a {KIND}; there are {names}")
    package = others.package_of(contenders[0])
    if not find_spec(package):
        raise InputError(f"{package} is not installed here")
    options = by_kind[KIND].split()
    rounds = (TITAN_ROUNDS if package == "torchtitan" else ROUNDS)[KIND]
    if GPU and package != "torchtitan":  # both are in memory at once, and peers keep whole logits
        options.append(f"--model.n_layers={layers_that_fit(options, 1 / 3)}")
    installed = {"bare", *others.installed_peers()}
    names = ["ours", *(name for name in contenders if name in installed)]
    dtype = harness.narrow()
    rows = others.measure(dtype, names, options, rounds)
    notes = f"{rounds} alternating rounds; {' '.join(options)}."
    return {
        "title": "Our step and others",
        "columns": list(others.COLUMNS),
        "rows": rows,
        "notes": notes,
    }


def saves(folder: Path) -> dict:
    """folder: on the disk to write to."""
    cfg = load_config(SAVED[KIND].split())
    job = train.build(cfg)
    t = cfg.training
    shape = (1, t.local_batch_size, t.seq_len)
    batch = {name: torch.randint(0, job.args.vocab_size, shape) for name in ("tokens", "labels")}
    place = Path(tempfile.mkdtemp(prefix="saves-", dir=folder))

    def manager() -> CheckpointManager:
        return CheckpointManager(Checkpoint(), place, job.mesh, {"must_match": {}})

    def step() -> float:
        return harness.alternate({"": lambda: train.train_step(job, batch)}, 1, 0)[""][0]

    try:
        checkpoints = manager()
        checkpoints.load(job.model, job.optimizer)  # makes the buffers, as at every start
        size = sum(x.nbytes for x in state.tensors(job.model, job.optimizer).values()) / 1e9
        alone = statistics.median([step() for _ in range(2 + 2 * ROUNDS[KIND])][2:])
        rounds = [during_a_save(checkpoints, job, number, step) for number in (1, 2)]
        checkpoints.close()
        began = time.perf_counter()
        with manager() as resumed:
            resumed.load(job.model, job.optimizer)
        loaded = time.perf_counter() - began
    finally:
        shutil.rmtree(place)
        close_mesh()
    # in the first one, the files' pages are touched for the first time
    stall, longer, durable, count = rounds[-1]
    steps_alone = count * alone
    rows = [
        ["a step without a save", f"{alone * 1e3:,.0f} ms", ""],
        [
            "training waits for a save",
            f"{stall * 1e3:,.1f} ms",
            f"{stall / steps_alone:.2%} of the steps during it",
        ],
        [
            f"steps during a save ({count}) take longer by",
            f"{longer * 1e3:,.0f} ms",
            f"{longer / steps_alone:.1%}",
        ],
        ["a save is durable after", f"{durable:.2f} s", f"{size / durable:.2f} GB/s"],
        ["load, with every byte verified", f"{loaded:.2f} s", f"{size / loaded:.2f} GB/s"],
    ]
    about = "pinned" if GPU else "pageable: there is no GPU"
    notes = (
        f"{size:.2f} GB of weights and optimizer state; host buffers are {about}. The second "
        "of two saves."
    )
    notes += ABOUT[KIND]
    return {
        "title": "Saves",
        "columns": ["what", "time", "rate or share"],
        "rows": rows,
        "notes": notes,
    }


def during_a_save(
    checkpoints: CheckpointManager, job: train.Job, number: int, step: Callable[[], float]
) -> tuple[float, float, float, int]:
    """Save, and train until it is durable. Seconds that training waits, seconds of the steps beyond
    as many medians of three steps before, seconds until it is durable, and the number of those
    steps."""
    usual = statistics.median(step() for _ in range(3))
    checkpoints.stall()
    began = time.perf_counter()
    checkpoints.save(number, job.model, job.optimizer, {"step": number})
    blocked = time.perf_counter() - began
    seconds = []
    while checkpoints.writing() or not seconds:
        seconds.append(step())
    durable = time.perf_counter() - began
    checkpoints.poll()
    return (
        checkpoints.stall() + blocked,
        blocked + sum(seconds) - usual * len(seconds),
        durable,
        len(seconds),
    )


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("subject", choices=("rates", "step", "compare", "saves", "plan", "about"))
    parser.add_argument(
        "name", nargs="?", default="", help="of a step or a comparison, with _ for spaces"
    )
    args, options = parser.parse_known_args()
    answers = {
        "plan": lambda: plan(options),
        "about": lambda: harness.machine() | {"kind": KIND},
    }
    folder = Path(args.json).parent if args.json else Path.cwd()
    reports = {
        "rates": rates,
        "step": lambda: one_step(args.name.replace("_", " ")),
        "compare": lambda: compare(args.name.replace("_", " ")),
        "saves": lambda: saves(folder),
    }
    if args.subject in answers:
        print(json.dumps(answers[args.subject]()))
    else:
        harness.report(**reports[args.subject](), json_path=args.json)
