"""YaRN: rotary frequencies that are slowed down for contexts longer than those of pretraining (Peng
et al., arXiv:2309.00071). DeepSeek-V3, OLMo 3 and gpt-oss use it."""

import math

import torch
from torch import Tensor


def mscale(factor: float, weight: float = 1.0) -> float:
    """Return the factor by which queries and keys grow for contexts that are `factor` times as long
    (section 3.4; weight: DeepSeek-V2's, arXiv:2405.04434)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn(
    frequencies: Tensor,
    theta: float,
    factor: float,
    original_max_seq_len: float,
    beta_fast: float,
    beta_slow: float,
    truncate: bool = True,
    **_: float,
) -> Tensor:
    """Return radians per position, float32 [E/2], with the slow ones divided by `factor` (section
    3.2). frequencies [E/2]: those of `models/layers.py::rope_frequencies`, at base theta.

    A pair that turns more than beta_fast times within the original length keeps its frequency, one
    that turns less than beta_slow times is slowed down, and those in between are mixed in a
    straight line. truncate: whether the ends of this line are whole pairs, as in the authors' code;
    gpt-oss leaves them real numbers.
    """

    def pair_that_turns(times: float) -> float:
        """Return the number of the pair that turns so often, as a real number."""
        return (
            len(frequencies)
            * math.log(original_max_seq_len / (times * 2 * math.pi))
            / math.log(theta)
        )

    low = pair_that_turns(beta_fast)
    high = pair_that_turns(beta_slow)
    if truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, 2 * len(frequencies) - 1)
    pairs = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    # 0.001: as in the authors' code, for low = high
    slowed = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / factor * slowed + frequencies * (1 - slowed)
