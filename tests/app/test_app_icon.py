"""The icon's files, read back by the formats' own rules and by this test's own reader."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from app.app_icon import ENTRIES, icns, png


def _pixels(file: bytes) -> np.ndarray:
    """Height, width, and four channels of a PNG file without filters; its checksums are checked."""
    assert file.startswith(b"\x89PNG\r\n\x1a\n")
    at, found = 8, {}
    while at < len(file):
        (length,) = struct.unpack_from(">I", file, at)
        name, data = file[at + 4 : at + 8], file[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", file, at + 8 + length)[0] == zlib.crc32(name + data)
        found[name] = data
        at += 12 + length
    assert [*found] == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", found[b"IHDR"])
    assert (depth, colour, rest) == (8, 6, [0, 0, 0])
    rows = np.frombuffer(zlib.decompress(found[b"IDAT"]), np.uint8).reshape(height, 1 + 4 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 4)


@pytest.mark.parametrize("size", [16, 48, 256])
def test_it_is_a_baton_on_a_rounded_square(size: int) -> None:
    pixels = _pixels(png(size))
    assert pixels.shape == (size, size, 4)
    red, green, blue, alpha = (pixels[..., channel].astype(int) for channel in range(4))
    assert alpha[0, 0] == 0, "corners are clear"
    assert alpha[size // 2, size // 2] == 255
    yellow = (alpha == 255) & (red > 200) & (green > 150) & (blue < 140)
    assert 0.08 < yellow.mean() < 0.3
    at = np.argwhere(yellow)
    # From the lower left to the upper right: further right is further up.
    assert np.corrcoef(at[:, 0], at[:, 1])[0, 1] < -0.8


def test_edges_are_smooth() -> None:
    alpha = _pixels(png(64))[..., 3]
    assert np.unique(alpha).size > 10


def test_apples_file_holds_every_size_once_and_nothing_else() -> None:
    file = icns()
    assert file[:4] == b"icns"
    assert struct.unpack_from(">I", file, 4)[0] == len(file)
    at, found = 8, {}
    while at < len(file):
        (length,) = struct.unpack_from(">I", file, at + 4)
        found[file[at : at + 4].decode()] = file[at + 8 : at + length]
        at += length
    assert at == len(file)
    assert {kind: _pixels(data).shape[0] for kind, data in found.items()} == ENTRIES
