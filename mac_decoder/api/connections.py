"""The protocol class that uvicorn makes for every connection: in the clear, or behind TLS.

uvicorn would have asyncio do the TLS, which gives a handshake a minute and knows of no bound
on how many there are at once. Here a connection has its place in the crowd from its first
byte on.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio import sslproto
from typing import Any, ClassVar, Final, cast

from mac_decoder.api.deadlines import DeadlineProtocol
from mac_decoder.api.door import Door
from mac_decoder.api.watched import WatchedProtocol
from mac_decoder.custody import Custody

_GOODBYE_S: Final = 5
"""How long a client may take to answer TLS's goodbye."""


def protocol_for(
    door: Door, custody: Custody | None = None, tls: ssl.SSLContext | None = None
) -> type[asyncio.Protocol]:
    """What uvicorn's ``http`` option takes, for connections that belong to ``door``.

    ``custody`` is told of every connection, but never of one with TLS: whoever takes over the
    socket has no part in the session, and anything that it wrote would be in the clear.
    """
    if tls is not None:
        inner = type("SecuredProtocol", (DeadlineProtocol,), {"door": door, "placed": True})

        def make(**given: Any) -> asyncio.BaseProtocol:
            return _Handshake(inner(**given), tls)

        return cast(type[asyncio.Protocol], make)
    if custody is not None:
        return type("WatchedConnection", (WatchedProtocol,), {"door": door, "custody": custody})
    return type("Connection", (DeadlineProtocol,), {"door": door})


class _Handshake(sslproto.SSLProtocol):
    """asyncio's TLS below a connection of ours, with a place in the crowd."""

    max_size: ClassVar[int] = 1 << 15
    """Of its buffer, which is touched when a connection is made. A TLS record has 16 KiB."""

    def __init__(self, inner: DeadlineProtocol, context: ssl.SSLContext) -> None:
        super().__init__(
            inner.loop,
            inner,
            context,
            cast(Any, None),  # nobody waits for the handshake
            server_side=True,
            # Any number will do; the stubs know of whole ones alone.
            ssl_handshake_timeout=cast(int, inner.head_timeout_s),
            ssl_shutdown_timeout=_GOODBYE_S,
        )
        self._inner = inner
        self._raw: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        if self._inner.door.crowd.enter(self):
            super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        stayed = self._inner.door.crowd.leave(self)
        if stayed and self._inner.transport is None:
            self._inner.door.refusals.count("tls_handshake_failed")
        super().connection_lost(exc)

    def idle(self) -> bool:
        """Whether no request is in hand; none is before the handshake is done."""
        return self._inner.idle()

    def evict(self) -> None:
        """End the connection at once, whatever is left to be written."""
        if self._raw is not None:
            self._raw.abort()
