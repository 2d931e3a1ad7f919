"""Context parallelism: ranks that share a sequence compute what one process computes.

`tests/parity.py` says what is compared. As in tests/test_parallel.py, the runs of a mesh are few
combinations of settings (`tests/parity.py::pairwise`). Mistakes that others made are in tests/test_museum.py.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

import train
from configs.load import load_config
from models.kernels import document_attention as kernels
from models.kernels.ruled_attention import PLAIN
from parallelisms import cp
from parallelisms.mesh import Mesh, world
from reliability.collectives import Watch
from tests.parity import (
    BATCH,
    CONTEXT,
    DOCUMENTS,
    EXECUTION,
    NUMBERS,
    OPTIONS,
    SGD,
    VOCAB,
    check,
    combination_of,
    pairwise,
    plain,
    trajectories,
)
from tests.ranks import run_ranks
from tests.runs import (
    COMPILED,
    CP2,
    ULYSSES,
    data_rank,
)
from tools.parity import in_memory
from training.validate import scores, validate

FACTORS = NUMBERS | EXECUTION | CONTEXT
MESHES = ["cp2", "fsdp2xcp2", "pp2xcp2"]  # the others have fewer runs
PAIRWISE = pairwise(FACTORS, MESHES[:1], MESHES[1:], CONTEXT)


def settings(**chosen: str) -> dict[str, str]:
    """Return a combination: the plain model's settings, `gather` without documents, except for
    these."""
    return combination_of(
        **({factor: next(iter(table)) for factor, table in CONTEXT.items()} | chosen)
    )


@pytest.mark.cap(300)
@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=() if mesh == "cp2" else pytest.mark.slow) for mesh in MESHES]
)
def test_mesh_equals_the_plain_model(mesh):
    check(
        mesh,
        [combination for combination in PAIRWISE if combination["mesh"] == mesh],
        factors=FACTORS,
    )


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.parametrize(
    "mesh, chosen, more",
    [
        ("cp3", {}, ["--training.seq_len=24"]),
        (
            "cp2xtp2",
            {"method": "ulysses", "model": "qwen3", "embeddings": "tied", "clipping": "in force"},
            [],
        ),
    ],
    ids=["cp3", "cp2xtp2"],
)
def test_further_meshes_equal_the_plain_model(mesh, chosen, more):
    """`gather` on cp2xtp2: tests/test_lora.py and tests/test_experts_tp.py."""
    both = {"documents": "masked", "labels": "at the beginning"}
    check(mesh, [settings(**both, **chosen)], more, factors=FACTORS)


@pytest.mark.slow
@pytest.mark.cap(300)
def test_a_compiled_mesh_equals_the_plain_model():
    chosen = settings(checkpointing="selective", documents="masked")
    check("cp2", [chosen], COMPILED, factors=FACTORS)


@pytest.mark.parametrize(
    "places", [[range(4, 8)], [range(2), range(14, 16)], [range(6, 8), range(8, 10)]]
)
def test_a_rank_reads_its_part_of_a_window_and_has_the_labels_of_the_whole(places, monkeypatch):
    cfg = load_config([*OPTIONS, "--training.local_batch_size=24"])
    ids, read = np.random.default_rng(0).integers(0, VOCAB, 4000).astype(np.uint16), []
    ranks = data_rank(), data_rank(own=places)
    whole, part = (in_memory.batches(cfg, rank, ids) for rank in ranks)
    begins = np.zeros((BATCH, 17), bool)
    begins[:, [3, 6, 8, 15]] = True
    for batches in whole, part:
        batches.mask_documents = True
    monkeypatch.setattr("data.loader.document_begins", lambda *_: begins.copy())
    want, real = whole[2], in_memory.Held.read
    monkeypatch.setattr(
        in_memory.Held,
        "read",
        lambda self, start, stop: read.append(stop - start) or real(self, start, stop),
    )
    got, here = part[2], [position for own in places for position in own]
    assert read == [len(own) + 1 for own in places] * BATCH
    for key in "tokens", "labels":
        assert torch.equal(got[key], want[key][..., here]), key
    assert torch.equal(got["positions"], want["positions"])


@pytest.mark.slow
def test_bfloat16_is_near_float32():
    """The same check as
    tests/test_parallel.py::test_bfloat16_is_near_float32_and_keeps_float32_masters, for both
    methods."""
    half = [*SGD, CP2, "--training.param_dtype=bfloat16"]
    oracles = plain(optimizer="sgd"), plain(DOCUMENTS, optimizer="sgd")
    for runs in run_ranks(2, trajectories, [[*half, ULYSSES], [*half, DOCUMENTS]], 1):
        for seen, oracle in zip(runs, oracles, strict=True):
            assert np.max(np.abs(np.array(seen["loss"]) / np.array(oracle["loss"]) - 1)) < 2**-8
            for n, want in oracle["grad"].items():
                assert np.linalg.norm(seen["grad"][n] - want) / np.linalg.norm(want) < 0.05, n


@pytest.mark.parametrize(
    "device, dtype, tolerance",
    [
        ("cpu", torch.float32, 1e-5),
        ("cpu", torch.bfloat16, 0.02),
        pytest.param(
            "cuda",
            torch.bfloat16,
            0.02,
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
        ),
    ],
)
def test_attention_of_the_last_queries_of_documents(device, dtype, tolerance):
    """Their keys begin earlier. Compared with masked attention to all keys; short and long pieces,
    whole and cut ones."""
    counts = [(5, 5), (3, 40), (1, 1), (300, 300), (280, 700), (1, 90)]  # queries, keys
    q_lengths, k_lengths = zip(*counts)
    starts, key_starts = (
        torch.tensor([0, *np.cumsum(n)], dtype=torch.int32, device=device)
        for n in (q_lengths, k_lengths)
    )
    torch.manual_seed(0)
    tensors = [
        torch.randn(sum(n), heads, 8).to(device, dtype)
        for n, heads in ((q_lengths, 4), (k_lengths, 2), (k_lengths, 2))
    ]
    cut = kernels.VarlenMetadata(starts, key_starts, max(q_lengths), max(k_lengths))
    out, lse = kernels.piece_attention(*tensors, cut)
    q, k, v = (x.double().requires_grad_() for x in tensors)
    pieces = []
    for i, (n, m) in enumerate(counts):
        place, keys = slice(starts[i], starts[i + 1]), slice(key_starts[i], key_starts[i + 1])
        seen = torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n)
        heads = [x[None].transpose(1, 2) for x in (q[place], k[keys], v[keys])]
        pieces.append(
            torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=seen, enable_gqa=True
            )[0].transpose(0, 1)
        )
    want = torch.cat(pieces)
    grad = torch.randn_like(want)
    wanted = torch.autograd.grad(want, (q, k, v), grad)
    saved = kernels.Saved(*tensors, out, lse)
    grads = kernels.piece_attention_backward(grad.to(dtype), saved, cut)
    for seen, right in zip((out, *grads), (want, *wanted), strict=True):
        assert (seen.double() - right).norm() <= tolerance * right.norm()


def test_the_width_of_a_head_is_what_the_kernel_is_asked_about(monkeypatch):
    asked = []
    monkeypatch.setattr(cp, "check_kernel", lambda *question: asked.append(question))
    monkeypatch.setattr(cp, "_gather", lambda k, v, *_: (k.flatten(0, 1), v.flatten(0, 1)))
    q, ends = torch.randn(1, 3, 2, 8), torch.tensor([0, 3], dtype=torch.int32)
    whole = cp.GatheredPieces(torch.arange(3), kernels.VarlenMetadata(ends, ends, 3, 3))
    cp.attend(q, q, q, None, whole, "", PLAIN)
    assert asked == [(torch.device("cpu"), torch.float32, 8)]


class Sent(Watch):
    """Counts the collectives of attention: FSDP's are others."""

    def __init__(self):
        super().__init__()
        self.count = {
            "all_gather_into_tensor": 0,
            "reduce_scatter_tensor": 0,
            "all_to_all_single": 0,
        }

    def see(self, name, func, args):
        if func.namespace == "_c10d_functional":
            self.count[name] += 1


