"""Keep copies of the state in the memory of hosts, so that a lost host costs the steps since the
last copy and not those since the last checkpoint (`checkpoint.peers`).

A copy is a checkpoint (verify.py) in host memory: a folder of tmpfs, which outlives the ranks. Each
rank writes its file there and sends it to the ranks with the same local number on `peers` other
hosts, so that each host holds the files of its ranks and of others':

    /dev/shm/plumbline-<user>-<run>/step-00000120/manifest.json
                                                  rank-00000.safetensors     of this host's rank
                                                  rank-00004.safetensors     of a rank of another

A copy counts if the hosts that are left hold all of its files. Each host keeps the newest two: the
older is removed when the next one begins, so there is always a whole one. At a start the hosts tell
each other what they hold, agree on the newest whole copy of this run, and send each other the
files that are missing where they are read. Every byte is verified as that of a checkpoint is; where
it fails, the copy before it is tried, then the checkpoints of the run's folder or store. A run that
ends with a checkpoint of its last step removes its copies; one that dies leaves them, and the
next start of the run finds them, or they stay until the host restarts.

What a host's memory holds belongs to this run if both have the same number: the run's folder keeps
it in the file `.peers`.
"""

import contextlib
import dataclasses
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint import storage, verify
from checkpoint.agreement import gather_files, gather_objects, on_every_rank, on_rank_0
from checkpoint.copies import PREFIX
from checkpoint.state import free_host_memory
from checkpoint.storage import OneByOne, SavePlan, Staged
from checkpoint.verify import Damaged
from configs import schema
from configs.schema import InputError
from parallelisms.mesh import World
from reliability import disk
from reliability.objects import Key

GENERATIONS = 2  # copies that a host keeps
CHUNK = 1 << 24  # bytes of one message
PART = ".part"  # ends the name of a file that is not here yet
IDENTITY = ".peers"
logger = logging.getLogger("plumbline")


def host_memory() -> Path:
    """Return the folder of tmpfs that copies are kept in: Linux has one at /dev/shm."""
    return Path(os.environ.get("PLUMBLINE_HOST_MEMORY") or "/dev/shm")


@dataclasses.dataclass(frozen=True)
class Offer:
    """What one host holds of one copy."""

    manifest: str  # the hash of its manifest
    files: int  # of the whole copy
    held: tuple[int, ...]  # the ranks whose files are here, in their full size


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """A copy that the hosts hold together."""

    name: str  # as verify.step_name
    manifest: str  # the hash on which the hosts agree
    hosts: tuple[int, ...]  # that have this manifest
    holders: tuple[tuple[int, ...], ...]  # of each rank's file: the hosts that have it


@dataclasses.dataclass(frozen=True)
class FileTransfer:
    """A file that one rank sends to another."""

    file: int  # the rank whose file it is
    source: int
    target: int


def whole(offers: Sequence[dict[str, Offer]]) -> tuple[list[HostCopy], list[str]]:
    """Return the copies of which every file is on some host, newest first, and a sentence for each
    of the others. offers: of each host, by the name of the copy.

    The manifest that most hosts have is the true one. What a host offers under another is not
    used, and where two are as frequent no copy is.
    """
    copies, sentences = [], []
    names = {name for offer in offers for name in offer}
    for name in sorted(names, key=verify.parse_name, reverse=True):
        by_manifest: dict[str, list[int]] = {}
        for host, of_host in enumerate(offers):
            if name in of_host:
                by_manifest.setdefault(of_host[name].manifest, []).append(host)
        ranked = sorted(by_manifest, key=lambda text: len(by_manifest[text]), reverse=True)
        agreed = ranked[0]
        if len(ranked) > 1:
            if len(by_manifest[ranked[1]]) == len(by_manifest[agreed]):
                sentences.append(f"{name}: hosts {by_manifest} have other manifests")
                continue
            others = [host for text in ranked[1:] for host in by_manifest[text]]
            sentences.append(f"{name}: hosts {others} have another manifest than most: left out")
        hosts = by_manifest[agreed]
        files = offers[hosts[0]][name].files
        held = [set(offers[host][name].held) for host in hosts]
        holders = tuple(
            tuple(host for host, ranks in zip(hosts, held, strict=True) if file in ranks)
            for file in range(files)
        )
        if missing := [file for file, where in enumerate(holders) if not where]:
            sentences.append(f"{name}: no host has the files of ranks {_short(missing)}")
            continue
        copies.append(HostCopy(name, agreed, tuple(hosts), holders))
    return copies, sentences


