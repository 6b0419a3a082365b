"""A model over the control channel of a running producer: sent, cut, gone on with, refused."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec import structs

from app.model_stream import Outgoing, outgoing
from gb10_producer import connection, receiving
from gb10_producer import control as desk
from gb10_producer.control import Desk, Profile, Taking
from gb10_producer.received import Disk, ReceivedModels
from gb10_producer.server import Server, bind
from gb10_producer.trust import RegistryTrust
from mac_decoder.handoff.trust import trust_of_record
from mac_decoder.handoff.wire import Wire
from protocol.control import PATH
from protocol.control.messages import NO_MAC, ModelKept, SendModel, Serving
from protocol.control.models import PIECE_BYTES, ModelFile, manifest_of
from protocol.errors import BatonError, TransferError
from protocol.pairing.record import fingerprint
from tests.contexts import decoder_context
from tests.gb10_producer.one_thread import OneThread
from tests.gb10_producer.producer import Running, wait_until
from tests.gb10_producer.registered import (
    MAC,
    OWN,
    STUDIO,
    address_of,
    kept_of,
    record_of,
    registered,
)
from tests.gb10_producer.test_control import handed_over, visitors
from tests.protocol.control.joined import OFFER
from trust.control import Control
from trust.peers import Peers

RECORD, OTHER = record_of(MAC), record_of(STUDIO, key=b"o" * 32)
STEP = 1 << 16


class Slow(Disk):
    """Writes only while its gate is open, and has room for so many bytes."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.left = 1 << 40

    def room(self, directory: Path) -> tuple[int, int]:
        return 1 << 40, 1 << 41

    def write(self, descriptor: int, data: memoryview) -> int:
        self.gate.wait()
        data = data[: self.left]
        if not data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.left -= len(data)
        return os.write(descriptor, data)


@dataclass
class Box:
    """A producer that takes models; ``came`` is what it was told of."""

    producer: Running
    peers: Peers
    models: ReceivedModels
    disk: Slow
    came: list[Path] = field(default_factory=list)

    def send(self, ours: Outgoing, pieces: Callable[[int], Iterator[bytes]] | None = None):
        with Control.open(address_of(self.producer), RECORD) as control:
            return control.send_model(ours.offer, pieces or small(ours))


def small(ours: Outgoing) -> Callable[[int], Iterator[bytes]]:
    """The stream in small pieces."""

    def pieces(offset: int) -> Iterator[bytes]:
        for piece in ours.pieces(offset):
            for start in range(0, len(piece), STEP):
                yield piece[start : start + STEP]

    return pieces


