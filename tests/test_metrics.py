"""Reports of a run: the FLOPs formula, MFU, metrics.jsonl over a restart, TensorBoard, the log, the
profiler."""

import contextlib
import errno
import gzip
import json
import logging
import math
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from configs import schema
from configs.schema import InputError, Parallelism, Run
from data import splice
from models import llama
from models.terms import AuxiliaryTerms
from parallelisms import mesh as meshes
from tests.programs import PYTHON, finished
from tests.ranks import run_ranks
from tests.runs import lines_of
from training import log
from training.lines import Lines
from training.loss import IGNORE
from training.meter import Meter
from training.metrics import (
    FILE,
    PEAK_TFLOPS,
    MetricsWriter,
    in_bytes,
    model_summary,
    peak_flops,
)
from training.profiler import profiler

SMALL = {"dim": 22, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "head_dim": 10, "hidden_dim": 26}
ARGS = llama.Args(**llama.NUMBERS.flavors["debug"] | SMALL)
QUIET = schema.Metrics(tensorboard=False)


@pytest.fixture
def logger(tmp_path: Path) -> Iterator[logging.Logger]:
    """Yield the log of rank 0 in tmp_path; afterwards logging is as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield log.setup(tmp_path, 0)
    for handler in root.handlers[:]:
        if isinstance(handler, logging.FileHandler):
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def log_of(folder: Path, rank: int = 0) -> str:
    return (folder / "logs" / f"rank-{rank:05d}.log").read_text()


# FLOPs and MFU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_is_what_torch_counts(tied: bool) -> None:
    args = replace(ARGS, vocab_size=37, tied_embeddings=tied)
    batch, seq_len = 3, 14
    with torch.device("meta"):
        model = llama.FAMILY.build(args)
        tokens, positions = torch.zeros(batch, seq_len, dtype=torch.int64), torch.arange(seq_len)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, positions).sum().backward()
    assert (
        counter.get_total_flops() == llama.FAMILY.flops_per_token(args, seq_len) * batch * seq_len
    )


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("cpu", None),
    ],
)
def test_no_peak_rather_than_a_wrong_one(name: str, tflops: int | None) -> None:
    assert peak_flops(name) == (None if tflops is None else tflops * 1e12)
    assert peak_flops(name, dtype=torch.float32) is None, "the table is of bfloat16"
    assert sum(pattern == name for pattern, _, _ in PEAK_TFLOPS) <= 1


# metrics.jsonl ------------------------------------------------------------------------------------


def test_floats_read_back_bitwise_and_infinities_are_json(tmp_path: Path) -> None:
    numbers = {"loss": 0.1 + 0.2, "lr": 1e-300, "grad_norm": math.pi * 1e10, "tokens_seen": 2**60}
    broken = {"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf}
    with MetricsWriter(QUIET, tmp_path, True, start=0, steps=9) as metrics:
        metrics.log(1, numbers)
        assert lines_of(tmp_path) == [{"step": 1} | numbers], (
            "a line is on disk as soon as it is logged"
        )
        metrics.log(2, broken)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    strict = json.loads(lines[1], parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert strict == {"step": 2, "loss": "nan", "grad_norm": "inf", "lr": "-inf"}
    assert math.isnan(float(strict["loss"]))


def test_a_restart_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    with MetricsWriter(QUIET, tmp_path, True, start=0, steps=9) as metrics:
        for step in range(1, 8):
            metrics.log(step, {"loss": float(step)})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 8, "lo')  # killed while writing
    with MetricsWriter(QUIET, tmp_path, True, start=4, steps=9) as metrics:
        for step in range(5, 10):
            metrics.log(step, {"loss": -float(step)})
    assert lines_of(tmp_path) == [
        {"step": s, "loss": float(s if s <= 4 else -s)} for s in range(1, 10)
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]

    file = path.stat().st_ino
    MetricsWriter(QUIET, tmp_path, True, start=9, steps=9).close()
    assert path.stat().st_ino == file, "nothing to forget: not written again"
    MetricsWriter(QUIET, tmp_path, True, start=0, steps=9).close()
    assert len(lines_of(tmp_path)) == 9, "a start that logs no step changes nothing"
    with MetricsWriter(QUIET, tmp_path, True, start=0, steps=9) as metrics:
        metrics.log(1, {"loss": 3.0})
    assert lines_of(tmp_path) == [{"step": 1, "loss": 3.0}], "a fresh start in the same folder"


def test_mfu_is_achieved_over_peak_and_absent_without_a_peak(
    tmp_path: Path, logger: logging.Logger
) -> None:
    for peak in (None, 312e12):
        with MetricsWriter(QUIET, tmp_path, True, start=0, steps=9, peak=peak) as metrics:
            metrics.log(1, {"tflops_per_device": 156.0})
        assert lines_of(tmp_path)[0].get("mfu") == (None if peak is None else 0.5)
    first, second = log_of(tmp_path).splitlines()
    assert "156 TFLOP/s" in first and "MFU" not in first
    assert "MFU 50.0%" in second and "TFLOP/s" not in second


def test_wandb_gets_all_options_and_the_same_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    wandb = SimpleNamespace(init=lambda **how: calls.append(how) or mock.Mock())
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    secret = "https://me:hunter2@example.org/x"
    (tmp_path / "config.toml").write_text(f'[training]\nsteps = 9\n[data]\nsource = "{secret}"\n')
    for start in 0, 4:
        MetricsWriter(schema.Metrics(wandb_project="p"), tmp_path, True, start, steps=9).close()
    first, second = calls
    assert first == second and first["id"] and first["resume"] == "allow"
    assert first["config"]["training"] == {"steps": 9}
    assert "hunter2" not in str(first)


def test_wandb_that_is_missing_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if not installed
    with pytest.raises(InputError, match="pip install wandb"):
        MetricsWriter(schema.Metrics(wandb_project="p"), tmp_path, True, start=0, steps=1)


# TensorBoard --------------------------------------------------------------------------------------


def test_tensorboard_shows_one_series_over_a_restart(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = schema.Metrics()
    for start, last, sign in ((0, 7, 1), (4, 9, -1)):
        with MetricsWriter(cfg, tmp_path, True, start=start, steps=9) as metrics:
            for step in range(start + 1, last + 1):
                metrics.log(step, {"loss": float(sign * step)})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (s, s if s <= 4 else -s) for s in range(1, 10)
    ]


# The console and the log --------------------------------------------------------------------------


AT_A_TERMINAL = """
import logging, sys
from training import log
logger = log.setup(sys.argv[1], 0)
logger.info("step 3/9  " + "loss 1.5000  " * 12)
logger.info(" ".join(["words"] * 40) + " /a/path/" + "x" * 120)
logger.warning("odd")
logger.error("wrong")
"""


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_gets_lines_that_fit_and_colours(tmp_path: Path, no_color: str) -> None:
    near, far = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "NO_COLOR": no_color}
    with subprocess.Popen(
        [sys.executable, "-c", AT_A_TERMINAL, str(tmp_path)],
        cwd=Path(__file__).parent.parent,
        stdout=far,
        env=environment,
    ) as process:
        os.close(far)
        text = b""
        with contextlib.suppress(OSError):  # Linux: at the end of a terminal
            while part := os.read(near, 4096):
                text += part
    os.close(near)
    assert process.returncode == 0
    step, *lines = text.decode().replace("\r", "").splitlines()
    assert step.endswith("loss 1.5000  "), "a step is one line, however long"
    words = [line for line in lines if "words" in line]
    assert len(words) == 3 and all(len(line) <= 100 for line in words)
    assert any(line.strip() == "/a/path/" + "x" * 120 for line in lines), "a path stays whole"
    coloured = [line for line in lines if line.startswith("\033[")]
    assert [line[:5] for line in coloured] == ([] if no_color else ["\033[33m", "\033[31m"])
    assert "\033" not in log_of(tmp_path)


SPEAK = """
import logging, sys, warnings
from training import log
logger = log.setup(sys.argv[1], 0)
logger.info("hello")
warnings.warn("something odd")
warnings.warn("DTensor random operators may not have complete support on cpu device mesh")
logging.getLogger("torch.distributed.tensor._redistribute").warning("While redistributing from %s", "a to b")
logging.getLogger("another.library").info("chatter")
logger = log.setup(sys.argv[1], 1)
logger.info("from the other")
logger.error("it failed")
raise RuntimeError("the end")
"""


def test_who_says_what_where(tmp_path: Path) -> None:
    """Runs in a separate process, since pytest captures warnings and logging itself."""
    done = finished(PYTHON, "-c", SPEAK, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("RuntimeError: the end\n")
    for text in (done.stdout, log_of(tmp_path)):
        assert "hello" in text and "something odd" in text
        assert not any(
            noise in text for noise in ("DTensor random", "While redistributing", "chatter")
        )
    assert "from the other" not in done.stdout and "from the other" in log_of(tmp_path, rank=1)
    assert "rank 1: it failed" in done.stdout, "an error of any rank goes to the console"
    assert done.stderr in log_of(tmp_path, rank=1) and "Traceback" not in done.stdout, (
        "a crash is in the file as well"
    )


def test_a_run_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"run.folder = .*file.* cannot be written"):
        log.setup(tmp_path / "file" / "run", 0)
    os.mkfifo(tmp_path / "pipe")  # which would wait for a reader
    for name in ("pipe", "."):
        with pytest.raises(InputError, match="is no file that can be written: move it away"):
            Lines(tmp_path / name, 0)


# The summary, memory, the profiler ----------------------------------------------------------------


def summary_on_this_rank() -> str:
    from torch.distributed.fsdp import fully_shard

    mesh = meshes.open_mesh(Run(device="cpu"), Parallelism(), 2)
    model = nn.Linear(256, 1024, bias=False)  # 262,144 parameters: 1 MiB of float32
    fully_shard(model, mesh=mesh.fsdp_mesh)
    optimizers = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    batch = schema.Training(seq_len=512, global_batch_size=16)
    batches = [
        batch.model_copy(update={"local_batch_size": size}) for size in (schema.Derived(8), 2)
    ]
    rows = zip(batches, optimizers, strict=True)
    return "\n".join(
        model_summary(llama.FAMILY, ARGS, model, mesh, torch.bfloat16, batch, optimizer)
        for batch, optimizer in rows
    )


def test_the_summary_counts_what_is_sharded() -> None:
    adamw, sgd = run_ranks(2, summary_on_this_rank)[1].split("\nmodel: ")
    assert (
        f"{llama.FAMILY.parameters(ARGS):,} parameters; 3 layers of width 22, 6 heads on 2 key/value heads"
        in adamw
    )
    assert "dp_replicate 1 x dp_shard 2 x tp 1 = 2 processes on cpu, computing in bfloat16" in adamw
    # bytes of the whole model's weights: in a pipeline a rank's own are only a part of them
    whole = 4 * llama.FAMILY.parameters(ARGS)
    assert (
        f"2 optimizer moments take {in_bytes(4 * whole, 1024)} in all, 2 MiB on this rank" in adamw
    )
    assert f"0 optimizer moments take {in_bytes(2 * whole, 1024)} in all, 1 MiB on this rank" in sgd
    step = "step: 8,192 tokens in 16 sequences of 512; each of 2 data-parallel ranks has"
    assert (
        f"{step} 1 microbatch of 8 (chosen, because training.local_batch_size is not set)" in adamw
    )
    assert sgd.endswith(f"{step} 4 microbatches of 2")


# tracing from the first step on, there is none
@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize("start_step, done", [(1, 5), (2, 5), (3, 4)])
def test_the_trace_has_three_steps_or_those_that_are_left(
    tmp_path: Path, start_step: int, done: int
) -> None:
    with profiler(schema.Profiler(enabled=True), tmp_path, 3, start_step) as profile:
        for step in range(1, done + 1):
            with torch.profiler.record_function(f"work of step {step}"):
                torch.ones(8).sum()
            profile.step()
    events = json.loads(gzip.open(tmp_path / "profile" / "rank-00003.json.gz").read())[
        "traceEvents"
    ]
    found = {
        event["name"]
        for event in events
        if event.get("cat") == "user_annotation" and "work" in event["name"]
    }
    traced = range(start_step, min(start_step + 2, done) + 1)
    assert found == {f"work of step {step}" for step in traced}


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no CUDA")
def test_a_memory_snapshot_without_cuda_is_declined(tmp_path: Path, logger: logging.Logger) -> None:
    with profiler(schema.Profiler(enabled=True, memory_snapshot=True), tmp_path, 0, 1) as profile:
        profile.step()
    assert "only CUDA's allocator keeps a history" in log_of(tmp_path)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank-00000.json.gz"]


# --------------------------------------------------------------------------------------------------
# what a line counts


def test_a_line_is_about_the_steps_since_the_line_before():
    """Two sources with windows of 4 tokens, two of them in a batch; this rank has all of it."""
    mesh = SimpleNamespace(
        size=2,
        device=torch.device("cpu"),
        sum_over_tokens=lambda x: x,
        sum_over_pp=lambda x: x,
        sum_over_ranks=lambda x: x,
        gather=lambda x: [x],
    )
    corpora = [(name, name, range(101), [[0, 1.0]]) for name in ("web", "code")]
    order = splice.begin(splice.describe(corpora, seed=0, seq_len=4, global_batch_size=2))
    meter = Meter(mesh, sources=2, tokens_per_step=8, flops_per_token=1e12)

    def step(
        losses: list[list[float]], source: list[int], seconds: float, skipped: bool = False
    ) -> None:
        losses = torch.tensor([losses])  # [1, 2, 4]
        labels = torch.where(losses == 0, IGNORE, 1)
        batch = {"labels": labels, "source": torch.tensor(source)}
        terms = AuxiliaryTerms(scale=torch.tensor(1.0), tokens=torch.tensor(8))
        terms.report("z_loss", losses.sum())
        mean = losses.mean().item()
        result = SimpleNamespace(losses=losses, loss=mean, skipped=skipped, terms=terms)
        meter.add(batch, result, data_seconds=seconds / 4, step_seconds=seconds * 3 / 4)

    step([[1.0, 2.0, 3.0, 0.0], [5.0, 5.0, 5.0, 5.0]], [0, 1], seconds=1.0)
    step([[4.0, 4.0, 4.0, 0.0], [7.0, 7.0, 7.0, 7.0]], [0, 1], seconds=3.0)
    # its time counts, its losses do not
    step([[9.0] * 4, [9.0] * 4], [0, 1], seconds=4.0, skipped=True)
    meter.reported["late/data/rank-1"] = 0.5
    line = meter.line(3, order, loss=9.0, grad_norm=2.0, lr=0.1)
    assert (line["tokens_per_second"], line["tflops_per_device"], line["data_wait"]) == (
        3.0,
        1.5,
        0.25,
    )
    assert (
        line["step_seconds"] == pytest.approx(8 / 3)
        and line["tokens_seen"] == 24
        and line["late/data/rank-1"] == 0.5
    )
    assert line["z_loss"] == pytest.approx((26 + 40) / 8 / 2)
    assert (line["loss/web"], line["loss/code"]) == (3.0, 6.0)  # 18 nats of 6 tokens, 48 of 8
    assert (
        line["tokens_seen/web"] + line["tokens_seen/code"] == 24
        and line["epochs/web"] == line["tokens_seen/web"] / 100
    )

    step([[1.0] * 4, [1.0] * 4], [1, 1], seconds=2.0)
    line = meter.line(4, order, loss=1.0, grad_norm=2.0, lr=0.1)
    assert line["tokens_per_second"] == 4.0 and line["loss/code"] == 1.0
    assert "loss/web" not in line and "late/data/rank-1" not in line, (
        "what the line before has told"
    )
    assert (meter.first_loss, meter.last_loss) == (26 / 8, 1.0)


def test_lines_that_a_full_disk_has_kept_out_are_named(tmp_path, caplog, monkeypatch):
    def full(lines: Lines) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Lines, "_write", full)
    lines = Lines(tmp_path / FILE, 0)
    for step in (7, 8):
        lines.add({"step": step})
    lines.close()
    assert "not in it: the last 2 lines, of steps 7 to 8" in caplog.text


def test_a_console_that_goes_away_is_said_once(capsys):
    """As behind `| head -1`: neither a traceback for each line, nor the end of the run."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        handler = log._AboveBar(stream)
        for text in ("one", "two"):
            handler.emit(logging.makeLogRecord({"msg": text}))
    said = "the console cannot be written (Broken pipe): the run goes on, and its lines are in its logs"
    assert capsys.readouterr().err == f"{said}\n"
