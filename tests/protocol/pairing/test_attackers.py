"""Somebody between the machines, or in the place of one: each comes to nothing.

Who holds the code is trusted; nobody here does, but where it is said.
"""

from __future__ import annotations

import base64
import traceback
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from protocol.errors import BatonError, IntegrityError, PeerProtocolError, told
from protocol.pairing.certificates import OwnCertificate
from protocol.pairing.exchange import DecoderPairing, Paired, ProducerPairing, Step
from protocol.pairing.messages import (
    PairAnswer,
    PairConfirmed,
    PairHello,
    PairRefused,
    decode,
    encode,
)
from tests.protocol.pairing.joined import (
    DECODER,
    NOW,
    OTHER,
    PRODUCER,
    RIGHT,
    WRONG,
    Stream,
    decoder,
    opened,
    producer,
    recorded,
    run,
    sent,
)

Machine = DecoderPairing | ProducerPairing


def refused(machine: Machine, raw: bytes, reason: str) -> None:
    with pytest.raises(BatonError) as caught:
        machine.receive(raw, NOW)
    assert caught.value.reason == reason
    assert machine.step is Step.CLOSED


# a man in the middle


@pytest.mark.parametrize(
    ("seen_by_decoder", "seen_by_producer"),
    [
        (OTHER.certificate, OTHER.certificate),
        (OTHER.certificate, DECODER.certificate),
        (PRODUCER.certificate, OTHER.certificate),
    ],
)
def test_two_connections_with_somebody_between_have_other_certificates(
    seen_by_decoder: bytes, seen_by_producer: bytes
) -> None:
    """He passes every message on as it is, and both ends have the right code."""
    codes = opened()
    one, other = decoder(seen=seen_by_decoder), producer(codes, seen=seen_by_producer)
    one.start(NOW)
    other.start(NOW)
    other.receive(sent(one), NOW)
    one.receive(sent(other), NOW)
    refused(other, sent(one), "code_differs")
    with pytest.raises(BatonError) as caught:
        codes.spend(NOW)
    assert caught.value.reason == "code_burned"


def test_the_decoder_too_refuses_other_certificates() -> None:
    """Even a producer that did not look would not be believed."""
    one, other = decoder(seen=OTHER.certificate), producer()
    one.start(NOW)
    other.start(NOW)
    other.receive(sent(one), NOW)
    one.receive(sent(other), NOW)
    keys = other._keys
    assert keys is not None
    refused(one, encode(PairConfirmed(mac=keys.proof("producer"))), "code_differs")


def test_somebody_between_who_guesses_wrong_pairs_with_neither() -> None:
    """He plays the producer with a code of his own, to learn the right one."""
    to_decoder = producer(own=OTHER)
    one = decoder(WRONG, seen=OTHER.certificate)
    one.start(NOW)
    to_decoder.start(NOW)
    to_decoder.receive(sent(one), NOW)
    one.receive(sent(to_decoder), NOW)
    keys = to_decoder._keys
    assert keys is not None
    refused(to_decoder, sent(one), "code_differs")
    refused(one, encode(PairConfirmed(mac=keys.proof("producer"))), "code_differs")


def test_names_epoch_and_port_are_confirmed_too() -> None:
    for change in (
        lambda message: structs.replace(message, name="another"),
        lambda message: structs.replace(message, epoch=8),
        lambda message: structs.replace(message, port=7432),
        lambda message: structs.replace(message, nonce=bytes(32)),
    ):
        one, other = decoder(), producer()
        one.start(NOW)
        other.start(NOW)
        other.receive(sent(one), NOW)
        one.receive(encode(change(decode(sent(other)))), NOW)
        refused(other, sent(one), "code_differs")


# replay


def test_a_recorded_decoder_gains_nothing_with_the_same_code() -> None:
    hello, _, confirm, _ = recorded()
    other = producer(entropy=Stream("another day"))
    other.start(NOW)
    other.receive(hello, NOW)
    refused(other, confirm, "code_differs")


def test_a_recorded_producer_gains_nothing_with_the_same_code() -> None:
    _, answer, _, confirmed = recorded()
    one = decoder(entropy=Stream("another day"))
    one.start(NOW)
    one.receive(answer, NOW)
    refused(one, confirmed, "code_differs")


def test_the_recording_itself_is_right() -> None:
    """With the randomness of that day its messages are still those of a pairing."""
    hello, answer, confirm, confirmed = recorded()
    other = producer()
    other.start(NOW)
    other.receive(hello, NOW)
    assert other.outgoing() == [answer]
    assert isinstance(other.receive(confirm, NOW), Paired)
    assert other.outgoing() == [confirmed]


# reflection


def test_a_hello_that_comes_back_is_refused() -> None:
    one = decoder()
    one.start(NOW)
    refused(one, sent(one), "message_unexpected")


@pytest.mark.parametrize("letter", [b"A", b"B", b"S", b"\0"])
def test_an_own_element_that_comes_back_is_refused(letter: bytes) -> None:
    one = decoder()
    one.start(NOW)
    hello = decode(sent(one))
    assert isinstance(hello, PairHello)
    element = letter + hello.element[1:]
    refused(one, encode(PairAnswer(hello.nonce, "gb10", 7, 7431, element)), "element_malformed")


def test_an_own_proof_that_comes_back_is_refused() -> None:
    one, other = decoder(), producer()
    one.start(NOW)
    other.start(NOW)
    other.receive(sent(one), NOW)
    one.receive(sent(other), NOW)
    proof = sent(one).replace(b"pair_confirm", b"pair_confirmed")
    refused(one, proof, "code_differs")


