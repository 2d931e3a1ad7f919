"""Checkpoints in an object store, with the guarantees of `checkpoint/place.py::CheckpointFolder` on
a disk.

    PREFIX/.lease                                              lease.py
    PREFIX/step-00000100/manifest.json                         the publication
    PREFIX/step-00000100/3fa9c01d-1/rank-00000.safetensors     one rank's file, as on a disk

A store has no rename. So every save writes its files under a unique prefix, `<run>-<save>`. Then
rank 0 puts the manifest, which names it, in one request that succeeds only if there is no manifest
yet. Before that request there is no checkpoint, after it there is one. Removal goes the other way:
first the manifest, then the files. Files that no manifest names are what a killed run left, and the
next start removes them."""

import contextlib
import logging
import os
from typing import Any

from checkpoint import storage, verify
from checkpoint.lease import Lost
from checkpoint.retention import Retention
from checkpoint.storage import OneByOne, SavePlan, Staged
from checkpoint.stores.lease import StoreLease
from checkpoint.verify import Damaged
from configs.rounds import LEASE
from configs.schema import Checkpoint, InputError
from reliability.objects import Key, Unreachable

logger = logging.getLogger("plumbline")


class Bucket:
    """A prefix of a store for a run's checkpoints. All ranks have one; rank 0 alone calls the
    methods after `write`."""

    def __init__(self, path: Key, cfg: Checkpoint):
        self.path, self.cfg = path, cfg
        self.lease: Any = None
        self.retention: Any = None
        # drafts that may have become checkpoints: no answer came
        self.uncertain: list[Key] = []

    def draft(self, run: str, number: int, name: str) -> Key:
        """Return the prefix under which a save writes its files."""
        return self.path / name / f"{run}-{number}"

    def write(self, draft: Key, plan: SavePlan, parts: OneByOne | Staged) -> list:
        """Upload this rank's file. Returns its row in the manifest's `files`.

        A file begins with the hashes of its blocks, and an upload with the begin of the file. So
        all bytes are hashed before they are sent; they are in host memory, or training waits.
        """
        hashes: list[str] = []
        for _, blocks in parts.spans(plan):
            hashes += map(verify.digest, blocks)
        head = storage.head_with(plan, hashes)

        def chunks() -> Any:
            yield memoryview(head)
            for data, _ in parts.spans(plan):
                yield data

        size = len(head) + plan.nbytes
        (draft / verify.file_name(plan.rank)).upload(chunks, size)
        return [size, verify.digest(head)]

    def claim(self) -> None:
        """Become the only run that writes here, until `release`."""
        self.lease = StoreLease(self.path / ".lease", of_start=os.environ.get(LEASE, ""))

    def release(self) -> None:
        """Release the prefix, if it is ours."""
        if self.retention:
            self.retention.close()
        if self.lease:
            self.lease.release()

    def take(self) -> str:
        """Claim the prefix unless that is done, and let a thread remove the files that an earlier
        run left without a manifest. Returns the name of this run."""
        if not self.lease:
            self.claim()
        self.retention = StoreRetention(self.path, self.lease, self.cfg)
        drafts = set()
        foreign = set()
        for rest, size in self.path.below().items():
            name, _, inside = rest.partition("/")
            draft = inside.partition("/")[0]
            if verify.parse_name(name) and verify.PARTS.fullmatch(draft):
                drafts.add((name, draft))
            elif rest not in (".lease", ".peers") and not (
                verify.parse_name(name) and inside == verify.MANIFEST
            ):
                if size:  # consoles mark folders by empty objects
                    foreign.add(name)
        for name in sorted(foreign):
            logger.warning(
                f"{verify.shown(self.path / name)} is not a checkpoint of this run and is left alone"
            )
        self.retention.remove_leftovers([self.path / name / draft for name, draft in drafts])
        return self.lease.id

    def names(self) -> list[str]:
        """List the names of the checkpoints, newest first. A listing may lag behind: the lease
        knows the newest, and that knows the older ones."""
        names = set(present(self.path, [self.lease.newest]))
        if names:
            newest = self.path / max(names, key=verify.parse_name)
            with contextlib.suppress(Damaged, InputError):  # the resume says so
                names |= set(present(self.path, verify.read_manifest(newest)["ancestors"]))
        return sorted(names, key=verify.parse_name, reverse=True)

    def check_room(self, size: int, count: int) -> None:
        """Do nothing: a bucket has no size."""

    def publish(self, draft: Key, name: str, manifest: dict) -> None:
        """Put the manifest, if there is none. Raises Lost if there is one of another run, or if
        another run has taken the prefix over: it may have removed the files before they had a
        manifest. Any other failure after the manifest is a warning: the checkpoint is published."""
        content = verify.manifest_text({**manifest, "parts": draft.name})
        self.lease.check()
        self.uncertain.append(draft)
        published = (draft.parent / verify.MANIFEST).create(content)
        if published is None:
            raise Lost(
                f"{draft.parent} holds a checkpoint already, which this run has not written: "
                "start again to go on from it"
            )
        self.uncertain.remove(draft)
        try:
            self.lease.publish(name)
        except Unreachable as error:
            logger.warning(
                f"{draft.parent} is published, but the lease does not name it yet as the newest: "
                f"{error}"
            )

    def found(self) -> list[str]:
        """Return names of checkpoints whose save failed because no answer came, and which are
        there."""
        arrived = [draft for draft in self.uncertain if is_named(draft)]
        self.uncertain = [draft for draft in self.uncertain if draft not in arrived]
        return [draft.parent.name for draft in arrived]

    def discard(self, draft: Key) -> None:
        """Let a thread remove the files that a failed save left; but a manifest that was sent may
        still arrive."""
        if draft not in self.uncertain:
            self.retention.remove_leftovers([draft])


class StoreRetention(Retention):
    """Removes the manifest first: no reader finds the files of a checkpoint without it."""

    def present(self, names: list[str]) -> list[str]:
        return present(self.folder, names)

    def hide(self, name: str, number: int) -> Key:
        (self.folder / name / verify.MANIFEST).remove()
        return self.folder / name

    def erase(self, path: Key) -> None:
        path.remove_below()

    def remove_leftover(self, path: Key) -> None:
        """Remove a draft, unless its manifest has been published."""
        if not is_named(path):
            self.lease.check()
            path.remove_below()


def present(path: Key, names: list[str]) -> list[str]:
    """Return the checkpoints that a listing shows, and those of `names` that it does not show
    yet."""
    listed = verify.published(path)
    late = []
    for name in names:
        is_one = name not in listed and verify.parse_name(name)
        if is_one and (path / name / verify.MANIFEST).exists():
            late.append(name)
    return [*listed, *late]


def is_named(draft: Key) -> bool:
    """Return whether a manifest names these files. One that cannot be read may."""
    if not (draft.parent / verify.MANIFEST).exists():
        return False
    try:
        return verify.read_manifest(draft.parent).get("parts") == draft.name
    except (Damaged, InputError):
        return True
