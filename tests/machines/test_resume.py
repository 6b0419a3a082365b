"""A handoff whose connection was lost goes on over another, and is installed once."""

from __future__ import annotations

import pytest
from msgspec import structs

from protocol import messages
from protocol.errors import BatonError, LocalProtocolError, PeerProtocolError, TransferError
from protocol.events import Committed, Late, PeerAborted, Sealed
from protocol.handoff import Sending, State
from protocol.layout import schedule
from protocol.messages import NO_TRANSFER, Resume
from protocol.seal import make_committed
from tests.machines.joined import (
    LAYOUT,
    PAIRING,
    TILE,
    TO_DECODER,
    TO_PRODUCER,
    Item,
    Joined,
)

FRAMES = sum(1 for _ in schedule(LAYOUT, 0, 9, TILE))


def until_frame(count: int, credit: int = 64) -> Joined:
    """A handoff of which ``count`` frames have arrived."""
    pair = Joined(name="first").connect()
    pair.request(credit=credit)
    pair.flush()
    pair.deliver(TO_PRODUCER)
    for _ in range(count):
        assert pair.send_frame()
    pair.flush()
    while pair.wires[TO_DECODER]:
        pair.deliver(TO_DECODER)
    return pair


def resumed(pair: Joined, name: str = "second", credit: int = 64) -> Joined:
    other = pair.again(name)
    assert other.reception is not None
    other.decoder.resume(other.reception, other.now, credit)
    return other


def frames_sent(pair: Joined) -> int:
    return sum(item.text is None for item in pair.record[TO_DECODER])


@pytest.mark.parametrize("arrived", range(FRAMES + 1))
def test_a_handoff_goes_on_where_it_was_lost(arrived: int) -> None:
    pair = until_frame(arrived)
    pair.lose()
    other = resumed(pair)
    other.settle()
    assert other.installed == [other.expected()]
    assert other.committed == [1]
    assert frames_sent(other) == FRAMES - arrived
    assert len(other.outstanding) == 0
    # and the connection is as good as any
    other.handoff(2)
    assert other.committed == [1, 2]


def test_what_was_on_its_way_is_sent_again() -> None:
    pair = until_frame(2)
    for _ in range(3):
        assert pair.send_frame()
    pair.lose()
    other = resumed(pair)
    other.settle()
    assert other.installed == [other.expected()]
    assert frames_sent(other) == FRAMES - 2


def test_a_frame_that_came_in_half_is_sent_again() -> None:
    pair = until_frame(2)
    assert pair.send_frame()
    half = pair.wires[TO_DECODER].popleft()
    assert pair.decoder.frame_header(half.header, len(half.payload), pair.now) is not None
    pair.lose()
    assert pair.reception is not None
    pair.reception.forget_last(LAYOUT)
    other = resumed(pair)
    other.settle()
    assert other.installed == [other.expected()]
    assert frames_sent(other) == FRAMES - 2


def test_twice_lost() -> None:
    pair = until_frame(1)
    pair.lose()
    other = resumed(pair)
    other.flush()
    other.deliver(TO_PRODUCER)
    for _ in range(2):
        assert other.send_frame()
    while other.wires[TO_DECODER]:
        other.deliver(TO_DECODER)
    other.lose()
    third = resumed(other, "third")
    third.settle()
    assert third.installed == [third.expected()]
    assert frames_sent(third) == FRAMES - 3


def test_lost_before_begin() -> None:
    pair = Joined(name="first").connect()
    pair.auto_begin = False
    pair.request()
    pair.settle()
    pair.lose()
    other = resumed(pair)
    other.settle()
    assert other.installed == [other.expected()]


