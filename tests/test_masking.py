"""Document masking: a packed microbatch computes what each of its documents computes alone, loss
and every gradient.

The oracle is the plain model on one document at a time, without masking. The documents are of prime
lengths, of one token, of a whole window, and end where a window ends; two steps with other
documents each, so that what the first one left compiled or cached meets another table.
"""

import functools
import warnings
from functools import partial

import numpy as np
import pytest
import torch

import train
from configs.load import load_config
from lab.bench.device.checks import attention_errors
from models import llama
from models.kernels import delta_rule  # noqa: F401  registers an operator
from models.kernels import document_attention as masked
from models.kernels.cpu import document_attention as cpu
from parallelisms import blocks
from parallelisms.mesh import world
from tests.ranks import run_ranks
from tests.runs import COMPILED, Count, run, series, tiny_run, whole
from training.loss import IGNORE, linear_cross_entropy

SEQ, VOCAB = 24, 263
ROWS = (  # of two steps: the lengths of the documents of each window
    ((24,), (1, 7, 13, 3), (1, 1, 1, 19, 2), (23, 1), (2, 3, 5, 7, 7), (11, 13), (24,), (17, 7)),
    ((5, 19), (1,) * 24, (24,), (1, 23), (13, 11), (2, 22), (7, 17), (3, 3, 5, 13)),
)
MODEL = (
    "--model.dim=50 --model.n_layers=2 --model.n_heads=8 --model.n_kv_heads=4 --model.head_dim=6 "
    "--model.hidden_dim=44 "
    f"--model.vocab_size={VOCAB} --data.tokenizer=bytes --data.mask_documents=true "
    "--training.param_dtype=float32 "
    f"--training.seq_len={SEQ} --training.global_batch_size=8 --training.steps=2 "
    "--lr_schedule.warmup_steps=0 "
    "--optimizer.kind=sgd --optimizer.lr=0.5 --run.device=cpu"
).split()
VARIANTS = {
    "eager": [],
    "accumulation": ["accumulate"],
    "ac-full": ["--activation_checkpoint.mode=full"],
    "ac-selective": ["--activation_checkpoint.mode=selective", "accumulate"],
    "compile-full": [*COMPILED, "--activation_checkpoint.mode=full"],
}


def batch(step: int) -> dict[str, torch.Tensor]:
    """tokens, labels, positions [8, T], as data/loader.py makes them of windows of these documents."""
    generator = torch.Generator().manual_seed(step)
    window = torch.randint(0, VOCAB, (8, SEQ + 1), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ROWS[step]])
    labels = window[:, 1:].clone()
    labels[:, :-1][positions[:, 1:] == 0] = IGNORE
    labels[::2, -1] = IGNORE  # in every other window the next document begins right after it
    return {"tokens": window[:, :-1].contiguous(), "labels": labels, "positions": positions}


def observe(job: train.Job, step) -> dict:
    """Observe `step(i)` in two steps: losses and norms, and the gathered gradients of the last."""
    seen = {"loss": [], "norm": []}

    def keep_gradients(*_):
        seen["grad"] = {n: whole(p.grad).float().numpy() for n, p in job.model.named_parameters()}

    job.optimizer.register_step_pre_hook(keep_gradients)
    for i in range(len(ROWS)):
        loss, norm = step(i)
        seen["loss"].append(loss)
        seen["norm"].append(norm)
    return seen


