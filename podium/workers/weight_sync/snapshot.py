"""A versioned snapshot of bytes in POSIX shared memory: one process writes it, any process of the machine reads it.

The snapshot is a folder below ``/dev/shm`` with two slots, one file each, and a head, a small file that says which slot
holds the newest version. A version is written into the slot that the head does not name, and then published by renaming
a new head over the old one: whatever dies or fails before that leaves the old version as it was. Readers hold a shared
lock on the slot they read, and the writer takes an exclusive one before it writes, so that no reader sees half a
version. All locks are the kernel's and go with the process that holds them.
"""

import contextlib
import errno
import fcntl
import json
import mmap
import os
import shutil
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "podium-snapshot-"
_POLL_S = 0.002
_CLAIM_S = 1.0


class SnapshotError(RuntimeError):
    """A version could not be written or read; what was published before is as it was."""


@dataclass(frozen=True)
class Snapshot:
    """A version in shared memory, as long as its context lasts."""

    version: int
    memory: torch.Tensor
    """uint8."""
    notes: dict[str, Any] = field(default_factory=dict)
    """JSON-able facts that the writer publishes with the bytes: checksums, say."""


class _Slot:
    """A file of shared memory with its lock and its mapping, which lasts from version to version."""

    def __init__(self, path: Path, writable: bool):
        self.path = path
        self._flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        # A private mapping of a reader: torch takes no memory that it may not write to.
        self._access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        self._inode, self._memory = -1, torch.empty(0, dtype=torch.uint8)

    @contextlib.contextmanager
    def locked(self, kind: int) -> Iterator[int | None]:
        """The open file, locked, or None where another process has a lock that rules this one out."""
        descriptor = os.open(self.path, self._flags, 0o600)
        try:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            try:
                yield descriptor
            finally:
                # Said aloud: a child that was forked meanwhile holds the same lock.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    def memory(self, descriptor: int, nbytes: int) -> torch.Tensor:
        """The first `nbytes` of the file."""
        inode = os.fstat(descriptor).st_ino
        if inode != self._inode or self._memory.numel() < nbytes:
            mapped = mmap.mmap(descriptor, nbytes, access=self._access)
            self._inode, self._memory = inode, torch.frombuffer(mapped, dtype=torch.uint8)
        return self._memory[:nbytes]

    def holders(self) -> str:
        """The processes that have a lock on the file."""
        inode = self.path.stat().st_ino
        lines = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
        # "1: FLOCK ADVISORY READ 4242 00:1b:17 0 EOF"; a lock that is waited for has "->" in second place.
        pids = [parts[4] for parts in lines if parts[1] == "FLOCK" and parts[5].endswith(f":{inode}")]
        others = sorted({int(pid) for pid in pids} - {os.getpid()})
        return "process " + ", ".join(map(str, others)) if others else "another process"


