"""Data frames: every byte of the header has one meaning, every wrong one a reason."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import PeerProtocolError
from protocol.frames import (
    DTYPE_CODES,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    PREFIX_BYTES,
    digest,
    header_prefix,
    parse,
    require_slot,
    slot_dtype,
)
from protocol.layout import ITEMSIZE, Layout, schedule
from tests.machines.joined import LAYOUT
from tests.strategies import generations, layouts, ranges

SLOTS = list(schedule(LAYOUT, 0, 9, 4))
GENERATION = 0x0102030405060708


def made(number: int = 0, payload: bytes | None = None) -> bytes:
    prefix = header_prefix(LAYOUT, SLOTS[number], GENERATION)
    return prefix + digest(prefix, payload or bytes(SLOTS[number].nbytes))


def test_sizes() -> None:
    assert (HEADER_BYTES, PREFIX_BYTES, MAX_FRAME_BYTES) == (80, 48, 80 + (1 << 20))
    assert set(DTYPE_CODES) == set(ITEMSIZE)


@given(layouts(), ranges(), st.integers(1, 20), generations)
def test_a_header_is_read_as_written(
    layout: Layout, ends: tuple[int, int], tile: int, generation: int
) -> None:
    for slot in schedule(layout, *ends, tile):
        prefix = header_prefix(layout, slot, generation)
        header = parse(prefix + bytes(range(32)))
        assert header.digest == bytes(range(32))
        assert header.generation == generation
        assert header.dtype == DTYPE_CODES[slot_dtype(layout, slot)]
        require_slot(header, layout, slot, generation)


def test_offsets_are_those_of_the_table() -> None:
    raw = made(1)
    slot = SLOTS[1]
    assert raw[0:4] == b"BTNF"
    assert raw[4] == 1
    assert raw[5] == slot.role == 1
    assert raw[6] == DTYPE_CODES["bfloat16"] == 2
    assert raw[7] == 0
    assert raw[8:10] == slot.index.to_bytes(2, "big")
    assert raw[10:12] == b"\0\0"
    assert raw[12:16] == slot.nbytes.to_bytes(4, "big")
    assert raw[16:24] == slot.sequence.to_bytes(8, "big")
    assert raw[24:32] == GENERATION.to_bytes(8, "big")
    assert raw[32:40] == slot.first.to_bytes(8, "big")
    assert raw[40:48] == slot.last.to_bytes(8, "big")
    assert raw[48:] == hashlib.sha256(raw[:48] + bytes(slot.nbytes)).digest()


def test_every_flipped_byte_of_the_prefix_is_refused_before_the_payload() -> None:
    raw = made()
    for place in range(PREFIX_BYTES):
        for bit in range(8):
            flipped = bytearray(raw)
            flipped[place] ^= 1 << bit
            with pytest.raises(PeerProtocolError):
                require_slot(parse(bytes(flipped)), LAYOUT, SLOTS[0], GENERATION)


def test_every_flipped_byte_changes_the_digest() -> None:
    prefix, payload = header_prefix(LAYOUT, SLOTS[0], 1), bytes(SLOTS[0].nbytes)
    whole = prefix + payload
    found = {digest(prefix, payload)}
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        found.add(digest(bytes(flipped[:48]), bytes(flipped[48:])))
    assert len(found) == len(whole) + 1


@pytest.mark.parametrize("length", [0, 1, 47, 48, 79, 81, 160])
def test_only_80_bytes_are_a_header(length: int) -> None:
    with pytest.raises(PeerProtocolError) as caught:
        parse((made() * 2)[:length])
    assert caught.value.reason == "frame_malformed"


def test_another_slot_is_refused() -> None:
    header = parse(made(0))
    for slot in SLOTS[1:]:
        with pytest.raises(PeerProtocolError):
            require_slot(header, LAYOUT, slot, GENERATION)


@given(st.binary(max_size=300))
def test_the_digest_is_sha256_over_header_and_payload(payload: bytes) -> None:
    state = hashlib.sha256(b"p" * 48 + payload)
    assert state.digest() == digest(b"p" * 48, payload) == digest(b"p" * 48, bytearray(payload))
