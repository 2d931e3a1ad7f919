"""The z-loss: a factor times log^2 Z of each token that counts, where Z is the sum of its
exponentiated logits. It keeps logits from drifting away from 0 (PaLM, arXiv:2204.02311, section 5,
with a factor of 1e-4).

training/loss.py adds its gradient while the logits are at hand. The loss that is returned and
logged is the cross-entropy alone, so that runs with and without z-loss compare. The z-loss is
logged separately, with its factor, as `z_loss`.
"""

from torch import Tensor

from models.terms import AuxiliaryTerms


class ZLoss:
    """The z-loss of a step."""

    def __init__(self, factor: float, terms: AuxiliaryTerms) -> None:
        self.factor = factor
        self.terms = terms

    def add(self, log_z: Tensor, weights: Tensor | None = None) -> Tensor:
        """Add the z-loss of tokens. log_z: float32 [C], 0 where the label does not count; weights:
        [C], by which each token's is multiplied (training/counted.py). Returns [C] by what the
        gradient of the cross-entropy's log Z has to be multiplied, before weights: log Z + f log^2 Z
        has the gradient (1 + 2 f log Z) softmax with respect to the logits. The ranks of tensor
        parallelism have the same tokens, so each reports a part of their sum."""
        squares = log_z.double().square()
        total = self.factor * (squares if weights is None else squares * weights).sum()
        self.terms.report("z_loss", total / self.terms.tp)
        return 1 + 2 * self.factor * log_z


def open_z_loss(factor: float, terms: AuxiliaryTerms) -> ZLoss | None:
    """Return the z-loss of a step, or None for a factor of 0."""
    return ZLoss(factor, terms) if factor else None