class SnapshotWriter:
    """Owns a snapshot.

    The folder is removed when the writer is closed or its process exits. What a killed process leaves behind is removed
    by the next writer on the machine, whatever its name.

    Args:
        name: of the snapshot, for readers.
        nbytes: of a version; shared memory holds twice as much once two versions were written.
        root: where shared memory is mounted.

    Raises:
        SnapshotError: a living process owns a snapshot of that name.
    """

    def __init__(self, name: str, nbytes: int, root: Path = SHARED_MEMORY):
        assert nbytes > 0
        remove_stale(root)
        self.name, self._nbytes, self._root = name, nbytes, root
        self._folder = root / f"{_PREFIX}{name}"
        self._owner = _claim(self._folder)
        self._slots = [_Slot(self._folder / f"slot{index}", writable=True) for index in range(2)]
        self._newest = 1
        self.version = -1
        """The newest published."""
        self._finalizer = weakref.finalize(self, _remove, self._folder, self._owner, os.getpid())

    @contextlib.contextmanager
    def writing(self, version: int, timeout_s: float) -> Iterator[Snapshot]:
        """Memory and notes to fill: on leaving without an exception they are published as `version`.

        Raises:
            SnapshotError: readers keep the slot longer than `timeout_s`; shared memory is full. The version published
                before is whole.
            ValueError: that version, or a newer one, is published.
        """
        if version <= self.version:
            raise ValueError(f"snapshot {self.name}: version {version} comes after {self.version}")
        index = 1 - self._newest
        slot, until = self._slots[index], time.monotonic() + timeout_s
        while True:
            with self._room(version), slot.locked(fcntl.LOCK_EX) as descriptor:
                if descriptor is not None:
                    self._reserve(descriptor)
                    snapshot = Snapshot(version, slot.memory(descriptor, self._nbytes))
                    yield snapshot
                    self._publish(index, snapshot)
                    return
            if time.monotonic() >= until:
                raise SnapshotError(
                    f"snapshot {self.name}: version {version} waited {timeout_s:g} s for {slot.holders()} to release "
                    "the slot of the version before the last"
                )
            time.sleep(_POLL_S)

    def _reserve(self, descriptor: int) -> None:
        # Without pages behind it, a store into a mapping of a full file system is a SIGBUS, not an error.
        if os.fstat(descriptor).st_size < self._nbytes:
            os.posix_fallocate(descriptor, 0, self._nbytes)

    def _publish(self, index: int, snapshot: Snapshot) -> None:
        head = {"version": snapshot.version, "slot": index, "nbytes": self._nbytes, "notes": snapshot.notes}
        beside = self._folder / "head.tmp"
        beside.write_text(json.dumps(head), encoding="utf-8")
        beside.replace(self._folder / "head")
        self._newest, self.version = index, snapshot.version

    @contextlib.contextmanager
    def _room(self, version: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            free = shutil.disk_usage(self._root).free
            raise SnapshotError(
                f"snapshot {self.name}: no room for version {version}: it takes {self._nbytes / 1e6:.1f} MB, and "
                f"{self._root} has {free / 1e6:.1f} MB left ({error.strerror}): enlarge it, or choose another transport"
            ) from error

    def close(self) -> None:
        """Removes the snapshot; readers keep what they have mapped."""
        self._finalizer()


class SnapshotReader:
    """Reads the snapshot called `name`, which need not exist yet."""

    def __init__(self, name: str, root: Path = SHARED_MEMORY):
        self.name, self._folder = name, root / f"{_PREFIX}{name}"
        self._slots = [_Slot(self._folder / f"slot{index}", writable=False) for index in range(2)]

    def newest(self) -> int:
        """The newest version that is published; -1 where there is none."""
        head = self._head()
        return -1 if head is None else head["version"]

    @contextlib.contextmanager
    def acquire(self, version: int, timeout_s: float) -> Iterator[Snapshot]:
        """Holds the newest version, as soon as that is `version` or a later one, until the context is left.

        Raises:
            SnapshotError: it does not come within `timeout_s`, or will not, because the process that writes has died.
        """
        until = time.monotonic() + timeout_s
        while True:
            is_abandoned = self._is_abandoned()
            head = self._head()
            if head is not None and head["version"] >= version:
                with self._held(head) as snapshot:
                    if snapshot is not None:
                        yield snapshot
                        return
            if is_abandoned or time.monotonic() >= until:
                newest = "nothing is published" if head is None else f"the newest is {head['version']}"
                why = "its writer has died" if is_abandoned else f"it did not come within {timeout_s:g} s"
                raise SnapshotError(f"snapshot {self.name}: no version {version}: {why}; {newest}")
            time.sleep(_POLL_S)

    def _is_abandoned(self) -> bool:
        """Whether nobody has the lock that a writer has for life; False where the writer is still to come."""
        try:
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _head(self) -> dict[str, Any] | None:
        try:
            head: dict[str, Any] = json.loads((self._folder / "head").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return head

    @contextlib.contextmanager
    def _held(self, head: dict[str, Any]) -> Iterator[Snapshot | None]:
        """The version that `head` names, or None where the writer has moved on meanwhile."""
        slot = self._slots[head["slot"]]
        if not slot.path.exists():  # its owner has gone
            yield None
            return
        with slot.locked(fcntl.LOCK_SH) as descriptor:
            if descriptor is None or self._head() != head:
                yield None
            else:
                yield Snapshot(head["version"], slot.memory(descriptor, head["nbytes"]), head["notes"])


def remove_stale(root: Path = SHARED_MEMORY) -> list[str]:
    """Removes the snapshots of processes that were killed; returns their names."""
    removed = []
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, PermissionError):  # just removed, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name.removeprefix(_PREFIX))
        except BlockingIOError:  # its owner lives
            pass
        finally:
            os.close(descriptor)
    return removed


def _claim(folder: Path) -> int:
    """Makes `folder` and locks it for the life of this process; returns its descriptor.

    Raises:
        SnapshotError: a living process has it.
    """
    until = time.monotonic() + _CLAIM_S
    while time.monotonic() < until:
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process took it for stale
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.exists() and folder.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except BlockingIOError:  # its owner has it, or for a moment one who looks whether it is stale
            time.sleep(_POLL_S)
        os.close(descriptor)
    raise SnapshotError(f"snapshot {folder}: a living process owns it")


def _remove(folder: Path, owner: int, pid: int) -> None:
    if os.getpid() == pid:  # not in a child that was forked, which runs exit handlers too
        shutil.rmtree(folder, ignore_errors=True)
        os.close(owner)
