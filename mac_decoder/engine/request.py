"""One request's way through the engine: its stage, its clock, and the report at its end.

Touched by the MLX thread only. Times are readings of ``time.perf_counter`` in seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from mac_decoder.engine.batch import Member
from mac_decoder.engine.events import Generation, Report, Source


class Stage(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    """Admitted to the queue; nothing is reserved."""
    REMOTE = "remote"
    """Bytes are reserved; it waits for the lane or its handoff is under way."""
    PREFILL = "prefill"
    """Its prompt is being computed here."""
    DECODE = "decode"
    """Its cache is in a decode group."""


@dataclass(eq=False, slots=True)
class Request:
    """A generation and all that the engine knows about it.

    ``rows`` positions and ``nbytes`` bytes are reserved for it until it decodes; then its
    group counts them.
    """

    key: int
    generation: Generation
    submitted: float
    stage: Stage = Stage.WAITING
    rows: int = 0
    nbytes: int = 0
    source: Source = "local"
    reasons: list[str] = field(default_factory=list)
    fallback: bool = False
    phases: dict[str, float] = field(default_factory=dict)
    transferred_bytes: int = 0
    stage_began: float = 0.0
    first_token_at: float | None = None
    reported_at: float = 0.0
    member: Member | None = None

    @property
    def end(self) -> int:
        """The position at which the cache must be before the boundary step: N-1."""
        return len(self.generation.tokens) - 1

    def add_phase(self, name: str, milliseconds: float) -> None:
        """Add to a phase; phases that happen twice are summed."""
        self.phases[name] = self.phases.get(name, 0.0) + milliseconds

    def enter(self, stage: Stage, now: float, phase: str | None = None) -> None:
        """Go on to ``stage``; the time since the last one is booked under ``phase``."""
        began = self.stage_began or self.submitted
        if phase is not None:
            self.add_phase(phase, (now - began) * 1e3)
        self.stage = stage
        self.stage_began = now

    def add_handoff(self, phases: Mapping[str, float], nbytes: int, ended: float) -> None:
        """Book a handoff sealed at ``ended``: the link's own phases and its payload bytes."""
        for name, milliseconds in phases.items():
            self.add_phase(name, milliseconds)
        self.source = "remote"
        self.transferred_bytes = nbytes
        self.stage_began = ended

    def saw_first_token(self, now: float) -> None:
        """The boundary step's token is on the host."""
        self.first_token_at = now
        self.add_phase("boundary_decode", (now - self.stage_began) * 1e3)

    def report(self) -> Report:
        """What :class:`Finished` tells; only after the first token."""
        first = self.first_token_at if self.first_token_at is not None else self.stage_began
        return Report(
            source=self.source,
            reused_tokens=0,
            prefilled_tokens=self.end,
            transferred_bytes=self.transferred_bytes,
            ttft_ms=(first - self.submitted) * 1e3,
            phases={name: round(value, 3) for name, value in self.phases.items()},
            reasons=tuple(self.reasons),
            fallback=self.fallback,
        )
