"""Opens the text of a run, prepared or streamed, and checks that its parts fit together."""

from __future__ import annotations

from collections.abc import Callable

from configs import stages
from configs.schema import Config, InputError
from data import formats, inputs, splice, stream, too_long
from data.loader import Corpora
from data.prepare import prepare
from data.prepared import Prepared
from data.tokens import Tokens

Log = Callable[[str], object]


def open_corpora(cfg: Config, log: Log) -> Corpora:
    """Open every source and every set of a run. A source is tokenised first if that has not been
    done; a stream (data.stream) is only opened.

    log receives progress messages. Raises InputError: text that cannot be used, sources of different
    tokenizers, validation without a set.
    """
    trained_on, validated_on = inputs.sources_of(cfg)
    inputs.check_bpe(cfg)
    fraction = cfg.data.validation_fraction
    if cfg.data.stream:
        sources = {"": stream.open_source(cfg.data, log)}
    else:
        sources = {name: _prepare(cfg, at, fraction, log) for name, at in trained_on.items()}
    further = {name: _prepare(cfg, at, 0.0, log) for name, at in validated_on.items()}
    opened = [*sources.values(), *further.values()]
    for corpus in opened:
        inputs.check_masking(corpus, cfg)
    _check_tokenizers(opened)
    sets = _sets(sources, further)
    _check_fit(cfg, sources, sets, log)
    _warn(opened, log)
    if cfg.validation.interval and not sets:
        raise InputError(
            f"validation.interval = {cfg.validation.interval}, but {opened[0].folder} was prepared "
            "without held-out documents: set it to 0, or name [[validation.sets]]"
        )
    if cfg.data.stream:
        run = cfg.training
        sizes = run.seq_len, run.global_batch_size
        description = stream.describe(sources[""], cfg.run.seed, *sizes)
        return stream.StreamedCorpora(cfg, sources, sets, description)
    return Corpora(cfg, sources, sets, describe_run(cfg, sources))


def describe_run(cfg: Config, sources: dict[str, Prepared]) -> dict:
    """Describe as JSON all that decides the order of the training data."""
    weights = {"": [[0, 1.0]]}
    run = stages.whole(cfg)
    for entry in cfg.data.mixture:
        later = stages.weights(run, entry.name)
        weights[entry.name] = sorted([[0, entry.weight], *map(list, entry.schedule), *later])
    described = []
    for name, corpus in sources.items():
        described.append((name, corpus.fingerprint, corpus.train, weights[name]))
    return splice.describe(
        described,
        cfg.run.seed,
        run.training.seq_len,
        run.training.global_batch_size,
        cfg.data.skip,
        stages.sizes(run),
    )


def _prepare(cfg: Config, source: str, validation_fraction: float, log: Log) -> Prepared:
    changed = {"source": source, "validation_fraction": validation_fraction}
    return prepare(cfg.data.model_copy(update=changed), log=log)


def _check_fit(cfg: Config, sources: dict, sets: dict[str, Tokens], log: Log) -> None:
    """Say how full windows of conversations are. Raises InputError if too many are longer."""
    splits = [(name or "data.source", corpus.train) for name, corpus in sources.items()]
    if cfg.validation.interval:
        splits += [(name or "held_out", tokens) for name, tokens in sets.items()]
    for name, tokens in splits:
        too_long.check(name, tokens, cfg.training.seq_len, cfg.data.skip_failed, log)


def _warn(opened: list, log: Log) -> None:
    """Say which conversations do not teach the model to stop."""
    for corpus in opened:
        if isinstance(corpus, Prepared) and corpus.format == "chat":
            warning = formats.warning(corpus.train.folder, corpus.tokenizer)
            if warning:
                log(f"{corpus.folder}: {warning}")


def _check_tokenizers(opened: list) -> None:
    """Raise InputError unless all tokenizers are the same."""
    first = opened[0]
    for corpus in opened:
        if corpus.tokenizer.fingerprint != first.tokenizer.fingerprint:
            raise InputError(
                f"{corpus.folder} and {first.folder} were prepared with different tokenizers: use "
                "the same for both"
            )


def _sets(sources: dict, further: dict[str, Prepared]) -> dict[str, Tokens]:
    """Collect the validation sets: held-out text of sources, and text of further sets."""
    sets = {}
    for name, corpus in sources.items():
        if len(corpus.validation):
            sets[name] = corpus.validation
    for name, corpus in further.items():
        sets[name] = corpus.validation if len(corpus.validation) else corpus.train
    return sets
