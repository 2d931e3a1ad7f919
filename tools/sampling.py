"""Loads a model to sample from, and continues texts with it (tools/generate.py, tools/evaluate.py).
It imports torch, which takes seconds: a command line is checked first."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from checkpoint import hf, state
from configs.schema import InputError
from configs.words import number_of
from data import turns
from data.answers import InvalidExample
from data.chat import Chat
from data.open_tokenizer import load_saved, open_tokenizer
from data.tokenizer import Tokenizer
from models import FORMATS, MODELS
from reliability.objects import Key, location
from tools import adapters, new_checkpoint, places, positions
from training.sample import Sampling, sample_stream
from training.speculative import Speculation


class Loaded(NamedTuple):
    model: nn.Module
    tokenizer: Tokenizer
    context: int  # positions that the model sees at most
    reason: str = ""  # printed: why so many


def load(folder: Path | Key, tokenizer: str = "") -> Loaded:
    """Load the model in `folder`, which may be all that the first lines of tools/generate.py list.

    tokenizer: one to use instead, as data.tokenizer names it. Raises InputError for a folder that
    has no model or no tokenizer, and for a damaged one.
    """
    if places.is_hugging_face(folder):
        return _load_hugging_face(folder, tokenizer)
    path, manifest = new_checkpoint.newest(folder)
    family, args = state.model_of(path, manifest, MODELS)
    if tokenizer:
        words = places.tokenizer_named(tokenizer)
    else:
        words = load_saved(places.tokenizer_of(path))
    model = family.build(args)
    if adapters.has_adapters(manifest):
        run = adapters.open_run(path)
        merged = run.merged(location(run.base["folder"]))
        live = model.state_dict()
        for name, tensor in zip(live, merged.read(live), strict=True):
            live[name].copy_(tensor)
    else:
        state.load_model(path, model)
    if seq_len := manifest["facts"].get("seq_len"):
        return Loaded(model, words, seq_len, "as in training")
    # a converted checkpoint
    return Loaded(model, words, *positions.within_memory(model, args))


def _load_hugging_face(folder: Path, tokenizer: str) -> Loaded:
    name, args = hf.read_model(folder, FORMATS)
    family = MODELS[name]
    words = places.tokenizer_named(tokenizer) if tokenizer else open_tokenizer(str(folder))
    with torch.device("meta"):
        model = family.build(args)
    model.to_empty(device="cpu")
    live = model.state_dict()
    shapes = {parameter: list(tensor.shape) for parameter, tensor in live.items()}
    stored = hf.weights(folder, FORMATS[name], args, shapes)
    for parameter, tensor in live.items():
        tensor.copy_(stored[parameter].read())
    return Loaded(model, words, *positions.within_memory(model, args))


def texts_as_they_come(
    loaded: Loaded, prompts: Sequence[str], new_tokens: int, **options: Any
) -> Iterator[list[str]]:
    """Yield the texts of all prompts after each token."""
    words = loaded.tokenizer
    ids = [words.encode(prompt).tolist() or [words.eot_id] for prompt in prompts]
    shown = [0] * len(ids)
    return decoded(loaded, ids, shown, new_tokens, stops=stops_of(words), **options)


def stops_of(words: Tokenizer) -> list[int]:
    """Return the ids that end a text: the tokenizer's, and the generation_config.json's."""
    named = words.companions.get(turns.GENERATION, {}).get("eos_token_id") or []
    return [words.eot_id, *(named if isinstance(named, list) else [named])]


def answers_as_they_come(
    loaded: Loaded, chat: Chat, conversations: Sequence[list], new_tokens: int, **options: Any
) -> Iterator[list[str]]:
    """Yield the answers to all conversations after each token. conversations: a list of messages
    each. Raises InputError for one that could not be trained on either."""
    ids = []
    for number, messages in enumerate(conversations, 1):
        try:
            ids.append(chat.prompt(messages).tolist())
        except InvalidExample as error:
            raise InputError(f"--chat: conversation {number} {error}") from None
    stops = stops_of(loaded.tokenizer)
    end = chat.end_of_turn()
    if end is not None:
        stops.append(end)
    elif warning := chat.warning():
        print(warning, file=sys.stderr)
    shown = [len(prompt) for prompt in ids]
    return decoded(loaded, ids, shown, new_tokens, stops=stops, **options)


def decoded(
    loaded: Loaded,
    ids: list[list[int]],
    shown: list[int],
    new_tokens: int,
    speculative: bool = False,
    **options: Any,
) -> Iterator[list[str]]:
    """Go on with these ids, in place, and yield the text of each after every token, from its token
    number `shown` on. The bytes of a character may be spread over several tokens: one that is not
    whole yet is left out, so each text begins with the one before, until the last texts, which have
    every byte."""
    model, words, context = loaded.model, loaded.tokenizer, loaded.context
    warn_of_length(loaded, ids, new_tokens)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device)
    if speculative:
        steps = speculate(model, ids, context, device, new_tokens, options["stops"])
    else:
        how = Sampling(new_tokens, context, **options)
        steps = drawn(ids, sample_stream(model, ids, device, how))
    texts = list(zip(ids, shown, strict=True))
    for _ in steps:
        yield [words.decode(text[first:]).rstrip("\ufffd") for text, first in texts]
    yield [words.decode(text[first:]) for text, first in texts]


def drawn(ids: list[list[int]], stream: Iterable[Sequence[int | None]]) -> Iterator[None]:
    """Go on with each text by the token that was drawn for it, in place."""
    for tokens in stream:
        for text, token in zip(ids, tokens, strict=True):
            if token is not None:
                text.append(token)
        yield


def speculate(
    model: nn.Module,
    ids: list[list[int]],
    context: int,
    device: torch.device,
    new_tokens: int,
    stops: Sequence[int],
) -> Iterator[None]:
    """Go on with one of these texts after the other, in place, and print how many drafts were right.
    Raises InputError for a model that drafts none."""
    if not getattr(getattr(model, "args", None), "mtp_depth", 0):
        raise InputError(places.NO_DRAFTS)
    forwards = offered = right = added = 0
    for text in ids:
        one = Speculation(model, list(text), context, device, stops)
        for tokens in one.tokens(new_tokens):
            text += tokens
            added += len(tokens)
            yield
        forwards, offered, right = forwards + one.forwards, offered + one.offered, right + one.right
    share = f" ({right / offered:.0%})" if offered else ""
    print(
        f"speculative: {right} of {number_of(offered, 'draft')} right{share}; "
        f"{number_of(added, 'token')} in {number_of(forwards, 'forward')}",
        file=sys.stderr,
    )


def warn_of_length(loaded: Loaded, ids: list[list[int]], new_tokens: int) -> None:
    """Say on stderr that texts become longer than what the model sees of them."""
    longest = max(map(len, ids)) + new_tokens
    if longest > loaded.context:
        print(
            f"a text may reach {longest:,} tokens, and the model sees the last {loaded.context:,} of "
            f"them ({loaded.reason})",
            file=sys.stderr,
        )
