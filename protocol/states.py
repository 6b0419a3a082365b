"""The states of both machines and the tables that say how they move.

A table maps (state, trigger) to the next state. Upper-case triggers are messages that
arrive (FRAME is a data frame's header); lower-case ones are calls by the machine's own
side. A message that the table does not hold is refused with ``message_unexpected``; a call
that it does not hold raises LocalProtocolError. Any refusal, an ABORT with generation 0, a
passed deadline or the end of the connection leads to CLOSED from every state; the tables
leave that out.

The tables of ``protocol/README.md`` are drawn by :func:`drawn`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class State(StrEnum):
    """Where one side of a connection stands."""

    START = "START"
    HELLO_SENT = "HELLO_SENT"
    """Decoder: HELLO is out."""
    HELLO_ACKED = "HELLO_ACKED"
    """Producer: HELLO_ACK is out; the decoder's PROOF must come first."""
    PROOF_SENT = "PROOF_SENT"
    """Decoder: PROOF is out; the producer's must come."""
    READY = "READY"
    """Both keys are proven, no handoff is under way."""
    RESUMING = "RESUMING"
    """RESUME is out (decoder) or in (producer); it is not answered yet."""
    REQUESTED = "REQUESTED"
    """PREFILL is out (decoder) or in (producer); no manifest yet."""
    RECEIVING = "RECEIVING"
    """Decoder: the manifest is checked, frames come."""
    STREAMING = "STREAMING"
    """Producer: the manifest is out, frames go."""
    SEALING = "SEALING"
    """Decoder: SEAL is here, digests of frames are still being computed."""
    VERIFIED = "VERIFIED"
    """Decoder: everything is verified; the install is the shell's."""
    SEALED = "SEALED"
    """Producer: SEAL is out; COMMITTED must come."""
    ABORTING = "ABORTING"
    """Our ABORT is out; what still arrives of the handoff is dropped."""
    CROSSED = "CROSSED"
    """Both ABORTs met; the peer's ABORTED must come and nothing else can."""
    RELEASING = "RELEASING"
    """The peer's ABORT is here; the shell still uses the handoff's buffers."""
    CLOSED = "CLOSED"


Transitions = Mapping[tuple[State, str], State]

_ENDINGS: Final[dict[tuple[State, str], State]] = {
    (State.ABORTING, "ABORT"): State.CROSSED,
    (State.ABORTING, "ABORTED"): State.READY,
    (State.CROSSED, "ABORTED"): State.READY,
    (State.RELEASING, "release"): State.READY,
}

DECODER: Final[Transitions] = {
    (State.START, "connect"): State.HELLO_SENT,
    (State.HELLO_SENT, "HELLO_ACK"): State.PROOF_SENT,
    (State.PROOF_SENT, "PROOF"): State.READY,
    (State.READY, "start"): State.REQUESTED,
    (State.READY, "acknowledge"): State.READY,
    (State.READY, "resume"): State.RESUMING,
    (State.RESUMING, "RESUMED"): State.REQUESTED,
    (State.RESUMING, "abort"): State.ABORTING,
    (State.RESUMING, "ABORT"): State.RELEASING,
    (State.REQUESTED, "manifest"): State.RECEIVING,
    (State.REQUESTED, "PROGRESS"): State.REQUESTED,
    (State.REQUESTED, "BEGIN"): State.RECEIVING,
    (State.REQUESTED, "abort"): State.ABORTING,
    (State.REQUESTED, "ABORT"): State.RELEASING,
    (State.RECEIVING, "PROGRESS"): State.RECEIVING,
    (State.RECEIVING, "FRAME"): State.RECEIVING,
    (State.RECEIVING, "SEAL"): State.SEALING,
    (State.RECEIVING, "abort"): State.ABORTING,
    (State.RECEIVING, "ABORT"): State.RELEASING,
    (State.SEALING, "verified"): State.VERIFIED,
    (State.SEALING, "abort"): State.ABORTING,
    (State.SEALING, "ABORT"): State.RELEASING,
    (State.VERIFIED, "commit"): State.READY,
    (State.VERIFIED, "abort"): State.ABORTING,
    (State.VERIFIED, "ABORT"): State.RELEASING,
    (State.ABORTING, "RESUMED"): State.ABORTING,
    (State.ABORTING, "BEGIN"): State.ABORTING,
    (State.ABORTING, "PROGRESS"): State.ABORTING,
    (State.ABORTING, "FRAME"): State.ABORTING,
    (State.ABORTING, "SEAL"): State.ABORTING,
    **_ENDINGS,
}
"""How the decoder's machine moves."""

PRODUCER: Final[Transitions] = {
    (State.START, "HELLO"): State.HELLO_ACKED,
    (State.HELLO_ACKED, "PROOF"): State.READY,
    (State.READY, "PREFILL"): State.REQUESTED,
    (State.READY, "COMMITTED"): State.READY,
    (State.READY, "RESUME"): State.RESUMING,
    (State.RESUMING, "resumed"): State.REQUESTED,
    (State.RESUMING, "abort"): State.ABORTING,
    (State.RESUMING, "ABORT"): State.RELEASING,
    (State.REQUESTED, "manifest"): State.STREAMING,
    (State.REQUESTED, "progress"): State.REQUESTED,
    (State.REQUESTED, "begin"): State.STREAMING,
    (State.REQUESTED, "abort"): State.ABORTING,
    (State.REQUESTED, "ABORT"): State.RELEASING,
    (State.STREAMING, "progress"): State.STREAMING,
    (State.STREAMING, "frame"): State.STREAMING,
    (State.STREAMING, "CREDIT"): State.STREAMING,
    (State.STREAMING, "seal"): State.SEALED,
    (State.STREAMING, "abort"): State.ABORTING,
    (State.STREAMING, "ABORT"): State.RELEASING,
    (State.SEALED, "CREDIT"): State.SEALED,
    (State.SEALED, "COMMITTED"): State.READY,
    (State.SEALED, "abort"): State.ABORTING,
    (State.SEALED, "ABORT"): State.RELEASING,
    (State.ABORTING, "CREDIT"): State.ABORTING,
    (State.ABORTING, "COMMITTED"): State.READY,
    **_ENDINGS,
}
"""How the producer's machine moves."""


def drawn(table: Transitions) -> str:
    """A table as Markdown: one line per state, its triggers with the states they lead to."""
    lines = ["| state | trigger → state |", "|---|---|"]
    for state in State:
        moves = [
            f"{trigger} → {target}" if target != state else f"{trigger} ↻"
            for (source, trigger), target in table.items()
            if source == state
        ]
        if moves:
            lines.append(f"| {state} | {', '.join(moves)} |")
    return "\n".join(lines) + "\n"
