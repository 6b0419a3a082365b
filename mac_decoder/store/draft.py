"""Files on their way to the disk: each appears whole or not at all, all are undone together."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from mac_decoder.store import names
from mac_decoder.store.holdings import Holdings
from mac_decoder.store.ledger import Other


class Draft:
    """What one publication has put on the disk so far, in order, as paths and sizes."""

    def __init__(self, held: Holdings) -> None:
        self.paths: list[tuple[str, int]] = []
        self._held = held
        self._handle = -1

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(nbytes for _, nbytes in self.paths)

    def write(self, path: str, buffers: Sequence[memoryview], *, last: bool = False) -> None:
        """Exclusive temporary file, write, sync, rename. Raises ``OSError``.

        The last file stays open for the barrier.
        """
        disk = self._held.disk
        target = self._held.path(path)
        temporary = f"{names.TEMP}/{secrets.token_hex(16)}"
        nbytes = sum(buffer.nbytes for buffer in buffers)
        handle = disk.create(self._held.path(temporary))
        self.paths.append((temporary, nbytes))
        stays_open = False
        try:
            disk.write(handle, buffers)
            disk.sync(handle)
            stays_open = last
        finally:
            if stays_open:
                self._handle = handle
            else:
                disk.close(handle)
        try:
            disk.rename(self._held.path(temporary), target)
        except IsADirectoryError:
            # Somebody made one there. Without this no such block would ever be kept again.
            self._held.set_aside(path)
            disk.rename(self._held.path(temporary), target)
        self.paths[-1] = (path, nbytes)
        with self._held.lock:
            # Whatever had this name is replaced.
            self._held.ledger.other.pop(path, None)
            self._held.stays.discard(path)

    def settle(self) -> None:
        """All names and bytes reach the medium. Raises ``OSError``."""
        for folder in sorted({path.partition("/")[0] for path, _ in self.paths}):
            self._held.disk.sync_directory(self._held.path(folder))
        self._held.disk.barrier(self._handle)
        self.close()

    def close(self) -> None:
        """Give the open file back; may be called again. Raises ``OSError``."""
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            self._held.disk.close(handle)

    def discard(self) -> None:
        """Remove everything, the last file first; what cannot be removed stays in the books.

        Never raises ``OSError``: failures are counted.
        """
        try:
            self.close()
        except OSError:
            self._held.count("close_failures")
        for path, nbytes in reversed(self.paths):
            self._held.gone(path)
            try:
                self._held.disk.unlink(self._held.path(path))
            except FileNotFoundError:
                continue
            except OSError:
                self._held.count("delete_failures")
                with self._held.lock:
                    self._held.ledger.other[path] = Other("unfinished", nbytes)
        self.paths.clear()
