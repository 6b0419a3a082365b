"""Digests of blocks that are in memory, each computed once for as long as the block lives."""

from __future__ import annotations

import hashlib
import threading
from weakref import WeakKeyDictionary

from mac_decoder.reuse.cut import BlockBody
from mac_decoder.store.manifest import block_header
from protocol.layout import Layout


class Digests:
    """SHA-256 of block files that are, or would be, written. Any thread may call."""

    def __init__(self, number: str) -> None:
        self._number = number
        self._known: WeakKeyDictionary[BlockBody, tuple[bytes, bytes]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, layout: Layout, space: bytes, body: BlockBody) -> bytes:
        """The digest of the file of ``body`` in the namespace ``space``."""
        with self._lock:
            known = self._known.get(body)
        if known and known[0] == space:
            return known[1]
        sha = hashlib.sha256(block_header(layout, space, body.hash, self._number))
        for place in sorted(body.data):
            sha.update(body.data[place].data)
        with self._lock:
            self._known[body] = (space, sha.digest())
        return sha.digest()
