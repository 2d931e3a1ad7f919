"""Run a command, and keep a copy of its run's folder in an object store meanwhile: logs, metrics,
TensorBoard, all but checkpoints, for which `checkpoint.store` is made.

    ./run_train.sh configs/llama_debug.toml --run.folder=s3://bucket/debug      # runs this
    python -m tools.mirror s3://bucket/debug FOLDER COMMAND ...

Before the command starts, what the store has and this machine lacks, or has in an older version, is
fetched. So a run goes on with its metrics on a new machine. What has changed is sent every
--seconds, and when the command has ended. A machine that is lost loses what was written since.

Several nodes give the same command: each sends the files that change on it, and a rank's files have
its number. A second start with the same --node waits until the first has sent its last lines, and
gives up after HANDOVER seconds. The exit code is the command's, whatever the store does; a copy that fails is said, and
tried again.
"""

import argparse
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from checkpoint.stores.lease import StoreLease
from configs.schema import InputError
from reliability.objects import CHUNK, MIRRORED, Key, Unreachable, location

LEFT_OUT = "checkpoints"  # the subfolder that is not copied
LEASE = ".mirror-"  # and the number of the node: who sends from there
HANDOVER = 180.0  # seconds that an earlier start may take to save, end and send
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Mirror:
    """A folder and its copy below a key."""

    def __init__(self, folder: Path, key: Key) -> None:
        self.folder, self.key = folder, key
        self.there: dict[str, tuple[int, int]] = {}  # name -> size and time of what was sent

    def fetch(self, left_out: tuple[str, ...] = ()) -> int:
        """Write the files that this folder lacks or has in an older version, but those of the
        subfolders `left_out`. Returns how many. Raises InputError, also for a name that leads out
        of the folder, which obstore refuses."""
        count = 0
        for name, found in self.key.stats_below().items():
            path = PurePosixPath(name)
            if path.parts[0] in (LEFT_OUT, *left_out) or name.startswith(LEASE):
                continue
            target = self.folder / path
            if not target.exists() or target.stat().st_mtime_ns < found.mtime_ns:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((self.key / name).read())
                os.utime(target, ns=(found.mtime_ns, found.mtime_ns))
                count += 1
            if version(target) == (found.size, found.mtime_ns):
                # another node may change it, so this one must not send it as it is
                self.there[name] = version(target)
        return count

    def send(self) -> str:
        """Send what has changed. Returns what went wrong, if anything did: where the store does not
        answer, no more is tried."""
        problem = ""
        for name in self.files():
            try:
                now = version(self.folder / name)
                if self.there.get(name) == now:
                    continue
                self._upload(name, now[0])
                self.there[name] = now
            except FileNotFoundError:  # it was removed meanwhile
                continue
            except OSError as error:
                problem = f"{self.folder / name}: {error.strerror}"
            except InputError as error:
                return str(error)
        return problem

    def files(self) -> Iterator[str]:
        """The names of all files that are copied."""
        for place, folders, names in os.walk(self.folder):
            if Path(place) == self.folder and LEFT_OUT in folders:
                folders.remove(LEFT_OUT)
            for name in sorted(names):
                path = Path(place, name)
                # a temporary name is of a file that is being written
                if ".tmp" not in name and stat.S_ISREG(path.lstat().st_mode):
                    yield path.relative_to(self.folder).as_posix()

    def _upload(self, name: str, size: int) -> None:
        """The first `size` bytes: a log may grow meanwhile."""

        def chunks() -> Iterator[memoryview]:
            left = size
            with open(self.folder / name, "rb") as file:
                while left and (block := file.read(min(left, CHUNK))):
                    left -= len(block)
                    yield memoryview(block)

        (self.key / name).upload(chunks, size)


def version(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def say(sentence: str) -> None:
    print(f"mirror: {sentence}", file=sys.stderr, flush=True)


def take_over(key: Key, node: int) -> StoreLease:
    """Wait until nobody else sends from this node's place. Raises InputError where somebody still
    does after HANDOVER seconds."""
    deadline = time.monotonic() + HANDOVER
    while True:
        try:
            return StoreLease(key / f"{LEASE}{node}")
        except Unreachable:
            raise
        except InputError:
            if time.monotonic() > deadline:
                raise InputError(
                    f"{key} is being written by another run: stop it, or give another run.folder"
                ) from None
            say("another run still writes there: waiting for its end")
            time.sleep(1)


def still_ours(lease: StoreLease) -> bool:
    """False if another start took this one for dead: its files are newer."""
    try:
        return lease.held()
    except Unreachable:
        return True  # sending says what is wrong with the store


def send_once(mirror: Mirror, lease: StoreLease) -> str:
    """As `Mirror.send`."""
    if not still_ours(lease):
        return f"another run writes to {mirror.key} by now, so nothing more is sent"
    return mirror.send()


def keep_sending(mirror: Mirror, lease: StoreLease, seconds: float, ended: threading.Event) -> None:
    """Until the command has ended. The last round is the caller's."""
    while not ended.wait(seconds):
        if problem := send_once(mirror, lease):
            say(f"{problem}; it is tried again in {seconds:.0f} s")


def run(mirror: Mirror, lease: StoreLease, command: list[str], seconds: float) -> int:
    """Returns the exit code of the command, 128 + n if signal n has killed it."""
    process = subprocess.Popen(command, env={**os.environ, MIRRORED: str(mirror.key)})

    def pass_on(number: int, frame: object) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    # Ctrl-C reaches the command itself
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended = threading.Event()
    sender = threading.Thread(target=keep_sending, args=(mirror, lease, seconds, ended))
    sender.start()
    try:
        code = process.wait()
    finally:
        ended.set()
        sender.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    if (mirror.folder / LEFT_OUT).is_dir():
        say(
            f"{mirror.folder / LEFT_OUT} is not copied: checkpoint.store keeps checkpoints in a store"
        )
    if problem := send_once(mirror, lease):
        say(f"{problem}; this and what else is missing in {mirror.key} is still in {mirror.folder}")
    return code if code >= 0 else 128 - code


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
    try:
        key = location(args.url)
        if not isinstance(key, Key):
            raise InputError(f"{args.url} is a folder: let run.folder name it")
        if not args.command:
            raise InputError("there is no command to run after the folder")
        mirror = Mirror(args.folder, key)
        lease = take_over(key, args.node)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        count = mirror.fetch()
        say(
            f"{args.folder} is copied to {key} every {args.seconds:g} s"
            + (f"; {count} files came from there" if count else "")
        )
        return run(mirror, lease, args.command, args.seconds)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        lease.release()


if __name__ == "__main__":
    sys.exit(main())
