"""Everything a producer or a network can do wrong: a typed error, and the next fetch is fine."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from protocol.errors import (
    BatonError,
    EngineFault,
    IntegrityError,
    PeerProtocolError,
    TransferError,
)
from protocol.handoff import Requested
from protocol.layout import Slot
from tests.mac_decoder.handoff.producer import (
    LAYOUT,
    TIMING,
    Fault,
    Memory,
    Peer,
    head,
    payload,
)

TOKENS = list(range(1, 52))
END = 50
HURRIED = replace(TIMING, base_s=0.7, per_token_s=0.0)
IMPATIENT = replace(TIMING, idle_s=0.5)
Script = Callable[[Peer, Requested], None]


def right(peer: Peer, request: Requested) -> None:
    peer.serve()


def failing(link, fault_s: float = 10.0) -> BatonError:
    """The error of a fetch, which must come in time and have a reason."""
    shadow = Memory(LAYOUT, 0, END)
    started = time.monotonic()
    with pytest.raises(BatonError) as caught:
        link.fetch(TOKENS, shadow)
    assert time.monotonic() - started < fault_s
    assert caught.value.reason
    assert caught.value.reason != "internal_error"
    assert not isinstance(caught.value, EngineFault)
    return caught.value


def works(link) -> None:
    shadow = Memory(LAYOUT, 0, END)
    with link.fetch(TOKENS, shadow) as handoff:
        assert shadow.holds_what_was_sent()
        handoff.committed()


def expect(producer, link, script: Script, kind: type[BatonError], reason: str) -> BatonError:
    producer.script = script
    error = failing(link)
    assert (type(error), error.reason) == (kind, reason)
    producer.script = right
    works(link)
    return error


def length_of_a_handoff(producer, link) -> int:
    works(link)
    return producer.sent


def test_the_stream_cut_at_many_offsets(producer, link):
    total = length_of_a_handoff(producer, link)
    offsets = sorted({0, 1, 2, total - 1, *random.Random(1).sample(range(total), 40)})
    for offset in offsets:
        producer.fault = Fault(cut_at=offset)
        # Before its BEGIN a handoff is asked for anew, until that is in vain.
        begun = offset > 200
        assert failing(link).reason in ("transfer_unknown", "connection_lost")[not begun :]
        producer.fault = Fault()
        works(link)


def test_a_flipped_bit_anywhere_in_the_stream(producer, make_link):
    link = make_link(producer, timing=IMPATIENT)
    total = length_of_a_handoff(producer, link)
    for offset in random.Random(2).sample(range(total), 50):
        producer.fault = Fault(flip_at=offset)
        failing(link)
        producer.fault = Fault()
        works(link)


def each_frame(change: Callable[[Peer, Slot], None]) -> Script:
    def script(peer: Peer, request: Requested) -> None:
        peer.begin()
        for slot in peer.slots():
            change(peer, slot)
        peer.seal()
        peer.await_request()

    return script


def test_a_byte_of_a_payload_is_another(producer, link):
    def change(peer: Peer, slot: Slot) -> None:
        data = bytearray(payload(slot))
        header = peer.frame(slot)
        data[len(data) // 2] ^= slot.sequence == 3
        peer.message(0x82, header, data)

    error = expect(producer, link, each_frame(change), IntegrityError, "digest_differs")
    assert error.found == 3


def test_frames_in_another_order(producer, link):
    held = []

    def change(peer: Peer, slot: Slot) -> None:
        message = (peer.frame(slot), payload(slot))
        if slot.sequence == 2:
            held.append(message)
            return
        peer.message(0x82, *message)
        if held:
            peer.message(0x82, *held.pop())

    expect(producer, link, each_frame(change), PeerProtocolError, "frame_out_of_order")


def test_a_frame_twice(producer, link):
    def change(peer: Peer, slot: Slot) -> None:
        header = peer.frame(slot)
        for _ in range(2):
            peer.message(0x82, header, payload(slot))

    expect(producer, link, each_frame(change), PeerProtocolError, "frame_out_of_order")


def test_a_frame_too_few(producer, link):
    def change(peer: Peer, slot: Slot) -> None:
        header = peer.frame(slot)
        if peer.machine.remaining:
            peer.message(0x82, header, payload(slot))

    expect(producer, link, each_frame(change), TransferError, "frames_missing")


def test_a_frame_too_many(producer, link):
    def change(peer: Peer, slot: Slot) -> None:
        header = peer.frame(slot)
        for _ in range(1 if peer.machine.remaining else 2):
            peer.message(0x82, header, payload(slot))

    expect(producer, link, each_frame(change), PeerProtocolError, "frame_unexpected")


def test_a_payload_shorter_than_its_slot(producer, link):
    def change(peer: Peer, slot: Slot) -> None:
        peer.message(0x82, peer.frame(slot), payload(slot)[:-1])

    expect(producer, link, each_frame(change), PeerProtocolError, "length_differs")


def test_frames_before_the_manifest(producer, link):
    def script(peer: Peer, request: Requested) -> None:
        peer.message(0x82, bytes(80), bytes(64))
        peer.await_request()

    expect(producer, link, script, PeerProtocolError, "frame_malformed")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\x82\x7f" + (1 << 63).to_bytes(8, "big"), "frame_too_long"),
        (b"\x82\x7f" + ((1 << 63) - 1).to_bytes(8, "big"), "frame_too_long"),
        (head(0x82, (1 << 20) + 81), "frame_too_long"),
        (head(0x82, 79), "frame_malformed"),
        (head(0x82, 0), "frame_malformed"),
        (b"\x81\x7f" + (1 << 63).to_bytes(8, "big"), "message_too_long"),
        (head(0x81, 1 << 20), "message_too_long"),
        (head(0x02, 4096), "frame_malformed"),
        (b"\xc2\x7e\x10\x00", "frame_malformed"),
        (b"\x82\xfe\x10\x00abcd", "frame_malformed"),
        (b"\x80\x05hello", "websocket_violation"),
        (b"\x83\x05hello", "websocket_violation"),
        (b"\x81\x85abcdhello", "websocket_violation"),
        (b"\xc1\x05hello", "websocket_violation"),
        (b"\x89\x7e\x00\x80" + bytes(128), "websocket_violation"),
        (b"\x09\x01a", "websocket_violation"),
        (b"\x01\x02{}" + head(0x82, 4096), "websocket_violation"),
        (b"\x01\x02{}" + head(0x00, 1 << 20), "message_too_long"),
        (b"\x81\x02\xff\xfe", "message_malformed"),
        (b"\x81\x05hello", "message_malformed"),
        (head(0x81, 200) + b'{"type":"begin"}'.ljust(200), "message_malformed"),
        (b'\x81\x11{"type":"gossip"}', "message_unknown"),
        (b"\x01\x01{\x00\x00\x80\x01}", "message_malformed"),
    ],
)
def test_what_is_no_message_of_ours(producer, link, raw, reason):
    def script(peer: Peer, request: Requested) -> None:
        peer.write(raw)
        peer.await_request()

    expect(producer, link, script, PeerProtocolError, reason)


def test_lengths_are_judged_before_anything_is_allocated(producer, link, monkeypatch):
    import mac_decoder.handoff.wire as wire

    fed = []
    original = wire.ClientProtocol.receive_data
    monkeypatch.setattr(
        wire.ClientProtocol,
        "receive_data",
        lambda self, data: (fed.append(len(data)), original(self, data))[1],
    )
    flood = bytes(1 << 18)

    def script(peer: Peer, request: Requested) -> None:
        peer.write(head(0x81, 1 << 40) + flood)
        peer.await_request()

    expect(producer, link, script, PeerProtocolError, "message_too_long")
    assert max(fed) <= 4096


@pytest.mark.parametrize("raw", [b"\x89\x00", b"\x8a\x00", b"\x00\x00"])
def test_floods_of_control_frames_and_empty_fragments(producer, link, raw):
    def script(peer: Peer, request: Requested) -> None:
        if raw[0] == 0:
            peer.write(b"\x01\x00")
        peer.write(raw * 5000)
        peer.await_request()

    expect(producer, link, script, PeerProtocolError, "control_flood")


def test_a_flood_of_progress(producer, link):
    def script(peer: Peer, request: Requested) -> None:
        message = b'{"type":"progress","generation":%d,"done":0}' % request.prefill.generation
        for _ in range(500):
            peer.message(0x81, message)
        peer.await_request()

    expect(producer, link, script, PeerProtocolError, "too_many_messages")


def test_pings_and_fragments_between_frames_do_no_harm(producer, link):
    def change(peer: Peer, slot: Slot) -> None:
        header = peer.frame(slot)
        message = b'{"type":"progress","generation":%d,"done":0}' % peer.machine._generation
        peer.write(b"\x89\x03abc" + b"\x8a\x00")
        peer.message(0x01, message[:7])
        peer.write(b"\x89\x00")
        peer.message(0x80, message[7:])
        peer.message(0x82, header, payload(slot))

    producer.script = each_frame(change)
    works(link)


def test_a_producer_that_stalls(producer, make_link):
    link = make_link(producer, timing=IMPATIENT)

    def script(peer: Peer, request: Requested) -> None:
        peer.begin()
        slot = next(peer.slots())
        raw = peer.frame(slot) + payload(slot)
        peer.write(head(0x82, len(raw)) + raw[: len(raw) // 2])
        time.sleep(1.2)
        peer.await_request()

    expect(producer, link, script, TransferError, "peer_silent")


def test_a_slow_drip_ends_with_the_deadline(make_producer, make_link):
    producer = make_producer()
    link = make_link(producer, timing=HURRIED)
    producer.fault = Fault(drip=True)
    assert failing(link).reason == "deadline_exceeded"
    producer.fault = Fault()
    works(link)


def test_a_producer_that_beats_but_never_begins(make_producer, make_link):
    producer = make_producer()
    link = make_link(producer, timing=HURRIED)

    def script(peer: Peer, request: Requested) -> None:
        while True:
            peer.receive()

    producer.script = script
    assert failing(link).reason == "deadline_exceeded"
    producer.script = right
    works(link)


def test_a_seal_of_another_key_or_request(producer, link):
    def forged(peer: Peer, request: Requested) -> None:
        peer.begin()
        peer.frames()
        sending = peer.machine.sending
        assert sending is not None
        sending._raw = sending._raw.replace(b'"cut":0', b'"cut":1')
        peer.seal()
        peer.await_request()

    expect(producer, link, forged, IntegrityError, "seal_differs")


def test_a_recorded_handoff_is_refused_for_another_request(producer, link):
    recorded = bytearray()

    def record(peer: Peer, request: Requested) -> None:
        write = peer.write
        peer.write = lambda data: (recorded.extend(data), write(data))[1]  # type: ignore[method-assign]
        peer.serve()

    producer.script = record
    works(link)

    def replay(peer: Peer, request: Requested) -> None:
        peer.write(bytes(recorded))
        peer.await_request()

    producer.script = replay
    error = failing(link)
    assert error.reason in ("generation_used", "generation_unknown", "generation_differs")
    producer.script = right
    works(link)


def test_another_manifest(producer, link):
    def longer(peer: Peer, request: Requested) -> None:
        send = peer.text
        peer.text = lambda raw: send(raw.replace(b'"end":50', b'"end":49'))  # type: ignore[method-assign]
        peer.begin()
        peer.await_request()

    expect(producer, link, longer, PeerProtocolError, "end_differs")


def test_the_connection_closes_politely_but_early(producer, link):
    def leave(peer: Peer, request: Requested) -> None:
        peer.begin()
        peer.write(b"\x88\x02" + struct.pack("!H", 1001))
        peer.await_request()

    expect(producer, link, leave, TransferError, "producer_stopping")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "connection_lost"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "handshake_invalid"),
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", "handshake_refused"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "producer_busy"),
        (b"HTTP/1.1 503 No\r\nBaton-Reason: producer_loading\r\n\r\n", "producer_loading"),
        (
            b"HTTP/1.1 503 No\r\nbaton-reason:producer_without_model\r\n\r\n",
            "producer_without_model",
        ),
        (b"HTTP/1.1 503 No\r\nBaton-Reason: another\r\n\r\n", "producer_busy"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n", "handshake_invalid"),
        (b"x" * 40_000, "handshake_invalid"),
    ],
)
def test_what_answers_is_no_producer(producer, make_link, answer, reason):
    def greeting(sock) -> bool:
        sock.recv(4096)
        sock.sendall(answer)
        return False

    producer.greeting = greeting
    link = make_link(producer)
    deadline = time.monotonic() + 3
    while not link.state.reason or link.state.name == "connecting":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert link.state.reason == reason
    assert failing(link).reason == reason
    producer.greeting = lambda sock: True
    deadline = time.monotonic() + 8
    while not link.state.ready:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    works(link)
