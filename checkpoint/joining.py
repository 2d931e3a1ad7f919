"""Lets a rank join a run that goes on only with the options and the code that the run began with
(run.fault_tolerant): its configuration or its source may have been edited since.

The others keep theirs: the configuration's file is read once (configs/load.py::keep_file).
"""

import json
import os
from typing import Any

from checkpoint import changes
from configs.load import dump, load_config
from configs.rounds import GIVEN, ROLE
from configs.schema import InputError
from parallelisms.mesh import world
from reliability.record import source_files

SHOWN = 5  # differences that are named


def check(store: Any, argv: list[str]) -> None:
    """Leave on the first rank what the run began with, and compare it on one that comes later. Called
    before the first round of this process. store: the launchers'. Raises InputError where it differs."""
    here = world()
    if os.environ[ROLE] == "newcomer":
        if store.check([GIVEN]):
            refuse(json.loads(store.get(GIVEN)), given(argv, here))
    elif here.rank == 0:
        store.set(GIVEN, json.dumps(given(argv, here)))


def given(argv: list[str], here: Any) -> dict[str, Any]:
    """Return the options of a run and the hashes of its source files. here: the whole mesh
    (parallelisms/mesh.py::world)."""
    options = dump(load_config(argv, here.size, here.local_size))
    return {"options": changes.options({"config": options}), "files": source_files()}


def refuse(began: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise InputError with what differs, if anything does."""
    found = []
    for name in sorted({*began["options"], *now["options"]}):
        before, after = (one["options"].get(name) for one in (began, now))
        if before != after:
            found.append(f"{name} was {json.dumps(before)} and is {json.dumps(after)}")
    for file in sorted({*began["files"], *now["files"]}):
        if began["files"].get(file) != now["files"].get(file):
            found.append(f"{file} is another")
    if not found:
        return
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    raise InputError(
        f"this rank cannot join a run that began otherwise: {'; '.join(found[:SHOWN])}{more}. The run "
        "goes on without it: put that back, or stop the run and start it again"
    )
