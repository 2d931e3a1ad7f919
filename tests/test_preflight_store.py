"""Preflight of a run whose hosts share a store and no folder: four ranks on two hosts, each host in
its own folder."""

import io
import os
import re
import socket
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("obstore")

from reliability import objects
from reliability.objects import Key, Version
from tests.ranks import run_ranks
from tests.runs import TINY
from tests.s3 import Server
from tests.stores import (
    emptied,
    running_store,  # noqa: F401  a fixture
)
from tools.preflight import bucket
from tools.preflight import checks as preflight

STORE = "--checkpoint.store=s3://bucket/runs/a/checkpoints"
HEALTHY = (
    r"folder +ok +s3://bucket/runs/a is seen by all ranks, and a conditional put is given once"
)


def another_store(patch: pytest.MonkeyPatch) -> None:
    if os.environ["RANK"] == "3":
        real = bucket.prefix
        patch.setattr(bucket, "prefix", lambda cfg, name: real(cfg, name).parent / "b" / "other")


def no_conditions(patch: pytest.MonkeyPatch) -> None:
    """Serve like a server that ignores If-None-Match."""
    patch.setattr(Key, "create", lambda self, content, tries=None: Version("", None))


def refused(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    objects._open.cache_clear()


def nothing(patch: pytest.MonkeyPatch) -> None:
    pass


# name -> (sabotage, options, exit code, what the page says)
CASES: dict[str, tuple[Callable, list[str], int, str]] = {
    "healthy": (nothing, [STORE], 0, rf"{HEALTHY}(.|\n)*save +ok"),
    "no store": (nothing, [], 1, r"rank 0 \(host a\) does not see in \S+ what ranks 2-3"),
    "another store": (
        another_store,
        [STORE],
        1,
        r"rank 0 \(host a\) does not see in s3://bucket/runs/a what rank 3 \(host b\) wrote: all "
        r"hosts must name the same store",
    ),
    "no conditions": (
        no_conditions,
        [STORE],
        1,
        r"ranks 0-3 \(hosts a, b\) were all given what a store gives once: s3://bucket/runs/a",
    ),
    "no answer": (
        refused,
        [STORE],
        2,
        r"rank 3 \(host b\): s3://bucket/runs/a/\S+ no connection, or",
    ),
}


def play(name: str, place: Path) -> tuple[int, str]:
    """One preflight on this rank: its exit code, and the page if this is rank 0."""
    sabotage, options, _, _ = CASES[name]
    rank = int(os.environ["RANK"])
    host = "ab"[rank // 2]
    folder = place / host
    folder.mkdir(exist_ok=True)
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for variable, value in (("GROUP_RANK", rank // 2), ("LOCAL_RANK", rank % 2)):
            patch.setenv(variable, str(value))
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setattr(socket, "gethostname", lambda: host)
        for setting, value in (("PAUSE", 0.05), ("RETRIES", 1), ("BACKOFF", 0.02), ("TRIES", 2)):
            patch.setattr(objects, setting, value)
        sabotage(patch)
        only = "folder,save" if name == "healthy" else "folder"
        waits = 60 if name == "healthy" else 6  # half of which a rank waits for what others write
        asked = Namespace(only=only, skip="", json="", timeout=waits, expect="", device="")
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        with redirect_stdout(out):
            code = preflight.run(asked, [*TINY, *options, "--run.folder=runs/x"], store)
    objects._open.cache_clear()
    return code, out.getvalue()


def play_all(place: Path) -> dict[str, tuple[int, str]]:
    return {name: play(name, place) for name in CASES}


@pytest.mark.slow
def test_hosts_that_share_a_store_alone(
    running_store: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A healthy one passes, and leaves nothing in the store. Without the store the same hosts fail,
    and so does each fault, by name."""
    store = emptied(running_store, monkeypatch, ())
    played = run_ranks(4, play_all, tmp_path, timeout=120)
    for name, (_, _, code, words) in CASES.items():
        page = re.sub(r"\n {20}", " ", played[0][name][1])
        assert re.search(words, page), f"{name}: {page}"
        assert [of_rank[name][0] for of_rank in played] == [code] * 4, page
    assert [key for key in store.keys() if "/b/" not in key] == []
    assert not list(tmp_path.rglob(".preflight-*"))