@contextmanager
def box(directory: Path, serving: Serving = "kept", **options: object) -> Iterator[Box]:
    disk = Slow()
    models = ReceivedModels(directory / "models", directory / "digests.json", disk)
    came: list[Path] = []

    def received(path: Path) -> Serving:
        came.append(path)
        return serving

    taking = Taking(models, received)
    with registered(directory, RECORD, OTHER, taking=taking, **options) as (producer, peers):
        try:
            yield Box(producer, peers, models, disk, came)
        finally:
            disk.gate.set()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is refused is not waited for, as senders here do not look."""
    monkeypatch.setattr(connection, "_CLOSE_S", 0.5)


@pytest.fixture(scope="module")
def ours(request: pytest.FixtureRequest) -> Outgoing:
    return outgoing(request.getfixturevalue("checkpoint")("llama"), None)


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(BatonError) as caught:
        call()
    return caught.value.reason


class Cut(Exception):
    """The sender ends here."""


def cut_after(pieces: Callable[[int], Iterator[bytes]], count: int):
    def some(offset: int) -> Iterator[bytes]:
        for number, piece in enumerate(pieces(offset)):
            if number == count:
                raise Cut
            yield piece

    return some


def large(nbytes: int) -> tuple[SendModel, Callable[[int], Iterator[bytes]]]:
    """A model of one file of zeros, and its stream in the largest pieces."""
    digest = hashlib.sha256()
    for _ in range(nbytes >> 20):
        digest.update(bytes(1 << 20))
    manifest = manifest_of([ModelFile("model.safetensors", nbytes, digest.hexdigest())])
    offer = structs.replace(
        OFFER, nbytes=manifest.nbytes, manifest_bytes=len(manifest.raw), digest=manifest.digest
    )

    def pieces(offset: int) -> Iterator[bytes]:
        assert offset == 0
        yield manifest.raw
        for _ in range(nbytes >> 20):
            yield bytes(PIECE_BYTES)

    return offer, pieces


# What is sent


@pytest.mark.parametrize("serving", ["now", "restarting", "kept"])
def test_a_model_that_is_sent_is_kept_and_told_of(
    tmp_path: Path, ours: Outgoing, serving: Serving
) -> None:
    with box(tmp_path, serving) as gb10:
        kept = gb10.send(ours)
        assert structs.replace(kept, mac=NO_MAC) == ModelKept(ours.name, serving, NO_MAC)
        assert [path.name for path in gb10.came] == [ours.name]
        for file in ours.manifest.files:
            sent, there = ours.path / file.name, gb10.came[0] / file.name
            assert sent.read_bytes() == there.read_bytes()
        again: list[int] = []
        with Control.open(address_of(gb10.producer), RECORD) as control:
            control.send_model(ours.offer, lambda offset: iter(()), again.append)
            assert control.describe().state == "ready", "the channel goes on"
        assert again == [ours.manifest.nbytes]


def test_a_model_that_is_cut_anywhere_goes_on(tmp_path: Path, ours: Outgoing) -> None:
    rng, offsets = random.Random(7), []
    with box(tmp_path) as gb10:
        for _ in range(6):

            def seen(offset: int) -> Iterator[bytes]:
                offsets.append(offset)
                return cut_after(small(ours), rng.randint(0, 6))(offset)

            with pytest.raises(Cut):
                gb10.send(ours, seen)
            wait_until(lambda: visitors(gb10.producer) == 0)
        assert offsets == sorted(offsets)
        assert offsets[-1] > offsets[0] == 0
        assert gb10.send(ours).name == ours.name


def test_handoffs_go_on_while_a_model_comes_in_and_another_has_to_wait(
    tmp_path: Path, ours: Outgoing
) -> None:
    with box(tmp_path) as gb10:
        busy: list[str] = []

        def pieces(offset: int) -> Iterator[bytes]:
            yield from list(small(ours)(offset))[:4]
            assert handed_over(gb10.producer, OTHER)
            with Control.open(address_of(gb10.producer), OTHER) as control:
                busy.append(refused(lambda: control.send_model(ours.offer, small(ours))))
            yield from list(small(ours)(offset))[4:]

        assert gb10.send(ours, pieces).name == ours.name
        assert busy == ["model_transfer_busy"]


def test_a_model_of_any_size_takes_little_memory(tmp_path: Path) -> None:
    """The disk stands still: what was sent comes to rest, and neither side holds more of it."""
    offer, pieces = large(96 << 20)
    done: list[int] = []
    result: list[str] = []
    with box(tmp_path) as gb10:

        def send() -> None:
            with Control.open(address_of(gb10.producer), RECORD) as control:
                result.append(refused(lambda: control.send_model(offer, pieces, done.append)))

        sender = threading.Thread(target=send)
        gb10.disk.gate.clear()
        sender.start()
        wait_until(lambda: len(done) > 4)
        time.sleep(0.3)
        (visit,) = gb10.producer.server._visiting
        wire = visit._wire
        assert wire._bulk_held <= desk._WIRE_BYTES + PIECE_BYTES
        at_rest = done[-1]
        assert at_rest < 40 << 20, "sockets hold some"
        time.sleep(0.2)
        assert done[-1] == at_rest
        assert handed_over(gb10.producer, OTHER)
        gb10.disk.gate.set()
        sender.join(30.0)
        assert done[-1] == offer.nbytes
        assert result == ["model_unusable"]
        assert list(gb10.models._root.glob("*/*")) == []


def test_a_disk_that_takes_its_time_is_nobodys_silence(
    tmp_path: Path, ours: Outgoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.control.STALL_S", 0.3)
    monkeypatch.setattr(receiving, "HELD_BYTES", STEP)
    with box(tmp_path) as gb10:

        def pieces(offset: int) -> Iterator[bytes]:
            for number, piece in enumerate(small(ours)(offset)):
                if number == 2:
                    gb10.disk.gate.clear()
                    threading.Timer(1.0, gb10.disk.gate.set).start()
                yield piece

        assert gb10.send(ours, pieces).name == ours.name


def test_a_model_whose_sender_left_after_the_last_byte_is_served(
    tmp_path: Path, ours: Outgoing
) -> None:
    with box(tmp_path) as gb10:

        def pieces(offset: int) -> Iterator[bytes]:
            *most, last = small(ours)(offset)
            yield from most
            gb10.disk.gate.clear()
            yield last
            raise Cut

        with pytest.raises(Cut):
            gb10.send(ours, pieces)
        wait_until(lambda: gb10.producer.connections == (0, 0))
        gb10.disk.gate.set()
        wait_until(lambda: bool(gb10.came))
        assert [path.name for path in gb10.came] == [ours.name]


def test_a_disk_that_has_room_just_now_was_waited_for_all_the_same(
    tmp_path: Path, ours: Outgoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room that comes between taking in what has come and looking at the clock."""
    monkeypatch.setattr("protocol.control.STALL_S", 0.3)
    monkeypatch.setattr(receiving, "HELD_BYTES", STEP)
    receive = desk._Visit._receive
    with box(tmp_path) as gb10:
        stalled: list[float] = []

        def late(visit: desk._Visit) -> None:
            receive(visit)
            if stalled and visit._writing and time.monotonic() > stalled[0] + 1.0:
                stalled.clear()
                gb10.disk.gate.set()
                wait_until(lambda: not visit._writing)

        monkeypatch.setattr(desk._Visit, "_receive", late)

        def pieces(offset: int) -> Iterator[bytes]:
            for number, piece in enumerate(small(ours)(offset)):
                if number == 2:
                    gb10.disk.gate.clear()
                    stalled.append(time.monotonic())
                yield piece

        assert gb10.send(ours, pieces).name == ours.name
        assert not stalled, "it was not stalled"


