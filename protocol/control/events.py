"""Where one side of a control connection stands, and what happens there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protocol.control.messages import Description, ModelKept, ModelWanted, SendModel, Unpaired
from protocol.pairing import Pairing


class Step(StrEnum):
    """Where one side of a connection stands."""

    START = "START"
    HELLO_SENT = "HELLO_SENT"
    """Decoder: CONTROL_HELLO is out."""
    PROOF_SENT = "PROOF_SENT"
    """Decoder: its proof is out; the producer's must come."""
    LISTENING = "LISTENING"
    """Producer: CONTROL_HELLO must come."""
    ANSWERED = "ANSWERED"
    """Producer: CONTROL_ANSWER is out; the decoder's proof must come first."""
    READY = "READY"
    """Both keys are proven, no question is open."""
    DESCRIBING = "DESCRIBING"
    UNPAIRING = "UNPAIRING"
    ROTATING = "ROTATING"
    OFFERING = "OFFERING"
    """A model is offered; the producer looks what it has of it."""
    SENDING = "SENDING"
    """The model's bytes are on their way."""
    KEEPING = "KEEPING"
    """All of them were sent; the producer looks whether they are a model, and keeps it."""
    ENDED = "ENDED"
    """The key that was proven is not the pairing's any more."""
    CLOSED = "CLOSED"


@dataclass(frozen=True)
class Proven:
    """The other side holds the key of ``pairing``."""

    pairing: Pairing


@dataclass(frozen=True)
class DescribeAsked:
    """Producer: answer with ``described``."""


@dataclass(frozen=True)
class UnpairAsked:
    """Producer: forget the decoder, durably, then answer with ``unpaired``."""


@dataclass(frozen=True)
class RotateAsked:
    """Producer: keep ``pairing``, durably, then answer with ``rotated``.

    Until the decoder has proven it, the one before has to go on being accepted: the answer
    may be lost.
    """

    pairing: Pairing


@dataclass(frozen=True)
class Rekeyed:
    """Decoder: ``pairing`` takes the place of the one before; the producer has kept it."""

    pairing: Pairing


@dataclass(frozen=True)
class ModelOffered:
    """Producer: look what is there of the offered model, then answer with ``wanted``."""

    offer: SendModel


Event = (
    Proven
    | DescribeAsked
    | UnpairAsked
    | RotateAsked
    | ModelOffered
    | Description
    | Unpaired
    | Rekeyed
    | ModelWanted
    | ModelKept
)
