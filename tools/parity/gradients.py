"""Properties of a backward: every gradient is that of the function that forward computes, whichever way
it is computed. Each function gets the tiny copy, and returns a failure in words, or None."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from configs.schema import ActivationCheckpoint, Compile
from models.kernels.soft_cap import soft_cap
from models.mtp import LossAhead
from models.terms import AuxiliaryTerms
from parallelisms import blocks
from tools.parity.forwards import NotAsked
from tools.parity.outputs import distance
from tools.parity.tiny import LENGTH, Tiny

ROWS = 4
FLAT = 1e-5  # a slope that is none
NOTHING = 1e-12  # a gradient that is smaller, relative to the loss, is none

Gradients = dict[str, Tensor]


def loss_head(labels: Tensor, h: Tensor, weight: Tensor, cap: float = 0.0) -> Tensor:
    """Return the summed cross entropy of these labels, int64 [B, T]. cap: of the logits; 0: none."""
    logits = soft_cap(h @ weight.t(), cap)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def head_of(tiny: Tiny, tokens: Tensor, labels: Tensor) -> Any:
    """Return a loss head for these tokens and labels, int64 [B, T]. Tokens further on come from the
    beginning of the row where it ends."""
    plain = partial(loss_head, labels)
    depths = range(1, 1 + getattr(tiny.args, "mtp_depth", 0))
    if not depths:
        return plain
    further = [partial(loss_head, labels.roll(-k, 1)) for k in depths]
    ahead = torch.stack([tokens.roll(-k, 1) for k in depths], 1)
    return LossAhead(plain, further, ahead, weight=1.0)


def batch(tiny: Tiny) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, int64 [ROWS, T]."""
    return tiny.tokens(ROWS), tiny.tokens(ROWS, seed=1)


def mean_loss(tiny: Tiny, tokens: Tensor, labels: Tensor, terms: Any = None) -> Tensor:
    """Return the part of these rows in the mean loss of the whole batch."""
    head = head_of(tiny, tokens, labels)
    summed = tiny.model(tokens, torch.arange(tokens.shape[1]), head, terms=terms)
    return summed / (ROWS * LENGTH)


def new_terms() -> AuxiliaryTerms:
    """Return the terms of a step on the whole batch."""
    tokens = torch.tensor(ROWS * LENGTH)
    return AuxiliaryTerms(1.0 / tokens.to(torch.float64), tokens)


def gradients_of(tiny: Tiny, with_terms: bool) -> tuple[float, Gradients]:
    """Return the loss and the gradients of all weights that have one."""
    tiny.model.zero_grad(set_to_none=True)
    terms = new_terms() if with_terms else None
    loss = mean_loss(tiny, *batch(tiny), terms)
    loss.backward()
    return float(loss.detach()), kept(tiny.model)


