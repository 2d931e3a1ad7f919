"""Norms that PyTorch lacks."""

import torch.nn.functional as F
from torch import Tensor, nn

from models.kernels.precision import wide


class ZeroCentredRMSNorm(nn.RMSNorm):
    """An RMSNorm whose gain is 1 + weight (Gemma, arXiv:2403.08295), so that a weight of 0 changes
    nothing. float [..., normalized_shape] in and out."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in float32, gain included: 1 + weight has fewer digits in bfloat16 than the
        weight."""
        gain = 1.0 + wide(self.weight)
        return F.rms_norm(wide(x), self.normalized_shape, gain, self.eps).type_as(x)
