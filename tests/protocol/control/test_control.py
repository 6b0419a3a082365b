"""The control channel: what both sides agree on, and everything that is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

import protocol
from protocol import control
from protocol.control import (
    ANSWER_S,
    CHECK_S,
    PATIENCE_S,
    STALL_S,
    TOLD,
    DecoderControl,
    DescribeAsked,
    ModelOffered,
    ProducerControl,
    Proven,
    Rekeyed,
    RotateAsked,
    Step,
    UnpairAsked,
)
from protocol.control.messages import (
    NO_MAC,
    ControlAnswer,
    ControlHello,
    ControlProof,
    ControlRefused,
    Describe,
    Description,
    ModelKept,
    ModelWanted,
    SendModel,
    Unpaired,
    decode,
    encode,
)
from protocol.control.models import PIECE_BYTES
from protocol.errors import BatonError, LocalProtocolError, TransferError
from protocol.pairing import MAX_EPOCH, Pairing, PinnedCertificates
from protocol.reasons import CONTROL_REASONS, PAIRING_REASONS, REASONS, refusal
from tests.protocol.control.joined import (
    CERTIFICATES,
    DESCRIPTION,
    HAVE,
    KEY,
    NOW,
    OFFER,
    PIECE,
    Joined,
    decoder,
    producer,
)

README = Path(protocol.__file__).parent / "README.md"
OTHER_KEY = Pairing(b"o" * 32, KEY.epoch)
NEW = Pairing(b"n" * 32, KEY.epoch + 1)


def refused(pair: Joined, side: str, reason: str) -> None:
    """``side`` refused for this reason, said it, and neither side learned anything."""
    assert pair.errors[side].reason == reason
    machine = pair.decoder if side == "decoder" else pair.producer
    assert machine.step is Step.CLOSED


# Questions and answers


def test_both_sides_prove_the_key() -> None:
    pair = Joined().start()
    assert pair.events == [("producer", Proven(KEY)), ("decoder", Proven(KEY))]
    assert pair.decoder.step is pair.producer.step is Step.READY


def test_a_producer_describes_itself_as_often_as_it_is_asked() -> None:
    pair = Joined().start()
    for _ in range(3):
        pair.ask("describe")
        assert pair.events[-2] == ("producer", DescribeAsked())
        side, found = pair.events[-1]
        assert side == "decoder"
        assert isinstance(found, Description)
        assert found.mac != NO_MAC
        assert structs.replace(found, mac=NO_MAC) == DESCRIPTION


def test_a_producer_that_loads_has_no_identity_yet() -> None:
    one, other = ready()
    one.describe(NOW)
    other.receive(sent(one), NOW)
    loading = Description("gb10", "0.1.0", "loading", "m", None, None)
    other.described(loading, NOW)
    found = one.receive(sent(other), NOW)
    assert isinstance(found, Description)
    assert (found.state, found.identity, found.recipe) == ("loading", None, None)


def test_a_decoder_is_forgotten_before_it_is_told() -> None:
    pair = Joined().start().ask("unpair")
    assert [type(event) for _, event in pair.events[2:]] == [UnpairAsked, Unpaired]
    assert pair.decoder.step is pair.producer.step is Step.ENDED


def test_a_rotation_gives_both_sides_the_same_new_key() -> None:
    pair = Joined().start().ask("rotate")
    (kept,) = [event for event in pair.of("producer") if isinstance(event, RotateAsked)]
    (got,) = [event for event in pair.of("decoder") if isinstance(event, Rekeyed)]
    assert kept.pairing == got.pairing
    assert got.pairing.epoch == KEY.epoch + 1
    assert got.pairing.key != KEY.key


def test_each_connection_rotates_to_another_key() -> None:
    keys = set()
    for _ in range(3):
        pair = Joined(DecoderControl(KEY, CERTIFICATES), ProducerControl([KEY], CERTIFICATES))
        event = pair.start().ask("rotate").of("decoder")[-1]
        assert isinstance(event, Rekeyed)
        keys.add(event.pairing.key)
    assert len(keys) == 3


@pytest.mark.parametrize("question", ["unpair", "rotate"])
def test_nothing_is_asked_after_the_key_was_given_up(question: str) -> None:
    pair = Joined().start().ask(question)
    for another in ("describe", "unpair", "rotate"):
        with pytest.raises(LocalProtocolError):
            getattr(pair.decoder, another)(NOW)


def test_one_question_at_a_time() -> None:
    one, _ = ready()
    one.describe(NOW)
    with pytest.raises(LocalProtocolError):
        one.rotate(NOW)


def test_a_producer_answers_what_was_asked() -> None:
    one, other = ready()
    one.describe(NOW)
    other.receive(sent(one), NOW)
    for wrong in (other.unpaired, other.rotated):
        with pytest.raises(LocalProtocolError):
            wrong(NOW)
    other.described(DESCRIPTION, NOW)


# Models


def test_a_model_is_sent_from_where_the_producer_has_it_and_kept() -> None:
    pair = Joined().start().ask("send_model")
    wanted, kept = pair.of("decoder")[1:]
    assert pair.of("producer")[1:] == [ModelOffered(replaced(OFFER, pair))]
    assert isinstance(wanted, ModelWanted)
    assert wanted.offset == HAVE
    assert isinstance(kept, ModelKept)
    assert (kept.name, kept.serving) == ("some-model-2", "restarting")
    assert pair.decoder.step is pair.producer.step is Step.READY
    pair.ask("describe")
    assert isinstance(pair.of("decoder")[-1], Description)


def replaced(offer: SendModel, pair: Joined) -> SendModel:
    """The offer as it travelled, with its MAC."""
    (said,) = [found for _, raw in pair.record if isinstance(found := decode(raw), SendModel)]
    assert structs.replace(said, mac=NO_MAC) == offer
    return said


def test_a_model_that_is_there_is_not_sent() -> None:
    one, other = offered()
    other.wanted(OFFER.nbytes, NOW)
    one.receive(sent(other), NOW)
    assert one.left == other.left == 0
    one.all_sent(NOW)
    other.all_received(NOW)
    other.kept("m", "now", NOW)
    assert isinstance(one.receive(sent(other), NOW), ModelKept)


def test_an_offset_behind_the_stream_is_refused() -> None:
    one, other = offered()
    with pytest.raises(LocalProtocolError):
        other.wanted(OFFER.nbytes + 1, NOW)
    other._left = OFFER.nbytes + 1
    other.wanted(OFFER.nbytes + 1, NOW)
    with pytest.raises(BatonError) as caught:
        one.receive(sent(other), NOW)
    assert caught.value.reason == "message_malformed"


def test_a_list_that_is_longer_than_its_stream_is_refused() -> None:
    one, other = ready()
    one.send_model(structs.replace(OFFER, nbytes=OFFER.manifest_bytes - 1), NOW)
    with pytest.raises(BatonError) as caught:
        other.receive(sent(one), NOW)
    assert caught.value.reason == "model_manifest_invalid"
    assert decode(sent(other)) == ControlRefused(reason="model_manifest_invalid")


@pytest.mark.parametrize(
    ("nbytes", "reason"),
    [(0, "frame_too_long"), (PIECE_BYTES + 1, "frame_too_long"), (-1, "frame_too_long")],
)
def test_pieces_have_bounds(nbytes: int, reason: str) -> None:
    one, other = ready()
    one.send_model(structs.replace(OFFER, nbytes=PIECE_BYTES * 2), NOW)
    other.receive(sent(one), NOW)
    other.wanted(0, NOW)
    one.receive(sent(other), NOW)
    with pytest.raises(LocalProtocolError):
        one.data(nbytes, NOW)
    with pytest.raises(BatonError) as caught:
        other.data(nbytes, NOW)
    assert caught.value.reason == reason
    assert other.step is Step.CLOSED


def test_no_byte_comes_behind_the_last_or_before_it_is_wanted() -> None:
    _, early = ready()
    with pytest.raises(BatonError) as caught:
        early.data(1, NOW)
    assert caught.value.reason == "frame_unexpected"
    _, other = offered()
    with pytest.raises(BatonError) as caught:
        copy.deepcopy(other).data(1, NOW)
    assert caught.value.reason == "frame_unexpected"
    other.wanted(OFFER.nbytes - 5, NOW)
    with pytest.raises(BatonError) as caught:
        copy.deepcopy(other).data(6, NOW)
    assert caught.value.reason == "frame_too_long"
    other.data(5, NOW)
    with pytest.raises(BatonError) as caught:
        other.data(1, NOW)
    assert caught.value.reason == "frame_too_long"


def test_a_model_is_whole_or_not_done() -> None:
    one, other = offered()
    other.wanted(0, NOW)
    one.receive(sent(other), NOW)
    for end in (one.all_sent, other.all_received):
        with pytest.raises(LocalProtocolError):
            end(NOW)
    for machine in (one, other):
        with pytest.raises(TransferError) as caught:
            machine.eof()
        assert caught.value.reason == "connection_lost"


@pytest.mark.parametrize("reason", sorted(set(CONTROL_REASONS) - {"control_refused"}))
def test_a_model_that_is_refused_in_the_middle_is_told_why(reason: str) -> None:
    one, other = offered()
    other.wanted(0, NOW)
    one.receive(sent(other), NOW)
    other.shut(refusal(reason, "x"))
    with pytest.raises(CONTROL_REASONS[reason].error) as caught:
        one.receive(sent(other), NOW)
    assert caught.value.reason == reason


def offered() -> tuple[DecoderControl, ProducerControl]:
    one, other = ready()
    one.send_model(OFFER, NOW)
    assert isinstance(other.receive(sent(one), NOW), ModelOffered)
    return one, other


# Rotation whose messages are lost


def test_a_rotation_that_never_arrived_is_nobodys_change() -> None:
    one, other = ready()
    one.rotate(NOW)
    sent(one)  # and lost
    with pytest.raises(TransferError) as caught:
        one.eof()
    assert caught.value.reason == "connection_lost"
    other.eof()  # nothing was asked of it


def test_a_lost_answer_leaves_the_old_key_good_beside_the_new() -> None:
    one, other = ready()
    one.rotate(NOW)
    asked = other.receive(sent(one), NOW)
    assert isinstance(asked, RotateAsked)
    other.rotated(NOW)
    sent(other)  # and lost
    with pytest.raises(TransferError):
        one.eof()
    both = (asked.pairing, KEY)
    again = Joined(decoder(KEY), producer(*both)).start().ask("rotate")
    event = again.of("decoder")[-1]
    assert isinstance(event, Rekeyed)
    assert event.pairing.epoch == asked.pairing.epoch
    assert event.pairing.key == asked.pairing.key, "the same nonces in this test alone"


def test_the_new_key_is_good_beside_the_old() -> None:
    pair = Joined(decoder(NEW), producer(NEW, KEY)).start()
    assert pair.of("producer") == [Proven(NEW)]


def test_an_old_epoch_is_refused() -> None:
    pair = Joined(decoder(KEY), producer(NEW)).start()
    refused(pair, "producer", "epoch_differs")
    assert pair.errors["decoder"].reason == "epoch_differs"
    assert pair.events == []


def test_a_rotation_to_another_epoch_than_the_next_is_refused() -> None:
    one, other = ready()
    one._pairing = replace(KEY, epoch=KEY.epoch + 1)  # asks for one too many
    one.rotate(NOW)
    with pytest.raises(BatonError) as caught:
        other.receive(sent(one), NOW)
    assert caught.value.reason == "epoch_not_later"


def test_the_last_epoch_is_not_rotated() -> None:
    last = Pairing(KEY.key, MAX_EPOCH)
    pair = Joined(decoder(last), producer(last)).start()
    with pytest.raises(LocalProtocolError):
        pair.decoder.rotate(NOW)


# Attackers


def test_another_key_is_refused_by_the_producer_first() -> None:
    pair = Joined(decoder(OTHER_KEY)).start()
    refused(pair, "producer", "proof_differs")
    assert pair.errors["decoder"].reason == "proof_differs"
    assert pair.events == []
    assert not any(
        isinstance(decode(raw), ControlProof) for side, raw in pair.record if side == "producer"
    ), "a stranger sees nothing keyed"


def test_a_producer_without_the_key_is_refused() -> None:
    one = decoder()
    one.start(NOW)
    sent(one)
    one.receive(encode(ControlAnswer(nonce=b"n" * 32)), NOW)
    with pytest.raises(BatonError) as caught:
        one.receive(encode(ControlProof(mac=b"m" * 32)), NOW)
    assert caught.value.reason == "proof_differs"


def test_a_reflected_proof_is_none() -> None:
    one = decoder()
    one.start(NOW)
    sent(one)
    one.receive(encode(ControlAnswer(nonce=b"n" * 32)), NOW)
    with pytest.raises(BatonError) as caught:
        one.receive(sent(one), NOW)
    assert caught.value.reason == "proof_differs"


@pytest.mark.parametrize(
    "seen",
    [
        PinnedCertificates(b"x" * 32, CERTIFICATES.producer),
        PinnedCertificates(CERTIFICATES.decoder, b"x" * 32),
        PinnedCertificates(CERTIFICATES.producer, CERTIFICATES.decoder),
    ],
)
def test_somebody_in_between_is_noticed(seen: PinnedCertificates) -> None:
    refused(Joined(producer=producer(certificates=seen)).start(), "producer", "proof_differs")


def test_a_recorded_exchange_does_nothing_again() -> None:
    recorded = [raw for side, raw in session("unpair").record if side == "decoder"]
    other = ProducerControl([KEY], CERTIFICATES)
    other.start(NOW)
    assert other.receive(recorded[0], NOW) is None
    with pytest.raises(BatonError) as caught:
        other.receive(recorded[1], NOW)
    assert caught.value.reason == "proof_differs"


def test_a_recorded_producer_is_refused() -> None:
    recorded = [raw for side, raw in session("describe").record if side == "producer"]
    one = DecoderControl(KEY, CERTIFICATES)
    one.start(NOW)
    one.receive(recorded[0], NOW)
    with pytest.raises(BatonError) as caught:
        one.receive(recorded[1], NOW)
    assert caught.value.reason == "proof_differs"


def test_a_message_is_good_once_and_in_its_place() -> None:
    one, other = ready()
    one.describe(NOW)
    asked = sent(one)
    other.receive(asked, NOW)
    other.described(DESCRIPTION, NOW)
    one.receive(sent(other), NOW)
    with pytest.raises(BatonError) as caught:
        other.receive(asked, NOW)
    assert caught.value.reason == "proof_differs"


def test_questions_before_the_proof_are_refused() -> None:
    for message in (Describe(mac=b"m" * 32), ControlProof(mac=b"m" * 32)):
        other = producer()
        other.start(NOW)
        with pytest.raises(BatonError) as caught:
            other.receive(encode(message), NOW)
        assert caught.value.reason == "message_unexpected"


def session(question: str, tamper=None) -> Joined:
    pair = Joined() if tamper is None else Joined(tamper=tamper)
    return pair.start().ask(question)


def events_before(question: str, sender: str, number: int) -> list[tuple[str, object]]:
    """What happened before that message of ``sender`` was to arrive, in a session without it."""
    return session(
        question, lambda side, count, raw: [] if side == sender and count >= number else [raw]
    ).events


SENDING = (("decoder", 2), ("producer", 2), ("producer", 3))
PLACES = [
    *(("describe", side, number) for number in range(3) for side in ("decoder", "producer")),
    *((question, side, 2) for question in ("unpair", "rotate") for side in ("decoder", "producer")),
    *(("send_model", side, number) for side, number in SENDING),
]


@pytest.mark.parametrize(("question", "sender", "number"), PLACES)
@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80])
def test_no_byte_can_be_changed(question: str, sender: str, number: int, mask: int) -> None:
    """Whoever gets the changed message refuses it, and nothing more happens on either side."""
    before = events_before(question, sender, number)
    raw = [raw for side, raw in session(question).record if side == sender][number]
    for place in range(len(raw)):
        changed = bytearray(raw)
        changed[place] ^= mask

        def tamper(side: str, count: int, message: bytes, changed: bytes = bytes(changed)):
            return [changed if (side, count) == (sender, number) else message]

        pair = session(question, tamper)
        assert pair.errors, f"byte {place}"
        assert {error.reason for error in pair.errors.values()} <= set(TOLD)
        assert pair.events == before, f"byte {place}"


@pytest.mark.parametrize("place", ["between", "doubled", "swapped"])
def test_messages_that_are_inserted_doubled_or_swapped_are_refused(place: str) -> None:
    def tamper(side: str, count: int, message: bytes):
        if side == "decoder" and count == 2:
            return {
                "between": [encode(Describe(mac=b"m" * 32)), message],
                "doubled": [message, message],
                "swapped": [encode(ControlHello(1, b"n" * 32, 7)), message],
            }[place]
        return [message]

    assert session("rotate", tamper).errors["producer"]


# Endings


def test_a_refusal_is_told_by_its_reason() -> None:
    one, other = ready()
    one.unpair(NOW)
    other.receive(sent(one), NOW)
    other.shut(refusal("trust_not_kept", "the disk is full"))
    with pytest.raises(BatonError) as caught:
        one.receive(sent(other), NOW)
    assert caught.value.reason == "trust_not_kept"
    assert one.step is Step.CLOSED
    assert one.outgoing() == []


def test_a_reason_that_is_not_listed_is_not_passed_on() -> None:
    one, other = ready()
    other.shut(BatonError("x", reason="made_up"))
    assert decode(sent(other)) == ControlRefused(reason="control_refused")
    with pytest.raises(BatonError) as caught:
        one.receive(encode(ControlRefused(reason="made_up")), NOW)
    assert (caught.value.reason, caught.value.found) == ("control_refused", "made_up")


@pytest.mark.parametrize(("late", "reason"), [(-0.01, None), (0.0, "peer_silent")])
def test_silence_is_refused(late: float, reason: str | None) -> None:
    def patience(machine: DecoderControl | ProducerControl, seconds: float | None) -> None:
        due = machine.deadline()
        assert due == (None if seconds is None else NOW + seconds)
        if due is None:
            return
        machine = copy.deepcopy(machine)
        if reason is None:
            machine.tick(due + late)
            return
        with pytest.raises(TransferError) as caught:
            machine.tick(due + late)
        assert caught.value.reason == reason
        assert machine.step is Step.CLOSED

    one, other = decoder(), producer()
    one.start(NOW)
    other.start(NOW)
    patience(one, PATIENCE_S)
    patience(other, PATIENCE_S)
    other.receive(sent(one), NOW)
    patience(other, PATIENCE_S)
    one.receive(sent(other), NOW)
    patience(one, PATIENCE_S)
    other.receive(sent(one), NOW)
    patience(other, ANSWER_S)
    one.receive(sent(other), NOW)
    patience(one, None)
    one.rotate(NOW)
    patience(one, ANSWER_S)
    other.receive(sent(one), NOW)
    patience(other, None)


def test_who_waits_how_long_for_a_model() -> None:
    one, other = ready()

    def due() -> tuple[float | None, float | None]:
        ends = one.deadline(), other.deadline()
        return tuple(None if end is None else end - NOW for end in ends)  # type: ignore[return-value]

    one.send_model(OFFER, NOW)
    other.receive(sent(one), NOW)
    assert due() == (CHECK_S, None)
    other.wanted(HAVE, NOW)
    one.receive(sent(other), NOW)
    assert due() == (STALL_S, STALL_S)
    one.data(1, NOW + 5)
    other.data(1, NOW + 5)
    assert due() == (STALL_S + 5, STALL_S + 5)
    with pytest.raises(TransferError) as caught:
        copy.deepcopy(other).tick(NOW + 5 + STALL_S)
    assert caught.value.reason == "peer_silent"
    for machine in (one, other):
        while machine.left:
            machine.data(min(PIECE, machine.left), NOW)
    one.all_sent(NOW)
    other.all_received(NOW)
    assert due() == (CHECK_S, None)
    other.kept("some-model", "now", NOW)
    one.receive(sent(other), NOW)
    assert due() == (None, ANSWER_S)


def test_an_end_between_questions_is_none_of_anybodys_business() -> None:
    one, other = ready()
    one.eof()
    other.eof()
    assert one.step is other.step is Step.CLOSED


@pytest.mark.parametrize("machine", [decoder, producer])
def test_calls_in_the_wrong_place_are_misuse(machine) -> None:
    one = machine()
    with pytest.raises(LocalProtocolError):
        one.receive(b"{}", NOW)
    one.start(NOW)
    with pytest.raises(LocalProtocolError):
        one.start(NOW)


@pytest.mark.parametrize("side", ["decoder", "producer"])
def test_messages_of_another_step_are_refused(side: str) -> None:
    """In READY: a producer owes nothing, and a decoder has opened already."""
    messages = {
        "decoder": (Unpaired(mac=b"m" * 32), ControlAnswer(nonce=b"n" * 32), DESCRIPTION),
        "producer": (Unpaired(mac=b"m" * 32), ControlHello(1, b"n" * 32, 7), DESCRIPTION),
    }
    for message in messages[side]:
        machine = dict(zip(("decoder", "producer"), ready(), strict=True))[side]
        with pytest.raises(BatonError) as caught:
            machine.receive(encode(message), NOW)
        assert caught.value.reason == "message_unexpected"
        assert machine.step is Step.CLOSED


def test_nothing_shows_a_key() -> None:
    pair = Joined().start().ask("rotate")
    event = pair.of("decoder")[-1]
    assert isinstance(event, Rekeyed)
    shown = f"{pair.decoder!r} {pair.producer!r} {pair.events!r} {pair.record!r}"
    for pairing in (KEY, event.pairing):
        assert pairing.key.hex() not in shown
        assert repr(pairing.key) not in shown


def test_the_readme_draws_the_tables() -> None:
    readme = README.read_text()
    for side, machine in (("decoder", DecoderControl), ("producer", ProducerControl)):
        for (step, trigger), target in machine.STEPS.items():
            assert f"| {side} | {step} | {trigger} → {target} |\n" in readme


def test_the_reasons_are_listed_given_and_told() -> None:
    readme = README.read_text()
    for code, reason in CONTROL_REASONS.items():
        assert f"| `{code}` | {reason.error.__name__} | {reason.meaning} |\n" in readme
        assert code not in REASONS
        assert code not in PAIRING_REASONS
    assert set(CONTROL_REASONS) <= set(TOLD)
    section = readme.split("## Control\n")[1].split("## Limits\n")[0]
    for code in set(TOLD) - set(CONTROL_REASONS):
        assert f"`{code}`" in section
    assert control.PATH in section


def ready() -> tuple[DecoderControl, ProducerControl]:
    pair = Joined().start()
    assert pair.decoder.step is Step.READY
    return pair.decoder, pair.producer


def sent(machine: DecoderControl | ProducerControl) -> bytes:
    (raw,) = machine.outgoing()
    return raw
