"""Check that a learning rate transfers over width: the coordinate check of muP (Yang et al.,
arXiv:2203.03466, appendix D.1)."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from configs.schema import Model, Optimizer
from models import transfer
from tools.parity.forwards import outputs
from tools.parity.gradients import batch, mean_loss
from tools.parity.outputs import MODEL
from tools.parity.tiny import Tiny, built
from training import init
from training.optim import build_optimizer

GROWTHS = (1, 2, 4, 8)  # widths, as multiples of the copy's
STEPS = 4
LR = 3e-3  # at the width of the copy
# Of the logarithm of a movement over that of the width. A right model is within it, the usual
# parametrisation at 0.5 to 1.
MOST_SLOPE = 0.25


def coordinates(tiny: Tiny) -> str | None:
    """Return which output of the embedding, of a block, or logits, move the farther in a few steps
    the wider the model is."""
    for kind in ("adamw", "muon"):
        slopes = slopes_of(tiny, kind)
        worst = max(slopes, key=lambda name: slopes[name])
        if slopes[worst] > MOST_SLOPE:
            return (
                f"with {kind}, what {worst or 'the model'} returns moves "
                f"{2 ** slopes[worst]:.2g} times as far in {STEPS} steps each time the width doubles"
            )
    return None


def slopes_of(tiny: Tiny, kind: str) -> dict[str, float]:
    """Return by which power of the width the outputs of embedding, blocks and model move, by name."""
    moved = [movements(tiny, kind, growth) for growth in GROWTHS]
    slopes = {}
    for name in moved[0]:
        sizes = [one[name] for one in moved]
        slopes[name] = float(np.polyfit(np.log2(GROWTHS), np.log2(sizes), 1)[0])
    return slopes


def movements(tiny: Tiny, kind: str, growth: int) -> dict[str, float]:
    """Return how far outputs of a model that is so many times as wide move in the first steps: the
    root of the mean square, by name."""
    wide, optimizer = widened(tiny, kind, growth)
    tokens, labels = batch(wide)
    before = outputs_of_blocks(wide, tokens)
    for _ in range(STEPS):
        mean_loss(wide, tokens, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = outputs_of_blocks(wide, tokens)
    return {name: float((after[name] - x).square().mean().sqrt()) for name, x in before.items()}


def widened(tiny: Tiny, kind: str, growth: int) -> tuple[Tiny, torch.optim.Optimizer]:
    """Return a copy that is so many times as wide, with initial values, and its optimizer."""
    args = transfer.widened(tiny.family, tiny.args, growth)
    args = replace(args, tied_embeddings=False)
    base = Model(family=tiny.family.name, width_base=tiny.args.dim)
    family = transfer.adapted(tiny.family, args, base)
    model = built(family, args, tiny.lora).to(torch.float64)
    model.to_empty(device="cpu")
    init.initialise(model, family.initial_values(args), 0)
    cfg = Optimizer(kind=kind, lr=LR, ns_dtype="float64")
    optimizer = build_optimizer(model, family.decay, cfg, family.matrices, scales=family.scales)
    return replace(tiny, family=family, args=args, model=model), optimizer


def outputs_of_blocks(tiny: Tiny, tokens: Tensor) -> dict[str, Tensor]:
    """Return by name the outputs of the embedding (as the first block gets it), the blocks and the
    model."""
    seen = outputs(tiny, tokens).by_name
    names = {f"layers.{number}" for number in tiny.model.layers} | {MODEL}
    with torch.no_grad():
        embedded = {"embed": tiny.model.embed(tokens)}
    return embedded | {name: output for name, output in seen.items() if name in names}
