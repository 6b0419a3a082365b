"""Both machines of a pairing joined in memory, with somebody in between who may do anything.

Certificates are made once; randomness is a stream that follows from a name, so that two
exchanges of one name are the same bytes.
"""

from __future__ import annotations

import datetime
import hashlib

from protocol.pairing.certificates import OwnCertificate, make_certificate
from protocol.pairing.code import Code, Codes, Entropy, read_code
from protocol.pairing.exchange import DecoderPairing, Paired, ProducerPairing

MADE = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
DECODER = make_certificate("decoder", MADE)
PRODUCER = make_certificate("producer", MADE)
OTHER = make_certificate("producer", MADE)
"""Somebody else's."""
CODE_BYTES = bytes((0, 1, 2, 3, 254, 255))
RIGHT = "acorn-acrobat-album-amber-zinc-zodiac"
WRONG = "acorn-acrobat-album-amber-zodiac-zinc"
NOW = 1000.0


class Stream:
    """Bytes that follow from a name, as many as are asked for, never the same twice."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls = 0

    def __call__(self, count: int) -> bytes:
        self._calls += 1
        return hashlib.shake_256(f"{self._name} {self._calls}".encode()).digest(count)


def fixed_code(count: int) -> bytes:
    """The entropy of :data:`RIGHT`."""
    assert count == len(CODE_BYTES)
    return CODE_BYTES


def opened(now: float = NOW) -> Codes:
    """Codes of which :data:`RIGHT` is open."""
    codes = Codes()
    assert codes.open(now, fixed_code).text == RIGHT
    return codes


def decoder(
    code: str | Code = RIGHT,
    own: OwnCertificate = DECODER,
    seen: bytes = PRODUCER.certificate,
    entropy: Entropy | None = None,
    earlier: int = 0,
    name: str = "macbook",
) -> DecoderPairing:
    return DecoderPairing(
        code=read_code(code) if isinstance(code, str) else code,
        name=name,
        own=own,
        peer_certificate=seen,
        earlier_epoch=earlier,
        entropy=entropy or Stream("decoder"),
    )


def producer(
    codes: Codes | None = None,
    own: OwnCertificate = PRODUCER,
    seen: bytes = DECODER.certificate,
    entropy: Entropy | None = None,
    epoch: int = 7,
    port: int = 7431,
    name: str = "gb10 in the rack",
) -> ProducerPairing:
    return ProducerPairing(
        codes=opened() if codes is None else codes,
        name=name,
        own=own,
        peer_certificate=seen,
        epoch=epoch,
        port=port,
        entropy=entropy or Stream("producer"),
    )


def sent(machine: DecoderPairing | ProducerPairing) -> bytes:
    """The one message that the machine has to send."""
    (raw,) = machine.outgoing()
    return raw


def run(one: DecoderPairing, other: ProducerPairing, now: float = NOW) -> tuple[Paired, Paired]:
    """An exchange that nobody disturbs: what the decoder's and the producer's side keep."""
    one.start(now)
    other.start(now)
    assert other.receive(sent(one), now) is None
    assert one.receive(sent(other), now) is None
    theirs = other.receive(sent(one), now)
    ours = one.receive(sent(other), now)
    assert ours is not None
    assert theirs is not None
    return ours, theirs


def recorded() -> list[bytes]:
    """The four messages of an exchange, in order."""
    one, other = decoder(), producer()
    one.start(NOW)
    other.start(NOW)
    raws = [sent(one)]
    other.receive(raws[-1], NOW)
    raws.append(sent(other))
    one.receive(raws[-1], NOW)
    raws.append(sent(one))
    other.receive(raws[-1], NOW)
    raws.append(sent(other))
    one.receive(raws[-1], NOW)
    return raws
