"""Whole handoffs over real sockets, and everything that may go wrong on the way."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from typing import Any

import msgspec
import pytest

from gb10_producer.prefill import Rows
from gb10_producer.synthetic import Synthetic
from gb10_producer.transfers import Patience
from gb10_producer.trust import FixedTrust, make_records
from protocol.deadlines import Timing
from protocol.errors import (
    BatonError,
    Cancelled,
    CapacityError,
    EngineFault,
    IdentityMismatch,
    IntegrityError,
    PeerProtocolError,
    TransferError,
)
from protocol.handoff import Began, Progressed, Released, Sealed
from protocol.layouts_named import stand_in_identity
from protocol.pairing import Pairing
from tests.contexts import decoder_context, producer_context
from tests.gb10_producer.peer import MIXED, WIDE, Closed, Peer, expected_regions
from tests.gb10_producer.producer import Gated, running, wait_until

WITHDRAWN = Cancelled("the client left")


# Handoffs


@pytest.mark.parametrize("cut", [0, 5, 16, 90, 99])
@pytest.mark.parametrize("end", [100])
def test_what_arrives_is_what_was_computed(cut: int, end: int) -> None:
    with running(Synthetic(MIXED, 16)) as producer, Peer(producer.url) as peer:
        peer.handshake()
        assert peer.fetch(range(end), cut) == expected_regions(MIXED, range(end), cut, 16)


def test_one_connection_carries_several_handoffs() -> None:
    with running(Synthetic(MIXED, 16)) as producer, Peer(producer.url) as peer:
        peer.handshake()
        for end in (1, 2, 17, 64, 200):
            assert peer.fetch(range(end)) == expected_regions(MIXED, range(end), 0, 16)


def test_megabytes_go_through_a_small_backlog() -> None:
    with (
        running(Synthetic(WIDE, 64), pool_bytes=1 << 20) as producer,
        Peer(producer.url, WIDE) as peer,
    ):
        peer.handshake()
        assert peer.fetch(range(700)) == expected_regions(WIDE, range(700), 0, 64)
        assert producer.pool.peak <= 4 << 20, "one tile's layer passes alone, no more"


def test_tls_with_both_certificates_pinned() -> None:
    ours, theirs = make_records(epoch=3)
    trust = FixedTrust(ours.pairing, producer_context(ours), ours.fingerprints)
    with running(Synthetic(WIDE, 64), trust=trust) as producer:
        client = decoder_context(theirs)
        with Peer(
            producer.url,
            WIDE,
            pairing=theirs.pairing,
            context=client,
            certificates=theirs.fingerprints,
        ) as peer:
            peer.handshake()
            assert peer.fetch(range(300)) == expected_regions(WIDE, range(300), 0, 64)


def test_a_throttled_link_takes_as_long_as_it_should() -> None:
    with running(Synthetic(WIDE, 64), mbps=100.0) as producer, Peer(producer.url, WIDE) as peer:
        peer.handshake()
        began = time.monotonic()
        peer.fetch(range(192))
        elapsed = time.monotonic() - began
        assert 192 * 32768 * 8e-8 * 0.7 < elapsed < 192 * 32768 * 8e-8 + 1.0


# Trust


def test_a_wrong_key_is_told_nothing_and_computes_nothing() -> None:
    source = Synthetic(MIXED, 16)
    with running(source) as producer:
        wrong = Peer(producer.url, pairing=Pairing(b"w" * 32, 0))
        with wrong, pytest.raises(IntegrityError) as refused:
            wrong.handshake()
        assert refused.value.reason == "proof_differs"
        with Peer(producer.url) as peer:
            peer.handshake().fetch(range(20))
    assert source.emitted > 0


def test_another_identity_is_refused_by_the_names_of_what_differs() -> None:
    theirs = stand_in_identity(MIXED)
    theirs = type(theirs)(
        **{
            **{name: getattr(theirs, name) for name in theirs.__struct_fields__},
            "weights": "0" * 64,
            "tokenizer": "1" * 64,
        }
    )
    source = Synthetic(MIXED, 16)
    with running(source) as producer, Peer(producer.url, identity=theirs) as peer:
        with pytest.raises(IdentityMismatch) as refused:
            peer.handshake()
        assert refused.value.reason == "weights_differ"
        assert refused.value.components == ("weights", "tokenizer")
        assert source.emitted == 0, "no token was computed"


def test_a_decoder_that_keeps_being_refused_is_a_warning_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told() -> list[tuple[str, str]]:
        found = [record for record in caplog.records if record.message == "decoder refused"]
        assert all(record.levelno == logging.WARNING for record in found)
        return [(record.error, record.error_reason) for record in found]  # type: ignore[attr-defined]

    def refused(**options: Any) -> None:
        with Peer(producer.url, **options) as peer, pytest.raises(BatonError):
            peer.handshake()
        wait_until(lambda: producer.connections == (0, 0))

    weights = msgspec.structs.replace(stand_in_identity(MIXED), weights="0" * 64)
    more = msgspec.structs.replace(weights, template="1" * 64)
    # A node that ran in this process before may have set another level for its package.
    everything = caplog.at_level(logging.DEBUG, "gb10_producer")
    with running(Synthetic(MIXED, 16)) as producer, everything:
        for _ in range(3):
            refused(identity=weights)
        assert told() == [("the other side's model differs in: weights", "weights_differ")]
        refused(identity=more)
        refused(identity=weights)
        assert told()[1:] == [
            ("the other side's model differs in: weights, template", "weights_differ")
        ]
        for _ in range(2):
            refused(pairing=Pairing(b"w" * 32, 0))
        assert [reason for _, reason in told()[2:]] == ["proof_differs"]
        with Peer(producer.url) as peer:
            peer.handshake()
        refused(identity=weights)
        assert len(told()) == 4, "it had connected in between"
    again = [record for record in caplog.records if record.message == "decoder refused again"]
    assert all(record.levelno == logging.DEBUG for record in again)
    assert len(again) == 4


def test_a_certificate_that_is_not_the_paired_one_gets_no_handshake() -> None:
    ours, _ = make_records(epoch=1)
    _, stranger = make_records(epoch=1)
    trust = FixedTrust(ours.pairing, producer_context(ours), ours.fingerprints)
    with running(Synthetic(MIXED, 16), trust=trust) as producer:
        context = decoder_context(stranger)
        with pytest.raises((OSError, EOFError, Exception)) as refused:
            Peer(producer.url, pairing=ours.pairing, context=context).handshake()
        assert not isinstance(refused.value, AssertionError)
        wait_until(lambda: producer.connections == (0, 0))


def test_a_web_page_cannot_connect() -> None:
    from websockets.exceptions import InvalidStatus

    with running(Synthetic(MIXED, 16)) as producer, pytest.raises(InvalidStatus) as refused:
        Peer(producer.url, headers={"Origin": "http://example.org"})
    assert refused.value.response.status_code == 403


# The queue


def test_two_identical_prompts_at_once_are_computed_once() -> None:
    source = Gated()
    with running(source) as producer, Peer(producer.url) as one, Peer(producer.url) as two:
        one.handshake().start(range(50))
        assert source.reached.wait(5.0)
        two.handshake().start(range(50))
        wait_until(lambda: len(tickets(producer)) == 2)
        source.gate.set()
        for peer in (one, two):
            peer.until(Sealed)
            assert dict_of(peer) == expected_regions(MIXED, range(50), 0, 16)
        assert producer.device.prefills == 1


def test_one_of_two_identical_requests_may_leave() -> None:
    source = Gated()
    with running(source) as producer, Peer(producer.url) as one, Peer(producer.url) as two:
        one.handshake().start(range(50))
        two.handshake().start(range(50))
        wait_until(lambda: len(tickets(producer)) == 2)
        one.withdraw(WITHDRAWN)
        source.gate.set()
        two.until(Sealed)
        assert dict_of(two) == expected_regions(MIXED, range(50), 0, 16)


def test_a_full_queue_is_an_answer_with_a_time_and_the_connection_lives_on() -> None:
    source = Gated()
    with (
        running(source, waiting=1) as producer,
        Peer(producer.url) as one,
        Peer(producer.url) as two,
        Peer(producer.url) as three,
    ):
        for number, peer in enumerate((one, two, three)):
            peer.handshake()
            if peer is not three:
                peer.start(range(50 + number))
                wait_until(lambda: sum(producer.jobs) == number + 1)  # noqa: B023
        three.start(range(60))
        with pytest.raises(CapacityError) as refused:
            three.until(Sealed)
        assert refused.value.reason == "queue_full"
        assert refused.value.retry_after_s >= 1.0
        three.machine.release(time.monotonic())
        three.flush()
        source.gate.set()
        one.until(Sealed)
        two.until(Sealed)
        assert three.fetch(range(60)) == expected_regions(MIXED, range(60), 0, 16)


def test_a_producer_that_stops_says_so_whatever_it_was_doing() -> None:
    with (
        running(Synthetic(MIXED, 16)) as producer,
        Peer(producer.url) as sealed,
        Peer(producer.url) as ready,
    ):
        ready.handshake()
        sealed.handshake().start(range(50))
        sealed.until(Sealed)
        producer.server.stop()
        for peer in (sealed, ready):
            with pytest.raises(CapacityError) as told:
                peer.until(Released)
            assert told.value.reason == "producer_stopping"


def test_cancelling_stops_between_tiles_and_the_next_request_is_fine() -> None:
    source = Gated()
    with running(source) as producer, Peer(producer.url) as peer:
        peer.handshake().start(range(160))
        assert source.reached.wait(5.0)
        peer.withdraw(WITHDRAWN)
        wait_until(lambda: producer.jobs == (0, 0))
        assert (source.withdrawn, source.tiles) == (1, 1)
        source.gate.set()
        assert peer.fetch(range(40)) == expected_regions(MIXED, range(40), 0, 16)


def test_cancelling_in_the_middle_of_the_frames() -> None:
    with (
        running(Synthetic(WIDE, 32), pool_bytes=1 << 20) as producer,
        Peer(producer.url, WIDE) as peer,
    ):
        peer.handshake().start(range(640))
        peer.begun()
        peer.step()
        peer.withdraw(WITHDRAWN)
        wait_until(lambda: producer.pool.used == 0)
        assert peer.fetch(range(40)) == expected_regions(WIDE, range(40), 0, 32)


def test_a_client_that_vanishes_frees_the_device() -> None:
    """In the end: until then it may come back (test_transfers.py)."""
    source = Gated()
    with running(source, patience=Patience(keep_s=0.2)) as producer:
        with Peer(producer.url) as peer:
            peer.handshake().start(range(160))
            assert source.reached.wait(5.0)
            peer.socket.socket.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: producer.jobs == (0, 0))
        wait_until(lambda: producer.connections == (0, 0))
        source.gate.set()
        with Peer(producer.url) as peer:
            peer.handshake().fetch(range(20))


# Memory and time


def test_a_reader_that_stops_reading_holds_back_the_device_not_memory() -> None:
    source = Synthetic(WIDE, 32)
    timing = Timing(idle_s=1.0, heartbeat_s=0.3)
    with running(source, pool_bytes=2 << 20, timing=timing) as producer:
        with Peer(producer.url, WIDE) as peer:
            peer.handshake().start(range(4096), credit=64)
            wait_until(lambda: producer.pool.used > 1 << 20)
            time.sleep(0.3)
            assert producer.pool.peak <= 3 << 20
            assert source.emitted < 4096 * 32768 // 2
        wait_until(lambda: producer.pool.used == 0)
        with Peer(producer.url, WIDE) as peer:
            peer.handshake().fetch(range(64))


def test_a_peer_that_grants_no_credit_is_given_up() -> None:
    timing = Timing(idle_s=0.4, heartbeat_s=0.2)
    with running(Synthetic(WIDE, 32), timing=timing) as producer:
        with Peer(producer.url, WIDE) as peer:
            peer.handshake().start(range(640), credit=1)
            peer.flush = lambda: peer.machine.outgoing() and None  # never says anything again
            with pytest.raises((BatonError, Closed)):
                peer.until(Sealed, timeout=5.0)
        wait_until(lambda: producer.pool.used == 0)
        wait_until(lambda: producer.jobs == (0, 0))


def test_progress_is_a_sign_of_life_at_least_every_heartbeat() -> None:
    source = Gated()
    with running(source) as producer, Peer(producer.url) as peer:
        peer.handshake().start(range(50))
        for _ in range(3):
            event = peer.until(Progressed, timeout=1.0)
            assert event == Progressed(0, 50)
        source.gate.set()
        peer.until(Sealed)
        done = [json.loads(raw)["done"] for raw in peer.texts if b'"progress"' in raw]
        assert done == sorted(done)
        assert done[-1] == 50


def test_a_prompt_whose_cache_can_never_fit_is_refused_before_the_queue() -> None:
    with running(Synthetic(MIXED, 16), memory=20_000) as producer, Peer(producer.url) as peer:
        peer.handshake().start(range(2000))
        with pytest.raises(CapacityError) as refused:
            peer.until(Began)
        assert refused.value.reason == "memory_exceeded"
        peer.machine.release(time.monotonic())
        peer.flush()
        peer.fetch(range(8))


def test_a_token_outside_the_vocabulary_never_reaches_the_device() -> None:
    source = Synthetic(MIXED, 16)
    with running(source, vocabulary=100) as producer, Peer(producer.url) as peer:
        peer.handshake().start([1, 2, 100])
        with pytest.raises(PeerProtocolError):
            peer.until(Began)
        assert source.emitted == 0


def test_strangers_are_shown_out_and_do_not_keep_the_decoder_out() -> None:
    timing = Timing(handshake_s=0.4, heartbeat_s=0.3)
    with running(Synthetic(MIXED, 16), timing=timing) as producer:
        address = address_of(producer.url)
        silent = [socket.create_connection(address) for _ in range(20)]
        time.sleep(0.05)
        assert producer.connections[1] <= 16
        for half_open in silent:
            half_open.settimeout(3.0)
            with contextlib.suppress(ConnectionError):
                while half_open.recv(4096):
                    pass
            half_open.close()
        wait_until(lambda: producer.connections == (0, 0))
        with Peer(producer.url) as peer:
            peer.handshake().fetch(range(20))


@pytest.mark.parametrize("secured", [False, True])
def test_idle_connections_do_not_keep_a_decoder_out(secured: bool) -> None:
    """However long a handshake may take, whoever comes next finds room."""
    ours, theirs = make_records(epoch=1)
    trust = FixedTrust(ours.pairing, producer_context(ours), ours.fingerprints)
    if not secured:
        trust = None
    with running(Synthetic(MIXED, 16), timing=Timing(handshake_s=60.0), trust=trust) as producer:
        address = address_of(producer.url)
        silent = [socket.create_connection(address) for _ in range(60)]
        wait_until(lambda: producer.connections[1] <= 16)
        known: dict[str, Any] = {}
        if secured:
            known = {"pairing": theirs.pairing, "context": decoder_context(theirs)}
            known["certificates"] = theirs.fingerprints
        with Peer(producer.url, **known) as peer:
            peer.handshake().fetch(range(20))
        for one in silent:
            one.close()
        wait_until(lambda: producer.connections == (0, 0))


def test_a_handshake_that_drips_is_cut_off() -> None:
    timing = Timing(handshake_s=0.4, heartbeat_s=0.3)
    with running(Synthetic(MIXED, 16), timing=timing) as producer, Peer(producer.url) as peer:
        began = time.monotonic()
        with pytest.raises((Closed, TransferError)):
            peer.step(5.0)
        assert time.monotonic() - began < 4.0


def test_no_more_decoders_than_the_limit() -> None:
    with running(Synthetic(MIXED, 16), connections=1) as producer:
        with Peer(producer.url) as one:
            one.handshake()
            with pytest.raises(Exception) as refused:
                Peer(producer.url).handshake()
            assert "503" in str(refused.value)
            one.fetch(range(20))
        wait_until(lambda: producer.connections == (0, 0))
        with Peer(producer.url) as two:
            two.handshake().fetch(range(20))


# Faults


class Faulty(Synthetic):
    """Fails at the second tile, like a device."""

    error: BaseException = EngineFault("the device is gone")

    def prefill(self, tokens, cut, end, emit, cancelled, progress, extra=()):
        def check() -> bool:
            if progress_seen:
                raise self.error
            return cancelled()

        progress_seen: list[int] = []
        return super().prefill(
            tokens, cut, end, emit, check, lambda p: (progress_seen.append(p), progress(p))
        )


def test_a_device_fault_aborts_everybody_and_takes_no_new_work() -> None:
    with running(Faulty(MIXED, 16)) as producer, Peer(producer.url) as peer:
        peer.handshake().start(range(50))
        with pytest.raises(TransferError) as failed:
            peer.until(Sealed)
        assert failed.value.reason == "peer_engine_fault"
        assert isinstance(producer.device.fault, EngineFault)
        peer.machine.release(time.monotonic())
        peer.flush()
        peer.start(range(10))
        with pytest.raises(CapacityError) as refused:
            peer.until(Sealed)
        assert refused.value.reason == "producer_stopping"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_prefill_counts_as_a_device_fault() -> None:
    source = Faulty(MIXED, 16)
    source.error = ZeroDivisionError("a bug")
    with running(source) as producer, Peer(producer.url) as peer:
        peer.handshake().start(range(50))
        with pytest.raises(TransferError) as failed:
            peer.until(Sealed)
        assert failed.value.reason == "peer_engine_fault"
        assert producer.device.fault is not None


def test_running_out_of_memory_ends_one_request_only() -> None:
    source = Faulty(MIXED, 16)
    source.error = CapacityError("no memory", reason="producer_out_of_memory", retry_after_s=3.0)
    with running(source) as producer, Peer(producer.url) as peer:
        peer.handshake().start(range(50))
        with pytest.raises(CapacityError) as refused:
            peer.until(Sealed)
        assert (refused.value.reason, refused.value.retry_after_s) == ("capacity_exceeded", 3.0)
        peer.machine.release(time.monotonic())
        peer.flush()
        assert peer.fetch(range(16)) == expected_regions(MIXED, range(16), 0, 16)
        assert producer.device.fault is None


class Disordered(Synthetic):
    """Emits the layers of a tile in another order than the schedule's."""

    def prefill(self, tokens, cut, end, emit, cancelled, progress, extra=()):
        held: list = []
        computed = super().prefill(tokens, cut, end, held.append, cancelled, progress)
        for item in sorted(held, key=lambda item: -item.index if isinstance(item, Rows) else 0):
            emit(item)
        return computed


def test_rows_in_disorder_are_never_sealed() -> None:
    with running(Disordered(MIXED, 16)) as producer, Peer(producer.url) as peer:
        peer.handshake().start(range(50))
        with pytest.raises(TransferError):
            peer.until(Sealed)


def test_stopping_tells_who_is_waiting() -> None:
    source = Gated()
    with running(source) as producer, Peer(producer.url) as peer:
        peer.handshake().start(range(50))
        assert source.reached.wait(5.0)
        stopper = threading.Thread(target=producer.server.stop)
        stopper.start()
        with pytest.raises(CapacityError) as stopped:
            peer.until(Sealed)
        assert stopped.value.reason == "producer_stopping"
        with pytest.raises(Closed):
            peer.step()
        stopper.join()


def address_of(url: str) -> tuple[str, int]:
    host, port = url.split("//")[1].split(":")
    return host, int(port)


def tickets(producer) -> list[object]:
    return [ticket for job in producer.device._jobs.values() for ticket in job.tickets]


def dict_of(peer: Peer) -> dict[tuple[int, int], bytes]:
    return {where: bytes(memory) for where, memory in peer.memory.items()}
