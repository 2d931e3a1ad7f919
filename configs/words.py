"""Say a number of things in a message."""


def plural(number: int, thing: str, many: str = "") -> str:
    """Return the noun that goes with a number. many: the plural of one that does not take an s."""
    return thing if number == 1 else many or f"{thing}s"
