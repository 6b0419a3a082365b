"""Errors of Baton, named by what the caller does next.

The tree::

    BatonError
    ├── ConfigError            fix the configuration or the model, then restart
    ├── RequestError           the client's request is wrong; the client must change it
    ├── ProtocolError          two peers disagree about the wire
    │   ├── LocalProtocolError     this side tried what the state machine forbids
    │   └── PeerProtocolError      the other side sent what the state machine forbids
    ├── IdentityMismatch       caches of one side mean something else on the other
    ├── IntegrityError         bytes are not the bytes that were authenticated
    ├── TransferError          a handoff ended before its seal (peer, network, deadline)
    ├── CapacityError          no room now; try again after ``retry_after_s``
    ├── Cancelled              the client left, or the job was withdrawn
    └── EngineFault            the machine failed; stop, exit 75, let the supervisor restart

Every error carries a stable ``reason`` code. Code decides by type and reason,
never by message text. A *miss* is not an error: it is a return value.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_CONFIG = 78
"""Exit status of a process whose configuration or model must be changed first (EX_CONFIG)."""

EXIT_ENGINE_FAULT = 75
"""Exit status of a process whose accelerator failed (EX_TEMPFAIL of sysexits.h)."""


EXIT_START_AGAIN = 79
"""Exit status of a process that has to be started again, at once, since it serves something else
from now on; nothing has failed. Not one of sysexits.h."""


class BatonError(Exception):
    """A failure with a stable reason code.

    ``reason`` is snake_case and never changes once released; ``field``, ``found``
    and ``expected`` say what was compared; ``hint`` says what the user can do.
    None of them ever holds prompt text, tokens or secrets.
    """

    default_reason: ClassVar[str] = "internal_error"
    default_hint: ClassVar[str | None] = None
    """What helps against every error of a kind, where nothing better is said."""

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason or self.default_reason
        self.field = field
        self.found = found
        self.expected = expected
        self.hint = hint or self.default_hint

    @property
    def message(self) -> str:
        """The sentence for people; never parsed by code."""
        return str(self.args[0])

    def details(self) -> dict[str, str]:
        """The reason, field, found, expected and hint that are set, as text for JSON."""
        known = {
            "reason": self.reason,
            "field": self.field,
            "found": self.found,
            "expected": self.expected,
            "hint": self.hint,
        }
        return {name: str(value) for name, value in known.items() if value is not None}


def told(error: BatonError, program: str) -> str:
    """``error`` as every command shows it on a terminal, without a last line feed::

        PROGRAM: error: MESSAGE (REASON)
          field: NAME
          found: VALUE
          expected: VALUE
          → HINT

    Lines of which nothing is known are left out.
    """
    details = error.details()
    lines = [f"{program}: error: {error.message.rstrip('.')} ({error.reason})"]
    lines += [f"  {name}: {_plain(details[name])}" for name in _SHOWN if name in details]
    if error.hint:
        lines.append("  → " + error.hint.replace("\n", "\n    "))
    return "\n".join(lines)


_SHOWN = ("field", "found", "expected")


def _plain(text: str) -> str:
    """Without what a terminal would act on: values come from files and other machines."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class ConfigError(BatonError):
    """The configuration, model or environment must be changed before a restart helps."""

    default_reason = "config_invalid"


class RequestError(BatonError):
    """The client's request cannot be served as it is; sending it again is useless."""

    default_reason = "invalid_request"


class ProtocolError(BatonError):
    """Two peers disagree about the wire."""

    default_reason = "protocol_violation"


class LocalProtocolError(ProtocolError):
    """This side asked its state machine for something that the state forbids: a bug here."""

    default_reason = "protocol_misuse"


class PeerProtocolError(ProtocolError):
    """The other side sent something that version, state, length or schedule forbids."""


class IdentityMismatch(BatonError):
    """A cache of the other side would mean something else here.

    ``components`` names the identity components that differ.
    """

    default_reason = "identity_differs"
    default_hint = (
        "both must hold the same files: baton node send NAME sends the producer the decoder's "
        "model; one that was started with --model has to be started again, without it"
    )

    def __init__(
        self,
        message: str,
        *,
        components: tuple[str, ...] = (),
        reason: str | None = None,
        field: str | None = None,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(
            message, reason=reason, field=field, found=found, expected=expected, hint=hint
        )
        self.components = components


class IntegrityError(BatonError):
    """Bytes differ from those that were authenticated (digest, HMAC, seal)."""

    default_reason = "digest_differs"


class TransferError(BatonError):
    """A handoff ended without a verified seal; nothing was installed."""

    default_reason = "transfer_failed"


class CapacityError(BatonError):
    """There is no room now: queue, memory or connections."""

    default_reason = "capacity_exceeded"

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float = 1.0,
        reason: str | None = None,
        field: str | None = None,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(
            message, reason=reason, field=field, found=found, expected=expected, hint=hint
        )
        self.retry_after_s = retry_after_s


class Cancelled(BatonError):
    """The work was withdrawn: a client left, or the peer sent ABORT."""

    default_reason = "cancelled"


class EngineFault(BatonError):
    """The accelerator or its runtime failed. The process must stop with exit status 75."""

    default_reason = "engine_fault"
