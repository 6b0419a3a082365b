"""The bytes of one direction of a WebSocket connection, told apart without changing them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from protocol.frames import HEADER_BYTES

_TYPE_BYTES: Final = 48
"""Of a control message, what is looked at for its type; it comes first."""


@dataclass(frozen=True)
class Piece:
    """Consecutive bytes of one direction that are all of one sort.

    ``opens`` and ``closes`` name the control message that begins and ends with it.
    """

    data: bytes
    payload: bool = False
    opens: str = ""
    closes: str = ""
    closes_frame: bool = False


class Frames:
    """Takes a direction of a WebSocket connection apart; every byte comes out again, in order."""

    def __init__(self) -> None:
        self._ahead = bytearray()
        self._shaken_hands = False
        self._left = 0
        """Bytes of the current frame that were not given out yet."""
        self._last = False
        """Whether the current frame is the last one of its message."""
        self._control = False
        """Whether it is a ping, a pong or a close, which may come in between."""
        self._message = ""
        """Type of the current message; empty for a BINARY one."""
        self._passed = 0
        """Bytes of it that were given out, its frames' headers not counted."""

    def read(self, data: bytes) -> Iterator[Piece]:
        """The pieces that are whole now that ``data`` has come in."""
        self._ahead += data
        if not self._shaken_hands:
            end = self._ahead.find(b"\r\n\r\n")
            if end < 0:
                return
            self._shaken_hands = True
            yield Piece(self._out(end + 4))
        while self._ahead:
            if self._left:
                yield self._more()
            elif (piece := self._begin()) is None:
                return
            else:
                yield piece

    def _out(self, count: int) -> bytes:
        data = bytes(self._ahead[:count])
        del self._ahead[:count]
        return data

    def _begin(self) -> Piece | None:
        """The header of the next frame (RFC 6455, section 5.2), with a TEXT frame's type."""
        raw = self._ahead
        if len(raw) < 2:
            return None
        opcode, short, masked = raw[0] & 0x0F, raw[1] & 0x7F, raw[1] >> 7
        extended = {126: 2, 127: 8}.get(short, 0)
        size = 2 + extended + 4 * masked
        if len(raw) < size:
            return None
        length = int.from_bytes(raw[2 : 2 + extended], "big") if extended else short
        looked_at = min(length, _TYPE_BYTES) if opcode == 1 else 0
        if len(raw) < size + looked_at:
            return None  # held back until it is known what it is
        if opcode == 1:
            mask = bytes(raw[size - 4 : size]) if masked else bytes(4)
            start = bytes(b ^ mask[i % 4] for i, b in enumerate(raw[size : size + looked_at]))
            self._message, self._passed = _type_of(start), 0
        elif opcode == 2:
            self._message, self._passed = "", 0
        self._left, self._control = length, opcode >= 8
        self._last = bool(raw[0] & 0x80) and not self._control
        return self._piece(size, opens=self._message if opcode == 1 else "")

    def _more(self) -> Piece:
        count = min(self._left, len(self._ahead))
        self._left -= count
        if self._control or self._message:
            return self._piece(count)
        if header := max(0, HEADER_BYTES - self._passed):
            self._left += count - min(count, header)
            count = min(count, header)
        self._passed += count
        return self._piece(count, payload=not header)

    def _piece(self, count: int, *, payload: bool = False, opens: str = "") -> Piece:
        ends = self._last and not self._left
        return Piece(
            self._out(count),
            payload=payload,
            opens=opens,
            closes=self._message if ends else "",
            closes_frame=ends and not self._message,
        )


def _type_of(start: bytes) -> str:
    """The type of the control message that starts like this; ``"text"`` for another text."""
    head = b'{"type":"'
    name, quote, _ = start.removeprefix(head).partition(b'"')
    return name.decode("ascii", "replace") if start.startswith(head) and quote else "text"
