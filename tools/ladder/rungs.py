"""Make a ladder of small models from one configuration, by these rules:

- Shape: width and depth shrink together, so dim / n_layers stays as near as whole heads and layers
  allow; the share of key/value heads and the widths of feed-forward layers relative to dim stay, and
  so does dim / n_heads, or half of it where that comes nearer. Over a wide range the shape matters
  little: Kaplan et al., arXiv:2001.08361, section 3.1.
- Tokens: so many per weight; Hoffmann et al., arXiv:2203.15556, take 20.
- Batch and learning rate: N^(2/3) and N^(-1/3), through the values of the configuration: Porian et
  al., arXiv:2406.19146, and the ladder of Bhagia et al., arXiv:2412.04403, which has these exponents.
  With model.width_base the rate stays: it is transferred (models/transfer.py).
- Schedule: the same shape; a warm-up that is given in steps becomes a share of the run.

N: the weights that a token is multiplied with, the output projection included. For a mixture: those
of the experts that it is sent to.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import check, stages
from configs.load import load_config
from configs.schema import Config, Derived, InputError
from models import MODELS, NUMBERS
from tools.overrides import with_options

BEGUN = ("load_path", "branch_from")  # options of [checkpoint] that give a run its first weights
MULTIPLE = 8  # of the widths of feed-forward layers
BATCH_EXPONENT = 2 / 3
RATE_EXPONENT = -1 / 3
EVALUATIONS = 20  # of each run, evenly spaced: they are the curve
SHAPE = 0.3  # how a factor in dim / n_layers counts against the same factor in N


@dataclass(frozen=True)
class Rung:
    """One run of the ladder."""

    name: str
    cfg: Config
    parameters: int  # N
    ratio: float  # tokens per weight, as asked for

    @property
    def tokens(self) -> int:
        """Tokens that the run trains on: steps are whole."""
        return tokens_of(self.cfg)

    @property
    def flops(self) -> float:
        return self.tokens * flops_per_token(self.cfg)


def tokens_of(cfg: Config) -> int:
    training = cfg.training
    return training.steps * training.global_batch_size * training.seq_len


def flops_per_token(cfg: Config, seq_len: int | None = None) -> float:
    family = MODELS[cfg.model.family]
    args = family.Args(**check.architecture(cfg.model))
    return family.flops_per_token(args, cfg.training.seq_len if seq_len is None else seq_len)


def parameters_of(cfg: Config) -> int:
    """Count N: 6 FLOPs a token for each weight that it is multiplied with, and none of attention's
    in a sequence without length."""
    return round(flops_per_token(cfg, 0) / 6)


def ladder(
    argv: list[str], sizes: Sequence[float], ratios: Sequence[float], out: Path, ranks: int = 1
) -> list[Rung]:
    """Make a run for each size and ratio, the smallest first. argv: the configuration whose loss is
    to be known; ranks: those of each run. Raises ConfigError, and InputError for a configuration
    that no ladder leads to."""
    base = load_config(argv)
    check_base(base)
    stages.refuse(base, "a ladder")
    found = legal_shapes(base, argv)
    rungs: list[Rung] = []
    for number, size in enumerate(sizes, 1):
        shape, parameters = _nearest(found, size)
        if rungs and rungs[-1].parameters == parameters:
            raise InputError(
                f"sizes {number - 1} and {number} of the ladder would be the same model of "
                f"{parameters:,} weights: ask for fewer --rungs or a wider range"
            )
        for ratio in ratios:
            name = f"{number}-{ratio:g}"
            rungs.append(_rung(base, argv, shape, parameters, ratio, out / name, ranks))
    return rungs


def check_base(base: Config) -> None:
    """Raise InputError for a configuration that no ladder leads to."""
    options = NUMBERS[base.model.family].options
    missing = [name for name in ("dim", "n_layers", "n_heads") if name not in options]
    if missing:
        raise InputError(
            f"the family {base.model.family} has no {missing[0]}: a ladder changes width and depth"
        )
    if not base.validation.interval:
        raise InputError(
            "a ladder is fitted to validation losses: set --validation.interval to any number of "
            "steps but 0"
        )
    begun = [name for name in BEGUN if getattr(base.checkpoint, name)]
    if begun or base.lora.rank:
        name = f"checkpoint.{begun[0]}" if begun else "lora.rank"
        raise InputError(f"a ladder's models begin with initial values: leave {name} out")


def legal_shapes(base: Config, argv: list[str]) -> list[tuple[dict[str, int], int, float]]:
    """Return (numbers of [model], N, distortion) of all smaller shapes that the family's rules
    allow. Raises InputError where there are none."""
    found = []
    for shape, distortion in shapes(base, check.architecture(base.model)):
        try:
            cfg = load_config(with_options(argv, _of_model(shape)))
        except InputError:
            continue  # a rule of the family
        found.append((shape, parameters_of(cfg), distortion))
    if not found:
        raise InputError(f"no smaller width and depth of {base.model.family} are legal")
    return found


def _nearest(
    found: list[tuple[dict[str, int], int, float]], size: float
) -> tuple[dict[str, int], int]:
    shape, parameters, _ = min(found, key=lambda row: abs(math.log(row[1] / size)) + SHAPE * row[2])
    return shape, parameters


def shapes(base: Config, numbers: dict[str, Any]) -> Iterator[tuple[dict[str, int], float]]:
    """Yield the numbers of [model] of all smaller shapes, and by how much each distorts the
    proportions of the whole: the logarithms of the factors."""
    aspect = numbers["n_layers"] / numbers["dim"]
    width = numbers["dim"] // numbers["n_heads"]
    for part in (1, 2):
        head = width // part
        if width % part or head % 2:
            continue
        for heads in range(1, numbers["n_heads"] * part + 1):
            exact = heads * head * aspect
            for layers in {max(1, math.floor(exact)), max(1, math.ceil(exact))}:
                shape = _shape(base, numbers, heads * head, heads, layers)
                yield shape, abs(math.log(layers / exact)) + math.log(part)


def _shape(
    base: Config, numbers: dict[str, Any], dim: int, heads: int, layers: int
) -> dict[str, int]:
    share = dim / numbers["dim"]
    shape = {"n_heads": heads, "n_layers": layers, "dim": dim}
    of_family = NUMBERS[base.model.family]
    options = of_family.options
    if "n_kv_heads" in options:
        wanted = max(1, round(numbers["n_kv_heads"] * heads / numbers["n_heads"]))
        divisors = [k for k in range(1, heads + 1) if heads % k == 0]
        shape["n_kv_heads"] = min(divisors, key=lambda k: (abs(k - wanted), k))
    for name in of_family.widths:
        if name not in numbers or name not in options or name in shape:
            continue
        unit = 1 if name.endswith("heads") else MULTIPLE
        shape[name] = max(unit, round(numbers[name] * share / unit) * unit)
    return shape


def _rung(
    base: Config,
    argv: list[str],
    shape: dict[str, int],
    size: int,
    ratio: float,
    folder: Path,
    ranks: int,
) -> Rung:
    growth = size / parameters_of(base)
    training = base.training
    parallel = _data_parallel(base, ranks)
    wanted = training.global_batch_size * growth**BATCH_EXPONENT
    batch = parallel * max(1, round(wanted / parallel))  # every rank has whole sequences
    steps = max(EVALUATIONS, round(size * ratio / (batch * training.seq_len)))
    schedule = base.lr_schedule
    warmup = schedule.warmup_fraction
    if schedule.warmup_steps is not None:
        warmup = min(0.9, schedule.warmup_steps / training.steps)
    held_out = base.validation.steps * training.global_batch_size  # sequences
    rate = base.optimizer.lr
    if not base.model.width_base:
        rate *= growth**RATE_EXPONENT
    options = {
        **_of_model(shape),
        "run.folder": folder,
        "training.stop_after": 0,
        "training.steps": steps,
        "training.global_batch_size": batch,
        "optimizer.lr": f"{rate:.4g}",
        "lr_schedule.warmup_fraction": f"{warmup:.4g}",
        "lr_schedule.warmup_steps": round(warmup * steps),
        "validation.interval": max(1, steps // EVALUATIONS),
        "validation.steps": max(1, round(held_out / batch)),
        "checkpoint.interval": max(1, steps // 4),
        "checkpoint.keep_last": 1,
        "debug.sample_tokens": 0,
        **_places(base, folder.name),
    }
    given = training.local_batch_size
    if given is not None and not isinstance(given, Derived):
        rows = batch // parallel  # of a rank: a microbatch divides them
        divisors = [size for size in range(1, min(given, rows) + 1) if rows % size == 0]
        options["training.local_batch_size"] = max(divisors)
    cfg = load_config(with_options(argv, options), ranks, ranks)
    schedule = cfg.lr_schedule.model_copy(update={"warmup_steps": None})
    return Rung(folder.name, cfg.model_copy(update={"lr_schedule": schedule}), size, ratio)


def _data_parallel(base: Config, ranks: int) -> int:
    """Return how many ranks have sequences of their own."""
    mesh = base.parallelism
    return max(1, ranks // (mesh.tensor_parallel * mesh.context_parallel * mesh.pipeline_parallel))


def _places(base: Config, name: str) -> dict[str, str]:
    """Return the options of stores, in which each run has a prefix of its own."""
    stores = {"checkpoint.store": base.checkpoint.store, "run.mirror": base.run.mirror}
    return {option: f"{url.rstrip('/')}/{name}" for option, url in stores.items() if url}


def _of_model(shape: dict[str, int]) -> dict[str, int]:
    return {f"model.{name}": value for name, value in shape.items()}


def spaced(smallest: float, largest: float, count: int) -> list[float]:
    """Return `count` sizes from the smallest to the largest, each by the same factor."""
    factor = (largest / smallest) ** (1 / (count - 1))
    return [smallest * factor**i for i in range(count)]


def within_budget(
    argv: list[str], sizes: list[float], ratios: list[float], flops: float
) -> list[float]:
    """Shrink all sizes by one factor until the ladder costs at most so many FLOPs: N times D grows
    with the square of a size."""
    while (spent := sum(rung.flops for rung in ladder(argv, sizes, ratios, Path()))) > flops:
        factor = min(0.95, math.sqrt(flops / spent))
        sizes = [size * factor for size in sizes]
    return sizes
