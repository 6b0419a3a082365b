"""A running producer's control channel: describing, forgetting, rotating, and for whom."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec import structs

from gb10_producer import server as listening
from gb10_producer.control import Desk, Profile
from gb10_producer.server import Server, bind
from gb10_producer.trust import RegistryTrust
from protocol.control import PATH
from protocol.control.messages import MAX_MESSAGE, ControlHello, encode
from protocol.deadlines import Timing
from protocol.errors import BatonError
from protocol.handoff import Released
from protocol.layouts_named import stand_in_identity
from protocol.pairing.record import PairingRecord, fingerprint
from tests.contexts import decoder_context
from tests.gb10_producer.one_thread import OneThread
from tests.gb10_producer.peer import MIXED, expected_regions
from tests.gb10_producer.producer import Gated, Running, wait_until
from tests.gb10_producer.registered import (
    MAC,
    OWN,
    STRANGER,
    STUDIO,
    address_of,
    connected,
    kept_of,
    record_of,
    registered,
)
from trust import places
from trust.control import Control
from trust.peers import Address, Peers

RECORD, OTHER = record_of(MAC), record_of(STUDIO, key=b"o" * 32)


def refused(call, *arguments: object) -> str:
    with pytest.raises(BatonError) as caught:
        call(*arguments)
    return caught.value.reason


def handed_over(producer: Running, record: PairingRecord) -> bool:
    with connected(producer, record) as peer:
        return peer.handshake().fetch(range(30)) == expected_regions(MIXED, range(30), 0, 16)


def keys_of(peers: Peers) -> list[bytes]:
    return [peer.record.key for peer in peers.all().peers]


# What it is


def test_a_producer_describes_itself(tmp_path: Path) -> None:
    with (
        registered(tmp_path, RECORD) as (producer, _),
        Control.open(address_of(producer), RECORD) as control,
    ):
        for _ in range(2):
            found = control.describe()
            assert (found.name, found.version, found.model) == ("gb10", "0.1.0", "some-model")
            assert found.state == "ready"
            assert found.identity == stand_in_identity(MIXED)
            assert found.recipe is not None
            assert found.recipe.tile == 16


def test_while_it_loads_it_answers_all_but_handoffs(tmp_path: Path) -> None:
    peers = Peers(tmp_path, "producer")
    peers.add(kept_of(RECORD))
    trust = RegistryTrust(peers, OWN)
    listener = bind("127.0.0.1", 0)
    server = Server(listener, trust, connections=2, desk=Desk(trust, Profile("gb10", "1", "m")))
    address = Address(*listener.getsockname()[:2])
    server.start()
    try:
        with Control.open(address, RECORD) as control:
            found = control.describe()
        assert (found.state, found.identity, found.recipe) == ("loading", None, None)
        url = f"wss://{address.host}:{address.port}"
        assert refused(OneThread, url, decoder_context(RECORD)) == "producer_busy"
    finally:
        assert server.stop()


def test_a_model_of_any_name_can_be_described(tmp_path: Path) -> None:
    with registered(tmp_path, RECORD) as (producer, _):
        desk = producer.server._desk
        assert desk is not None
        desk.profile = Profile("gb10", "1", 'm"ö' * 100)
        with Control.open(address_of(producer), RECORD) as control:
            assert control.describe().model.startswith("m??m??")


# Unpairing


def test_an_unpaired_decoder_is_forgotten_ended_and_not_let_in_again(tmp_path: Path) -> None:
    source = Gated()
    with (
        registered(tmp_path, RECORD, OTHER, source=source) as (producer, peers),
        connected(producer, RECORD) as peer,
        connected(producer, OTHER) as stays,
    ):
        peer.handshake().start(range(50))
        stays.handshake()
        assert source.reached.wait(5.0)
        with Control.open(address_of(producer), RECORD) as control:
            control.unpair()
            assert keys_of(peers) == [OTHER.key], "before it is answered"
        began = time.monotonic()
        assert refused(peer.until, Released) == "pairing_revoked"
        assert time.monotonic() - began < 4.0
        wait_until(lambda: producer.jobs == (0, 0))
        assert refused(Control.open, address_of(producer), RECORD) == "tls_failed"
        assert refused(connected, producer, RECORD) == "tls_failed"
        source.gate.set()
        assert stays.fetch(range(30)) == expected_regions(MIXED, range(30), 0, 16)


def test_the_last_decoder_can_be_unpaired(tmp_path: Path) -> None:
    with registered(tmp_path, RECORD) as (producer, peers):
        with Control.open(address_of(producer), RECORD) as control:
            control.unpair()
        assert peers.all().peers == ()
        assert refused(Control.open, address_of(producer), RECORD) == "tls_failed"


# Rotation


def test_handoffs_go_on_under_the_new_key_and_the_old_one_is_refused(tmp_path: Path) -> None:
    with registered(tmp_path, RECORD, OTHER) as (producer, peers):
        with Control.open(address_of(producer), RECORD) as control:
            rotated = control.rotate()
        assert sorted(keys_of(peers)) == sorted([rotated.key, OTHER.key])
        assert handed_over(producer, rotated)
        with connected(producer, RECORD) as old:
            assert refused(old.handshake) == "epoch_differs"
        assert refused(Control.open, address_of(producer), RECORD) == "epoch_differs"
        stale = structs.replace(RECORD, epoch=rotated.epoch)
        assert refused(Control.open, address_of(producer), stale) == "proof_differs"
        assert handed_over(producer, OTHER)


def test_rotations_follow_one_another(tmp_path: Path) -> None:
    record, keys = RECORD, {RECORD.key}
    with registered(tmp_path, RECORD) as (producer, peers):
        for number in range(3):
            with Control.open(address_of(producer), record) as control:
                record = control.rotate()
            keys.add(record.key)
            assert record.epoch == RECORD.epoch + number + 1
        assert handed_over(producer, record)
        assert len(keys) == 4
        found = peers.by_fingerprint(fingerprint(MAC.certificate))
        assert found is not None
        assert (found.record.pairing, found.earlier) == (record.pairing, None)


def test_a_lost_answer_costs_nothing(tmp_path: Path) -> None:
    """The decoder never saw the new key: its own goes on, and rotates again."""
    with registered(tmp_path, RECORD) as (producer, peers):
        with Control.open(address_of(producer), RECORD) as control:
            lost = control.rotate()
        assert handed_over(producer, RECORD)
        with Control.open(address_of(producer), RECORD) as control:
            control.describe()
            kept = control.rotate()
        assert kept.epoch == lost.epoch
        assert kept.key != lost.key
        assert keys_of(peers) == [kept.key]
        assert handed_over(producer, kept)
        assert refused(Control.open, address_of(producer), lost) == "proof_differs"
        assert refused(Control.open, address_of(producer), RECORD) == "epoch_differs"


def test_a_lost_answer_survives_a_restart(tmp_path: Path) -> None:
    with (
        registered(tmp_path, RECORD) as (producer, _),
        Control.open(address_of(producer), RECORD) as control,
    ):
        rotated = control.rotate()
    with registered(tmp_path) as (producer, _):
        assert handed_over(producer, RECORD)
        assert handed_over(producer, rotated)
        with connected(producer, RECORD) as old:
            assert refused(old.handshake) == "epoch_differs"


def test_the_new_key_is_proven_over_the_control_channel_too(tmp_path: Path) -> None:
    with registered(tmp_path, RECORD) as (producer, _):
        with Control.open(address_of(producer), RECORD) as control:
            rotated = control.rotate()
        with Control.open(address_of(producer), rotated) as control:
            control.describe()
        assert refused(Control.open, address_of(producer), RECORD) == "epoch_differs"


# What cannot be kept


@pytest.mark.parametrize("question", ["unpair", "rotate"])
def test_what_cannot_be_kept_is_not_confirmed(
    tmp_path: Path, question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registered(tmp_path, RECORD) as (producer, _):
        with Control.open(address_of(producer), RECORD) as control:

            def full(descriptor: int) -> None:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(places, "sync", full)
            assert refused(getattr(control, question)) == "trust_not_kept"
        monkeypatch.undo()
        if question == "rotate":
            assert handed_over(producer, RECORD)


def test_a_decoder_that_another_process_forgot_is_told(tmp_path: Path) -> None:
    with registered(tmp_path, RECORD) as (producer, peers):
        with Control.open(address_of(producer), RECORD) as control:
            peers.remove(fingerprint(MAC.certificate))
            assert refused(control.rotate) == "pairing_revoked"
        assert peers.all().peers == ()


def test_an_open_channel_of_a_removed_decoder_is_ended(tmp_path: Path) -> None:
    with (
        registered(tmp_path, RECORD) as (producer, peers),
        Control.open(address_of(producer), RECORD) as control,
    ):
        peers.remove(fingerprint(MAC.certificate))
        assert b"pairing_revoked" in control._socket.receive(time.monotonic() + 2.0)


# Attackers


def test_a_key_without_its_certificate_and_the_reverse(tmp_path: Path) -> None:
    without_certificate = structs.replace(
        RECORD, certificate=STRANGER.certificate, private_key=STRANGER.private_key
    )
    without_key = structs.replace(RECORD, key=b"x" * 32)
    of_another = structs.replace(RECORD, key=OTHER.key)
    with registered(tmp_path, RECORD, OTHER) as (producer, peers):
        before = peers.all()
        assert refused(Control.open, address_of(producer), without_certificate) == "tls_failed"
        for record in (without_key, of_another):
            assert refused(Control.open, address_of(producer), record) == "proof_differs"
        assert peers.all() == before
        assert producer.server.refused["proof_differs"] == 2
        assert producer.server.refused["tls_handshake_failed"] == 1


def test_tls_1_2_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(certificate: bytes, private_key: bytes) -> ssl.SSLContext:
        context = decoder_context(RECORD)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        return context

    monkeypatch.setattr("trust.control.client_context", older)
    with registered(tmp_path, RECORD) as (producer, _):
        assert refused(Control.open, address_of(producer), RECORD) == "tls_failed"


def visiting(producer: Running, record: PairingRecord = RECORD) -> OneThread:
    """A control connection by hand, after TLS and WebSocket."""
    return OneThread(producer.url + PATH, decoder_context(record))


def visitors(producer: Running) -> int:
    return len(producer.server._visiting)


def test_a_recorded_visit_does_nothing_again(tmp_path: Path) -> None:
    """Played back by who has the certificate's key, but not the pairing's."""
    with registered(tmp_path, RECORD) as (producer, peers):
        sent: list[bytes] = []
        with Control.open(address_of(producer), RECORD) as control:
            socket_, send = control._socket, control._socket.send
            socket_.send = lambda raw, deadline: (sent.append(raw), send(raw, deadline))[1]  # type: ignore[method-assign]
            control.describe()
        before = peers.all()
        hello = encode(ControlHello(1, b"n" * 32, RECORD.epoch))
        visit = visiting(producer)
        for raw in (hello, *sent):
            visit.send(raw)
        visit.recv(5.0)  # the answer to the opening
        assert b"message_unexpected" in visit.recv(5.0)
        visit.close()
        assert peers.all() == before


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (b"{}", b"message_malformed"),
        (b'{"type":"unpair","mac":"' + b"A" * 43 + b'="}', b"message_unexpected"),
        (b" " * MAX_MESSAGE, b"message_malformed"),
        (b'{"type":"control_hello","version":2}', b"version_unsupported"),
        (encode(ControlHello(1, b"n" * 32, 77)), b"epoch_differs"),
    ],
)
def test_nonsense_is_answered_and_ended(tmp_path: Path, says: bytes, reason: bytes) -> None:
    with registered(tmp_path, RECORD) as (producer, _):
        visit = visiting(producer)
        visit.send(says)
        assert reason in visit.recv(5.0)
        visit.close()
        wait_until(lambda: producer.connections == (0, 0))
        assert handed_over(producer, RECORD)


def test_a_message_that_is_too_long_is_not_taken_in(tmp_path: Path) -> None:
    with registered(tmp_path, RECORD) as (producer, _):
        visit = visiting(producer)
        visit.send(b" " * (MAX_MESSAGE + 1))
        wait_until(lambda: producer.server.refused.get("websocket_violation", 0) == 1)
        visit.close()


def test_silence_before_the_proof_ends_with_the_handshakes_time(tmp_path: Path) -> None:
    timing = Timing(handshake_s=0.6, heartbeat_s=0.3)
    with registered(tmp_path, RECORD, timing=timing) as (producer, _):
        visit = visiting(producer)
        began = time.monotonic()
        wait_until(lambda: producer.connections == (0, 0))
        assert time.monotonic() - began < 8.0
        visit.close()


def test_silence_after_it_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.control.ANSWER_S", 0.4)
    with (
        registered(tmp_path, RECORD) as (producer, _),
        Control.open(address_of(producer), RECORD) as control,
    ):
        assert b"peer_silent" in control._socket.receive(time.monotonic() + 2.0)
        wait_until(lambda: visitors(producer) == 0)


def test_visitors_are_few_and_take_no_decoders_place(tmp_path: Path) -> None:
    with registered(tmp_path, RECORD, connections=1) as (producer, _), ExitStack() as open_:
        for _ in range(listening._VISITORS):
            open_.enter_context(Control.open(address_of(producer), RECORD))
        wait_until(lambda: visitors(producer) == listening._VISITORS)
        assert refused(Control.open, address_of(producer), RECORD) == "producer_busy"
        assert handed_over(producer, RECORD)
        open_.close()
        wait_until(lambda: visitors(producer) == 0)
        with Control.open(address_of(producer), RECORD) as control:
            control.describe()


def test_a_producer_that_stops_tells_its_visitors(tmp_path: Path) -> None:
    with (
        registered(tmp_path, RECORD) as (producer, _),
        Control.open(address_of(producer), RECORD) as control,
    ):
        stopper = threading.Thread(target=producer.server.stop)
        stopper.start()
        assert b"producer_stopping" in control._socket.receive(time.monotonic() + 2.0)
        control.close()
        stopper.join()


@pytest.mark.parametrize("path", ["/Control", "/control/", "//control", "/control?x", "/%63ontrol"])
def test_the_path_is_one_and_no_other(tmp_path: Path, path: str) -> None:
    with registered(tmp_path, RECORD) as (producer, _):
        assert refused(OneThread, producer.url + path, decoder_context(RECORD)) == (
            "handshake_refused"
        )


def test_a_web_page_cannot_visit(tmp_path: Path) -> None:
    with registered(tmp_path, RECORD) as (producer, _):
        address = address_of(producer)
        with (
            socket.create_connection((address.host, address.port)) as sock,
            decoder_context(RECORD).wrap_socket(sock) as wrapped,
        ):
            wrapped.sendall(
                b"GET /control HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nOrigin: https://evil.example\r\n\r\n"
            )
            assert wrapped.recv(4096).startswith(b"HTTP/1.1 403")


def test_no_key_is_logged_or_described(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), registered(tmp_path, RECORD) as (producer, _):
        with Control.open(address_of(producer), RECORD) as control:
            shown = repr(control.describe())
            rotated = control.rotate()
        with Control.open(address_of(producer), rotated) as control:
            control.unpair()
    said = shown + " ".join(str(vars(record)) for record in caplog.records)
    assert "key rotated" in said
    assert "decoder unpaired" in said
    for record in (RECORD, rotated):
        assert record.key.hex() not in said
        assert repr(record.key)[2:-1] not in said
