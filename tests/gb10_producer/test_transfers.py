"""Handoffs whose connection was lost, at the producer: kept, resumed, let go."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest
from msgspec import structs
from websockets.exceptions import ConnectionClosed

from gb10_producer.synthetic import Synthetic
from gb10_producer.transfers import Patience
from protocol import messages
from protocol.errors import BatonError
from protocol.handoff import Began, Sealed
from protocol.layout import schedule
from protocol.messages import Resume
from tests.gb10_producer.peer import MIXED, WIDE, Closed, Peer, expected_regions
from tests.gb10_producer.producer import Gated, Running, running, wait_until

TILE = 16
TOKENS = range(100)


def frames_of(end: int, layout=MIXED, tile: int = TILE) -> int:
    return sum(1 for _ in schedule(layout, 0, end, tile))


def lost_after(producer: Running, frames: int, layout=MIXED, tokens=TOKENS, **options) -> Peer:
    """A peer that vanished after so many frames; the producer knows it."""
    peer = Peer(producer.url, layout).handshake()
    peer.start(tokens, **options)
    assert peer.reception is not None
    while peer.reception.received < frames:
        peer.step()
    peer.vanish()
    return peer


def answer_to_resume(producer: Running, lost: Peer, layout=MIXED) -> str:
    """The reason with which a RESUME is refused; the connection is fine afterwards."""
    with Peer(producer.url, layout) as peer:
        peer.handshake().resume(lost)
        with pytest.raises(BatonError) as caught:
            peer.until(Began, Sealed)
        peer.machine.release(time.monotonic())
        peer.flush()
        assert peer.fetch(range(20)) == expected_regions(layout, range(20), 0, TILE)
        return caught.value.reason


def at_rest(producer: Running) -> bool:
    return producer.jobs == (0, 0) and producer.pool.used == 0 and not len(producer.transfers)


@pytest.mark.parametrize("frames", [0, 1, 7, frames_of(100) - 1, frames_of(100)])
def test_it_goes_on_over_another_connection(frames: int) -> None:
    source = Synthetic(MIXED, TILE)
    with running(source) as producer:
        lost = lost_after(producer, frames)
        with Peer(producer.url) as peer:
            peer.handshake().resume(lost)
            assert peer.complete() == expected_regions(MIXED, TOKENS, 0, TILE)
            wait_until(lambda: at_rest(producer))
        assert producer.device.prefills == 1, "it was computed again"
        assert producer.transfers.counts["resumed"] == 1


def test_it_goes_on_while_the_device_still_computes() -> None:
    source = Gated()
    with running(source) as producer:
        lost = Peer(producer.url).handshake()
        lost.start(TOKENS)
        assert source.reached.wait(5.0)
        lost.vanish()
        wait_until(lambda: producer.transfers.kept == 1)
        assert producer.jobs == (1, 0)
        with Peer(producer.url) as peer:
            peer.handshake().resume(lost)
            source.gate.set()
            assert peer.complete() == expected_regions(MIXED, TOKENS, 0, TILE)
        wait_until(lambda: at_rest(producer))
        assert source.withdrawn == 0


def test_before_its_job_has_begun() -> None:
    source = Gated()
    with running(source) as producer, Peer(producer.url) as other:
        other.handshake().start(range(40))
        assert source.reached.wait(5.0)
        lost = Peer(producer.url).handshake()
        lost.generation = 1
        lost.start(TOKENS)
        wait_until(lambda: producer.jobs == (1, 1))
        lost.vanish()
        with Peer(producer.url) as peer:
            peer.handshake().resume(lost)
            source.gate.set()
            assert peer.complete() == expected_regions(MIXED, TOKENS, 0, TILE)


def test_a_connection_that_the_producer_thinks_alive_is_taken_over() -> None:
    """Half-open: no FIN and no RST ever came."""
    with running(Synthetic(MIXED, TILE)) as producer:
        lost = Peer(producer.url).handshake()
        lost.start(TOKENS, credit=4)
        assert lost.reception is not None
        while lost.reception.received < 3:
            lost.step()
        with pytest.raises(BatonError):
            lost.machine.eof(time.monotonic())
        with Peer(producer.url) as peer:
            peer.handshake().resume(lost)
            assert peer.complete() == expected_regions(MIXED, TOKENS, 0, TILE)
        received = [lost.socket.recv(5.0)]
        with suppress(ConnectionClosed):
            while True:
                received.append(lost.socket.recv(5.0))
        assert len(received) < frames_of(100), "both were served"


def test_a_decoder_that_says_goodbye_is_not_waited_for() -> None:
    source = Gated()
    with running(source) as producer:
        with Peer(producer.url) as peer:
            peer.handshake().start(TOKENS)
            assert source.reached.wait(5.0)
        wait_until(lambda: producer.jobs == (0, 0))
        assert len(producer.transfers) == 0


def test_nobody_comes_back() -> None:
    with running(Synthetic(MIXED, TILE), patience=Patience(keep_s=0.3)) as producer:
        lost = lost_after(producer, 5)
        wait_until(lambda: at_rest(producer))
        assert answer_to_resume(producer, lost) == "transfer_expired"
        assert producer.transfers.counts["transfer_expired"] == 1


def test_what_holds_others_up_is_kept_for_less_long() -> None:
    source = Gated()
    patience = Patience(keep_s=600.0, in_the_way_s=0.2)
    with running(source, patience=patience) as producer:
        lost = Peer(producer.url).handshake()
        lost.start(TOKENS)
        assert source.reached.wait(5.0)
        lost.vanish()
        wait_until(lambda: producer.transfers.kept == 1)
        time.sleep(1.5)
        assert producer.transfers.kept == 1, "nobody waits, and it was let go"
        with Peer(producer.url) as peer:
            peer.handshake().generation = 5
            peer.start(range(20))
            wait_until(lambda: source.withdrawn == 1)
            source.gate.set()
            assert peer.complete() == expected_regions(MIXED, range(20), 0, TILE)


def test_only_so_many_are_kept() -> None:
    source = Gated()
    with running(source, waiting=8, patience=Patience(most=2)) as producer:
        peers = []
        for number in range(4):
            peer = Peer(producer.url).handshake()
            peer.generation = 10 * number
            peer.start(range(number + 20))
            wait_until(lambda number=number: sum(producer.jobs) == number + 1)
            peers.append(peer)
        for peer in peers:
            kept = producer.transfers.kept
            peer.vanish()
            wait_until(lambda kept=kept: producer.transfers.kept == min(kept + 1, 2))
        source.gate.set()
        wait_until(lambda: len(producer.transfers) == 2)
        assert answer_to_resume(producer, peers[0]) == "transfer_expired"


def test_what_is_not_acknowledged_makes_room_where_nothing_else_does() -> None:
    """A window larger than the backlog: the handoff is never stuck, but cannot always resume."""
    source = Synthetic(WIDE, 32)
    patience = Patience(keep_s=3.0)
    with running(source, pool_bytes=1 << 20, patience=patience) as producer:
        lost = Peer(producer.url, WIDE).handshake()
        lost.start(range(600), credit=64)
        assert lost.reception is not None
        while lost.reception.received < 12:
            lost.step()
        assert producer.pool.peak <= (1 << 20) + 32 * 32 * 1024
        lost.vanish()
        wait_until(lambda: producer.transfers.kept == 1)
        # as if the first of its frames were still needed
        lost.reception.received = 1
        reason = ""
        with Peer(producer.url, WIDE) as peer:
            peer.handshake().resume(lost, 64)
            with pytest.raises(BatonError) as caught:
                peer.until(Sealed)
            reason = caught.value.reason
        assert reason == "offset_differs"
        assert producer.transfers.counts["offset_differs"] == 1
        assert producer.transfers.kept == 1, "another offset would be possible"
        wait_until(lambda: at_rest(producer), 10.0)


def test_a_lost_reader_of_a_shared_job_is_not_waited_for_long() -> None:
    """Two want the same rows; one is gone, and the other's handoff must not stand still for it."""
    patience = Patience(keep_s=600.0, in_the_way_s=0.3)
    gate = Gated(WIDE, 32)
    with running(gate, pool_bytes=1 << 20, patience=patience) as producer:
        lost, other = Peer(producer.url, WIDE).handshake(), Peer(producer.url, WIDE).handshake()
        lost.start(range(600))
        assert gate.reached.wait(5.0)
        other.generation = 5
        other.start(range(600))
        wait_until(lambda: len(producer.transfers) == 2)
        assert producer.jobs == (1, 0)
        lost.vanish()
        wait_until(lambda: producer.transfers.kept == 1)
        gate.gate.set()
        began = time.monotonic()
        assert other.complete() == expected_regions(WIDE, range(600), 0, 32)
        assert time.monotonic() - began < 10.0
        other.socket.close()


