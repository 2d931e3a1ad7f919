"""Runs the threads that wait for a store, so that training does not."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

THREADS = 16  # requests of a process at the same time


class Fetchers:
    """A pool whose threads do not keep a process from ending, as those of concurrent.futures do: a
    request to a store that is gone takes a minute to fail."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[tuple[Future, Callable, tuple]] = queue.SimpleQueue()
        for _ in range(THREADS):
            threading.Thread(target=self._serve, name="data fetcher", daemon=True).start()

    def submit(self, fetch: Callable, *arguments: object) -> Future:
        future: Future = Future()
        self.waiting.put((future, fetch, arguments))
        return future

    def _serve(self) -> None:
        while True:
            future, fetch, arguments = self.waiting.get()
            try:
                future.set_result(fetch(*arguments))
            except BaseException as error:
                future.set_exception(error)


@functools.cache
def fetchers() -> Fetchers:
    """Return the threads of this process that fetch. A process that uses stores is never forked
    (reliability/objects.py)."""
    return Fetchers()
