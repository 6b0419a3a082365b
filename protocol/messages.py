"""Control messages: one per WebSocket TEXT frame, in exactly one encoding (``canonical``).

Lengths are checked before anything is decoded; every field has bounds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.canonical import Codec
from protocol.identity import Identity
from protocol.layout import Dtype
from protocol.reasons import differs

VERSION: Final = 1
MAX_TOKENS: Final = 1 << 20
"""Most tokens of one PREFILL in any implementation; a producer's own limit may be lower."""
MAX_GENERATION: Final = (1 << 53) - 1
MAX_CREDIT: Final = 1024
"""Most frames that may be credited and not yet sent: 1 GiB of payload."""
MAX_EXTRA_CUTS: Final = 64
MAX_HISTORY: Final = 64
MAX_TILE: Final = 1 << 16
MAX_FRAMES: Final = 1 << 20
MAX_PAYLOAD: Final = 1 << 46
NO_TRANSFER: Final = bytes(16)
"""RESUME's name of a transfer whose BEGIN did not arrive."""
NO_SPACE: Final = bytes(32)
"""PREFILL's name of no space: nothing that the producer keeps is used for it, or kept of it."""
CONTROL_BYTES: Final = 16 * 1024
"""Longest control message but PREFILL, in bytes."""

Bytes16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Generation = Annotated[int, msgspec.Meta(ge=1, le=MAX_GENERATION)]
Epoch = Annotated[int, msgspec.Meta(ge=0, le=MAX_GENERATION)]
Position = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Frames = Annotated[int, msgspec.Meta(ge=0, le=MAX_FRAMES)]
Payload = Annotated[int, msgspec.Meta(ge=0, le=MAX_PAYLOAD)]
Credits = Annotated[int, msgspec.Meta(ge=1, le=MAX_CREDIT)]
Micros = Annotated[int, msgspec.Meta(ge=0, le=MAX_PAYLOAD)]
Millis = Annotated[int, msgspec.Meta(ge=1, le=10 * 24 * 3600 * 1000)]
Word = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_.:-]{1,64}\Z")]
Code = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9_]{1,64}\Z")]
Note = Annotated[str, msgspec.Meta(pattern=r"\A[ !#-\[\]-~]{0,96}\Z")]
"""A remark: printable ASCII without the two characters that JSON escapes."""


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How rows were computed: provenance, not identity. ``tile`` is in tokens."""

    who: Literal["decoder_prefill", "decoder_decode", "producer"]
    device: Word
    dtype: Dtype
    tile: Annotated[int, msgspec.Meta(ge=1, le=MAX_TILE)]


class History(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Positions ``[first, last)`` were computed by ``recipe``."""

    first: Position
    last: Position
    recipe: Recipe


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a producer accepts: tokens of one PREFILL, frames of credit at one time, extra cuts
    of one PREFILL (0: it brings none).
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    max_credit: Credits
    max_extra_cuts: Annotated[int, msgspec.Meta(ge=0, le=MAX_EXTRA_CUTS)]


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hello"):
    """Decoder: opens the connection. ``nonce`` is fresh and random."""

    version: Literal[1]
    nonce: Bytes32
    epoch: Epoch
    identity: Identity
    layout: Bytes32


class HelloAck(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hello_ack"):
    """Producer: answers HELLO; its ``recipe`` holds the tile of every handoff here."""

    version: Literal[1]
    nonce: Bytes32
    epoch: Epoch
    identity: Identity
    layout: Bytes32
    recipe: Recipe
    limits: Limits


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="proof"):
    """Either side: proves the pairing key over both hellos and both certificates."""

    mac: Bytes32


class Prefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="prefill"):
    """Decoder: asks for the cache of ``[cut, end)``; ``tokens`` are uint32 LE of ``[0, end)``.

    The boundary token is not among them. ``extra_cuts`` are positions inside at which a cut
    is wanted too (see ``layout.extra_cuts``). ``space`` names who shares
    what the producer keeps of prompts (see :func:`space_of`). ``deadline_ms`` runs from
    receipt, ``credit`` is the number of frames that may be sent at once.
    """

    request: Word
    generation: Generation
    nonce: Bytes32
    identity: Bytes32
    space: Bytes32
    cut: Position
    extra_cuts: Annotated[tuple[Position, ...], msgspec.Meta(max_length=MAX_EXTRA_CUTS)]
    deadline_ms: Millis
    credit: Credits
    tokens: Annotated[bytes, msgspec.Meta(min_length=4, max_length=4 * MAX_TOKENS)]

    def __repr__(self) -> str:
        # A log of messages must not become a log of prompts.
        return f"Prefill(request={self.request!r}, generation={self.generation}, cut={self.cut})"


