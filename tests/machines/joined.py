"""Both machines joined in memory, with the smallest shells that are still honest.

The decoder's shell places payloads into poisoned buffers, digests what it placed, and
installs on Sealed; the producer's shell has known content for every byte. What travels is
kept as a list of items, so that a test can change, drop, repeat or reorder any of them.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

from protocol import frames
from protocol.deadlines import Timing
from protocol.errors import BatonError, LocalProtocolError
from protocol.events import Event
from protocol.handoff import (
    Began,
    Committed,
    DecoderHandoff,
    Interrupted,
    Late,
    Outstanding,
    PeerAborted,
    ProducerHandoff,
    Reception,
    Requested,
    Sealed,
    Sending,
    State,
)
from protocol.identity import Identity
from protocol.layout import (
    STATE,
    FullLayer,
    Layout,
    RecurrentLayer,
    SlidingLayer,
    Slot,
    StateArray,
    regions,
)
from protocol.messages import Committed as CommittedMessage
from protocol.messages import Limits, Recipe, Resume
from protocol.pairing import Pairing, PinnedCertificates
from protocol.reasons import refusal

LAYOUT = Layout(
    (
        FullLayer(0, 1, 2, 2, "bfloat16"),
        SlidingLayer(1, 1, 2, 2, "float16", 3),
        RecurrentLayer(2, (StateArray("conv", (2, 2), "float32"),)),
    )
)
TILE = 4
IDENTITY = Identity(*(f"{number:064x}" for number in range(8)))
PAIRING = Pairing(bytes(range(32)), 7)
RECIPE = Recipe("producer", "cpu", "bfloat16", TILE)
LIMITS = Limits(max_tokens=4096, max_credit=64, max_extra_cuts=4)
TO_DECODER, TO_PRODUCER = "to decoder", "to producer"
POISON = 0xA5


class Item(NamedTuple):
    """One WebSocket message: TEXT, or BINARY as header and payload."""

    text: bytes | None
    header: bytes = b""
    payload: bytes = b""

    @property
    def raw(self) -> bytes:
        """All bytes of the message."""
        return self.header + self.payload if self.text is None else self.text

    def changed(self, raw: bytes) -> Item:
        """A message of the same kind with other bytes."""
        if self.text is not None:
            return Item(raw)
        return Item(None, raw[: frames.HEADER_BYTES], raw[frames.HEADER_BYTES :])


def nonce_of(*what: object) -> bytes:
    """32 bytes that look random and are the same in every run."""
    return hashlib.sha256(repr(what).encode()).digest()


Place = tuple[int, int, int]
"""Layer, role, and the position at which rows or a state end."""


def content(
    layout: Layout, cut: int, end: int, seed: int = 0, extra: tuple[int, ...] = ()
) -> dict[Place, bytes]:
    """The bytes of every region; each depends on its place, so that no two can be swapped."""
    return {
        (region.index, region.role, region.last): hashlib.shake_128(
            f"{seed} {region.index} {region.role} {region.first} {region.last}".encode()
        ).digest(region.nbytes)
        for region in regions(layout, cut, end, extra)
    }


class Joined:
    """A decoder and a producer with everything between them in two lists."""

    def __init__(
        self,
        *,
        layout: Layout = LAYOUT,
        tile: int = TILE,
        outstanding: Outstanding | None = None,
        certificates: tuple[PinnedCertificates | None, PinnedCertificates | None] = (None, None),
        pairings: tuple[Pairing, Pairing] = (PAIRING, PAIRING),
        earlier: Pairing | None = None,
        identities: tuple[Identity, Identity] = (IDENTITY, IDENTITY),
        layouts: tuple[Layout, Layout] | None = None,
        limits: Limits = LIMITS,
        timing: Timing | None = None,
        name: str = "connection",
    ) -> None:
        self.layout = layout
        self.now = 100.0
        self.outstanding = Outstanding(nullcontext()) if outstanding is None else outstanding
        ours, theirs = layouts or (layout, layout)
        self.decoder = DecoderHandoff(
            identity=identities[0],
            layout=ours,
            pairing=pairings[0],
            nonce=nonce_of(name, "decoder"),
            outstanding=self.outstanding,
            certificates=certificates[0],
            timing=timing,
        )
        self.producer = ProducerHandoff(
            identity=identities[1],
            layout=theirs,
            recipe=Recipe("producer", "cpu", "bfloat16", tile),
            limits=limits,
            pairing=pairings[1],
            nonce=nonce_of(name, "producer"),
            now=self.now,
            certificates=certificates[1],
            earlier=earlier,
            timing=timing,
        )
        self.wires: dict[str, deque[Item]] = {TO_DECODER: deque(), TO_PRODUCER: deque()}
        self.record: dict[str, list[Item]] = {TO_DECODER: [], TO_PRODUCER: []}
        self.tamper: Callable[[str, int, Item], Iterable[Item]] | None = None
        self.events: list[Event] = []
        self.installed: list[dict[Place, bytes]] = []
        self.committed: list[int] = []
        self.errors: dict[str, BatonError] = {}
        self.shadow: dict[Place, bytearray] = {}
        self.late_digests: deque[tuple[int, bytes]] | None = None
        self.seed = 0
        self.auto_begin = True
        self.auto_commit = True
        self.reception: Reception | None = None
        self.kept: Sending | None = None
        """What the producer's shell keeps of a lost connection."""
        self.kept_from = 0
        self._produced: dict[Place, bytes] = {}

    # the wire

    def flush(self) -> None:
        """Put what both machines want to send onto the wires."""
        for direction, machine in ((TO_DECODER, self.producer), (TO_PRODUCER, self.decoder)):
            for raw in machine.outgoing():
                self._put(direction, Item(raw))

    def _put(self, direction: str, item: Item) -> None:
        index = len(self.record[direction])
        self.record[direction].append(item)
        items = [item] if self.tamper is None else self.tamper(direction, index, item)
        self.wires[direction].extend(items)

    def deliver(self, direction: str) -> None:
        """Hand the oldest item of one wire to its machine; a refusal is kept, not raised."""
        item = self.wires[direction].popleft()
        machine = self.decoder if direction == TO_DECODER else self.producer
        if machine.state is State.CLOSED:
            return
        self.attempt(direction, lambda: self.give(direction, item))

    def attempt(self, direction: str, step: Callable[[], object]) -> None:
        """Do something to one side; a refusal is kept, misuse is raised."""
        try:
            step()
        except LocalProtocolError:
            raise
        except BatonError as error:
            self.errors.setdefault(direction, error)

    def give(self, direction: str, item: Item) -> None:
        """Hand one item to a machine; raises what the machine raises."""
        if direction == TO_PRODUCER:
            if item.text is None:
                raise AssertionError("a decoder sends no frames")
            self.on_producer(self.producer.receive_text(item.text, self.now))
        elif item.text is not None:
            self.on_decoder(self.decoder.receive_text(item.text, self.now))
        else:
            self._receive_frame(item)

    def _receive_frame(self, item: Item) -> None:
        length = len(item.payload)
        slot = self.decoder.frame_header(item.header, length, self.now)
        if slot is None:
            return
        place = memoryview(self.shadow[self._place(slot)])[slot.offset :][: slot.nbytes]
        place[:] = item.payload
        digest = frames.digest(item.header[: frames.PREFIX_BYTES], place)
        if self.late_digests is not None:
            self.late_digests.append((slot.sequence, digest))
        else:
            self.on_decoder(self.decoder.frame_digest(slot.sequence, digest, self.now))

    def report_digest(self) -> None:
        """Report the oldest of the late digests."""
        assert self.late_digests is not None
        sequence, digest = self.late_digests.popleft()
        self.on_decoder(self.decoder.frame_digest(sequence, digest, self.now))

    # the shells

    def on_decoder(self, events: list[Event]) -> None:
        """What the decoder's shell does about events."""
        self.events += events
        for event in events:
            match event:
                case Began(begin):
                    self.shadow = {
                        (region.index, region.role, region.last): bytearray([POISON])
                        * region.nbytes
                        for region in regions(self.layout, begin.cut, begin.end, self.extra)
                    }
                case Sealed() if self.auto_commit:
                    self.installed.append({key: bytes(data) for key, data in self.shadow.items()})
                    self.decoder.commit(self.now)
                case PeerAborted():
                    self.decoder.release(self.now)

    def on_producer(self, events: list[Event]) -> None:
        """What the producer's shell does about events."""
        self.events += events
        for event in events:
            match event:
                case Committed(generation):
                    self.committed.append(generation)
                case PeerAborted():
                    self.producer.release(self.now)
                case Requested() if self.auto_begin:
                    self.begin()
                case Interrupted(resume):
                    self._resume(resume)
                case Late(committed):
                    self._take_late(committed)

    def _resume(self, resume: Resume) -> None:
        try:
            if self.kept is None:
                raise refusal("transfer_unknown", "nothing is kept")
            self.kept.require_resumable(resume, self.kept_from)
        except BatonError as error:
            self.producer.abort(error, self.now)
            return
        self.producer.resume(self.kept, self.now)
        if self.kept.begin is None and self.auto_begin:
            self.begin()

    def _take_late(self, committed: CommittedMessage) -> None:
        if self.kept is None:
            return  # it was installed before
        self.kept.require_committed(PAIRING, committed)
        self.committed.append(self.kept.generation)
        self.kept = None

    def begin(self, cut: int | None = None) -> None:
        """The producer announces its handoff."""
        begin = self.producer.begin(
            transfer=nonce_of("transfer", self.producer._generation)[:16],
            computed_tokens=0,
            cut=cut,
            now=self.now,
        )
        sending = self.producer.sending
        assert sending is not None
        extra = sending.prefill.extra_cuts
        self._produced = content(self.layout, begin.cut, begin.end, self.seed, extra)

    def send_frame(self) -> bool:
        """The producer sends its next frame, if it has one and credit for it."""
        slot = self.producer.next_slot()
        if slot is None:
            return False
        self.flush()
        self._put(TO_DECODER, self.frame(slot))
        return True

    def frame(self, slot: Slot) -> Item:
        """The producer's frame for a slot."""
        payload = self._produced[self._place(slot)][slot.offset :][: slot.nbytes]
        digest = frames.digest(self.producer.header_prefix(slot), payload)
        return Item(None, self.producer.frame(slot, digest, self.now), payload)

    def produce(self) -> None:
        """The producer sends what it may, and the seal once it has sent all."""
        if self.producer.state is State.STREAMING:
            while self.send_frame():
                pass
            if not self.producer.remaining:
                self.producer.seal(queue_us=1, compute_us=2, now=self.now)

    def settle(self) -> None:
        """Deliver and produce until nothing moves any more."""
        while True:
            self.produce()
            self.flush()
            waiting = [direction for direction, wire in self.wires.items() if wire]
            if not waiting:
                return
            for direction in waiting:
                self.deliver(direction)

    def expire(self) -> None:
        """Let all time pass; who is owed something gives up, and its ABORT is delivered."""
        self.expire_after(10_000.0)
        self.settle()

    def expire_after(self, seconds: float) -> None:
        """Let some time pass on both sides."""
        self.now += seconds
        for direction, machine in ((TO_DECODER, self.decoder), (TO_PRODUCER, self.producer)):
            self.attempt(direction, partial(machine.tick, self.now))

    def settle_producer(self) -> None:
        """Let the producer alone receive and send; nothing reaches the decoder."""
        self.flush()
        while self.wires[TO_PRODUCER]:
            self.deliver(TO_PRODUCER)
        self.produce()
        self.flush()

    # what most tests begin with

    def connect(self) -> Joined:
        """The whole handshake."""
        self.decoder.connect(self.now)
        self.settle()
        return self

    def request(
        self,
        generation: int = 1,
        tokens: Iterable[int] = range(10, 19),
        cut: int = 0,
        **options: object,
    ) -> None:
        """The decoder asks; nothing is delivered yet."""
        self.reception = self.decoder.start(
            generation=generation,
            nonce=nonce_of("request", generation),
            request_id=f"r{generation}",
            tokens=list(tokens),
            cut=cut,
            now=self.now,
            **options,  # type: ignore[arg-type]
        )

    def handoff(self, generation: int = 1, **options: object) -> None:
        """A whole handoff, as far as it gets."""
        self.request(generation, **options)  # type: ignore[arg-type]
        self.settle()

    def lose(self) -> None:
        """The connection breaks: what is on the wires is gone, both shells keep what they had."""
        self.kept = self.producer.sending or self.kept
        for wire in self.wires.values():
            wire.clear()
        for direction, machine in ((TO_DECODER, self.decoder), (TO_PRODUCER, self.producer)):
            self.attempt(direction, partial(machine.eof, self.now))

    def again(self, name: str) -> Joined:
        """Another connection between the same two, proven; both shells bring what they kept."""
        other = Joined(outstanding=self.outstanding, limits=LIMITS, name=name).connect()
        other.now, other.seed = self.now, self.seed
        other.reception, other.kept = self.reception, self.kept
        other.shadow, other._produced = self.shadow, self._produced
        return other

    def expected(
        self, end: int = 9, cut: int = 0, extra: tuple[int, ...] = ()
    ) -> dict[Place, bytes]:
        """What a handoff over ``[cut, end)``, with cuts at ``extra``, must have installed."""
        return content(self.layout, cut, end, self.seed, extra)

    @property
    def extra(self) -> tuple[int, ...]:
        """The extra cuts that were asked for last."""
        return self.reception.prefill.extra_cuts if self.reception else ()

    def _place(self, slot: Slot) -> Place:
        known = self._produced or self.shadow
        end = max((last for _, _, last in known), default=slot.last)
        return slot.index, slot.role, slot.last if slot.role >= STATE else end
