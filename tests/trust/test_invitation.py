"""Pairing over real sockets: who is paired, who is not, and that the door stays open."""

from __future__ import annotations

import logging
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from protocol.errors import BatonError, CapacityError
from protocol.pairing import exchange
from protocol.pairing.certificates import OwnCertificate, make_certificate
from protocol.pairing.code import Code, new_code
from protocol.pairing.messages import decode
from protocol.pairing.record import fingerprint
from tests.trust.inviting import (
    DECODER,
    PORT,
    STRANGER,
    Caller,
    Inviting,
    inviting,
    soon,
    wait_until,
)
from tests.trust.machines import NOW, meet, old_style, own
from trust import invitation as room
from trust import places
from trust.acceptance import accept
from trust.frames import receive_frame, receive_opening, send_frame, send_opening
from trust.invitation import GUESTS, Invitation
from trust.peers import Peer, Peers
from trust.tls import client_context, server_context


def reason(call, *arguments: object, **options: object) -> str:
    with pytest.raises(BatonError) as caught:
        call(*arguments, **options)
    return caught.value.reason


# Two machines


def test_two_machines_pair_by_a_code(tmp_path: Path) -> None:
    seen: list[Peer] = []
    with inviting(tmp_path / "state", paired=seen.append) as producer:
        paired = producer.call(producer.invitation.open())
        (kept,) = producer.peers.all().peers
    assert (paired.name, kept.name) == ("gb10", "macbook")
    assert paired.port == PORT
    ours, theirs = paired.record, kept.record
    assert (ours.key, ours.epoch) == (theirs.key, theirs.epoch)
    assert (ours.role, theirs.role) == ("decoder", "producer")
    assert (ours.certificate, ours.peer_certificate) == (DECODER.certificate, own().certificate)
    assert (theirs.certificate, theirs.peer_certificate) == (
        own().certificate,
        DECODER.certificate,
    )
    wait_until(lambda: seen == [kept])
    server = server_context(theirs.certificate, theirs.private_key, [theirs.peer_certificate])
    meeting = meet(server, client_context(ours.certificate, ours.private_key))
    assert meeting.to_server == ours.certificate, "the records are good for a connection"


PAIRING = """
import sys
from pathlib import Path
from protocol.pairing.code import read_code
from tests.trust.inviting import DECODER
from trust.acceptance import accept

code = read_code(sys.stdin.readline())
paired = accept("127.0.0.1", int(sys.argv[1]), code, own=DECODER, name="macbook")
print(paired.record.key.hex(), paired.record.certificate.hex())
"""


def test_two_processes_pair(tmp_path: Path) -> None:
    with inviting(tmp_path / "state") as producer:
        done = subprocess.run(
            [sys.executable, "-c", PAIRING, str(producer.port)],
            input=producer.invitation.open().text + "\n",
            capture_output=True,
            text=True,
            timeout=30.0,
        )
        assert done.returncode == 0, done.stderr
        (kept,) = producer.peers.all().peers
    key, certificate = map(bytes.fromhex, done.stdout.split())
    assert (key, certificate) == (kept.record.key, kept.record.peer_certificate)


def test_each_code_pairs_one_machine_and_epochs_grow(tmp_path: Path) -> None:
    with inviting(tmp_path / "state") as producer:
        code = producer.invitation.open()
        first = producer.call(code)
        assert producer.invitation.left_s() == 0
        assert reason(producer.call, code, STRANGER) == "pairing_closed"
        asked: list[bytes] = []
        second = producer.call(
            producer.invitation.open(), earlier_epoch=lambda known: asked.append(known) or 41
        )
        assert asked == [fingerprint(first.record.peer_certificate)]
        # What one says of epochs changes nothing for another.
        third = producer.call(producer.invitation.open(), STRANGER)
        assert [one.record.epoch for one in (first, second, third)] == [1, 42, 1]
        assert len(producer.peers.all().peers) == 2, "the first machine's pairing was replaced"
        assert producer.peers.by_fingerprint(fingerprint(DECODER.certificate)) is not None
        assert len({one.record.key for one in (first, second, third)}) == 3