def test_a_producers_proof_is_no_decoders() -> None:
    one, other = decoder(), producer()
    one.start(NOW)
    other.start(NOW)
    other.receive(sent(one), NOW)
    keys = other._keys
    assert keys is not None
    assert keys.proof("producer") != keys.proof("decoder")
    raw = encode(PairConfirmed(mac=keys.proof("producer")))
    refused(other, raw.replace(b"pair_confirmed", b"pair_confirm"), "code_differs")


# elements that are none

Q = 2**255 - 19
ELEMENTS = {
    "of order 4": bytes(32),
    "the neutral element": (1).to_bytes(32, "little"),
    "the neutral element, written longer": (Q + 1).to_bytes(32, "little"),
    "the neutral element, with a sign": ((1 << 255) + 1).to_bytes(32, "little"),
    "of order 2": (Q - 1).to_bytes(32, "little"),
    "off the curve": (2).to_bytes(32, "little"),
    "all ones": b"\xff" * 32,
}


@pytest.mark.parametrize("letter", [b"A", b"B"])
@pytest.mark.parametrize("point", ELEMENTS.values(), ids=ELEMENTS.keys())
def test_what_is_no_element_is_refused_and_burns_the_code(letter: bytes, point: bytes) -> None:
    codes = opened()
    other = producer(codes)
    other.start(NOW)
    refused(other, encode(PairHello(1, bytes(32), "mac", 0, letter + point)), "element_malformed")
    assert [decode(raw).reason for raw in other.outgoing()] == ["element_malformed"]
    with pytest.raises(BatonError) as caught:
        codes.spend(NOW)
    assert caught.value.reason == "code_burned"
    one = decoder()
    one.start(NOW)
    refused(
        one, encode(PairAnswer(bytes(32), "gb10", 7, 7431, letter + point)), "element_malformed"
    )


@settings(max_examples=60)
@given(st.binary(min_size=33, max_size=33).map(lambda raw: b"A" + raw[1:]))
def test_any_element_is_answered_or_refused(element: bytes) -> None:
    other = producer()
    other.start(NOW)
    raw = encode(PairHello(1, bytes(32), "mac", 0, element))
    with suppress(PeerProtocolError):
        other.receive(raw, NOW)
    reply = decode(sent(other))
    if other.step is Step.CLOSED:
        assert reply == PairRefused("element_malformed", 0)
    else:
        assert isinstance(reply, PairAnswer)


# a guesser learns nothing but whether he was right


def test_the_producer_shows_no_proof_before_the_decoders() -> None:
    other = producer()
    other.start(NOW)
    guesser = decoder(WRONG)
    guesser.start(NOW)
    other.receive(sent(guesser), NOW)
    answer = decode(sent(other))
    assert isinstance(answer, PairAnswer)
    with pytest.raises(IntegrityError):
        other.receive(encode_confirm(bytes(32)), NOW)
    (raw,) = other.outgoing()
    assert raw == b'{"type":"pair_refused","reason":"code_differs","retry_after_ms":0}'


def encode_confirm(mac: bytes) -> bytes:
    return b'{"type":"pair_confirm","mac":"' + base64.b64encode(mac) + b'"}'


def test_the_answer_does_not_depend_on_what_was_guessed() -> None:
    """The same randomness, two guesses: the same bytes come back."""
    answers = set()
    for code in (RIGHT, WRONG):
        other, guesser = producer(), decoder(code)
        other.start(NOW)
        guesser.start(NOW)
        other.receive(sent(guesser), NOW)
        answers.add(sent(other))
    assert len(answers) == 1


# silence about secrets


def spellings(secret: bytes) -> set[str]:
    return {
        secret.hex(),
        base64.b64encode(secret).decode(),
        repr(secret),
        repr(secret)[2:-1],
        secret.decode("latin-1"),
    }


def secrets_of(paired: Paired, own: OwnCertificate) -> set[str]:
    found = set(RIGHT.split("-")) | {RIGHT}
    for secret in (paired.record.key, own.private_key):
        found |= spellings(secret)
    return found


def test_no_repr_and_no_error_shows_a_secret() -> None:
    ours, theirs = run(decoder(), producer())
    texts = [repr(value) for value in (ours, theirs, decoder(), producer(), DECODER, PRODUCER)]
    one, other = decoder(), producer()
    one.start(NOW)
    other.start(NOW)
    other.receive(sent(one), NOW)
    answer = sent(other)
    one.receive(answer, NOW)
    texts += [repr(value) for value in (one, other, one._keys, one._guess, other._code)]
    for machine, raw in (
        (one, encode(PairConfirmed(mac=bytes(32)))),
        (other, encode_confirm(bytes(32))),
    ):
        with pytest.raises(BatonError) as caught:
            machine.receive(raw, NOW)
        error = caught.value
        texts += [str(error), repr(error), repr(error.details()), told(error, "baton")]
        texts.append("".join(traceback.format_exception(error)))
    shown = "\n".join(texts)
    assert "code_differs" in shown
    hidden = secrets_of(ours, DECODER) | secrets_of(theirs, PRODUCER)
    assert [secret for secret in hidden if secret in shown] == []


def test_no_message_shows_a_secret() -> None:
    ours, theirs = run(decoder(), producer())
    wire = "\n".join(raw.decode() for raw in recorded())
    hidden = secrets_of(ours, DECODER) | secrets_of(theirs, PRODUCER)
    assert [secret for secret in hidden if secret in wire] == []