def job_and_batch(
    *options: str, seq_len: int = 16, rows: int = 2
) -> tuple[train.Job, dict[str, Tensor]]:
    """Return a job, and a batch of one microbatch for it."""
    batch = [
        f"--training.seq_len={seq_len}",
        f"--training.global_batch_size={rows}",
        f"--training.local_batch_size={rows}",
    ]
    job = train.build(load_config([*OPTIONS, *batch, *options], world().size, world().local_size))
    return job, in_memory.batches(
        job.cfg,
        job.mesh,
        np.random.default_rng(0).integers(0, VOCAB, 99 * seq_len).astype(np.uint16),
    )[0]


def sent(modes: list[str]) -> list[dict[str, int]]:
    """Return the messages of attention in a step, by checkpointing mode, with both methods."""
    counts = []
    for method in [], [ULYSSES]:
        for mode in modes:
            job, batch = job_and_batch(CP2, *method, f"--activation_checkpoint.mode={mode}")
            with Sent() as sent:
                train.train_step(job, batch)
            counts.append(sent.count)
    return counts


@pytest.mark.slow
def test_checkpointing_sends_nothing_twice_that_it_says_to_keep():
    """In each of 3 layers: keys and values are all-gathered in forward and in backward, and their
    gradients reduce-scattered; heads are swapped before and after attention, in forward and in
    backward. Only a block that is recomputed whole sends them again."""

    def layers(gathers: int, scatters: int, swaps: int) -> dict[str, int]:
        return {
            "all_gather_into_tensor": 3 * gathers,
            "reduce_scatter_tensor": 3 * scatters,
            "all_to_all_single": 3 * swaps,
        }

    none, selective, full, swap_none, swap_selective, swap_full = run_ranks(
        2, sent, ["none", "selective", "full"]
    )[0]
    assert none == selective == layers(2, 1, 0) and full == layers(3, 1, 0)
    assert swap_none == swap_selective == layers(0, 0, 4) and swap_full == layers(0, 0, 6)


