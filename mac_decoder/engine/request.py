"""One request's way through the engine: its stage, its clock, and the report at its end.

Touched by the MLX thread only. Times are readings of ``time.perf_counter`` in seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from mac_decoder.engine.cuts import Role
from mac_decoder.engine.events import Generation, Report, Source
from mac_decoder.engine.member import Member
from mac_decoder.keeper import Kept, Line, Looked, Restored
from mac_decoder.kv.install import Rows
from mac_decoder.reuse import facts
from mac_decoder.reuse.accounting import Served, recomputed_bytes
from mac_decoder.reuse.facts import DeltaHandoff, FetchedTier, Plan
from mac_decoder.reuse.resident import Pinned
from protocol.layout import Layout
from protocol.messages import History


class Stage(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    """Admitted to the queue; nothing is reserved."""
    LOOKUP = "lookup"
    """Bytes are reserved; the tiers are asked what they hold of its prompt."""
    RESTORE = "restore"
    """A held cut is being copied or read for it."""
    REMOTE = "remote"
    """It waits for the lane or its handoff is under way."""
    PREFILL = "prefill"
    """Its prompt is being computed here."""
    DECODE = "decode"
    """Its cache is in a decode group."""


@dataclass(frozen=True)
class Cut:
    """A cut at ``position`` that ``caches`` stand at. What came from the durable tier is not
    published again.
    """

    caches: list[Any]
    position: int
    role: Role
    publish: bool = True


@dataclass(slots=True)
class Reuse:
    """What a request found and took of the tiers, and what it leaves them.

    ``start`` is the position from which its prompt was prefilled; ``history`` says how the rows
    in its caches were made, ``line`` what of them is kept. ``failures`` are the reasons of
    rungs that were tried and failed, ``tried`` these and why a handoff was tried, ``away`` why
    it failed, ``without`` the producers that did. ``shared`` and ``parts_at`` are those of the
    first plan. ``due`` waits for the first token; ``poisoned``: nothing is kept. ``delta`` is the
    one that the producer is asked for, ``armed`` its held cut.
    """

    looked: Looked
    plan: Plan | None = None
    start: int = 0
    history: tuple[History, ...] = ()
    line: Line = field(default_factory=Line)
    restored: Restored | None = None
    restore_s: float = 0.0
    prefill_s: float = 0.0
    evicted_bytes: int = 0
    shared: int = 0
    parts_at: int | None = None
    failures: list[str] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    away: str = ""
    without: set[int] = field(default_factory=set)
    due: list[Kept] = field(default_factory=list)
    poisoned: bool = False
    delta: DeltaHandoff | None = None
    armed: Pinned | None = None

    def arm(self, delta: DeltaHandoff | None, armed: Pinned | None) -> None:
        """Ask for a delta next, or for everything; the delta's cut stays held until it ends."""
        self.disarm()
        self.delta, self.armed = delta, armed

    def disarm(self) -> None:
        """The handoff that was asked for has ended, one way or the other."""
        if self.armed is not None:
            self.armed.release()
        self.delta = self.armed = None

    def lost(self, tier: FetchedTier, key: object, reason: str) -> None:
        """A held cut failed this request, which goes on as if it were not held."""
        self.failures.append(reason)
        self.tried.append(reason)
        held = self.looked.resident if tier == "resident" else self.looked.durable
        if held is not None:
            self.looked = replace(self.looked, **{tier: facts.without(held, key)})


@dataclass(eq=False, slots=True)
class Request:
    """A generation and all that the engine knows about it.

    ``rows`` positions and ``nbytes`` bytes are reserved for it until it decodes; then its
    group counts them. ``transferred_bytes`` and ``computed_tokens`` are of its handoff.
    ``wanted``: nothing but its rows at N-1 is, and it is in no statistics.
    """

    key: int
    generation: Generation
    submitted: float
    reuse: Reuse
    stage: Stage = Stage.WAITING
    rows: int = 0
    nbytes: int = 0
    source: Source = "local"
    reasons: list[str] = field(default_factory=list)
    fallback: bool = False
    phases: dict[str, float] = field(default_factory=dict)
    transferred_bytes: int = 0
    computed_tokens: int = 0
    stage_began: float = 0.0
    first_token_at: float | None = None
    reported_at: float = 0.0
    member: Member | None = None
    wanted: Future[Rows] | None = None

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

    @property
    def _computed_tokens(self) -> int:
        """What was computed: here, or by the producer that has handed off the cache."""
        return self.computed_tokens if self.source == "remote" else self.end - self.reuse.start

    def report(self) -> Report:
        """What :class:`Finished` tells; only after the first token."""
        first = self.first_token_at if self.first_token_at is not None else self.stage_began
        reuse, restored = self.reuse, self.reuse.restored
        return Report(
            source=self.source,
            reused_tokens=reuse.start,
            prefilled_tokens=self.end - reuse.start,
            transferred_bytes=self.transferred_bytes,
            ttft_ms=(first - self.submitted) * 1e3,
            phases={name: round(value, 3) for name, value in self.phases.items()},
            reasons=tuple(self.reasons),
            fallback=self.fallback,
            shared_tokens=reuse.shared,
            parts_at=reuse.parts_at,
            restore_ms=round(reuse.restore_s * 1e3, 3),
            restore_bytes=restored.nbytes if restored else 0,
            staging_bytes=restored.staging_bytes if restored else 0,
            evicted_bytes=reuse.evicted_bytes,
            computed_tokens=self._computed_tokens,
        )

    def served(self, layout: Layout) -> Served:
        """What the accounts are told once its caches are installed."""
        reuse, restored, end = self.reuse, self.reuse.restored, self.end
        here = 0 if self.source == "remote" else end - reuse.start
        return Served(
            request_id=self.generation.request_id,
            source=self.source,
            prompt_tokens=end + 1,
            asked=bool(reuse.looked.space),
            reused_tokens=reuse.start,
            shared_tokens=reuse.shared,
            parts_at=reuse.parts_at,
            cut=reuse.looked.cut_name(reuse.start or end) if reuse.looked.space and end else b"",
            restore_bytes=restored.nbytes if restored else 0,
            restore_s=reuse.restore_s,
            staging_bytes=restored.staging_bytes if restored else 0,
            evicted_bytes=reuse.evicted_bytes,
            installed_bytes=self.transferred_bytes,
            recomputed_bytes=recomputed_bytes(layout, reuse.start, reuse.shared, end),
            prefilled_here=here,
            prefill_s=reuse.prefill_s,
            phases=self.phases,
            reasons=tuple(self.reasons),
            failures=tuple(reuse.failures),
        )