def kept(model: nn.Module) -> Gradients:
    """Return the gradients in `.grad`, and leave none there."""
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def in_order_of_backward(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the weights, those of the last module first: a gradient that is lost there misses in all
    modules before it."""
    return list(model.named_parameters())[::-1]


def module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0] or "the model"


def gradients(tiny: Tiny) -> str | None:
    """Every trained weight gets a gradient, frozen ones none, and it is the slope of the loss."""
    return reaches_all(tiny) or is_no_slope(tiny)


def reaches_all(tiny: Tiny) -> str | None:
    """Look for trained weights without a gradient."""
    _, found = gradients_of(tiny, with_terms=True)
    for name, weight in in_order_of_backward(tiny.model):
        size = float(found[name].abs().max()) if name in found else 0.0
        if weight.requires_grad and not size > NOTHING:
            return (
                f"{module_of(name)}: {name} is trained and gets no gradient: forward does not use it, "
                "or detaches what it computes with it"
            )
    return None


@torch.no_grad()
def is_no_slope(tiny: Tiny) -> str | None:
    """Compare, for each weight, the gradient of the loss with the difference of two losses, a step
    apart in a direction that has a part of the gradient and a random one."""
    with torch.enable_grad():
        _, found = gradients_of(tiny, with_terms=False)
    generator = torch.Generator().manual_seed(2)
    tokens, labels = batch(tiny)
    for name, weight in in_order_of_backward(tiny.model):
        if not weight.requires_grad:
            continue
        own = found.get(name, torch.zeros_like(weight))
        chance = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        way = chance / chance.norm() + own / (own.norm() + FLAT)
        way /= way.norm()
        expected = slope(tiny, weight, way, tokens, labels)
        got = float((own * way).sum())
        if not abs(got - expected) <= tiny.slope_limit * (abs(expected) + float(own.norm()) + FLAT):
            return (
                f"{module_of(name)}: the gradient of {name} is not the slope of the loss: {got:.3e} "
                f"along a direction in which the loss changes by {expected:.3e}"
            )
    return None


def slope(tiny: Tiny, weight: Tensor, way: Tensor, tokens: Tensor, labels: Tensor) -> float:
    """Return by how much the loss changes along a direction of one weight."""
    before = weight.clone()
    losses = []
    for sign in (1, -1):
        weight.copy_(before + sign * tiny.step * way)
        losses.append(float(mean_loss(tiny, tokens, labels)))
    weight.copy_(before)
    return (losses[0] - losses[1]) / (2 * tiny.step)


# Ways to compute them -----------------------------------------------------------------------------


def recomputed(tiny: Tiny) -> str | None:
    """Gradients are the same where every block is recomputed in backward."""
    other = replace(tiny, model=deepcopy(tiny.model))
    blocks.checkpoint_blocks(other.model, ActivationCheckpoint(mode="full"))
    return differs(tiny, other, "recomputed in backward")


def compiled(tiny: Tiny) -> str | None:
    """Gradients are the same where every block is compiled (aot_eager)."""
    torch._dynamo.reset()
    other = replace(tiny, model=deepcopy(tiny.model))
    blocks.compile_blocks(other.model, Compile(enabled=True, backend="aot_eager"))
    try:
        return differs(tiny, other, "compiled")
    except torch._dynamo.exc.TorchDynamoException as error:
        first = str(error).strip().splitlines()[0]
        raise NotAsked(f"its blocks cannot be compiled (compile.enabled): {first}") from None


def differs(tiny: Tiny, other: Tiny, how: str) -> str | None:
    """Compare the gradients of plain blocks with those of the same model with other ones."""
    loss, plain = gradients_of(tiny, with_terms=True)
    other_loss, others = gradients_of(other, with_terms=True)
    if not abs(loss - other_loss) <= tiny.limit * abs(loss):
        return f"the model: with its blocks {how} the loss is {other_loss:.12g}, not {loss:.12g}"
    for name in reversed(list(plain)):
        by = distance(plain[name], others.get(name, torch.empty(0)))
        if not by <= tiny.limit:
            return f"{module_of(name)}: with blocks {how} the gradient of {name} is off by {by:.1e}"
    return None


# Terms --------------------------------------------------------------------------------------------


def terms(tiny: Tiny) -> str | None:
    """Loss, terms and gradients do not depend on how the batch is cut into microbatches."""
    whole_terms, whole = accumulated(tiny, ROWS)
    for rows in (2, 1):
        own_terms, own = accumulated(tiny, rows)
        failure = terms_differ(tiny, whole_terms, own_terms, rows)
        if failure is not None:
            return failure
        for name in reversed(list(whole)):
            by = distance(whole[name], own[name])
            if not by <= tiny.limit:
                return (
                    f"{module_of(name)}: the gradient of {name} is off by {by:.1e} in microbatches of "
                    f"{rows} rows"
                )
    return None


def terms_differ(tiny: Tiny, whole: AuxiliaryTerms, own: AuxiliaryTerms, rows: int) -> str | None:
    """Compare the sums of each layer's terms."""
    for name, of_layers in whole.sums.items():
        for layer, value in of_layers.items():
            by = distance(value.double(), own.sums[name][layer].double())
            if not by <= tiny.limit:
                return (
                    f"layers.{layer}: its term {name} is off by {by:.1e} in microbatches of {rows} "
                    "rows: a term is a sum over tokens, and no mean"
                )
    return None


def accumulated(tiny: Tiny, rows: int) -> tuple[AuxiliaryTerms, Gradients]:
    """Return the terms and gradients of the batch in microbatches of so many rows."""
    tokens, labels = batch(tiny)
    reported = new_terms()
    tiny.model.zero_grad(set_to_none=True)
    for own_tokens, own_labels in zip(tokens.split(rows), labels.split(rows), strict=True):
        mean_loss(tiny, own_tokens, own_labels, reported).backward()
    return reported, kept(tiny.model)
