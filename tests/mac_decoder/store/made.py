"""Stores on simulated disks, and what a restore should give."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mac_decoder.reuse.cut import BlockBody, CutBody, Place
from mac_decoder.store import index
from mac_decoder.store.events import Event
from mac_decoder.store.limits import MIN_CAP
from mac_decoder.store.publishing import Published, Refused
from mac_decoder.store.store import Store
from protocol.blocks import namespace
from protocol.identity import Identity
from protocol.layout import Layout, regions
from tests.mac_decoder.reuse.made import causal_rows, made_of
from tests.mac_decoder.store.simulated import SimulatedDisk, SimulatedIndex

KEY = bytes(range(32))
IDENTITY = Identity(*["11" * 32] * 8)
OTHER_IDENTITY = Identity("22" * 32, *["11" * 32] * 7)
SPACE = namespace(KEY, IDENTITY.digest())
OTHER_SPACE = namespace(KEY, OTHER_IDENTITY.digest())


def opened(
    directory: Path,
    disk: SimulatedDisk,
    cap: int = MIN_CAP * 4,
    floor: int = 0,
    events: list[Event] | None = None,
    key: bytes = KEY,
) -> Store:
    """A store on ``disk``; its index is a real file in ``directory``."""
    disk.store = None
    disk.store = store = Store.open(
        directory,
        key,
        cap,
        floor,
        disk,
        (events if events is not None else []).append,
        lambda where, owner: SimulatedIndex(where, owner, disk),
    )
    return store


def crashed(directory: Path, disk: SimulatedDisk) -> SimulatedDisk:
    """Cut the power: the disk as the next start finds it, the index put back likewise."""
    disk.dead = True
    if isinstance(disk.store, Store):
        disk.store._held.index.close()
        disk.store._held.reader.close()
        disk.store._release()
    after = disk.crashed()
    index.remove(directory)
    if after.snapshots:
        (directory / index.NAME).write_bytes(after.snapshots[0])
    return after


def conversation(length: int, seed: int = 0, shared: int = 0) -> list[int]:
    """Tokens; the first ``shared`` of them are the same for every seed."""
    common = np.random.default_rng(99).integers(0, 1 << 32, shared)
    own = np.random.default_rng(seed).integers(0, 1 << 32, max(0, length - shared))
    return [int(token) for token in (*common, *own)][:length]


def publish(
    store: Store, layout: Layout, tokens: Sequence[int], role: str = "turn", flavour: int = 0
) -> Published | Refused:
    """Publish the cut of ``tokens``, with all bodies."""
    cut, blocks = made(layout, tokens, flavour)
    return store.publish(SPACE, IDENTITY, cut, blocks, role=role)  # type: ignore[arg-type]


def made(
    layout: Layout, tokens: Sequence[int], flavour: int = 0, space: bytes = SPACE
) -> tuple[CutBody, tuple[BlockBody, ...]]:
    """A cut and its blocks; another flavour has other rows for the same tokens."""
    return made_of(layout, tokens, space=space, rows=rows_of(layout, tokens, flavour))


def rows_of(layout: Layout, tokens: Sequence[int], flavour: int = 0) -> dict[Place, np.ndarray]:
    """All rows and states at ``len(tokens)``."""
    return {
        place: array ^ np.uint8(flavour) for place, array in causal_rows(layout, tokens).items()
    }


def name_of(layout: Layout, tokens: Sequence[int], space: bytes = SPACE) -> bytes:
    """The cut's name."""
    return made(layout, tokens, space=space)[0].digest(space)


class Destination:
    """Memory for a cache at ``position``, full of bytes that nobody wrote."""

    def __init__(self, layout: Layout, position: int) -> None:
        self.arrays = {
            (r.index, r.role): np.full(r.nbytes, 0xA5, np.uint8)
            for r in regions(layout, 0, position)
        }
        self.written = {place: np.zeros(len(a), bool) for place, a in self.arrays.items()}
        self._lock = threading.Lock()

    def into(self, index: int, role: int, offset: int, nbytes: int) -> memoryview:
        """The memory of a piece; every byte is asked for once."""
        with self._lock:
            assert not self.written[index, role][offset : offset + nbytes].any()
            self.written[index, role][offset : offset + nbytes] = True
        return self.arrays[index, role][offset : offset + nbytes].data

    def holds(self, rows: dict[Place, np.ndarray]) -> bool:
        """Whether every byte was written, and is that of ``rows``."""
        return (
            self.arrays.keys() == rows.keys()
            and all(written.all() for written in self.written.values())
            and all(np.array_equal(self.arrays[place], rows[place]) for place in rows)
        )


def restored(
    store: Store, layout: Layout, tokens: Sequence[int], position: int | None = None
) -> Destination | None:
    """What the store gives for the cut of ``tokens``; ``None`` for a miss."""
    memory = Destination(layout, position or len(tokens))
    done = store.read(name_of(layout, tokens), memory.into, position=position)
    return memory if done else None


def serves(store: Store, layout: Layout, tokens: Sequence[int], flavour: int = 0) -> bool:
    """Whether the cut is restored exactly; a miss is false, anything else wrong fails."""
    memory = restored(store, layout, tokens)
    if memory is None:
        return False
    assert memory.holds(rows_of(layout, tokens, flavour))
    return True


def walk(directory: Path, disk: SimulatedDisk) -> int:
    """Bytes of all files, counted anew."""
    return sum(found.nbytes for found in disk.walk(directory))
