"""Say a number of things in a message."""


def plural(number: int, thing: str, many: str = "") -> str:
    """Return the noun that goes with a number. many: the plural of one that does not take an s."""
    return thing if number == 1 else many or f"{thing}s"


def number_of(number: int, thing: str, many: str = "") -> str:
    """Return a number and its noun: 1 file, 2,000 files."""
    return f"{number:,} {plural(number, thing, many)}"


def a_kind(value: object) -> str:
    """Return the type of a value with its article: a list, an int."""
    kind = type(value).__name__
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
