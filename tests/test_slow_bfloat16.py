"""A processor without AVX512-BF16 and AMX multiplies bfloat16 a hundred times slower than float32:
the CPU paths check for it, and a run that asks for bfloat16 all the same gets a warning."""

import os

from configs.cpu import bfloat16_is_fast, bfloat16_slowness

import pytest
import torch

import train
from configs.load import load_config
from parallelisms import dp
from tests.ranks import run_ranks
from tests.runs import SMALL_MODEL
from training.meter import slow_bfloat16

CPU = torch.device("cpu")
MUON = "--optimizer.kind=muon"


@pytest.mark.parametrize(
    ("environment", "fast"),
    [({}, True), ({"ONEDNN_MAX_CPU_ISA": "avx2"}, False), ({"DNNL_MAX_CPU_ISA": "AVX2"}, False)],
)
def test_the_environment_of_onednn_counts(environment, fast, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    for name in "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA":
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert bfloat16_is_fast() == fast


def slow() -> dict[str, object]:
    """Return the choice and the message where oneDNN may use AVX2 alone, as on many laptops."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    cfg = load_config([*SMALL_MODEL, MUON, "--training.param_dtype=auto"])
    job = train.build(cfg)
    asked = ["--training.param_dtype=bfloat16", "--optimizer.ns_dtype=bfloat16"]
    given = load_config([*SMALL_MODEL, MUON, *asked])
    return {
        "weights": dp.param_dtype(cfg.training, CPU),
        "muon": {group.get("ns_dtype") for group in job.optimizer.param_groups},
        "said": slow_bfloat16(cfg, CPU),
        "warned": slow_bfloat16(given, CPU),
        "slowness": bfloat16_slowness(),
    }


def test_auto_takes_float32_and_a_run_that_asks_for_bfloat16_is_told_the_factor():
    found = run_ranks(1, slow)[0]
    assert found["weights"] == torch.float32 and "float32" in found["muon"]
    assert "bfloat16" not in found["muon"] and found["said"] == ""
    start = 'training.param_dtype = "bfloat16" and optimizer.ns_dtype = "bfloat16": this processor'
    assert found["warned"].startswith(start) and "times slower than float32" in found["warned"]
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert found["slowness"] > 5  # oneDNN has read the environment
