"""Loss weights by source: a step has the gradient of sum(w ce) / sum(w) over the global batch, on every
mesh, with everything that changes the loss; and a run without weights is the run as before."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train
from checkpoint import changes
from configs.load import dump, load_config
from configs.schema import InputError
from data import audit, show, splice
from data.loader import Batches
from tests import parity
from tests.ranks import run_ranks
from tests.runs import (
    CONTEXT_MESHES,
    EXPERT_MESHES,
    MESHES,
    lines_of,
    printed,
    run,
    series,
    stopped_at,
    tiny_run,
)
from tools.parity.in_memory import Held
from training import counted
from training.loss import IGNORE, linear_cross_entropy
from training.loss_passes import EAGER, compiled

WEIGHTS = [0.3, 2.0, 0.0]
CLIP = 0.1
Z_LOSS = 0.01
ON = [
    "--training.param_dtype=float64",
    f"--training.max_norm={CLIP}",
    "--optimizer.kind=sgd",
    "--optimizer.lr=0.2",
    "--optimizer.momentum=0.9",
    "--optimizer.weight_decay=0",
    f"--training.z_loss={Z_LOSS}",
]
MTP = [*parity.DEEPSEEK, "--model.mtp_depth=1"]
STEPS = 2


# ----------------------------------------------------------------------------------- meshes


def batches_of(job: train.Job) -> Batches:
    """Return this rank's batches of three sources in memory."""
    t = job.cfg.training
    draw = np.random.default_rng(0)
    sources = [Held(draw.integers(0, parity.VOCAB, 900).astype(np.uint16)) for _ in WEIGHTS]
    described = [(name, name, held, [[0, 1.0]]) for name, held in zip("abc", sources, strict=True)]
    order = splice.begin(splice.describe(described, 0, t.seq_len, t.global_batch_size))
    of_rank = job.mesh.dp_rank, job.mesh.dp_size
    ranges = job.mesh.token_ranges(t.seq_len)
    made = Batches(sources, order, t.local_batch_size, *of_rank, token_ranges=ranges)
    made.depth = getattr(job.args, "mtp_depth", 0)
    made.loss_weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    return made


def batch_of(batches: Batches, step: int) -> dict:
    """Return a batch whose labels count unevenly, in the same places on every mesh."""
    batch = batches[step]
    for name in {"labels", "labels_ahead"} & batch.keys():
        batch[name][batch[name] % 5 == step] = IGNORE
    return batch


def count_labels(microbatches: Any) -> torch.Tensor:
    """Count as without weights."""
    weights = microbatches.loss_weights
    microbatches.loss_weights = None
    counts = counted.count(microbatches)
    microbatches.loss_weights = weights
    return counts


def seen_of(options: list[str], dp_size: int, unweighted: bool = False) -> dict:
    """Do two steps on this rank. unweighted puts a mistake in: the sum of weighted
    losses is divided by the number of labels."""
    if unweighted:
        train.count = count_labels
    rows = parity.BATCH // dp_size // 2
    base = parity.options_of_a_family(options)
    job = train.build(load_config([*base, f"--training.local_batch_size={rows}", *ON, *options]))
    named = dict(job.model.named_parameters())
    seen: dict = {"loss": [], "norm": []}
    batches = batches_of(job)
    for step in range(STEPS):
        result = train.train_step(job, batch_of(batches, step))
        seen["loss"].append(result.loss)
        seen["norm"].append(result.grad_norm)
    seen["weights"] = parity.gathered(job.mesh, named)
    return seen


def on_mesh(mesh: str, *more: Any) -> dict:
    ranks, options, dp_size = (MESHES | CONTEXT_MESHES | EXPERT_MESHES)[mesh]
    first, *rest = more or ([],)
    results = run_ranks(ranks, seen_of, [*options, *first], dp_size, *rest)
    weights = {name: x for result in results for name, x in result["weights"].items()}
    return results[0] | {"weights": weights}


