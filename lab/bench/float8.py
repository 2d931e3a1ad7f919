"""The blocks' linear layers in float8 against bfloat16, and against torchao's where it is installed.

    python -m lab.bench float8 (products | steps | rowwise | loss | experts) [--rounds N] [--json out.json]

- products: the three GEMMs of a linear layer, alone and with all that rounds their factors,
  compiled.
- steps: training steps of 4 of 8B's layers with an eighth of its vocabulary, so that each part of a
  step has the share that it has in the whole; tensorwise. rowwise: the same.
- loss: 300 steps on Python's library, byte by byte, and the loss of what was held out: bfloat16 and
  float8, with several seeds.
- experts: the grouped GEMM of routed experts (Qwen3-30B-A3B's sizes), which no option uses.

Contenders take turns in one process. On a CPU the sizes are small.
"""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

from configs.cpu import cpu_settings

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

import train
from configs.load import load_config
from configs.schema import InputError
from data import sources
from lab.bench import harness
from lab.bench.idle import ON_A_GPU, traced
from models.kernels import float8_product
from models.kernels.float8_product import RECIPES, float8_linear
from parallelisms import float8
from tools.parity import in_memory
from training.metrics import peak_flops
from training.optim import learning_rate, set_learning_rate
from training.validate import scores, validate

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
KIND = DEVICE.type
CALLS = {"cuda": 10, "cpu": 1}  # between two looks at the clock
SHAPES = {  # tokens, inputs, outputs
    "cuda": ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096)),
    "cpu": ((512, 256, 512),),
}
STEP = {
    "cuda": "--model.flavor=8B --model.n_layers=4 --model.vocab_size=16384 --training.seq_len=8192 "
    "--training.local_batch_size=1 --training.global_batch_size=1 --data.bpe_vocab_size=4096 "
    "--training.param_dtype=bfloat16 --activation_checkpoint.mode=selective --compile.enabled=true",
    "cpu": "--model.vocab_size=4096 --training.seq_len=128 --training.local_batch_size=2 "
    "--training.global_batch_size=2 --training.param_dtype=bfloat16 --model.n_layers=2 "
    "--activation_checkpoint.mode=selective",
}
LOSS = {
    "cuda": "--model.dim=1024 --model.n_layers=8 --model.n_heads=16 --model.n_kv_heads=4 "
    "--model.head_dim=64 --model.hidden_dim=2816 --training.seq_len=1024 "
    "--training.local_batch_size=8 --training.global_batch_size=8 --training.param_dtype=bfloat16 "
    "--activation_checkpoint.mode=selective --compile.enabled=true",
    "cpu": "--model.dim=128 --model.n_layers=2 --training.seq_len=128 "
    "--training.local_batch_size=4 --training.global_batch_size=4 --training.param_dtype=bfloat16",
}
BYTES = "--model.vocab_size=272 --data.tokenizer=bytes --optimizer.lr=1e-3"
STEPS_OF_LOSS = {"cuda": 300, "cpu": 3}
HELD_OUT_WINDOWS = {"cuda": 256, "cpu": 8}
EXPERTS = {  # experts, rows, width, width of an expert
    "cuda": (128, 65536, 2048, 768),
    "cpu": (4, 64, 32, 16),
}


