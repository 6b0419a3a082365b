"""Every reason that a machine can refuse for, each provoked by a peer that lies about it.

The peer's messages are changed after it made them, so that everything before the lie is
right; the last test compares what is provoked here with the list of all reasons.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Final

import msgspec
import pytest
from msgspec import structs

from protocol import frames, messages
from protocol.errors import BatonError, CapacityError
from protocol.handoff import Outstanding, State, Timing
from protocol.identity import Identity
from protocol.layout import FullLayer, Layout
from protocol.messages import (
    Aborted,
    Begin,
    Committed,
    Credit,
    Hello,
    Limits,
    Message,
    Prefill,
    Progress,
    Resumed,
    Seal,
)
from protocol.pairing import Pairing, PinnedCertificates
from protocol.reasons import COMPONENTS, REASONS, component_reason
from tests.machines.joined import (
    IDENTITY,
    LAYOUT,
    PAIRING,
    TILE,
    TO_DECODER,
    TO_PRODUCER,
    Item,
    Joined,
)

Provoke = Callable[[], Joined]
PROVOKED: Final[list[tuple[str, str, Provoke]]] = []
"""(reason, direction of what is refused, what provokes it)."""


def provokes(reason: str, direction: str = TO_DECODER) -> Callable[[Provoke], Provoke]:
    def register(function: Provoke) -> Provoke:
        PROVOKED.append((reason, direction, function))
        return function

    return register


def rewriting(kind: type[msgspec.Struct], **changes: Any) -> Joined:
    """A handoff in which the first message of a kind has other fields."""

    def change(message: Message) -> bytes:
        altered = {
            field: value(getattr(message, field)) if callable(value) else value
            for field, value in changes.items()
        }
        return msgspec.json.encode(structs.replace(message, **altered))

    return rewritten(kind, change)


def rewritten(kind: type[msgspec.Struct], change: Callable[[Any], bytes]) -> Joined:
    """A handoff in which the first message of a kind has other bytes."""
    pair = Joined()
    left = [1]

    def tamper(direction: str, index: int, item: Item) -> Iterable[Item]:
        if item.text is not None and left:
            message = messages.decode(item.text)
            if isinstance(message, kind):
                left.pop()
                return [Item(change(message))]
        return [item]

    pair.tamper = tamper
    pair.connect()
    if pair.decoder.state is State.READY:
        pair.handoff(credit=64)
    return pair


def reframing(number: int, change: Callable[[Item], Iterable[Item]]) -> Joined:
    """A handoff in which the ``number``-th frame arrives as something else."""
    pair = Joined()
    seen: list[Item] = []

    def tamper(direction: str, index: int, item: Item) -> Iterable[Item]:
        if item.text is not None:
            return [item]
        seen.append(item)
        return change(item) if len(seen) == number + 1 else [item]

    pair.tamper = tamper
    pair.connect()
    pair.handoff(credit=64)
    return pair


def patched(item: Item, offset: int, raw: bytes) -> Item:
    header = item.header[:offset] + raw + item.header[offset + len(raw) :]
    return Item(None, header, item.payload)


def flipped(value: bytes) -> bytes:
    return bytes([value[0] ^ 1]) + value[1:]


# version and form


@provokes("version_unsupported", TO_PRODUCER)
def _hello_of_another_version() -> Joined:
    return rewriting(Hello, version=2)


@provokes("version_unsupported")
def _frame_of_another_version() -> Joined:
    return reframing(1, lambda item: [patched(item, 4, b"\x02")])


@provokes("version_unsupported", TO_PRODUCER)
def _hello_of_a_version_with_other_fields() -> Joined:
    return rewritten(Hello, lambda _: b'{"type":"hello","version":3,"suite":["x",{"y":1}]}')


@provokes("message_too_long", TO_PRODUCER)
def _hello_that_fills_memory() -> Joined:
    return rewritten(Hello, lambda _: b"[" * (messages.CONTROL_BYTES + 1))


@provokes("message_too_long", TO_PRODUCER)
def _prompt_that_no_limit_allows() -> Joined:
    limit = messages.prefill_limit(4096)
    return rewritten(Prefill, lambda _: b" " * (limit + 1))


@provokes("message_malformed", TO_PRODUCER)
def _nesting_without_end() -> Joined:
    return rewritten(Hello, lambda _: b'{"type":"hello","x":' + b"[" * 16000)


@provokes("message_malformed")
def _extra_field() -> Joined:
    return rewritten(Begin, lambda m: messages.encode(m)[:-1] + b',"more":1}')


@provokes("message_malformed")
def _number_beyond_any_machine() -> Joined:
    def change(message: Begin) -> bytes:
        raw = messages.encode(message)
        return raw.replace(f'"end":{message.end}'.encode(), f'"end":{2**63}'.encode())

    return rewritten(Begin, change)


@provokes("message_malformed", TO_PRODUCER)
def _tokens_that_are_not_whole() -> Joined:
    return rewriting(Prefill, tokens=lambda raw: raw + b"\0")


@provokes("message_unknown")
def _message_of_tomorrow() -> Joined:
    return rewritten(Begin, lambda _: b'{"type":"rewind","transfer":"","next":4}')


@provokes("message_not_canonical")
def _blanks() -> Joined:
    return rewritten(Begin, lambda m: b" " + messages.encode(m))


@provokes("message_not_canonical")
def _field_twice() -> Joined:
    return rewritten(Begin, lambda m: messages.encode(m)[:-1] + b',"cut":0}')


@provokes("message_unexpected")
def _begin_twice() -> Joined:
    pair = Joined()
    pair.tamper = lambda _d, _i, item: (
        [item, item] if item.text and b'"type":"begin"' in item.text else [item]
    )
    pair.connect().handoff()
    return pair


@provokes("message_unexpected")
def _hello_to_a_decoder() -> Joined:
    pair = Joined().connect()
    pair.wires[TO_DECODER].append(pair.record[TO_PRODUCER][0])
    pair.settle()
    return pair


@provokes("message_unexpected", TO_PRODUCER)
def _prefill_before_the_proof() -> Joined:
    pair = Joined()
    other = Joined().connect()
    other.request()
    other.flush()
    prefill = other.record[TO_PRODUCER][-1]
    pair.decoder.connect(pair.now)
    pair.flush()
    pair.deliver(TO_PRODUCER)
    pair.wires[TO_PRODUCER].append(prefill)
    pair.deliver(TO_PRODUCER)
    return pair


@provokes("message_unexpected", TO_PRODUCER)
def _second_prefill_before_the_end() -> Joined:
    pair = Joined().connect()
    pair.tamper = lambda direction, _, item: (
        [item, item]
        if direction == TO_PRODUCER and item.text and b"prefill" in item.text
        else [item]
    )
    pair.handoff(credit=1)
    return pair


@provokes("message_unexpected", TO_PRODUCER)
def _committed_before_the_seal() -> Joined:
    pair = Joined().connect()
    pair.request(credit=1)
    pair.flush()
    pair.deliver(TO_PRODUCER)
    message = Committed(transfer=bytes(16), mac=bytes(32))
    pair.wires[TO_PRODUCER].append(Item(messages.encode(message)))
    pair.deliver(TO_PRODUCER)
    return pair


@provokes("message_unexpected", TO_PRODUCER)
def _committed_in_answer_to_an_abort() -> Joined:
    pair = Joined().connect()
    pair.auto_begin = False
    pair.request()
    pair.settle()
    pair.producer.abort(CapacityError("no memory"), pair.now)
    message = Committed(transfer=bytes(16), mac=bytes(32))
    pair.wires[TO_PRODUCER].append(Item(messages.encode(message)))
    pair.deliver(TO_PRODUCER)
    return pair


@provokes("message_unexpected")
def _answer_to_no_abort() -> Joined:
    pair = Joined().connect()
    pair.wires[TO_DECODER].append(Item(messages.encode(Aborted(generation=1))))
    pair.settle()
    return pair


@provokes("too_many_messages")
def _progress_without_end() -> Joined:
    pair = Joined().connect()
    pair.auto_begin = False
    pair.request()
    pair.settle()
    progress = Item(messages.encode(Progress(generation=1, done=0)))
    pair.wires[TO_DECODER].extend([progress] * 1000)
    pair.settle()
    return pair


# identity and trust


def _component_differs(component: str) -> Provoke:
    def provoke() -> Joined:
        theirs = structs.replace(IDENTITY, **{component: "f" * 64})
        pair = Joined(identities=(IDENTITY, theirs))
        pair.decoder.connect(pair.now)
        pair.settle()
        return pair

    return provoke


for _name in COMPONENTS:
    provokes(component_reason(_name), TO_PRODUCER)(_component_differs(_name))


@provokes("weights_differ")
def _producer_that_does_not_look() -> Joined:
    other = structs.replace(IDENTITY, weights="e" * 64)
    return rewriting(messages.HelloAck, identity=other)


@provokes("layout_differs", TO_PRODUCER)
def _another_layout() -> Joined:
    pair = Joined(layouts=(LAYOUT, Layout(LAYOUT.layers[:2])))
    pair.decoder.connect(pair.now)
    pair.settle()
    return pair


@provokes("layout_differs")
def _another_layout_in_the_manifest() -> Joined:
    return rewriting(Begin, layout=flipped)


@provokes("identity_digest_differs", TO_PRODUCER)
def _request_for_another_model() -> Joined:
    return rewriting(Prefill, identity=flipped)


@provokes("epoch_differs", TO_PRODUCER)
def _another_epoch() -> Joined:
    pair = Joined(pairings=(PAIRING, Pairing(PAIRING.key, 8)))
    pair.decoder.connect(pair.now)
    pair.settle()
    return pair


@provokes("proof_differs", TO_PRODUCER)
def _another_key() -> Joined:
    pair = Joined(pairings=(Pairing(bytes(32), 7), PAIRING))
    pair.decoder.connect(pair.now)
    pair.settle()
    return pair


@provokes("proof_differs", TO_PRODUCER)
def _someone_between_two_tls_connections() -> Joined:
    seen = PinnedCertificates(bytes(32), b"\1" * 32)
    shown = PinnedCertificates(bytes(32), b"\2" * 32)
    pair = Joined(certificates=(seen, shown))
    pair.decoder.connect(pair.now)
    pair.settle()
    return pair


@provokes("proof_differs")
def _our_own_proof_sent_back() -> Joined:
    pair = Joined()
    proofs: list[Item] = []

    def tamper(direction: str, index: int, item: Item) -> Iterable[Item]:
        if item.text and item.text.startswith(b'{"type":"proof"'):
            proofs.append(item)
            return [proofs[0]]
        return [item]

    pair.tamper = tamper
    pair.decoder.connect(pair.now)
    pair.settle()
    return pair


# the request


@provokes("prompt_too_long", TO_PRODUCER)
def _more_tokens_than_allowed() -> Joined:
    return rewriting(Prefill, tokens=lambda raw: raw * 500)


@provokes("cut_invalid", TO_PRODUCER)
def _cut_at_the_end() -> Joined:
    return rewriting(Prefill, cut=9)


@provokes("cut_invalid", TO_PRODUCER)
def _extra_cuts_out_of_order() -> Joined:
    return rewriting(Prefill, extra_cuts=(5, 5))


@provokes("cut_invalid", TO_PRODUCER)
def _extra_cut_before_the_last_tile() -> Joined:
    return rewriting(Prefill, extra_cuts=(7,))


@provokes("cut_invalid", TO_PRODUCER)
def _extra_cut_past_the_end() -> Joined:
    return rewriting(Prefill, extra_cuts=(9,))


@provokes("credit_invalid", TO_PRODUCER)
def _more_credit_than_allowed() -> Joined:
    return rewriting(Prefill, credit=65)


@provokes("credit_invalid", TO_PRODUCER)
def _credit_without_end() -> Joined:
    pair = Joined().connect()
    pair.request(credit=64)
    pair.flush()
    pair.wires[TO_PRODUCER].append(Item(messages.encode(Credit(generation=1, frames=1))))
    while pair.wires[TO_PRODUCER]:
        pair.deliver(TO_PRODUCER)
    return pair


@provokes("offset_differs")
def _another_offset_than_asked_for() -> Joined:
    pair = Joined(name="first").connect()
    pair.request()
    pair.flush()
    pair.deliver(TO_PRODUCER)
    pair.lose()
    other = pair.again("second")
    assert other.reception is not None
    other.decoder.resume(other.reception, other.now)
    other.wires[TO_DECODER].append(Item(messages.encode(Resumed(generation=1, next=1))))
    other.deliver(TO_DECODER)
    return other


@provokes("generation_used", TO_PRODUCER)
def _request_again() -> Joined:
    pair = Joined().connect()
    pair.handoff()
    prefill = next(i for i in pair.record[TO_PRODUCER] if i.text and b'"prefill"' in i.text)
    pair.wires[TO_PRODUCER].append(prefill)
    pair.settle()
    pair.installed.clear()
    return pair


@provokes("generation_used")
def _answer_to_a_withdrawn_request() -> Joined:
    pair = Joined().connect()
    pair.request()
    pair.outstanding.withdraw(1)
    pair.settle()
    return pair


@provokes("generation_used")
def _withdrawn_between_manifest_and_seal() -> Joined:
    pair = Joined().connect()
    pair.request(credit=1)
    pair.flush()
    for direction in (TO_PRODUCER, TO_DECODER):
        pair.deliver(direction)
        pair.flush()
    assert pair.decoder.state is State.RECEIVING
    pair.outstanding.withdraw(1)
    pair.settle()
    return pair


@provokes("generation_unknown")
def _answer_to_no_request() -> Joined:
    return rewriting(Begin, generation=99)


@provokes("generation_differs")
def _answer_to_the_neighbours_request() -> Joined:
    outstanding = Outstanding(nullcontext())
    pair = Joined(outstanding=outstanding).connect()
    other = Joined(outstanding=outstanding, name="other").connect()
    other.request(2, credit=64)
    other.settle_producer()
    begin = next(i for i in other.record[TO_DECODER] if i.text and b'"begin"' in i.text)
    pair.request(1)
    pair.wires[TO_DECODER].append(begin)
    pair.deliver(TO_DECODER)
    return pair


@provokes("nonce_differs")
def _answer_with_another_nonce() -> Joined:
    return rewriting(Begin, nonce=flipped)


@provokes("generation_differs", TO_PRODUCER)
def _credit_for_another_handoff() -> Joined:
    pair = Joined().connect()
    pair.request(credit=1)
    pair.flush()
    pair.wires[TO_PRODUCER].append(Item(messages.encode(Credit(generation=2, frames=1))))
    while pair.wires[TO_PRODUCER]:
        pair.deliver(TO_PRODUCER)
    return pair


def _progress(done: Iterable[int]) -> Joined:
    pair = Joined().connect()
    pair.auto_begin = False
    pair.request()
    pair.settle()
    for number in done:
        message = Progress(generation=1, done=number)
        pair.wires[TO_DECODER].append(Item(messages.encode(message)))
    pair.settle()
    return pair


@provokes("progress_invalid")
def _progress_backwards() -> Joined:
    return _progress((5, 4))


@provokes("progress_invalid")
def _progress_past_the_end() -> Joined:
    return _progress((10,))


# the manifest


@provokes("cut_not_accepted")
def _full_instead_of_a_delta() -> Joined:
    pair = Joined().connect()
    pair.auto_begin = False
    pair.request(cut=4)
    pair.settle()
    pair.begin(cut=0)
    pair.settle()
    return pair


@provokes("cut_not_accepted")
def _later_cut() -> Joined:
    return rewriting(Begin, cut=1)


@provokes("end_differs")
def _fewer_positions() -> Joined:
    return rewriting(Begin, end=8)


@provokes("tile_differs")
def _another_tile() -> Joined:
    return rewriting(Begin, tile=TILE + 1)


@provokes("frames_differ")
def _fewer_frames() -> Joined:
    return rewriting(Begin, frames=lambda count: count - 1)


@provokes("frames_differ")
def _seal_that_counts_other_frames() -> Joined:
    return rewriting(Seal, frames=lambda count: count + 1)


@provokes("bytes_differ")
def _fewer_bytes() -> Joined:
    return rewriting(Begin, payload_bytes=lambda count: count - 1)


@provokes("bytes_differ")
def _seal_that_counts_other_bytes() -> Joined:
    return rewriting(Seal, payload_bytes=lambda count: count + 1)


@provokes("spans_differ")
def _other_spans() -> Joined:
    return rewriting(Begin, spans=flipped)


@provokes("tokens_differ")
def _other_tokens() -> Joined:
    return rewriting(Begin, tokens=flipped)


@provokes("computed_invalid")
def _more_computed_than_there_is() -> Joined:
    return rewriting(Begin, computed_tokens=10)


@provokes("history_invalid")
def _history_with_a_gap() -> Joined:
    return rewriting(
        Begin,
        history=lambda old: (
            structs.replace(old[0], last=4),
            structs.replace(old[0], first=5),
        ),
    )


@provokes("history_invalid")
def _history_that_ends_early() -> Joined:
    return rewriting(Begin, history=lambda old: (structs.replace(old[0], last=8),))


@provokes("frames_too_many")
def _tile_that_makes_endless_frames() -> Joined:
    wide = Layout(tuple(FullLayer(index, 1, 1, 1, "float16") for index in range(64)))
    limits = Limits(max_tokens=1 << 20, max_credit=64, max_extra_cuts=4)
    pair = Joined(layout=wide, tile=1, limits=limits).connect()
    pair.auto_begin = False
    end = 10_000
    pair.request(tokens=range(end))
    pair.settle()
    assert pair.producer.sending is not None
    prefill = pair.producer.sending.prefill
    begin = Begin(
        generation=1,
        nonce=prefill.nonce,
        transfer=bytes(16),
        layout=wide.digest(),
        tokens=messages.token_digest(prefill.tokens),
        spans=bytes(32),
        cut=0,
        end=end,
        tile=1,
        frames=1,
        payload_bytes=1,
        computed_tokens=0,
        history=(messages.History(0, end, messages.Recipe("producer", "cpu", "float16", 1)),),
    )
    pair.wires[TO_DECODER].append(Item(messages.encode(begin)))
    pair.settle()
    return pair


# frames


@provokes("frame_malformed")
def _short_header() -> Joined:
    return reframing(0, lambda item: [Item(None, item.header[:79], b"")])


@provokes("frame_malformed")
def _other_magic() -> Joined:
    return reframing(0, lambda item: [patched(item, 0, b"BTNG")])


@provokes("frame_malformed")
def _reserved_bits() -> Joined:
    return reframing(0, lambda item: [patched(item, 10, b"\x00\x01")])


@provokes("frame_too_long")
def _length_of_four_gigabytes() -> Joined:
    return reframing(0, lambda item: [patched(item, 12, b"\xff\xff\xff\xff")])


@provokes("frame_unexpected")
def _frame_before_the_manifest() -> Joined:
    pair = Joined().connect()
    pair.tamper = lambda direction, _, item: (
        [] if item.text and item.text.startswith(b'{"type":"begin"') else [item]
    )
    pair.handoff()
    return pair


@provokes("frame_unexpected")
def _one_frame_too_many() -> Joined:
    pair = Joined()

    def tamper(direction: str, index: int, item: Item) -> Iterable[Item]:
        if item.text and item.text.startswith(b'{"type":"seal"'):
            return [pair.record[TO_DECODER][index - 1], item]
        return [item]

    pair.tamper = tamper
    pair.connect()
    pair.handoff(credit=64)
    return pair


@provokes("frame_out_of_order")
def _sequence_of_2_to_the_63() -> Joined:
    return reframing(1, lambda item: [patched(item, 16, (2**63).to_bytes(8, "big"))])


@provokes("frame_out_of_order")
def _frame_left_out() -> Joined:
    return reframing(1, lambda item: [])


for _field, _offset, _raw in (
    ("role", 5, b"\x01"),
    ("dtype", 6, b"\x01"),
    ("index", 8, b"\x00\x01"),
    ("generation", 24, (2**63).to_bytes(8, "big")),
    ("first", 32, (2**63).to_bytes(8, "big")),
    ("last", 40, (2**63).to_bytes(8, "big")),
):

    def _other_field(offset: int = _offset, raw: bytes = _raw) -> Joined:
        return reframing(0, lambda item: [patched(item, offset, raw)])

    provokes("frame_differs")(_other_field)


@provokes("length_differs")
def _message_longer_than_its_header_says() -> Joined:
    return reframing(0, lambda item: [Item(None, item.header, item.payload + b"\0")])


@provokes("length_differs")
def _header_that_agrees_with_a_wrong_length() -> Joined:
    def change(item: Item) -> Iterable[Item]:
        length = len(item.payload) + 1
        return [patched(Item(None, item.header, item.payload + b"\0"), 12, length.to_bytes(4))]

    return reframing(0, change)


@provokes("credit_exceeded")
def _frames_without_credit() -> Joined:
    honest = Joined().connect()
    honest.handoff(credit=64)
    pair = Joined().connect()
    pair.request(credit=2)
    pair.decoder.outgoing()
    pair.late_digests = deque()
    pair.wires[TO_DECODER].extend(
        item
        for item in honest.record[TO_DECODER]
        if item.text is None or item.text.startswith(b'{"type":"begin"')
    )
    while pair.wires[TO_DECODER]:
        pair.deliver(TO_DECODER)
    return pair


@provokes("digest_differs")
def _one_payload_bit() -> Joined:
    return reframing(2, lambda item: [Item(None, item.header, flipped(item.payload))])


# the seal


@provokes("frames_missing")
def _seal_too_early() -> Joined:
    pair = Joined()
    held: list[Item] = []

    def tamper(direction: str, index: int, item: Item) -> Iterable[Item]:
        if item.text is None and item.header[16:24] == (5).to_bytes(8, "big"):
            held.append(item)
        return [] if held and item.text is None else [item]

    pair.tamper = tamper
    pair.connect()
    pair.handoff(credit=64)
    return pair


@provokes("stream_digest_differs")
def _seal_over_other_frames() -> Joined:
    return rewriting(Seal, digest=flipped)


@provokes("stream_digest_differs")
def _frame_replaced_with_its_digest() -> Joined:
    def change(item: Item) -> Iterable[Item]:
        payload = flipped(item.payload)
        prefix = item.header[: frames.PREFIX_BYTES]
        return [Item(None, prefix + frames.digest(prefix, payload), payload)]

    return reframing(2, change)


@provokes("seal_differs")
def _seal_by_someone_without_the_key() -> Joined:
    return rewriting(Seal, mac=flipped)


@provokes("seal_differs")
def _seal_with_other_times() -> Joined:
    return rewriting(Seal, compute_us=3)


@provokes("seal_differs")
def _request_changed_underway() -> Joined:
    return rewriting(Prefill, request="other")


@provokes("transfer_differs")
def _seal_of_another_transfer() -> Joined:
    return rewriting(Seal, transfer=flipped)


@provokes("transfer_differs", TO_PRODUCER)
def _committed_for_another_transfer() -> Joined:
    pair = rewriting(Committed, transfer=flipped)
    pair.installed.clear()
    return pair


@provokes("commit_differs", TO_PRODUCER)
def _committed_by_someone_without_the_key() -> Joined:
    pair = rewriting(Committed, mac=flipped)
    pair.installed.clear()
    return pair


# time and ends


@provokes("peer_silent")
def _producer_that_says_nothing() -> Joined:
    pair = Joined().connect()
    pair.request()
    pair.expire_after(Timing().idle_s)
    return pair


@provokes("deadline_exceeded")
def _producer_that_only_says_that_it_lives() -> Joined:
    pair = Joined().connect()
    pair.auto_begin = False
    pair.request()
    pair.settle()
    while not pair.errors:
        pair.wires[TO_DECODER].append(Item(messages.encode(Progress(generation=1, done=0))))
        pair.deliver(TO_DECODER)
        pair.expire_after(20.0)
    return pair


@provokes("connection_lost")
def _end_of_stream() -> Joined:
    pair = Joined().connect()
    pair.request()
    try:
        pair.decoder.eof(pair.now)
    except BatonError as error:
        pair.errors[TO_DECODER] = error
    return pair


@provokes("peer_engine_fault")
def _engine_fault_over_there() -> Joined:
    return _ended_by("engine_fault")


@provokes("peer_aborted")
def _reason_of_tomorrow() -> Joined:
    return _ended_by("quantum_decoherence")


def _ended_by(reason: str) -> Joined:
    pair = Joined().connect()
    pair.request()
    message = messages.Abort(
        generation=0,
        reason=reason,
        field="",
        found="",
        expected="",
        components=(),
        retry_after_ms=0,
    )
    pair.wires[TO_DECODER].append(Item(messages.encode(message)))
    pair.deliver(TO_DECODER)
    return pair


SHELLS = {
    "cancelled",
    "capacity_exceeded",
    "queue_full",
    "memory_exceeded",
    "pairing_revoked",
    "producer_stopping",
    "engine_fault",
    "transfer_unknown",
    "transfer_expired",
    "transfer_committed",
    "resume_differs",
}
"""Reasons that shells give to ``abort``; test_endings and test_resume send them across."""

LOCAL = {"layout_not_carriable"}
"""Refused when a machine is made: tests/protocol/test_manifest.py."""


@pytest.mark.parametrize(
    ("reason", "direction", "provoke"),
    PROVOKED,
    ids=[f"{reason}{function.__name__}" for reason, _, function in PROVOKED],
)
def test_the_lie_is_refused_by_its_name(reason: str, direction: str, provoke: Provoke) -> None:
    pair = provoke()
    error = pair.errors[direction]
    assert error.reason == reason
    assert isinstance(error, REASONS[reason].error)
    assert pair.installed == []
    machine = pair.decoder if direction == TO_DECODER else pair.producer
    assert machine.state is State.CLOSED
    assert machine.deadline() is None
    if direction == TO_DECODER:
        assert pair.decoder._reception is None


def test_both_sides_give_the_same_reason() -> None:
    pair = rewriting(Prefill, cut=9)
    ours, theirs = pair.errors[TO_DECODER], pair.errors[TO_PRODUCER]
    assert type(ours) is type(theirs)
    assert ours.details() == theirs.details()


def test_all_differing_components_are_named_on_both_sides() -> None:
    theirs = structs.replace(IDENTITY, tokenizer="none", weights="f" * 64, template="none")
    pair = Joined(identities=(IDENTITY, theirs))
    pair.decoder.connect(pair.now)
    pair.settle()
    for error in pair.errors.values():
        assert error.reason == "weights_differ"
        assert vars(error)["components"] == ("weights", "tokenizer", "template")


def test_version_comes_before_identity_and_identity_before_layout() -> None:
    other = Identity(*["none"] * 8)

    def refused(**options: Any) -> str:
        pair = Joined(pairings=(Pairing(bytes(32), 1), PAIRING), **options)
        pair.decoder.connect(pair.now)
        pair.settle()
        return pair.errors[TO_PRODUCER].reason

    layouts = (LAYOUT, Layout(LAYOUT.layers[:1]))
    assert refused(identities=(IDENTITY, other), layouts=layouts) == "weights_differ"
    assert refused(layouts=layouts) == "layout_differs"
    assert refused() == "epoch_differs"


def test_every_listed_reason_is_provoked() -> None:
    assert {reason for reason, _, _ in PROVOKED} | SHELLS | LOCAL == set(REASONS)
