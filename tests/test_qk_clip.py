"""QK-clip: the logits that are measured, what a step does to them, and each mesh against one process."""

import json
import math

import pytest
import torch

import train
from configs.load import load_config
from parallelisms import qk_clip
from tests import parity
from tests.ranks import run_ranks
from tests.runs import (
    ADAMW,
    CONTEXT_MESHES,
    EXPERT_MESHES,
    MESHES,
    ULYSSES,
    as_typed,
    run,
    tiny_run,
)
from tests.steps import apart
from tools.parity import in_memory
from tools.plan.repeat import traced

MUON = [*ADAMW, "--optimizer.kind=muon", "--optimizer.ns_dtype=float64", parity.FLOAT64]
# below the logits that a model has with its first weights
CLIPPED = "--optimizer.qk_clip=0.01"
DEEPSEEK = parity.DEEPSEEK


def largest_logits(q: torch.Tensor, k: torch.Tensor) -> list[float]:
    """Return the largest causal logit of each head, one product after another. q [B, T, H, E],
    k [B, T, K, E]."""
    found = []
    for head in range(q.shape[2]):
        shared = head * k.shape[2] // q.shape[2]
        logits = []
        for b in range(len(q)):
            products = q[b, :, head] @ k[b, :, shared].T / math.sqrt(q.shape[-1])
            logits += [products[i, : i + 1].max().item() for i in range(len(products))]
        found.append(max(logits))
    return found


def before_and_after(options: list[str]) -> tuple[list[float], list[float], list[float]]:
    """Return the logits of the first layer's heads as they were measured, and as they are before
    and after a step that changes weights by QK-clip alone."""
    local = f"--training.local_batch_size={parity.BATCH // 2}"  # two microbatches
    own = ["--optimizer.lr=1e-30", "--optimizer.kind=muon", "--optimizer.ns_dtype=float64"]
    base = parity.options_of_a_family(options)
    cfg = load_config([*base, local, *own, parity.FLOAT64, CLIPPED, *options], 1, 1)
    job = train.build(cfg)
    tokens = torch.randint(parity.VOCAB, (4000,), generator=torch.Generator().manual_seed(0))
    batch = in_memory.batches(cfg, job.mesh, tokens.numpy().astype("uint16"))[0]
    core = next(m for m in job.model.modules() if isinstance(m, qk_clip.MeasuredCore))
    seen = []
    core.core.register_forward_pre_hook(lambda _, args: seen.append(args[:2]))
    measured = []
    rescale = qk_clip.rescale

    def noticed(*args):
        measured.extend(core.largest.tolist())
        rescale(*args)

    train.qk_clip.rescale = noticed
    for _ in range(2):
        train.train_step(job, batch)
    logits = []
    for q, k in (zip(*seen[:2], strict=True), zip(*seen[-2:], strict=True)):
        logits.append(largest_logits(torch.cat(q), torch.cat(k)))
    return measured[: len(logits[0])], *logits


@pytest.mark.parametrize("options", [[], DEEPSEEK], ids=["grouped queries", "latent attention"])
def test_a_step_brings_the_logits_to_the_limit(options):
    measured, before, after = run_ranks(1, before_and_after, options)[0]
    assert measured == pytest.approx(before, rel=1e-12)
    assert max(before) > 0.01
    assert after == pytest.approx([min(logit, 0.01) for logit in before], rel=1e-10)


def planned_peaks(options: list[str]) -> list[int]:
    """Return the planned peaks of memory without and with the measurement."""
    peaks = []
    for clip in ("0", "100"):
        cfg = load_config([*options, f"--optimizer.qk_clip={clip}"], 1, 1)
        peaks.append(traced(cfg, 1, 1, on_gpu=True).peak()[0])
    return peaks


@pytest.mark.slow
def test_selective_checkpointing_keeps_no_products():
    """The products of 512 tokens would be several times as large as everything else."""
    options = [*parity.OPTIONS, *MUON[:-1], "--activation_checkpoint.mode=selective"]
    lengths = ["--training.seq_len=512", "--model.max_seq_len=512", "--model.n_layers=2"]
    without, measuring = apart(planned_peaks, [*options, *lengths])
    assert measuring == pytest.approx(without, rel=0.01)


RUNS = {  # name: (mesh, further options)
    "tp2": ("tp2", []),
    "fsdp2xtp2": ("fsdp2xtp2", []),
    "pp2": ("pp2", []),
    "cp2": ("cp2", []),
    "ulysses": ("cp2", [ULYSSES]),
    "latent, ep2xfsdp2": ("ep2xfsdp2", DEEPSEEK),
    "latent, tp2": ("experts on tp2", DEEPSEEK),
}


def problems_on(name: str, fn=parity.trajectory) -> list[str]:
    mesh, more = RUNS[name]
    ranks, of_mesh, dp_size = (MESHES | CONTEXT_MESHES | EXPERT_MESHES)[mesh]
    of_model = [*MUON, CLIPPED, *(o for o in more if o != ULYSSES)]
    of_numbers = [o for o in of_mesh if o.startswith(parity.CHANGE_THE_MODEL)]
    oracle = parity.oracle_of((*of_model, *of_numbers))
    options = [*MUON, CLIPPED, *more, *of_mesh, parity.seed_of(oracle)]
    results = run_ranks(ranks, fn, options, dp_size)
    return parity.compare(name, parity.whole_model(results), oracle, parity.EXACT)


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.parametrize("name", RUNS)
def test_a_mesh_clips_as_one_process(name):
    assert not problems_on(name)


@pytest.mark.slow
def test_the_largest_logit_is_logged(tmp_path):
    options = [*tiny_run(tmp_path), *MUON, CLIPPED, "--training.steps=3", "--metrics.interval=1"]
    found = {}
    for ranks, more in (1, []), (2, ["--parallelism.pipeline_parallel=2"]):
        folder = tmp_path / str(ranks)
        done = run_ranks(ranks, run, as_typed([*options, *more]), folder)
        assert all(code == 0 for code, _ in done), done
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        found[ranks] = [row["max_logit"] for row in map(json.loads, lines) if "max_logit" in row]
    assert len(found[1]) == 3 and found[1][0] > 0.01
    assert found[2] == pytest.approx(found[1], rel=1e-10)


def each_rank_by_itself(options: list[str], dp_size: int) -> dict:
    """Take the largest logit of a rank's tokens for that of all."""
    real = qk_clip.rescale

    def alone(model, fine, mesh, limit):
        reduce = torch.distributed.all_reduce
        torch.distributed.all_reduce = lambda *_, **__: None
        try:
            real(model, fine, mesh, limit)
        finally:
            torch.distributed.all_reduce = reduce

    train.qk_clip.rescale = alone
    return parity.trajectory(options, dp_size)


@pytest.mark.slow
def test_negative_control_of_the_comparison():
    assert problems_on("cp2", each_rank_by_itself)
