"""Run a command and copy its run's folder to an object store meanwhile: logs, metrics, TensorBoard;
not checkpoints, which `checkpoint.store` handles.

    ./run_train.sh configs/llama_debug.toml --run.folder=s3://bucket/debug      # runs this
    python -m tools.mirror s3://bucket/debug FOLDER COMMAND ...

Files that the store has and this machine lacks, or has in an older version, are fetched before the
command starts, so a run continues its metrics on a new machine. Changed files are uploaded every
--seconds, when a checkpoint has been published, and when the command has ended. A machine that is
lost loses what was written since the last upload.

Versions are compared without clocks: `.mirror-sent-0` in the folder records, for each file, the
ETag of its object when both were equal. An object with another ETag was written later by another
machine.

Several nodes run the same command: each uploads the files that change on it, and a rank's files
have its number. A second start with the same --node is refused while the first one runs on this
machine. For one on another machine, which may be about to be taken away, it waits until that has
uploaded its last lines, for at most HANDOVER seconds. The exit code is the command's, whether or not
the copies succeed; a failed copy is reported and tried again. When the command has ended, Ctrl-C ends
this process, and so do LAST seconds in which the store takes nothing. If this process is killed, the
command gets SIGTERM.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from checkpoint.stores.lease import StoreLease
from configs import program
from configs.schema import InputError
from reliability.objects import ASKED, CHUNK, MIRRORED, Key, Stat, Unreachable, location
from reliability.signed_list import is_readable
from tools.launch.rank import end_with_parent

LEFT_OUT = "checkpoints"  # the subfolder that is not copied
# models, which are sent and not fetched: they may fill a disk, and no start reads them
EXPORTED = "hf"
# files and folders that are being written: NAME.tmp, NAME.tmp12, and .tmp-... of an export
TEMPORARY = re.compile(r"\.tmp(?![a-z])|\.del-")
LEASE = ".mirror-"  # and the number of the node: who sends from there
# the same in the folder: what was sent, and that the command asks for it
SENT, ASKING = ".mirror-sent-", ".mirror-asked-"
WATCH = 0.5  # seconds between looks whether the command has published a checkpoint
HANDOVER = 180.0  # seconds that another machine may take to save, end and send
LAST = 90.0  # seconds that the last round waits for a store which takes nothing; a request has 60
SILENT = 3.0  # seconds of it that nothing is said
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Sent(NamedTuple):
    """File and object of the same name, at a time when both were equal."""

    size: int
    mtime_ns: int
    e_tag: str | None


class Mirror:
    """Folder and its copy below a key. node: the number of this machine."""

    def __init__(self, folder: Path, key: Key, node: int = 0) -> None:
        self.folder, self.key = folder, key
        self.record = folder / f"{SENT}{node}"
        self.asked = folder.absolute() / f"{ASKING}{node}"
        self.sent = self._read_record()  # by name
        self.moved = time.monotonic()  # when the store took something
        self.over = threading.Event()  # set when nothing more is to be sent

    def fetch(self) -> int:
        """Write the files that this folder lacks or has in an older version. Returns how many.
        Raises OSError, or InputError, also for a name that leads out of the folder."""
        count = 0
        there = self.key.stats_below()
        parents = {str(parent) for name in there for parent in PurePosixPath(name).parents}
        for name, found in there.items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise InputError(f"{self.key}: invalid path {name!r}")
            if path.parts[0] in (LEFT_OUT, EXPORTED) or name.startswith(LEASE):
                continue
            if not found.size:  # a console marks folders so, and an empty file is no loss
                continue
            if name in parents:
                log(f"{self.key / name} is left there: objects below it make it a folder here")
                continue
            if not self._is_newest(name, found):
                self._download(name, found)
                count += 1
        if count:
            self._write_record()
        return count

    def _is_newest(self, name: str, found: Stat) -> bool:
        """Return True if the local file is the object, or the object plus lines written since."""
        path = self.folder / name
        if not path.is_file():
            return False
        if name in self.sent and found.e_tag and self.sent[name].e_tag == found.e_tag:
            return True
        # it is not known whether the object is ours: logs and metrics grow at their end
        now = version(path)
        if now[0] < found.size:
            return False
        with open(path, "rb") as file:
            for start in range(0, found.size, CHUNK):
                end = min(start + CHUNK, found.size)
                if file.read(end - start) != (self.key / name).read_agreed(start, end):
                    return False
        if now[0] == found.size:
            self.sent[name] = Sent(*now, found.e_tag)
        return True

    def _download(self, name: str, found: Stat) -> None:
        """Put the object in the place of the file, whole."""
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.tmp-mirror")
        found = (self.key / name).download(temporary, found)
        os.utime(temporary, ns=(found.mtime_ns, found.mtime_ns))
        temporary.rename(target)
        # another node may change it, so this one must not send it as it is
        self.sent[name] = Sent(*version(target), found.e_tag)

    def send(self) -> str:
        """Send what has changed. Returns what went wrong; a store that is silent ends the round."""
        problems: list[str] = []
        count = 0
        for name in self.files(problems):
            try:
                now = version(self.folder / name)
                if name in self.sent and self.sent[name][:2] == now:
                    continue
                arrived = self._upload(name, now[0])
                self.sent[name] = Sent(*now, arrived.e_tag)
                self.moved = time.monotonic()
                count += 1
            except FileNotFoundError:  # it was removed meanwhile
                continue
            except OSError as error:
                problems.append(f"{self.folder / name}: {error.strerror}")
            except InputError as error:
                if not self._was(name, now):  # cut or removed meanwhile: that was the reason
                    continue
                problems.append(str(error))
                break
        if count:
            self._write_record()
        more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
        return problems[0] + more if problems else ""

    def _was(self, name: str, then: tuple[int, int]) -> bool:
        """Return True if a file still begins with the bytes that it had."""
        with contextlib.suppress(OSError):
            return version(self.folder / name)[0] >= then[0]
        return False

    def files(self, problems: list[str]) -> Iterator[str]:
        """List the files to copy. Names that a store cannot hold are added to `problems`."""

        def unreadable(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # it was removed meanwhile
                problems.append(f"{error.filename}: {error.strerror}")

        for place, folders, names in os.walk(self.folder, onerror=unreadable):
            is_top = Path(place) == self.folder
            # a temporary name is of what is being written
            folders[:] = [
                name
                for name in folders
                if not TEMPORARY.search(name) and not (is_top and name == LEFT_OUT)
            ]
            for name in sorted(names):
                path = Path(place, name)
                if TEMPORARY.search(name) or name.startswith((SENT, ASKING)):
                    continue
                if not is_regular(path):
                    continue
                name = path.relative_to(self.folder).as_posix()
                if is_storable(name):
                    yield name
                else:
                    problems.append(f"{self.folder}: {name!r} is no name for an object: rename it")

    def _upload(self, name: str, size: int) -> Stat:
        """Upload the first `size` bytes: a log may grow meanwhile."""

        def chunks() -> Iterator[memoryview]:
            left = size
            with open(self.folder / name, "rb") as file:
                while left and (block := file.read(min(left, CHUNK))):
                    left -= len(block)
                    self.moved = time.monotonic()
                    yield memoryview(block)

        return (self.key / name).upload(chunks, size)

    def times_asked(self) -> int:
        """Return how often the command has requested a round of copies."""
        with contextlib.suppress(OSError):
            return self.asked.stat().st_size
        return 0

    def _read_record(self) -> dict[str, Sent]:
        """Return {} for a record that is missing, damaged or of another place in a store."""
        try:
            url, rows = json.loads(self.record.read_text(encoding="utf-8"))
            return {name: Sent(*row) for name, row in rows.items()} if url == str(self.key) else {}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _write_record(self) -> None:
        temporary = self.record.with_name(f"{self.record.name}.tmp")
        try:
            temporary.write_text(json.dumps([str(self.key), self.sent]), encoding="utf-8")
            temporary.rename(self.record)
        except OSError as error:
            log(f"{self.record}: {error.strerror}; the next start compares contents")


def is_regular(path: Path) -> bool:
    """Return True for a regular file that still exists."""
    return os.path.isfile(path) and not os.path.islink(path)


def is_storable(name: str) -> bool:
    """Return True if an object may have this name, which must be UTF-8."""
    return name.encode(errors="ignore").decode() == name and is_readable(name)


def version(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def log(sentence: str) -> None:
    print(f"mirror: {sentence}", file=sys.stderr, flush=True)


def still_ours(lease: StoreLease) -> bool:
    """False if another start took this one for dead: its files are newer."""
    try:
        return lease.held()
    except Unreachable:
        return True  # sending says what is wrong with the store


def send_once(mirror: Mirror, lease: StoreLease) -> str:
    """Call `Mirror.send` and report any error instead of raising it: the next round tries again,
    and the command's exit code stays its own."""
    try:
        if not still_ours(lease):
            return f"another run writes to {mirror.key} by now, so nothing more is sent"
        return mirror.send()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def keep_sending(mirror: Mirror, lease: StoreLease, seconds: float, ended: threading.Event) -> None:
    """Upload every `seconds`, and when the command asks for it; the last round is the caller's."""
    due = time.monotonic() + seconds
    asked = mirror.times_asked()
    while not ended.wait(min(WATCH, max(due - time.monotonic(), 0))):
        before, asked = asked, mirror.times_asked()
        if asked == before and time.monotonic() < due:
            continue
        if problem := send_once(mirror, lease):
            log(f"{problem}; it is tried again in {seconds:.0f} s")
        due = time.monotonic() + seconds


