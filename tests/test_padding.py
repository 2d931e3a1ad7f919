"""Terms of blocks are means over the tokens that they were summed over: neither the labels that
count nor padding changes them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import train
from configs.load import load_config
from models.terms import AuxiliaryTerms
from parallelisms.mesh import world
from tests import parity
from tests.parity import EXPERTS
from tests.ranks import run_ranks
from training.loss import IGNORE

ROWS, LONG, SHORT = 4, 16, 8
BALANCE = "--model.balance_loss=0.5"


def batch_of(job: train.Job, length: int, answers: int, filler: int) -> dict[str, Tensor]:
    """Windows of SHORT tokens in rows of `length`, of which every answers-th label counts."""
    tokens = torch.randint(
        0, parity.VOCAB, (ROWS, SHORT), generator=torch.Generator().manual_seed(1)
    )
    rows = torch.full((ROWS, length), filler)
    rows[:, :SHORT] = tokens
    labels = torch.full((ROWS, length), IGNORE)
    labels[:, : SHORT - 1] = tokens[:, 1:]
    labels[:, torch.arange(length) % answers != 0] = IGNORE
    parts = [torch.arange(part.start, part.stop) for part in job.mesh.token_ranges(length)]
    own = torch.cat(parts)
    batch = {"tokens": rows[None, :, own], "labels": labels[None, :, own]}
    if length > SHORT:
        batch["length"] = torch.full((ROWS,), SHORT)
    return batch


def steps(
    length: int, answers: int, filler: int, mesh: tuple[str, ...], change: Callable
) -> list[dict]:
    """Return one step with a balance loss, and one without."""
    change()
    both = BALANCE, "--model.balance_loss=0"
    return [step(length, answers, filler, [balance, *mesh]) for balance in both]


def step(length: int, answers: int, filler: int, more: list[str]) -> dict:
    """Return the gradient and the counts of experts."""
    base = parity.options_of_a_family([*EXPERTS["qwen3 experts"], *more])
    options = [
        *base,
        *EXPERTS["qwen3 experts"],
        "--training.param_dtype=float64",
        f"--training.seq_len={length}",
        f"--training.global_batch_size={ROWS}",
        f"--training.local_batch_size={ROWS}",
        *more,
    ]
    job = train.build(load_config(options, world().size, world().local_size))
    found = train.gradients(job, batch_of(job, length, answers, filler))
    weights = {
        name: weight for name, weight in job.model.named_parameters() if weight.requires_grad
    }
    grad = parity.gathered(job.mesh, {name: weight.grad for name, weight in weights.items()})
    counts = {layer: value.tolist() for layer, value in found.terms.sums["expert_counts"].items()}
    return {"grad": grad, "counts": counts}


def nothing() -> None:
    """Change nothing."""


def of_balance(
    length: int = SHORT,
    answers: int = 1,
    filler: int = 3,
    mesh: tuple[str, ...] = (),
    ranks: int = 1,
    change: Callable = nothing,
) -> tuple[dict[str, np.ndarray], dict]:
    """Return the gradient of the balance loss alone, with a float64 rounding, and the counts."""
    with_loss, without = run_ranks(ranks, steps, length, answers, filler, mesh, change)[0]
    grad = {name: x - without["grad"][name] for name, x in with_loss["grad"].items()}
    return grad, with_loss["counts"]


def furthest(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Return the largest distance of a gradient, relative to the largest gradient."""
    size = max(np.linalg.norm(x) for x in other.values())
    assert size > 1e-6
    return max(np.linalg.norm(one[name] - x) for name, x in other.items()) / size


@pytest.fixture(scope="module")
def plain() -> tuple[dict[str, np.ndarray], dict]:
    return of_balance()


def test_labels_that_do_not_count_change_no_term(plain):
    grad, counts = of_balance(answers=4)
    assert furthest(grad, plain[0]) < 1e-9 and counts == plain[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, ranks",
    [
        (("--parallelism.tensor_parallel=2",), 2),
        (("--parallelism.context_parallel=2", "--parallelism.expert_parallel=2"), 2),
    ],
    ids=["tp2", "cp2 ep2"],
)
def test_padding_changes_no_term(plain, mesh, ranks):
    grad, counts = of_balance(length=LONG, answers=2, filler=5, mesh=mesh, ranks=ranks)
    assert furthest(grad, plain[0]) < 1e-9 and counts == plain[1]


def divided_by_labels() -> None:
    """Divide a block's term by the labels that count, as the loss is."""

    def wrong(scale: Tensor, tokens: Tensor, labels: Tensor, tp: int) -> AuxiliaryTerms:
        return AuxiliaryTerms(scale * tokens / labels, tokens, labels, tp)

    train.AuxiliaryTerms = wrong


def padding_counted() -> None:
    """Take padding for text."""
    real = train.Microbatches

    def microbatches(model: object, batch: dict[str, Tensor], *rest: object) -> object:
        batch.pop("length", None)
        return real(model, batch, *rest)

    train.Microbatches = microbatches


@pytest.mark.slow
def test_negative_control(plain):
    grad, _ = of_balance(answers=4, change=divided_by_labels)
    assert furthest(grad, plain[0]) > 1
    grad, counts = of_balance(length=LONG, change=padding_counted)
    assert furthest(grad, plain[0]) > 0.1 and counts != plain[1]