def plainly() -> dict:
    """Do the steps by PyTorch's own loss and optimizer, on whole logits of the whole batch."""
    options = [*parity.OPTIONS, f"--training.local_batch_size={parity.BATCH}", *ON]
    job = train.build(load_config(options))
    model = job.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    batches = batches_of(job)
    seen: dict = {"loss": [], "norm": []}
    for step in range(STEPS):
        batch = batch_of(batches, step)
        logits = model(batch["tokens"][0], torch.arange(parity.SEQ))  # [B, T, V]
        labels = batch["labels"][0]
        each = F.cross_entropy(logits.mT, labels, ignore_index=IGNORE, reduction="none")
        of_rows = torch.tensor(WEIGHTS, dtype=torch.float64)[batch["source"]]
        weights = of_rows[:, None] * (labels != IGNORE)
        loss = (weights * each).sum() / weights.sum()
        z_loss = (weights * logits.logsumexp(-1).square()).sum() / weights.sum()
        (loss + Z_LOSS * z_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        seen["loss"].append(loss.item())
        seen["norm"].append(norm.item())
    named = dict(model.named_parameters())
    return seen | {"weights": parity.gathered(job.mesh, named)}


def farthest(seen: dict, want: dict) -> float:
    """Return the largest relative difference of losses, norms and weights."""
    pairs = [*zip(seen["loss"], want["loss"]), *zip(seen["norm"], want["norm"])]
    off = [abs(one - other) / abs(other) for one, other in pairs]
    assert seen["weights"].keys() == want["weights"].keys()
    for name, weight in want["weights"].items():
        error = np.linalg.norm(seen["weights"][name] - weight)
        off.append(float(error / (np.linalg.norm(weight) or 1)))
    return max(off)


@pytest.fixture(scope="module")
def plain() -> dict:
    return run_ranks(1, plainly)[0]


@pytest.mark.parametrize(
    "mesh",
    [
        "one",
        "fsdp2",
        *(
            pytest.param(mesh, marks=pytest.mark.slow)
            for mesh in ("tp2", "pp2", "fsdp2xcp2", "hsdp2x2")
        ),
    ],
)
def test_a_mesh_equals_the_weighted_mean_of_plain_pytorch(mesh, plain):
    """What is divided by is summed over every dimension of a mesh as the number of labels is, which
    tests/test_parallel.py compares on the others."""
    seen = on_mesh(mesh)
    assert min(seen["norm"]) > CLIP
    assert farthest(seen, plain) <= 1e-12


def test_control_a_count_without_weights_is_seen(plain):
    assert farthest(on_mesh("fsdp2", [], True), plain) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["ep2", "ep2xpp2"])
def test_experts_and_further_tokens_are_weighted_on_every_mesh(mesh):
    assert farthest(on_mesh(mesh, MTP), on_mesh("one", MTP)) <= 1e-12


# ------------------------------------------------------------------------------ what is weighted


def gradients_of(weights: list[float] | None, masked: int | None) -> tuple:
    """Return loss, terms and gradients of a model with further tokens and z-loss. masked: a source
    none of whose labels counts."""
    rows = [f"--training.local_batch_size={parity.BATCH // 2}", *ON, *MTP]
    job = train.build(load_config([*parity.options_of_a_family(MTP), *rows]))
    batches = batches_of(job)
    batches.loss_weights = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    batch = batch_of(batches, 0)
    if masked is not None:
        is_masked = (batch["source"] == masked).view(batch["labels"].shape[:2])
        batch["labels"][is_masked] = IGNORE
        batch["labels_ahead"][is_masked] = IGNORE
    step = train.gradients(job, batch)
    named = {name: p for name, p in job.model.named_parameters() if p.grad is not None}
    terms = {}
    for name in ("z_loss", "mtp_loss_1"):
        terms[name] = float(step.terms.sums[name][None] / step.terms.divisors[name])
    return float(step.loss), terms, {name: p.grad.numpy() for name, p in named.items()}


def pairs_of_gradients() -> list[tuple]:
    return [
        gradients_of([2.0, 2.0, 0.0], None),
        gradients_of(None, 2),
        gradients_of([5.0, 5.0, 5.0], None),
        gradients_of(None, None),
    ]


def test_weight_0_is_a_source_without_labels_and_a_common_factor_changes_nothing():
    """With z-loss and a further token, both of which are weighted as the loss is."""
    zero, masked, five, plain = run_ranks(1, pairs_of_gradients)[0]
    for seen, want in (zero, masked), (five, plain):
        assert seen[0] == pytest.approx(want[0], rel=1e-13)
        assert seen[1] == pytest.approx(want[1], rel=1e-13)
        assert seen[2].keys() == want[2].keys()
        for name, gradient in want[2].items():
            off = np.linalg.norm(seen[2][name] - gradient)
            assert off <= 1e-12 * np.linalg.norm(gradient), name
    assert abs(zero[0] - plain[0]) > 1e-6 * plain[0]


@pytest.mark.parametrize("backend", ["", "aot_eager"])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_the_loss_in_pieces_is_weighted_token_by_token(backend, cap):
    passes = compiled(backend) if backend else EAGER
    torch.manual_seed(0)
    h = torch.randn(2, 11, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(17, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 17, (2, 11))
    labels[0, 3:6] = IGNORE
    weights = torch.rand(22, dtype=torch.float64)
    each = torch.zeros(2, 11, dtype=torch.float64)
    loss = linear_cross_entropy(h, weight, labels, 7, each, None, passes, cap, weights)
    found = loss, *torch.autograd.grad(loss, (h, weight))
    logits = h @ weight.t()
    logits = cap * (logits / cap).tanh() if cap else logits
    plain = F.cross_entropy(logits.mT, labels, ignore_index=IGNORE, reduction="none")
    total = (plain * weights.view(2, 11)).sum()
    wanted = total, *torch.autograd.grad(total, (h, weight))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(each, plain, rtol=1e-12, atol=0)


# ------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> tuple[list[str], str]:
    """Return a tiny run, and a mixture of two sources whose second has a weight in the braces."""
    tiny = tiny_run(tmp_path_factory.mktemp("loss_weights"))
    corpus = next(option for option in tiny if option.startswith("--data.source="))
    folder = corpus.partition("=")[2]
    rows = ", ".join(
        f"{{{{name='{name}', source='{folder}/{files}', weight=1.0{more}}}}}"
        for name, files, more in (("a", "[0-2]*.txt", ""), ("b", "3*.txt", "{}"))
    )
    exact = ["--training.param_dtype=float64", "--training.steps=6", "--checkpoint.interval=3"]
    validated = ["--data.validation_fraction=0.2", "--validation.interval=6"]
    rest = [option for option in tiny if option != corpus and "checkpoint.interval" not in option]
    rest = [o for o in rest if "training.steps" not in o and "validation.interval" not in o]
    rest = [o for o in rest if "param_dtype" not in o]
    return [*rest, *exact, *validated, "--validation.steps=2"], f"--data.mixture=[{rows}]"


@pytest.mark.slow
def test_a_run_logs_what_is_trained_and_plain_losses_of_sources_and_of_validation(
    options, tmp_path
):
    rest, mixture = options
    weighted = [*rest, mixture.format(", loss_weight=0.25")]
    folder = tmp_path / "whole"
    folder.mkdir()
    assert run_ranks(1, run, weighted, folder) == [(0, "")]
    seen = {"tokens_seen/a": 0, "tokens_seen/b": 0}
    for line in lines_of(folder):
        if "loss" not in line:
            losses = [line[f"validation/{name}/loss"] for name in "ab"]
            assert line["validation_loss"] == pytest.approx(sum(losses) / 2, rel=1e-9)
            continue
        shares = []
        for name, weight in ("a", 1.0), ("b", 0.25):
            tokens = line[f"tokens_seen/{name}"] - seen[f"tokens_seen/{name}"]
            shares.append((weight * tokens, line.get(f"loss/{name}", 0.0)))
        mean = sum(share * loss for share, loss in shares) / sum(share for share, _ in shares)
        assert line["loss"] == pytest.approx(mean, rel=1e-6)  # losses of tokens are float32
        seen = {name: line[name] for name in seen}

    audited = audit.open_run(str(folder))
    rows = [show.row(audited, 1, number) for number in range(8)]
    assert {(row["source"], row["loss_weight"]) for row in rows} == {("a", 1.0), ("b", 0.25)}

    # stopped after 3 steps, and continued by two ranks of tensor parallelism
    parted = tmp_path / "parted"
    parted.mkdir()
    assert run_ranks(1, stopped_at, 3, weighted, parted) == [75]
    assert (
        run_ranks(2, run, [*weighted, "--parallelism.tensor_parallel=2"], parted) == [(0, "")] * 2
    )
    assert series(parted) == pytest.approx(series(folder), rel=1e-12, abs=0)

    # continued with another weight, which is said, and changes what is trained
    other = tmp_path / "other"
    other.mkdir()
    assert run_ranks(1, stopped_at, 3, weighted, other) == [75]
    [(code, text)] = run_ranks(1, printed, [*rest, mixture.format("")], other)
    assert code == 0 and "data.mixture.b.loss_weight 0.25 -> 1.0" in text, text
    assert series(other)[6] != series(folder)[6]


def test_a_change_of_the_mixture_is_named_by_its_row(options):
    rest, mixture = options
    was = load_config([*rest, mixture.format("")])
    row = was.data.mixture[0]
    now = {}
    for name, rows in {
        "weight": (row, was.data.mixture[1].model_copy(update={"loss_weight": 0.5})),
        "source": (*was.data.mixture, row.model_copy(update={"name": "c"})),
    }.items():
        data = was.data.model_copy(update={"mixture": rows})
        now[name] = {"config": dump(was.model_copy(update={"data": data}))}
    old = dump(was).replace("loss_weight = 1.0, ", "")
    assert old != dump(was)
    manifest = {"facts": {"config": old}, "mesh": {}, "step": 1}
    assert changes.line(manifest, {"config": dump(was)}, {}) == ""
    assert "data.mixture.b.loss_weight 1.0 -> 0.5" in changes.line(manifest, now["weight"], {})
    assert 'data.mixture ["a", "b"] -> ["a", "b", "c"]' in changes.line(manifest, now["source"], {})


def test_the_mistakes_are_refused(options):
    rest, mixture = options
    for wrong in "-1.0", "nan":
        with pytest.raises(InputError, match="loss_weight of table 2 must be a finite number >= 0"):
            load_config([*rest, mixture.format(f", loss_weight={wrong}")])
    of_all = mixture.replace("weight=1.0", "weight=1.0, loss_weight=0.0").format("")
    with pytest.raises(InputError, match="reads no source from step 0 on that counts"):
        load_config([*rest, of_all])