def test_lost_with_begin_on_its_way() -> None:
    """The same BEGIN comes again: its transfer's name is bound by the seal."""
    pair = Joined(name="first").connect()
    pair.request()
    pair.flush()
    pair.deliver(TO_PRODUCER)
    pair.flush()
    begin = pair.wires[TO_DECODER][-1]
    pair.lose()
    other = resumed(pair)
    other.settle()
    assert begin in other.record[TO_DECODER]
    assert other.installed == [other.expected()]


def test_lost_with_the_seal_on_its_way() -> None:
    pair = until_frame(FRAMES)
    pair.producer.seal(queue_us=1, compute_us=2, now=pair.now)
    pair.flush()
    seal = pair.wires[TO_DECODER][-1]
    pair.lose()
    other = resumed(pair)
    other.settle()
    assert other.record[TO_DECODER][-1] == seal
    assert frames_sent(other) == 0
    assert other.installed == [other.expected()]
    assert other.committed == [1]


def sealed_and_lost() -> tuple[Joined, Sealed]:
    """Installed by the decoder, whose COMMITTED never left."""
    pair = until_frame(FRAMES)
    pair.auto_commit = False
    pair.settle()
    sealed = next(event for event in pair.events if isinstance(event, Sealed))
    pair.lose()
    return pair, sealed


def test_what_was_installed_is_acknowledged_over_another_connection() -> None:
    pair, sealed = sealed_and_lost()
    other = pair.again("second")
    other.decoder.acknowledge(sealed.seal)
    other.settle()
    assert other.committed == [1]
    assert other.decoder.state is other.producer.state is State.READY


def test_what_was_acknowledged_twice_counts_once() -> None:
    pair, sealed = sealed_and_lost()
    other = pair.again("second")
    for _ in range(2):
        other.decoder.acknowledge(sealed.seal)
    other.settle()
    assert other.committed == [1]
    assert sum(isinstance(event, Late) for event in other.events) == 2


def test_a_forged_acknowledgement_is_refused() -> None:
    pair, sealed = sealed_and_lost()
    forged = structs.replace(make_committed(PAIRING, sealed.seal), mac=bytes(32))
    assert pair.kept is not None
    with pytest.raises(BatonError) as caught:
        pair.kept.require_committed(PAIRING, forged)
    assert caught.value.reason == "commit_differs"


def test_a_sealed_handoff_cannot_be_resumed_and_installed_again() -> None:
    """The decoder used its generation up when it verified the seal."""
    pair, _ = sealed_and_lost()
    other = resumed(pair)
    other.settle()
    assert other.installed == []
    assert other.errors[TO_DECODER].reason == "generation_used"


def refused(change: dict[str, object], kept_from: int = 0, *, kept: bool = True) -> BatonError:
    """What a producer says to a RESUME after four frames, of which two arrived."""
    pair = until_frame(2)
    for _ in range(2):
        assert pair.send_frame()
    pair.lose()
    other = pair.again("second")
    if not kept:
        other.kept = None
    other.kept_from = kept_from
    assert other.reception is not None
    other.decoder.resume(other.reception, other.now, 64)
    (raw,) = other.decoder.outgoing()
    resume = messages.decode(raw)
    assert isinstance(resume, Resume)
    other.wires[TO_PRODUCER].append(Item(messages.encode(structs.replace(resume, **change))))
    other.settle()
    (aborted,) = [event for event in other.events if isinstance(event, PeerAborted)]
    assert other.decoder.state is other.producer.state is State.READY
    assert len(other.outstanding) == 0
    other.handoff(2)
    assert other.committed == [2]
    return aborted.error


@pytest.mark.parametrize(
    ("change", "kept_from", "reason"),
    [
        ({"prefill": bytes(32)}, 0, "resume_differs"),
        ({"transfer": bytes(range(16))}, 0, "resume_differs"),
        ({"next": 5}, 0, "offset_differs"),
        ({"transfer": NO_TRANSFER, "next": 1}, 0, "offset_differs"),
        ({}, 3, "offset_differs"),
    ],
)
def test_a_wrong_resume_gets_a_typed_answer(
    change: dict[str, object], kept_from: int, reason: str
) -> None:
    error = refused(change, kept_from)
    assert error.reason == reason
    assert isinstance(error, PeerProtocolError | TransferError)