def transfers(
    copy: HostCopy, wanted: Sequence[Iterable[int]], local_size: int
) -> list[FileTransfer]:
    """Return who sends which file to whom, so that each host has those that its ranks want. wanted:
    the files that each rank wants. The work is dealt over the ranks of a host and over the hosts
    that have a file."""
    found = []
    for host in range(len(wanted) // local_size):
        ranks = range(host * local_size, (host + 1) * local_size)
        files = sorted({file for rank in ranks for file in wanted[rank]})
        missing = [file for file in files if host not in copy.holders[file]]
        for number, file in enumerate(missing):
            where = copy.holders[file]
            source = where[(host + number) % len(where)]
            lane = number % local_size
            found.append(FileTransfer(file, source * local_size + lane, ranks[lane]))
    return found


def shifts(peers: int, stride: int, hosts: int) -> list[int]:
    """Return how many hosts further on the copies of a host go, from 1 to hosts - 1 each: `stride`,
    twice that, and so on; what is taken already goes one host further."""
    found: list[int] = []
    for number in range(1, peers + 1):
        shift = number * stride % hosts
        while shift in (0, *found):
            shift = (shift + 1) % hosts
        found.append(shift)
    return found


class PeerCopies:
    """The copies of this run in the memory of its hosts. All ranks call every method together, with
    the group for messages of checkpoints."""

    def __init__(
        self, cfg: schema.Checkpoint, place: Path | Key, here: World, group: dist.ProcessGroup
    ) -> None:
        """place: the run's checkpoints. Raises InputError where two hosts share a memory, or it
        cannot be used."""
        self.cfg = cfg
        self.here = here
        self.host = here.rank // here.local_size
        self.hosts = here.size // here.local_size
        self.shifts = shifts(cfg.peers, cfg.peer_stride, self.hosts)
        identity = on_rank_0(group, identity_of, place)
        self.prefix = prefix_of(place)
        self.folder = host_memory() / f"{self.prefix}{identity}"
        self.copies: dict[str, HostCopy] = {}
        # for the record of this start (copies.py), on rank 0
        self.held: dict[str, list[int]] = {}  # by copy: how many of its files each host had
        self.unused: list[str] = []
        self.sent: list[list[int]] = []  # [source host, target host, files, bytes]
        on_every_rank(group, self._open)
        memory = os.stat(self.folder.parent)
        _check_distinct((machine(), memory.st_dev, memory.st_ino), here, group)

    def _open(self) -> None:
        """Make the folder, and remove the copies of runs that were in the same place before."""
        try:
            self._make_folder()
            if self.here.local_rank == 0:
                for path in self.folder.parent.glob(f"{self.prefix}*"):
                    if path != self.folder and not path.is_symlink():
                        shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            raise InputError(
                f"checkpoint.peers: {error.filename or self.folder}: {error.strerror}; set "
                "PLUMBLINE_HOST_MEMORY to a folder of tmpfs on each host, or checkpoint.peers = 0"
            ) from None

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        found = self.folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise InputError(f"{self.folder} is not this user's folder: remove it")

    def check_room(self, size: int, group: dist.ProcessGroup) -> None:
        """Raise InputError if a host has no memory for the copies that it will hold. A run that has
        copies had room, so for it that is no reason to end. size: bytes that this rank writes."""
        sizes = storage.of_every_rank(size, group)
        needed = bytes_of_host(sizes, self.here, self.shifts)
        try:
            on_every_rank(group, self._check_room, needed)
        except InputError as error:
            if not self.copies:
                raise
            if self.here.rank == 0:
                logger.error(f"{error}. The run goes on, but there may be no copies until then")

    def _check_room(self, needed: int) -> None:
        if self.here.local_rank:
            return
        taken = sum(file.lstat().st_size for file in self.folder.rglob("*"))
        room = shutil.disk_usage(self.folder).free
        free = free_host_memory()
        if free is not None:
            room = min(room, free)
        if room + taken < needed:
            raise InputError(
                f"checkpoint.peers = {self.cfg.peers}: host {self.host} holds {GENERATIONS} copies "
                f"of {1 + self.cfg.peers} hosts' state, {needed / 1e6:,.1f} MB, and "
                f"{self.folder.parent} has room for {(room + taken) / 1e6:,.1f} MB: make it larger "
                "(mount -o remount,size=..., docker --shm-size), or copy to fewer hosts"
            )

    # Making a copy

    def keep(
        self,
        name: str,
        plan: SavePlan,
        parts: OneByOne | Staged,
        head: dict,
        group: dist.ProcessGroup,
    ) -> int:
        """Make a copy on all hosts or on none. Runs in the checkpoint thread. Returns the bytes of its
        files on rank 0. head: the manifest's head, as in manager.py. Raises on all ranks, or, where
        a message failed, on some."""
        draft = self.folder / f".tmp-{name}"
        on_every_rank(group, self._begin, draft)
        file = on_every_rank(group, storage.write, draft, plan, parts)
        files = gather_files(file, group)
        manifest = {**head, "files": files, "tensors": plan.table}
        text = on_rank_0(group, verify.manifest_text, manifest)
        self._exchange(draft, file[0], group)
        on_every_rank(group, self._write_manifest, draft, text)
        # a rename needs no memory: all hosts have the copy, or none
        on_every_rank(group, self._publish, draft, name)
        return sum(size for size, _ in files)

    def _begin(self, draft: Path) -> None:
        """Remove what is older than the newest copy, and make the folder of the next, and again the
        one of the copies: an administrator, or systemd when a user logs out, clears /dev/shm."""
        self._make_folder()
        if self.here.local_rank == 0:
            for path in self.folder.glob(".tmp-*"):
                shutil.rmtree(path)
            for old in verify.published(self.folder)[GENERATIONS - 1 :]:
                shutil.rmtree(self.folder / old)
        with contextlib.suppress(FileExistsError):  # another rank was first
            draft.mkdir()

    def _exchange(self, draft: Path, size: int, group: dist.ProcessGroup) -> None:
        """Send this rank's file to its peers, and write those that come from others."""
        sizes = storage.of_every_rank(size, group)
        own = on_every_rank(group, _mapped, draft / verify.file_name(self.here.rank))
        links = []
        for shift in self.shifts:
            ahead = shift * self.here.local_size
            source = (self.here.rank - ahead) % self.here.size
            path = draft / verify.file_name(source)
            comes = on_every_rank(group, _allocated, path, sizes[source])
            links.append(((self.here.rank + ahead) % self.here.size, source, comes))
        for start in range(0, max(sizes), CHUNK):
            chunk = slice(start, start + CHUNK)
            works = []
            for target, source, comes in links:
                if start < len(comes):
                    works.append(dist.irecv(comes[chunk], group=group, group_src=source))
                if start < len(own):
                    works.append(dist.isend(own[chunk], group=group, group_dst=target))
            for work in works:
                work.wait()

    def _write_manifest(self, draft: Path, text: bytes) -> None:
        if self.here.local_rank == 0:
            (draft / verify.MANIFEST).write_bytes(text)

    def _publish(self, draft: Path, name: str) -> None:
        if self.here.local_rank:
            return
        # a step that is done again after a start without its copy
        shutil.rmtree(self.folder / name, ignore_errors=True)
        draft.rename(self.folder / name)

    # Finding and loading a copy

    def find(self, group: dist.ProcessGroup) -> list[str]:
        """Return the names of the copies that the hosts hold together, newest first, and say which
        they do not."""
        offers = gather_objects(on_every_rank(group, self._offer), group)
        of_hosts = offers[:: self.here.local_size]
        copies, sentences = whole(of_hosts)
        self.unused = sentences
        for name in sorted({name for offer in of_hosts for name in offer}):
            self.held[name] = [len(o[name].held) if name in o else 0 for o in of_hosts]
        if self.here.rank == 0:
            for sentence in sentences:
                logger.warning(f"a copy in the memory of hosts is not used: {sentence}")
        self.copies = {copy.name: copy for copy in copies}
        return list(self.copies)

    def found(self) -> dict:
        """Return what the record (copies.py) has of the copies that a start has found."""
        return {"held": self.held, "unused": [sentence[:500] for sentence in self.unused]}

    def _offer(self) -> dict[str, Offer]:
        """Return what this host holds, by the name of the copy: for all of its ranks the first."""
        found: dict[str, Offer] = {}
        if self.here.local_rank:
            return found
        for name in verify.published(self.folder):
            try:
                manifest = verify.read_manifest(self.folder / name)
            except (Damaged, InputError) as error:
                logger.warning(f"a copy in the memory of this host is not used: {error}")
                continue
            held = []
            for rank, (size, _) in enumerate(manifest["files"]):
                path = self.folder / name / verify.file_name(rank)
                if path.is_file() and path.stat().st_size == size:
                    held.append(rank)
            hashed = verify.manifest_hash(manifest)
            found[name] = Offer(hashed, len(manifest["files"]), tuple(held))
        return found

    def fetch(
        self, name: str, files: Callable[[dict], Iterable[int]], group: dist.ProcessGroup
    ) -> dict:
        """Receive the files of a copy that this host lacks, and return the copy's manifest.
        files(manifest): those that this rank reads. Raises Damaged on all ranks."""
        copy = self.copies[name]
        path = self.folder / name
        first = copy.hosts[0] * self.here.local_size
        text = [None]
        if self.here.rank == first:
            with contextlib.suppress(OSError):
                text = [(path / verify.MANIFEST).read_bytes()]
        dist.broadcast_object_list(text, group=group, group_src=first)
        on_every_rank(group, self._receive_manifest, copy, text[0])
        manifest = on_every_rank(group, self._manifest_of, copy)
        wanted = set(on_every_rank(group, files, manifest))
        if len(manifest["files"]) == self.here.size:  # and what it held for others, or would
            wanted.add(self.here.rank)
            for shift in self.shifts:
                wanted.add((self.here.rank - shift * self.here.local_size) % self.here.size)
        of_ranks = gather_objects(sorted(wanted), group)
        self._transfer(path, manifest, transfers(copy, of_ranks, self.here.local_size), group)
        return manifest

    def _receive_manifest(self, copy: HostCopy, text: bytes | None) -> None:
        """Write the manifest on a host that has none, or another than the one agreed on, whose files
        are then removed."""
        path = self.folder / copy.name
        if text is None:
            raise Damaged(f"{path}: its manifest is gone")
        if self.here.local_rank == 0 and self.host not in copy.hosts:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
            disk.write_whole(str(path / verify.MANIFEST), text)

    def _manifest_of(self, copy: HostCopy) -> dict:
        """Return the manifest on which the hosts agree."""
        path = self.folder / copy.name
        manifest = verify.read_manifest(path)
        if verify.manifest_hash(manifest) != copy.manifest:
            raise Damaged(f"{path}: another manifest than on most hosts")
        return manifest

    def _transfer(
        self, path: Path, manifest: dict, todo: list[FileTransfer], group: dist.ProcessGroup
    ) -> None:
        """Send and receive files, in an order that all ranks share. One has its name when all of it
        has come."""
        mine = [one for one in todo if self.here.rank in (one.source, one.target)]
        ends = on_every_rank(group, self._open_ends, path, manifest, mine)
        for one, data in zip(mine, ends, strict=True):
            for start in range(0, len(data), CHUNK):
                chunk = data[start : start + CHUNK]
                if one.source == self.here.rank:
                    dist.send(chunk, group=group, group_dst=one.target)
                else:
                    dist.recv(chunk, group=group, group_src=one.source)
        on_every_rank(group, self._name_received, path, mine)
        pairs: dict[tuple[int, int], list[int]] = {}  # of hosts: the bytes of each file
        for one in todo:
            pair = one.source // self.here.local_size, one.target // self.here.local_size
            pairs.setdefault(pair, []).append(manifest["files"][one.file][0])
        self.sent = [[*pair, len(sizes), sum(sizes)] for pair, sizes in sorted(pairs.items())]
        if todo and self.here.rank == 0:
            said = "; ".join(
                f"{count} from host {source} to host {target}"
                for source, target, count, _ in self.sent[:8]
            )
            size = sum(row[-1] for row in self.sent)
            logger.info(f"{path.name}: hosts sent files to others, {size / 1e6:,.1f} MB: {said}")

    def _open_ends(self, path: Path, manifest: dict, mine: list[FileTransfer]) -> list[Tensor]:
        ends = []
        try:
            for one in mine:
                file = path / verify.file_name(one.file)
                if one.source == self.here.rank:
                    ends.append(_mapped(file))
                else:
                    part = file.with_name(file.name + PART)
                    ends.append(_allocated(part, manifest["files"][one.file][0]))
        except OSError as error:
            raise Damaged(f"{error.filename or path}: {error.strerror or error}") from None
        return ends

    def _name_received(self, path: Path, mine: list[FileTransfer]) -> None:
        for one in mine:
            if one.target == self.here.rank:
                file = path / verify.file_name(one.file)
                file.with_name(file.name + PART).rename(file)

    def forget(self, group: dist.ProcessGroup, but: str = "") -> None:
        """Remove the copies of this host that are newer than `but`; without it, all."""
        on_every_rank(group, self._forget, but)

    def _forget(self, but: str) -> None:
        if self.here.local_rank:
            return
        for name in verify.published(self.folder):
            if not but or verify.parse_name(name) > verify.parse_name(but):
                shutil.rmtree(self.folder / name)

    def with_copies(self) -> str:
        """Say where the copies are, for a message that advises to remove the checkpoints."""
        return f", and {self.folder} on each host"

    def discard(self) -> None:
        """Remove the copies of this host. Calls no other rank."""
        if self.here.local_rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def close(self, saved: int) -> None:
        """Remove the copies of this host when the run has ended, unless one is of a later step than
        the newest checkpoint. saved: its step, or -1."""
        if self.here.local_rank or not self.folder.is_dir():
            return
        steps = [verify.parse_name(name)[1] for name in verify.published(self.folder)]
        if max(steps, default=-1) <= saved:
            self.discard()


def prefix_of(place: Path | Key) -> str:
    """Return what the names of a run's folders of copies begin with: the user too, as /dev/shm is
    for all of them. place: its checkpoints."""
    return f"{PREFIX}{os.getuid()}-{verify.digest(str(place.resolve()).encode())}-"


def identity_of(place: Path | Key) -> str:
    """Return the number of the run whose checkpoints these are, made at the first call. Rank 0 has
    the lease."""
    path = place / IDENTITY
    if path.exists():
        number = path.read_bytes().decode("ascii", "replace").strip()
        if verify.HEX.fullmatch(number):
            return number
        raise InputError(f"{path} does not hold the number of a run: remove it")
    number = uuid.uuid4().hex[:16]
    if isinstance(path, Key):
        path.create(number.encode())
    else:
        disk.write_whole(str(path), number.encode())
    return number


def bytes_of_host(sizes: Sequence[int], here: World, ahead: Sequence[int]) -> int:
    """Return the bytes of the copies on this rank's host. sizes: that each rank writes; ahead: the
    shifts."""
    first = here.rank - here.local_rank
    total = 0
    for shift in (0, *ahead):
        for rank in range(first, first + here.local_size):
            total += sizes[(rank - shift * here.local_size) % here.size]
    return GENERATIONS * total


def _mapped(path: Path) -> Tensor:
    """Map a file into memory, as bytes that are only read."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _allocated(path: Path, size: int) -> Tensor:
    """Make a file of zeros and map it into memory for writing. Raises OSError where there is no room:
    a mapped file that was not allocated would end the process with SIGBUS."""
    with open(path, "wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, size)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _check_distinct(memory: tuple, here: World, group: dist.ProcessGroup) -> None:
    """Raise InputError where two hosts would keep copies in one memory."""
    of_hosts = gather_objects(memory, group)[:: here.local_size]
    if len(set(of_hosts)) < len(of_hosts):
        twice = [host for host, one in enumerate(of_hosts) if of_hosts.count(one) > 1]
        raise InputError(
            f"checkpoint.peers: hosts {_short(twice)} share one memory ({host_memory()} of one "
            "machine), so no copy would outlive it: set checkpoint.peers = 0, or start one node on "
            "each machine"
        )


def machine() -> str:
    """Return what tells this machine from all others, anew at each of its starts (proc(5))."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _short(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown
