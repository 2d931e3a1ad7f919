"""A rank's tokens in chunks: while the experts compute one chunk, the rows of the next arrive and the
results of the one before go back (Tutel, arXiv:2206.03382, calls it adaptive pipelining).

All chunks leave at once, before the shared experts compute. So of dispatch only the first chunk can
be waited for, and of combine only the last. Autograd retraces this in reverse order, so the backward
pass hides as much. Each chunk is a smaller grouped GEMM of every expert, and an expert's gradient is
the sum over the chunks, in the type of the weights.

An exchange is four steps of one chunk, each of which gives the next.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Combine = Callable[[], Tensor]  # wait for the results -> [N, D], the weighted sums of the tokens
Compute = Callable[[], Combine]  # wait for the rows, compute, and let the results leave
Leave = Callable[[], Compute]  # the rows leave for their experts
# (x [N, D], chosen int64 [N, k], weights [N, k], counts int64 [X] of the rows of each expert):
# exchange how many rows there are, which is a host-device sync
Prepare = Callable[[Tensor, Tensor, Tensor, Tensor], Leave]


def in_chunks(
    prepare: Prepare, chunks: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Callable[[], Tensor]]:
    """A `dispatch` for models/moe.py::MixtureOfExperts."""

    def dispatch(
        x: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor
    ) -> Callable[[], Tensor]:
        if chunks == 1:
            compute = prepare(x, chosen, weights, counts)()
            return lambda: compute()()
        of_chunks = [tensor.tensor_split(chunks) for tensor in (x, chosen, weights)]
        # every sync comes before the first row: none waits for rows
        leaving = [
            prepare(*part, rows_of_experts(part[1], len(counts)))
            for part in zip(*of_chunks, strict=True)
        ]
        arriving = [leave() for leave in leaving]

        def combine() -> Tensor:
            returning = [compute() for compute in arriving]
            return torch.cat([wait() for wait in returning])

        return combine

    return dispatch


def rows_of_experts(chosen: Tensor, experts: int) -> Tensor:
    """chosen int64 [N, k] -> int64 [X]."""
    chosen = chosen.flatten()
    return chosen.new_zeros(experts).scatter_add(0, chosen, torch.ones_like(chosen))
