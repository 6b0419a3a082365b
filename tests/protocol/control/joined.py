"""Both machines of the control channel joined in memory, with somebody in between."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocol.control import (
    DecoderControl,
    DescribeAsked,
    Event,
    ModelOffered,
    ProducerControl,
    RotateAsked,
    Step,
    UnpairAsked,
)
from protocol.control.messages import NO_MAC, Description, ModelWanted, SendModel
from protocol.control.models import ModelFile, manifest_of
from protocol.errors import BatonError
from protocol.identity import Identity
from protocol.messages import Recipe
from protocol.pairing import Pairing, PinnedCertificates
from tests.protocol.pairing.joined import Stream

KEY = Pairing(bytes(range(32)), 7)
CERTIFICATES = PinnedCertificates(b"d" * 32, b"p" * 32)
NOW = 1000.0
DESCRIPTION = Description(
    name="gb10 in the rack",
    version="0.1.0",
    state="ready",
    model="some-model",
    identity=Identity(*("0123456789abcdef"[i] * 64 for i in range(8))),
    recipe=Recipe("producer", "cuda", "bfloat16", 2048),
)

CONTENTS = {"config.json": b"{}", "model.safetensors": bytes(range(256)), "vocab.txt": b""}
MANIFEST = manifest_of(
    ModelFile(name, len(content), hashlib.sha256(content).hexdigest())
    for name, content in CONTENTS.items()
)
OFFER = SendModel(
    name="some-model",
    identity=DESCRIPTION.identity or Identity(*("none",) * 8),
    nbytes=MANIFEST.nbytes,
    manifest_bytes=len(MANIFEST.raw),
    digest=MANIFEST.digest,
    mac=NO_MAC,
)
HAVE = 100
"""What of it the producer has already."""
PIECE = 64

Tamper = Callable[[str, int, bytes], Sequence[bytes]]


def decoder(pairing: Pairing = KEY, certificates: PinnedCertificates = CERTIFICATES):
    return DecoderControl(pairing, certificates, Stream("control decoder"))


def producer(*pairings: Pairing, certificates: PinnedCertificates = CERTIFICATES):
    return ProducerControl(pairings or (KEY,), certificates, Stream("control producer"))


@dataclass
class Joined:
    """Two machines; ``producer``'s shell answers at once, and keeps what it was asked to.

    ``tamper`` gets (sender, number of its message, message) and returns what arrives.
    """

    decoder: DecoderControl = field(default_factory=decoder)
    producer: ProducerControl = field(default_factory=producer)
    tamper: Tamper = lambda sender, number, raw: [raw]
    record: list[tuple[str, bytes]] = field(default_factory=list)
    events: list[tuple[str, Event]] = field(default_factory=list)
    errors: dict[str, BatonError] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: {"decoder": 0, "producer": 0})

    def start(self) -> Joined:
        self.decoder.start(NOW)
        self.producer.start(NOW)
        return self.settle()

    def ask(self, question: str) -> Joined:
        """``describe``, ``unpair``, ``rotate`` or ``send_model``, if it still can be asked."""
        if self.decoder.step is Step.READY:
            given = (OFFER,) if question == "send_model" else ()
            getattr(self.decoder, question)(*given, NOW)
            self.settle()
        return self

    def of(self, side: str) -> list[Event]:
        return [event for who, event in self.events if who == side]

    def settle(self) -> Joined:
        """Carry messages until nobody says anything."""
        while self._carry("decoder") or self._carry("producer"):
            pass
        return self

    def _carry(self, sender: str) -> bool:
        machine = self.decoder if sender == "decoder" else self.producer
        queued = machine.outgoing()
        for raw in queued:
            self.record.append((sender, raw))
            number = self.counts[sender]
            self.counts[sender] += 1
            for arriving in self.tamper(sender, number, raw):
                self._deliver("producer" if sender == "decoder" else "decoder", arriving)
        return bool(queued)

    def _deliver(self, side: str, raw: bytes) -> None:
        if side in self.errors:
            return
        machine = self.decoder if side == "decoder" else self.producer
        try:
            event = machine.receive(raw, NOW)
        except BatonError as error:
            self.errors[side] = error
            return
        if event is None:
            return
        self.events.append((side, event))
        match event:
            case DescribeAsked():
                self.producer.described(DESCRIPTION, NOW)
            case UnpairAsked():
                self.producer.unpaired(NOW)
            case RotateAsked():
                self.producer.rotated(NOW)
            case ModelOffered():
                self.producer.wanted(HAVE, NOW)
            case ModelWanted():
                self._send()

    def _send(self) -> None:
        """The model's bytes: counted on both sides, and nobody's who is in between."""
        while left := self.decoder.left:
            self.decoder.data(min(PIECE, left), NOW)
            self.producer.data(min(PIECE, left), NOW)
        self.decoder.all_sent(NOW)
        self.producer.all_received(NOW)
        self.producer.kept("some-model-2", "restarting", NOW)
