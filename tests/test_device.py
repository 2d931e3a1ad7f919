"""`python -m lab.bench device.*`: its checks on a CPU, and what it reads of a GPU on made-up input."""

import argparse
import itertools
import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import train
from checkpoint import state
from configs.load import load_config
from lab.bench import delta_net, idle
from lab.bench.__main__ import BENCHES, FILES
from lab.bench.__main__ import main as run_bench
from lab.bench.device import checks, in_300s, measure, planned, rival, shared
from models import moe
from models.kernels import document_attention as masked
from parallelisms import delta_kernel
from tests import flash_double
from tests.ranks import run_ranks
from tools.plan.arguments import arguments as plan_arguments
from tools.plan.command import read_inputs
from tools.plan.device import load_device
from training import counted

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent

# --------------------------------------------------------------------------------------------------
# the checks

RUN = {name: check.run for name, check in checks.CHECKS.items()}
# inductor would take 20 s
RUN["compiled"] = checks.trains("--compile.enabled=true", "--compile.backend=aot_eager")


def errors_of(names: list[str], folder: Path) -> dict[str, dict[str, float]]:
    return {name: RUN[name](CPU, folder / name) for name in names}


@pytest.mark.slow
def test_checks_that_no_simulated_gpu_runs_pass_on_a_cpu(tmp_path):
    """tests/test_simulate.py runs the others."""
    seen = run_ranks(1, errors_of, ["compiled", "control", "recorded"], tmp_path)[0]
    wrong = {
        name: checks.failures(errors, checks.CHECKS[name].limit) for name, errors in seen.items()
    }
    assert not any(wrong.values()), wrong


@pytest.mark.slow
def test_the_package_for_gated_delta_nets_is_compared_and_timed(monkeypatch):
    """As on a GPU that has it, with a double of the package; the negative control is a wrong scale."""
    monkeypatch.setattr(delta_kernel, "is_flash", lambda *_: True)
    monkeypatch.setattr(checks, "DOCUMENTS", (3, 1, 14, 5, 13))
    with flash_double.instead_of_fla():
        errors = checks.delta_rule(CPU, Path())
        rows, _ = delta_net.kernels(1, tokens=8)
        limit = checks.CHECKS["delta_rule"].limit
        assert len(errors) == 16 and not checks.failures(errors, limit), errors
        assert [row[1] for row in rows] == ["reference", "flash-linear-attention"] * 2
        real = flash_double.by_pieces
        monkeypatch.setattr(flash_double, "by_pieces", lambda q, *rest: real(q * 2, *rest))
        assert checks.failures(checks.delta_rule(CPU, Path()), limit)


def on_a_shared_gpu(brings_back: bool) -> dict[str, float]:
    """The check of a pipeline as on a GPU that its ranks share; here the GPU is the CPU. Received
    tensors may be left on the host, which is a mistake."""
    there_is_no_gpu = mock.patch.multiple(torch.cuda, set_device=lambda _: None, init=lambda: None)
    copies = shared.OnTheWay.wait
    wait = copies if brings_back else lambda staged, *limit: staged.work.wait(*limit)
    with there_is_no_gpu, shared.shared_gpu(), mock.patch.object(shared.OnTheWay, "wait", wait):
        assert os.environ["LOCAL_RANK"] == "0"
        errors = checks.CHECKS["pipeline"].run(CPU, Path())
        assert dist.get_backend() == "gloo"
        return errors


@pytest.mark.parametrize("brings_back", [True, False], ids=["", "negative control"])
def test_ranks_that_share_a_gpu_send_through_the_host(brings_back):
    seen = run_ranks(2, on_a_shared_gpu, brings_back)
    wrong = [checks.failures(errors, checks.CHECKS["pipeline"].limit) for errors in seen]
    assert any(wrong) != brings_back, wrong


def test_a_rank_of_a_check_says_what_it_raised(tmp_path, monkeypatch):
    def fails(*_: object) -> dict[str, float]:
        raise ValueError("the reason")

    monkeypatch.setitem(checks.CHECKS, "fails", checks.Check(fails, 0, "", 2))
    assert checks.as_rank("fails", tmp_path) == 1
    assert json.loads((tmp_path / "0.json").read_text()) == "rank 0: ValueError('the reason')"