def test_the_answer_to_a_wrong_offset_has_the_right_ones() -> None:
    assert refused({"next": 5}, 1).expected == "1 to 4"


def test_nothing_kept_is_said_so() -> None:
    assert refused({}, kept=False).reason == "transfer_unknown"


def test_another_request_with_the_same_generation_is_another_request() -> None:
    pair = until_frame(1)
    pair.lose()
    assert pair.kept is not None
    assert pair.reception is not None
    ours = pair.reception.resume(8)
    other = Joined(name="other").connect()
    other.request(tokens=range(20, 29))
    other.settle_producer()
    assert other.producer.sending is not None
    with pytest.raises(BatonError) as caught:
        other.producer.sending.require_resumable(ours, 0)
    assert caught.value.reason == "resume_differs"


def test_credit_says_what_need_not_be_kept() -> None:
    pair = until_frame(4, credit=4)
    pair.flush()
    while pair.wires[TO_PRODUCER]:
        pair.deliver(TO_PRODUCER)
    assert pair.producer.acknowledged == 4
    pair.lose()
    other = resumed(pair, credit=8)
    other.flush()
    other.deliver(TO_PRODUCER)
    assert other.producer.acknowledged == 4


def test_credit_for_frames_that_were_not_sent_is_refused() -> None:
    pair = until_frame(1, credit=8)
    pair.wires[TO_PRODUCER].append(Item(messages.encode(messages.Credit(1, 2))))
    pair.deliver(TO_PRODUCER)
    assert pair.errors[TO_PRODUCER].reason == "credit_invalid"


def test_a_resumption_may_be_withdrawn() -> None:
    pair = until_frame(2)
    pair.lose()
    other = resumed(pair)
    other.decoder.abort(TransferError("withdrawn", reason="cancelled"), other.now)
    other.settle()
    assert other.installed == []
    assert other.decoder.state is other.producer.state is State.READY
    assert len(other.outstanding) == 0


def test_a_lost_handoff_that_nobody_resumes_is_used_up() -> None:
    pair = until_frame(2)
    pair.lose()
    assert pair.reception is not None
    pair.reception.withdraw()
    assert len(pair.outstanding) == 0
    with pytest.raises(BatonError) as caught:
        pair.outstanding.check(1, pair.reception.prefill.nonce)
    assert caught.value.reason == "generation_used"


def test_digests_must_be_told_first() -> None:
    pair = until_frame(0)
    assert pair.send_frame()
    frame = pair.wires[TO_DECODER].popleft()
    pair.decoder.frame_header(frame.header, len(frame.payload), pair.now)
    pair.lose()
    assert pair.reception is not None
    with pytest.raises(LocalProtocolError):
        pair.reception.resume(8)


def test_a_resumed_deadline_does_not_start_anew() -> None:
    pair = until_frame(1)
    pair.now += 100.0
    pair.lose()
    other = resumed(pair, credit=1)
    other.settle_producer()
    other.expire_after(21.0)
    assert other.errors[TO_DECODER].reason == "deadline_exceeded"
    assert other.errors[TO_PRODUCER].reason == "deadline_exceeded"


def test_a_committed_event_is_authenticated() -> None:
    pair = until_frame(0)
    pair.settle()
    assert [event for event in pair.events if isinstance(event, Committed)] == [Committed(1)]


def test_a_sending_leaves_out_no_frame() -> None:
    sending = Sending(until_frame(0).producer._current.prefill, b"raw", 1.0)
    sending.add(0, bytes(32), 1)
    sending.add(0, bytes(32), 1)
    with pytest.raises(LocalProtocolError):
        sending.add(2, bytes(32), 1)
    assert sending.framed == 1
