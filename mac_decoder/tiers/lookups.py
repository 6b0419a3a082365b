"""What the fetched tiers hold of a prompt, after what was to be kept of its beginning before.

So a prompt that comes after an answer finds what the answer left, and a stranger waits for
nobody.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mac_decoder.reuse.facts import NOTHING, Holding
from mac_decoder.reuse.resident import Resident
from mac_decoder.store.store import Store
from mac_decoder.tiers.waiting import Beginning, Waiting
from protocol.blocks import BLOCK, as_tokens, chain, cut_digest

_LOOKUPS: Final = 4


@dataclass(frozen=True)
class Looked:
    """What the fetched tiers hold of a prompt. ``durable`` is ``None`` without such a tier."""

    space: bytes
    tokens: NDArray[np.uint32] = field(repr=False)
    names: tuple[bytes, ...] = field(repr=False)
    resident: Holding
    durable: Holding | None

    def cut_name(self, position: int) -> bytes:
        """The name of the prompt's cut at ``position``."""
        whole = position // BLOCK
        parent = self.names[whole - 1] if whole else b""
        return cut_digest(self.space, parent, self.tokens[whole * BLOCK : position], position)


def nothing(tokens: tuple[int, ...]) -> Looked:
    """What is held of a prompt for which nobody was asked."""
    return Looked(b"", _array(tokens), (), NOTHING, None)


class Lookups:
    """Threads that look up; ``store`` is ``None`` while there is no durable tier."""

    def __init__(self, resident: Resident, waiting: Waiting) -> None:
        self._resident = resident
        self._waiting = waiting
        self._threads = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="baton-look")
        self.store: Store | None = None

    def look(self, space: bytes, tokens: tuple[int, ...]) -> Future[Looked]:
        """What is held of a prompt, after everything of it that was to be kept before."""
        return self._threads.submit(self._look, space, tokens, self._waiting.now())

    def close(self) -> None:
        """Drop what has not begun, and wait for the rest."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _look(
        self, space: bytes, tokens: tuple[int, ...], before: Mapping[int, Beginning]
    ) -> Looked:
        prompt = _array(tokens)
        self._waiting.wait(space, prompt, before)
        names = tuple(chain(space, prompt))
        store = self.store
        # First: what it finds damaged on the way is then not offered from memory either.
        durable = None if store is None else store.holding(space, prompt, names)
        resident = self._resident.holding(space, prompt, names)
        if store is not None and durable is not None and _outran(resident, durable):
            # Something was published in between: memory knows, this look at the disk does not.
            durable = store.holding(space, prompt, names)
        return Looked(space, prompt, names, resident, durable)


def _array(tokens: tuple[int, ...]) -> NDArray[np.uint32]:
    """The tokens for numpy, which by itself takes three times as long for a tuple."""
    return as_tokens(np.array(array("I", tokens)))


def _outran(resident: Holding, durable: Holding) -> bool:
    """Whether memory says of a cut, or of an extension, that it is on disk, and the disk not."""
    return any(
        offer.publication in ("published", "superseded") and offer.shared > durable.shared
        for offer in resident.offers
    )