def test_one_that_waits_for_the_device_holds_nobody_up() -> None:
    source = Gated()
    patience = Patience(keep_s=600.0, in_the_way_s=0.2)
    with running(source, patience=patience) as producer, Peer(producer.url) as other:
        other.handshake().start(range(40))
        assert source.reached.wait(5.0)
        lost = Peer(producer.url).handshake()
        lost.generation = 1
        lost.start(TOKENS)
        wait_until(lambda: producer.jobs == (1, 1))
        lost.vanish()
        wait_until(lambda: producer.transfers.kept == 1)
        time.sleep(2.5)
        assert producer.transfers.kept == 1
        with Peer(producer.url) as peer:
            peer.handshake().resume(lost)
            source.gate.set()
            assert peer.complete() == expected_regions(MIXED, TOKENS, 0, TILE)


def test_what_was_acknowledged_cannot_be_asked_for_again() -> None:
    with running(Synthetic(MIXED, TILE)) as producer:
        lost = Peer(producer.url).handshake()
        lost.start(TOKENS, credit=4)
        assert lost.reception is not None
        while lost.reception.received < 20:
            lost.step()
        lost.vanish()
        wait_until(lambda: producer.transfers.kept == 1)
        arrived = lost.reception.received
        lost.reception.received = 1
        assert answer_to_resume(producer, lost) == "offset_differs"
        lost.reception.received = arrived
        assert producer.transfers.kept == 1


