"""Train for 300 seconds on this device, and say how well: bits per byte of held-out text.

    python -m lab.bench device.in_300s --text train.jsonl --held-out held_out.jsonl \\
        [--seconds 300] [--seeds 0 1 2] [--rival FOLDER] [--only TRAINER] [--work FOLDER] \\
        [--json out.json] [OPTIONS]

The protocol is that of github.com/karpathy/autoresearch: 300 s of steps after the first 11, which
compile. Ours is configs/qwen3_300s.toml; OPTIONS override it. A short run measures the seconds of a
step, and training.steps is what fits into the time, so that the schedule ends with it. Both files
are JSON lines with the field "text".

--rival: a clone of autoresearch, unchanged. It gets the same texts, in a separate home folder (it
needs pyarrow, rustbpe and requests), and trains a tokenizer of the same size on them. Its attention
is a kernel that it downloads; the PyTorch's FlashAttention of rival.py takes its place. It needs a GPU.

The trainers run in turn, seed by seed; the JSON is written after each run. Where a command may not
take twice 300 s, --only runs one of them, plumbline or autoresearch, by a command each. --work may be
that of an earlier command: texts that it has prepared are not prepared again. On a CPU try it with
`--seconds 5 --model.dim=64 --model.n_layers=1 --training.seq_len=128 --training.global_batch_size=4
--training.local_batch_size=4 --compile.enabled=false`.
"""

import argparse
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from configs.load import load_config
from configs.schema import InputError
from lab.bench import harness
from tools.preflight.machine import nvidia_smi

