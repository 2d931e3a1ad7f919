"""Judge a run by the forecast that was written into its folder before it began
(`python -m tools.plan CONFIG --ladder DIR`): each validation says whether it is inside the band."""

import bisect
import json
import logging
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from configs.schema import Config, InputError

FILE = "forecast.json"
FORMAT = 1
# Tables of options that the loss depends on, and those of their options that it does not.
TABLES = ("model", "data", "training", "optimizer", "lr_schedule")
FREE = ("training.stop_after", "data.workers", "data.cache", "training.local_batch_size")
logger = logging.getLogger("plumbline")

Row = tuple[float, float, float, float]  # share of the run, loss, low, high


@dataclass(frozen=True)
class Forecast:
    """Expected losses of a run in nats per token of held-out text. low and high hold it with 90%, if
    the law of the ladder holds there."""

    parameters: int  # that a token is multiplied with
    tokens: int
    loss: float
    low: float
    high: float
    curve: list[Row]
    law: str
    runs: int  # of the ladder
    larger: float  # times the parameters of the largest of these
    longer: float  # times the tokens of the longest
    ladder: str  # its folder

    def at(self, share: float) -> tuple[float, float, float] | None:
        """Interpolate (loss, low, high) at a share of the run; None before the curve begins."""
        shares = [row[0] for row in self.curve]
        if share < shares[0] or share > shares[-1]:
            return None
        after = max(1, bisect.bisect_left(shares, share))
        before, then = self.curve[after - 1], self.curve[after]
        weight = (share - before[0]) / (then[0] - before[0])
        loss, low, high = (a + weight * (b - a) for a, b in zip(before[1:], then[1:], strict=True))
        return loss, low, high


def options_of(cfg: Config) -> dict[str, object]:
    """Return the options that a forecast is for, by name, as JSON holds them."""
    found = {}
    for table in TABLES:
        for key, value in getattr(cfg, table).model_dump(mode="json").items():
            found[f"{table}.{key}"] = value
    return {name: value for name, value in found.items() if name not in FREE}


def write(forecast: Forecast, cfg: Config) -> Path:
    """Write the forecast into the folder of a run that has not begun. Raises InputError where it
    has, or where the folder cannot be written."""
    folder = Path(cfg.run.folder)
    if (folder / "metrics.jsonl").exists():
        raise InputError(
            f"{folder} has begun: a forecast is written before the run, and is not changed by what "
            "came of it; name another --run.folder"
        )
    content = {"format": FORMAT, "options": options_of(cfg)} | asdict(forecast)
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
    return path


def read(folder: Path) -> tuple[Forecast, dict[str, object]] | None:
    """Return the forecast of a run and the options that it is for; None where it has none. Raises
    InputError for a file that is damaged."""
    path = folder / FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError
        numbers = {field.name: content[field.name] for field in fields(Forecast)}
        numbers["curve"] = [tuple(float(number) for number in row) for row in numbers["curve"]]
        return Forecast(**numbers), content["options"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is no forecast ({error or 'another format'}): remove it, or write it again by "
            "tools.plan --ladder"
        ) from None


def judged(cfg: Config, step: int, loss: float) -> dict[str, float]:
    """Return the metrics of the forecast at a step, and say where the loss is outside of it. Empty
    where the run has none, or one for other options, which is said."""
    try:
        found = read(Path(cfg.run.folder))
    except InputError as error:
        logger.warning(str(error))
        return {}
    if found is None:
        return {}
    forecast, options = found
    now = options_of(cfg)
    others = [name for name, value in options.items() if now.get(name) != value]
    if others:
        logger.warning(f"step {step} is not judged by {FILE}, which is for another {others[0]}")
        return {}
    expected = forecast.at(step / cfg.training.steps)
    if expected is None:
        return {}
    middle, low, high = expected
    if not low <= loss <= high:
        side = "below" if loss < low else "above"
        logger.warning(
            f"step {step}: validation loss {loss:.4f} is {side} its forecast, {low:.4f} to {high:.4f}"
        )
    return {"forecast_loss": middle, "forecast_low": low, "forecast_high": high}
