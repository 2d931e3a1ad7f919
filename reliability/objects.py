"""Gives objects of a store (S3, Google Cloud Storage, Azure) an interface like pathlib's.

A `Key` has the few methods of a `Path` that reading checkpoints and corpora needs, and the
conditional puts that a store has instead of a lock and a rename. obstore (the Rust object_store) is
the client. It retries a request by itself, but not a put whose answer was lost: that may have
succeeded. Here such a put is tried again, and an existing object counts as written if it holds our
bytes.

Credentials and endpoints come from the environment alone (AWS_*, GOOGLE_*, AZURE_*). This file
imports no torch.
"""

import contextlib
import datetime
import errno
import functools
import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tomli

from configs.schema import STORE_URL, InputError, dots_in, redact
from reliability import answers, signed_list
from reliability.answers import cause

# Of one request, in seconds: 16 MiB at 0.3 MB/s. A request that takes longer counts as failed.
REQUEST_SECONDS = 60.0
CONNECT_SECONDS = 5.0
RETRIES = 6  # of a request, by obstore
BACKOFF = 0.2  # seconds before the first of these; before each later one twice as long, at most 5
TRIES = 5  # of an operation, each with so many retries
PAUSE = 2.0  # seconds between two of these
FIRST_SECONDS = 60.0  # after which a bucket that has never answered is not asked again
# What a training step waits for is small, and asked for again sooner: a request may take so long,
# and an operation is tried so often.
SOON_SECONDS = 10.0
SOON_TRIES = 3
# Bytes of one part of an upload, and how many parts are in flight: what an upload takes of memory.
CHUNK = 1 << 24
IN_FLIGHT = 4
PARTS = 10_000  # that an upload may have; S3 allows no more
# Reads of fewer bytes than this fetch so many, because small tensors are adjacent.
NEAR = 1 << 20
PIECES = 4  # that a large read is fetched in at the same time
# What obstore reads from the environment, unless options of the client are given: ours are times.
CLIENT = (
    "allow_http",
    "allow_invalid_certificates",
    "proxy_url",
    "proxy_ca_certificate",
    "proxy_excludes",
)
# tools/mirror.py says in this variable which URL it keeps a copy at.
MIRRORED = "PLUMBLINE_MIRROR"
# And in this one a file on this machine that grows when the copy shall be brought up to date.
ASKED = "PLUMBLINE_MIRROR_ASKED"
CONFLICT = 409  # HTTP: S3 could not decide between two requests; Azure: it is there already
PREFIXES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}


class Unreachable(InputError):
    """A store that does not answer, or refuses. It does not mean that an object is missing."""


class Version(NamedTuple):
    """Version of an object, as a conditional put names it."""

    e_tag: str | None
    number: str | None  # Google's generation


class Stat(NamedTuple):
    """Size, time and version of an object."""

    size: int  # bytes
    mtime_ns: int
    e_tag: str | None = None


def location(text: "str | Path | Key") -> "Path | Key":
    """Parse a path or a URL. Raises InputError for a URL that is none of ours."""
    url = STORE_URL.fullmatch(str(text))
    if isinstance(text, Path) or "://" not in str(text):
        return Path(text)
    if problem := dots_in(str(text)):
        raise InputError(f"{redact(str(text))} {problem}")
    if not url:
        raise InputError(
            f"{redact(str(text))} names no place in a store: write s3://bucket/prefix, "
            "gs://bucket/prefix, az://container/prefix or file:///folder"
        )
    if url["file"]:
        return Path(url["folder"])
    bucket, _, prefix = url["rest"].partition("/")
    return Key(url["scheme"], bucket, prefix.strip("/"))


def checkpoint_places(run: "Path | Key") -> list["Path | Key"]:
    """List the places where a run may have checkpoints: in its folder, and in its checkpoint.store.
    Raises Unreachable."""
    places = [run / "checkpoints"]
    options = run / "config.toml"
    try:
        store = tomli.loads(options.read_bytes().decode())["checkpoint"]["store"]
    except (OSError, ValueError, KeyError, TypeError):
        return places  # it has no options, or says nothing of a store
    return [*places, location(store)] if store else places