@pytest.mark.slow
def test_the_command_starts_the_ranks_of_a_check():
    too_large, errors = checks.apart("pipeline")
    assert not too_large and errors["gradients"] < checks.ROUNDING


MISTAKES = {  # check -> a mistake that it must see
    # the loss is divided by a wrong number of tokens
    "float32": lambda: mock.patch.object(counted, "IGNORE", 3),
    # a limit that lets everything pass
    "control": lambda: mock.patch.object(checks, "ROUNDING", 10.0),
    "sampling": lambda: mock.patch.object(
        checks, "sample", lambda *_, cache, **__: [int(cache)] * 25
    ),
    "documents": lambda: mock.patch.object(masked, "document_attention", lambda q, k, v, _: q),
    # a load that changes nothing
    "checkpoint": lambda: mock.patch.object(state, "put_back", lambda *_: None),
    "experts": lambda: mock.patch.object(
        moe, "grouped_product", lambda rows, w, counts: rows @ w[0].T
    ),
    "recorded": lambda: mock.patch.object(
        train, "clip_grad_norm", mock.Mock(side_effect=map(torch.tensor, itertools.count(1.0)))
    ),
}


def errors_with_a_mistake(folder: Path) -> dict[str, dict[str, float] | str]:
    seen = {}
    for name, mistake in MISTAKES.items():
        with mistake():
            try:
                seen[name] = RUN[name](CPU, folder / name)
            except Exception as error:  # a mistake may also end it
                seen[name] = repr(error)
    return seen


@pytest.mark.slow
def test_negative_controls_each_check_sees_a_mistake(tmp_path):
    seen = run_ranks(1, errors_with_a_mistake, tmp_path)[0]
    for name, errors in seen.items():
        ended = isinstance(errors, str)
        assert ended or checks.failures(errors, checks.CHECKS[name].limit), (
            f"{name} sees nothing: {errors}"
        )
    assert not isinstance(seen["float32"], str) and not isinstance(seen["checkpoint"], str), seen


def test_an_error_that_is_no_number_fails():
    errors = {"a": float("nan"), "b": 1e-6, "c": float("inf"), "d": 2e-5}
    assert checks.failures(errors, 1e-5) == ["a nan", "c inf", "d 2e-05"]


# --------------------------------------------------------------------------------------------------
# the planner's device


def test_the_planner_reads_the_numbers_that_are_written(tmp_path):
    with mock.patch.object(measure, "peak_flops", lambda _: 989e12):
        rates = measure.Rates(722e12, 480e12, 260e12, 312e12, 4.1e12, 55e9)
        device = measure.as_device("NVIDIA H200", 139.8, rates)
    file = tmp_path / "out.toml"
    file.write_text(measure.as_toml(device))
    assert load_device(str(file)) == device
    flags, rest = plan_arguments(["configs/llama_debug.toml", "--gpus=1", f"--device={file}"])
    _, inputs = read_inputs(flags, rest)
    arrived = inputs.device
    assert arrived.peak == 989e12 and arrived.memory_gib == 139.8 and arrived.host_gb_per_s == 55
    assert arrived.matmul_efficiency == pytest.approx(722 / 989)
    assert arrived.attention_efficiency == pytest.approx(260 / 989)  # documents, and "flash"
    assert arrived.fast_attention_efficiency == pytest.approx(480 / 989)
    assert arrived.narrow_attention == pytest.approx(0.65)
    # the latter from the table
    assert arrived.memory_gb_per_s == pytest.approx(5125) and arrived.link_gb_per_s == 450


# ------------------------------------------------------------------------- what is read of a GPU,
# on made-up input


def test_idle_share_of_overlapping_kernels():
    # nothing from 20 to 30
    assert idle.idle_share([(30, 40), (0, 10), (5, 20), (6, 7)], 40) == pytest.approx(0.25)
    assert idle.idle_share([(0, 10)], 10) == 0
    assert idle.idle_share([], 0) is None


