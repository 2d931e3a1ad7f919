"""Serve a small S3 for tests, which fails on request: `server()` starts one in a separate process.

It keeps objects in memory, and knows put, get, ranges, lists, deletes, multipart uploads, SHA-256
checksums, If-Match and If-None-Match. Faults are chosen by a seed: each request that a rule matches
fails with the rule's probability. `/-/` is for the test: rules, counts, and the objects themselves.
"""

import base64
import hashlib
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, quote_plus, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

BUCKET = "bucket"
# answers in the place of the right one: status, code, headers
ANSWERS: dict[str, tuple[int, str, dict]] = {
    "500": (500, "InternalError", {}),
    "slow": (503, "SlowDown", {}),
    "denied": (403, "AccessDenied", {}),
    "clock": (403, "RequestTimeTooSkewed", {}),
    "signature": (403, "SignatureDoesNotMatch", {}),
    "no bucket": (404, "NoSuchBucket", {}),
    "region": (301, "PermanentRedirect", {"x-amz-bucket-region": "eu-central-1"}),
    "busy": (429, "TooManyRequests", {"Retry-After": "1"}),
}
KINDS = (*ANSWERS, "reset", "truncated", "flipped", "stale", "stall", "lost", "gone")
# what some stores do at every request: 409 where two requests meet, no ETag, no conditional puts
QUIRKS = ("conflict", "no etag", "no If-None-Match", "no If-Match")
STALE = 3.0  # seconds that a stale listing lags behind


