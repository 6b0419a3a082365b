"""What two peers do when nothing goes wrong, over any layout and any range."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from protocol.errors import LocalProtocolError
from protocol.events import Began, Progressed, Ready, Sealed
from protocol.handoff import Outstanding, State, Timing
from protocol.layout import Layout, extra_cuts, payload_bytes
from protocol.pairing import Pairing
from tests import strategies
from tests.machines.joined import LAYOUT, PAIRING, TO_DECODER, TO_PRODUCER, Joined


def test_the_handshake_makes_both_sides_ready() -> None:
    pair = Joined().connect()
    assert pair.decoder.state is State.READY
    assert pair.producer.state is State.READY
    assert [type(event) for event in pair.events] == [Ready, Ready]
    assert pair.decoder.ack.recipe.tile == 4


def test_no_prompt_leaves_before_the_producer_has_proven_the_key() -> None:
    pair = Joined()
    pair.decoder.connect(pair.now)
    with pytest.raises(LocalProtocolError):
        pair.request()
    pair.flush()
    pair.deliver(TO_PRODUCER)
    pair.flush()
    pair.deliver(TO_DECODER)
    assert pair.decoder.state is State.PROOF_SENT
    with pytest.raises(LocalProtocolError):
        pair.request()


@pytest.mark.parametrize("held", [PAIRING, Pairing(bytes(32), PAIRING.epoch + 1)])
def test_a_decoder_may_hold_the_pairing_before_a_rotation_or_after_it(held: Pairing) -> None:
    newer = Pairing(bytes(32), PAIRING.epoch + 1)
    pair = Joined(pairings=(held, newer), earlier=PAIRING).connect()
    pair.handoff()
    assert pair.installed == [pair.expected()]
    assert pair.committed == [1]
    assert pair.producer.pairing == held


def test_a_pairing_before_the_last_one_is_refused() -> None:
    newer = Pairing(bytes(32), PAIRING.epoch + 2)
    between = Pairing(bytes(32), PAIRING.epoch + 1)
    pair = Joined(pairings=(PAIRING, newer), earlier=between)
    pair.decoder.connect(pair.now)
    pair.settle()
    assert {error.reason for error in pair.errors.values()} == {"epoch_differs"}


@settings(max_examples=60, deadline=None)
@given(
    layout=strategies.layouts(),
    ends=strategies.ranges(),
    tile=st.integers(1, 17),
    credit=st.integers(1, 9),
    seed=st.integers(0, 1000),
    wanted=st.sets(st.integers(0, 60), max_size=4),
)
def test_what_is_installed_is_what_was_produced(
    layout: Layout, ends: tuple[int, int], tile: int, credit: int, seed: int, wanted: set[int]
) -> None:
    cut, end = ends
    extra = extra_cuts(layout, cut, end, tile, wanted)
    pair = Joined(layout=layout, tile=tile).connect()
    pair.seed = seed
    pair.handoff(tokens=range(end), cut=cut, credit=credit, extra_cuts=extra)
    assert not pair.errors
    assert pair.installed == [pair.expected(end, cut, extra)]
    assert pair.committed == [1]
    began = next(event.begin for event in pair.events if isinstance(event, Began))
    assert [part.last for part in began.history] == [*extra, end]
    sealed = next(event for event in pair.events if isinstance(event, Sealed))
    assert sealed.seal.payload_bytes == payload_bytes(layout, cut, end, extra)
    assert (sealed.seal.queue_us, sealed.seal.compute_us) == (1, 2)


def test_handoffs_follow_one_another_on_a_connection() -> None:
    pair = Joined().connect()
    for generation in (1, 2, 5, 1000):
        pair.handoff(generation, tokens=range(generation % 7 + 1))
    assert pair.committed == [1, 2, 5, 1000]
    assert len(pair.installed) == 4
    assert len(pair.outstanding) == 0


def test_concurrent_connections_share_a_key_and_end_in_any_order() -> None:
    outstanding = Outstanding(nullcontext())
    pairs = [Joined(outstanding=outstanding, name=str(number)).connect() for number in range(3)]
    for generation, pair in zip((12, 11, 13), pairs, strict=True):
        pair.request(generation)
    assert len(outstanding) == 3
    for pair in reversed(pairs):
        pair.settle()
    assert [pair.committed for pair in pairs] == [[12], [11], [13]]


def test_the_seal_may_come_while_digests_are_still_computed() -> None:
    pair = Joined().connect()
    pair.late_digests = deque()
    pair.handoff()
    assert pair.decoder.state is State.SEALING
    assert pair.installed == []
    while pair.late_digests:
        assert pair.installed == []
        pair.report_digest()
    assert pair.installed == [pair.expected()]


def test_a_full_handoff_may_replace_a_delta_where_the_decoder_allows_it() -> None:
    pair = Joined().connect()
    pair.auto_begin = False
    pair.request(cut=4, or_full=True)
    pair.settle()
    pair.begin(cut=0)
    pair.settle()
    began = next(event for event in pair.events if isinstance(event, Began))
    assert began.begin.cut == 0
    assert pair.installed == [pair.expected(cut=0)]


def test_frames_wait_for_credit() -> None:
    pair = Joined().connect()
    pair.request(credit=1)
    pair.flush()
    pair.deliver(TO_PRODUCER)
    assert pair.send_frame()
    assert not pair.send_frame()
    assert pair.producer.remaining > 0
    pair.settle()
    assert pair.committed == [1]


def test_slots_may_be_taken_ahead_but_go_in_order() -> None:
    pair = Joined().connect()
    pair.request()
    pair.flush()
    pair.deliver(TO_PRODUCER)
    first, second = pair.producer.next_slot(), pair.producer.next_slot()
    assert first is not None
    assert second is not None
    with pytest.raises(LocalProtocolError):
        pair.frame(second)
    pair.flush()
    for slot in (first, second):
        pair._put(TO_DECODER, pair.frame(slot))
    pair.settle()
    assert pair.installed == [pair.expected()]


def test_progress_is_coalesced_and_reaches_the_shell() -> None:
    pair = Joined().connect()
    pair.auto_begin = False
    pair.request()
    pair.settle()
    for done in (1, 2, 3, 2):
        pair.producer.progress(done, pair.now)
    pair.producer.progress(9, pair.now)
    pair.settle()
    seen = [event.done for event in pair.events if isinstance(event, Progressed)]
    assert seen == [1, 9]


def test_a_quiet_producer_sends_signs_of_life() -> None:
    pair = Joined(timing=Timing(base_s=1000.0)).connect()
    pair.auto_begin = False
    pair.request()
    pair.settle()
    for _ in range(100):
        beat = pair.producer.deadline()
        assert beat is not None
        pair.now = max(pair.now, beat)
        pair.producer.tick(pair.now)
        pair.decoder.tick(pair.now)
        pair.settle()
    assert not pair.errors
    assert pair.now > 500
    pair.begin()
    pair.settle()
    assert pair.committed == [1]


def test_nothing_of_the_prompt_outlives_its_handoff() -> None:
    pair = Joined().connect()
    pair.handoff(tokens=[77] * 9)
    for machine in (pair.decoder, pair.producer):
        assert (77).to_bytes(4, "little") * 9 not in repr(vars(machine)).encode()
    assert pair.decoder._reception is None
    assert pair.producer.sending is None


def test_no_repr_shows_tokens_or_keys() -> None:
    pair = Joined().connect()
    pair.auto_begin = False
    pair.handoff(tokens=[0x41414141] * 9)
    shown = repr(pair.events) + repr(pair.producer.sending) + repr(pair.decoder._pairing)
    assert "AAAA" not in shown
    assert repr(bytes(range(32)))[2:-1] not in shown


def test_the_layout_used_here_has_all_three_kinds() -> None:
    assert [layer.kind for layer in LAYOUT.layers] == ["full", "sliding", "recurrent"]