@pytest.mark.slow
@pytest.mark.cap(300)
def test_planned_and_run(tmp_path):
    """One of two configurations that wait for each other is wrong, and the other is never tried."""
    small = "--model.n_layers=1 --training.param_dtype=float32 --training.seq_len=64"
    wrong = f"{small} --model.n_layers=0"
    path = tmp_path / "planned.json"
    planned.measured([{"small": small, "wrong": wrong}], 250, "planner", str(path))
    written = json.loads(path.read_text())
    ours, theirs = written["rows"]
    assert ours[1].endswith(" ms") and ours[2].endswith(" ms") and ours[3].endswith("%"), ours
    assert "n_layers" in theirs[1] and "n_layers" in theirs[2] and not any(theirs[3:]), theirs
    assert written["numbers"]["answers"]["small"][0]["seconds"] > 0
    assert "1 planned and run; error of seconds: median" in written["notes"]


def subjects() -> tuple[dict, tuple]:
    """Return the subjects that are measured with a model, at a size that takes a second."""
    tiny = " ".join([*checks.MODEL, "--training.param_dtype=float32"])
    measure.STEPS["1B"]["cpu"] = tiny
    measure.ask_plan = lambda options: {"live": 1.5, "needed": 2.0}
    measure.close_mesh = lambda: None
    return (
        measure.one_step("1B"),
        measure.rates_of(CPU, 128),
    )


@pytest.mark.slow
def test_what_is_measured_with_a_model():
    step, rates = run_ranks(1, subjects)[0]
    row = dict(zip(step["columns"], step["rows"][0], strict=True))
    assert (
        row["configuration"] == "1B (small)" and row["layers"] == "3" and row["plan GiB"] == "1.50"
    )
    assert all(rate > 0 for rate in rates)


def test_every_benchmark_that_is_named_exists():
    """In documents, docstrings and comments; and each that the front lists has a `main`."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tools/**/*.toml")]
    for package in ("configs", "lab", "tools", "training"):
        files += ROOT.glob(f"{package}/**/*.py")
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    named = set(re.findall(r"python -m\s+lab\.bench\s([a-z][\w.]+)", text))
    assert named == BENCHES.keys()
    for name in BENCHES:
        assert find_spec(f"lab.bench.{FILES.get(name, name)}"), name


@pytest.mark.parametrize(
    "arguments, code, sentence",
    [
        ([], 0, "  device.planned  planned memory"),
        (
            ["nonsense"],
            2,
            "nonsense: no such benchmark; there are attention, delta_net, device.checks, ",
        ),
        (["attention", "--help"], 0, "usage: python -m lab.bench attention"),
        (["attention", "--shapes=4,5"], 2, "4,5 is no shape; one is "),
        (["attention", "--json=no/such/x.json"], 2, "there is no folder for no/such/x.json"),
    ],
)
def test_the_front_lists_and_runs_benchmarks(arguments, code, sentence, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)  # which it changes
    try:
        ended = run_bench(arguments)
    except SystemExit as error:  # of argparse
        ended = error.code
    said = capsys.readouterr()
    assert ended == code
    assert sentence in said.out + said.err


def test_every_step_is_a_configuration():
    """No GPU has run those of a GPU here."""
    for kinds in measure.STEPS.values():
        for line in kinds.values():
            load_config(line.split(), 1, 1)


# --------------------------------------------------------------------------------------------------
# 300 seconds

TINY = (
    "--model.dim=32 --model.n_layers=1 --model.n_heads=1 --model.n_kv_heads=1 --model.head_dim=32 "
    "--model.hidden_dim=64 --training.seq_len=128 --training.global_batch_size=2 "
    "--training.local_batch_size=2 --compile.enabled=false --run.device=cpu"
)


def written(path: Path, sources: list[Path]) -> Path:
    """Write texts as JSON lines."""
    texts = [source.read_text(encoding="utf-8") for source in sources]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.cap(240)
def test_what_is_learned_in_a_second(tmp_path):
    sources = sorted(ROOT.glob("*/*.py"))
    words = ["--text", str(written(tmp_path / "train.jsonl", sources[4:]))]
    words += ["--held-out", str(written(tmp_path / "held_out.jsonl", sources[:4]))]
    words += ["--work", str(tmp_path / "work"), "--json", str(tmp_path / "out.json")]
    assert not run_bench(["device.in_300s", *words, "--seconds=1", *TINY.split()])
    (found,) = json.loads((tmp_path / "out.json").read_text())["numbers"]["runs"]
    assert 1 < found["bits_per_byte"] < 8
    assert found["tokens"] == found["steps"] * 2 * 128
    run = tmp_path / "work" / "ours-0"
    assert f"steps = {found['steps']}\n" in (run / "config.toml").read_text()
    assert found["steps"] > in_300s.COMPILING + 1  # by the time that a step took


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--text=no.jsonl"], "no.jsonl: there is no such file"),
        (["--rival=."], "train.py needs a GPU"),
        (["--only=autoresearch"], "name its clone by --rival"),
        (["--work=USED"], "has a run of seed 0: give other --seeds"),
        (["--training.stepz=3"], "training.stepz: no such option"),
    ],
)
def test_what_the_300_seconds_refuse(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = written(tmp_path / "text.jsonl", [ROOT / "train.py"])
    given = [f"--text={text}", f"--held-out={text}", f"--work={tmp_path / 'new'}", *words]
    (tmp_path / "used" / "ours-0").mkdir(parents=True)
    given = [word.replace("USED", str(tmp_path / "used")) for word in given]
    assert run_bench(["device.in_300s", *given]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("only", [None, *in_300s.TRAINERS])
def test_which_trainers_run(only, tmp_path, monkeypatch):
    ran = []
    args = argparse.Namespace(only=only, rival=str(tmp_path), seeds=[0])
    monkeypatch.setattr(in_300s, "prepare", lambda args, work: work)
    monkeypatch.setattr(in_300s, "ours", lambda *_: ran.append("plumbline") or {})
    monkeypatch.setattr(in_300s, "rivals", lambda *_: ran.append("autoresearch") or {})
    monkeypatch.setattr(in_300s, "report", lambda *_: None)
    in_300s.run(args, tmp_path)
    assert ran == ([only] if only else in_300s.TRAINERS)


def test_what_autoresearch_prints_is_read():
    printed = """step 00953 (100.0%) | loss: 2.8 | mfu: 39.8% | epoch: 4 | remaining: 0s
