"""Properties of a forward: the numbers of a token do not depend on what it must not see. Each function
gets the tiny copy, and returns a failure in words, or None.

Shapes:  B rows   T tokens of a row   H query heads   K key/value heads   E head_dim
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from numpy import s_
from torch import Tensor

from configs.schema import InputError
from models.cores import ATTENTION, cores_in, kind_of
from models.kernels.ruled_attention import masked_attention
from parallelisms import cores
from tools.parity.outputs import Outputs, Part, distance, noting
from tools.parity.recurrent import compared_with_parts
from tools.parity.tiny import LENGTH, Tiny

ALONE = 1e-5  # of a document elsewhere in a row: rotary tables are float32
DOCUMENTS = (7, 5, 7)  # tokens of the documents of a row
CPU = torch.device("cpu")


class NotAsked(Exception):
    """Raised by a property that does not apply to a model, with the reason."""


@torch.no_grad()
def outputs(tiny: Tiny, tokens: Tensor, starts: Sequence[int] = (), real: Any = None) -> Outputs:
    """Return what all modules return for these tokens, int64 [B, T]. starts: the lengths of the
    documents in each row; none: they are not told apart."""
    rows, length = tokens.shape
    positions = torch.arange(length)
    documents = None
    if starts:
        positions = positions_of(starts).expand(rows, length)
        documents = tiny.model.documents(positions, CPU)
    with noting(tiny.model, rows, length, tiny.limit) as seen:
        tiny.model(tokens, positions, documents=documents, real=real)
    return seen


def positions_of(lengths: Sequence[int]) -> Tensor:
    """Return the positions of tokens within documents of these lengths, int64 [T]."""
    return torch.cat([torch.arange(length) for length in lengths])


def changed(tokens: Tensor, part: Part, vocab: int) -> Tensor:
    """Return tokens [B, T] of which those of this part are others."""
    other = tokens.clone()
    steps = torch.arange(other[part].numel()).view(other[part].shape) % (vocab - 1)
    other[part] = (other[part] + 1 + steps) % vocab
    return other


# The properties -----------------------------------------------------------------------------------


def repeats(tiny: Tiny) -> str | None:
    """The same forward twice gives the same numbers."""
    tokens = tiny.tokens(2)
    first = outputs(tiny, tokens)
    moved = first.first_moved(outputs(tiny, tokens))
    if moved is None:
        return None
    if moved.by != moved.by:
        return f"{moved.module} returns numbers that are not finite"
    return (
        f"{moved.module} returns other numbers for the same input: it draws random ones, in "
        "validation and sampling too, or keeps a state"
    )


def causality(tiny: Tiny) -> str | None:
    """A token moves no output before it, alone in its row or among documents."""
    return sees_later(tiny, range(1, LENGTH), ()) or sees_later(tiny, (4, 9, 15), DOCUMENTS)


def sees_later(tiny: Tiny, places: Sequence[int], documents: Sequence[int]) -> str | None:
    """Change the token at each of these places, and look at those before it."""
    tokens = tiny.tokens(1)
    first = outputs(tiny, tokens, documents)
    for t in places:
        other = changed(tokens, s_[:, t], tiny.args.vocab_size)
        moved = first.first_moved(outputs(tiny, other, documents), s_[:, :t])
        if moved is not None:
            where = " of a row of documents" if documents else ""
            return f"{moved}: token {t}{where} moves what this module returns for an earlier one"
    return None


def isolation(tiny: Tiny) -> str | None:
    """A document moves nothing in the documents after it, and has the same numbers anywhere in a row."""
    try:
        cores.check_documents(tiny.model)
    except InputError as reason:
        raise NotAsked(f"a run refuses it: {reason}") from None
    tokens = tiny.tokens(1)
    first = outputs(tiny, tokens, DOCUMENTS)
    ends = (DOCUMENTS[0], sum(DOCUMENTS[:2]))
    for number, end in enumerate(ends, 1):
        own = slice(end - DOCUMENTS[number - 1], end)
        other = changed(tokens, s_[:, own], tiny.args.vocab_size)
        moved = first.first_moved(outputs(tiny, other, DOCUMENTS), s_[:, end:])
        if moved is not None:
            return f"{moved}: document {number} of a row moves what this module returns for a later one"
    return depends_on_place(tiny, tokens, first)


def depends_on_place(tiny: Tiny, tokens: Tensor, packed: Outputs) -> str | None:
    """Compare the last document with the same one alone."""
    last = DOCUMENTS[-1]
    alone = outputs(tiny, tokens[:, -last:], (last,))
    moved = packed.first_moved(alone, s_[:, LENGTH - last :], ..., ALONE)
    if moved is None:
        return None
    return f"{moved}: what this module returns for a document depends on its place in a row"


def rows(tiny: Tiny) -> str | None:
    """A row's outputs depend on no other row of the batch, and on no padding behind it."""
    return sees_neighbours(tiny) or sees_padding(tiny)


