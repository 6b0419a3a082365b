"""How a handoff ends other than by its seal: aborts from either side, time, the connection."""

from __future__ import annotations

import pytest

from protocol.aborts import to_abort
from protocol.errors import (
    BatonError,
    Cancelled,
    CapacityError,
    EngineFault,
    LocalProtocolError,
    TransferError,
)
from protocol.events import PeerAborted, Released
from protocol.handoff import State, Timing
from protocol.messages import encode
from tests.machines.joined import TO_DECODER, TO_PRODUCER, Item, Joined

STAGES = ("requested", "streaming", "verified")


def staged(stage: str) -> Joined:
    """A handoff that has got as far as this."""
    pair = Joined().connect()
    pair.auto_begin = stage != "requested"
    pair.request(credit=2)
    pair.flush()
    pair.deliver(TO_PRODUCER)
    if stage == "streaming":
        pair.send_frame()
        pair.send_frame()
        pair.flush()
    if stage == "verified":
        pair.auto_commit = False
        pair.settle()
        assert pair.decoder.state is State.VERIFIED
    return pair


def require_fresh(pair: Joined, generation: int = 2) -> None:
    """Both sides are ready, nothing was installed or is open, and the next handoff works."""
    assert pair.installed == []
    assert (pair.decoder.state, pair.producer.state) == (State.READY, State.READY)
    assert len(pair.outstanding) == 0
    pair.auto_begin = pair.auto_commit = True
    pair.handoff(generation)
    assert pair.installed == [pair.expected()]
    assert pair.committed == [generation]