def torchaos(recipe: str) -> Callable[..., nn.Module]:
    """Quantise with torchao, replacing `parallelisms.float8.apply`."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def apply(model: nn.Module, *_: object) -> nn.Module:
        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(
            model.layers, config=dataclasses.replace(config, emulate=not GPU)
        )
        return model

    return apply


def in_a_row(fn: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS[KIND]):
            fn()

    return run


# --------------------------------------------------------------------------------------------------
# single layers


def products(rounds: int) -> dict:
    rows = [row for shape in SHAPES[KIND] for row in products_of(shape, rounds)]
    columns = ["tokens, inputs, outputs", "what", "ms", "TFLOP/s", "time / bfloat16's"]
    notes = f"{rounds} alternating rounds of {CALLS[KIND]} calls; the first rows are GEMMs alone."
    return {"title": "A linear layer in float8", "columns": columns, "rows": rows, "notes": notes}


def products_of(shape: tuple[int, int, int], rounds: int) -> list[list[str]]:
    tokens, inputs, outputs = shape
    x, weight, grad = (
        torch.randn(*size, device=DEVICE, dtype=torch.bfloat16)
        for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    alone = gemms(x, weight, grad)
    contenders = alone | layers(x, weight, grad)
    seconds = harness.alternate({name: in_a_row(fn) for name, fn in contenders.items()}, rounds)
    rows = []
    for name, times in seconds.items():
        once = statistics.median(times) / CALLS[KIND]
        rate = 6 * tokens * inputs * outputs / once / 1e12
        first = "bfloat16" if name in alone else "bfloat16, compiled"
        ratio = harness.ratio(seconds, name, first)
        rows.append([f"{tokens}, {inputs}, {outputs}", name, f"{once * 1e3:.3f}", f"{rate:,.0f}"])
        rows[-1].append(f"{ratio:.3f}")
    return rows


def gemms(x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Callable[[], object]]:
    """Return the three GEMMs, of factors that are rounded and laid out already."""
    pairs = (x, weight.t()), (grad, weight), (grad.t(), x)

    def bfloat16() -> None:
        for a, b in pairs:
            a @ b

    def in_float8(name: str, fast: bool) -> Callable[[], None]:
        recipe = RECIPES[name]
        rounded = [
            (
                float8_product.rounded(a, float8_product.PRECISE, recipe, along=1),
                float8_product.rounded(b, float8_product.PRECISE, recipe, along=0),
            )
            for a, b in pairs
        ]
        laid_out = [
            (a._replace(values=a.values.contiguous()), b._replace(values=column_major(b.values)))
            for a, b in rounded
        ]

        def run() -> None:
            for a, b in laid_out:
                float8_product.multiplied(a, b, torch.bfloat16, recipe, fast)

        return run

    return {
        "bfloat16": bfloat16,
        "tensorwise, sums of float32": in_float8("tensorwise", False),
        "tensorwise, fast sums": in_float8("tensorwise", True),
        "rowwise, sums of float32": in_float8("rowwise", False),
        "rowwise, fast sums": in_float8("rowwise", True),
    }


def column_major(matrix: Tensor) -> Tensor:
    return matrix.t().contiguous().t()


def layers(x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Callable[[], object]]:
    """Forward and backward of compiled layers; of one shape only, since each takes seconds to
    compile."""
    if x.shape[1] >= weight.shape[0]:
        return {}
    how: dict[str, Callable] = {"bfloat16": nn.functional.linear}
    for name, recipe in RECIPES.items():
        how[f"{name}, ours"] = partial(ours, recipe)
    if find_spec("torchao"):
        how["tensorwise, torchao"] = torchaos_linear(weight, "tensorwise")
    x = x.requires_grad_()
    weight = weight.requires_grad_()

    def run(linear: Callable[[Tensor, Tensor], Tensor]) -> None:
        torch.autograd.grad(linear(x, weight), (x, weight), grad)

    compiled = {}
    for name, linear in how.items():
        torch._dynamo.reset()
        compiled[f"{name}, compiled"] = partial(run, torch.compile(linear, fullgraph=True))
    return compiled


def ours(recipe: float8_product.Recipe, x: Tensor, weight: Tensor) -> Tensor:
    return float8_linear(x, weight, None, recipe)


def torchaos_linear(weight: Tensor, recipe: str) -> Callable[[Tensor, Tensor], Tensor]:
    outputs, inputs = weight.shape
    holder = nn.Module()
    holder.layers = nn.Sequential(nn.Linear(inputs, outputs, bias=False, device="meta"))
    (linear,) = torchaos(recipe)(holder).layers

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(linear, {"weight": weight}, (x,))

    return forward


# --------------------------------------------------------------------------------------------------
# whole steps


def steps(recipe: str, rounds: int) -> dict:
    jobs = {"bfloat16": Steps(["--training.float8=none"])}
    jobs[f"{recipe}, ours"] = Steps(in_float8(recipe))
    if find_spec("torchao"):
        with mock.patch.object(float8, "apply", torchaos(recipe)):
            jobs[f"{recipe}, torchao"] = Steps(in_float8(recipe))
    seconds = harness.alternate({name: job.step for name, job in jobs.items()}, rounds, warm_up=3)
    rows = []
    for name, job in jobs.items():
        once = statistics.median(seconds[name])
        rate = job.flops / once
        peak = peak_flops(torch.cuda.get_device_name() if GPU else "cpu", 0.0, torch.bfloat16)
        row = [name, f"{once * 1e3:.1f}", f"{job.tokens / once:,.0f}", f"{rate / 1e12:,.0f}"]
        row += [f"{rate / peak:.1%}" if peak else "-", f"{job.memory_gib():.2f}"]
        row += [f"{1 / harness.ratio(seconds, name, 'bfloat16'):.3f}", f"{job.losses[-1]:.5f}"]
        rows.append(row)
    columns = ["layers", "ms per step", "tokens/s", "TFLOP/s", "MFU of bfloat16's peak", "live GiB"]
    columns += ["times bfloat16's speed (median of pairs)", "loss of the last step"]
    return {
        "title": "Training steps in float8",
        "columns": columns,
        "rows": rows,
        "notes": f"{rounds} alternating rounds; {STEP[KIND]}.",
        "numbers": {
            name: {"seconds": seconds[name], "losses": job.losses, "kernels": longest(job.step)}
            for name, job in jobs.items()
        },
    }


def in_float8(recipe: str) -> list[str]:
    return [f"--training.float8={recipe}", *([] if GPU else ["--debug.emulate_float8=true"])]


class Steps:
    """Steps of one contender, with its own model and optimizer, on the same random tokens as the
    others'."""

    def __init__(self, options: list[str]) -> None:
        held = allocated()
        self.losses: list[float] = []
        self.cfg = load_config([*STEP[KIND].split(), *options], 1, 1)
        self.job = train.build(self.cfg)
        t = self.cfg.training
        self.tokens = t.global_batch_size * t.seq_len
        ids = np.random.default_rng(0).integers(0, self.job.args.vocab_size, 4 * self.tokens + 1)
        self.batch = in_memory.batches(self.cfg, self.job.mesh, ids.astype(np.uint32))[0]
        family, args = train.architecture(self.cfg)
        self.flops = family.flops_per_token(args, t.seq_len) * self.tokens
        self.step()  # compiles it, and allocates the optimizer's state
        self.own = allocated() - held

    def step(self) -> None:
        self.more = 0.0
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        before = allocated()
        self.losses.append(train.train_step(self.job, self.batch).loss)
        if GPU:
            self.more = torch.cuda.max_memory_allocated() / 2**30 - before

    def memory_gib(self) -> float:
        """Return the peak of its own tensors in the last step."""
        return self.own + self.more


