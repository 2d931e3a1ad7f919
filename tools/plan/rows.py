"""Check what --device, --stack and --routing name, before torch is imported."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomli

from configs.schema import InputError

DEVICES = Path(__file__).resolve().parent / "devices.toml"
STACKS = DEVICES.with_name("stacks.toml")


def device_row(name: str) -> dict[str, Any]:
    """Return the fields of tools/plan/device.py::Device, of a row of the table or of the one table
    of a TOML file. Raises InputError."""
    path = Path(name) if name.endswith(".toml") else DEVICES
    try:
        table = tomli.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--device {name}: cannot be read: {error}") from None
    if path == DEVICES:
        return _known(name, table)
    rows = [row for row in table.values() if isinstance(row, dict)] or [table]
    if len(rows) != 1:
        raise InputError(
            f"--device {name}: one table with the numbers of one device is needed, found "
            f"{len(rows)}"
        )
    return rows[0]


def check_device(name: str) -> None:
    """Raise InputError for a --device that names neither numbers nor this machine."""
    if name != "cpu":
        device_row(name)


def _known(name: str, table: dict[str, Any]) -> dict[str, Any]:
    if name.lower() in table:
        return table[name.lower()]
    similar = get_close_matches(name.lower(), table, n=1)
    hint = f'did you mean "{similar[0]}"? ' if similar else ""
    raise InputError(
        f"--device {name}: unknown; {hint}known are {', '.join(table)}, cpu (this machine, "
        "measured) and a TOML file of your own"
    )


def stack_row(name: str) -> dict[str, Any]:
    """Return the fields of tools/plan/stack.py::Software. Raises InputError."""
    table = tomli.loads(STACKS.read_text(encoding="utf-8"))
    if name not in table:
        raise InputError(f"--stack {name}: unknown; known are {', '.join(table)}")
    return table[name]


def check_routing(text: str) -> None:
    """Raise InputError for a --routing that is neither `balanced`, a factor nor a folder."""
    if text == "balanced" or Path(text).is_dir():
        return
    try:
        factor = float(text)
    except ValueError:
        raise InputError(
            f"--routing {text}: give balanced, a factor such as 1.5, or the folder of a run "
            "that recorded the loads of its experts (docs/experts.md)"
        ) from None
    if not 1 <= factor < float("inf"):
        raise InputError(
            f"--routing {text}: the fullest rank gets at least the mean, so the factor is 1 or more"
        )
