"""Profile the kernels of a step, and measure the effect of changes to the step.

    python -m lab.bench kernels [--json out.json] [--table.key=value ...]
    python -m lab.bench kernels --changes clip_apart cublaslt [--rounds 18] [--json ...] [--table.key=value ...]

The first profiles a step of 8B's layers and adds up its kernels by the phase that launched them and
by their kind. GEMMs are then run again by themselves, in the order of the step, many steps in a
row: the rate "in a row" is what the same GEMMs reach without the rest, at the clock that the limit
of power leaves. On a CPU only GEMMs are seen.

--changes: a step as it is, and with each of CHANGES, in alternation, each in a separate process.
They begin with the same weights and tokens, so losses show whether a change computes the same.
"""

import statistics
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity

import train
from configs.load import load_config
from lab.bench import harness, isolated, sections
from lab.bench.device.measure import sustained
from lab.bench.idle import ON_A_GPU, idle_share, kernel_times, traced
from parallelisms.master_weights import MasterWeights
from parallelisms.mesh import close_mesh
from training.loss import _LinearCrossEntropy
from training.loss_passes import add_matmul

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
OPTIONS = f"{sections.LAYERS_8B} --model.n_layers=10" if GPU else ""
# several steps share a GPU of 80 GB
SMALL = f"{sections.LAYERS_8B} --model.n_layers=2 --model.vocab_size=32768" if GPU else ""
PHASES = ("forward", "loss", "backward", "clip", "optimizer")  # train.py::train_step
LAUNCHES = ("cuda_runtime", "cuda_driver")
MATMULS = ("aten::mm", "aten::addmm")
DTYPES = {"c10::BFloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}
GEMM = "GEMMs"
KINDS = (  # words in the name of the operator or of the kernel -> kind; the first counts
    (("aten::mm", "aten::addmm", "triton_tem"), GEMM),
    (("attention", "sdpa", "flash"), "attention"),
    (("triton",), "compiled passes"),
    (("adam",), "AdamW"),
    (("foreach", "norm"), "norm and scale of gradients"),
    (("copy", "memcpy", "memset", "aten::to", "fill", "zero"), "casts and copies"),
    (("",), "other"),
)
OF_WEIGHTS = "GEMMs, gradients of weights"
OF_INPUTS = "GEMMs, gradients of inputs"


class Ran(NamedTuple):
    phase: str  # one of PHASES that launched it, "" outside
    kind: str
    microseconds: float
    op: dict  # the profiler's event of the operator that launched it, {} if there is none


def kernels_of(events: list[dict]) -> list[Ran]:
    """Return the kernels of a trace of one step, in the order in which they ran. Without a GPU its
    GEMMs' operators replace kernels."""
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    ran = [event for event in events if event.get("cat") in ON_A_GPU]
    ran = ran or [op for op in operators if op["name"] in MATMULS]
    ops = {op["args"].get("External id"): op for op in operators}
    launched = {
        event["args"].get("correlation"): event["ts"]
        for event in events
        if event.get("cat") in LAUNCHES
    }
    phases = [
        event
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] in PHASES
    ]
    kernels = []
    for event in sorted(ran, key=lambda event: event["ts"]):
        about = event.get("args", {})
        op = ops.get(about.get("External id"), {})
        when = launched.get(about.get("correlation"), event["ts"])
        around = [p for p in phases if p["ts"] <= when <= p["ts"] + p["dur"]]
        phase = max(around, key=lambda p: p["ts"])["name"] if around else ""
        kind = kind_of(f"{op.get('name', '')} {event['name']} {event['cat']}")
        kernels.append(Ran(phase, kind, event.get("dur", 0), op))
    return kernels


def kind_of(names: str) -> str:
    return next(kind for words, kind in KINDS if any(word in names.lower() for word in words))


