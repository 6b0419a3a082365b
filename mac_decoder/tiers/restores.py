"""Placing the bytes of a held cut in the memory of a cache to be built, from memory or disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from mac_decoder.reuse.cut import REST, Piece, clipped
from mac_decoder.reuse.resident import Pinned, Resident
from mac_decoder.store.publishing import files_of_blocks
from mac_decoder.store.reading import SCRATCH_BYTES
from mac_decoder.store.store import Store
from protocol.blocks import BLOCK
from protocol.errors import Cancelled, IntegrityError
from protocol.messages import History

_CHUNK: Final = 4 << 20
"""Bytes copied between two looks at whether the request was withdrawn."""

Into = Callable[[int, int, int, int], memoryview]
"""``(index, role, offset, nbytes)`` to writable memory of the cache to be built."""


@dataclass(frozen=True)
class Restored:
    """A finished restore: the history of what was placed, and what it cost.

    Times are seconds as the request waited them; ``staging_bytes`` is the memory it took beyond
    the cut. Whoever goes on from it does so from ``pinned``, a resident cut that is still held,
    or from ``files``, the digests of the files of a durable cut's whole blocks.
    """

    history: tuple[History, ...]
    nbytes: int
    read_s: float = 0.0
    verify_s: float = 0.0
    place_s: float = 0.0
    staging_bytes: int = 0
    pinned: Pinned | None = None
    files: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """What to place: these pieces of the cut ``key``, whose rows below ``position`` they are."""

    key: Hashable
    position: int
    pieces: Iterable[Piece]


def from_memory(
    resident: Resident, wanted: Wanted, into: Into, cancelled: Callable[[], bool]
) -> Restored | None:
    """Copy out of a resident cut; ``None`` if it is not held any more, or may not serve.

    Raises ``Cancelled``; the memory is void then.
    """
    began = time.perf_counter()
    pinned = resident.pin(_name(wanted.key), serving=True)
    if pinned is None:
        return None
    nbytes, done = 0, False
    try:
        for piece in wanted.pieces:
            body = pinned.cut.rest if piece.source == REST else pinned.blocks[piece.source].data
            rows = body[piece.index, piece.role][piece.start : piece.start + piece.nbytes]
            target = np.frombuffer(
                into(piece.index, piece.role, piece.offset, piece.nbytes), np.uint8
            )
            for start in range(0, piece.nbytes, _CHUNK):
                if cancelled():
                    raise Cancelled("the request was withdrawn")
                # Releases the interpreter's lock, unlike assigning to a memoryview.
                np.copyto(target[start : start + _CHUNK], rows[start : start + _CHUNK])
            nbytes += piece.nbytes
        done = True
    finally:
        if not done:
            pinned.release()
    history = clipped(pinned.cut.history, wanted.position)
    return Restored(history, nbytes, place_s=time.perf_counter() - began, pinned=pinned)


def from_disk(
    store: Store, wanted: Wanted, into: Into, cancelled: Callable[[], bool]
) -> Restored | None:
    """Read out of a durable cut; ``None`` if it is not held any more.

    Raises ``IntegrityError`` for a damaged cut, which is then not offered again, and
    ``Cancelled``; the memory is void then, and nobody writes to it.
    """
    began = time.perf_counter()
    found = store.read(_name(wanted.key), into, wanted=wanted.pieces, cancelled=cancelled)
    if found is None:
        return None
    # Threads read and digest side by side: their shares of the time that was waited.
    manifest = found.manifest
    waited, work = time.perf_counter() - began, found.read_s + found.verify_s
    read_s = waited * found.read_s / work if work else waited
    return Restored(
        clipped(manifest.history, wanted.position),
        found.nbytes,
        read_s=read_s,
        verify_s=waited - read_s,
        staging_bytes=SCRATCH_BYTES,
        files=files_of_blocks(manifest.files, wanted.position // BLOCK),
    )


def _name(key: Hashable) -> bytes:
    if not isinstance(key, bytes):
        raise IntegrityError("a fetched cut is named by a digest", reason="cut_malformed")
    return key