def test_where_only_the_seal_is_missing_no_row_is() -> None:
    """All frames arrived, and their rows made room for others."""
    with running(Synthetic(WIDE, 32), pool_bytes=1 << 20) as producer:
        lost = lost_after(producer, frames_of(600, WIDE, 32), WIDE, range(600))
        wait_until(lambda: producer.transfers.kept == 1)
        with Peer(producer.url, WIDE) as other:
            other.handshake().generation = 7
            assert other.fetch(range(300)) == expected_regions(WIDE, range(300), 0, 32)
        with Peer(producer.url, WIDE) as peer:
            peer.handshake().resume(lost)
            assert peer.complete() == expected_regions(WIDE, range(600), 0, 32)


def test_one_prefill_on_two_connections_is_served_once() -> None:
    source = Gated()
    with running(source) as producer:
        one, two = Peer(producer.url).handshake(), Peer(producer.url).handshake()
        sent: list[bytes] = []
        send = one.socket.send
        one.socket.send = lambda raw, **how: (sent.append(raw), send(raw, **how))[1]  # type: ignore[method-assign]
        one.start(TOKENS)
        assert source.reached.wait(5.0)
        two.socket.send(sent[0], text=True)
        answer = two.socket.recv(5.0)
        assert "generation_used" in str(answer)
        source.gate.set()
        assert one.complete() == expected_regions(MIXED, TOKENS, 0, TILE)
        one.socket.close()
        two.socket.close()
        wait_until(lambda: at_rest(producer))


def test_another_request_is_refused_by_name() -> None:
    with running(Synthetic(MIXED, TILE)) as producer:
        lost = lost_after(producer, 5)
        assert lost.reception is not None
        wait_until(lambda: producer.transfers.kept == 1)
        resume = lost.reception.resume(8)
        with Peer(producer.url) as peer:
            peer.handshake()
            peer.reception = lost.reception
            peer.machine.resume(lost.reception, time.monotonic(), 8)
            peer.machine.outgoing()
            foreign = structs.replace(resume, prefill=bytes(32))
            assert isinstance(foreign, Resume)
            peer.socket.send(messages.encode(foreign), text=True)
            with pytest.raises(BatonError) as caught:
                peer.until(Sealed)
            assert caught.value.reason == "resume_differs"
        assert producer.transfers.counts["resume_differs"] == 1
        assert producer.transfers.kept == 1, "somebody else's mistake ended it"