class Begin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="begin"):
    """Producer: the manifest of the handoff that follows.

    ``layout``, ``tokens`` and ``spans`` are digests; ``frames`` and ``payload_bytes`` count
    what follows; ``computed_tokens`` is how many of ``[0, end)`` were not held already;
    ``history`` covers ``[cut, end)`` without gap.
    """

    generation: Generation
    nonce: Bytes32
    transfer: Bytes16
    layout: Bytes32
    tokens: Bytes32
    spans: Bytes32
    cut: Position
    end: Position
    tile: Annotated[int, msgspec.Meta(ge=1, le=MAX_TILE)]
    frames: Frames
    payload_bytes: Payload
    computed_tokens: Position
    history: Annotated[tuple[History, ...], msgspec.Meta(min_length=1, max_length=MAX_HISTORY)]


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="progress"):
    """Producer: ``done`` tokens of the request are computed; also a sign of life."""

    generation: Generation
    done: Position


class Credit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="credit"):
    """Decoder: ``frames`` more frames may be sent."""

    generation: Generation
    frames: Credits


class Seal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="seal"):
    """Producer: the last message of a handoff.

    ``digest`` is SHA-256 over all frame digests in order; ``queue_us`` and ``compute_us``
    are the producer's own phases in microseconds; ``mac`` authenticates it all.
    """

    transfer: Bytes16
    frames: Frames
    payload_bytes: Payload
    queue_us: Micros
    compute_us: Micros
    digest: Bytes32
    mac: Bytes32


class Committed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="committed"):
    """Decoder: the sealed cache is installed; ``mac`` answers the seal's."""

    transfer: Bytes16
    mac: Bytes32


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="resume"):
    """Decoder: goes on with a handoff whose connection was lost, on any proven connection.

    ``prefill`` is the digest of the PREFILL that asked for it, ``transfer`` BEGIN's name of it,
    16 zero bytes where no BEGIN came. Frames below ``next`` have arrived; ``credit`` frames may
    be sent from there on, and what was credited before is void.
    """

    generation: Generation
    prefill: Bytes32
    transfer: Bytes16
    next: Frames
    credit: Credits


class Resumed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="resumed"):
    """Producer: answers RESUME; what follows is the handoff from frame ``next`` on.

    Where RESUME did not name its transfer, BEGIN follows again, the same bytes.
    """

    generation: Generation
    next: Frames


class Abort(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="abort"):
    """Either side: ends a handoff, or with ``generation`` 0 the connection.

    Its form is the same in every version, since it says that versions differ.
    ``components`` names the identity components that differ, ``retry_after_ms`` is 0 if
    nothing is known.
    """

    generation: Epoch
    reason: Code
    field: Note
    found: Note
    expected: Note
    components: Annotated[tuple[Code, ...], msgspec.Meta(max_length=8)]
    retry_after_ms: Annotated[int, msgspec.Meta(ge=0, le=86_400_000)]


class Aborted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="aborted"):
    """Either side: answers ABORT; nothing more of this handoff follows from the sender."""

    generation: Generation


Message = (
    Hello
    | HelloAck
    | Proof
    | Prefill
    | Begin
    | Progress
    | Credit
    | Seal
    | Committed
    | Resume
    | Resumed
    | Abort
    | Aborted
)
_codec: Final = Codec[Message](
    (
        Hello,
        HelloAck,
        Proof,
        Prefill,
        Begin,
        Progress,
        Credit,
        Seal,
        Committed,
        Resume,
        Resumed,
        Abort,
        Aborted,
    ),
    Message,
    VERSION,
    called="a control message",
)
MESSAGES: Final = _codec.kinds
"""Every message by its tag."""

encode: Final = _codec.encode
"""See :meth:`protocol.canonical.Codec.encode`."""


def decode(raw: bytes, limit: int = CONTROL_BYTES) -> Message:
    """See :meth:`protocol.canonical.Codec.decode`."""
    return _codec.decode(raw, limit)


def prefill_limit(max_tokens: int) -> int:
    """The longest PREFILL of ``max_tokens`` tokens, encoded, in bytes."""
    return CONTROL_BYTES + 4 * -(-4 * max_tokens // 3)


def encode_tokens(tokens: Sequence[int] | NDArray[np.integer]) -> bytes:
    """Tokens as uint32 little endian.

    Raises ``ValueError`` for a token outside of ``[0, 2**32)``.
    """
    wide = np.asarray(tokens, dtype=np.int64)
    if wide.size and (int(wide.min()) < 0 or int(wide.max()) >= 1 << 32):
        raise ValueError("a token is outside of 32 bits")
    return wide.astype("<u4").tobytes()


def decode_tokens(raw: bytes) -> NDArray[np.uint32]:
    """The tokens in ``raw`` as a read-only array.

    Raises PeerProtocolError ``message_malformed`` if the length is no multiple of four.
    """
    if len(raw) % 4:
        raise differs("message_malformed", "tokens", f"{len(raw)} bytes", "a multiple of 4")
    return np.frombuffer(raw, dtype="<u4")


def space_of(namespace: bytes) -> bytes:
    """What a producer is told of a namespace (see ``blocks``): a digest that names no block.

    ``NO_SPACE`` for an empty one.
    """
    return hashlib.sha256(b"baton space 1" + namespace).digest() if namespace else NO_SPACE


def token_digest(raw: bytes) -> bytes:
    """SHA-256 of tokens as they travel (uint32 little endian), 32 bytes."""
    return hashlib.sha256(raw).digest()
