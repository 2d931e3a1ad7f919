"""The last part of combine: the outputs of a token's experts become one.

Shapes:  N tokens   D = dim   k experts of a token   M = N k rows
"""

import torch
from torch import Tensor


def inverse(order: Tensor) -> Tensor:
    """Return the inverse permutation: the row that each place has got. int64 [M] -> [M]."""
    numbers = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, numbers)


def weighted(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, [N, D]. rows [M, D]: their outputs, sorted
    by expert; order int64 [M]: which (token, choice) each is of; weights [N, k]."""
    of_tokens = rows[inverse(order)].view(*weights.shape, rows.shape[1])  # [N, k, D]
    return torch.bmm(weights.to(rows.dtype)[:, None], of_tokens).squeeze(1)
