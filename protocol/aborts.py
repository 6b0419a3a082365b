"""Errors as ABORT messages and back: a refusal is the same refusal on both sides."""

from __future__ import annotations

import re
from typing import Final

from protocol.errors import BatonError, Cancelled, CapacityError, EngineFault, IdentityMismatch
from protocol.messages import Abort
from protocol.reasons import COMPONENTS, REASONS, refusal

NOTE_LENGTH: Final = 96
_UNSAFE: Final = re.compile(r"[^ !#-\[\]-~]")
_UNLISTED: Final[tuple[tuple[type[BatonError], str], ...]] = (
    (EngineFault, "engine_fault"),
    (CapacityError, "capacity_exceeded"),
    (Cancelled, "cancelled"),
    (BatonError, "peer_aborted"),
)
"""What is sent for an error whose own reason the wire does not know, by its type."""


def to_abort(error: BatonError, generation: int) -> Abort:
    """The ABORT that tells the peer of an error; ``generation`` 0 ends the connection.

    The message text stays here; field, found and expected travel as printable ASCII, cut
    to 96 characters.
    """
    reason = error.reason
    if reason not in REASONS:
        reason = next(code for kind, code in _UNLISTED if isinstance(error, kind))
    components = error.components if isinstance(error, IdentityMismatch) else ()
    seconds = error.retry_after_s if isinstance(error, CapacityError) else 0.0
    return Abort(
        generation=generation,
        reason=reason,
        field=_note(error.field),
        found=_note(error.found),
        expected=_note(error.expected),
        components=tuple(name for name in components if name in COMPONENTS),
        retry_after_ms=int(min(max(seconds, 0.0), 86_400.0) * 1000),
    )


def from_abort(abort: Abort) -> BatonError:
    """The error that an ABORT tells of, for the caller to raise or to report.

    The peer's engine fault is a ``TransferError`` here (``peer_engine_fault``): it must not
    stop this process. A reason that is not listed becomes ``peer_aborted``.
    """
    reason = "peer_engine_fault" if abort.reason == "engine_fault" else abort.reason
    if reason not in REASONS:
        return refusal(
            "peer_aborted", "the other side ended the handoff", field="reason", found=abort.reason
        )
    error = refusal(
        reason,
        f"the other side ended the handoff: {reason}",
        field=abort.field or None,
        found=abort.found or None,
        expected=abort.expected or None,
    )
    if isinstance(error, IdentityMismatch):
        error.components = tuple(name for name in abort.components if name in COMPONENTS)
    if isinstance(error, CapacityError) and abort.retry_after_ms:
        error.retry_after_s = abort.retry_after_ms / 1000
    return error


def _note(value: object) -> str:
    return "" if value is None else _UNSAFE.sub("?", str(value))[:NOTE_LENGTH]