# What is refused


def test_a_full_disk_in_the_middle_is_told_and_loses_nothing(
    tmp_path: Path, ours: Outgoing
) -> None:
    with box(tmp_path) as gb10:
        gb10.disk.left = 600_000

        def slowly(offset: int) -> Iterator[bytes]:
            for piece in small(ours)(offset):
                time.sleep(0.01)
                yield piece

        assert refused(lambda: gb10.send(ours, slowly)) == "disk_full"
        assert handed_over(gb10.producer, RECORD)
        assert gb10.producer.server.refused["disk_full"] == 1
        gb10.disk.left = 1 << 40
        offsets: list[int] = []

        def rest(offset: int) -> Iterator[bytes]:
            offsets.append(offset)
            return small(ours)(offset)

        assert gb10.send(ours, rest).name == ours.name
        assert offsets == [600_000]


def test_a_changed_byte_is_told_and_its_file_begins_anew(tmp_path: Path, ours: Outgoing) -> None:
    place = ours.manifest.nbytes - 10

    def changed(offset: int) -> Iterator[bytes]:
        for piece in small(ours)(offset):
            if offset <= place < offset + len(piece):
                at = place - offset
                piece = piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
            offset += len(piece)
            yield piece

    with box(tmp_path) as gb10:
        assert refused(lambda: gb10.send(ours, changed)) == "model_digest_differs"
        last = ours.manifest.files[-1]
        offsets: list[int] = []
        with Control.open(address_of(gb10.producer), RECORD) as control:
            control.send_model(ours.offer, small(ours), offsets.append)
        assert offsets[0] == ours.manifest.nbytes - last.nbytes