def check_mirrored(url: str) -> None:
    """Raise InputError if no mirror process keeps the copy of this run's folder that run.mirror
    asks for."""
    if url and os.environ.get(MIRRORED) != str(location(url)):
        raise InputError(
            f"run.mirror = {url}: nothing copies the run's folder there: start the run with "
            "./run_train.sh, or with python -m tools.mirror before its command"
        )


def ask_mirror() -> None:
    """Ask the mirror process, if there is one, to send the new files of this run's folder now.
    Returns at once, and a mirror that cannot be reached is no error."""
    with contextlib.suppress(OSError):
        if path := os.environ.get(ASKED):
            with open(path, "ab") as file:
                file.write(b".")


def missing_package(url: str) -> str:
    """Return a sentence about installing obstore if it is missing; "" if it is there."""
    if importlib.util.find_spec("obstore"):
        return ""
    return (
        f"{url} needs the package obstore: pip install obstore==0.12.1, or name a folder of this "
        "machine"
    )


@functools.cache
def _open(scheme: str, bucket: str, soon: bool = False) -> Any:
    """Open the bucket with obstore. Raises InputError."""
    if problem := missing_package(f"{scheme}://{bucket}"):
        raise InputError(problem)
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    seconds = SOON_SECONDS if soon else REQUEST_SECONDS
    client: dict[str, Any] = {
        "timeout": datetime.timedelta(seconds=seconds),
        "connect_timeout": datetime.timedelta(seconds=CONNECT_SECONDS),
    }
    for name in CLIENT:
        value = _from_environment(scheme, name)
        if value is not None:
            client[name] = _is_true(value) if "allow" in name else value
    backoff = {
        "init_backoff": datetime.timedelta(seconds=BACKOFF),
        "max_backoff": datetime.timedelta(seconds=5),
        "base": 2,
    }
    retry = {
        "max_retries": RETRIES,
        "retry_timeout": datetime.timedelta(seconds=2 * seconds),
        "backoff": backoff,
    }
    # S3 compares a checksum of every part that arrives
    config = {"checksum_algorithm": "SHA256"} if scheme == "s3" else {}
    try:
        return from_url(
            f"{scheme}://{bucket}", config=config, client_options=client, retry_config=retry
        )
    except (BaseError, ValueError) as error:
        raise InputError(f"{scheme}://{bucket} cannot be used: {cause(error)}") from None


def _from_environment(scheme: str, name: str) -> str | None:
    return os.environ.get(f"{PREFIXES[scheme]}_{name.upper()}")


