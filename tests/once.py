"""Results that the workers of a run share, so that each is computed once."""

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

FOLDER = "PLUMBLINE_TESTS_FOLDER"  # set by tests/conftest.py where there are workers
Result = TypeVar("Result")


def once(key: tuple[str, ...], compute: Callable[[], Result]) -> Result:
    """Return what compute returns, or what another worker of this run has got from it.

    key: all that the result depends on, and what it is. The result is pickled.
    """
    if FOLDER not in os.environ:
        return compute()
    name = hashlib.sha256(repr(key).encode()).hexdigest()
    path = Path(os.environ[FOLDER], f"{name}.pickle")
    if path.exists():
        return pickle.loads(path.read_bytes())
    result = compute()
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(result))
    part.replace(path)
    return result