@pytest.mark.parametrize("stage", STAGES)
def test_the_decoder_withdraws(stage: str) -> None:
    pair = staged(stage)
    pair.decoder.abort(Cancelled("the client left"), pair.now)
    assert pair.decoder.state is State.ABORTING
    assert len(pair.outstanding) == 0
    pair.settle()
    assert not pair.errors
    aborted = next(event for event in pair.events if isinstance(event, PeerAborted))
    assert isinstance(aborted.error, Cancelled)
    assert Released(1) in pair.events
    require_fresh(pair)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (CapacityError("full", reason="queue_full", retry_after_s=7.5), "queue_full"),
        (CapacityError("no memory", reason="memory_exceeded"), "memory_exceeded"),
        (CapacityError("leaving", reason="producer_stopping"), "producer_stopping"),
        (CapacityError("other", reason="made_up_here"), "capacity_exceeded"),
        (EngineFault("xid 79", reason="cuda_error"), "peer_engine_fault"),
        (Cancelled("withdrawn"), "cancelled"),
        (TransferError("other", reason="made_up_here"), "peer_aborted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_producer_gives_up(stage: str, error: BatonError, arrives: str) -> None:
    pair = staged(stage)
    pair.producer.abort(error, pair.now)
    pair.settle()
    aborted = next(event for event in pair.events if isinstance(event, PeerAborted))
    assert aborted.error.reason == arrives
    assert not isinstance(aborted.error, EngineFault)
    if arrives == "queue_full":
        assert vars(aborted.error)["retry_after_s"] == 7.5
    require_fresh(pair)


@pytest.mark.parametrize("stage", STAGES)
def test_both_abort_at_once(stage: str) -> None:
    pair = staged(stage)
    pair.decoder.abort(Cancelled("the client left"), pair.now)
    pair.producer.abort(CapacityError("full"), pair.now)
    pair.settle()
    assert not pair.errors
    assert not any(isinstance(event, PeerAborted) for event in pair.events)
    require_fresh(pair)


def test_the_producer_promises_silence_only_after_release() -> None:
    pair = staged("streaming")
    released: list[float] = []
    pair.on_producer = lambda events: released.extend(  # type: ignore[method-assign]
        pair.now for event in events if isinstance(event, PeerAborted)
    )
    pair.decoder.abort(Cancelled("the client left"), pair.now)
    pair.settle()
    assert released
    assert pair.producer.state is State.RELEASING
    assert pair.decoder.state is State.ABORTING
    with pytest.raises(LocalProtocolError):
        pair.producer.next_slot()
    pair.producer.release(pair.now)
    pair.settle()
    assert pair.decoder.state is State.READY


def test_an_abort_that_meets_the_commit_changes_nothing() -> None:
    pair = Joined().connect()
    pair.request(credit=64)
    pair.settle_producer()
    while pair.wires[TO_DECODER]:
        pair.deliver(TO_DECODER)
    # COMMITTED is on its way while the producer loses patience.
    pair.flush()
    assert pair.installed == [pair.expected()]
    pair.producer.abort(TransferError("no answer", reason="peer_silent"), pair.now)
    pair.request(2, credit=64)
    pair.settle()
    assert not pair.errors
    assert pair.committed == [1, 2]
    assert len(pair.installed) == 2
    assert (pair.decoder.state, pair.producer.state) == (State.READY, State.READY)


def test_the_same_late_abort_is_answered_once() -> None:
    pair = Joined().connect()
    pair.handoff()
    for _ in range(2):
        pair.wires[TO_DECODER].append(abort_of(1))
    pair.deliver(TO_DECODER)
    assert not pair.errors
    pair.deliver(TO_DECODER)
    assert pair.errors[TO_DECODER].reason == "message_unexpected"


def test_an_abort_of_another_handoff_is_refused() -> None:
    pair = staged("requested")
    pair.wires[TO_DECODER].append(abort_of(3))
    pair.deliver(TO_DECODER)
    assert pair.errors[TO_DECODER].reason == "generation_differs"


def abort_of(generation: int) -> Item:
    return Item(encode(to_abort(Cancelled("x"), generation)))


def test_frames_under_way_are_dropped_but_counted_while_aborting() -> None:
    pair = staged("streaming")
    pair.decoder.abort(Cancelled("the client left"), pair.now)
    frames = [item for item in pair.wires[TO_DECODER] if item.text is None]
    assert len(frames) == 2
    for _ in range(3):
        pair.deliver(TO_DECODER)
    assert not pair.errors
    pair.wires[TO_DECODER].append(frames[0])
    pair.deliver(TO_DECODER)
    assert pair.errors[TO_DECODER].reason == "credit_exceeded"


def test_late_digests_of_an_aborted_handoff_are_ignored() -> None:
    pair = staged("streaming")
    pair.deliver(TO_DECODER)
    slot = pair.decoder.frame_header(pair.wires[TO_DECODER][0].header, 8 * 2, pair.now)
    assert slot is not None
    pair.wires[TO_DECODER].popleft()
    pair.decoder.abort(Cancelled("the client left"), pair.now)
    assert pair.decoder.frame_digest(slot.sequence, bytes(32), pair.now) == []
    pair.settle()
    require_fresh(pair)


@pytest.mark.parametrize("reason", ["producer_stopping", "cancelled"])
def test_the_producer_shuts_the_connection(reason: str) -> None:
    pair = staged("streaming")
    kind = CapacityError if reason == "producer_stopping" else Cancelled
    pair.producer.shut(kind("leaving", reason=reason))
    pair.settle()
    assert pair.producer.state is State.CLOSED
    assert pair.decoder.state is State.CLOSED
    assert pair.errors[TO_DECODER].reason == reason
    assert len(pair.outstanding) == 0


def test_a_closed_machine_accepts_and_says_nothing_more() -> None:
    pair = staged("streaming")
    pair.decoder.shut(Cancelled("leaving"))
    assert len(pair.decoder.outgoing()) == 1
    pair.decoder.shut(Cancelled("again"))
    assert pair.decoder.outgoing() == []
    assert pair.decoder.tick(pair.now + 1e9) == []
    pair.decoder.eof(pair.now)
    for item in list(pair.wires[TO_DECODER]):
        with pytest.raises(LocalProtocolError):
            pair.give(TO_DECODER, item)


@pytest.mark.parametrize("stage", [*STAGES, "handshake"])
def test_the_end_of_the_connection_is_never_completion(stage: str) -> None:
    if stage == "handshake":
        pair = Joined()
        pair.decoder.connect(pair.now)
        pair.flush()
        pair.deliver(TO_PRODUCER)
    else:
        pair = staged(stage)
    for machine in (pair.decoder, pair.producer):
        with pytest.raises(TransferError) as caught:
            machine.eof(pair.now)
        assert caught.value.reason == "connection_lost"
        assert machine.outgoing() == []
    assert pair.installed == []
    if pair.reception is not None and stage != "verified":
        # It could go on over another connection, until its shell gives it up.
        assert len(pair.outstanding) == 1
        pair.reception.withdraw()
    assert len(pair.outstanding) == 0


def test_an_idle_connection_may_end_and_waits_for_ever() -> None:
    pair = Joined().connect()
    assert pair.decoder.deadline() is None
    assert pair.producer.deadline() is None
    pair.expire()
    assert not pair.errors
    pair.decoder.eof(pair.now)
    pair.producer.eof(pair.now)


# deadlines: (what the machine waits for, which field of Timing says how long)

TIMING = Timing(
    handshake_s=1.0,
    idle_s=2.0,
    abort_s=3.0,
    commit_s=4.0,
    heartbeat_s=0.5,
    base_s=50.0,
    per_token_s=0.25,
)


def require_waits(pair: Joined, direction: str, seconds: float, reason: str) -> None:
    """The machine is patient for exactly this long from now."""
    machine = pair.decoder if direction == TO_DECODER else pair.producer
    machine.tick(pair.now + seconds - 0.001)
    with pytest.raises(TransferError) as caught:
        machine.tick(pair.now + seconds)
    assert caught.value.reason == reason
    assert machine.state is State.CLOSED
    assert len(machine.outgoing()) == 1


def timed() -> Joined:
    return Joined(timing=TIMING)


def test_a_producer_waits_for_hello_and_proof() -> None:
    require_waits(timed(), TO_PRODUCER, 1.0, "peer_silent")
    pair = timed()
    pair.decoder.connect(pair.now)
    pair.now += 0.9
    pair.flush()
    pair.deliver(TO_PRODUCER)
    require_waits(pair, TO_PRODUCER, 1.0, "peer_silent")


def test_a_decoder_waits_for_the_handshake() -> None:
    pair = timed()
    pair.decoder.connect(pair.now)
    assert pair.decoder.deadline() == pair.now + 1.0
    require_waits(pair, TO_DECODER, 1.0, "peer_silent")


def test_a_decoder_waits_for_signs_of_life() -> None:
    pair = timed().connect()
    pair.request()
    require_waits(pair, TO_DECODER, 2.0, "peer_silent")
    assert len(pair.outstanding) == 0


def test_each_frame_is_a_sign_of_life() -> None:
    pair = timed().connect()
    pair.request(credit=64)
    pair.settle_producer()
    for _ in range(4):
        pair.now += 1.9
        pair.decoder.tick(pair.now)
        pair.deliver(TO_DECODER)
    require_waits(pair, TO_DECODER, 2.0, "peer_silent")


def test_a_decoder_waits_for_aborted() -> None:
    pair = timed().connect()
    pair.request()
    pair.decoder.abort(Cancelled("left"), pair.now)
    require_waits(pair, TO_DECODER, 3.0, "peer_silent")


def test_a_producer_waits_for_credit_once_it_has_none() -> None:
    pair = timed().connect()
    pair.request(credit=2)
    pair.flush()
    pair.deliver(TO_PRODUCER)
    pair.send_frame()
    assert pair.producer._idle_at is None
    pair.now += 1.0
    pair.send_frame()
    require_waits(pair, TO_PRODUCER, 2.0, "peer_silent")


def test_a_producer_with_credit_computes_as_long_as_the_deadline_allows() -> None:
    pair = timed().connect()
    pair.request(credit=2)
    pair.flush()
    pair.deliver(TO_PRODUCER)
    require_waits(pair, TO_PRODUCER, 50.0 + 9 * 0.25, "deadline_exceeded")


def test_a_producer_keeps_the_shorter_deadline_of_the_request() -> None:
    pair = timed().connect()
    pair.request(deadline_s=5.0)
    pair.flush()
    pair.deliver(TO_PRODUCER)
    require_waits(pair, TO_PRODUCER, 5.0, "deadline_exceeded")


def test_a_producer_waits_for_committed() -> None:
    pair = timed().connect()
    pair.request(credit=64)
    pair.settle_producer()
    assert pair.producer.state is State.SEALED
    require_waits(pair, TO_PRODUCER, 4.0, "peer_silent")


def test_the_total_deadline_grows_with_depth() -> None:
    assert Timing().total_s(0) == 120.0
    assert Timing().total_s(65_536) > 3_000.0
    pair = timed().connect()
    pair.request(tokens=range(400))
    pair.settle_producer()
    for _ in range(1000):
        pair.now += 0.9
        pair.wires[TO_DECODER].clear()
        if pair.now >= 100.0 + 50.0 + 400 * 0.25:
            break
        pair.decoder._rearm(pair.now)
        pair.decoder.tick(pair.now)
    with pytest.raises(TransferError) as caught:
        pair.decoder.tick(pair.now)
    assert caught.value.reason == "deadline_exceeded"


def test_nothing_hurries_the_install() -> None:
    pair = staged("verified")
    assert pair.decoder.deadline() is None


# misuse by our own shell changes nothing


def test_misuse_is_told_apart_and_changes_nothing() -> None:
    pair = Joined().connect()
    with pytest.raises(LocalProtocolError):
        pair.decoder.connect(pair.now)
    with pytest.raises(LocalProtocolError):
        pair.decoder.commit(pair.now)
    with pytest.raises(LocalProtocolError):
        pair.producer.next_slot()
    with pytest.raises(LocalProtocolError):
        pair.producer.release(pair.now)
    for wrong in (
        {"cut": 9},
        {"extra_cuts": (0,)},
        {"credit": 0},
        {"deadline_s": 0.0},
        {"deadline_s": float("inf")},
        {"tokens": [1 << 32]},
        {"tokens": [-1]},
        {"tokens": []},
    ):
        with pytest.raises(LocalProtocolError):
            pair.request(**wrong)  # type: ignore[arg-type]
    with pytest.raises(CapacityError) as caught:
        pair.request(tokens=range(4097))
    assert caught.value.reason == "prompt_too_long"
    assert pair.decoder.outgoing() == []
    require_fresh(pair, 5)
    for used in (5, 3):
        with pytest.raises(LocalProtocolError):
            pair.request(used)


def test_nothing_is_known_of_the_producer_before_the_handshake() -> None:
    with pytest.raises(LocalProtocolError):
        _ = Joined().decoder.ack


def test_a_producer_cannot_misuse_its_machine_either() -> None:
    pair = Joined().connect()
    pair.auto_begin = False
    pair.request(cut=3)
    pair.settle()
    producer = pair.producer
    for wrong in ({"cut": 4}, {"cut": -1}, {"computed_tokens": 10}, {"transfer": bytes(15)}):
        options = {"transfer": bytes(16), "computed_tokens": 0, **wrong}
        with pytest.raises(LocalProtocolError):
            producer.begin(now=pair.now, **options)  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError):
        producer.progress(10, pair.now)
    pair.begin()
    with pytest.raises(LocalProtocolError):
        producer.seal(queue_us=0, compute_us=0, now=pair.now)
    slot = producer.next_slot()
    assert slot is not None
    with pytest.raises(LocalProtocolError):
        producer.frame(slot, bytes(31), pair.now)
    pair._put(TO_DECODER, pair.frame(slot))
    with pytest.raises(LocalProtocolError):
        producer.frame(slot, bytes(32), pair.now)
    pair.wires[TO_DECODER].clear()


def test_digests_are_reported_in_order_and_once() -> None:
    pair = staged("streaming")
    pair.deliver(TO_DECODER)
    item = pair.wires[TO_DECODER].popleft()
    slot = pair.decoder.frame_header(item.header, len(item.payload), pair.now)
    assert slot is not None
    with pytest.raises(LocalProtocolError):
        pair.decoder.frame_digest(slot.sequence + 1, bytes(32), pair.now)
    pair.decoder.frame_digest(slot.sequence, item.header[48:], pair.now)
    with pytest.raises(LocalProtocolError):
        pair.decoder.frame_digest(slot.sequence, item.header[48:], pair.now)
    assert pair.decoder.state is State.RECEIVING
