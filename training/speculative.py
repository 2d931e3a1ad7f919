"""Speculative decoding by the layers that predict further tokens (models/mtp.py): they draft tokens, and
the model's next forward checks all of them (Leviathan et al., arXiv:2211.17192; DeepSeek-V3,
arXiv:2412.19437, section 5.4.3).

The likeliest token is always taken, so a text is the one that `sample.py` gives with temperature 0. No
keys are kept: each forward is of the whole text. This tells how many drafts are right; it does not save
time.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.mtp import MultiTokenDecoder, layers_ahead


@dataclass
class Speculation:
    """One text that a model continues. context: positions that the model sees; stops: tokens that end
    a text."""

    model: MultiTokenDecoder
    text: list[int]
    context: int
    device: torch.device
    stops: Collection[int] = ()
    drafts: list[int] = field(default_factory=list)  # of what follows the text
    forwards: int = 0
    offered: int = 0  # drafts that a forward has checked
    right: int = 0  # of them

    @torch.no_grad()
    def tokens(self, count: int) -> Iterator[list[int]]:
        """Yield at most `count` further tokens, as many at a time as a forward gives; none of `stops`
        is among them."""
        while count > 0:
            new = self.step()[:count]
            ends = [place for place, token in enumerate(new) if token in self.stops]
            new = new[: ends[0]] if ends else new
            count -= len(new)
            yield new
            if ends:
                return

    def step(self) -> list[int]:
        """Run one forward: check the drafts, add those that are right and the token after them to the
        text, and draft anew. Returns what was added."""
        before = len(self.text)
        room = self.context - before
        drafts = self.drafts[: max(room, 0)]
        window = [*self.text, *drafts][-self.context :]
        tokens = torch.tensor([window], device=self.device)  # [1, T]
        positions = torch.arange(len(window), device=self.device)

        def loss_head(h: Tensor, weight: Tensor) -> Tensor:
            likeliest = (h[0, -len(drafts) - 1 :] @ weight.t()).argmax(-1).tolist()
            right = agreeing(drafts, likeliest)
            self.text += likeliest[: right + 1]
            self.offered += len(drafts)
            self.right += right
            self.drafts = self.draft(h, weight, positions) if room > len(drafts) + 1 else []
            return h.new_zeros(())

        self.model(tokens, positions, loss_head)
        self.forwards += 1
        return self.text[before:]

    def draft(self, h: Tensor, weight: Tensor, positions: Tensor) -> list[int]:
        """Draft a token by each layer that predicts one. h [1, T, D] of a window that begins with the
        text; weight [V, D] of the output projection."""
        newest = len(self.text) - 2  # the last place whose next token is known
        inputs = (*self.model.rope(positions), None, None)
        known = list(self.text)
        for k in range(1, 1 + len(layers_ahead(self.model.args))):
            ahead = torch.zeros_like(positions)
            seen = torch.tensor(known[k:], device=self.device)[: len(ahead)]
            ahead[: len(seen)] = seen
            h, _ = self.model.ahead(k, h, ahead[None], inputs)
            known.append(int((h[0, newest] @ weight.t()).argmax()))
        return known[len(self.text) :]


def agreeing(drafts: list[int], likeliest: list[int]) -> int:
    """Return how many of the first drafts are the likeliest tokens."""
    for place, draft in enumerate(drafts):
        if draft != likeliest[place]:
            return place
    return len(drafts)
