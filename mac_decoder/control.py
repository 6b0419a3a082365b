"""The channel between the supervisor and its child: a socket pair that both inherit.

The supervisor writes one :class:`Start`; after that, single lines::

    child        supervisor
    serving  ->              the child accepts connections from now on
             <-  go          ... and the supervisor does not any more
    ready    ->              a token can be generated

Its end means that the other side is gone: the child then stops, whoever killed the parent.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Final

import msgspec

from mac_decoder.config import DecoderConfig
from protocol.errors import ConfigError

SERVING: Final = b"serving"
GO: Final = b"go"
READY: Final = b"ready"

_LENGTH_BYTES: Final = 4
_MAX_START_BYTES: Final = 1 << 20


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a child is told: its configuration and the inherited listening socket.

    ``restarts`` counts the children before this one, ``last_fault`` says how the last ended.
    ``custody_fd`` and ``page_fd`` are those of ``custody.inherited``, where there are any.
    """

    config: DecoderConfig
    listening_fd: int
    restarts: int = 0
    last_fault: str = ""
    custody_fd: int | None = None
    page_fd: int | None = None


def send_start(channel: socket.socket, start: Start) -> None:
    """Write the start message; raises ``OSError`` if the child is gone."""
    raw = msgspec.json.encode(start)
    channel.sendall(len(raw).to_bytes(_LENGTH_BYTES, "big") + raw)


def receive_start(channel: socket.socket) -> Start:
    """Read the start message.

    Raises ``ConfigError`` (``not_supervised``) if the other end is no supervisor.
    """
    try:
        length = int.from_bytes(_exactly(channel, _LENGTH_BYTES), "big")
        if length > _MAX_START_BYTES:
            raise ValueError("too long")
        return msgspec.json.decode(_exactly(channel, length), type=Start)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(
            "this process was not started by a supervisor", reason="not_supervised"
        ) from error


def send_line(channel: socket.socket, line: bytes) -> None:
    """Write one line; a peer that is gone is noticed by the reader, not here."""
    try:
        channel.sendall(line + b"\n")
    except OSError:
        return


class Lines:
    """Cuts what a channel brings into lines, at most a few bytes at a time."""

    def __init__(self) -> None:
        self._held = b""

    def take(self, data: bytes) -> Iterator[bytes]:
        """The lines that ``data`` completes."""
        *lines, self._held = (self._held + data).split(b"\n")
        yield from lines


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        piece = channel.recv(count - len(parts))
        if not piece:
            raise ValueError("the channel ended")
        parts += piece
    return bytes(parts)