---
val_bpb:          0.997900
training_seconds: 300.1
total_seconds:    325.9
peak_vram_mb:     45060.2
mfu_percent:      39.80
total_tokens_M:   499.6
num_steps:        953
num_params_M:     50.3
depth:            8
"""
    found = in_300s.summary_of(printed)
    assert found["bits_per_byte"] == 0.9979
    assert found["epochs"] == 4
    assert found["steps"] == 953 and found["tokens"] == 499.6e6
    assert found["tokens_per_second"] == pytest.approx(499.6e6 * 942 / 953 / 300.1)


def test_autoresearchs_own_files_find_our_texts(tmp_path, monkeypatch):
    """With a prepare.py that has what rival.py sets and calls."""
    pytest.importorskip("pyarrow")
    folder = tmp_path / "clone"
    folder.mkdir()
    data = tmp_path / "home"
    (folder / "prepare.py").write_text(
        f"DATA_DIR = {str(data)!r}\nEVAL_TOKENS = 10**9\nTIME_BUDGET = 300\n"
        "def train_tokenizer():\n    pass\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("kernels", "prepare"):  # which get_ready imports
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    texts = written(tmp_path / "texts.jsonl", [ROOT / "train.py", ROOT / "README.md"])
    settings = {"folder": str(folder), "train": str(texts), "held_out": str(texts), "seconds": 5}
    prepare = rival.get_ready(settings)
    import pyarrow.parquet

    for name in (rival.TRAINING, rival.VALIDATION):
        column = pyarrow.parquet.read_table(data / name).column("text").to_pylist()
        assert column == [(ROOT / file).read_text() for file in ("train.py", "README.md")]
    assert prepare.TIME_BUDGET == 5 and prepare.EVAL_TOKENS == texts.stat().st_size // 4
    from kernels import get_kernel

    assert get_kernel("any").flash_attn_interface.flash_attn_func is rival.attend