def packed(options: list[str], dp_size: int = 1, change=lambda batch: batch) -> dict:
    """The windows through train.build and train.train_step, on this rank of a mesh."""
    warnings.simplefilter("ignore")
    micro = 1 + ("accumulate" in options)
    options = [o for o in options if o != "accumulate"]
    local = f"--training.local_batch_size={8 // dp_size // micro}"
    job = train.build(load_config([*MODEL, local, *options], world().size, world().local_size))

    def step(i: int) -> tuple[float, float]:
        rows = slice(8 // dp_size * job.mesh.dp_rank, 8 // dp_size * (job.mesh.dp_rank + 1))
        shape = micro, 8 // dp_size // micro, SEQ
        result = train.train_step(
            job, {key: x[rows].view(shape) for key, x in change(batch(i)).items()}
        )
        return result.loss, result.grad_norm

    return observe(job, step)


def alone(options: list[str]) -> dict:
    """The oracle: the plain model on each document by itself, without masking."""
    job = train.build(load_config([*MODEL, *options]))

    def step(i: int) -> tuple[float, float]:
        rows = batch(i)
        counted = (rows["labels"] != IGNORE).sum()
        total = 0.0
        for row, lengths in enumerate(ROWS[i]):
            tokens, labels = (rows[key][row].split(lengths) for key in ("tokens", "labels"))
            for document, label in zip(tokens, labels):
                head = partial(linear_cross_entropy, labels=label[None], chunk_tokens=99)
                loss = job.model(document[None], torch.arange(len(document)), head) / counted
                loss.backward()
                total += loss.item()
        norm = train.clip_grad_norm(job.model.parameters(), 1.0).item()
        job.optimizer.step()
        job.optimizer.zero_grad()
        return total, norm

    return observe(job, step)


@functools.cache
def oracle() -> dict:
    return run_ranks(1, alone, [])[0]


def compare(name: str, seen: dict, limit: float = 1e-5) -> list[str]:
    """List the differences from each document alone as sentences, empty when there are none."""
    want, problems = oracle(), []
    for key in "loss", "norm":
        error = np.max(np.abs(np.array(seen[key]) / np.array(want[key]) - 1))
        if not error <= limit:
            problems.append(f"{name}: {key} off by {error:.1e} relative")
    assert seen["grad"].keys() == want["grad"].keys()
    for n, grad in want["grad"].items():
        error = np.linalg.norm(seen["grad"][n] - grad) / np.linalg.norm(grad)
        if not error <= limit:
            problems.append(f"{name}: grad of {n} off by {error:.1e} relative")
    return problems


def all_variants() -> dict:
    return {name: packed(VARIANTS[name]) for name in VARIANTS}


@pytest.mark.cap(240)
def test_packed_documents_equal_each_document_alone():
    """On meshes: tests/test_qwen3_next.py and tests/test_gemma3.py."""
    seen = run_ranks(1, all_variants, timeout=200)[0]
    problems = [problem for name in VARIANTS for problem in compare(name, seen[name])]
    assert not problems, "\n".join(problems)


# The bugs put in, each of which must show in the comparison.


def no_mask(positions: torch.Tensor, device: torch.device) -> masked.Documents:
    rows, seq = positions.shape
    return masked.Documents(torch.arange(0, rows * seq + 1, seq, dtype=torch.int32), seq)


def with_documents(make) -> dict:
    llama.Llama.documents = staticmethod(make)
    return packed([])


def loss_across_borders() -> dict:
    return packed(
        [], change=lambda rows: rows | {"labels": rows["labels"].where(rows["labels"] != IGNORE, 7)}
    )


BUGS = {
    "no mask": (with_documents, no_mask),
    "loss across borders": (loss_across_borders,),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_negative_controls(name):
    bug, *args = BUGS[name]
    problems = compare("bug", run_ranks(1, bug, *args)[0])
    assert any("grad of layers.0.attention.wq" in p for p in problems), problems


def test_bfloat16_is_near_float32():
    """The documents' own kernel calls in bfloat16, under FSDP's mixed precision: as
    tests/test_parallel.py without masking."""
    seen = run_ranks(2, packed, ["--training.param_dtype=bfloat16"], 2)[0]
    problems = compare("bfloat16", seen, 0.05)
    assert not problems, "\n".join(problems)
    assert np.max(np.abs(np.array(seen["loss"]) / np.array(oracle()["loss"]) - 1)) < 2**-8


# ------------------------------------------------------------------------------------------- the
# three ways to compute it


def in_the_open(modes: list[str]) -> list[dict]:
    cpu.document_attention = lambda *args: (masked.one_by_one(*args), None)
    return [packed([f"--activation_checkpoint.mode={mode}"]) for mode in modes]


def test_one_by_one_equals_each_document_alone():
    """Runs the path of float32 on CUDA, here on CPU."""
    modes = ["none", "selective"]
    found = zip(modes, run_ranks(1, in_the_open, modes)[0], strict=True)
    problems = [problem for mode, seen in found for problem in compare(mode, seen)]
    assert not problems, "\n".join(problems)


def errors_in_bfloat16(lengths: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """Return the errors, and those of the bug."""
    found, real = [], cpu.causal_attention_backward
    for _ in range(2):
        errors = attention_errors(torch.device("cpu"), lengths, compiled=False)
        found.append(list(errors.values()))
        cpu.causal_attention_backward = lambda *inputs: real(*inputs[:-1], inputs[-1].flip(-1))
    return tuple(found)


def test_long_documents_on_a_cpu_equal_one_by_one():
    """From LONG tokens on backward is by matmuls. The bug put back: matmuls without the
    log-sum-exp of this document."""
    lengths = (3, cpu.LONG, 1, cpu.LONG - 1, 2 * cpu.LONG + 3)
    errors, control = run_ranks(1, errors_in_bfloat16, lengths)[0]
    assert max(errors) < 0.015, errors
    assert max(control) > 0.1, control


def contracts() -> None:
    q, k, v = (torch.randn(24, h, 6, requires_grad=True) for h in (4, 2, 2))
    torch.library.opcheck(
        cpu.document_attention, (q, k, v, torch.tensor([0, 1, 8, 24], dtype=torch.int32))
    )


def test_the_operator_keeps_pytorchs_contracts():
    """Schema, fake tensors, autograd and tracing with sizes that change: what torch.compile builds
    on."""
    run_ranks(1, contracts)


def compilations() -> int:
    """Return how often a block is compiled over batches with different documents."""
    train.compiled_loss = lambda loss, _: loss  # its graphs are not a block's
    job = train.build(load_config([*MODEL, *COMPILED]))
    torch._dynamo.utils.counters.clear()
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        rows = batch(0)
        begins = torch.rand(8, SEQ, generator=generator) < (seed + 1) / 10
        begins[:, 0] = True
        here = torch.arange(SEQ).expand(8, SEQ)
        rows["positions"] = here - here.where(begins, 0).cummax(1).values
        train.train_step(job, {key: x[None] for key, x in rows.items()})
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.cap(180)
def test_other_documents_do_not_recompile():
    """Once for the first table, once more when its size is found to change; both blocks share the
    code."""
    assert run_ranks(1, compilations)[0] <= 3


# --------------------------------------------------------------------------------------------------
# the rest


@pytest.mark.parametrize(
    "device, dtype, width, exists",
    [
        ("cuda", torch.bfloat16, 256, True),
        ("cuda", torch.float16, 8, True),
        ("cuda", torch.bfloat16, 264, False),
        ("cuda", torch.bfloat16, 100, False),
        ("cuda", torch.float32, 64, False),
        ("cpu", torch.bfloat16, 64, False),
    ],
)
def test_what_the_kernel_of_gpus_takes(device, dtype, width, exists):
    assert masked.kernel_exists(torch.device(device), dtype, width) == exists


def kernels(modes: list[str]) -> list[int]:
    return [kernels_in(mode) for mode in modes]


def kernels_in(mode: str) -> int:
    job = train.build(
        load_config(
            [*MODEL, "--training.local_batch_size=8", f"--activation_checkpoint.mode={mode}"]
        )
    )
    with Count() as count:
        train.train_step(job, {key: x[None] for key, x in batch(0).items()})
    return count.seen["attention"]


def test_selective_checkpointing_keeps_attention_and_full_recomputes_it():
    assert run_ranks(1, kernels, ["none", "selective", "full"])[0] == [2, 2, 4]


def test_the_names_that_selective_checkpointing_keeps_exist():
    for name in blocks.KEEP:
        namespace, operator, overload = name.split(".")
        assert str(getattr(getattr(getattr(torch.ops, namespace), operator), overload)) == name


# --------------------------------------------------------------------------------------------------
# through train.py


@pytest.mark.slow
@pytest.mark.cap(180)
def test_a_whole_run_masks_in_training_and_validation(tmp_path):
    """The corpus has documents longer and (like the last of it) other than windows. Losses are the
    same on a mesh, and others without masking. (tests/test_chat.py: they are those of the documents
    one by one.)"""
    options = [*tiny_run(tmp_path), "--training.seq_len=96", "--validation.interval=3"]
    options.append("--training.steps=6")
    masked = [*options, "--data.mask_documents=true"]
    for name, ranks, own in ("one", 1, masked), ("mesh", 2, masked), ("unmasked", 1, options):
        (tmp_path / name).mkdir()
        assert run_ranks(ranks, run, own, tmp_path / name) == [(0, "")] * ranks
    for key in "loss", "validation_loss":
        one, mesh, unmasked = (series(tmp_path / name, key) for name in ("one", "mesh", "unmasked"))
        assert one.keys() == mesh.keys() == unmasked.keys() and len(one) == (
            6 if key == "loss" else 2
        )
        for step in one:
            assert abs(mesh[step] / one[step] - 1) < 1e-5
            assert unmasked[step] != one[step]
