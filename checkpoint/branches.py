"""Find the checkpoint of another run from which a new one branches off: `checkpoint.branch_from`.

A branch goes on with weights, optimizer, data position and step, in a new folder. So several
endings of one run, such as decays of a WSD schedule (Hu et al., arXiv:2404.06395), cost their own
steps alone.
"""

import json
from pathlib import Path

import tomli

from checkpoint import verify
from configs.schema import InputError, redact
from reliability import goodput
from reliability.objects import Key, Unreachable, location


def find(text: str) -> Path | Key:
    """Return the checkpoint that `RUN@STEP` names, or the newest of RUN; RUN is a folder, a URL, or
    a checkpoint. Raises InputError."""
    name, at, step = text.rpartition("@")
    if not at or not step.isdecimal():
        name, step = text, ""
    try:
        found = verify.find(location(name))
    except Unreachable:
        raise
    except InputError as error:
        raise InputError(
            f'checkpoint.branch_from = "{redact(text)}": {error}; name a run, or RUN@STEP'
        ) from None
    if step:
        named = [path for path in reversed(found) if verify.parse_name(path.name)]
        steps = {verify.parse_name(path.name)[1]: path for path in named}
        if int(step) not in steps:
            raise InputError(
                f'checkpoint.branch_from = "{redact(text)}", but {redact(name)} holds only steps '
                f"{sorted(steps)}"
            )
        found = [steps[int(step)]]
    return found[0]


def begun_by(folder: Path) -> tuple[str, str]:
    """Return the checkpoint that a run branched off, and the branch_from that named it, as its
    starts have recorded them; two empty texts for a run that is no branch, or has lost its records.

    folder: of the run.
    """
    for start in reversed(goodput.folders(folder)):
        origin, given = _recorded(start)
        if origin and given:
            return origin, given
    return "", ""


def _recorded(start: Path) -> tuple[str, str]:
    """Return the origin of a start, and its branch_from; empty where it has none, or its files
    cannot be read."""
    try:
        about = json.loads((start / "start.json").read_text(encoding="utf-8"))
        options = tomli.loads((start / "config.toml").read_text(encoding="utf-8"))
        return about["origin"], options["checkpoint"]["branch_from"]
    except (OSError, ValueError, KeyError, TypeError):
        return "", ""
