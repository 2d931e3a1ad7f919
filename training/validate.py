"""Validation: the loss on held-out sequences, token-weighted and the same number on every mesh."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from parallelisms.mesh import Mesh
from training.feed import Feed
from training.loss import IGNORE, linear_cross_entropy


@torch.no_grad()
def validate(
    model: nn.Module, mesh: Mesh, batches: Iterable[dict], chunk_tokens: int, token_bytes: Tensor
) -> Tensor:
    """Sums over the `batches` of all ranks (dicts as data/loader.py makes them), float64 [3]: loss
    in nats, tokens predicted, bytes of those tokens. token_bytes: int64 [vocabulary], the bytes of
    text that each token stands for."""
    total = torch.zeros(3, dtype=torch.float64, device=mesh.device)
    token_bytes = token_bytes.to(mesh.device)
    for batch in batches:
        feed = Feed(model, batch, mesh, linear_cross_entropy, chunk_tokens)
        total[0] += (
            model.losses(feed) if mesh.pp > 1 else sum(model(*feed(a)) for a in range(len(feed)))
        )
        counted = feed.labels[feed.labels != IGNORE]
        total[1] += len(counted)
        total[2] += token_bytes[counted].sum()
    # only the ranks of the last stage have a loss; all ranks of a pipeline count the same tokens
    mesh.sum_over_pp(total[0])
    return mesh.sum_over_tokens(total)


def scores(sums: dict[str, Tensor]) -> dict[str, float]:
    """Metrics from the `validate` sums of each set: over all sets together, and of each set if
    there are several. (The set without a name is the held-out part of the only source.)"""
    together = {"validation_" + key: value for key, value in _scores(sum(sums.values())).items()}
    if len(sums) == 1:
        return together
    each = {name or "held_out": _scores(total) for name, total in sums.items()}
    return together | {
        f"validation/{name}/{key}": value
        for name, own in each.items()
        for key, value in own.items()
    }


def _scores(total: Tensor) -> dict[str, float]:
    """Loss in nats per token; perplexity; bits per byte of text, which compares models of different
    tokenizers."""
    nats, tokens, size = total.tolist()
    loss = nats / max(tokens, 1)
    perplexity = math.exp(loss) if loss < 700 else math.inf  # a float ends at e^709
    return {
        "loss": loss,
        "perplexity": perplexity,
        "bits_per_byte": nats / math.log(2) / max(size, 1),
    }
