"""Manifests and restores: nothing comes out of here that was not authenticated.

Rows go straight into the caller's memory while they are digested, files side by side in
threads. Errors are those of ``access``.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mac_decoder.reuse.cut import REST, Piece, Place, block_sizes
from mac_decoder.store.access import CHUNK, Access, Effort, File, Source, fault, named
from mac_decoder.store.files import Disk
from mac_decoder.store.manifest import (
    BLOCK_FORMAT,
    CUT_FORMAT,
    Manifest,
    StoreKeys,
    block_header,
    decode_head,
    head_length,
    rest_offsets,
)
from mac_decoder.store.names import block_path, cut_path
from protocol.errors import Cancelled

READERS: Final = 4
"""Threads of one store. With a chunk of scratch each, all the transient memory there is."""

SCRATCH_BYTES: Final = READERS * CHUNK
"""The transient memory of a restore, in bytes."""

Into = Callable[[int, int, int, int], memoryview]
"""``(index, role, offset in the region, nbytes)`` to writable memory; called in any thread."""


class Reader:
    """Reads the files of one directory."""

    def __init__(self, disk: Disk, directory: Path, keys: StoreKeys) -> None:
        self._access = Access(disk, directory, keys.number)
        self._keys = keys
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="store-read")

    def close(self) -> None:
        """End the threads; reads in progress finish first."""
        self._pool.shutdown(wait=True)

    def manifest(self, path: str) -> Manifest:
        """The manifest of the cut file ``path``, authenticated."""
        with self._access.opened(path) as file:
            header = self._access.header(file, CUT_FORMAT)
            with named(path):
                head = file.read(0, head_length(header))
                return decode_head(self._keys, header, head)

    @property
    def key_number(self) -> str:
        """The public number of the store key."""
        return self._keys.number

    def check_block(self, path: str) -> None:
        """Look at a block file's header: format, key and length, no rows."""
        with self._access.opened(path) as file:
            self._access.header(file, BLOCK_FORMAT)

    def digest(self, path: str, stop: Callable[[], bool] = lambda: False) -> bytes:
        """SHA-256 of a whole file."""
        with self._access.opened(path) as file:
            source = Source(file, 0, Effort(), stop)
            source.skip(file.nbytes)
            return source.digest()

    def restore(
        self,
        manifest: Manifest,
        digest: bytes,
        pieces: Iterable[Piece],
        into: Into,
        cancelled: Callable[[], bool],
    ) -> Effort:
        """Fill the memory that ``into`` gives for ``pieces``, and verify every byte of it.

        ``digest`` names the cut's file. Returns when all threads are done with that memory,
        also when it raises: the first ``IntegrityError`` in file order, what ``into`` raised,
        or ``Cancelled``.
        """
        wanted: dict[int, dict[Place, list[Piece]]] = defaultdict(lambda: defaultdict(list))
        for piece in pieces:
            wanted[piece.source][piece.index, piece.role].append(piece)
        rest = wanted.pop(REST, {})
        failed = threading.Event()
        restoring = _Restore(
            self._access,
            manifest,
            sorted(block_sizes(manifest.layout).items()),
            rest_offsets(manifest),
            into,
            Effort(),
            lambda: failed.is_set() or cancelled(),
        )

        def guarded(task: Callable[..., None], *arguments: object) -> None:
            done = False
            try:
                task(*arguments)
                done = True
            finally:
                if not done:
                    failed.set()

        with self._access.opened(cut_path(digest)) as file:
            futures = [
                self._pool.submit(guarded, restoring.block, number, wanted[number])
                for number in sorted(wanted)
            ]
            futures += [
                self._pool.submit(guarded, restoring.rest, file, place, parts)
                for place, parts in rest.items()
            ]
            _finish(futures)
        return restoring.effort


@dataclass(slots=True)
class _Restore:
    """One restore's work, file by file.

    ``sizes`` are a block's places in file order, ``offsets`` the rest's. The threads run one
    at a time outside of reads and digests: little is done there, and nothing twice.
    """

    access: Access
    manifest: Manifest
    sizes: Sequence[tuple[Place, int]]
    offsets: Mapping[Place, tuple[int, int]]
    into: Into
    effort: Effort
    stop: Callable[[], bool]

    def block(self, number: int, wanted: dict[Place, list[Piece]]) -> None:
        """Place rows of block ``number``."""
        manifest = self.manifest
        path = block_path(manifest.files[number])
        header = block_header(
            manifest.layout, manifest.space, manifest.blocks[number], self.access.number
        )
        nbytes = len(header) + sum(size for _, size in self.sizes)
        with self.access.opened(path) as file:
            if file.nbytes != nbytes:
                raise fault("length_differs", path, file.nbytes, nbytes)
            source = Source(file, 0, self.effort, self.stop)
            found = memoryview(bytearray(len(header)))
            source.take(found)
            if found != header:
                raise fault("digest_differs", path)
            for place, size in self.sizes:
                self._place(source, wanted.get(place, ()), size)
        if source.digest() != manifest.files[number]:
            raise fault("digest_differs", path)

    def rest(self, file: File, place: Place, parts: list[Piece]) -> None:
        """Place bytes of the cut's rest."""
        offsets = self.offsets
        at, nbytes = offsets[place]
        source = Source(file, at, self.effort, self.stop)
        self._place(source, parts, nbytes)
        if source.digest() != self.manifest.rest[list(offsets).index(place)]:
            raise fault("digest_differs", file.path)

    def _place(self, source: Source, parts: Sequence[Piece], nbytes: int) -> None:
        """The next ``nbytes`` are one array: keep those bytes of it that are asked for."""
        done = 0
        for piece in sorted(parts, key=lambda piece: piece.start):
            if piece.start < done or piece.start + piece.nbytes > nbytes:
                raise ValueError("the pieces do not fit the array")
            if piece.start > done:
                source.skip(piece.start - done)
            view = self.into(piece.index, piece.role, piece.offset, piece.nbytes).cast("B")
            if view.nbytes != piece.nbytes or view.readonly:
                raise ValueError("the memory to restore into is not the piece's")
            source.take(view)
            done = piece.start + piece.nbytes
        if nbytes > done:
            source.skip(nbytes - done)


def _finish(futures: Sequence[Future[None]]) -> None:
    """Wait for all, then raise the failure for which the others were given up."""
    failures = [error for future in futures if (error := future.exception())]
    for error in failures:
        if not isinstance(error, Cancelled):
            raise error
    if failures:
        raise failures[0]
