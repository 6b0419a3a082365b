"""Messages in exactly one encoding, of which every flipped byte is another message or none.

JSON as msgspec writes it: ``type`` first, then the fields in declared order, no blanks, no
escapes, integers only, bytes as padded base64. A message that decodes but is not encoded like
that is refused, so that two readers can never understand one text differently.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Generic, TypeVar

import msgspec

from protocol.reasons import differs, refusal

M = TypeVar("M", bound=msgspec.Struct)


class _Opening(msgspec.Struct):
    """What can be read of a message of any version."""

    type: str
    version: object = None


_openings: Final = msgspec.json.Decoder(_Opening)
_encoder: Final = msgspec.json.Encoder()


class Codec(Generic[M]):
    """The messages of one protocol: tagged structs that forbid unknown fields."""

    def __init__(
        self,
        kinds: Iterable[type[M]],
        union: Any,
        version: int,
        *,
        called: str,
        unversioned: Iterable[str] = (),
    ) -> None:
        """``union`` is that of ``kinds``; ``called`` what people know a message as.

        A field ``version`` is the protocol's, but in messages with a tag of ``unversioned``.
        """
        self.kinds: Final = {str(kind.__struct_config__.tag): kind for kind in kinds}
        """Every message by its tag."""
        self._version = version
        self._called = called
        self._unversioned = frozenset(unversioned)
        self._messages = msgspec.json.Decoder(union)

    def encode(self, message: M) -> bytes:
        """The one encoding of a message.

        Raises ``msgspec.ValidationError`` if this side's own message breaks the bounds that a
        peer would check (msgspec checks on decoding only, so this decodes again).
        """
        raw = _encoder.encode(message)
        self._messages.decode(raw)
        return raw

    def decode(self, raw: bytes, limit: int) -> M:
        """The message in ``raw``, which may have at most ``limit`` bytes.

        Raises PeerProtocolError: ``message_too_long``, ``message_malformed``,
        ``message_unknown``, ``version_unsupported``, ``message_not_canonical``, in this order.
        No error holds anything that was in the message but its tag.
        """
        if len(raw) > limit:
            raise differs("message_too_long", "length", len(raw), f"at most {limit}")
        try:
            opening = _openings.decode(raw)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise refusal("message_malformed", f"{self._called} is not readable") from error
        if opening.type not in self.kinds:
            text = f"{self._called} has a tag that is unknown to this version"
            raise refusal("message_unknown", text)
        said = None if opening.type in self._unversioned else opening.version
        if isinstance(said, int) and said != self._version:
            raise differs("version_unsupported", "version", said, self._version)
        try:
            message = self._messages.decode(raw)
        except (msgspec.MsgspecError, RecursionError) as error:
            text = f"the fields of {opening.type} are not as they must be"
            raise refusal("message_malformed", text, field=opening.type) from error
        if _encoder.encode(message) != raw:
            text = f"{opening.type} is not in its one encoding"
            raise refusal("message_not_canonical", text, field=opening.type)
        return message
