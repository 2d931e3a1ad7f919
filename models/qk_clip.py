"""Which rows of a layer's weights QK-clip scales, and by how much (Kimi K2, arXiv:2507.20534, section
2.1; parallelisms/qk_clip.py). gamma: of a head, the factor of its logits.

- Attention: queries and keys by sqrt(gamma). Heads that share keys, which the paper does not have,
  leave these the smallest gamma of their group, and their queries have the rest.
- Latent attention: both parts without rotation by sqrt(gamma), and the rotary queries by gamma, as
  all heads share the rotary keys.

Shapes:  H query heads   K key heads   G = H / K
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from models.latent_attention import LatentAttention
from models.layers import Attention


def of_attention(layer: Any, gamma: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield weights with a factor for each of their rows. gamma [H]."""
    grouped = gamma.view(layer.wk.weight.shape[0] // layer.head_dim, -1)  # [K, G]
    of_keys = grouped.amin(1).sqrt()
    of_queries = (grouped / of_keys[:, None]).flatten()
    yield layer.wq.weight, of_queries.repeat_interleave(layer.head_dim)
    yield layer.wk.weight, of_keys.repeat_interleave(layer.head_dim)


def of_latent_attention(layer: Any, gamma: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield weights with a factor for each of their rows. gamma [H]."""
    args = layer.args
    root = gamma.sqrt()[:, None].expand(-1, args.nope_dim)
    rotary = gamma[:, None].expand(-1, args.rope_dim)
    values = torch.ones_like(gamma)[:, None].expand(-1, args.value_dim)
    yield layer.wq_b.weight, torch.cat((root, rotary), 1).flatten()
    yield layer.wkv_b.weight, torch.cat((root, values), 1).flatten()


# class of a layer -> the factors of its weights. A layer that normalises queries or keys has none:
# its logits do not follow from the size of these weights.
FACTORS: dict[type, Callable[[Any, Tensor], Iterator[tuple[nn.Parameter, Tensor]]]] = {
    Attention: of_attention,
    LatentAttention: of_latent_attention,
}