def sees_neighbours(tiny: Tiny) -> str | None:
    """Change one row, and look at the others; then compute each row alone."""
    tokens = tiny.tokens(3)
    first = outputs(tiny, tokens)
    for number, neighbour in ((0, 1), (2, 1), (1, 0)):
        other = changed(tokens, number, tiny.args.vocab_size)
        moved = first.first_moved(outputs(tiny, other), neighbour)
        if moved is not None:
            return f"{moved}: a row of a batch moves what this module returns for another row"
    alone = outputs(tiny, tokens[1:2])
    moved = first.first_moved(alone, s_[1:2], ...)
    if moved is not None:
        return f"{moved}: a row alone gives other numbers than in a batch"
    return None


def sees_padding(tiny: Tiny) -> str | None:
    """Change the padding behind a row, and the mask that says which tokens are padding."""
    tokens = tiny.tokens(2)
    end = LENGTH - 6
    real = torch.arange(LENGTH).expand(2, LENGTH) < end
    first = outputs(tiny, tokens, real=real)
    padded = changed(tokens, s_[:, end:], tiny.args.vocab_size)
    for other in (outputs(tiny, padded, real=real), outputs(tiny, tokens)):
        moved = first.first_moved(other, s_[:, :end])
        if moved is not None:
            return f"{moved}: padding moves what this module returns for the tokens before it"
    return None


def attention(tiny: Tiny) -> str | None:
    """Each core computes what its spec says: window, scale, soft cap and sinks of attention; a state and
    a convolution, in parts, what they do of a whole row."""
    found: list[str] = []
    names = {module: name for name, module in tiny.model.named_modules()}
    supporting = [core for core in cores_in(tiny.model) if cores.supports_spec(core)]
    if not supporting:
        raise NotAsked("no layer has a core with a spec")
    with ExitStack() as hooks, torch.no_grad():
        for core in supporting:
            compared = compared_with_spec if kind_of(core) == ATTENTION else compared_with_parts
            hook = compared(names[core], tiny.limit, found)
            hooks.enter_context(core.register_forward_hook(hook, with_kwargs=True))
        tiny.model(tiny.tokens(2), torch.arange(LENGTH))
    return found[0] if found else None


def compared_with_spec(
    name: str, limit: float, found: list[str]
) -> Callable[[Any, Any, dict[str, Any], Tensor], None]:
    """Return a hook that adds a sentence to `found` where a core's output is not that of its
    spec."""

    def hook(core: Any, inputs: Any, named: dict[str, Any], output: Tensor) -> None:
        q, k, v = inputs[:3]
        sinks = inputs[4] if len(inputs) > 4 else named.get("sinks")
        places = torch.arange(q.shape[1])
        mask = places[:, None] >= places  # [T, T]
        if core.spec.window is not None:
            mask &= places > places[:, None] - core.spec.window
        try:
            expected = masked_attention(q, k, v, mask[None, None], core.spec, sinks)
        except ValueError as error:
            found.append(f"{name}: {error}")
            return
        by = distance(expected, output)
        if not by <= limit:
            found.append(
                f"{name} (by {by:.1e}): it does not compute its spec, {core.spec.describe()}"
            )

    return hook