class Product(NamedTuple):
    """Product: a GEMM a @ b of an operator, [M, K] @ [K, N]; adds: to a third matrix."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    strides: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]  # of a, of b, and of what it is added to
    adds: bool

    @property
    def flops(self) -> float:
        (m, k), (_, n) = self.shapes
        return 2.0 * m * k * n


def product_of(op: dict) -> Product | None:
    about = op.get("args", {})
    if op.get("name") not in MATMULS or "Input Dims" not in about:
        return None
    first = int(op["name"] == "aten::addmm")
    both = slice(first, first + 2)
    shapes = tuple(map(tuple, about["Input Dims"][both]))
    contiguous = [(shape[1], 1) for shape in shapes]
    strides = about.get("Input Strides", [*[()] * first, *contiguous])[both]
    # of an expanded tensor
    strides = [given if all(given) else own for given, own in zip(strides, contiguous)]
    names = [*about["Input type"][both], about["Input type"][0]]
    dtypes = tuple(DTYPES.get(name, torch.bfloat16) for name in names)
    return Product(shapes, tuple(map(tuple, strides)), dtypes, bool(first))


def role(kernel: Ran, tokens: int) -> str:
    """Return the kind; for GEMMs of a backward pass, which gradient they compute."""
    product = product_of(kernel.op)
    if kernel.phase != "backward" or product is None:
        return kernel.kind
    return OF_WEIGHTS if product.shapes[0][1] == tokens else OF_INPUTS


def call_of(product: Product) -> Callable[[], object]:
    """Return a call of this GEMM on random numbers."""
    (m, _), (_, n) = product.shapes
    a, b = (
        torch.empty_strided(shape, stride, dtype=dtype, device=DEVICE).normal_()
        for shape, stride, dtype in zip(product.shapes, product.strides, product.dtypes)
    )
    if product.adds:
        return partial(add_matmul, torch.zeros(m, n, dtype=product.dtypes[2], device=DEVICE), a, b)
    return partial(torch.mm, a, b, out=torch.empty(m, n, dtype=a.dtype, device=DEVICE))


def rate_in_a_row(products: list[Product]) -> float:
    """FLOP/s of these GEMMs one after the other, again and again."""
    calls = {product: call_of(product) for product in set(products)}

    def run() -> None:
        for product in products:
            calls[product]()

    return sum(product.flops for product in products) / sustained(run, DEVICE)


def a_step(options: list[str]) -> tuple[train.Job, Callable[[], train.StepResult]]:
    """Return a step on random tokens, always the same."""
    job = train.build(load_config(options))
    t = job.cfg.training
    shape = (t.global_batch_size // t.local_batch_size, t.local_batch_size, t.seq_len)
    torch.manual_seed(0)
    batch = {name: torch.randint(0, job.args.vocab_size, shape) for name in ("tokens", "labels")}
    return job, partial(train.train_step, job, batch)


def of_a_step(options: list[str], rounds: int) -> dict:
    """Return the table of the kernels of a step."""
    job, run = a_step(options)
    with power_and_clock() as seen:
        seconds = statistics.median(harness.alternate({"": run}, rounds)[""])
    idle = idle_share(*kernel_times(run)) if GPU else None
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if GPU else [])]
    kernels = kernels_of(traced(run, activities, record_shapes=True))
    layers = job.args.n_layers
    t = job.cfg.training
    del run, job
    close_mesh()
    if GPU:
        torch.cuda.empty_cache()
    rows, numbers = table(kernels, t.local_batch_size * t.seq_len, seconds)
    about = f"{layers} layers; a step {seconds * 1e3:,.1f} ms, the median of {rounds}"
    if idle is not None:
        about += f"; no kernel runs in {idle:.1%} of it"
    columns = ["phase", "kernels", "number", "ms", "of a step", "TFLOP/s", "in a row", "lost ms"]
    return {
        "title": "Kernels of a step",
        "columns": columns,
        "rows": rows,
        "notes": f"{about}{seen()}. {' '.join(options)}.",
        "numbers": numbers | {"seconds": seconds, "idle": idle},
    }


def table(kernels: list[Ran], tokens: int, seconds: float) -> tuple[list[list[str]], dict]:
    """Return rows by phase and kind, the longest first in each phase, and all GEMMs together;
    tokens: of the step; seconds: of a step."""
    groups: dict[tuple[str, str], list[Ran]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.phase, role(kernel, tokens)].append(kernel)
    everything = [kernel for kernel in kernels if kernel.kind == GEMM]
    groups["all", GEMM] = everything
    order = {phase: number for number, phase in enumerate((*PHASES, "", "all"))}

    def place(key: tuple[str, str]) -> tuple[int, float]:
        return order[key[0]], -sum(kernel.microseconds for kernel in groups[key])

    rows = []
    for key in sorted(groups, key=place):
        some = groups[key]
        spent = sum(kernel.microseconds for kernel in some) / 1e6
        row = [*key, str(len(some)), f"{spent * 1e3:.1f}", f"{spent / seconds:.1%}"]
        # several kernels of one operator are one product
        ops = {id(kernel.op): kernel.op for kernel in some if kernel.kind == GEMM}
        products = [product for op in ops.values() if (product := product_of(op))]
        row += rates_of(products, spent) if products else ["", "", ""]
        rows.append(row)
    unseen = seconds - sum(kernel.microseconds for kernel in kernels) / 1e6
    rows.append(["", "none runs", "", f"{unseen * 1e3:.1f}", f"{unseen / seconds:.1%}", "", "", ""])
    return rows, {}


def rates_of(products: list[Product], seconds: float) -> list[str]:
    """Rate in the step, rate in a row, and the milliseconds between the two."""
    flops = sum(product.flops for product in products)
    in_a_row = rate_in_a_row(products)
    lost = seconds - flops / in_a_row
    return [f"{flops / seconds / 1e12:.1f}", f"{in_a_row / 1e12:.1f}", f"{lost * 1e3:.1f}"]


@contextmanager
def power_and_clock() -> Iterator[Callable[[], str]]:
    """Afterwards, the median watts and MHz of the time inside, as words; "" without a GPU."""
    process = None
    if GPU:
        query = ["--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits", "-lms", "100"]
        with suppress(OSError):
            process = subprocess.Popen(
                ["nvidia-smi", *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
    samples: list[list[float]] = []

    def words() -> str:
        if not samples:
            return ""
        most = max(watts for watts, _ in samples)
        # not while it waits for a compiler
        busy = [sample for sample in samples if sample[0] > most / 2]
        watts, clock = map(statistics.median, zip(*busy))
        return f"; {watts:.0f} W, {clock:.0f} MHz"

    yield words
    if process:
        process.terminate()
        for line in process.communicate()[0].splitlines():
            with suppress(ValueError):
                samples.append([float(word) for word in line.split(",")])


# --------------------------------------------------------------------------------------------------
# changes


def coordinate_descent() -> None:
    """Inductor tries other sizes of blocks for its own kernels."""
    torch._inductor.config.coordinate_descent_tuning = True


def tuned_products() -> None:
    """Inductor measures Triton's GEMMs against cuBLAS's."""
    torch._inductor.config.max_autotune_gemm = True


def cublaslt() -> None:
    """Choose cuBLASLt's heuristics for every GEMM."""
    torch.backends.cuda.preferred_blas_library("cublaslt")


