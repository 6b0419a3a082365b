"""The app's icon: drawn here at any size, as PNG and as Apple's icon file.

A baton, handed over: a bar across a rounded square. Drawn from distances, so that every size has
smooth edges without any image library; nothing is read and nothing is fetched.

An ``icns`` file is ``icns``, its length, then entries of four letters, a length with these eight
bytes, and a whole PNG file. Lengths are 32 bits, big endian. Entries for one pixel a point are
left out at 16 and 32: as PNG they are not drawn by every release of macOS.
"""

from __future__ import annotations

import functools
import struct
import zlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

ENTRIES: Final = {
    "ic11": 32,
    "ic12": 64,
    "ic07": 128,
    "ic13": 256,
    "ic08": 256,
    "ic14": 512,
    "ic09": 512,
    "ic10": 1024,
}
"""Kinds of entries with their width in pixels: 16 and 32 points at two pixels a point, 128, and
so on at one and at two.
"""

_TOP: Final = (0.20, 0.24, 0.40)
_BOTTOM: Final = (0.09, 0.10, 0.19)
_BATON: Final = (1.00, 0.78, 0.28)
_GRIP: Final = (0.96, 0.97, 1.00)
_MARGIN: Final = 0.08
"""Of the width, left free on every side, as Apple's template has it."""

_ROUND: Final = 0.19
_FROM: Final = (0.29, 0.71)
_TO: Final = (0.71, 0.29)
_HALF: Final = 0.088
"""The baton's two ends, and half its thickness."""

_BAND: Final = (0.27, 0.08)
"""The middle of the light band, along the baton, and half its width."""

Plane = NDArray[np.float64]


def png(size: int) -> bytes:
    """The icon as a PNG file of ``size`` pixels a side, eight bits a channel, with alpha."""
    pixels = (np.clip(_drawn(size), 0, 1) * 255 + 0.5).astype(np.uint8)
    # A filter byte before each row: none is used.
    rows = np.insert(pixels.reshape(size, size * 4), 0, 0, axis=1).tobytes()
    header = struct.pack(">IIBBBBB", size, size, 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


@functools.cache
def icns() -> bytes:
    """The icon as a file that macOS reads from a bundle."""
    drawn = {size: png(size) for size in {*ENTRIES.values()}}
    entries = b"".join(
        kind.encode() + struct.pack(">I", len(drawn[size]) + 8) + drawn[size]
        for kind, size in ENTRIES.items()
    )
    return b"icns" + struct.pack(">I", len(entries) + 8) + entries


def _chunk(name: bytes, data: bytes) -> bytes:
    checked = zlib.crc32(data, zlib.crc32(name))
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checked)


def _drawn(size: int) -> NDArray[np.float64]:
    """Red, green, blue and alpha of every pixel, 0 to 1, row by row from the top."""
    middle = (np.arange(size) + 0.5) / size
    x, y = np.meshgrid(middle, middle)
    square = _inside(_to_square(x, y), size)
    along, across = _to_baton(x, y)
    bar = _inside(across, size)
    grip = _inside(np.maximum(across, np.abs(along - _BAND[0]) - _BAND[1]), size)
    shade = y[..., None]
    colour = np.array(_TOP) * (1 - shade) + np.array(_BOTTOM) * shade
    for over, paint in ((bar, _BATON), (grip, _GRIP)):
        colour = colour * (1 - over[..., None]) + np.array(paint) * over[..., None]
    return np.dstack([colour, square])


def _inside(distance: Plane, size: int) -> Plane:
    """How much of a pixel lies within a shape, from its distance to the shape's edge."""
    return np.clip(0.5 - distance * size, 0, 1)


def _to_square(x: Plane, y: Plane) -> Plane:
    half = 0.5 - _MARGIN - _ROUND
    dx, dy = np.abs(x - 0.5) - half, np.abs(y - 0.5) - half
    outside = np.hypot(np.maximum(dx, 0), np.maximum(dy, 0))
    return outside + np.minimum(np.maximum(dx, dy), 0) - _ROUND


def _to_baton(x: Plane, y: Plane) -> tuple[Plane, Plane]:
    """How far along the baton a pixel lies, 0 to 1, and its distance to the baton's edge."""
    (x0, y0), (x1, y1) = _FROM, _TO
    vx, vy = x1 - x0, y1 - y0
    along = np.clip(((x - x0) * vx + (y - y0) * vy) / (vx * vx + vy * vy), 0, 1)
    return along, np.hypot(x - x0 - along * vx, y - y0 - along * vy) - _HALF