def run(mirror: Mirror, lease: StoreLease, command: list[str], seconds: float) -> int:
    """Returns the exit code of the command, 128 + n if signal n has killed it."""
    known = {MIRRORED: str(mirror.key), ASKED: str(mirror.asked)}
    # a run without its mirror stops with a checkpoint: later files would never be copied
    ends = partial(end_with_parent, signal.SIGTERM)
    process = subprocess.Popen(command, env=os.environ | known, preexec_fn=ends)

    def pass_on(number: int, frame: object) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    # Ctrl-C reaches the command itself
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended = threading.Event()
    sender = threading.Thread(
        target=keep_sending, args=(mirror, lease, seconds, ended), daemon=True
    )
    sender.start()
    try:
        try:
            code = process.wait()
        finally:
            ended.set()
        code = program.exit_code_of(code)
        # Ctrl-C may end the last round; the other signals were meant for the command
        program.decided(code)
        signal.signal(signal.SIGINT, before.pop(signal.SIGINT))
        mirror.moved = time.monotonic()
        threading.Thread(target=give_up, args=(mirror, code), daemon=True).start()
        sender.join()
        send_the_rest(mirror, lease)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code


def give_up(mirror: Mirror, code: int) -> None:
    """End this process with the command's code where the store takes nothing for LAST seconds, and
    say before for what it waits: a scheduler would kill it, and the code were lost."""
    where = f"what is missing in {mirror.key} is still in {mirror.folder}"
    if mirror.over.wait(SILENT):
        return
    log(
        f"the command has ended with {code}, and its last files are sent; Ctrl-C ends that: {where}"
    )
    while not mirror.over.wait(WATCH):
        if time.monotonic() > mirror.moved + LAST:
            program.leave(code, f"mirror: the store took nothing for {LAST:.0f} s: {where}")