def clip_apart() -> None:
    """Scale the gradients before the update (training/one_pass.py), in a separate pass."""
    train.scaling = lambda _: torch._foreach_mul_


def narrow_adds() -> None:
    """Add a gradient as backward leaves it, without a wide copy first: 8 bytes less for each
    parameter and microbatch but the first, and each parameter of the output projection."""

    def add_gradient(self, master, copy):
        if master.grad is None:
            master.grad = copy.grad.to(master.dtype)
        else:
            master.grad.add_(copy.grad)
        copy.grad = None
        self.version_of_gradient[master] = master.grad._version

    def backward(ctx, grad):
        grad_h, grad_w = ctx.saved_tensors
        scaled = torch.mul(grad_w, grad, out=torch.empty_like(grad_w, dtype=ctx.weight_dtype))
        return grad_h * grad, scaled, *[None] * 7

    MasterWeights.add_gradient = add_gradient
    _LinearCrossEntropy.backward = staticmethod(backward)


CHANGES: dict[str, tuple[Callable[[], None], list[str]]] = {  # and options
    "none": (lambda: None, []),
    "clip_apart": (clip_apart, []),
    "narrow_adds": (narrow_adds, []),
    "coordinate_descent": (coordinate_descent, []),
    "tuned_products": (tuned_products, []),
    "cublaslt": (cublaslt, []),
    "loss_in_one_piece": (lambda: None, ["--training.loss_chunk_tokens=8192"]),
}


def serve(name: str, options: list[str]) -> None:
    """Serve a step with this change, one timing per line of input."""
    change, more = CHANGES[name]
    change()
    losses = []
    _, run = a_step([*options, *more])
    isolated.serve(lambda: losses.append(run().loss), last=lambda: {"losses": losses})
    close_mesh()


def compare(names: list[str], options: list[str], rounds: int) -> dict:
    module = ["-m", "lab.bench", "kernels", *options]
    processes = {name: [*module, f"--one={name}"] for name in names}
    with power_and_clock() as seen:
        seconds, ended = isolated.timed(processes, rounds)
    rows = []
    for name, times in seconds.items():
        losses = ended[name]["losses"]
        pairs = zip(losses, ended["none"]["losses"])
        row = [
            name,
            f"{statistics.median(times) * 1e3:.1f} ms",
            f"{min(times) * 1e3:.1f} ms",
            f"{harness.ratio(seconds, name, 'none'):.3f}",
            f"{ended[name]['gib']:.2f}",
            f"{losses[0]:.5f}, {losses[-1]:.5f}",
            f"{max(abs(a / b - 1) for a, b in pairs):.1e}",
        ]
        rows.append(row)
    columns = ["change", "median step", "fastest", "to none (median of pairs)", "peak GiB"]
    columns += ["loss, first and last", "apart by at most"]
    notes = f"{rounds} alternating rounds{seen()}. {' '.join(options)}."
    return {"title": "Changes of a step", "columns": columns, "rows": rows, "notes": notes}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=18 if GPU else 3)
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=[])
    parser.add_argument(
        "--one", choices=CHANGES, help="with this change, one timing per line of input"
    )
    args, given = parser.parse_known_args()
    if args.one:
        return serve(args.one, given)
    if args.changes:
        names = list(dict.fromkeys(("none", *args.changes)))
        report = compare(names, [*SMALL.split(), "--optimizer.lr=3e-5", *given], args.rounds)
    else:
        report = of_a_step([*OPTIONS.split(), *given], args.rounds)
    harness.report(**report, json_path=args.json)
