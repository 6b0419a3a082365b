"""A link that changes, cuts, drops, repeats and reorders what travels, at every place.

Each handoff here is small (its whole traffic is a few thousand bytes), so that every byte
of it can be broken in turn. What must hold each time: a refusal with a listed reason, or a
change in a field named below as not authenticated, and never a wrong install.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import pytest
from msgspec import structs

from protocol import frames, messages
from protocol.errors import BatonError, TransferError
from protocol.events import Committed, Late
from protocol.handoff import State
from protocol.layout import FullLayer, Layout
from protocol.messages import Abort, Begin, Credit, Progress, Seal
from protocol.reasons import REASONS
from tests.machines.joined import LAYOUT, TO_DECODER, TO_PRODUCER, Item, Joined
from tests.ordinary import usual

SMALL = Layout((FullLayer(0, 1, 2, 1, "bfloat16"), *LAYOUT.layers[1:]))
CREDIT = 3
DIRECTIONS = (TO_DECODER, TO_PRODUCER)

UNAUTHENTICATED = {Progress: {"done"}, Credit: {"frames"}, Abort: None}
"""Messages, and their fields, that may be changed underway without a refusal."""


def run(pair: Joined) -> Joined:
    """A connection with one handoff that also carries PROGRESS and CREDIT."""
    pair.connect()
    if pair.decoder.state is not State.READY:
        return pair
    pair.auto_begin = False
    pair.request(credit=CREDIT)
    pair.flush()
    while pair.wires[TO_PRODUCER]:
        pair.deliver(TO_PRODUCER)
    if pair.producer.state is State.REQUESTED:
        pair.producer.progress(4, pair.now)
        pair.begin()
    pair.settle()
    return pair


def recorded() -> dict[str, list[Item]]:
    pair = run(Joined(layout=SMALL))
    assert pair.installed == [pair.expected()]
    assert pair.committed == [1]
    return pair.record


GOOD = recorded()
PLACES = [(direction, index) for direction in DIRECTIONS for index in range(len(GOOD[direction]))]


def name_of(item: Item) -> str:
    return "frame" if item.text is None else type(messages.decode(item.text)).__name__.lower()


def name(direction: str, index: int) -> str:
    return name_of(GOOD[direction][index])


NAMES = [f"{direction}-{index}-{name(direction, index)}" for direction, index in PLACES]


def replaced(direction: str, index: int, items: Iterable[Item]) -> Joined:
    """A run in which one item arrives as other items."""
    pair = Joined(layout=SMALL)

    def tamper(where: str, place: int, item: Item) -> Iterable[Item]:
        return items if (where, place) == (direction, index) else [item]

    pair.tamper = tamper
    return run(pair)


def require_refused(pair: Joined, *, after_install: bool = False) -> None:
    """Nothing wrong was installed, and somebody named a listed reason and closed."""
    if not pair.errors:
        # A request whose credit was made smaller starves instead: silence is refused too.
        pair.expire()
    assert pair.errors, "nobody refused"
    assert all(error.reason in REASONS for error in pair.errors.values())
    assert pair.installed == ([pair.expected()] if after_install else [])
    assert pair.committed == []
    assert State.CLOSED in (pair.decoder.state, pair.producer.state)
    if pair.decoder.state is State.CLOSED:
        assert len(pair.outstanding) == 0


def harmless(item: Item, raw: bytes) -> bool:
    """Whether a change touches only what is listed as not authenticated."""
    if item.text is None:
        return False
    before = messages.decode(item.text)
    free = UNAUTHENTICATED.get(type(before), set())
    try:
        after = messages.decode(raw)
    except BatonError:
        return False
    if type(after) is not type(before):
        return False
    changed = {
        field
        for field in before.__struct_fields__
        if getattr(before, field) != getattr(after, field)
    }
    return free is None or changed <= free


MASKS = (0x01, 0x10, 0xFF)
"""The lowest bit of a byte, a middle one, and all bits."""


def flips(raw: bytes, *, every: bool) -> Iterator[bytes]:
    """Each byte of a message flipped in ``every`` way, or each in one, the ways taking turns."""
    for place in range(len(raw)):
        for mask in MASKS if every else [MASKS[place % len(MASKS)]]:
            yield raw[:place] + bytes([raw[place] ^ mask]) + raw[place + 1 :]


@pytest.mark.parametrize(("direction", "index"), PLACES, ids=NAMES)
@pytest.mark.parametrize("every", usual([False, True], [False]))
def test_any_flipped_byte_is_refused(direction: str, index: int, every: bool) -> None:
    item = GOOD[direction][index]
    last = name(direction, index) == "committed"
    for raw in flips(item.raw, every=every):
        pair = replaced(direction, index, [item.changed(raw)])
        if harmless(item, raw) and not pair.errors:
            assert pair.installed in ([], [pair.expected()])
        else:
            require_refused(pair, after_install=last)


@pytest.mark.parametrize(("direction", "index"), PLACES, ids=NAMES)
@pytest.mark.parametrize("step", usual([1, 3], [3]))
def test_any_truncation_is_refused(direction: str, index: int, step: int) -> None:
    item = GOOD[direction][index]
    last = name(direction, index) == "committed"
    for length in {*range(0, len(item.raw), step), len(item.raw) - 1}:
        pair = replaced(direction, index, [item.changed(item.raw[:length])])
        require_refused(pair, after_install=last)


@pytest.mark.parametrize(("direction", "index"), PLACES, ids=NAMES)
def test_appended_bytes_are_refused(direction: str, index: int) -> None:
    item = GOOD[direction][index]
    last = name(direction, index) == "committed"
    for extra in (b" ", b"\0", b"{}", item.raw):
        pair = replaced(direction, index, [item.changed(item.raw + extra)])
        require_refused(pair, after_install=last)


@pytest.mark.parametrize(("direction", "index"), PLACES, ids=NAMES)
def test_a_dropped_message_never_installs_too_little(direction: str, index: int) -> None:
    pair = replaced(direction, index, [])
    assert pair.installed in ([], [pair.expected()])
    if pair.installed:
        assert name(direction, index) in ("progress", "committed")
    # Nothing waits for ever: who is owed something gives up.
    pair.expire()
    assert all(error.reason in REASONS for error in pair.errors.values())
    assert pair.decoder.deadline() is None
    assert pair.producer.deadline() is None


@pytest.mark.parametrize(("direction", "index"), PLACES, ids=NAMES)
def test_a_repeated_message_is_refused(direction: str, index: int) -> None:
    item = GOOD[direction][index]
    pair = replaced(direction, index, [item, item])
    kind = name(direction, index)
    if kind in ("progress", "credit"):
        assert pair.installed == [pair.expected()]
    elif kind == "seal":
        # The first one completed the handoff; the second one ends the connection.
        assert pair.errors
        assert pair.installed == [pair.expected()]
    elif kind == "committed":
        # It may come twice, when the decoder cannot know whether it arrived.
        assert sum(isinstance(event, Late) for event in pair.events) == 1
        assert pair.committed == [1]
        assert pair.installed == [pair.expected()]
    else:
        require_refused(pair)


@pytest.mark.parametrize("index", range(len(GOOD[TO_DECODER]) - 1))
def test_swapped_neighbours_are_refused(index: int) -> None:
    pair = Joined(layout=SMALL)
    held: list[Item] = []

    def tamper(where: str, place: int, item: Item) -> Iterable[Item]:
        if (where, place) == (TO_DECODER, index):
            held.append(item)
            return []
        if (where, place) == (TO_DECODER, index + 1):
            return [item, *held]
        return [item]

    pair.tamper = tamper
    run(pair)
    kinds = {name(TO_DECODER, index), name(TO_DECODER, index + 1)}
    if "progress" in kinds and pair.installed:
        assert pair.installed == [pair.expected()]
    else:
        # A lone first message waits for a second that never comes; else a refusal.
        assert pair.installed == []
        assert pair.errors or pair.decoder.state is not State.READY


def arrivals(direction: str, cut: int) -> tuple[list[Item], Item | None]:
    """What has arrived whole, and the part of a message, when a stream is cut at a byte."""
    whole: list[Item] = []
    for item in GOOD[direction]:
        if cut < len(item.raw):
            return whole, item.changed(item.raw[:cut]) if cut else None
        cut -= len(item.raw)
        whole.append(item)
    return whole, None


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("step", usual([1, 3], [3]))
def test_a_stream_cut_at_any_byte_never_means_complete(direction: str, step: int) -> None:
    total = sum(len(item.raw) for item in GOOD[direction])
    for cut in range(0, total, step):
        whole, part = arrivals(direction, cut)
        pair = Joined(layout=SMALL)

        def tamper(where: str, place: int, item: Item, allowed: int = len(whole)) -> Iterable[Item]:
            return [item] if where != direction or place < allowed else []

        pair.tamper = tamper
        run(pair)
        machine = pair.decoder if direction == TO_DECODER else pair.producer
        if part is not None and part.text is None and len(part.header) == 80:
            # The header was whole: the shell was told its place and was reading into it.
            sent = GOOD[direction][len(whole)]
            pair.decoder.frame_header(part.header, len(sent.payload), pair.now)
        before = machine.state
        if before in (State.START, State.READY):
            machine.eof(pair.now)
        else:
            with pytest.raises(TransferError) as caught:
                machine.eof(pair.now)
            assert caught.value.reason == "connection_lost"
        assert machine.state is State.CLOSED
        if direction == TO_DECODER:
            assert pair.installed == []
            if pair.reception is not None:
                pair.reception.withdraw()
            assert len(pair.outstanding) == 0
        else:
            assert not any(isinstance(event, Committed) for event in pair.events)


def test_after_any_refusal_the_next_request_is_fine() -> None:
    for direction, index in PLACES:
        item = GOOD[direction][index]
        broken = replaced(direction, index, [item.changed(item.raw[:-1])])
        again = Joined(layout=SMALL, outstanding=broken.outstanding, name="again").connect()
        again.handoff(2)
        assert again.installed == [again.expected()]
        assert again.committed == [2]


def test_a_recorded_handoff_does_not_answer_another_request() -> None:
    replay = [item for item in GOOD[TO_DECODER] if not opening(item)]

    def answered(generation: int, tokens: Iterable[int], items: list[Item]) -> Joined:
        outstanding = used.outstanding if generation == 2 else None
        pair = Joined(layout=SMALL, outstanding=outstanding, name="new").connect()
        pair.request(generation, tokens=tokens, credit=CREDIT)
        pair.decoder.outgoing()
        for item in items:
            pair.wires[TO_DECODER].append(item)
        while pair.wires[TO_DECODER]:
            pair.deliver(TO_DECODER)
        return pair

    used = run(Joined(layout=SMALL))
    pair = answered(2, range(10, 19), replay)
    assert pair.errors[TO_DECODER].reason == "generation_used"
    assert pair.installed == []

    # With the manifest of the new request in front, the first frame gives the replay away.
    for tokens in (range(10, 19), range(50, 59)):
        generation = 3 + tokens[0]
        honest = Joined(layout=SMALL).connect()
        honest.request(generation, tokens=tokens, credit=CREDIT)
        honest.settle()
        begin = next(item for item in honest.record[TO_DECODER] if is_begin(item))
        rest = replay[replay.index(next(item for item in replay if is_begin(item))) + 1 :]
        pair = answered(generation, tokens, [begin, *rest])
        assert pair.errors[TO_DECODER].reason == "frame_differs"
        assert pair.errors[TO_DECODER].field == "generation"
        # With frames forged for it (no key is needed for those), the seal does.
        forged = [renumbered(item, generation) for item in rest]
        pair = answered(generation, tokens, [begin, *forged])
        assert pair.errors[TO_DECODER].reason == "transfer_differs"
        seal = messages.decode(forged[-1].raw)
        assert isinstance(seal, Seal)
        manifest = messages.decode(begin.raw)
        assert isinstance(manifest, Begin)
        stream = hashlib.sha256(b"".join(item.header[48:] for item in forged[:-1])).digest()
        moved = structs.replace(seal, transfer=manifest.transfer, digest=stream)
        pair = answered(generation, tokens, [begin, *forged[:-1], Item(messages.encode(moved))])
        assert pair.errors[TO_DECODER].reason == "seal_differs"
        assert pair.installed == []


def opening(item: Item) -> bool:
    return item.text is not None and name_of(item) in ("helloack", "proof", "progress")


def is_begin(item: Item) -> bool:
    return name_of(item) == "begin"


def renumbered(item: Item, generation: int) -> Item:
    """A frame of a recording, made anew for another generation, digest included."""
    if item.text is not None:
        return item
    prefix = item.header[:24] + generation.to_bytes(8, "big") + item.header[32:48]
    return Item(None, prefix + frames.digest(prefix, item.payload), item.payload)
