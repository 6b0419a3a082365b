"""Which requests a decoder has open: the only ones whose handoff may be installed, once.

A generation is a number that is used once per pairing key. It is *open* from PREFILL until
its seal was admitted or it was withdrawn; afterwards it is *used*, for ever.
"""

from __future__ import annotations

import hmac
from contextlib import AbstractContextManager
from typing import Any, Final

from protocol.errors import LocalProtocolError
from protocol.reasons import refusal

REMEMBERED: Final = 4096
"""How many used generations are kept one by one; below them all, everything is used."""


class Outstanding:
    """The open (generation, nonce) pairs of one pairing key.

    One object per key serves all connections of a decoder. Handoffs may finish in any
    order. Memory is bounded by open requests plus ``REMEMBERED`` numbers.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        """``lock``: what the threads that share this object exclude each other with.

        The caller supplies it, since nothing here may know of threads.
        """
        self._lock = lock
        self._open: dict[int, bytes] = {}
        self._used: set[int] = set()
        self._floor = 0

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def open(self, generation: int, nonce: bytes) -> None:
        """Register a request before its PREFILL is sent.

        Raises LocalProtocolError if the generation is, or may have been, used before.
        """
        with self._lock:
            if generation in self._open or self._is_used(generation):
                raise LocalProtocolError(f"generation {generation} was already used")
            self._open[generation] = nonce

    def check(self, generation: int, nonce: bytes) -> None:
        """Return only if the pair is open; changes nothing.

        Raises PeerProtocolError: ``generation_used``, ``generation_unknown`` (never opened
        here), ``nonce_differs`` (opened for another request).
        """
        with self._lock:
            self._check(generation, nonce)

    def admit(self, generation: int, nonce: bytes) -> None:
        """Use the pair up, as the last check before an install; raises as :meth:`check`."""
        with self._lock:
            self._check(generation, nonce)
            self._use(generation)

    def withdraw(self, generation: int) -> None:
        """Use a generation up without an install; harmless if it is not open."""
        with self._lock:
            if generation in self._open:
                self._use(generation)

    def _check(self, generation: int, nonce: bytes) -> None:
        known = self._open.get(generation)
        if known is None:
            code = "generation_used" if self._is_used(generation) else "generation_unknown"
            raise refusal(code, f"generation {generation} is not open", found=generation)
        if not hmac.compare_digest(known, nonce):
            message = f"generation {generation} is open with another nonce"
            raise refusal("nonce_differs", message, field="nonce", found=generation)

    def _is_used(self, generation: int) -> bool:
        return generation < self._floor or generation in self._used

    def _use(self, generation: int) -> None:
        del self._open[generation]
        self._used.add(generation)
        if len(self._used) > REMEMBERED:
            oldest = min(self._used)
            self._used.discard(oldest)
            # Everything below an evicted number counts as used: too strict, never too lax.
            self._floor = max(self._floor, oldest + 1)
