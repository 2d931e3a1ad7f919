"""In which type a step computes what bfloat16 is too coarse for."""

import torch
from torch import Tensor


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return float32. float64 stays as it is: there, right meshes agree to 1e-12
    (`training.param_dtype`)."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """Cast x to its wide type."""
    return x.to(wide_type(x.dtype))
