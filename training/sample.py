"""Sampling text from a model, on any mesh: each rank runs the same forward, and all draw the same
token.

Keys and values of earlier tokens are kept, so a token costs the forward of one position. That is
exact as long as the text fits the context: causal attention never changes what an earlier position
has computed. Beyond the context the window moves with every token, which gives all its tokens other
positions, and then each token costs the forward of a whole window.

Shapes:  B prompts   T positions of a forward   S positions kept   V vocabulary
         H query heads   K key/value heads   E head_dim
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import InputError
from models.cores import ATTENTION, CONVOLUTION, STATE, of_kind
from models.kernels.ruled_attention import PLAIN, AttentionSpec, masked_attention
from models.kernels.soft_cap import soft_cap
from parallelisms import cores
from parallelisms.boxes import whole
from training import recurrent_cache
from training.attention import for_many_shapes


class KeyValueCache:
    """What is kept of earlier tokens. Of every attention layer, keys and values, float [B, S, K, E]
    each, K this rank's share; or, in a model that computes them from narrow vectors
    (`Decoder.latents`), these vectors, float [B, S, width]. Of cores of other kinds, what
    training/recurrent_cache.py says.

    `forward` replaces these parameter-free modules by others: the model knows nothing of it. Keys
    and values of all cached positions are recomputed from the latents for every token."""

    def __init__(self, model: nn.Module, capacity: int, blocks: Sequence[nn.Module] | None = None):
        """capacity: positions to keep of each prompt, S. blocks: those whose tokens are kept; None: all.
        Raises InputError for a model with a core that cannot be replaced (parallelisms/cores.py)."""
        own = cores.unsupported_core(model)
        if own is not None:
            raise InputError(f"keys and values cannot be kept while sampling, since {own}")
        self.model, self.capacity = model, capacity
        self.parts = None
        if blocks is not None:
            self.parts = {module for block in blocks for module in block.modules()}
        self.began = False
        self.kept: list[tuple[Tensor, ...]] = []  # of each attention
        self.recurrent: list[recurrent_cache.CachedCore] = []  # of the other cores

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        loss_head: Callable[[Tensor, Tensor], Tensor],
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Run the model's forward on tokens int64 [B, T], inside of the context `at`. lengths: None if
        nothing is padding."""
        with self.at(positions, lengths or [tokens.shape[1]] * len(tokens)):
            return self.model(tokens, positions, loss_head)

    @contextmanager
    def at(self, positions: Tensor, lengths: Sequence[int]) -> Iterator[None]:
        """Go on from what is kept, inside the context, for one forward through the blocks. positions:
        int64 [T] from 0 on in the first forward, which fills the cache, and int64 [B, T] afterwards:
        the cache at these positions is replaced. lengths: the tokens of each row that are no
        padding."""
        attention = self._own(of_kind(self.model.cores(), ATTENTION))
        others = self._own(of_kind(self.model.cores(), STATE, CONVOLUTION))
        latents = self._own(self.model.latents())
        keep = self._begin
        attends: list[Callable] = list(attention)
        if self.began:
            length = int(positions.max()) + 1
            keep = partial(self._go_on, positions, length)
            by_spec = {core.spec: to_all_before(positions, length, core.spec) for core in attention}
            attends = [by_spec[core.spec] for core in attention]
        else:
            self.recurrent = [recurrent_cache.cached(core) for core in others]
        self.began = True
        for module in self.recurrent:
            module.lengths = lengths
        cached: list[nn.Module] = [*self.recurrent]
        for i, core in enumerate(attention):
            cached.append(CachedAttention(core, attends[i], None if latents else partial(keep, i)))
        for i, module in enumerate(latents):
            cached.append(CachedLatents(module, partial(keep, i)))
        with cores.instead(self.model, [*others, *attention, *latents], cached):
            yield

    def _own(self, modules: Sequence[Any]) -> Sequence[Any]:
        """Return those of these modules whose tokens are kept here."""
        return [m for m in modules if self.parts is None or m in self.parts]

    def keep_first(self, lengths: Sequence[int]) -> None:
        """Take back what the last forward, not the first one, has kept of all but the first tokens of
        each row. Keys and values there are replaced before they are seen."""
        for module in self.recurrent:
            module.keep_first(lengths)

    def _begin(self, number: int, *first: Tensor) -> tuple[Tensor, ...]:
        """Keep what attention `number` needs of the first tokens, [B, T, ...] each, and return it."""
        buffers = []
        for x in first:
            buffer = x.new_zeros(x.shape[0], self.capacity, *x.shape[2:])
            buffer[:, : x.shape[1]] = x
            buffers.append(buffer)
        self.kept.append(tuple(buffers))
        return first

    def _go_on(
        self, positions: Tensor, length: int, number: int, *new: Tensor
    ) -> tuple[Tensor, ...]:
        """Keep a few new positions, and return the first `length` of all that is kept, [B, length,
        ...] each."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]  # [B, 1]
        for kept, x in zip(self.kept[number], new, strict=True):
            kept[rows, positions] = x
        return tuple(kept[:, :length] for kept in self.kept[number])


class CachedAttention(nn.Module):
    """Attention of a few new tokens to all that are kept; replaces a core."""

    def __init__(self, core: Any, attend: Callable, keep: Callable | None):
        """attend: what computes, with the arguments of the core. keep: takes keys and values of the
        new tokens, and returns all; None where these are computed from narrow vectors that are
        kept."""
        super().__init__()
        self.core = core
        self.spec = core.spec
        self.attend = attend
        self.keep = keep

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: None, sinks: Tensor | None = None
    ) -> Tensor:
        if self.keep is not None:
            k, v = self.keep(k, v)
        own_sinks = [] if sinks is None else [sinks]
        return self.attend(q, k, v, documents, *own_sinks)


class CachedLatents(nn.Module):
    """The narrow vectors of all tokens that are kept; replaces the module that computes those of
    new ones."""

    def __init__(self, latents: nn.Module, keep: Callable):
        super().__init__()
        self.latents = latents
        self.keep = keep

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.keep(self.latents(*inputs))[0]


def to_all_before(positions: Tensor, length: int, spec: AttentionSpec = PLAIN) -> Callable:
    """Return attention by `spec` of a few positions, int64 [B, T], to those of `length` that are
    not after them."""
    of_keys = torch.arange(length, device=positions.device)
    of_queries = positions[:, None, :, None]  # [B, 1, T, 1]
    mask = of_keys <= of_queries  # [B, 1, T, length]
    if spec.window is not None:
        mask &= of_keys > of_queries - spec.window

    def attend(
        q: Tensor, k: Tensor, v: Tensor, documents: None, sinks: Tensor | None = None
    ) -> Tensor:
        if spec != PLAIN:
            return masked_attention(q, k, v, mask, spec, sinks)
        width = v.shape[-1]
        # not every kernel takes values that are narrower than keys
        v = F.pad(v, (0, k.shape[-1] - width))
        q = q.transpose(1, 2)  # [B, H, T, E]
        k = k.transpose(1, 2)  # [B, K, length, E]
        v = v.transpose(1, 2)
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
        )
        return o.transpose(1, 2)[..., :width]  # [B, T, H, width of a value]

    return attend


@contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Use the attention of the model itself, inside the context, without the modules that context
    parallelism has put in its place: there every rank has a part of a sequence, and here each has
    all of it."""
    shared = [core for core in model.cores() if isinstance(core, cores.CoreOfRanks)]
    with cores.instead(model, shared, [core.core for core in shared]):
        yield


def draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw one of the `top_k` likeliest tokens. logits: float32 [V] on the CPU; temperature 0: the
    likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    top = logits.topk(min(top_k, len(logits)))
    probabilities = (top.values / temperature).softmax(dim=0)
    return int(top.indices[torch.multinomial(probabilities, 1, generator=generator)])


@dataclass(frozen=True)
class Sampling:
    """Settings by which prompts are continued."""

    new_tokens: int  # of each prompt, at most
    context: int  # positions that the model sees at most: its training length
    stops: Collection[int] = ()  # tokens that end a text
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0
    # The length of every forward is a multiple of this, and so must `context` be: tensor parallelism
    # needs its size here, since it splits the sequence.
    multiple: int = 1
    # False: every token recomputes those before it, as the reference of tests, and where a core
    # cannot be replaced (parallelisms/cores.py)
    cache: bool = True


@torch.no_grad()
def sample_stream(
    model: nn.Module, prompts: Sequence[Sequence[int]], device: torch.device, how: Sampling
) -> Iterator[list[int | None]]:
    """Continue prompts of any lengths, at least one token each, side by side: yields the next token
    of every one, or None where a text has ended, before one of the tokens `how.stops`. Each prompt
    gets the tokens that it would get alone. Inputs are padded on the right, where causal attention
    does not look."""
    context = how.context
    # on the CPU, the same on every rank
    generators = [torch.Generator().manual_seed(how.seed) for _ in prompts]
    texts, running = [list(prompt) for prompt in prompts], [True] * len(prompts)
    longest = max(map(len, texts))
    memory = (
        KeyValueCache(model, min(context, longest + how.new_tokens) + how.multiple)
        if how.cache and longest <= context and cores.unsupported_core(model) is None
        else None
    )
    for _ in range(how.new_tokens):
        if memory and max(map(len, texts)) > context:
            memory = None
        known = memory is not None and memory.began  # all tokens but the last of each text
        windows = [text[-1:] if known else text[-context:] for text in texts]
        length = -(-max(map(len, windows)) // how.multiple) * how.multiple
        # [B, T]
        tokens = torch.tensor(
            [window + [0] * (length - len(window)) for window in windows], device=device
        )
        positions = torch.arange(length, device=device)  # [T]
        if known:
            # [B, T]
            positions = positions + torch.tensor([[len(text) - 1] for text in texts], device=device)
        # [B], where in this forward
        newest = torch.tensor([len(window) - 1 for window in windows], device=device)

        def logits_of_newest(h: Tensor, weight: Tensor, cap: float = 0.0) -> Tensor:
            h_of_newest = whole(h)[torch.arange(len(newest), device=device), newest]  # [B, D]
            return soft_cap(h_of_newest @ whole(weight).t(), cap)  # [B, V]

        forward = model
        if memory:
            forward = partial(memory.forward, lengths=list(map(len, windows)))
        with whole_sequences(model), for_many_shapes():
            logits = forward(tokens, positions, logits_of_newest).float().cpu()
        drawn: list[int | None] = [None] * len(texts)
        for i, text in enumerate(texts):
            if not running[i]:
                continue
            token = draw(logits[i], how.temperature, how.top_k, generators[i])
            running[i] = token not in how.stops
            if running[i]:
                text.append(token)
                drawn[i] = token
        if not any(running):
            return
        yield drawn


def sample(
    model: nn.Module,
    prompt: Sequence[int],
    new_tokens: int,
    context: int,
    device: torch.device,
    stops: Collection[int] = (),
    **options: Any,
) -> list[int]:
    """Return the ids of one prompt and of its continuation; the options are those of `Sampling`."""
    how = Sampling(new_tokens, context, stops, **options)
    stream = sample_stream(model, [prompt], device, how)
    return [*prompt, *(token for [token] in stream)]
