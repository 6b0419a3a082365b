"""What the store tells before and after it changes something. Names are digests, never text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

DeleteReason = Literal[
    "superseded",  # a true extension of the cut is published
    "room",  # the byte cap or the free-space floor asks for it
    "prune",
    "clear",
    "forget",  # of one conversation
    "unfinished",  # left by a crash before its commit
]


@dataclass(frozen=True)
class Deleting:
    """A file is about to be removed. ``path`` is relative to the cache directory.

    ``cut`` is the name of the cut that is not held any more; empty for other files.
    """

    path: str
    nbytes: int
    reason: DeleteReason
    cut: bytes = b""


StaysReason = Literal[
    "directory_not_empty",  # not a file at all, and not ours
    "not_permitted",  # it must not be changed, or it is no longer ours
    "in_use",  # as by whatever is mounted there
]
"""Why one file cannot be removed, where others can."""


@dataclass(frozen=True)
class PassedOver:
    """What a deletion came to, could not remove, and left; the rest went. ``path`` is relative
    to the cache directory.
    """

    path: str
    reason: StaysReason


@dataclass(frozen=True)
class Invalid:
    """A file was found to be wrong; ``cuts`` are the names that are not served any more.

    ``reason`` is that of the ``IntegrityError``. The file goes to quarantine, except for
    ``file_unreadable``, where it is left alone until the next start, and ``file_missing``.
    """

    path: str
    reason: str
    cuts: tuple[bytes, ...]


@dataclass(frozen=True)
class IndexRebuilt:
    """The index was lost or damaged and is made anew from the files."""

    cuts: int


Event = Deleting | Invalid | IndexRebuilt
Listener = Callable[[Event], None]
"""Called in the thread that acts, while the store's locks are held: it must only take note."""