def test_a_sender_that_falls_silent_is_given_up(
    tmp_path: Path, ours: Outgoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.control.STALL_S", 0.4)

    def silent(offset: int) -> Iterator[bytes]:
        yield from list(small(ours)(offset))[:3]
        time.sleep(1.2)
        yield b"x"

    with box(tmp_path) as gb10:
        assert refused(lambda: gb10.send(ours, silent)) == "peer_silent"
        wait_until(lambda: visitors(gb10.producer) == 0)
        monkeypatch.setattr("protocol.control.STALL_S", 60.0)
        assert gb10.send(ours).name == ours.name


def test_who_is_removed_sends_no_more(tmp_path: Path, ours: Outgoing) -> None:
    with box(tmp_path) as gb10:

        def pieces(offset: int) -> Iterator[bytes]:
            yield from list(small(ours)(offset))[:3]
            gb10.peers.remove(fingerprint(MAC.certificate))
            wait_until(lambda: visitors(gb10.producer) == 0)
            yield b"x"

        assert refused(lambda: gb10.send(ours, pieces)) == "pairing_revoked"
        assert gb10.came == []


def test_a_producer_that_stops_tells_who_sends(tmp_path: Path, ours: Outgoing) -> None:
    with box(tmp_path) as gb10:

        def pieces(offset: int) -> Iterator[bytes]:
            yield from list(small(ours)(offset))[:3]
            stopper = threading.Thread(target=gb10.producer.server.stop)
            stopper.start()
            wait_until(lambda: visitors(gb10.producer) == 0)
            yield b"x"
            stopper.join()

        assert refused(lambda: gb10.send(ours, pieces)) == "producer_stopping"
    # What had come is there for the next one.
    with box(tmp_path / "again") as gb10:
        os.rename(tmp_path / "models", gb10.models._root)
        with Control.open(address_of(gb10.producer), RECORD) as control:
            offsets: list[int] = []
            control.send_model(ours.offer, small(ours), offsets.append)
        assert offsets[0] > 0


def test_a_producer_of_made_up_rows_takes_none(tmp_path: Path, ours: Outgoing) -> None:
    with (
        registered(tmp_path, RECORD) as (producer, _),
        Control.open(address_of(producer), RECORD) as control,
    ):
        assert refused(lambda: control.send_model(ours.offer, small(ours))) == "models_not_taken"


def test_bytes_that_nobody_wants_end_the_channel(tmp_path: Path) -> None:
    with box(tmp_path) as gb10:
        visit = OneThread(gb10.producer.url + PATH, decoder_context(RECORD))
        visit.send_binary(b"x" * 100, time.monotonic() + 5.0)
        wait_until(lambda: gb10.producer.server.refused.get("websocket_violation", 0) == 1)
        visit.close()
        with Control.open(address_of(gb10.producer), RECORD) as control:
            control._socket.send_binary(b"x", time.monotonic() + 5.0)
            assert refused(control.describe) in ("control_refused", "connection_lost")
        assert handed_over(gb10.producer, RECORD)
        assert gb10.came == []


def test_behind_a_model_no_bytes_are_taken(tmp_path: Path, ours: Outgoing) -> None:
    with box(tmp_path) as gb10, Control.open(address_of(gb10.producer), RECORD) as control:
        control.send_model(ours.offer, small(ours))
        control._socket.send_binary(b"x", time.monotonic() + 5.0)
        wait_until(lambda: gb10.producer.server.refused.get("websocket_violation", 0) == 1)
        assert refused(control.describe) in ("control_refused", "connection_lost")


@pytest.mark.parametrize("how", ["too long", "in fragments", "too many"])
def test_pieces_that_are_none_end_it(tmp_path: Path, ours: Outgoing, how: str) -> None:
    def pieces(offset: int, control: Control) -> Iterator[bytes]:
        deadline = time.monotonic() + 5.0
        if how == "too long":
            control._socket.send_binary(bytes(PIECE_BYTES + 1), deadline)
        elif how == "in fragments":
            control._socket._protocol.send_binary(b"x" * 10, fin=False)
            control._socket._send(deadline)
        else:
            for piece in small(ours)(offset):
                control._socket.send_binary(piece, deadline)
            control._socket.send_binary(b"x", deadline)
        time.sleep(0.3)
        yield b"x"

    with box(tmp_path) as gb10, Control.open(address_of(gb10.producer), RECORD) as control:
        reason = refused(lambda: control.send_model(ours.offer, lambda at: pieces(at, control)))
        reasons = ["control_refused", "connection_lost", "frame_too_long", "frame_unexpected"]
        if how == "too many":
            reasons.append("protocol_misuse")  # it hears first that the model is kept
        assert reason in reasons
        wait_until(lambda: visitors(gb10.producer) == 0)
        # What was whole by then is a model like any other.
        whole = how == "too many"
        wait_until(lambda: len(gb10.came) == whole)


def test_why_it_ends_is_told_although_only_sending_found_out(
    tmp_path: Path, ours: Outgoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def pieces(offset: int) -> Iterator[bytes]:
        pieces = small(ours)(offset)
        yield next(pieces)
        wait_until(lambda: gb10.producer.server.refused.get("disk_full", 0) == 1)
        # As if it came after the last look, and the connection's end before the next piece.
        monkeypatch.setattr(control._socket, "arrived", lambda deadline: None)
        monkeypatch.setattr(control._socket, "_send", gone)
        yield from pieces

    def gone(deadline: float) -> None:
        raise BrokenPipeError

    with box(tmp_path) as gb10, Control.open(address_of(gb10.producer), RECORD) as control:
        monkeypatch.setattr(gb10.disk, "write", full)
        assert refused(lambda: control.send_model(ours.offer, pieces)) == "disk_full"


def test_a_fault_of_its_own_ends_it_and_not_the_producer(
    tmp_path: Path, ours: Outgoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    def broken(descriptor: int, data: memoryview) -> int:
        raise AssertionError("a bug")

    with box(tmp_path) as gb10:
        monkeypatch.setattr(gb10.disk, "write", broken)
        assert refused(lambda: gb10.send(ours)) == "model_not_kept"
        assert len(told) == 1
        assert handed_over(gb10.producer, OTHER)
        monkeypatch.undo()
        assert gb10.send(ours).name == ours.name


# A producer without a model


def test_a_decoder_is_told_that_there_is_no_model(tmp_path: Path) -> None:
    peers = Peers(tmp_path, "producer")
    peers.add(kept_of(RECORD))
    trust = RegistryTrust(peers, OWN)
    listener = bind("127.0.0.1", 0)
    front = Desk(trust, Profile("gb10", "1", "", waiting=True))
    server = Server(listener, trust, connections=2, desk=front)
    server.start()
    known = trust_of_record(RECORD)

    def connect() -> Wire:
        url = f"wss://127.0.0.1:{listener.getsockname()[1]}"
        return Wire.open(url, tls=known.context, verify=known.verify, timeout_s=5.0)

    try:
        with pytest.raises(TransferError) as caught:
            connect()
        assert caught.value.reason == "producer_without_model"
        assert "baton node send" in str(caught.value.hint)
        front.profile = Profile("gb10", "1", "some-model")
        assert refused(connect) == "producer_loading"
    finally:
        assert server.stop()
