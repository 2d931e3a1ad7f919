"""Each family against Hugging Face's model of that family on the same weights: logits, loss and all
gradients, in float32.

Published shapes (Llama 2, 3, 3.1, 3.2) at distinct odd sizes, so that no transposed or swapped
dimension can hide.
"""

import traceback
from functools import partial

import pytest
import torch

from models import layers
from tests.ranks import run_ranks
from tests.shapes import SHAPES, as_ours, random_pair
from training.loss import linear_cross_entropy
from training.loss_passes import plain_cross_entropy


def both(shape: str) -> dict:
    """Run the two models on the same weights and tokens; the greatest difference of each kind."""
    theirs, ours, pairs = random_pair(*SHAPES[shape])
    assert {mine for mine, _ in pairs} == {n for n, _ in ours.named_parameters()}
    tokens, labels = torch.randint(0, 97, (2, 5, 37))
    labels[1, 3:20] = -100

    want = theirs(tokens).logits
    positions = torch.arange(37)
    got = ours(tokens, positions)
    want_loss = plain_cross_entropy(want, labels)
    got_loss = ours(
        tokens, positions, partial(linear_cross_entropy, labels=labels, chunk_tokens=50)
    )
    want_loss.backward()
    got_loss.backward()
    theirs_grads, trained = (
        {n: p.grad for n, p in theirs.named_parameters()},
        dict(ours.named_parameters()),
    )
    pairs = [(mine, as_ours(theirs_grads, hf)) for mine, hf in pairs if trained[mine].requires_grad]
    return {
        "logits": (got - want).abs().max().item() / max(1.0, want.abs().max().item()),
        "bitwise": torch.equal(got, want),
        "loss": abs(got_loss.item() / want_loss.item() - 1),
        "grads": {
            mine: ((trained[mine].grad - grad).norm() / grad.norm()).item() for mine, grad in pairs
        },
    }


def all_shapes() -> dict[str, dict | str]:
    """Return for each shape the result of `both`, or the traceback that it raises. In one process,
    because the import of transformers dominates the time."""
    seen = {}
    for shape in SHAPES:
        try:
            seen[shape] = both(shape)
        except Exception:
            seen[shape] = traceback.format_exc()
    return seen


@pytest.fixture(scope="module")
def differences() -> dict[str, dict | str]:
    pytest.importorskip("transformers")
    return run_ranks(1, all_shapes)[0]


# Where a state nearly cancels, the norm behind it enlarges its rounding: transformers' logits and
# ours, of up to 6, are 9e-6 from those of float64.
LOGITS = {
    "gemma2": 4e-6,  # two soft caps: 1.2e-6 on a processor with AVX-512, below 1e-6 on others
    "qwen3_next": 2e-5,
    "qwen3_next tied": 2e-5,
    "qwen3_5": 2e-5,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_hugging_face(shape, differences):
    seen = differences[shape]
    assert isinstance(seen, dict), seen
    assert seen["bitwise"] or seen["logits"] <= LOGITS.get(shape, 1e-6), seen["logits"]
    assert seen["loss"] <= 1e-5
    assert max(seen["grads"].values()) <= LOGITS.get(shape, 1e-5), seen["grads"]


def interleaved(shape: str) -> dict:
    """The bug put in: rotary pairs (2i, 2i+1), Meta's convention, on weights in Hugging Face's
    layout."""

    def apply_rope(x, cos, sin):
        a, b = x[..., 0::2], x[..., 1::2]
        c, s = cos[:, None, : a.shape[-1]], sin[:, None, : a.shape[-1]]
        return torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2).type_as(x)

    layers.apply_rope = apply_rope
    return both(shape)


@pytest.mark.slow
def test_negative_control_interleaved_rope_is_noticed():
    pytest.importorskip("transformers")
    assert run_ranks(1, interleaved, "llama3")[0]["logits"] > 1e-3