def test_without_a_code_nobody_is_paired(tmp_path: Path) -> None:
    with inviting(tmp_path / "state") as producer:
        assert reason(producer.call, new_code()) == "pairing_closed"
        code = producer.invitation.open()
        assert 590 < producer.invitation.left_s() <= 600
        producer.invitation.withdraw()
        assert reason(producer.call, code) == "pairing_closed"
        assert producer.peers.all().peers == ()


def test_codes_are_few(tmp_path: Path) -> None:
    with inviting(tmp_path / "state") as producer:
        for _ in range(3):
            producer.invitation.open()
        with pytest.raises(CapacityError) as caught:
            producer.invitation.open()
        assert caught.value.reason == "pairing_paused"
        assert 590 < caught.value.retry_after_s <= 600


# Attackers


def test_a_wrong_code_burns_the_right_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with inviting(tmp_path / "state") as producer:
        code = producer.invitation.open()
        with caplog.at_level(logging.DEBUG, "trust"):
            assert reason(producer.call, new_code()) == "code_differs"
        assert reason(producer.call, code) == "code_burned"
        producer.refused("code_differs")
        assert producer.peers.all().peers == ()
        (record,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
        assert record.__dict__["reason"] == "code_differs"
        assert record.__dict__["peer"] == "127.0.0.1"


def test_a_connection_lost_after_its_first_message_burns_the_code(tmp_path: Path) -> None:
    with inviting(tmp_path / "state") as producer:
        code = producer.invitation.open()
        with Caller(producer.port) as caller:
            caller.announce(DECODER.certificate).secure()
            caller.send(*caller.machine(new_code()).outgoing())
            caller.receive()
        producer.refused("connection_lost")
        assert reason(producer.call, code) == "code_burned"


@pytest.mark.parametrize("stage", ["connected", "announced", "secured", "half a message"])
def test_a_connection_that_said_nothing_burns_nothing(tmp_path: Path, stage: str) -> None:
    with inviting(tmp_path / "state") as producer:
        code = producer.invitation.open()
        with Caller(producer.port) as caller:
            if stage != "connected":
                caller.announce(DECODER.certificate)
            if stage in ("secured", "half a message"):
                caller.secure()
            if stage == "half a message":
                caller.sock.sendall(b"\0\0\1\0half")
        wait_until(lambda: bool(producer.invitation.refused))
        producer.call(code)


@pytest.mark.parametrize("message", [b"", b"{}", b"\xff" * 100, b'{"type":"pair_confirm"}'])
def test_garbage_burns_the_code_and_is_told(tmp_path: Path, message: bytes) -> None:
    with inviting(tmp_path / "state") as producer:
        code = producer.invitation.open()
        with Caller(producer.port) as caller:
            caller.announce(DECODER.certificate).secure().send(message)
            assert type(decode(caller.receive())).__name__ == "PairRefused"
            assert caller.ended()
        assert reason(producer.call, code) == "code_burned"


def test_a_message_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    with inviting(tmp_path / "state") as producer:
        code = producer.invitation.open()
        with Caller(producer.port) as caller:
            caller.announce(DECODER.certificate).secure().sock.sendall(b"\xff\xff\xff\xff")
            assert caller.ended()
        producer.refused("message_too_long")
        producer.call(code)


def test_a_recorded_exchange_opens_nothing(tmp_path: Path) -> None:
    """Played back over a connection of one's own, or with the same certificate as before."""
    with inviting(tmp_path / "state") as producer:
        code = producer.invitation.open()
        recorded: list[bytes] = []
        with Caller(producer.port) as caller:
            machine = caller.announce(DECODER.certificate).secure().machine(code)
            paired = None
            while paired is None:
                recorded += (messages := machine.outgoing())
                caller.send(*messages)
                paired = machine.receive(caller.receive(), time.monotonic())
        before = producer.peers.all()
        producer.invitation.open()
        with Caller(producer.port) as caller:
            caller.announce(DECODER.certificate).secure()
            caller.send(*recorded)
            caller.receive()
            assert decode(caller.receive()).reason == "code_differs"  # type: ignore[union-attr]
        assert producer.peers.all() == before


class Between:
    """Sits between the two: ends both TLS connections itself, and passes every message on."""

    def __init__(self, port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self._producer_port = port
        self.passed: list[bytes] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        fake_producer = make_certificate("producer", NOW)
        sock, _ = self.listener.accept()
        with sock, Caller(self._producer_port) as caller:
            announced = receive_opening(sock, soon())
            context = server_context(
                fake_producer.certificate, fake_producer.private_key, [announced]
            )
            caller.announce(STRANGER.certificate).secure(STRANGER)
            with context.wrap_socket(sock, server_side=True) as inner:
                ends = [inner, caller.sock]
                try:
                    while True:
                        self.passed.append(receive_frame(ends[0], soon()))
                        send_frame(ends[1], self.passed[-1], soon())
                        ends.reverse()
                except BatonError:
                    return

    def close(self) -> None:
        self.listener.close()
        self._thread.join()


def test_somebody_in_between_is_noticed_with_the_right_code(tmp_path: Path) -> None:
    with inviting(tmp_path / "state") as producer:
        code = producer.invitation.open()
        between = Between(producer.port)
        told = reason(call, between.port, code)
        between.close()
        assert told == "code_differs"
        producer.refused("code_differs")
        assert len(between.passed) == 4, "three of the exchange, and the refusal"
        assert producer.peers.all().peers == ()


def call(port: int, code: Code) -> object:
    return accept("127.0.0.1", port, code, own=DECODER, name="macbook")


def test_a_certificate_without_its_key_gets_no_further_than_tls(tmp_path: Path) -> None:
    with inviting(tmp_path / "state") as producer:
        code = producer.invitation.open()
        with Caller(producer.port) as caller:
            caller.announce(DECODER.certificate)
            with pytest.raises((OSError, BatonError)):
                caller.secure(STRANGER).receive()
        producer.refused("tls_failed")
        producer.call(code)


def test_a_caller_that_goes_away_during_the_tls_handshake_is_no_stranger(tmp_path: Path) -> None:
    with inviting(tmp_path / "state") as producer:
        code = producer.invitation.open()
        with Caller(producer.port) as caller:
            caller.announce(DECODER.certificate)
        producer.refused("connection_lost")
        producer.call(code)


def test_a_leaf_that_the_announced_one_signed_is_not_the_announced_one(tmp_path: Path) -> None:
    authority = old_style("authority")
    issued = old_style("issued", issuer=authority)
    with inviting(tmp_path / "state") as producer:
        code = producer.invitation.open()
        with Caller(producer.port) as caller:
            caller.announce(authority.certificate).secure(issued)
            assert caller.ended()
        producer.refused("certificate_unusable")
        producer.call(code)


def test_no_certificate_and_an_older_tls_are_refused(tmp_path: Path) -> None:
    with inviting(tmp_path / "state") as producer:
        code = producer.invitation.open()
        with Caller(producer.port) as caller:
            caller.announce(DECODER.certificate)
            with pytest.raises((OSError, BatonError)):
                caller.secure(None).receive()
        with Caller(producer.port) as caller:
            caller.announce(DECODER.certificate)
            with pytest.raises(OSError):
                caller.secure(
                    minimum_version=ssl.TLSVersion.TLSv1_2, maximum_version=ssl.TLSVersion.TLSv1_2
                )
        producer.refused("tls_failed", 2)
        producer.call(code)


@pytest.mark.parametrize("opening", [b"GET / HTTP/1.1\r\nHost: gb10\r\n\r\n", b"\x16\x03\x01\x02"])
def test_what_speaks_something_else_is_shown_out(tmp_path: Path, opening: bytes) -> None:
    with inviting(tmp_path / "state", patience_s=0.5) as producer:
        code = producer.invitation.open()
        with Caller(producer.port) as caller:
            caller.sock.sendall(opening)
            assert caller.ended()
        producer.call(code)


# The door stays open


@pytest.mark.parametrize("stage", ["connected", "announced", "secured"])
def test_silence_ends(tmp_path: Path, stage: str) -> None:
    with inviting(tmp_path / "state", patience_s=0.5) as producer:
        with Caller(producer.port) as caller:
            if stage != "connected":
                caller.announce(DECODER.certificate)
            if stage == "secured":
                caller.secure()
            began = time.monotonic()
            assert caller.ended()
            assert time.monotonic() - began < 4.0
        producer.refused("peer_silent")
        producer.wait_for_guests(0)


def test_silence_in_the_middle_ends_and_burns_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 0.5)
    with inviting(tmp_path / "state") as producer:
        code = producer.invitation.open()
        with Caller(producer.port) as caller:
            caller.announce(DECODER.certificate).secure()
            caller.send(*caller.machine(code).outgoing())
            caller.receive()
            assert decode(caller.receive()).reason == "peer_silent"  # type: ignore[union-attr]
        producer.refused("peer_silent")
        assert reason(producer.call, code) == "code_burned"


IDLE = """
import sys
from protocol.errors import BatonError
from tests.trust.inviting import DECODER, Caller

callers = [Caller(int(sys.argv[1])) for number in range(1000)]
for caller in callers[::3]:
    try:
        caller.announce(DECODER.certificate)
    except (OSError, BatonError):
        pass  # it was shown out
print("idle", flush=True)
sys.stdin.readline()
"""


def test_a_thousand_idle_connections_keep_nobody_out(tmp_path: Path) -> None:
    patience_s = 150.0
    with inviting(tmp_path / "state", patience_s=patience_s) as producer:
        code = producer.invitation.open()
        idle = subprocess.Popen(
            [sys.executable, "-c", IDLE, str(producer.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert idle.stdout is not None
        assert idle.stdout.readline() == "idle\n"
        began = time.monotonic()
        producer.call(code)
        assert time.monotonic() - began < patience_s / 2, "it waited for their time to be up"
        assert len(producer.invitation._guests) <= 2 * GUESTS
        assert producer.invitation.refused["capacity_exceeded"] >= 1000 - 2 * GUESTS
        idle.communicate("\n", timeout=10.0)


def test_idle_connections_do_not_end_an_exchange(tmp_path: Path) -> None:
    with inviting(tmp_path / "state") as producer, ExitStack() as idle:
        code = producer.invitation.open()
        with Caller(producer.port) as caller:
            machine = caller.announce(DECODER.certificate).secure().machine(code)
            caller.send(*machine.outgoing())
            machine.receive(caller.receive(), time.monotonic())
            for _ in range(5 * GUESTS):
                idle.enter_context(Caller(producer.port))
            producer.refused("capacity_exceeded", 4 * GUESTS + 1)
            caller.send(*machine.outgoing())
            assert machine.receive(caller.receive(), time.monotonic()) is not None


def test_the_host_with_most_connections_makes_room() -> None:
    nothing = socket.socket()
    nothing.close()

    def guest(host: str, busy: bool = False) -> room._Guest:
        return room._Guest(nothing, nothing, host, busy=busy)

    old, one, two = guest("old"), guest("many"), guest("many")
    assert room._who_leaves([old, one, two]) is one
    assert room._who_leaves([old, guest("many", busy=True), two]) is old
    assert room._who_leaves([guest("busy", busy=True)]) is None
    assert room._who_leaves([]) is None


def test_a_stop_ends_everybody_and_the_port(tmp_path: Path) -> None:
    producer = Inviting(tmp_path / "state")
    with Caller(producer.port) as silent, Caller(producer.port) as busy:
        code = producer.invitation.open()
        silent.announce(DECODER.certificate)
        busy.announce(DECODER.certificate).secure()
        busy.send(*busy.machine(code).outgoing())
        busy.receive()
        began = time.monotonic()
        assert producer.invitation.stop(5.0)
        assert time.monotonic() - began < 3.0
        assert silent.ended()
        assert busy.ended()
    assert producer.invitation._guests == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", producer.port), timeout=2.0)
    assert producer.invitation.stop(), "again is nothing"


def test_one_that_was_never_started_is_stopped_too(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    invitation = Invitation(listener, Peers(tmp_path, "producer"), own=own(), name="a", port=PORT)
    assert invitation.stop()
    assert listener.fileno() < 0


def test_whoever_was_paired_is_told_before_anybody_ends_the_invitation(tmp_path: Path) -> None:
    done: list[bool] = []

    def ended(_: Peer) -> None:
        thread = threading.Thread(target=lambda: done.append(producer.invitation.stop()))
        thread.start()
        time.sleep(0.2)

    with inviting(tmp_path / "state", paired=ended) as producer:
        producer.call(producer.invitation.open())
    wait_until(lambda: bool(done))


def test_a_code_that_was_tried_in_vain_is_told(tmp_path: Path) -> None:
    burned: list[str] = []
    with inviting(tmp_path / "state", burned=burned.append) as producer:
        assert reason(producer.call, new_code()) == "pairing_closed"
        producer.invitation.open()
        assert reason(producer.call, new_code()) == "code_differs"
        wait_until(lambda: bool(burned))
        producer.call(producer.invitation.open())
    assert burned == ["code_differs"], "what was no code's business is nobody's"


# What is kept, and what is told


def test_a_pairing_that_cannot_be_kept_is_not_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inviting(tmp_path / "state") as producer:
        code = producer.invitation.open()

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(places, "sync", full)
        assert reason(producer.call, code) == "connection_lost"
        producer.refused("trust_not_durable")
        assert producer.peers.all().peers == ()
        monkeypatch.undo()
        producer.call(producer.invitation.open())


def test_nobody_is_invited_who_could_not_be_kept(tmp_path: Path) -> None:
    with inviting(tmp_path / "state") as producer:
        producer.invitation.open()
        (tmp_path / "state" / "peers").chmod(0o755)
        assert reason(producer.invitation.open) == "directory_exposed"


def test_a_certificate_of_its_own_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    broken = OwnCertificate(own().certificate, DECODER.private_key)
    peers = Peers(tmp_path, "producer")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        refused = reason(Invitation, listener, peers, own=broken, name="gb10", port=PORT)
    assert refused == "pairing_unreadable"


def test_no_code_or_key_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), inviting(tmp_path / "state") as producer:
        codes = [producer.invitation.open(), producer.invitation.open()]
        assert reason(producer.call, new_code()) == "code_differs"
        codes.append(producer.invitation.open())
        paired = producer.call(codes[-1])
    said = " ".join(str(record.__dict__) for record in caplog.records)
    assert "paired" in said
    for code in codes:
        assert code.text not in said
        assert not any(
            f"{one} {two}" in said for one, two in zip(code.words, code.words[1:], strict=False)
        )
    for secret in (paired.record.key, paired.record.private_key, own().private_key):
        assert secret.hex() not in said
        assert repr(secret)[2:-1] not in said


def test_it_waits_as_long_as_the_exchange_does() -> None:
    assert room.PATIENCE_S == exchange.PATIENCE_S


def test_an_opening_is_all_that_travels_in_the_clear(tmp_path: Path) -> None:
    """A proxy that only reads sees the decoder's certificate, and TLS records from there on."""
    with inviting(tmp_path / "state") as producer:
        code = producer.invitation.open()
        listener = socket.create_server(("127.0.0.1", 0))
        seen: list[bytes] = []

        def copy(source: socket.socket, target: socket.socket, keep: bool) -> None:
            try:
                while data := source.recv(65536):
                    if keep:
                        seen.append(data)
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)
            except OSError:
                return

        def relay() -> None:
            caller, _ = listener.accept()
            with caller, socket.create_connection(("127.0.0.1", producer.port)) as onwards:
                back = threading.Thread(target=copy, args=(onwards, caller, False))
                back.start()
                copy(caller, onwards, True)
                back.join()

        thread = threading.Thread(target=relay)
        thread.start()
        paired = call(listener.getsockname()[1], code)
        thread.join()
        listener.close()
    whole = b"".join(seen)
    one, other = socket.socketpair()
    with one, other:
        send_opening(one, DECODER.certificate, soon())
        opening = other.recv(65536)
    assert whole.startswith(opening + b"\x16\x03")
    assert b"pair_" not in whole
    assert b"macbook" not in whole
    assert paired is not None
