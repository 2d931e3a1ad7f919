"""Checkpoints in an object store keep the promises of a disk, whatever the store does meanwhile.

The store is tests/s3.py, a real server in another process. A state is filled with the number of its
step, as in tests/test_checkpoint.py.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

from checkpoint import verify
from checkpoint.stores import lease, objects
from tests.checkpoints import resume, save_all, values_on_disk
from tests.ranks import run_ranks
from tests.s3 import Server, server

URL = "s3://bucket/runs/a"
STEP = "runs/a/step-{:08d}"


@pytest.fixture(scope="module")
def _store() -> Iterator[Server]:
    with server() as running:
        yield running


@pytest.fixture
def store(_store, monkeypatch) -> Server:
    """A server with an empty bucket and no faults, which this process can reach."""
    for name, value in _store.environment.items():
        monkeypatch.setenv(name, value)
    hurry()
    _store.rules()
    for key in _store.keys():
        _store.remove(key)
    _store.ask("clear", b"")
    objects._open.cache_clear()
    return _store


def hurry() -> None:
    """No test waits as long as a run does."""
    objects.RETRIES, objects.PAUSE = 2, 0.05
    lease.BEAT, lease.PATIENCE = 0.3, 1.5


def there(environment: dict, fn: Callable, *args: Any, **options: Any) -> Any:
    """On a rank: fn, with checkpoints in the store."""
    os.environ.update(environment)
    hurry()
    return fn(*args, **options)


def save_there(environment: dict, folder: Path, steps: list[int]) -> None:
    there(environment, save_all, folder, steps, store=URL)


def resume_there(environment: dict, folder: Path) -> tuple:
    return there(environment, resume, folder, store=URL)


def test_a_save_is_what_a_disk_has(store, tmp_path):
    """The same files to the byte, and every byte verified through the store."""
    run_ranks(2, save_there, store.environment, tmp_path, [10, 20])
    run_ranks(2, save_all, tmp_path / "disk", [10, 20])
    assert verify.main([URL, "--all"]) == 0
    for step in (10, 20):
        store.download(STEP.format(step), tmp_path / f"{step}")
        (draft,) = [path for path in (tmp_path / f"{step}").iterdir() if path.is_dir()]
        for rank in range(2):
            name = verify.file_name(rank)
            on_disk = tmp_path / "disk" / verify.step_name(step, 0) / name
            assert (draft / name).read_bytes() == on_disk.read_bytes()
        assert values_on_disk(draft) == [step]
    assert not list(tmp_path.glob("step-*"))


def test_a_resume_finds_the_newest(store, tmp_path):
    run_ranks(2, save_there, store.environment, tmp_path, [10, 20])
    assert run_ranks(1, resume_there, store.environment, tmp_path) == [(20, [20.0], [])]
    assert run_ranks(4, resume_there, store.environment, tmp_path)[3] == (20, [20.0], [])
