"""Find the scored tokens that greedy decoding would not have written.

A text after a context counts as right if there is none: that is the accuracy of LAMBADA in
lm-evaluation-harness (lm_eval/models/huggingface.py, `_loglikelihood_tokens`). Its model reads the
text too, so one forward shows all of its tokens.

Shapes:  b sequences   T positions   D width   V vocabulary (this rank's rows of it)   n scored tokens
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallelisms.boxes import box_of
from training.loss import IGNORE, linear_cross_entropy


class LossAndMistakes:
    """Loss head for evaluation, which training/microbatches.py::Microbatches calls in place of
    `linear_cross_entropy`. `mistakes` float32 [A, b, T], shaped as `losses`, has a 1 at every label
    that is not the likeliest token."""

    def __init__(self, labels: Tensor, device: torch.device) -> None:
        """labels: int64 [A, b, T], of a batch."""
        self.mistakes = torch.zeros(labels.shape, device=device)

    def __call__(
        self,
        h: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk_tokens: int,
        each: Tensor,
        z_loss: None,
        cap: float = 0.0,
    ) -> Tensor:
        # `each` is one microbatch of `Microbatches.losses`, and this is the same one of `mistakes`
        own = self.mistakes.as_strided(each.shape, each.stride(), each.storage_offset())
        own.copy_(mistakes(h, weight, labels, chunk_tokens))
        # a soft cap leaves the order of logits as it is
        return linear_cross_entropy(h, weight, labels, chunk_tokens, each=each, cap=cap)


def mistakes(h: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    """Mark the labels that count and are not the likeliest token with 1, others with 0: float32 [b,
    T]. The arguments are those of `linear_cross_entropy`. Of tokens that are equally likely, the
    first one is taken, as by argmax."""
    group = None
    first_row = 0
    vocabulary = len(weight)
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        group = mesh.get_group()
        (first_row, _), _ = box_of(weight)
        weight = weight.to_local()
        assert isinstance(h, DTensor)
        h = h.full_tensor()
    h = h.flatten(0, 1)  # [b T, D]
    label = labels.flatten()
    found = torch.zeros(len(label), device=labels.device)
    scored = (label != IGNORE).nonzero().squeeze(1)
    for first in range(0, len(scored), chunk_tokens):
        rows = scored[first : first + chunk_tokens]
        top, likeliest = (h[rows] @ weight.t()).max(dim=1)  # [n]
        likeliest += first_row
        if group is not None:
            own_top = top.clone()
            dist.all_reduce(top, dist.ReduceOp.MAX, group)
            likeliest = likeliest.where(own_top == top, vocabulary)
            dist.all_reduce(likeliest, dist.ReduceOp.MIN, group)
        found[rows] = (likeliest != label[rows]).float()
    return found.view(labels.shape)
