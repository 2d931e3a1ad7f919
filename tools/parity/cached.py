"""The property of sampling: a cache of earlier tokens changes no number (training/sample.py).

Shapes:  B rows   T tokens of a row
"""

from collections.abc import Sequence

import torch
from numpy import s_
from torch import Tensor, nn

from parallelisms import cores
from tools.parity.forwards import CPU, NotAsked, outputs
from tools.parity.outputs import Outputs, noting
from tools.parity.tiny import LENGTH, Tiny
from training.sample import KeyValueCache, Sampling, sample_stream

PIECES = ([LENGTH], [8, LENGTH - 8], [1] * LENGTH, [LENGTH // 2, 1, 2, LENGTH - LENGTH // 2 - 3])
PROMPTS = ([3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3])
NEW_TOKENS = 6


def cache(tiny: Tiny) -> str | None:
    """Sampling with a cache gives the logits and tokens of sampling without: the prompt in one
    piece, in two, token by token, past the window, and side by side."""
    reason = cores.unsupported_core(tiny.model)
    if reason is not None:
        raise NotAsked(f"sampling keeps nothing of earlier tokens, since {reason}")
    tokens = tiny.tokens(1)
    without = outputs(tiny, tokens)
    for pieces in PIECES:
        failure = differs_in_pieces(tiny, tokens, pieces, without)
        if failure is not None:
            return failure
    return samples_differ(tiny)


@torch.no_grad()
def differs_in_pieces(
    tiny: Tiny, tokens: Tensor, pieces: Sequence[int], without: Outputs
) -> str | None:
    """Read tokens [1, T] in pieces of these lengths with a cache, and compare every module."""
    memory = KeyValueCache(tiny.model, LENGTH)
    start = 0
    for length in pieces:
        own = slice(start, start + length)
        positions = torch.arange(start, start + length)
        if start:
            positions = positions[None]
        with noting(tiny.model, 1, length, tiny.limit) as seen:
            memory.forward(tokens[:, own], positions, nn.functional.linear)
        moved = seen.first_moved(without, ..., s_[:, own])
        if moved is not None:
            return (
                f"{moved}: with a cache it returns other numbers for tokens {start} to "
                f"{start + length - 1}, read in pieces of {', '.join(map(str, pieces[:4]))}"
            )
        start += length
    return None


def samples_differ(tiny: Tiny) -> str | None:
    """Sample two prompts side by side and alone, with and without a cache, past the context."""
    context = max(map(len, PROMPTS)) + NEW_TOKENS // 2
    expected = [sampled(tiny, [prompt], context, False)[0] for prompt in PROMPTS]
    together = sampled(tiny, PROMPTS, context, True)
    for number, prompt in enumerate(PROMPTS):
        alone = sampled(tiny, [prompt], context, True)[0]
        if alone != expected[number]:
            return f"the model: with a cache it samples {alone}, without one {expected[number]}"
        if together[number] != expected[number]:
            return (
                f"the model: with another prompt in the batch it samples {together[number]}, alone "
                f"{expected[number]}"
            )
    return None


def sampled(
    tiny: Tiny, prompts: Sequence[Sequence[int]], context: int, keeps: bool
) -> list[list[int | None]]:
    """Return the likeliest tokens after each prompt."""
    how = Sampling(NEW_TOKENS, context, temperature=0.0, cache=keeps)
    stream = sample_stream(tiny.model, prompts, CPU, how)
    return [list(tokens) for tokens in zip(*stream, strict=True)]
