"""The five messages of a pairing, each in exactly one encoding.

The encoding is that of :mod:`protocol.messages`: JSON as msgspec writes it, ``type`` first,
fields in declared order, no blanks, no escapes, bytes as padded base64. What is not encoded
like that is refused, so that every changed byte is another message or none.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

import msgspec

from protocol.messages import MAX_GENERATION, Bytes32, Code, Epoch
from protocol.reasons import differs, refusal

PAIRING_VERSION: Final = 1
MAX_MESSAGE: Final = 1024
"""Longest message of a pairing, in bytes."""
ELEMENT_BYTES: Final = 33
"""A SPAKE2 message: the letter of its side, and a point of Ed25519."""

_NAME: Final = r"\A[!#-\[\]-~]([ !#-\[\]-~]{0,62}[!#-\[\]-~])?\Z"
Name = Annotated[str, msgspec.Meta(pattern=_NAME)]
"""What a machine is called: 1 to 64 characters of printable ASCII, no blank at an end, without
the two characters that JSON escapes."""
Element = Annotated[bytes, msgspec.Meta(min_length=ELEMENT_BYTES, max_length=ELEMENT_BYTES)]
LaterEpoch = Annotated[int, msgspec.Meta(ge=1, le=MAX_GENERATION)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class PairHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pair_hello"):
    """Decoder: tries a code. ``nonce`` is fresh and random, ``element`` its SPAKE2 message.

    ``earlier`` is the largest epoch of its pairings so far, 0 if there is none.
    """

    version: Literal[1]
    nonce: Bytes32
    name: Name
    earlier: Epoch
    element: Element


class PairAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pair_answer"):
    """Producer: answers with its own part; ``epoch`` will be the pairing's.

    ``port`` is where it serves handoffs, on the host that the decoder has reached.
    """

    nonce: Bytes32
    name: Name
    epoch: LaterEpoch
    port: Port
    element: Element


class PairConfirm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pair_confirm"):
    """Decoder: proves that it has the same code, messages and certificates before it."""

    mac: Bytes32


class PairConfirmed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pair_confirmed"):
    """Producer: proves the same, after it has verified the decoder's proof."""

    mac: Bytes32


class PairRefused(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pair_refused"):
    """Either side: ends the exchange. ``retry_after_ms`` is 0 if nothing is known.

    Its form is the same in every version, since it says that versions differ.
    """

    reason: Code
    retry_after_ms: Annotated[int, msgspec.Meta(ge=0, le=86_400_000)]


Message = PairHello | PairAnswer | PairConfirm | PairConfirmed | PairRefused
MESSAGES: Final = {
    str(kind.__struct_config__.tag): kind
    for kind in (PairHello, PairAnswer, PairConfirm, PairConfirmed, PairRefused)
}
"""Every message by its tag."""


class _Opening(msgspec.Struct):
    """What can be read of a message of any version."""

    type: str
    version: int | None = None


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
    No error holds anything that was in the message but its tag.
    """
    if len(raw) > MAX_MESSAGE:
        raise differs("message_too_long", "length", len(raw), f"at most {MAX_MESSAGE}")
    try:
        opening = _openings.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise refusal("message_malformed", "a message of pairing is not readable") from error
    if opening.type not in MESSAGES:
        raise refusal("message_unknown", "a message has a tag unknown to this version of pairing")
    if opening.version is not None and opening.version != PAIRING_VERSION:
        raise differs("version_unsupported", "version", opening.version, PAIRING_VERSION)
    try:
        message = _messages.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        text = f"the fields of {opening.type} are not as they must be"
        raise refusal("message_malformed", text, field=opening.type) from error
    if _encoder.encode(message) != raw:
        text = f"{opening.type} is not in its one encoding"
        raise refusal("message_not_canonical", text, field=opening.type)
    return message


def require_name(name: str) -> None:
    """Return only if a machine may be called that. Raises ConfigError ``name_malformed``."""
    if not re.search(_NAME, name):
        raise refusal(
            "name_malformed",
            "a machine's name has 1 to 64 characters of printable ASCII, no blank at an end, "
            'and neither " nor \\',
            field="name",
            hint="give it another name",
        )