class Objects:
    """Objects of the bucket, with their history, the uploads that are not complete, and the faults."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now: dict[str, tuple[bytes, str]] = {}  # key -> content, ETag
        self.past: list[
            tuple[float, str, tuple[bytes, str] | None]
        ] = []  # what each change replaced
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.rules: list[dict] = []
        self.counts: Counter[str] = Counter()
        self.log: list[list[str]] = []  # method, key, range
        self.removed: list[str] = []
        self.created: Counter[str] = Counter()  # how often an object has appeared
        self.random = random.Random(0)
        self.number = 0

    def change(self, key: str, content: bytes | None) -> str:
        self.past.append((time.monotonic(), key, self.now.get(key)))
        if content is None:
            self.removed.append(key)
            self.now.pop(key, None)
            return ""
        self.created[key] += key not in self.now
        self.number += 1
        tag = f'"{hashlib.md5(content).hexdigest()}-{self.number}"'
        self.now[key] = (content, tag)
        return tag

    def as_of(self, seconds: float) -> dict[str, tuple[bytes, str]]:
        """Return the objects as they were so many seconds ago."""
        then = dict(self.now)
        for when, key, before in reversed(self.past):
            if when < time.monotonic() - seconds:
                break
            if before is None:
                then.pop(key, None)
            else:
                then[key] = before
        return then

    def fault(self, method: str, key: str, possible: tuple[str, ...]) -> str:
        """Return the fault that this request suffers, or nothing."""
        with self.lock:
            for rule in self.rules:
                if rule["kind"] not in possible or not re.search(rule.get("key", ""), key):
                    continue
                if method not in rule.get("methods", method) or rule.get("count") == 0:
                    continue
                if self.random.random() >= rule.get("rate", 1.0):
                    continue
                if rule.get("skip", 0):
                    rule["skip"] -= 1
                    continue
                if "count" in rule:
                    rule["count"] -= 1
                self.counts[rule["kind"]] += 1
                return rule["kind"]
        return ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: Objects

    def log_message(self, *_: object) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # what every request does

    def serve(self) -> None:
        url = urlsplit(self.path)
        self.query = {name: v[0] for name, v in parse_qs(url.query, True).items()}
        self.key = unquote(url.path).removeprefix(f"/{BUCKET}").lstrip("/")
        length = int(self.headers.get("Content-Length") or 0)
        if url.path.startswith("/-/"):
            return self.for_the_test(url.path[3:], self.rfile.read(length))
        possible = [*ANSWERS, "reset", "stall", "gone"]
        if self.command in ("PUT", "POST", "DELETE"):
            possible += ["lost", "conflict"]
        if self.command in ("PUT", "GET"):
            possible.append("flipped")
        if self.command == "GET":
            possible.append("stale" if self.is_list() else "truncated")
        fault = self.objects.fault(self.command, self.key, tuple(possible))
        self.objects.log.append([self.command, self.key, self.headers.get("Range", "")])
        if fault == "gone":
            return self.cut()
        if fault == "reset" and length:
            self.rfile.read(length // 2)
            return self.cut()
        body = self.rfile.read(length)
        if fault in ANSWERS:
            return self.refuse(*ANSWERS[fault])
        if fault == "conflict":
            return self.refuse(409, "ConditionalRequestConflict", {})
        if fault == "stall":
            time.sleep(next(r["seconds"] for r in self.objects.rules if r["kind"] == "stall"))
        if fault == "flipped" and self.command == "PUT":
            body = flipped(body, self.objects.random)
            fault = ""
        with self.objects.lock:
            status, headers, answer = self.act(body, fault)
        if fault == "lost":
            return self.cut()
        self.answer(status, headers, answer, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve

    def is_list(self) -> bool:
        return "list-type" in self.query

    def has_quirk(self, kind: str) -> bool:
        """Without a draw: a store has one at all times."""
        return any(rule["kind"] == kind for rule in self.objects.rules)

    def answer(self, status: int, headers: dict, body: bytes, fault: str = "") -> None:
        if self.has_quirk("no etag"):
            headers.pop("ETag", None)
        if fault == "flipped":
            body = flipped(body, self.objects.random)
        self.send_response(status)
        length = headers.pop("Content-Length", len(body))
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault in ("truncated", "reset"):
            self.wfile.write(body[: len(body) // 2])
            return self.cut(reset=fault == "reset")
        self.wfile.write(body)

    def refuse(self, status: int, code: str, headers: dict) -> None:
        self.answer(status, dict(headers), f"<Error><Code>{code}</Code></Error>".encode())

    def cut(self, reset: bool = True) -> None:
        """End the connection, as a dead peer does or as a proxy does."""
        self.close_connection = True
        self.wfile.flush()
        if reset:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()

    # what S3 does

    def act(self, body: bytes, fault: str) -> tuple[int, dict, bytes]:
        if self.command == "PUT":
            return self.put(body)
        if self.command == "DELETE":
            if "uploadId" in self.query:
                self.objects.uploads.pop(self.query["uploadId"], None)
            elif self.key in self.objects.now:
                self.objects.change(self.key, None)
            return 204, {}, b""
        if self.command == "POST":
            return self.post(body)
        if self.is_list():
            return self.list(self.objects.as_of(STALE) if fault == "stale" else self.objects.now)
        return self.get()

    def put(self, body: bytes) -> tuple[int, dict, bytes]:
        digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
        if self.headers.get("x-amz-checksum-sha256", digest) != digest:
            return error(400, "BadDigest")
        if "uploadId" in self.query:
            parts = self.objects.uploads.get(self.query["uploadId"])
            if parts is None:
                return error(404, "NoSuchUpload")
            parts[int(self.query["partNumber"])] = body
            tag = f'"{hashlib.md5(body).hexdigest()}"'
            return 200, {"ETag": tag, "x-amz-checksum-sha256": digest}, b""
        if problem := self.precondition():
            return problem
        return 200, {"ETag": self.objects.change(self.key, body)}, b""

    def precondition(self) -> tuple[int, dict, bytes] | None:
        held = self.objects.now.get(self.key)
        if self.headers.get("If-None-Match") == "*" and held and not self.has_quirk(QUIRKS[2]):
            return error(412, "PreconditionFailed")
        wanted = None if self.has_quirk(QUIRKS[3]) else self.headers.get("If-Match")
        if wanted and held is None:
            return error(404, "NoSuchKey")
        if wanted and wanted != held[1]:
            return error(412, "PreconditionFailed")
        return None

    def post(self, body: bytes) -> tuple[int, dict, bytes]:
        if "uploads" in self.query:
            upload = uuid.uuid4().hex
            self.objects.uploads[upload] = {}
            text = f"<UploadId>{upload}</UploadId>"
            return xml("InitiateMultipartUploadResult", text)
        if "delete" in self.query:
            keys = [unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", body.decode())]
            for key in keys:
                if key in self.objects.now:
                    self.objects.change(key, None)
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            return xml("DeleteResult", deleted)
        parts = self.objects.uploads.get(self.query["uploadId"])
        if parts is None:
            return error(404, "NoSuchUpload")
        if problem := self.precondition():
            return problem
        del self.objects.uploads[self.query["uploadId"]]
        numbers = map(int, re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode()))
        tag = self.objects.change(self.key, b"".join(parts[number] for number in numbers))
        return xml("CompleteMultipartUploadResult", f"<ETag>{escape(tag)}</ETag>")

    def list(self, objects: dict) -> tuple[int, dict, bytes]:
        def name(text: str) -> str:
            return quote_plus(text) if "encoding-type" in self.query else escape(text)

        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        after = self.query.get("continuation-token", self.query.get("start-after", ""))
        keys = sorted(key for key in objects if key.startswith(prefix) and key > after)
        rows, common = [], []
        for key in keys:
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if found:
                common.append(prefix + head + delimiter)
                continue
            content, tag = objects[key]
            rows.append(
                f"<Contents><Key>{name(key)}</Key><Size>{len(content)}</Size>"
                f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{escape(tag)}</ETag>"
                "</Contents>"
            )
        text = "".join(rows[:1000])
        for folder in sorted(set(common)):
            text += f"<CommonPrefixes><Prefix>{name(folder)}</Prefix></CommonPrefixes>"
        cut = len(rows) > 1000
        text += f"<IsTruncated>{str(cut).lower()}</IsTruncated>"
        if cut:
            last = [key for key in keys if f"<Key>{name(key)}</Key>" in rows[999]][0]
            text += f"<NextContinuationToken>{escape(last)}</NextContinuationToken>"
        return xml("ListBucketResult", text)

    def get(self) -> tuple[int, dict, bytes]:
        if self.key not in self.objects.now:
            return error(404, "NoSuchKey")
        content, tag = self.objects.now[self.key]
        headers = {"ETag": tag, "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if self.command == "HEAD":
            return 200, headers | {"Content-Length": len(content)}, b""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not match:
            return 200, headers, content
        first = int(match[1])
        if first >= len(content):
            return error(416, "InvalidRange")
        part = content[first : int(match[2]) + 1 if match[2] else None]
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        return 206, headers, part

    # what the test asks for

    def for_the_test(self, name: str, body: bytes) -> None:
        objects = self.objects
        with objects.lock:
            if name == "rules":
                objects.rules = json.loads(body)
                objects.random = random.Random(0)
            elif name == "clear":
                objects.counts.clear()
                objects.log.clear()
                objects.removed.clear()
                objects.created.clear()
                objects.past.clear()
            elif name.startswith("objects/") and self.command == "PUT":
                objects.change(unquote(name[8:]), body)
            elif name.startswith("objects/") and self.command == "DELETE":
                objects.change(unquote(name[8:]), None)
            elif name.startswith("objects/"):
                return self.answer(200, {}, objects.now[unquote(name[8:])][0])
            answer = {
                "keys": sorted(objects.now),
                "uploads": len(objects.uploads),
                "counts": objects.counts,
                "log": objects.log,
                "removed": objects.removed,
                "created": objects.created,
            }
            text = json.dumps(answer).encode()
        self.answer(200, {}, text)


def error(status: int, code: str) -> tuple[int, dict, bytes]:
    return status, {}, f"<Error><Code>{code}</Code></Error>".encode()


def xml(root: str, text: str) -> tuple[int, dict, bytes]:
    return 200, {"Content-Type": "application/xml"}, f"<{root}>{text}</{root}>".encode()


def flipped(body: bytes, rng: random.Random) -> bytes:
    if not body:
        return body
    changed = bytearray(body)
    changed[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    return bytes(changed)


class Server:
    """A running server, as a test sees it."""

    def __init__(self, port: int, process: subprocess.Popen):
        self.port, self.process = port, process
        self.environment = {  # what a run needs to reach it
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7TESTS00",
            "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests",
            "AWS_REGION": "us-east-1",
        }

    def ask(self, name: str, body: bytes | None = None, method: str | None = None) -> bytes:
        url = f"http://127.0.0.1:{self.port}/-/{name}"
        request = urllib.request.Request(url, data=body, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def rules(self, *rules: dict) -> None:
        """Set the faults from now on. A rule: kind (of KINDS), key (a pattern), methods, rate, skip
        (so many requests first), count (no more than these), seconds (of a stall)."""
        self.ask("rules", json.dumps(rules).encode())

    def status(self) -> dict[str, Any]:
        return json.loads(self.ask("status"))

    def keys(self, prefix: str = "") -> list[str]:
        return [key for key in self.status()["keys"] if key.startswith(prefix)]

    def object(self, key: str) -> bytes:
        return self.ask(f"objects/{quote(key)}")

    def put(self, key: str, content: bytes) -> None:
        self.ask(f"objects/{quote(key)}", content, "PUT")

    def remove(self, key: str) -> None:
        self.ask(f"objects/{quote(key)}", method="DELETE")

    def flip(self, key: str, at: int) -> None:
        changed = bytearray(self.object(key))
        changed[at] ^= 1
        self.put(key, bytes(changed))

    def download(self, prefix: str, folder: Path) -> None:
        """Download the objects below a prefix, as files."""
        for key in self.keys(prefix):
            path = folder / key.removeprefix(prefix).lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.object(key))


@contextmanager
def server() -> Iterator[Server]:
    """Run a server in a separate process, which ends with this one."""
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Server(int(process.stdout.readline()), process)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


class Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *_: object) -> None:
        """Ignore a connection that one side has cut."""


def main() -> None:
    handler = type("Bound", (Handler,), {"objects": Objects()})
    httpd = Quiet(("127.0.0.1", 0), handler)
    print(httpd.server_address[1], flush=True)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    with suppress(KeyboardInterrupt):
        sys.stdin.read()  # ends with the process that started this one
    os._exit(0)


if __name__ == "__main__":
    main()
