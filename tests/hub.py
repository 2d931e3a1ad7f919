"""A server that speaks as much of the Hugging Face Hub as huggingface_hub needs to fetch a file.

Real answers of the hub, by their headers: a file with ETag and commit, 404 with the code that says
what is missing, 401 and 403 for repositories that ask for a licence.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMITS = {"main": "a" * 40, "older": "b" * 40}
GATED = "gated"


class Hub(ThreadingHTTPServer):
    """models: OWNER/NAME -> {revision: folder}, or GATED. asked: (method, path) of each request."""

    def __init__(self, models: dict[str, dict[str, Path] | str]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.models = models
        self.asked: list[tuple[str, str]] = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, with_body: bool) -> None:
        self.server.asked.append((self.command, self.path))
        model, _, rest = self.path.strip("/").partition("/resolve/")
        found = self.server.models.get(model)
        if found is None:
            return self.refuse(404, "RepoNotFound")
        revision, *parts = rest.split("/")
        if found == GATED:
            return self.refuse(403 if self.headers.get("authorization") else 401, "GatedRepo")
        by_commit = {COMMITS[known]: folder for known, folder in found.items()}
        folder = {**found, **by_commit}.get(revision)
        if folder is None:
            return self.refuse(404, "RevisionNotFound")
        commit = COMMITS.get(revision, revision)
        file = folder.joinpath(*parts)
        if not file.is_file():
            return self.refuse(404, "EntryNotFound", commit)
        content = file.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def refuse(self, status: int, code: str, commit: str = "") -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"the test's hub says {code}")
        if commit:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def running_hub(models: dict[str, dict[str, Path] | str]) -> Iterator[Hub]:
    """Run a hub of these models, in a thread."""
    hub = Hub(models)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
