"""Two machines with one code come to one key; whoever disturbs them burns the code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import protocol
from protocol.errors import (
    BatonError,
    CapacityError,
    ConfigError,
    EngineFault,
    IntegrityError,
    LocalProtocolError,
    PeerProtocolError,
    TransferError,
)
from protocol.pairing.code import CODE_LIFE_S, Codes
from protocol.pairing.exchange import (
    PATIENCE_S,
    TOLD,
    DecoderPairing,
    Paired,
    ProducerPairing,
    Step,
)
from protocol.pairing.messages import MAX_MESSAGE, PairRefused, decode, encode
from protocol.pairing.record import PairingRecord, decode_record, encode_record, fingerprint
from protocol.reasons import PAIRING_REASONS, REASONS, refusal
from tests.protocol.pairing.joined import (
    DECODER,
    NOW,
    PRODUCER,
    RIGHT,
    WRONG,
    decoder,
    opened,
    producer,
    recorded,
    run,
    sent,
)

HIGHEST = (1 << 53) - 1


def refused(
    machine: DecoderPairing | ProducerPairing, raw: bytes, reason: str, now: float = NOW
) -> BatonError:
    """What the machine says of ``raw``; it is then CLOSED, and tells the other side."""
    with pytest.raises(BatonError) as caught:
        machine.receive(raw, now)
    assert caught.value.reason == reason
    assert machine.step is Step.CLOSED
    assert machine.deadline() is None
    assert decode(sent(machine)) == PairRefused(reason, 0)
    return caught.value


def burned(codes: Codes) -> bool:
    """Whether the code that was open has been tried, and nobody can try it again."""
    with pytest.raises(ConfigError) as caught:
        codes.spend(NOW)
    return caught.value.reason == "code_burned"


def at(step: Step) -> tuple[DecoderPairing, ProducerPairing, Codes, bytes]:
    """Both machines, the receiver of the next message in ``step``, and that message."""
    codes = opened()
    one, other = decoder(), producer(codes)
    one.start(NOW)
    other.start(NOW)
    raw = sent(one)
    for machine in (other, one, other, one):
        if machine.step is step:
            break
        machine.receive(raw, NOW)
        raw = sent(machine)
    return one, other, codes, raw


# what comes out


def test_both_sides_keep_the_same_key_and_epoch() -> None:
    ours, theirs = run(decoder(), producer())
    assert ours.record.pairing == theirs.record.pairing
    assert ours.record.epoch == 7
    assert (ours.record.role, theirs.record.role) == ("decoder", "producer")
    assert (ours.name, theirs.name) == ("gb10 in the rack", "macbook")
    assert ours.record.fingerprints == theirs.record.fingerprints
    assert ours.record.fingerprints.decoder == fingerprint(DECODER.certificate)


def test_each_side_keeps_its_own_certificate_and_the_one_it_saw() -> None:
    ours, theirs = (paired.record for paired in run(decoder(), producer()))
    assert (ours.certificate, ours.private_key) == (DECODER.certificate, DECODER.private_key)
    assert (theirs.certificate, theirs.private_key) == (PRODUCER.certificate, PRODUCER.private_key)
    assert (ours.peer_certificate, theirs.peer_certificate) == (
        PRODUCER.certificate,
        DECODER.certificate,
    )


def test_records_are_files_of_their_sides() -> None:
    for paired in run(decoder(), producer()):
        record: PairingRecord = paired.record
        assert decode_record(encode_record(record), record.role) == record


def test_each_pairing_has_a_key_of_its_own() -> None:
    """Real randomness; the code, names, certificates and epoch are the same."""
    keys = set()
    for _ in range(2):
        one = DecoderPairing(
            code=opened().spend(NOW), name="a", own=DECODER, peer_certificate=PRODUCER.certificate
        )
        other = ProducerPairing(
            codes=opened(),
            name="b",
            own=PRODUCER,
            peer_certificate=DECODER.certificate,
            epoch=1,
            port=7431,
        )
        keys.add(run(one, other)[0].record.key)
    assert len(keys) == 2


def test_a_code_pairs_once() -> None:
    codes = opened()
    run(decoder(), producer(codes))
    other = producer(codes)
    other.start(NOW)
    one = decoder()
    one.start(NOW)
    refused(other, sent(one), "pairing_closed")


@pytest.mark.parametrize(
    ("earlier", "epoch", "result"),
    [(0, 1, 1), (0, 9, 9), (8, 9, 9), (9, 9, 10), (500, 9, 501), (HIGHEST - 1, 1, HIGHEST)],
)
def test_the_epoch_is_later_than_all_of_both_sides(earlier: int, epoch: int, result: int) -> None:
    ours, theirs = run(decoder(earlier=earlier), producer(epoch=epoch))
    assert ours.record.epoch == theirs.record.epoch == result


def test_an_epoch_that_is_not_later_is_refused() -> None:
    one, _, _, raw = at(Step.HELLO_SENT)
    late = decoder(earlier=7)
    late.start(NOW)
    refused(late, raw, "epoch_not_later")
    assert one.receive(raw, NOW) is None


def test_a_decoder_that_has_had_the_last_epoch_is_refused() -> None:
    _, other, codes, raw = at(Step.LISTENING)
    refused(other, raw.replace(b'"earlier":0', b'"earlier":%d' % HIGHEST), "epoch_not_later")
    assert burned(codes)


# codes


def test_another_code_is_refused_and_burns_the_producers() -> None:
    codes = opened()
    one, other = decoder(WRONG), producer(codes)
    one.start(NOW)
    other.start(NOW)
    other.receive(sent(one), NOW)
    one.receive(sent(other), NOW)
    error = refused(other, sent(one), "code_differs")
    assert isinstance(error, IntegrityError)
    assert burned(codes)
    with pytest.raises(IntegrityError) as caught:
        one.receive(encode(PairRefused("code_differs", 0)), NOW)
    assert caught.value.reason == "code_differs"
    assert one.step is Step.CLOSED
    assert one.outgoing() == []


def test_a_right_code_after_a_wrong_one_comes_too_late() -> None:
    codes = opened()
    guesser, other = decoder(WRONG), producer(codes)
    guesser.start(NOW)
    other.start(NOW)
    other.receive(sent(guesser), NOW)
    one, second = decoder(), producer(codes)
    one.start(NOW)
    second.start(NOW)
    # The first exchange has not even ended.
    refused(second, sent(one), "code_burned")


def test_an_expired_code_is_refused() -> None:
    other = producer(opened())
    later = NOW + CODE_LIFE_S
    other.start(later)
    one = decoder()
    one.start(later)
    refused(other, sent(one), "code_expired", later)


def test_without_a_code_nothing_is_answered() -> None:
    other = producer(Codes())
    other.start(NOW)
    one = decoder()
    one.start(NOW)
    refused(other, sent(one), "pairing_closed")


def test_the_pause_is_told_with_its_length() -> None:
    codes = Codes()
    for _ in range(3):
        codes.open(NOW)
    codes.spend(NOW)
    other = producer(codes)
    other.start(NOW)
    one = decoder()
    one.start(NOW)
    with pytest.raises(CapacityError) as caught:
        other.receive(sent(one), NOW)
    assert caught.value.reason == "pairing_paused"
    with pytest.raises(CapacityError) as told:
        one.receive(sent(other), NOW)
    assert told.value.reason == "pairing_paused"
    assert told.value.retry_after_s == caught.value.retry_after_s == CODE_LIFE_S


# every byte


def finish(machines: list[DecoderPairing | ProducerPairing], raw: bytes) -> list[Paired]:
    """Deliver ``raw`` and whatever follows from it; the first machine receives it."""
    paired = []
    for turn in range(8):
        machine = machines[turn % 2]
        if machine.step in (Step.PAIRED, Step.CLOSED):
            break
        with suppress(BatonError):
            result = machine.receive(raw, NOW)
            paired += [result] if result is not None else []
        queued = machine.outgoing()
        if not queued:
            break
        (raw,) = queued
    return paired


@pytest.mark.parametrize(
    "step", [Step.LISTENING, Step.HELLO_SENT, Step.ANSWERED, Step.CONFIRM_SENT]
)
@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_any_changed_byte_is_refused_and_burns_the_code(step: Step, how: str) -> None:
    one, other, codes, raw = at(step)
    for place in range(len(raw)):
        flipped = bytes((raw[place] ^ (1 << place % 7),))
        changed = raw[:place] + (flipped + raw[place + 1 :] if how == "flipped" else b"")
        first, second, left = copy.deepcopy((one, other, codes))
        machines = [first, second] if one.step is step else [second, first]
        paired = finish([*machines], changed)
        if step is Step.CONFIRM_SENT:
            # The producer has verified everything before; its record has no counterpart.
            assert paired == []
            assert (first.step, second.step) == (Step.CLOSED, Step.PAIRED)
        else:
            assert paired == []
            assert second.step is Step.CLOSED
            assert burned(left)


def test_what_was_not_changed_pairs() -> None:
    """The test above would notice nothing if its exchanges never came to an end."""
    for step in (Step.LISTENING, Step.HELLO_SENT, Step.ANSWERED):
        one, other, _, raw = at(step)
        machines = [one, other] if one.step is step else [other, one]
        assert len(finish([*machines], raw)) == 2


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "message_malformed"),
        (b"GET / HTTP/1.1\r\n\r\n", "message_malformed"),
        (b"x" * (MAX_MESSAGE + 1), "message_too_long"),
        (b'{"type":"hello","version":1}', "message_unknown"),
        (b'{"type":"pair_hello","version":2}', "version_unsupported"),
        (b'{"type":"pair_confirm","mac":"' + b"A" * 43 + b'="}', "message_unexpected"),
    ],
)
def test_whatever_comes_first_burns_the_code(raw: bytes, reason: str) -> None:
    codes = opened()
    other = producer(codes)
    other.start(NOW)
    refused(other, raw, reason)
    assert burned(codes)


# order


@pytest.mark.parametrize(
    "step", [Step.LISTENING, Step.HELLO_SENT, Step.ANSWERED, Step.CONFIRM_SENT]
)
@pytest.mark.parametrize("index", range(4))
def test_only_the_next_message_is_taken(step: Step, index: int) -> None:
    one, other, codes, expected = at(step)
    machine = one if one.step is step else other
    raw = recorded()[index]
    if raw == expected:
        machine.receive(raw, NOW)
        assert machine.step is not Step.CLOSED
    else:
        refused(machine, raw, "message_unexpected")
        if step is not Step.CONFIRM_SENT:
            assert machine is one or burned(codes)


@pytest.mark.parametrize("machine", [decoder(), producer()])
def test_nothing_is_received_before_start(machine: DecoderPairing | ProducerPairing) -> None:
    with pytest.raises(LocalProtocolError):
        machine.receive(recorded()[0], NOW)
    assert machine.step is Step.START


def test_an_exchange_starts_once() -> None:
    for machine in (decoder(), producer()):
        machine.start(NOW)
        step = machine.step
        with pytest.raises(LocalProtocolError):
            machine.start(NOW)
        assert machine.step is step


def test_nothing_is_received_after_the_end() -> None:
    one, other = decoder(), producer()
    run(one, other)
    for machine in (one, other):
        for raw in recorded():
            with pytest.raises(LocalProtocolError):
                machine.receive(raw, NOW)
        assert machine.step is Step.PAIRED
        assert machine.deadline() is None


# endings


def test_a_connection_that_ends_before_the_guess_burns_nothing() -> None:
    codes = opened()
    other = producer(codes)
    other.start(NOW)
    other.eof()
    assert other.step is Step.CLOSED
    assert codes.spend(NOW).text == RIGHT


def test_silence_before_the_guess_burns_nothing() -> None:
    codes = opened()
    other = producer(codes)
    other.start(NOW)
    assert other.deadline() == NOW + PATIENCE_S
    other.tick(NOW + PATIENCE_S - 0.01)
    with pytest.raises(TransferError) as caught:
        other.tick(NOW + PATIENCE_S)
    assert caught.value.reason == "peer_silent"
    assert codes.spend(NOW).text == RIGHT


def test_a_guess_that_comes_too_late_is_not_tried() -> None:
    codes = opened()
    other = producer(codes)
    other.start(NOW)
    refused(other, recorded()[0], "peer_silent", NOW + PATIENCE_S)
    assert codes.spend(NOW).text == RIGHT


@pytest.mark.parametrize("how", [lambda m: m.eof(), lambda m: m.tick(NOW + PATIENCE_S)])
def test_an_end_after_the_guess_has_burned_the_code(
    how: Callable[[ProducerPairing], None],
) -> None:
    _, other, codes, _ = at(Step.ANSWERED)
    with pytest.raises(TransferError) as caught:
        how(other)
    assert caught.value.reason in ("connection_lost", "peer_silent")
    assert other.step is Step.CLOSED
    assert burned(codes)


@pytest.mark.parametrize("step", [Step.HELLO_SENT, Step.CONFIRM_SENT])
def test_a_decoder_whose_connection_ends_has_no_pairing(step: Step) -> None:
    one, *_ = at(step)
    with pytest.raises(TransferError) as caught:
        one.eof()
    assert caught.value.reason == "connection_lost"
    assert one.step is Step.CLOSED


def test_a_connection_may_end_once_both_are_paired() -> None:
    one, other = decoder(), producer()
    run(one, other)
    for machine in (one, other):
        machine.eof()
        assert machine.outgoing() == []


def test_each_message_has_ten_seconds() -> None:
    one, other, _, raw = at(Step.HELLO_SENT)
    later = NOW + PATIENCE_S - 1
    one.receive(raw, later)
    assert one.deadline() == later + PATIENCE_S
    other.receive(sent(one), later)
    assert other.deadline() is None


def test_a_shell_may_end_an_exchange_for_a_reason_of_its_own() -> None:
    codes = opened()
    other = producer(codes)
    other.start(NOW)
    other.shut(refusal("capacity_exceeded", "another exchange is under way"))
    other.shut(refusal("cancelled", "twice"))
    raw = sent(other)
    assert decode(raw) == PairRefused("capacity_exceeded", 1000)
    one = decoder()
    one.start(NOW)
    with pytest.raises(CapacityError) as caught:
        one.receive(raw, NOW)
    assert caught.value.retry_after_s == 1.0


@pytest.mark.parametrize("reason", sorted(TOLD))
def test_a_refusal_is_the_same_on_both_sides(reason: str) -> None:
    one = decoder()
    one.start(NOW)
    with pytest.raises(BatonError) as caught:
        one.receive(encode(PairRefused(reason, 0)), NOW)
    assert caught.value.reason == reason
    assert type(caught.value) is TOLD[reason].error
    assert one.step is Step.CLOSED
    assert one.outgoing() == []


@pytest.mark.parametrize("reason", ["engine_fault", "made_up", "proof_differs"])
def test_a_reason_of_something_else_is_not_believed(reason: str) -> None:
    one = decoder()
    one.start(NOW)
    with pytest.raises(TransferError) as caught:
        one.receive(encode(PairRefused(reason, 0)), NOW)
    assert caught.value.reason == "pairing_refused"


def test_a_reason_of_something_else_is_not_told() -> None:
    other = producer()
    other.start(NOW)
    other.shut(EngineFault("the machine is broken"))
    assert decode(sent(other)) == PairRefused("pairing_refused", 0)


def test_the_readme_draws_the_tables() -> None:
    readme = (Path(protocol.__file__).parent / "README.md").read_text()
    for machine in (DecoderPairing, ProducerPairing):
        for (step, trigger), target in machine.STEPS.items():
            assert f"| {machine.ROLE} | {step} | {trigger} → {target} |\n" in readme


def test_reasons_of_pairing_and_of_handoffs_are_apart() -> None:
    assert not REASONS.keys() & PAIRING_REASONS.keys()


# what may not be


@pytest.mark.parametrize("name", ["", " a", "ä" * 3, "x" * 65])
def test_a_name_that_cannot_travel_is_refused_at_once(name: str) -> None:
    for make in (decoder, producer):
        with pytest.raises(ConfigError) as caught:
            make(name=name)
        assert caught.value.reason == "name_malformed"


def test_a_certificate_that_cannot_be_kept_is_refused_at_once() -> None:
    codes = opened()
    for make in (decoder, lambda seen: producer(codes, seen=seen)):
        with pytest.raises(PeerProtocolError) as caught:
            make(seen=b"")
        assert caught.value.reason == "certificate_unusable"
    assert codes.spend(NOW).text == RIGHT


@pytest.mark.parametrize("port", [0, 65536])
def test_a_port_that_is_none_is_refused_here(port: int) -> None:
    with pytest.raises(LocalProtocolError):
        producer(port=port)


def test_both_sides_are_told_where_handoffs_are_served() -> None:
    ours, theirs = run(decoder(), producer(port=7777))
    assert ours.port == theirs.port == 7777


def test_epochs_have_bounds() -> None:
    for make in (
        lambda: producer(epoch=0),
        lambda: producer(epoch=HIGHEST + 1),
        lambda: decoder(earlier=-1),
        lambda: decoder(earlier=HIGHEST),
    ):
        with pytest.raises(LocalProtocolError):
            make()