ROOT = Path(__file__).resolve().parents[3]
PRESET = ROOT / "configs" / "qwen3_300s.toml"
COMPILING = 11  # steps that do not count (autoresearch's train.py)
MEASURED = 20  # steps that say how long one takes
BYTES_PER_TOKEN = 4  # about; no more is validated on than there is
TRAINERS = ["plumbline", "autoresearch"]
COLUMNS = {  # title -> how a run's number of this name is written, and the name
    "trainer": ("{}", "trainer"),
    "seed": ("{}", "seed"),
    "bits per byte": ("{:.4f}", "bits_per_byte"),
    "steps": ("{:,}", "steps"),
    "million tokens": ("{:,.2f}", "millions_of_tokens"),
    "epochs": ("{:.1f}", "epochs"),
    "tokens/s": ("{:,.0f}", "tokens_per_second"),
    "MFU": ("{:.1%}", "mfu"),
    "peak GiB": ("{:.2f}", "peak_gib"),
    "W": ("{:.0f}", "watts"),
    "MHz": ("{:.0f}", "mhz"),
}
LOOK_SECONDS = 5.0  # between two looks at a GPU's power and clock


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Look at the first GPU's power (W) and clock (MHz) meanwhile. Yields a dictionary that has
    their medians afterwards; without a GPU it stays empty."""
    seen: list[list[str]] = []
    medians: dict[str, float] = {}
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            seen.append(nvidia_smi(torch.device("cuda", 0), "power.draw", "clocks.sm"))

    looking = threading.Thread(target=look, daemon=True)
    if torch.cuda.is_available():
        looking.start()
    yield medians
    ended.set()
    if looking.ident:
        looking.join()
    for name, values in zip(("watts", "mhz"), zip(*seen)):
        numbers = [float(value) for value in values if value.replace(".", "", 1).isdigit()]
        if numbers:
            medians[name] = statistics.median(numbers)


def training(folder: Path, options: list[str]) -> list[dict]:
    """Run the preset into a new folder. Returns its metrics. Raises RuntimeError with its output."""
    command = [sys.executable, "-m", "train", str(PRESET), f"--run.folder={folder}", *options]
    harness.printed(command, cwd=ROOT)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def steps_of(metrics: list[dict]) -> list[dict]:
    """Return the lines of training steps after those that compile."""
    return [line for line in metrics if "step_seconds" in line and line["step"] > COMPILING]


def ours(args: argparse.Namespace, work: Path, seed: int) -> dict:
    """Measure a step, then train as many as fit into args.seconds."""
    common = [
        *args.options,
        f"--data.source={args.prepared}",
        f"--data.tokenizer={args.prepared / 'tokenizer.json'}",
        "--data.validation_fraction=0",
        "--metrics.interval=1",
        "--checkpoint.interval=0",
    ]
    short = [f"--training.steps={COMPILING + MEASURED}", "--validation.interval=0"]
    tried = training(work / f"measured-{seed}", [*common, *short])
    seconds = statistics.median(line["step_seconds"] for line in steps_of(tried))
    steps = COMPILING + max(1, round(args.seconds / seconds))
    metrics = training(
        work / f"ours-{seed}",
        [
            *common,
            f"--run.seed={seed}",
            f"--training.steps={steps}",
            f"--validation.interval={steps}",
            f"--validation.steps={batches_of(args.held_out, args.options)}",
            f"--validation.sets=[{{name='given',source='{args.held_out}'}}]",
        ],
    )
    counted = steps_of(metrics)
    took = sum(line["step_seconds"] for line in counted)
    last = counted[-1]
    a_step = last["tokens_seen"] / last["step"]
    found = {
        "bits_per_byte": next(
            line["validation_bits_per_byte"]
            for line in reversed(metrics)
            if "validation_bits_per_byte" in line
        ),
        "seconds": took,
        "steps": last["step"],
        "tokens": last["tokens_seen"],
        "epochs": last["tokens_seen"] / tokens_of(args.prepared),
        "tokens_per_second": a_step * len(counted) / took,
        "peak_gib": max(line["memory_gib"] for line in counted),
    }
    if "mfu" in last:
        found["mfu"] = statistics.median(line["mfu"] for line in counted)
    return found


def tokens_of(prepared: Path) -> int:
    """Return how many tokens a prepared folder has to train on."""
    manifest = json.loads((prepared / "manifest.json").read_text(encoding="utf-8"))
    return manifest["splits"]["train"]["tokens"]


def batches_of(held_out: str, options: list[str]) -> int:
    """Return how many batches the held-out text is enough for."""
    t = load_config([str(PRESET), *options], 1, 1).training
    tokens = Path(held_out).stat().st_size // BYTES_PER_TOKEN
    return max(1, tokens // (t.global_batch_size * t.seq_len))


def rivals(args: argparse.Namespace, work: Path, seed: int) -> dict:
    """Run autoresearch's train.py as it is."""
    program = "from lab.bench.device import rival; rival.main()"
    settings = {
        "seconds": args.seconds,
        "seed": seed,
        "train": args.text,
        "held_out": args.held_out,
        "folder": args.rival,
    }
    command = [sys.executable, "-c", program, json.dumps(settings)]
    # its tokenizer is trained once
    home = work / f"home-{digest(args.text)}-{digest(args.held_out)}"
    home.mkdir(exist_ok=True)
    its_own = {"HOME": str(home), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    return summary_of(harness.printed(command, cwd=work, env=os.environ | its_own))


def summary_of(printed: str) -> dict:
    """Return the numbers that autoresearch prints at its end, by our names."""
    summary = printed[printed.rindex("val_bpb:") :]  # what libraries print before may be a version
    lines = re.findall(r"^(\w+):\s+([\d.]+)", summary, re.M)
    found = {name: float(value) for name, value in lines}
    steps = int(found["num_steps"])
    tokens = found["total_tokens_M"] * 1e6
    return {
        "bits_per_byte": found["val_bpb"],
        "seconds": found["training_seconds"],
        "steps": steps,
        "tokens": tokens,
        "epochs": float(re.findall(r"epoch: (\d+)", printed)[-1]),  # the one that it is in
        "tokens_per_second": tokens * (1 - COMPILING / steps) / found["training_seconds"],
        "peak_gib": found["peak_vram_mb"] / 1024,
        "mfu": found["mfu_percent"] / 100,
    }


def digest(path: str) -> str:
    """Return what tells a text from others, for the name of a folder."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]


def prepare(args: argparse.Namespace, work: Path) -> Path:
    """Tokenize the text, once for all commands with this folder. Returns the prepared folder."""
    folder = work / f"prepared-{digest(args.text)}"
    options = ["--bpe-vocab-size=8192", "--validation-fraction=0", "--out", str(folder)]
    command = [sys.executable, "-m", "data.prepare", "--source", args.text, *options]
    if not (folder / "manifest.json").exists():
        subprocess.run(command, cwd=ROOT, check=True)
    return folder


def row(run: dict) -> list[str]:
    """Return a line of the table."""
    run = run | {"millions_of_tokens": run["tokens"] / 1e6}
    return [how.format(run[name]) if name in run else "-" for how, name in COLUMNS.values()]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--text", required=True, help="JSON lines to train on")
    parser.add_argument("--held-out", required=True, help="JSON lines to validate on")
    parser.add_argument("--seconds", type=float, default=300.0, help="of steps, for each run")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="a run of each trainer for each"
    )
    parser.add_argument("--rival", help="a clone of karpathy/autoresearch")
    parser.add_argument("--only", choices=TRAINERS, help="run this trainer alone")
    parser.add_argument("--work", default="runs/in_300s", help="folder for the runs")
    args, args.options = parser.parse_known_args()
    for name in ("text", "held_out"):
        path = Path(getattr(args, name)).resolve()
        if not path.is_file():
            raise InputError(f"--{name.replace('_', '-')} {path}: there is no such file")
        setattr(args, name, str(path))
    load_config([str(PRESET), *args.options], 1, 1)
    if args.only == "autoresearch" and not args.rival:
        raise InputError("--only autoresearch: name its clone by --rival FOLDER")
    if args.rival and not torch.cuda.is_available():
        raise InputError("--rival: autoresearch's train.py needs a GPU: leave it out")
    if args.rival and not (Path(args.rival) / "prepare.py").is_file():
        raise InputError(
            f"--rival {args.rival}: there is no prepare.py: name a clone of autoresearch"
        )
    work = Path(args.work).resolve()
    for seed in args.seeds:
        if (work / f"ours-{seed}").exists() and args.only != "autoresearch":
            raise InputError(
                f"{work} has a run of seed {seed}: give other --seeds or another --work"
            )
    work.mkdir(parents=True, exist_ok=True)
    run(args, work)


def run(args: argparse.Namespace, work: Path) -> None:
    """Run each trainer with each seed; print and write the table after each run."""
    trainers: dict[str, Callable[[int], dict]] = {}
    if args.only != "autoresearch":
        args.prepared = prepare(args, work)
        trainers["plumbline"] = partial(ours, args, work)
    if args.rival and args.only != "plumbline":
        args.rival = str(Path(args.rival).resolve())
        trainers["autoresearch"] = partial(rivals, args, work)
    done: list[dict] = []
    for seed in args.seeds:
        for name, train in trainers.items():
            began = time.perf_counter()
            with watched() as medians:
                found = train(seed)
            done.append({"trainer": name, "seed": seed, **found, **medians})
            report(args, done, time.perf_counter() - began)


def report(args: argparse.Namespace, done: list[dict], took: float) -> None:
    """Print and write what is done. took: seconds of the last run, with its start."""
    text = Path(args.text).stat().st_size
    notes = (
        f"{args.seconds:g} s of steps each, {text / 1e6:,.0f} MB of text; the last run took "
        f"{took:.0f} s in all. MFU: each by its own count of FLOPs, of the GPU's data sheet "
        "(autoresearch: of an H100's). Peak: what ours holds in the allocator; autoresearch's tensors. "
        "Epochs: how often ours saw the text; the one that autoresearch was in. W, MHz: medians of the "
        "whole run, with its start and validation."
    )
    if not args.rival:
        notes += " Without --rival: ours alone."
    title = "What is learned in the time"
    harness.report(title, list(COLUMNS), list(map(row, done)), notes, args.json, {"runs": done})
