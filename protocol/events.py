"""What a machine tells its shell; values, never calls."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protocol.errors import BatonError
from protocol.messages import Begin, HelloAck, Prefill, Resume, Seal
from protocol.messages import Committed as CommittedMessage


@dataclass(frozen=True)
class Ready:
    """The peer has proven the pairing key; ``ack`` is what the producer said of itself."""

    ack: HelloAck


@dataclass(frozen=True)
class Began:
    """Decoder: the manifest was checked in every field; frames follow."""

    begin: Begin


@dataclass(frozen=True)
class Progressed:
    """Decoder: ``done`` of ``total`` tokens are computed. Not authenticated: for display."""

    done: int
    total: int


@dataclass(frozen=True)
class Sealed:
    """Decoder: every byte is verified and the generation admitted. Install, then commit."""

    begin: Begin
    seal: Seal


@dataclass(frozen=True, eq=False)
class Requested:
    """Producer: a checked request. ``tokens`` are ``[0, end)``, read-only uint32."""

    prefill: Prefill
    tokens: NDArray[np.uint32] = field(repr=False)


@dataclass(frozen=True)
class Interrupted:
    """Producer: the decoder wants to go on with a handoff. Call ``resume`` or ``abort``."""

    resume: Resume


@dataclass(frozen=True)
class Late:
    """Producer: COMMITTED came outside of its handoff's connection; not yet authenticated."""

    committed: CommittedMessage


@dataclass(frozen=True)
class Credited:
    """Producer: the decoder has room for more; ``available`` frames may be taken now."""

    available: int


@dataclass(frozen=True)
class Committed:
    """Producer: the decoder installed what was sealed; this is authenticated."""

    generation: int


@dataclass(frozen=True, eq=False)
class PeerAborted:
    """The peer ended the handoff. Stop what uses its buffers, then call ``release``."""

    generation: int
    error: BatonError


@dataclass(frozen=True)
class Released:
    """The peer answered our ABORT: nothing more of that handoff comes. Ready again."""

    generation: int


Event = (
    Ready
    | Began
    | Progressed
    | Sealed
    | Requested
    | Interrupted
    | Late
    | Credited
    | Committed
    | PeerAborted
    | Released
)
