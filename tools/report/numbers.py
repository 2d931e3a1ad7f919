"""Format numbers, durations and ticks for reading."""

import math

SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
MOST_TICKS = 5


def short(value: float) -> str:
    """Format a number in about four digits: 4.735, 12.3k, 3.2e-05. `page.js` follows the same rule."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e15:
        return _exponent(value, 2)
    for unit, suffix in SUFFIXES:
        if size >= unit and size >= 1e4:
            return _digits(value / unit, 3) + suffix
    return _digits(value, 4)


def _digits(value: float, digits: int) -> str:
    """Format with so many significant digits, and all digits of a whole number."""
    before = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(0, digits - before)}f}"


def _exponent(value: float, digits: int) -> str:
    """Format as 1.50e-4, without Python's zeros and its plus."""
    mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def percent(share: float) -> str:
    """0.05%, 82.7%, 120%."""
    if not math.isfinite(share):
        return str(share)
    size = abs(100 * share)
    decimals = 2 if size < 1 else 1 if size < 100 else 0
    return f"{100 * share:.{decimals}f}%"


def duration(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def tick_step(span: float, most: int = MOST_TICKS) -> float:
    """Return 1, 2, 2.5 or 5 times a power of ten: the smallest for at most `most` parts."""
    power = 10.0 ** math.floor(math.log10(span / most))
    for factor in (1, 2, 2.5, 5):
        if span / (factor * power) <= most:
            return factor * power
    return 10 * power


def ticks(low: float, high: float, most: int = MOST_TICKS) -> list[tuple[float, str]]:
    """Round values between the two, and their labels."""
    step = tick_step(high - low, most)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    values = [index * step for index in range(first, last + 1)]
    largest = max(map(abs, values), default=0.0)
    unit, suffix = next(
        ((unit, suffix) for unit, suffix in SUFFIXES if largest >= max(unit, 1e4)), (1.0, "")
    )
    if largest < 1e-3:
        return [(value, _exponent(value, 1) if value else "0") for value in values]
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    if round(step / unit, decimals) != step / unit:  # 2.5
        decimals += 1
    return [(value, f"{value / unit:.{decimals}f}{suffix}" if value else "0") for value in values]


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return powers of ten, or 1, 2, 5 times these where less than two decades are shown; where fewer
    than two of these are in between, those of a linear axis."""
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    factors = (1,) if math.log10(high / low) >= 2 else (1, 2, 5)
    stride = max(1, -(-(last - first) // MOST_TICKS)) if len(factors) == 1 else 1
    powers = range(first, last + 1, stride)
    values = [factor * 10.0**power for power in powers for factor in factors]
    shown = [value for value in values if low <= value <= high]
    if len(shown) < 2:
        return ticks(low, high)
    plain = all(1e-3 <= value <= 1e4 for value in shown)
    return [(value, _power(value, plain)) for value in shown]


def _power(value: float, plain: bool) -> str:
    if not plain:
        return _exponent(value, 0)
    return f"{value:.{max(0, -math.floor(math.log10(value) + 1e-9))}f}"