def longest(step: Callable[[], None], count: int = 40) -> list[list]:
    """List the kernels that take most of a step: milliseconds, calls, name."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in traced(step, [ProfilerActivity.CUDA]) if GPU else []:
        if event.get("cat") in ON_A_GPU:
            found[event["name"][:120]].append(event["dur"] / 1e3)
    rows = [[round(sum(times), 3), len(times), name] for name, times in found.items()]
    return sorted(rows, reverse=True)[:count]


def allocated() -> float:
    """GiB."""
    return torch.cuda.memory_allocated() / 2**30 if GPU else 0.0


# --------------------------------------------------------------------------------------------------
# what is learned


def loss(seeds: int) -> dict:
    ids = np.frombuffer(b"".join(Path(f.path).read_bytes() for f in sources.find("stdlib")), "u1")
    ids = ids.astype(np.uint32)
    rows = []
    for seed in range(seeds):
        for name in ("bfloat16", "tensorwise"):
            if name == "bfloat16" or seed < max(1, seeds - 2):
                rows.append([name, str(seed), *learned(name, seed, ids)])
                print(" | ".join(rows[-1]), flush=True)
    columns = ["layers", "seed", "held-out loss", "bits per byte", "training loss, last 30 steps"]
    notes = f"{STEPS_OF_LOSS[KIND]} steps; {LOSS[KIND]} {BYTES}."
    return {"title": "Loss in float8", "columns": columns, "rows": rows, "notes": notes}


def learned(name: str, seed: int, ids: np.ndarray) -> list[str]:
    options = [*LOSS[KIND].split(), *BYTES.split(), f"--run.seed={seed}"]
    cfg = load_config([*options, *(in_float8(name) if name in RECIPES else [])], 1, 1)
    t = cfg.training
    total = STEPS_OF_LOSS[KIND]
    held_out = HELD_OUT_WINDOWS[KIND] * t.seq_len + 1
    job = train.build(cfg)
    data = in_memory.batches(cfg, job.mesh, ids[:-held_out])
    losses = []
    for i in range(total):
        lr = learning_rate(i + 1, total, cfg.optimizer.lr, cfg.lr_schedule)
        set_learning_rate(job.optimizer, lr)
        losses.append(train.train_step(job, data[i]).loss)
    last = in_memory.batches(cfg, job.mesh, ids[-held_out:])
    count = HELD_OUT_WINDOWS[KIND] // t.global_batch_size
    one_byte = torch.ones(job.args.vocab_size, dtype=torch.int64)
    sums = validate(
        job.model, job.mesh, (last[i] for i in range(count)), t.loss_chunk_tokens, one_byte
    )
    found = scores({"": sums})
    numbers = found["validation_loss"], found["validation_bits_per_byte"]
    return [*(f"{number:.4f}" for number in numbers), f"{statistics.mean(losses[-30:]):.4f}"]


# --------------------------------------------------------------------------------------------------
# experts


def experts(rounds: int) -> dict:
    """Forward GEMMs alone: the factors are rounded already. Raises InputError on a CPU."""
    if not GPU:
        raise InputError("torch._scaled_grouped_mm needs a GPU")
    n, tokens, inputs, outputs = EXPERTS[KIND]
    x = torch.randn(tokens, inputs, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(n, outputs, inputs, device=DEVICE, dtype=torch.bfloat16)
    ends = torch.arange(1, n + 1, device=DEVICE, dtype=torch.int32) * (tokens // n)
    x8 = x.to(torch.float8_e4m3fn)
    weight8 = weight.to(torch.float8_e4m3fn)
    of_rows = torch.ones(tokens, device=DEVICE)
    of_columns = torch.ones(n, outputs, device=DEVICE)

    def in_8_bits() -> Tensor:
        return torch._scaled_grouped_mm(
            x8,
            weight8.transpose(1, 2),
            of_rows,
            of_columns,
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    contenders = {
        "grouped_mm, bfloat16": lambda: torch._grouped_mm(x, weight.transpose(1, 2), offs=ends),
        "_scaled_grouped_mm, rowwise": in_8_bits,
    }
    seconds = harness.alternate({name: in_a_row(fn) for name, fn in contenders.items()}, rounds)
    rows = []
    for name, times in seconds.items():
        once = statistics.median(times) / CALLS[KIND]
        rate = 2 * tokens * inputs * outputs / once / 1e12
        ratio = harness.ratio(seconds, name, "grouped_mm, bfloat16")
        rows.append([name, f"{once * 1e3:.3f}", f"{rate:,.0f}", f"{ratio:.3f}"])
    columns = ["kernel", "ms", "TFLOP/s", "time / bfloat16's"]
    notes = f"{n} experts, {tokens} rows, {inputs} to {outputs}; {rounds} alternating rounds."
    return {"title": "Experts in float8", "columns": columns, "rows": rows, "notes": notes}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("part", choices=("products", "steps", "rowwise", "loss", "experts"))
    parser.add_argument("--rounds", type=int, default=10 if GPU else 2)
    parser.add_argument("--seeds", type=int, default=3 if GPU else 1)
    args = parser.parse_args()
    parts = {
        "products": lambda: products(args.rounds),
        "steps": lambda: steps("tensorwise", args.rounds),
        "rowwise": lambda: steps("rowwise", args.rounds),
        "loss": lambda: loss(args.seeds),
        "experts": lambda: experts(args.rounds),
    }
    cpu_settings()
    harness.report(**parts[args.part](), json_path=args.json)
