"""Compute the scores of a task from log-likelihoods, with their standard errors."""

import math

import numpy as np

from data.tasks import EncodedTask, Text

# The scores of a console line.
SHOWN = {
    "multiple_choice": ("acc", "acc_norm"),
    "perplexity": ("acc", "bits_per_byte", "word_perplexity"),
}
ERROR = "_stderr"  # ends the name of a score's standard error
CHANCE = "chance"  # the accuracy of a guess


def scores(
    task: EncodedTask, log_likelihoods: np.ndarray, mistakes: np.ndarray
) -> dict[str, float]:
    """Return the scores of a task. log_likelihoods, mistakes: training/evaluate.py::Scored. With a
    single row there is no standard error."""
    if task.kind == "perplexity":
        values = _of_texts(task, log_likelihoods)
        values |= _of_continuations(task, mistakes)
    else:
        values = _of_questions(task, log_likelihoods)
    return values | {"truncated": float(len(task.truncated))}


def by_row(task: EncodedTask, numbers: np.ndarray) -> list[list[float]]:
    """Return the numbers of each row's requests."""
    parts: list[list[float]] = [[] for _ in task.rows]
    for row, value in zip(task.row_of_request, numbers.tolist(), strict=True):
        parts[row].append(value)
    return parts


def _of_questions(task: EncodedTask, log_likelihoods: np.ndarray) -> dict[str, float]:
    """Return the accuracy by the log-likelihood of a choice, and by that divided by its length. The
    names and the lengths in characters and bytes, without the delimiter, are those of
    lm-evaluation-harness 0.4.13 (lm_eval/api/task.py, `process_results`): acc, acc_norm, acc_bytes.
    It has no length in tokens; acc_tokens divides by the tokens that are scored."""
    scored = np.array([float(request.scored) for request in task.requests])
    of_choices = by_row(task, log_likelihoods)
    tokens = by_row(task, scored)
    right: dict[str, list[float]] = {}
    for row, question in enumerate(task.rows):
        lengths = {
            "acc": [1] * len(question.choices),
            "acc_norm": [len(choice) for choice in question.choices],
            "acc_bytes": [len(choice.encode()) for choice in question.choices],
            "acc_tokens": tokens[row],
        }
        values = np.array(of_choices[row])
        for key, length in lengths.items():
            chosen = int(np.argmax(values / np.array(length)))
            right.setdefault(key, []).append(float(chosen == question.answer))
    groups = np.array([question.group for question in task.rows])
    chances = np.array([1 / len(question.choices) for question in task.rows])
    found = {CHANCE: float(chances.mean())}
    for key, each in right.items():
        found[key] = float(np.mean(each))
        found |= _error(key, _grouped_error(np.array(each), groups))
    return found | _of_groups(np.array(right["acc"]), chances, groups)


def _of_groups(right: np.ndarray, chances: np.ndarray, groups: np.ndarray) -> dict[str, float]:
    """Return the accuracy of each group, under GROUP/acc. Their mean, weighted by their sizes as in
    lm-evaluation-harness 0.4.13, is the accuracy of all questions."""
    found = {}
    for group in sorted({*groups.tolist()} - {""}):
        own = groups == group
        found[f"{group}/{CHANCE}"] = float(chances[own].mean())
        found[f"{group}/acc"] = float(right[own].mean())
        found |= _error(f"{group}/acc", _mean_error(right[own]))
    return found


def _of_texts(task: EncodedTask, log_likelihoods: np.ndarray) -> dict[str, float]:
    """Return the perplexity per word, byte and token: exp of the loss of all texts over the number
    of all their words, bytes or tokens, as lm-evaluation-harness 0.4.13 weights it
    (lm_eval/api/metrics.py, `weighted_perplexity`). As there, words are what whitespace separates,
    at the ends too."""
    nats = np.zeros(len(task.rows))
    np.subtract.at(nats, task.row_of_request, log_likelihoods)
    tokens = np.zeros(len(task.rows))
    np.add.at(tokens, task.row_of_request, [request.scored for request in task.requests])
    counts = {
        "word_perplexity": np.array([_words(row) for row in task.rows], float),
        "byte_perplexity": np.array([len(row.text.encode()) for row in task.rows], float),
        "token_perplexity": tokens,
    }
    found = {}
    for key, count in counts.items():
        rate = nats.sum() / count.sum()
        error = _ratio_error(nats, count)
        perplexity = math.exp(rate) if rate < 700 else math.inf  # a float ends at e^709
        found[key] = perplexity
        found |= _error(key, perplexity * error)  # the derivative of exp
        if key == "byte_perplexity":
            found["bits_per_byte"] = rate / math.log(2)
            found |= _error("bits_per_byte", error / math.log(2))
    return found


def _of_continuations(task: EncodedTask, mistakes: np.ndarray) -> dict[str, float]:
    """Return the share of texts with a context that greedy decoding reproduces exactly: `acc` of
    lm-evaluation-harness 0.4.13 for LAMBADA. Nothing without such a text."""
    written = []
    for row, of_row in zip(task.rows, by_row(task, mistakes), strict=True):
        if row.context is not None:
            written.append(float(sum(of_row) == 0))
    if not written:
        return {}
    return {"acc": float(np.mean(written))} | _error("acc", _mean_error(np.array(written)))


def _words(row: Text) -> int:
    """Count words like `len(re.split(r"\\s+", text))` there: whitespace at an end begins or ends an
    empty word."""
    return len(row.text.split()) + row.text[0].isspace() + row.text[-1].isspace()


def _error(key: str, value: float) -> dict[str, float]:
    return {} if math.isnan(value) else {key + ERROR: value}


def _mean_error(values: np.ndarray) -> float:
    """Return the standard error of a mean; NaN of one value."""
    if len(values) < 2:
        return math.nan
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def _grouped_error(values: np.ndarray, groups: np.ndarray) -> float:
    """Return the standard error of a mean over groups, by the variance inside them
    (lm_eval/api/metrics.py, `pooled_sample_stderr`, of lm-evaluation-harness 0.4.13); with one
    group `_mean_error`."""
    names = np.unique(groups)
    if len(names) == 1:
        return _mean_error(values)
    if len(values) <= len(names):
        return math.nan
    squares = sum(((own - own.mean()) ** 2).sum() for own in (values[groups == g] for g in names))
    return math.sqrt(float(squares) / (len(values) - len(names)) / len(values))


def _ratio_error(amounts: np.ndarray, counts: np.ndarray) -> float:
    """Return the standard error of sum(amounts) / sum(counts), by linearisation (Cochran, Sampling
    Techniques, 1977, equation 6.13 without the correction for a finite population). NaN of one
    text."""
    if len(amounts) < 2:
        return math.nan
    residuals = amounts - amounts.sum() / counts.sum() * counts
    return math.sqrt(float((residuals**2).mean()) / (len(amounts) - 1)) / float(counts.mean())


def line(name: str, kind: str, values: dict[str, float]) -> str:
    """Format the scores of a task as a console line."""
    parts = []
    for key in SHOWN[kind]:
        if key not in values:
            continue
        error = f" ± {values[key + ERROR]:.3f}" if key + ERROR in values else ""
        parts.append(f"{key} {values[key]:.3f}{error}")
    chance = f" (chance {values[CHANCE]:.3f})" if CHANCE in values else ""
    return f"{name}: {', '.join(parts)}{chance}"
