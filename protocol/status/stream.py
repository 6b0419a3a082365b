"""The messages of ``/status/stream``, what makes them, and what takes them in. Pure.

::

    hello                     which decoder, which version
    full                      a whole snapshot
    (change | full)*          only the sections that differ; a whole one every FULL_EVERY_S

Each is one JSON text message. The client sends nothing. A connection that ends is made again,
and begins with ``hello`` and ``full``; nothing of before is needed.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from protocol.errors import PeerProtocolError
from protocol.status.snapshot import (
    MOST_RECENT,
    SECTIONS,
    VERSION,
    Cache,
    Decoder,
    Door,
    Engine,
    Finished,
    Nodes,
    Recent,
    Requests,
    Snapshot,
)

FULL_EVERY_S: Final = 10.0


class _Message(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", kw_only=True
):
    """``at`` is when it was made, by the decoder's clock: ages are counted from it."""

    at: float


class Hello(_Message, frozen=True, tag="hello"):
    """The first message. ``process`` is that of the snapshot's ``decoder``."""

    version: Literal[2]
    process: str
    full_every_s: float


class Full(_Message, frozen=True, tag="full"):
    """A whole snapshot."""

    snapshot: Snapshot


class Change(_Message, frozen=True, tag="change"):
    """What differs from revision ``since``: whole sections, left out where they are equal.

    ``finished`` are requests that have ended since, the latest first, before those that
    ``recent`` had; of all together the latest ``MOST_RECENT`` are kept. Either it is there or
    ``recent`` is.
    """

    since: int
    revision: int
    decoder: Decoder | UnsetType = UNSET
    engine: Engine | UnsetType = UNSET
    requests: Requests | UnsetType = UNSET
    recent: Recent | UnsetType = UNSET
    nodes: Nodes | UnsetType = UNSET
    cache: Cache | UnsetType = UNSET
    door: Door | UnsetType = UNSET
    finished: tuple[Finished, ...] | UnsetType = UNSET


Message = Hello | Full | Change


def diff(before: Snapshot, after: Snapshot, at: float) -> Change:
    """What makes ``after`` out of ``before``."""
    changed = {
        name: section
        for name in SECTIONS
        if (section := getattr(after, name)) is not getattr(before, name)
        and section != getattr(before, name)
    }
    if "recent" in changed:
        added = _added(before.recent.finished, after.recent.finished)
        if added is not None:
            del changed["recent"]
            changed["finished"] = added
    return Change(at=at, since=before.revision, revision=after.revision, **changed)


def apply(change: Change, before: Snapshot) -> Snapshot:
    """``before`` with ``change``, which must be the next one.

    Raises ``PeerProtocolError`` (``status_out_of_order``): connect again.
    """
    if change.since != before.revision:
        raise PeerProtocolError(
            "a change of the status is missing",
            reason="status_out_of_order",
            field="since",
            found=change.since,
            expected=before.revision,
        )
    changed = {
        name: section
        for name in SECTIONS
        if not isinstance(section := getattr(change, name), UnsetType)
    }
    if not isinstance(change.finished, UnsetType):
        changed["recent"] = Recent(_kept(change.finished, before.recent.finished))
    return msgspec.structs.replace(before, revision=change.revision, **changed)


def encode(message: Message) -> bytes:
    """One JSON text."""
    return msgspec.json.encode(message)


def decode(text: bytes | str) -> Message:
    """The message in a text.

    Raises ``PeerProtocolError``: ``status_version_differs`` where the decoder speaks another
    version, else ``status_malformed``.
    """
    try:
        return _DECODER.decode(text)
    except _NOT_READ as error:
        if _other_version(text):
            raise PeerProtocolError(
                "the decoder's status is of another version",
                reason="status_version_differs",
                field="version",
                hint="use the same release of Baton for both",
            ) from error
        # Its text may hold what stood in the message.
        raise PeerProtocolError("that is no status message", reason="status_malformed") from None


_DECODER: Final = msgspec.json.Decoder(Message)

_NOT_READ: Final = (msgspec.MsgspecError, RecursionError, UnicodeError)
"""What the decoder raises of a text: also of one that is nested without end, or no Unicode."""


class _Versioned(msgspec.Struct):
    type: Literal["hello"]
    version: int


def _other_version(text: bytes | str) -> bool:
    try:
        return msgspec.json.decode(text, type=_Versioned).version != VERSION
    except _NOT_READ:
        return False


def _added(
    before: tuple[Finished, ...], after: tuple[Finished, ...]
) -> tuple[Finished, ...] | None:
    """What was put before ``before`` to make ``after``; ``None`` if it was not made like that."""
    for count in range(1, len(after) + 1):
        added = after[:count]
        # The first that is an old one ends what can have been added.
        if count == len(after) or after[count] == (before[0] if before else None):
            return added if _kept(added, before) == after else None
    return None


def _kept(added: tuple[Finished, ...], before: tuple[Finished, ...]) -> tuple[Finished, ...]:
    return (added + before)[:MOST_RECENT]