def _is_true(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes")


@functools.cache
def _process() -> int:
    """Return the process in which obstore's threads run. A fork has none of them, and would wait
    forever."""
    return os.getpid()


class Key:
    """A name in a bucket: an object, or a prefix of objects up to a slash."""

    tries = 3  # a network may damage what it carries: so often is read what has a wrong hash

    def __init__(self, scheme: str, bucket: str, name: str, soon: bool = False):
        """soon: whether a training step waits for its requests."""
        self.scheme, self.bucket, self.path, self.soon = scheme, bucket, name, soon

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> "Key":
        return Key(self.scheme, self.bucket, self.path.rpartition("/")[0], self.soon)

    @property
    def root(self) -> str:
        return f"{self.scheme}://{self.bucket}"

    @property
    def store(self) -> Any:
        return _open(self.scheme, self.bucket, self.soon)

    @property
    def is_protected(self) -> bool:
        """Return whether TLS detects damage by the network."""
        return not _is_true(_from_environment(self.scheme, "allow_http"))

    def __truediv__(self, name: str) -> "Key":
        return Key(self.scheme, self.bucket, f"{self.path}/{name}".strip("/"), self.soon)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.path}"

    def resolve(self) -> "Key":
        return self

    def _call(self, operation: Callable, *args: Any, tries: int | None = None, **how: Any) -> Any:
        """Call operation(store, path, ...), and try again after a failure. Raises
        FileNotFoundError, the exceptions of a condition (`conflicts`), or Unreachable."""
        store = self.store
        if _process() != os.getpid():
            raise Unreachable(
                f"{self}: this process was forked from one that uses stores, and has none of the "
                "threads that do: start it with spawn"
            )
        tries = tries or (SOON_TRIES if self.soon else TRIES)
        with answers.awaited(self.root):
            return self._tries(tries, functools.partial(operation, store, self.path, *args, **how))

    def _tries(self, tries: int, request: functools.partial) -> Any:
        from obstore.exceptions import (
            BaseError,
            InvalidPathError,
            PermissionDeniedError,
            UnauthenticatedError,
        )

        began = time.monotonic()
        for i in range(tries):
            try:
                done = request()
                answers.HEARD.add(self.root)
                return done
            except conflicts() as error:
                if "mode" in request.keywords:
                    answers.HEARD.add(self.root)
                    raise
                failure: Exception = error
            except (ValueError, InvalidPathError) as error:
                raise InputError(f"{self}: {cause(error)}") from None
            except (PermissionDeniedError, UnauthenticatedError) as error:
                raise self._refused(error) from None
            except (BaseError, OSError) as error:
                self._raise_final(error)
                failure = error
            late = time.monotonic() > began + FIRST_SECONDS
            if i + 1 == tries or (late and self.root not in answers.HEARD):
                break
            time.sleep(PAUSE)
        seconds = time.monotonic() - began
        raise self._unreachable(
            f"{cause(failure)} ({i + 1} tries with up to {RETRIES} retries each, in {seconds:.0f} s)"
        ) from None

    def _raise_final(self, error: Exception) -> None:
        """Raise what to ask again would not change."""
        if answers.no_bucket(error):
            raise self._no_bucket() from None
        if isinstance(error, FileNotFoundError):
            answers.HEARD.add(self.root)
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self)) from None
        if answers.is_final(error):
            raise self._refused(error) from None

    def _refused(self, error: Exception) -> Unreachable:
        return self._unreachable(f"{cause(error)}: the store refuses it")

    def _unreachable(self, why: str) -> Unreachable:
        place = self.parent if self.name.startswith(".") else self  # a lease: what the user named
        return Unreachable(f"{place}: {why}; the endpoint is {answers.endpoint(self.scheme)}")

    # Reading

    def size(self) -> int:
        return self.stat().size

    def exists(self) -> bool:
        try:
            self.size()
        except FileNotFoundError:
            return False
        return True

    def read_bytes(self) -> bytes:
        return self.read_version()[0]

    def read_version(self) -> tuple[bytes, Version]:
        """Read the whole object, and its version."""
        return self._call(_get)

    def read_range(self, start: int, end: int) -> bytes | memoryview:
        """Read the bytes from `start` to before `end`."""
        return self._call(_get_range, start, end)

    def read_agreed(self, start: int, end: int) -> bytes | memoryview:
        """Read a range that has no hash. Without TLS it is read until two reads agree."""
        content = self.read_range(start, end)
        if self.is_protected:
            return content
        for _ in range(self.tries):
            before = content
            content = self.read_range(start, end)
            if content == before:
                return content
        raise Unreachable(
            f"{self}: bytes {start} to {end} came differently {self.tries + 1} times: use https"
        )

    def download(self, path: Path, found: "Stat") -> "Stat":
        """Write the object to a file, as it was found or, if it was replaced meanwhile, as it is now:
        which is returned. Raises OSError, or Unreachable."""
        for _ in range(TRIES):
            with open(path, "wb") as file:
                for start in range(0, found.size, CHUNK):
                    file.write(self.read_agreed(start, min(start + CHUNK, found.size)))
            before, found = found, self.stat()
            if before == found:
                return found
        raise Unreachable(f"{self} changes all the time: is a run writing it?")

    def open(self) -> "RangeReader":
        return RangeReader(self, self.size())

    def folders(self) -> list[str]:
        """List the names of objects below, up to the next slash."""
        paths = self._call(_folders)
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def below(self) -> dict[str, int]:
        """List the objects below, with their sizes, by the rest of their names."""
        return {rest: stat.size for rest, stat in self.stats_below().items()}

    def stat(self) -> "Stat":
        import obstore

        return _stat(self._call(obstore.head))

    def stats_below(self) -> dict[str, "Stat"]:
        """List the objects of `below` with sizes and times. The empty object that a console makes
        of the prefix itself is left out."""
        rows = self._call(_list)
        start = len(self.path) + 1 if self.path else 0
        return {row["path"][start:]: _stat(row) for row in rows if row["path"][start:]}

    # Writing

    def create(self, content: bytes, tries: int | None = None) -> Version | None:
        """Put an object that is not there yet. None if it is, with other bytes."""
        return self._put_if("create", content, tries)

    def replace(self, content: bytes, version: Version, tries: int | None = None) -> Version | None:
        """Put the object in the place of this version of it. None if it is another by now."""
        mode = {"e_tag": version.e_tag, "version": version.number}
        mode = {name: value for name, value in mode.items() if value is not None}
        return self._put_if(mode, content, tries)

    def _put_if(self, mode: Any, content: bytes, tries: int | None) -> Version | None:
        """Put under a condition, and look what is there where the store refuses it: the answer to a
        put of ours may have been lost, and a conflict (S3: with another request at this moment) says
        nothing of the condition."""
        import obstore

        how = {"mode": mode, "use_multipart": False, "tries": tries}
        for i in range(TRIES):
            if i:
                time.sleep(PAUSE)
            try:
                done = self._call(obstore.put, content, **how)
                return Version(done["e_tag"], done["version"])
            except conflicts() as error:
                refusal = error
            except FileNotFoundError as error:
                raise self._no_bucket() from error
            held, version = self._held(content)
            if held == content:
                return version
            if answers.status_of(str(refusal)) != CONFLICT or not _holds(mode, version):
                return None
        raise Unreachable(f"{self}: {cause(refusal)} ({TRIES} tries)")

    def _held(self, content: bytes) -> tuple[bytes, Version | None]:
        """Read the object and its version, if it is there. It is read again where it is not
        `content`, because a network may have damaged it."""
        held, version = b"", None
        for _ in range(self.tries):
            try:
                held, version = self.read_version()
            except FileNotFoundError:
                return b"", None
            if held == content:
                break
        return held, version

    def keeps_condition(self, content: bytes, mode: Any) -> bool:
        """Return whether the store refuses to put this object, which is there and has these bytes,
        under a condition that does not hold. Raises Unreachable."""
        import obstore

        try:
            self._call(obstore.put, content, mode=mode, use_multipart=False)
        except conflicts():
            return True
        return False

    def _no_bucket(self) -> Unreachable:
        return self._unreachable(f"there is no bucket or container {self.bucket!r}")

    def upload(self, chunks: Callable[[], Iterable[memoryview]], size: int) -> "Stat":
        """Put an object of `size` bytes in parts. chunks: yields its bytes, again for each try."""
        try:
            self._call(_upload, chunks, size)
        except FileNotFoundError:
            raise self._no_bucket() from None
        arrived = self.stat()
        if arrived.size != size:
            raise Unreachable(f"{self}: {size} bytes were sent, {arrived.size} are there")
        return arrived

    def remove(self) -> None:
        """Remove the object, if it is there."""
        import obstore

        with contextlib.suppress(FileNotFoundError):
            self._call(obstore.delete)

    def remove_below(self) -> None:
        for rest in self.below():
            (self / rest).remove()


