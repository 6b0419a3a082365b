"""Hypothesis walks both machines through anything their shells and their link may do.

Two rules never bend: what is installed is exactly what was produced for that request, and
a shell that asks only what the tables allow is never told that it misused its machine.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext

import hypothesis.strategies as st
from hypothesis import event, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol.errors import BatonError, Cancelled, CapacityError
from protocol.events import Event, PeerAborted, Requested, Sealed
from protocol.handoff import Outstanding, Reception, State
from protocol.messages import Seal
from protocol.reasons import REASONS
from protocol.states import DECODER, PRODUCER
from tests.machines.joined import TO_DECODER, TO_PRODUCER, Item, Joined, content
from tests.ordinary import examples

wires = st.sampled_from((TO_DECODER, TO_PRODUCER))


class Walk(RuleBasedStateMachine):
    """One decoder that reconnects whenever a connection was lost or refused."""

    def __init__(self) -> None:
        super().__init__()
        self.outstanding = Outstanding(nullcontext())
        self.generation = 0
        self.connections = 0
        self.asked: dict[int, tuple[int, int]] = {}
        self.sealed: Sealed | None = None
        self.must_release: set[str] = set()
        self.corrupted: set[int] = set()
        self.installs = 0
        self.reconnect()

    def reconnect(self) -> None:
        self.connections += 1
        self.pair = pair = Joined(outstanding=self.outstanding, name=str(self.connections))
        pair.late_digests = deque()
        pair.seed = self.connections
        self.unfinished: Reception | None = None
        self.owed: Seal | None = None
        pair.on_decoder = self.on_decoder  # type: ignore[method-assign]
        pair.on_producer = self.on_producer  # type: ignore[method-assign]
        self.requested = False
        self.sealed = None
        self.must_release.clear()
        pair.decoder.connect(pair.now)
        pair.flush()

    def on_decoder(self, events: list[Event]) -> None:
        for told in events:
            if isinstance(told, Sealed):
                self.sealed = told
            elif isinstance(told, PeerAborted):
                self.must_release.add(TO_DECODER)
            else:
                Joined.on_decoder(self.pair, [told])

    def on_producer(self, events: list[Event]) -> None:
        for told in events:
            if isinstance(told, PeerAborted):
                self.must_release.add(TO_PRODUCER)
            elif isinstance(told, Requested):
                self.requested = True
            else:
                Joined.on_producer(self.pair, [told])

    def may(self, side: str, trigger: str) -> bool:
        machine, table = (
            (self.pair.decoder, DECODER) if side == TO_DECODER else (self.pair.producer, PRODUCER)
        )
        return (machine.state, trigger) in table

    # the decoder's shell

    @precondition(lambda self: self.may(TO_DECODER, "start"))
    @rule(end=st.integers(1, 12), data=st.data(), credit=st.integers(1, 5))
    def ask(self, end: int, data: st.DataObject, credit: int) -> None:
        self.give_up_what_was_lost()
        cut = data.draw(st.integers(0, end - 1))
        or_full = data.draw(st.booleans())
        self.generation += data.draw(st.integers(1, 3))
        self.asked[self.generation] = (cut, end)
        self.pair.request(
            self.generation, tokens=range(end), cut=cut, credit=credit, or_full=or_full
        )

    def give_up_what_was_lost(self) -> None:
        if self.unfinished is not None:
            self.unfinished.withdraw()
            self.unfinished = None

    @precondition(lambda self: self.unfinished and self.may(TO_DECODER, "resume"))
    @rule(credit=st.integers(1, 5))
    def go_on(self, credit: int) -> None:
        assert self.unfinished is not None
        event("resumed")
        self.pair.decoder.resume(self.unfinished, self.pair.now, credit)
        self.unfinished = None

    @precondition(lambda self: self.owed and self.may(TO_DECODER, "acknowledge"))
    @rule()
    def acknowledge(self) -> None:
        assert self.owed is not None
        event("acknowledged late")
        self.pair.decoder.acknowledge(self.owed)
        self.owed = None

    @precondition(lambda self: self.pair.late_digests)
    @rule()
    def finish_a_digest(self) -> None:
        if self.pair.decoder.state in (State.RECEIVING, State.SEALING):
            self.pair.attempt(TO_DECODER, self.pair.report_digest)
        else:
            self.pair.late_digests.clear()  # type: ignore[union-attr]

    @precondition(lambda self: self.sealed and self.may(TO_DECODER, "commit"))
    @rule()
    def install(self) -> None:
        self.take_over()
        self.pair.decoder.commit(self.pair.now)

    def take_over(self) -> None:
        assert self.sealed is not None
        begin = self.sealed.begin
        cut, end = self.asked[begin.generation]
        assert begin.generation == self.generation
        assert begin.cut <= cut
        assert begin.end == end
        found = {key: bytes(data) for key, data in self.pair.shadow.items()}
        assert found == content(self.pair.layout, begin.cut, end, self.pair.seed)
        assert begin.generation not in self.corrupted
        self.installs += 1
        event("installed")
        self.sealed = None

    @precondition(lambda self: self.may(TO_DECODER, "abort"))
    @rule()
    def withdraw(self) -> None:
        self.sealed = None
        self.pair.decoder.abort(Cancelled("the client left"), self.pair.now)

    # the producer's shell

    @precondition(lambda self: self.requested and self.may(TO_PRODUCER, "begin"))
    @rule(full=st.booleans())
    def begin(self, full: bool) -> None:
        self.requested = False
        self.pair.begin(cut=0 if full else None)

    @precondition(lambda self: self.may(TO_PRODUCER, "frame"))
    @rule(count=st.integers(1, 6))
    def send(self, count: int) -> None:
        for _ in range(count):
            self.pair.send_frame()

    @precondition(lambda self: self.may(TO_PRODUCER, "seal") and not self.pair.producer.remaining)
    @rule()
    def seal(self) -> None:
        self.pair.producer.seal(queue_us=0, compute_us=0, now=self.pair.now)

    @precondition(lambda self: self.may(TO_PRODUCER, "progress"))
    @rule(done=st.integers(0, 12))
    def progress(self, done: int) -> None:
        sending = self.pair.producer.sending
        assert sending is not None
        self.pair.producer.progress(min(done, sending.end), self.pair.now)

    @precondition(lambda self: self.may(TO_PRODUCER, "abort"))
    @rule()
    def give_up(self) -> None:
        self.pair.producer.abort(CapacityError("no memory"), self.pair.now)

    @precondition(lambda self: self.must_release)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        side = data.draw(st.sampled_from(sorted(self.must_release)))
        self.must_release.discard(side)
        machine = self.pair.decoder if side == TO_DECODER else self.pair.producer
        if side == TO_DECODER:
            self.sealed = None
            self.pair.late_digests.clear()  # type: ignore[union-attr]
        if machine.state is State.RELEASING:
            machine.release(self.pair.now)

    # the link and the clock

    @rule(direction=wires, count=st.integers(1, 8))
    def deliver(self, direction: str, count: int) -> None:
        self.pair.flush()
        for _ in range(min(count, len(self.pair.wires[direction]))):
            self.pair.deliver(direction)

    @precondition(lambda self: any(self.pair.wires.values()))
    @rule(data=st.data(), direction=wires)
    def corrupt(self, data: st.DataObject, direction: str) -> None:
        """Flip a bit, repeat, drop or delay something that is under way."""
        wire = self.pair.wires[direction]
        if not wire:
            return
        place = data.draw(st.integers(0, len(wire) - 1))
        kind = data.draw(st.sampled_from(("flip", "repeat", "drop", "delay")))
        item = wire[place]
        if item.text is not None and item.text.startswith((b'{"type":"pr', b'{"type":"cr')):
            return  # PROGRESS and CREDIT are not authenticated; PREFILL and PROOF: test_tampering
        match kind:
            case "flip":
                raw = bytearray(item.raw)
                raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
                wire[place] = item.changed(bytes(raw))
            case "repeat":
                wire.insert(place, item)
            case "drop":
                del wire[place]
            case "delay":
                del wire[place]
                wire.append(item)
        overtaken = kind == "delay" and wire[place].text is None and wire[place] is not item
        if item.text is None and (kind != "delay" or overtaken):
            self.corrupted.add(int.from_bytes(item.header[24:32], "big"))

    @rule(seconds=st.sampled_from((0.1, 3.0, 6.0, 29.0, 61.0)))
    def wait(self, seconds: float) -> None:
        self.pair.expire_after(seconds)

    @rule()
    def lose_the_connection(self) -> None:
        old = self.pair
        under_way = old.decoder.state in (
            State.RESUMING,
            State.REQUESTED,
            State.RECEIVING,
            State.SEALING,
        )
        unfinished = (old.decoder._reception if under_way else None) or self.unfinished
        owed = None
        if self.sealed is not None:
            owed = self.sealed.seal
            self.take_over()
        kept = old.producer.sending or old.kept
        old.lose()
        waiting, requested = list(old.late_digests or ()), self.requested
        self.reconnect()
        self.pair.kept, self.pair.seed = kept, old.seed
        self.pair.shadow, self.pair._produced = old.shadow, old._produced
        self.owed = owed
        self.requested = requested and kept is not None and kept.begin is None
        if unfinished is not None:
            self.unfinished = unfinished
            self.corrupted.discard(unfinished.generation)
            try:
                for sequence, digest in waiting:
                    unfinished.digested(sequence, digest)
            except BatonError:
                self.give_up_what_was_lost()

    @precondition(lambda self: State.CLOSED in (self.pair.decoder.state, self.pair.producer.state))
    @rule()
    def connect_again(self) -> None:
        self.pair.decoder.shut(Cancelled("reconnecting"))
        self.give_up_what_was_lost()
        self.reconnect()

    @rule(rounds=st.integers(1, 12))
    def cooperate(self, rounds: int) -> None:
        """Both shells and the link do their work for a while, so that walks get somewhere."""
        for _ in range(rounds):
            if self.unfinished and self.may(TO_DECODER, "resume"):
                self.go_on(credit=4)
            if self.requested and self.may(TO_PRODUCER, "begin"):
                self.begin(full=False)
            if self.may(TO_PRODUCER, "frame"):
                self.send(count=2)
                if not self.pair.producer.remaining:
                    self.seal()
            self.deliver(TO_DECODER, count=3)
            self.deliver(TO_PRODUCER, count=3)
            if self.pair.late_digests:
                self.finish_a_digest()
            if self.sealed and self.may(TO_DECODER, "commit"):
                self.install()

    # what holds after every step

    @invariant()
    def refusals_have_listed_reasons(self) -> None:
        assert all(error.reason in REASONS for error in self.pair.errors.values())

    @invariant()
    def memory_is_bounded(self) -> None:
        decoder, producer = self.pair.decoder, self.pair.producer
        assert len(self.outstanding) <= 1
        assert decoder._reception is None or decoder._reception.pending <= 5
        assert len(producer._taken) <= 5
        assert len(decoder._queue) <= 64
        assert len(producer._queue) <= 64

    @invariant()
    def who_waits_has_a_deadline(self) -> None:
        for machine in (self.pair.decoder, self.pair.producer):
            own_turn = (
                State.READY,
                State.CLOSED,
                State.RELEASING,
                State.VERIFIED,
            )
            assert machine.state in own_turn or machine.deadline() is not None

    def teardown(self) -> None:
        """Whatever happened, the next request on a new connection is fine."""
        self.pair.decoder.shut(Cancelled("reconnecting"))
        self.give_up_what_was_lost()
        pair = Joined(outstanding=self.outstanding, name="last").connect()
        pair.handoff(self.generation + 1)
        assert pair.installed == [pair.expected()]
        assert pair.committed == [self.generation + 1]
        assert len(self.outstanding) == 0


Walk.TestCase.settings = settings(examples(100), stateful_step_count=50, deadline=None)
TestWalk = Walk.TestCase


def test_an_item_keeps_its_kind_when_changed() -> None:
    assert Item(b"abc").changed(b"x") == Item(b"x")
    assert Item(None, bytes(80), b"p").changed(bytes(81)) == Item(None, bytes(80), b"\0")
