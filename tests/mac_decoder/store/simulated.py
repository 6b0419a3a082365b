"""A disk that fails, fills up, loses power and forgets what was not synced.

Block and cut files live in memory; SQLite's index is a real file, of which the state after
each commit is kept. Two models of what survives a power cut:

``posix``: a file's bytes once it was synced, a directory's names once it was.
``cache``: syncing reaches a drive's cache only; a barrier writes out all that was there.

Everything else survives or not as the dice fall, file by file and name by name: lost, torn, or
whole, in any order.
"""

from __future__ import annotations

import errno
import random
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from mac_decoder.store import index
from mac_decoder.store.files import Found, RealDisk
from mac_decoder.store.index import Change, Index

Model = Literal["posix", "cache"]


class PowerCut(BaseException):
    """The machine is off: nobody handles this."""


class Inode:
    """A file's bytes now, in the drive's cache, and on the medium."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.cached: bytes | None = data
        self.durable: bytes | None = data
        self.lost = False
        """A failed sync dropped what was to be written: later ones succeed and write nothing."""


class SimulatedDisk:
    """A ``Disk``. ``fail_at`` and ``cut_at`` count operations from 1."""

    def __init__(self, model: Model = "posix", seed: int = 0) -> None:
        self.model: Model = model
        self.dice = random.Random(seed)
        self.operations = 0
        self.log: list[str] = []
        self.fail_at: int | None = None
        self.fail_with = errno.EIO
        self.fail_kinds: frozenset[str] | None = None
        self.stuck = False
        self.cut_at: int | None = None
        self.dead = False
        self.capacity = 1 << 40
        self.peak = 0
        self.snapshots: list[bytes] = []
        self.store: object = None
        self._names: dict[Path, Inode] = {}
        self._durable: dict[Path, Inode] = {}
        self._cached: dict[Path, Inode] = {}
        self._pending: list[tuple[Path, Inode | None]] = []
        self._flushed: list[tuple[Path, Inode | None]] = []
        self._handles: dict[int, tuple[Inode, Path]] = {}
        self._next = 3

    # -- faults

    def step(self, kind: str) -> None:
        """Count an operation, and fail it if its turn has come."""
        if self.dead:
            raise PowerCut
        self.operations += 1
        self.log.append(kind)
        if self.cut_at is not None and self.operations >= self.cut_at:
            self.dead = True
            raise PowerCut
        if self.fail_kinds is not None and kind not in self.fail_kinds:
            return
        if self.fail_at is not None and (
            self.operations == self.fail_at or (self.stuck and self.operations > self.fail_at)
        ):
            raise OSError(self.fail_with, "simulated")

    @property
    def nbytes(self) -> int:
        """Bytes of all files in memory."""
        return sum(len(inode.data) for inode in set(self._names.values()))

    def _grew(self) -> None:
        self.peak = max(self.peak, self.nbytes)

    # -- Disk

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        self.step("create")
        if path in self._names:
            raise FileExistsError(errno.EEXIST, "exists")
        inode = Inode()
        inode.cached = inode.durable = None
        self._name(path, inode)
        return self._handle(inode, path)

    def write(self, handle: int, buffers: Sequence[memoryview]) -> None:
        inode, _path = self._handles[handle]
        for buffer in buffers:
            try:
                self.step("write")
            except OSError:
                inode.data += bytes(buffer[: buffer.nbytes // 2])
                raise
            room = self.capacity - self.nbytes
            inode.data += bytes(buffer[: max(0, room)])
            self._grew()
            if room < buffer.nbytes:
                raise OSError(errno.ENOSPC, "full")

    def sync(self, handle: int) -> None:
        inode, _path = self._handles[handle]
        try:
            self.step("sync")
        except OSError:
            inode.lost = True
            raise
        if inode.lost:
            return
        inode.cached = bytes(inode.data)
        if self.model == "posix":
            inode.durable = inode.cached

    def barrier(self, handle: int) -> None:
        self.step("barrier")
        if self.model == "posix":
            return
        for inode in {*self._names.values(), *self._cached.values(), *self._durable.values()}:
            inode.durable = inode.cached
        self._apply(self._durable, self._flushed)
        self._flushed.clear()
        del self.snapshots[:-1]

    def close(self, handle: int) -> None:
        del self._handles[handle]
        self.step("close")

    def rename(self, source: Path, target: Path) -> None:
        self.step("rename")
        if source not in self._names:
            raise FileNotFoundError(errno.ENOENT, "missing")
        self._name(target, self._names[source])
        self._name(source, None)

    def sync_directory(self, path: Path) -> None:
        self.step("sync_directory")
        here = [entry for entry in self._pending if entry[0].parent == path]
        self._pending = [entry for entry in self._pending if entry[0].parent != path]
        self._apply(self._cached, here)
        if self.model == "posix":
            self._apply(self._durable, here)
        else:
            self._flushed += here

    def open(self, path: Path) -> int:
        self.step("open")
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, "missing")
        return self._handle(self._names[path], path)

    def size(self, handle: int) -> int:
        self.step("size")
        return len(self._handles[handle][0].data)

    def read_into(self, handle: int, view: memoryview, offset: int) -> int:
        self.step("read")
        data = self._handles[handle][0].data[offset : offset + view.nbytes]
        view[: len(data)] = data
        return len(data)

    def file_size(self, path: Path) -> int | None:
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, "missing")
        return len(self._names[path].data)

    def unlink(self, path: Path) -> None:
        self.step("unlink")
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, "missing")
        self._name(path, None)

    def walk(self, path: Path) -> Iterator[Found]:
        yield from RealDisk().walk(path)
        for number, (name, inode) in enumerate(self._names.items()):
            yield Found(name.relative_to(path).as_posix(), len(inode.data), number)

    def free(self, path: Path) -> int:
        self.step("free")
        return self.capacity - self.nbytes

    # -- power

    def crashed(self) -> SimulatedDisk:
        """The disk after a power cut now: what was promised, and of the rest what chance left."""
        after = SimulatedDisk(self.model, self.dice.randrange(1 << 30))
        after.capacity = self.capacity
        names = dict(self._durable)
        for path, inode in [*self._flushed, *self._pending]:
            if self.dice.random() < 0.5:
                self._apply(names, [(path, inode)])
        fates: dict[Inode, Inode] = {}
        for path, inode in names.items():
            if inode not in fates:
                fates[inode] = Inode(self._fate(inode))
            after._names[path] = after._durable[path] = after._cached[path] = fates[inode]
        after.snapshots = [self.dice.choice(self.snapshots)] if self.snapshots else []
        return after

    def _fate(self, inode: Inode) -> bytes:
        now = bytes(inode.data)
        if inode.durable == now and not inode.lost:
            return now
        choices = [inode.durable or b"", inode.cached or b""]
        if not inode.lost:
            torn = bytearray(now)
            for start in range(0, len(torn), 512):
                if self.dice.random() < 0.5:
                    torn[start : start + 512] = bytes(len(torn[start : start + 512]))
            choices += [now, bytes(torn), now[: self.dice.randrange(len(now) + 1)]]
        return self.dice.choice(choices)

    # -- hands for tests

    def files(self) -> dict[Path, bytes]:
        """All files as they are now."""
        return {path: bytes(inode.data) for path, inode in self._names.items()}

    def put(self, path: Path, data: bytes) -> None:
        """Replace a file's bytes, durably, behind the store's back."""
        inode = Inode(data)
        self._names[path] = self._durable[path] = self._cached[path] = inode

    def put_first(self, files: Mapping[Path, bytes]) -> None:
        """Bring files back that are older than all others."""
        for each in (self._names, self._durable, self._cached):
            later = {path: inode for path, inode in each.items() if path not in files}
            each.clear()
            each.update({path: Inode(data) for path, data in files.items()})
            each.update(later)

    def _handle(self, inode: Inode, path: Path) -> int:
        self._next += 1
        self._handles[self._next] = (inode, path)
        return self._next

    @property
    def open_handles(self) -> int:
        """Handles that were not given back."""
        return len(self._handles)

    def _name(self, path: Path, inode: Inode | None) -> None:
        self._apply(self._names, [(path, inode)])
        self._pending.append((path, inode))

    @staticmethod
    def _apply(names: dict[Path, Inode], entries: Sequence[tuple[Path, Inode | None]]) -> None:
        for path, inode in entries:
            if inode is None:
                names.pop(path, None)
            else:
                names[path] = inode


class SimulatedIndex(Index):
    """An index whose commits are operations of a simulated disk.

    What survives is simulated too: no need to wait for the machine's own.
    """

    synchronous = "OFF"

    def __init__(self, directory: Path, owner: str, disk: SimulatedDisk) -> None:
        self._disk = disk
        super().__init__(directory, owner)
        self._keep()

    def commit(self, change: Change) -> None:
        if not change.rows:
            return
        if self._disk.dead:
            raise PowerCut
        self._disk.operations += 1
        self._disk.log.append("commit")
        number = self._disk.operations
        if self._disk.cut_at is not None and number >= self._disk.cut_at:
            self._disk.dead = True
            raise PowerCut
        chosen = self._disk.fail_kinds is None or "commit" in self._disk.fail_kinds
        at = self._disk.fail_at
        if chosen and at is not None and (number == at or (self._disk.stuck and number > at)):
            error = sqlite3.OperationalError("simulated")
            if self._disk.fail_with == errno.ENOSPC:
                error.sqlite_errorcode = sqlite3.SQLITE_FULL  # type: ignore[misc]
            raise error
        super().commit(change)
        self._keep()

    def _keep(self) -> None:
        if self._disk.model == "posix":
            self._disk.snapshots.clear()
        self._disk.snapshots.append((self._directory / index.NAME).read_bytes())
