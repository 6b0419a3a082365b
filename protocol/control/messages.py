"""The messages of the control channel, each in exactly one encoding.

The encoding is that of :mod:`protocol.messages`. After the two that open a connection every
message ends with ``mac``, which :class:`protocol.control.keys.Seals` computes over the whole
message with zeros in its place. Only CONTROL_REFUSED has none: all it can do is end things.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

import msgspec

from protocol.identity import Identity
from protocol.messages import MAX_GENERATION, Bytes32, Code, Epoch, Note, Recipe, Word
from protocol.pairing.messages import Name
from protocol.reasons import differs, refusal

CONTROL_VERSION: Final = 1
MAX_MESSAGE: Final = 4096
"""Longest message of the control channel, in bytes."""

NO_MAC: Final = bytes(32)
"""What stands in a message's place for its MAC while that is computed."""
LaterEpoch = Annotated[int, msgspec.Meta(ge=1, le=MAX_GENERATION)]
ProducerState = Literal["loading", "ready", "stopping"]

_UNSAFE: Final = re.compile(r"[^ !#-\[\]-~]")


class ControlHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="control_hello"):
    """Decoder: opens the channel under the key of ``epoch``. ``nonce`` is fresh and random."""

    version: Literal[1]
    nonce: Bytes32
    epoch: Epoch


class ControlAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="control_answer"):
    """Producer: it has that key. ``nonce`` is fresh and random."""

    nonce: Bytes32


class ControlProof(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="control_proof"):
    """Either side: proves the key, the decoder first."""

    mac: Bytes32


class Describe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="describe"):
    """Decoder: asks what the producer is."""

    mac: Bytes32


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="description"):
    """Producer: what it is. ``identity`` and ``recipe`` are null while it loads its model."""

    name: Name
    version: Word
    state: ProducerState
    model: Note
    identity: Identity | None
    recipe: Recipe | None
    mac: Bytes32 = NO_MAC


class Unpair(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="unpair"):
    """Decoder: asks to be forgotten."""

    mac: Bytes32


class Unpaired(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="unpaired"):
    """Producer: it has forgotten the decoder, durably."""

    mac: Bytes32


class Rotate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="rotate"):
    """Decoder: asks for the key of ``epoch``, and gives its random part of it."""

    epoch: LaterEpoch
    share: Bytes32
    mac: Bytes32


class Rotated(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="rotated"):
    """Producer: its random part; it has kept the new key, durably."""

    share: Bytes32
    mac: Bytes32


class ControlRefused(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="control_refused"
):
    """Either side: ends the connection. Its form is the same in every version."""

    reason: Code


Sealed = ControlProof | Describe | Description | Unpair | Unpaired | Rotate | Rotated
"""Messages that carry a MAC."""
Message = ControlHello | ControlAnswer | Sealed | ControlRefused
MESSAGES: Final = {
    str(kind.__struct_config__.tag): kind
    for kind in (
        *(ControlHello, ControlAnswer, ControlProof, Describe, Description),
        *(Unpair, Unpaired, Rotate, Rotated, ControlRefused),
    )
}
"""Every message by its tag."""


class _Opening(msgspec.Struct):
    """What can be read of a message of any version."""

    type: str
    version: object = None


_openings: Final = msgspec.json.Decoder(_Opening)
_messages: Final = msgspec.json.Decoder(Message)
_encoder: Final = msgspec.json.Encoder()


def encode(message: Message) -> bytes:
    """The one encoding of a message.

    Raises ``msgspec.ValidationError`` if this side's own message breaks the bounds that a
    peer would check.
    """
    raw = _encoder.encode(message)
    _messages.decode(raw)
    return raw


def decode(raw: bytes) -> Message:
    """The message in ``raw``.

    Raises PeerProtocolError: ``message_too_long``, ``message_malformed``,
    ``message_unknown``, ``version_unsupported``, ``message_not_canonical``, in this order.
    """
    if len(raw) > MAX_MESSAGE:
        raise differs("message_too_long", "length", len(raw), f"at most {MAX_MESSAGE}")
    try:
        opening = _openings.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise refusal("message_malformed", "a message of control is not readable") from error
    if opening.type not in MESSAGES:
        raise refusal("message_unknown", "a message has a tag unknown to this version of control")
    if opening.type == "control_hello" and opening.version != CONTROL_VERSION:
        found = opening.version if isinstance(opening.version, int) else None
        raise differs("version_unsupported", "version", found, CONTROL_VERSION)
    try:
        message = _messages.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        text = f"the fields of {opening.type} are not as they must be"
        raise refusal("message_malformed", text, field=opening.type) from error
    if _encoder.encode(message) != raw:
        text = f"{opening.type} is not in its one encoding"
        raise refusal("message_not_canonical", text, field=opening.type)
    return message


def note(text: str) -> str:
    """``text`` as a :data:`Note` can carry it: what is not printable ASCII becomes ``?``."""
    return _UNSAFE.sub("?", text)[:96]
