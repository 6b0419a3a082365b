"""Data frames: a fixed header of 80 bytes, then at most 1 MiB of payload.

One frame is one WebSocket BINARY message. All integers are big-endian:

======  =====  =======================================================================
offset  bytes  field
======  =====  =======================================================================
0       4      magic ``BTNF``
4       1      version, 1
5       1      role: 0 keys, 1 values, 2 + i the i-th state of a recurrent layer
6       1      dtype: 1 float32, 2 bfloat16, 3 float16
7       1      zero
8       2      index of the layer in the layout
10      2      zero
12      4      payload length in bytes
16      8      sequence, from 0
24      8      generation of the request
32      8      first position
40      8      last position (exclusive; ``first == last == end`` for a state)
48      32     digest: SHA-256 over bytes 0 to 47 and the payload
======  =====  =======================================================================
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final, NamedTuple

from protocol.layout import (
    MAX_FRAME_PAYLOAD,
    STATE,
    Dtype,
    Layout,
    RecurrentLayer,
    Slot,
)
from protocol.messages import VERSION
from protocol.reasons import differs

MAGIC: Final = b"BTNF"
_PREFIX: Final = struct.Struct(">4sBBBBHHIQQQQ")
PREFIX_BYTES: Final = _PREFIX.size
DIGEST_BYTES: Final = 32
HEADER_BYTES: Final = PREFIX_BYTES + DIGEST_BYTES
MAX_FRAME_BYTES: Final = HEADER_BYTES + MAX_FRAME_PAYLOAD
"""Longest BINARY message."""

DTYPE_CODES: Final[dict[Dtype, int]] = {"float32": 1, "bfloat16": 2, "float16": 3}


class Header(NamedTuple):
    """The fields of a header, as read; ``dtype`` is the code."""

    role: int
    dtype: int
    index: int
    length: int
    sequence: int
    generation: int
    first: int
    last: int
    digest: bytes


def slot_dtype(layout: Layout, slot: Slot) -> Dtype:
    """The element type of a slot's bytes."""
    layer = layout.layers[slot.index]
    if isinstance(layer, RecurrentLayer):
        return layer.states[slot.role - STATE].dtype
    return layer.dtype


def header_prefix(layout: Layout, slot: Slot, generation: int) -> bytes:
    """Bytes 0 to 47 of the header of a slot's frame."""
    return _PREFIX.pack(
        MAGIC,
        VERSION,
        slot.role,
        DTYPE_CODES[slot_dtype(layout, slot)],
        0,
        slot.index,
        0,
        slot.nbytes,
        slot.sequence,
        generation,
        slot.first,
        slot.last,
    )


def digest(prefix: bytes, payload: bytes | bytearray | memoryview) -> bytes:
    """The digest of a frame: over its 48 header bytes and its payload.

    Releases the interpreter lock for payloads above 2 KiB, so that it can run in a thread.
    """
    state = hashlib.sha256(prefix)
    state.update(payload)
    return state.digest()


def parse(raw: bytes) -> Header:
    """The header in ``raw``, checked for form alone.

    Raises PeerProtocolError: ``frame_malformed``, ``version_unsupported``,
    ``frame_too_long``.
    """
    if len(raw) != HEADER_BYTES:
        raise differs("frame_malformed", "header", f"{len(raw)} bytes", HEADER_BYTES)
    (magic, version, role, dtype, zero, index, zeros, length, sequence, generation, first, last) = (
        _PREFIX.unpack_from(raw)
    )
    if magic != MAGIC:
        raise differs("frame_malformed", "magic", magic, MAGIC)
    if version != VERSION:
        raise differs("version_unsupported", "version", version, VERSION)
    if zero or zeros:
        raise differs("frame_malformed", "reserved", f"{zero}, {zeros}", "0, 0")
    if length > MAX_FRAME_PAYLOAD:
        raise differs("frame_too_long", "length", length, f"at most {MAX_FRAME_PAYLOAD}")
    return Header(
        role, dtype, index, length, sequence, generation, first, last, bytes(raw[PREFIX_BYTES:])
    )


def require_slot(header: Header, layout: Layout, slot: Slot, generation: int) -> None:
    """Return only if the header is the one that the schedule puts here.

    Raises PeerProtocolError: ``frame_out_of_order``, ``frame_differs`` (with the field),
    ``length_differs``.
    """
    if header.sequence != slot.sequence:
        raise differs("frame_out_of_order", "sequence", header.sequence, slot.sequence)
    for name, found, expected in (
        ("generation", header.generation, generation),
        ("index", header.index, slot.index),
        ("role", header.role, slot.role),
        ("dtype", header.dtype, DTYPE_CODES[slot_dtype(layout, slot)]),
        ("first", header.first, slot.first),
        ("last", header.last, slot.last),
    ):
        if found != expected:
            raise differs("frame_differs", name, found, expected)
    if header.length != slot.nbytes:
        raise differs("length_differs", "length", header.length, slot.nbytes)
