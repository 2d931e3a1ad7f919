"""Computes how a tensor is cut into the parts that ranks hold, in integer arithmetic. This file
imports no torch; parallelisms/boxes.py applies it to a DTensor.

A box is a pair of lists: its offset in the tensor and its shape.
"""

Box = tuple[list[int], list[int]]
Split = list[list[int]]  # of a tensor: entries [dim, pieces, ...]


def piece(length: int, pieces: int, i: int) -> tuple[int, int]:
    """Return where piece i of `length` elements begins, and how long it is, when torch.chunk cuts
    them: all are equally long but the last ones, which may be shorter or empty."""
    size = -(-length // pieces)
    start = min(size * i, length)
    return start, min(size, length - start)


def box_at(shape: list[int], split: Split, taken: list[int]) -> Box:
    """Return the box that is left of a tensor when of each entry of `split`, one after another, one
    piece is taken, by its number."""
    offset = [0] * len(shape)
    size = list(shape)
    for (dim, pieces, *_), i in zip(split, taken, strict=True):
        start, size[dim] = piece(size[dim], pieces, i)
        offset[dim] += start
    return offset, size
