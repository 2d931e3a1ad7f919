"""Properties of states and convolutions (models/recurrent.py): what ranks and caches rest on, which cut a
sequence anywhere and go on from a state.

Shapes:  B rows   T tokens of a row
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from models.cores import STATE
from tools.parity.outputs import distance

CUT = 0.4  # of a row: where it is cut


def compared_with_parts(
    name: str, limit: float, found: list[str]
) -> Callable[[Any, Any, dict[str, Any], Tensor], None]:
    """Return a hook that adds a sentence to `found` where a core computes something else in parts."""

    def hook(core: Any, inputs: Any, named: dict[str, Any], output: Tensor) -> None:
        mistakes = of_state if core.kind == STATE else of_convolution
        for said, by in mistakes(core, inputs, output):
            if not by <= limit:
                found.append(f"{name} (by {by:.1e}): {said}")
                return

    return hook


def of_state(core: Any, inputs: tuple[Tensor, ...], output: Tensor) -> list[tuple[str, float]]:
    """Return what may be wrong with a state, in words, and by how much it is."""
    cut = int(inputs[0].shape[1] * CUT)
    start = [x[:, :cut] for x in inputs]
    rest = [x[:, cut:] for x in inputs]
    _, end = core.run(*inputs)
    some = torch.randn(end.shape, generator=torch.Generator().manual_seed(0), dtype=end.dtype)
    early, between = core.run(*start)
    late, joined = core.run(*rest, state=between)
    moves, adds, read = core.begin(*rest)
    moved = moves[..., None] * some if moves.dim() == 3 else moves @ some
    from_some, after = core.run(*rest, state=some)
    first = torch.zeros(inputs[0].shape[:2], dtype=torch.bool)
    first[:, cut] = True
    alone, of_alone = core.run(*rest)
    masked, of_masked = core.run(*inputs, first=first)
    return [
        ("two parts, joined by the state, are not the whole", distance(end, joined)),
        (
            "two parts, joined by the state, read something else than the whole",
            distance(output, torch.cat((early, late), 1)),
        ),
        (
            "`run` does not change a state by the map that `summary` says",
            distance(after, moved + adds),
        ),
        ("`begin` reads something else than `run`", distance(from_some, read(some))),
        (
            "a document does not begin with a state of 0, by `first`",
            max(distance(of_alone, of_masked), distance(alone, masked[:, cut:])),
        ),
    ]


def of_convolution(
    core: Any, inputs: tuple[Tensor, ...], output: Tensor
) -> list[tuple[str, float]]:
    """Return what may be wrong with a convolution, in words, and by how much it is."""
    x, weight = inputs[:2]
    T = x.shape[1]
    reach = weight.shape[1] - 1
    cut = max(int(T * CUT), reach)
    late = core.run(x[:, cut:], weight, before=x[:, cut - reach : cut])
    within = torch.cat((torch.arange(cut), torch.arange(T - cut))).expand(len(x), T)
    alone = core.run(x[:, cut:], weight)
    masked = core.run(x, weight, within)[:, cut:]
    return [
        ("after `before` it is something else than in the whole", distance(output[:, cut:], late)),
        ("it sees inputs before its document, by `within`", distance(alone, masked)),
    ]