def test_what_the_producer_never_had() -> None:
    with running(Synthetic(MIXED, TILE)) as one, running(Synthetic(MIXED, TILE)) as other:
        lost = lost_after(one, 5)
        assert answer_to_resume(other, lost) == "transfer_unknown"
        assert other.transfers.counts["transfer_unknown"] == 1


def test_a_prefill_that_comes_after_its_resume_is_nobody_s() -> None:
    """It was under way while its decoder was told that there is none, and asked anew."""
    with running(Synthetic(MIXED, TILE)) as producer:
        late = Peer(producer.url).handshake()
        flush, late.flush = late.flush, lambda: None  # type: ignore[method-assign]
        late.start(TOKENS)
        assert late.reception is not None
        held = late.machine.outgoing()
        late.flush = flush  # type: ignore[method-assign]
        other = Peer(producer.url).handshake()
        other.machine.resume(late.reception, time.monotonic(), 8)
        other.flush()
        with pytest.raises(BatonError) as caught:
            other.until(Sealed)
        assert caught.value.reason == "transfer_unknown"
        for raw in held:
            late.socket.send(raw, text=True)
        late.socket.recv(5.0)
        assert producer.device.prefills == 0
        assert at_rest(producer)
        late.socket.close()
        other.socket.close()


def test_what_was_installed_is_not_sent_again() -> None:
    with running(Synthetic(MIXED, TILE)) as producer:
        with Peer(producer.url) as peer:
            peer.handshake().fetch(TOKENS)
            wait_until(lambda: at_rest(producer))
            lost = peer
        assert answer_to_resume(producer, lost) == "transfer_committed"


def sealed_and_lost(producer: Running) -> tuple[Peer, Sealed]:
    peer = Peer(producer.url).handshake()
    peer.start(TOKENS)
    sealed = peer.until(Sealed)
    assert isinstance(sealed, Sealed)
    peer.vanish()
    wait_until(lambda: producer.transfers.kept == 1)
    return peer, sealed


def test_committed_comes_by_another_connection_and_counts_once() -> None:
    with running(Synthetic(MIXED, TILE)) as producer:
        _, sealed = sealed_and_lost(producer)
        transfers = producer.transfers
        with Peer(producer.url) as peer:
            peer.handshake()
            peer.machine.acknowledge(sealed.seal)
            peer.flush()
            wait_until(lambda: at_rest(producer))
            peer.machine.acknowledge(sealed.seal)
            peer.flush()
            wait_until(lambda: transfers.counts["transfer_committed"] == 1)
            assert transfers.counts["committed_late"] == 1
            assert peer.fetch(range(20)) == expected_regions(MIXED, range(20), 0, TILE)


def test_a_forged_late_committed_ends_its_connection_and_nothing_else() -> None:
    with running(Synthetic(MIXED, TILE)) as producer:
        _, sealed = sealed_and_lost(producer)
        with Peer(producer.url) as peer:
            peer.handshake()
            peer.machine.acknowledge(structs.replace(sealed.seal, mac=bytes(32)))
            peer.flush()
            with pytest.raises((BatonError, Closed)):
                peer.until(Sealed)
        assert producer.transfers.kept == 1
        assert producer.transfers.counts["commit_differs"] == 1


def test_many_losses_leave_nothing_behind() -> None:
    with running(Synthetic(MIXED, TILE)) as producer:
        for number in range(12):
            lost = lost_after(producer, number % frames_of(100))
            for again in range(3):
                with Peer(producer.url) as peer:
                    peer.handshake().resume(lost)
                    if again == 2:
                        assert peer.complete() == expected_regions(MIXED, TOKENS, 0, TILE)
                        break
                    lost = peer.vanish()
            wait_until(lambda: at_rest(producer))
        wait_until(lambda: producer.connections == (0, 0))
        assert not [t for t in threading.enumerate() if t.name == "hash"]
        assert producer.transfers.counts["resumed"] >= 12