def send_the_rest(mirror: Mirror, lease: StoreLease) -> None:
    """Send what the command has left, and report what could not be sent."""
    if (mirror.folder / LEFT_OUT).is_dir():
        log(
            f"{mirror.folder / LEFT_OUT} is not copied: checkpoint.store keeps checkpoints in a store"
        )
    if problem := send_once(mirror, lease):
        log(f"{problem}; this and what else is missing in {mirror.key} is still in {mirror.folder}")


@program.refuses
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mirror",
        description="Run a command, and keep a copy of its run's folder in an object store.",
    )
    parser.add_argument("--node", type=int, default=0, help="number of this machine [%(default)s]")
    parser.add_argument("--seconds", type=float, default=60, help="between copies [%(default)s]")
    parser.add_argument("url", help="where the copy is kept, such as s3://bucket/debug")
    parser.add_argument("folder", type=Path, help="run.folder of the command")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command with its options")
    args = parser.parse_args(argv)
    key = location(args.url)
    if not isinstance(key, Key):
        raise InputError(f"{args.url} is a folder: let run.folder name it")
    if not args.command:
        raise InputError("there is no command to run after the folder")
    mirror = Mirror(args.folder, key, args.node)
    lease = StoreLease(key / f"{LEASE}{args.node}", "run.folder", HANDOVER)
    try:
        try:
            count = mirror.fetch()
        except OSError as error:
            raise InputError(f"{args.folder} cannot be written: {error.strerror}") from None
        log(
            f"{args.folder} is copied to {key} every {args.seconds:g} s"
            + (f"; {count} files came from there" if count else "")
        )
        return run(mirror, lease, args.command, args.seconds)
    finally:
        give_back(lease)
        mirror.over.set()


def give_back(lease: StoreLease) -> None:
    """Release this node's claim, and only report an error: the exit code is the command's."""
    try:
        lease.release()
    except Exception as error:
        log(f"the place of this node could not be given back: {error}")


if __name__ == "__main__":
    program.run(main)
