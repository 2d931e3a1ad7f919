"""Split a rank's tokens into chunks: while the experts compute one chunk, the rows of the next
arrive and the results of the one before go back (Tutel, arXiv:2206.03382, calls it adaptive
pipelining).

All chunks are sent at once, before the shared experts compute. So of dispatch only the first chunk
can be waited for, and of combine only the last. Autograd retraces this in reverse order, so the
backward pass hides as much. Each chunk is a smaller grouped GEMM of every expert, and an expert's
gradient is the sum over the chunks, in the type of the weights.
"""

from typing import Any

import torch
from torch import Tensor, nn


class RemoteDispatcher(nn.Module):
    """Dispatch and combine between ranks; replaces `models/moe.py::LocalDispatcher`.

    `dispatch` is two methods here, because all host-device syncs must come before the first row is
    sent: where one waits, it then waits for no rows. `compute` and `combine` are those of
    `LocalDispatcher`. Each method takes the state that the one before it returned.
    """

    def prepare(self, tokens: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor) -> Any:
        """Exchange the numbers of rows between ranks, which is a host-device sync. Arguments: those
        of `LocalDispatcher.dispatch`."""
        raise NotImplementedError

    def send(self, state: Any) -> Any:
        """Start to send the rows to their experts."""
        raise NotImplementedError

    def dispatch(self, tokens: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor) -> Any:
        """Start to send each token to its experts; arguments as for `LocalDispatcher.dispatch`."""
        return self.send(self.prepare(tokens, chosen, weights, counts))


class ChunkedDispatcher(nn.Module):
    """Runs another dispatcher on one chunk of the tokens after the other. Its state is a list of
    that dispatcher's states."""

    def __init__(self, dispatcher: RemoteDispatcher, chunks: int):
        super().__init__()
        self.dispatcher = dispatcher
        self.chunks = chunks

    def dispatch(
        self, tokens: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor
    ) -> list[Any]:
        """Start to send the tokens of all chunks, after all host-device syncs; arguments as for
        `LocalDispatcher.dispatch`."""
        of_chunks = [tensor.tensor_split(self.chunks) for tensor in (tokens, chosen, weights)]
        prepared = [
            self.dispatcher.prepare(*part, rows_of_experts(part[1], len(counts)))
            for part in zip(*of_chunks, strict=True)
        ]
        return [self.dispatcher.send(state) for state in prepared]

    def compute(self, states: list[Any], experts: nn.Module) -> list[Any]:
        """Run the experts on each chunk, as `LocalDispatcher.compute` does."""
        return [self.dispatcher.compute(state, experts) for state in states]

    def combine(self, states: list[Any]) -> Tensor:
        """Concatenate the combined results of the chunks."""
        return torch.cat([self.dispatcher.combine(state) for state in states])


def rows_of_experts(chosen: Tensor, experts: int) -> Tensor:
    """Count the rows of each expert: chosen int64 [N, k] -> int64 [X]."""
    chosen = chosen.flatten()
    return chosen.new_zeros(experts).scatter_add(0, chosen, torch.ones_like(chosen))
