"""Speculative decoding by the layers that predict further tokens (models/mtp.py): they draft tokens, and
the model's next forward checks all of them (Leviathan et al., arXiv:2211.17192; DeepSeek-V3,
arXiv:2412.19437, section 5.4.3).

The likeliest token is always taken, so a text is the one that `sample.py` gives with temperature 0. What
earlier tokens left is kept, as there, and drafts that were wrong are taken back. Beyond the context,
where nothing can be kept, nothing is drafted.

Shapes:  T positions of a forward   D = dim   V vocabulary   K layers that draft
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.mtp import MultiTokenDecoder, layers_ahead
from training.attention import for_many_shapes
from training.sample import KeyValueCache


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
    end: int = field(init=False)  # tokens of the whole text, at most
    kept: KeyValueCache = field(init=False)
    kept_of_drafts: KeyValueCache = field(init=False)
    # hidden states [1, <= K - 1, D] before the newest place: a layer that saw drafts there runs again
    h: Tensor | None = None

    def tokens(self, count: int) -> Iterator[list[int]]:
        """Yield at most `count` further tokens, as many at a time as a forward gives; none of `stops`
        is among them. Raises InputError for a model with a core that cannot be replaced."""
        self.end = len(self.text) + count
        self.open()
        while len(self.text) < self.end:
            new = self.step()
            ends = [place for place, token in enumerate(new) if token in self.stops]
            yield new[: ends[0]] if ends else new
            if ends:
                return

    def open(self) -> None:
        """Begin with nothing kept."""
        blocks = dict(self.model.blocks())
        drafting = [self.model.layers[str(i)] for i in layers_ahead(self.model.args)]
        positions = min(self.context, self.end)
        self.kept = KeyValueCache(self.model, positions, list(blocks.values()))
        self.kept_of_drafts = KeyValueCache(self.model, positions, drafting)
        self.drafts = []
        self.h = None

    @torch.no_grad()
    def step(self) -> list[int]:
        """Run one forward: check the drafts, add those that are right and the token after them to the
        text, and draft anew. Returns what was added."""
        before = len(self.text)
        fits = before <= self.context
        start = before - 1 if fits and self.kept.began else 0
        window = [*self.text, *self.drafts][start:] if fits else self.text[-self.context :]
        tokens = torch.tensor([window], device=self.device)  # [1, T]
        positions = self.positions(self.kept, start, len(window))

        def loss_head(h: Tensor, weight: Tensor) -> Tensor:
            likeliest = (h[0, -len(self.drafts) - 1 :] @ weight.t()).argmax(-1).tolist()
            right = agreeing(self.drafts, likeliest)
            self.text += likeliest[: right + 1]
            self.offered += len(self.drafts)
            self.right += right
            if right < len(self.drafts):
                self.kept.keep_first([right + 1])
            self.drafts = []
            if fits and len(self.text) < min(self.context, self.end - 1):
                self.drafts = self.draft(h[:, : len(self.text) - 1 - start], weight)
            return h.new_zeros(())

        forward = self.kept.forward if fits else self.model
        with for_many_shapes():
            forward(tokens, positions, loss_head)
        self.forwards += 1
        return self.text[before:]

    def draft(self, h: Tensor, weight: Tensor) -> list[int]:
        """Draft a token by each layer that predicts one, as far as they have room. h [1, T, D]: the
        hidden states of the newest places whose next token is known; weight [V, D] of the output
        projection."""
        depth = self.model.args.mtp_depth
        h = h if self.h is None else torch.cat((self.h, h), 1)
        self.h = h[:, max(0, h.shape[1] - depth + 1) :]
        length = h.shape[1]
        start = len(self.text) - 1 - length
        positions = self.positions(self.kept_of_drafts, start, length)
        inputs = (*self.model.rope(positions), None, None)
        known = list(self.text)
        with self.kept_of_drafts.at(positions, [length]):
            for k in range(1, 1 + depth):
                ahead = torch.tensor([known[start + k : start + k + length]], device=self.device)
                h, _ = self.model.ahead(k, h, ahead, inputs)
                known.append(int((h[0, -1] @ weight.t()).argmax()))
        room = min(self.context - len(self.text), self.end - 1 - len(self.text))
        return known[len(self.text) :][:room]

    def positions(self, kept: KeyValueCache, start: int, length: int) -> Tensor:
        """Return these positions as a cache takes them: int64 [T] at first, [1, T] later."""
        found = torch.arange(start, start + length, device=self.device)
        return found[None] if kept.began else found


def agreeing(drafts: list[int], likeliest: list[int]) -> int:
    """Return how many of the first drafts are the likeliest tokens."""
    for place, draft in enumerate(drafts):
        if draft != likeliest[place]:
            return place
    return len(drafts)