def conflicts() -> tuple:
    """Return the exceptions that a conditional put raises if its condition does not hold."""
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    return AlreadyExistsError, PreconditionError


def _holds(mode: Any, version: Version | None) -> bool:
    """Return whether the condition of a put holds for the version that is there, if any is."""
    if mode == "create":
        return version is None
    return version is not None and mode.get("e_tag") == version.e_tag


def _get(store: Any, path: str) -> tuple[bytes, Version]:
    import obstore

    found = obstore.get(store, path)
    content = bytes(found.bytes())
    return content, Version(found.meta["e_tag"], found.meta["version"])


def _get_range(store: Any, path: str, start: int, end: int) -> bytes | memoryview:
    """Large ranges in pieces at the same time."""
    import obstore

    if end - start <= NEAR:
        content = bytes(obstore.get_range(store, path, start=start, end=end))
    else:
        step = -(-(end - start) // PIECES)
        starts = list(range(start, end, step))
        ends = [min(begin + step, end) for begin in starts]
        pieces = obstore.get_ranges(store, path, starts=starts, ends=ends, coalesce=0)
        content = b"".join(pieces)
    if len(content) != end - start:
        raise OSError(f"{end - start} bytes expected, {len(content)} came")
    return content


def _stat(row: Any) -> Stat:
    time_ns = int(row["last_modified"].timestamp()) * 10**9
    return Stat(row["size"], time_ns, row["e_tag"])


def _list(store: Any, path: str) -> list[dict]:
    import obstore
    from obstore.exceptions import InvalidPathError

    rows: list[dict] = []
    try:
        for some in obstore.list(store, path):
            rows += some
    except InvalidPathError:  # one bad name, and obstore shows none
        return signed_list.rows(store, path)
    return rows


def _folders(store: Any, path: str) -> list[str]:
    import obstore
    from obstore.exceptions import InvalidPathError

    try:
        return obstore.list_with_delimiter(store, path)["common_prefixes"]
    except InvalidPathError:
        return signed_list.folders(store, path)


def _upload(store: Any, path: str, chunks: Callable[[], Iterable[memoryview]], size: int) -> None:
    import obstore

    if size <= CHUNK:
        obstore.put(store, path, b"".join(chunks()), use_multipart=False)
        return
    part = max(CHUNK, -(-size // (PARTS - 1)))
    pieces = _no_longer_than(part, chunks())
    how: dict[str, Any] = {"use_multipart": True, "chunk_size": part, "max_concurrency": IN_FLIGHT}
    try:
        obstore.put(store, path, pieces, **how)
    except FileNotFoundError as error:
        if "NoSuchUpload" not in str(error):
            raise
        # the request that ends an upload was repeated, because its answer was lost
        raise OSError("the answer to the end of an upload was lost") from None


def _no_longer_than(length: int, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
    for chunk in chunks:
        view = memoryview(chunk)
        for i in range(0, len(view), length):
            yield view[i : i + length]


class RangeReader:
    """An object, opened for reading: each read is a range request, so only what is read is fetched.
    A context manager."""

    tries = Key.tries

    def __init__(self, key: Key, size: int):
        self.key, self.length = key, size
        self.position = 0
        self.near = (0, b"")  # what was fetched last, and where it begins

    def seek(self, position: int) -> int:
        self.position = position
        return position

    def read(self, count: int = -1) -> bytes:
        left = max(self.length - self.position, 0)
        block = bytearray(left if count < 0 else min(count, left))
        self.readinto(memoryview(block))
        return bytes(block)

    def readinto(self, block: memoryview) -> int:
        """Fill `block` from here on. Returns how many bytes there were."""
        begin = self.position
        end = min(begin + len(block), self.length)
        if end <= begin:
            return 0
        start, content = self.near
        if not start <= begin <= end <= start + len(content):
            start = begin
            content = self.key.read_range(begin, min(max(end, begin + NEAR), self.length))
            if len(content) <= NEAR:
                self.near = (start, content)
        block[: end - begin] = memoryview(content)[begin - start : end - start]
        self.position = end
        return end - begin

    def forget(self) -> None:
        """Drop the buffer, so that the next read fetches again."""
        self.near = (0, b"")

    def close(self) -> None:
        self.forget()

    def __enter__(self) -> "RangeReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
