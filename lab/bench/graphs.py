"""Time small models, whose steps wait for the host, with and without CUDA graphs.

    python -m lab.bench graphs [--rounds 12] [--only debug,100M] [--json out.json]

Every contender trains in a separate process, all on the same batches; the first 20 losses and norms
are compared bit by bit with those of the same contender without a graph; more options, such as
--run.deterministic=true, go to all. Rounds of 20 steps alternate. idle: the share of a step in
which the GPU runs no kernel.
"""

import os
import statistics
from collections.abc import Callable

import configs.cpu  # noqa: F401

import torch

import train
from configs.load import load_config
from lab.bench import harness, isolated
from lab.bench.idle import idle_share, kernel_times
from training.optim import learning_rate, set_learning_rate

DEBUG = "configs/llama_debug.toml"
SIZES = {
    "debug": f"{DEBUG}",
    "100M": (
        f"{DEBUG} --model.dim=768 --model.n_layers=12 --model.n_heads=12 --model.n_kv_heads=4 "
        "--model.head_dim=64 --model.hidden_dim=2048 --model.vocab_size=32768 "
        "--training.seq_len=512"
    ),
}
STEPS = 20  # of a round, and whose losses are compared
PLAIN = "step by step"
AGAIN = "step by step, again"  # whether these numbers repeat themselves at all
GRAPHS = "compile.cuda_graphs"
COLUMNS = (
    "model",
    "blocks",
    "launches",
    "step",
    "fastest",
    "tokens/s",
    "to step by step, not compiled",
    "losses of 20 steps",
    "idle",
    "peak GiB",
)
Step = Callable[[int], tuple[float, float]]  # number of the step -> its loss and norm


def plain(job: train.Job, batches: list[dict]) -> Step:
    def step(number: int) -> tuple[float, float]:
        set_learning_rate(job.optimizer, rate_of(job, number))
        result = train.train_step(job, batches[number % len(batches)])
        return result.loss, result.grad_norm

    return step


def graphs_of_blocks(job: train.Job, batches: list[dict]) -> Step:
    """torch.compile's own graphs of each block."""
    for block in job.model.layers.values():
        original = type(block).forward.__get__(block)
        block.forward = torch.compile(original, mode="reduce-overhead", fullgraph=True)
    inner = plain(job, batches)

    def step(number: int) -> tuple[float, float]:
        torch.compiler.cudagraph_mark_step_begin()
        return inner(number)

    return step


def rate_of(job: train.Job, number: int) -> float:
    cfg = job.cfg
    return learning_rate(
        number % cfg.training.steps, cfg.training.steps, cfg.optimizer.lr, cfg.lr_schedule
    )


VARIANTS = {
    PLAIN: plain,
    AGAIN: plain,
    GRAPHS: plain,
    "graphs of blocks (reduce-overhead)": graphs_of_blocks,
}


def one(options: list[str], variant: str) -> None:
    recorded = f"--compile.cuda_graphs={str(variant == GRAPHS).lower()}"
    cfg = load_config([*options, recorded], 1, 1)
    if cfg.run.deterministic:  # as train.open_run
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    job = train.build(cfg)
    shape = (1, cfg.training.local_batch_size, cfg.training.seq_len)
    random = torch.Generator().manual_seed(1)
    on_gpu = job.mesh.device.type == "cuda"
    batches = []
    for _ in range(8):
        window = torch.randint(0, job.args.vocab_size, (*shape[:2], shape[2] + 1), generator=random)
        tokens, labels = window[..., :-1].contiguous(), window[..., 1:].contiguous()
        batch = {"tokens": tokens, "labels": labels}
        batches.append({n: x.pin_memory() if on_gpu else x for n, x in batch.items()})
    step = VARIANTS[variant](job, batches)
    seen = [[x.hex() for x in step(number)] for number in range(STEPS)]
    done = STEPS

    def run() -> None:
        nonlocal done
        for _ in range(STEPS):
            step(done)
            done += 1

    def last() -> dict:
        if not on_gpu:
            return {}
        return {"idle": idle_share(*kernel_times(lambda: step(done)))}

    isolated.serve(run, {"seen": seen, "tokens": shape[1] * shape[2]}, last)
    train.meshes.close_mesh()


def same(seen: list, reference: list) -> str:
    """Describe how losses and norms compare with those of the same blocks without a graph."""
    if not seen or not reference:
        return "-"
    for number, (ours, theirs) in enumerate(zip(seen, reference), 1):
        if ours != theirs:
            last = (float.fromhex(x[-1][0]) for x in (seen, reference))
            a, b = last
            return f"the same until step {number - 1}, then within {abs(a / b - 1):.1e} at the last"
    return "bitwise the same"


def rows_of(running: dict[str, isolated.Contender]) -> list[list[str]]:
    rows = []
    for key, contender in running.items():
        model, compiled, variant = key.split("; ")
        base = running[f"{model}; {compiled}; {PLAIN}"]
        eager = running[f"{model}; not compiled; {PLAIN}"]
        row = [model, compiled, variant]
        if contender.seconds:
            seconds = statistics.median(contender.seconds) / STEPS
            ratios = [a / b for a, b in zip(eager.seconds, contender.seconds)]
            idle, gib = contender.facts.get("idle"), contender.facts.get("gib")
            row += [
                f"{seconds * 1e3:.2f} ms",
                f"{min(contender.seconds) / STEPS * 1e3:.2f} ms",
                f"{contender.facts['tokens'] / seconds:,.0f}",
                f"{statistics.median(ratios):.2f}" if ratios else "-",
                same(contender.facts.get("seen", []), base.facts.get("seen", [])),
                "-" if idle is None else f"{idle:.1%}",
                "-" if gib is None else f"{gib:.2f}",
            ]
        else:
            row += ["-"] * 6 + [contender.cell()]
        rows.append(row)
    return rows


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default=",".join(SIZES))
    parser.add_argument("--seconds", type=float, default=75, help="to compile, all at once")
    parser.add_argument("--one", choices=VARIANTS)
    args, overrides = parser.parse_known_args()
    if args.one:
        return one(overrides, args.one)
    contenders = {}
    for model in harness.named(args.only, SIZES):
        for compiled in ("not compiled", "compiled"):
            for variant in VARIANTS:
                if variant.startswith("graphs of blocks") and compiled == "not compiled":
                    continue
                contenders[f"{model}; {compiled}; {variant}"] = [
                    "-m",
                    "lab.bench",
                    "graphs",
                    f"--one={variant}",
                    *SIZES[model].split(),
                    f"--compile.enabled={str(compiled == 'compiled').lower()}",
                    *overrides,
                ]

    running = isolated.in_turn(contenders, args.rounds, args.seconds, 10, args.json)
    notes = f"{args.rounds} alternating rounds of {STEPS} steps; batches of 8 sequences."
    numbers = isolated.numbers(running)
    harness.report(
        "Steps of small models", list(COLUMNS), rows_of(running), notes, args.json, numbers
    )
