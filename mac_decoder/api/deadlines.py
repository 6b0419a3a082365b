"""uvicorn's HTTP connection with a deadline for what is no request yet.

uvicorn bounds an idle connection between two requests, but not one that never began or never
ends its first lines; and each holds a file descriptor.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class DeadlineProtocol(H11Protocol):
    """Closes a connection whose request line and headers are not whole in ``head_timeout_s``
    seconds, counted from its opening or from the first byte after an answer, however the bytes
    trickle. So it does with what follows an answer that was given before the body was read.
    """

    head_timeout_s: ClassVar[float] = 10.0

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _between_requests(self) -> bool:
        answered = self.cycle is not None and self.cycle.response_complete
        return answered or self.conn.their_state is h11.IDLE

    def _watch(self) -> None:
        if not self._between_requests():
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.head_timeout_s, self._expired)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expired(self) -> None:
        self._deadline = None
        if self._between_requests():
            self.transport.close()
