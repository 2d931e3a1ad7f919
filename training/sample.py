"""Sampling text from a model, on any mesh: each rank runs the same forward, and all draw the same token."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@torch.no_grad()
def sample(
    model: nn.Module, prompt: Sequence[int], new_tokens: int, context: int, device: torch.device, stop: int | None = None,
    temperature: float = 0.8, top_k: int = 50, seed: int = 0,
) -> list[int]:
    """The prompt continued by up to `new_tokens` token ids, ending early before the token `stop`.

    context: length of the window the model sees (its training length, a multiple of the tensor-parallel size, because
    sequence parallelism splits it). Shorter inputs are padded on the right, which causal attention cannot see, so every
    forward has one shape. temperature 0 takes the likeliest token. There is no key/value cache: this is for looking at a
    model, not for serving one.
    """
    generator = torch.Generator().manual_seed(seed)  # on the CPU, the same on every rank
    ids = list(prompt)
    positions = torch.arange(context, device=device)
    for _ in range(new_tokens):
        seen = ids[-context:]
        window = torch.zeros(1, context, dtype=torch.int64, device=device)
        window[0, : len(seen)] = torch.tensor(seen, device=device)
        logits = model(window, positions, lambda h, w: _whole(h)[0, len(seen) - 1] @ _whole(w).t()).float().cpu()  # [V]
        if temperature > 0:
            top = logits.topk(min(top_k, len(logits)))
            probs = (top.values / temperature).softmax(dim=0)
            token = top.indices[torch.multinomial(probs, 1, generator=generator)].item()
        else:
            token = logits.argmax().item()
        if token == stop:
            break
        ids.append(int(token))
    return ids
