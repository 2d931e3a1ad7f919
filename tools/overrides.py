"""Read command lines that hold options of train.py, and replace options in them."""

import argparse
from collections.abc import Mapping


def with_options(argv: list[str], options: Mapping[str, object]) -> list[str]:
    """Return argv with these options replaced."""
    kept = [
        argument for argument in argv if argument.split("=")[0].removeprefix("--") not in options
    ]
    return kept + [f"--{option}={value}" for option, value in options.items()]


def parser(
    prog: str, description: str | None, epilog: str | None = None
) -> argparse.ArgumentParser:
    """Return the parser of a tool that also takes --table.key=value: its options may not be
    abbreviated, and its description is printed as it is written."""
    return argparse.ArgumentParser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=epilog,
    )
