"""The five messages of a pairing, each in exactly one encoding.

The encoding is that of :mod:`protocol.canonical`.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

import msgspec

from protocol.canonical import Codec
from protocol.messages import MAX_GENERATION, Bytes32, Code, Epoch
from protocol.reasons import refusal

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
_codec: Final = Codec[Message](
    (PairHello, PairAnswer, PairConfirm, PairConfirmed, PairRefused),
    Message,
    PAIRING_VERSION,
    called="a message of pairing",
)
MESSAGES: Final = _codec.kinds
"""Every message by its tag."""

encode: Final = _codec.encode
"""See :meth:`protocol.canonical.Codec.encode`."""


def decode(raw: bytes) -> Message:
    """See :meth:`protocol.canonical.Codec.decode`."""
    return _codec.decode(raw, MAX_MESSAGE)


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
