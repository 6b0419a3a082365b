"""A WebSocket client over TLS in one thread, with the calls of the library's own.

That one reads and writes from two threads at once, which a TLS socket does not always survive.
"""

from __future__ import annotations

import ssl
import time
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosedError
from websockets.frames import Frame, Opcode

from protocol import frames
from protocol.errors import BatonError
from trust.calls import call, secure
from trust.websocket import WebSocket


class OneThread(WebSocket):
    """Takes binary messages as well."""

    def __init__(self, url: str, context: ssl.SSLContext) -> None:
        """Connect. Raises ``BatonError``."""
        parts = urlsplit(url)
        deadline = time.monotonic() + 10.0
        sock = call(parts.hostname or "", parts.port or 0, deadline, start="nothing")
        self.socket = secure(sock, context, deadline, hint="")
        super().__init__(self.socket, url, frames.MAX_FRAME_BYTES + 1024)
        try:
            self.open(deadline, hint="")
        except BatonError:
            self.socket.close()
            raise

    def recv(self, timeout: float, decode: bool = False) -> bytes:
        """The next message. Raises ``ConnectionClosed``, ``TimeoutError``."""
        try:
            return self.receive(time.monotonic() + timeout)
        except BatonError as error:
            if error.reason == "peer_silent":
                raise TimeoutError from error
            raise ConnectionClosedError(None, None) from error

    def send(self, raw: bytes, text: bool = True) -> None:  # type: ignore[override]
        """Send one message. Raises ``ConnectionClosed``."""
        assert text
        try:
            super().send(raw, time.monotonic() + 10.0)
        except BatonError as error:
            raise ConnectionClosedError(None, None) from error

    def _frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.BINARY:
            assert frame.fin
            self._texts.append(bytes(frame.data))
        else:
            super()._frame(frame)
