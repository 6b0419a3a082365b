"""The messages of the control channel, each in exactly one encoding.

The encoding is that of :mod:`protocol.canonical`. After the two that open a connection every
message ends with ``mac``, which :class:`protocol.control.keys.Seals` computes over the whole
message with zeros in its place. Only CONTROL_REFUSED has none: all it can do is end things.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

import msgspec

from protocol.canonical import Codec
from protocol.control.models import MAX_MANIFEST, MAX_STREAM
from protocol.identity import Identity
from protocol.messages import MAX_GENERATION, Bytes32, Code, Epoch, Note, Recipe, Word
from protocol.pairing.messages import Name

CONTROL_VERSION: Final = 1
MAX_MESSAGE: Final = 4096
"""Longest message of the control channel, in bytes."""

NO_MAC: Final = bytes(32)
"""What stands in a message's place for its MAC while that is computed."""
LaterEpoch = Annotated[int, msgspec.Meta(ge=1, le=MAX_GENERATION)]
ProducerState = Literal["waiting", "loading", "ready", "stopping"]
"""``waiting``: it has no model, and takes one."""
Serving = Literal["now", "restarting", "kept"]
"""What becomes of a model that was received: it is loaded ``now``, or by the process that takes
this one's place, or ``kept`` beside the one that the producer goes on serving."""
ModelName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
"""What a model that is sent may be called."""
StreamBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_STREAM)]

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
    """Producer: what it is. ``identity`` and ``recipe`` are null until it has loaded its model.

    ``model`` is what it serves or loads; while it is waiting, what it could not load, or empty.
    """

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


class SendModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="send_model"):
    """Decoder: offers a checkpoint as a stream of ``nbytes``, its list of files included.

    ``digest`` is the SHA-256 of that list, which has ``manifest_bytes``.
    """

    name: ModelName
    identity: Identity
    nbytes: StreamBytes
    manifest_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_MANIFEST)]
    digest: Bytes32
    mac: Bytes32


class ModelWanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="model_wanted"):
    """Producer: takes the stream from byte ``offset`` on; it has what is before, durably."""

    offset: StreamBytes
    mac: Bytes32


class ModelKept(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="model_kept"):
    """Producer: has the whole checkpoint, verified and durable, in a directory of that name."""

    name: Note
    serving: Serving
    mac: Bytes32


class ControlRefused(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="control_refused"
):
    """Either side: ends the connection. Its form is the same in every version."""

    reason: Code


Sealed = (
    ControlProof
    | Describe
    | Description
    | Unpair
    | Unpaired
    | Rotate
    | Rotated
    | SendModel
    | ModelWanted
    | ModelKept
)
"""Messages that carry a MAC."""
Message = ControlHello | ControlAnswer | Sealed | ControlRefused
_codec: Final = Codec[Message](
    (
        *(ControlHello, ControlAnswer, ControlProof, Describe, Description),
        *(Unpair, Unpaired, Rotate, Rotated, SendModel, ModelWanted, ModelKept, ControlRefused),
    ),
    Message,
    CONTROL_VERSION,
    called="a message of control",
    unversioned=("description",),
)
MESSAGES: Final = _codec.kinds
"""Every message by its tag."""

encode: Final = _codec.encode
"""See :meth:`protocol.canonical.Codec.encode`."""


def decode(raw: bytes) -> Message:
    """See :meth:`protocol.canonical.Codec.decode`."""
    return _codec.decode(raw, MAX_MESSAGE)


def note(text: str) -> str:
    """``text`` as a :data:`Note` can carry it: what is not printable ASCII becomes ``?``."""
    return _UNSAFE.sub("?", text)[:96]