class Numbers(Watch):
    """Count of the numbers that this rank passes to the collectives of attention, except integers,
    which are the counts of experts."""

    def __init__(self):
        super().__init__()
        self.seen: list[int] = []

    def see(self, name, func, args):
        if (
            func.namespace == "_c10d_functional"
            and name != "all_reduce"
            and args[0].is_floating_point()
        ):
            self.seen.append(args[0].numel())


def sent_by_latent_attention() -> list[list[int]]:
    """In a forward and backward of one layer without experts: 2 sequences of 16 tokens, of which
    this rank has half. By each method."""
    return [sent_in_a_step([]), sent_in_a_step([ULYSSES])]


def sent_in_a_step(method: list[str]) -> list[int]:
    family = [
        "--model.family=deepseek_v3",
        "--model.n_layers=1",
        "--model.n_dense_layers=1",
        "--run.device=cpu",
    ]
    batch = [
        "--training.seq_len=16",
        "--training.global_batch_size=2",
        "--training.local_batch_size=2",
        "--data.tokenizer=bytes",
    ]
    job = train.build(
        load_config(
            [*family, *batch, CP2, *method, "--training.param_dtype=float32"],
            world().size,
            world().local_size,
        )
    )
    tokens = np.random.default_rng(0).integers(0, 256, 999).astype(np.uint16)
    with Numbers() as numbers:
        train.train_step(job, in_memory.batches(job.cfg, job.mesh, tokens)[0])
    return numbers.seen


@pytest.mark.slow
def test_latent_attention_sends_no_padding():
    """Kernels want values as wide as keys, 48 numbers of each head here, and values have 32. A rank
    sends the 32: keys and values are all-gathered twice and their gradients reduce-scattered, or
    queries, keys and values swapped, and the result swapped back."""
    tokens, heads, key, value = 2 * 8, 4, 32 + 16, 32
    # the reduce-scatter is of the gradients of all ranks' tokens
    gather = [(key + value)] * 2 + [2 * (key + value)]
    ulysses = [2 * key + value, value] + [value, 2 * key + value]
    wanted = [[tokens * heads * width for width in widths] for widths in (gather, ulysses)]
    assert run_ranks(2, sent_by_latent_attention) == [wanted] * 2


def kept(runs: list[list[str]]) -> list[int]:
    """Return for each run the bytes that autograd keeps on this rank between forward and backward for
    the second half of 512 tokens."""
    return [kept_of(options, 512) - kept_of(options, 256) for options in runs]


def kept_of(options: list[str], seq_len: int) -> int:
    job, batch = job_and_batch(
        *options, "--parallelism.reshard_after_forward=false", seq_len=seq_len, rows=1
    )
    # by address; held, so that no address is used again
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        # elem: of what a collective is still writing
        storage = getattr(x, "elem", x).untyped_storage()
        storages[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        train.gradients(job, batch)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.slow
def test_activations_fall_with_the_number_of_ranks():
    """The second half of 512 tokens needs on each of 2 ranks half of what it needs on one process.
    (Weights are in both numbers of a difference.) The keys of all ranks, were they kept, would be 7%
    more. With ulysses the output of attention is kept as it was computed and as it was swapped back:
    48 numbers for each of 128 tokens in 3 layers."""
    [alone] = run_ranks(1, kept, [[]])[0]
    gather, ulysses = run_ranks(2, kept, [[CP2], [CP2, ULYSSES]])[0]
    assert gather == pytest.approx(alone / 2, rel=0.005)
    assert ulysses == pytest.approx(alone / 2 + 3 * 128 * 48 * 4, rel=0.005)


def scores_of(runs: list[list[str]]) -> list[dict[str, float]]:
    """Return the score of each run, and then again with the mistake that counts the tokens of each
    rank."""
    right = [score(options) for options in runs]
    Mesh.sum_over_tokens = lambda mesh, x: x
    return right + [score(options) for options in runs]


def score(options: list[str]) -> dict[str, float]:
    """Validation on two batches, half of whose labels do not count, most of them late in a window."""
    job, batch = job_and_batch(*options)
    T = job.cfg.training.seq_len
    positions = torch.cat(
        [torch.arange(part.start, part.stop) for part in job.mesh.token_ranges(T)]
    )
    batch["labels"] = batch["labels"].masked_fill(positions * 7 % T < positions, -100)
    return scores({"": validate(job.model, job.mesh, [batch] * 2, 99, torch.arange(VOCAB))})


def test_validation_counts_the_tokens_of_all_ranks():
    alone = run_ranks(1, scores_of, [[]])[0][0]
    for seen in run_ranks(2, scores_of, [[CP2], [CP2, ULYSSES]]):
        for key, value in alone.items():
            right = [of_run[key] == pytest.approx(value, rel=1e-6) for of_run in seen]
            wrong = [of_run[key] != pytest.approx(value, rel=1e-4) for of_run in seen]
            assert right[:2] == wrong[2:] == [True, True], key
