"""What reuse gave: counters, and figures derived from them with their standing. Pure.

One :class:`Served` per request, made after its cache was installed, never before: a restore
that failed is no hit. Going on in a live sequence and installing a handoff are counted apart
and do not touch the hit rate. Bytes are those of the layout's spans, as in manifests.

Every derived figure says whether it was measured, estimated, or cannot be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from mac_decoder.reuse.ladder import SHORTFALLS
from protocol.layout import Layout, payload_bytes

Source = Literal["live", "resident", "durable", "remote", "local"]
Tag = Literal["measured", "estimated", "unavailable"]

RESTORE_PHASES: Final = ("lookup", "read", "verify", "place", "swap", "boundary_decode")
"""Phases of a hit, in the order in which they happen."""

REMEMBERED_CUTS: Final = 1024
"""Cuts whose timings are kept apart, so that a restore can be paired with a prefill."""


class Figure(NamedTuple):
    """A derived value and its standing; an unavailable one has no value."""

    value: float | None
    tag: Tag


UNAVAILABLE: Final = Figure(None, "unavailable")


class Matrix(NamedTuple):
    """A weight that prompt tokens are multiplied by; ``active`` of ``experts`` take a token."""

    rows: int
    columns: int
    experts: int = 1
    active: int = 1


def active_matmul_parameters(matrices: Iterable[Matrix]) -> int:
    """Parameters that one prompt token is multiplied by: of experts, the routed ones only.

    A floor: attention scores, norms, embeddings and the head are left out.
    """
    return sum(m.rows * m.columns * min(m.active, m.experts) for m in matrices)


def recomputed_bytes(layout: Layout, position: int, shared: int, end: int) -> int:
    """Bytes of a cache that a tier held and that were computed again.

    ``position`` is where the request began to prefill, ``shared`` the longest prefix that any
    tier held, ``end`` N-1.
    """
    held = min(shared, end)
    return payload_bytes(layout, position, held) if position < held else 0


@dataclass(frozen=True)
class Served:
    """How one request came to its cache; made once that is installed.

    ``cut`` names the cache that was restored, or computed here from position 0: by it a timed
    restore meets a timed prefill of the same cut. ``restore_bytes`` and ``installed_bytes``
    are manifest bytes, ``staging_bytes`` the transient memory beyond the cut. ``prefill_s`` is
    the time in which ``prefilled_here`` tokens were computed on this machine. ``failures``
    are the reasons of rungs that were tried and failed. ``asked`` is false where the request
    wanted nothing that is held, which is no miss.
    """

    request_id: str
    source: Source
    prompt_tokens: int
    asked: bool = True
    reused_tokens: int = 0
    shared_tokens: int = 0
    parts_at: int | None = None
    cut: bytes = b""
    restore_bytes: int = 0
    restore_s: float = 0.0
    staging_bytes: int = 0
    evicted_bytes: int = 0
    installed_bytes: int = 0
    recomputed_bytes: int = 0
    prefilled_here: int = 0
    prefill_s: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a hit of nothing, or reuse of the boundary token."""
        if not 0 <= self.reused_tokens < self.prompt_tokens:
            raise ValueError("reused tokens are at most those before the boundary token")
        if self.source in ("live", "resident", "durable") and not self.reused_tokens:
            raise ValueError(f"source {self.source} reuses tokens")
        if self.source in ("resident", "durable") and not (self.cut and self.restore_bytes):
            raise ValueError("a hit has a cut and its bytes")

    @property
    def shortfalls(self) -> tuple[str, ...]:
        """Why less was reused than could have been."""
        return (*(reason for reason in self.reasons if reason in SHORTFALLS), *self.failures)


@dataclass(frozen=True)
class _Timing:
    """What one cut took: ``tokens`` long, restored and computed here so many times."""

    tokens: int
    restores: int = 0
    restore_s: float = 0.0
    prefills: int = 0
    prefill_s: float = 0.0


@dataclass(frozen=True)
class _Saved:
    """Sums over restores: paired with a prefill of the same cut, and without one."""

    paired_prefill_s: float = 0.0
    paired_restore_s: float = 0.0
    unpaired_tokens: int = 0
    unpaired_restore_s: float = 0.0

    def with_cut(self, timing: _Timing) -> _Saved:
        if not timing.restores:
            return self
        if not timing.prefills:
            return replace(
                self,
                unpaired_tokens=self.unpaired_tokens + timing.restores * timing.tokens,
                unpaired_restore_s=self.unpaired_restore_s + timing.restore_s,
            )
        each = timing.prefill_s / timing.prefills
        return replace(
            self,
            paired_prefill_s=self.paired_prefill_s + timing.restores * each,
            paired_restore_s=self.paired_restore_s + timing.restore_s,
        )


@dataclass(frozen=True)
class Accounts:
    """All counters since the start; :meth:`after` gives the next ones.

    ``active_parameters`` is :func:`active_matmul_parameters` of the model, ``None`` where it
    is not known. ``saved_today`` are the seconds that restores saved since the start, or since
    :meth:`on_a_new_day`: each by what was known when it happened, and never valued anew.
    """

    active_parameters: int | None = None
    cache_hits: int = 0
    cache_misses: int = 0
    session_continuation_hits: int = 0
    disagg_prefills: int = 0
    delta_prefills: int = 0
    disagg_bytes_installed: int = 0
    bytes_served_from_cache: int = 0
    bytes_recomputed: int = 0
    tiers: Mapping[str, int] = field(default_factory=dict)
    shortfalls: Mapping[str, int] = field(default_factory=dict)
    saved_today: Figure = UNAVAILABLE
    _all_told: bool = True
    _restored_tokens: int = 0
    _here_tokens: int = 0
    _here_s: float = 0.0
    _timings: Mapping[bytes, _Timing] = field(default_factory=dict)
    _forgotten: _Saved = _Saved()

    def after(self, served: Served) -> Accounts:
        """The accounts once a request's cache is installed."""
        fetched = served.source in ("resident", "durable")
        # A delta from a held cut is neither, and has its own counter: the tier served a part,
        # the producer the rest.
        missed = served.source in ("remote", "local") and not served.reused_tokens and served.asked
        remote = served.source == "remote"
        delta = remote and served.reused_tokens > 0
        restored = served.reused_tokens if fetched or delta else 0
        timings, forgotten = self._timed(served, fetched=fetched)
        after = replace(
            self,
            cache_hits=self.cache_hits + fetched,
            cache_misses=self.cache_misses + (missed and served.prompt_tokens > 1),
            session_continuation_hits=self.session_continuation_hits + (served.source == "live"),
            disagg_prefills=self.disagg_prefills + remote,
            delta_prefills=self.delta_prefills + delta,
            disagg_bytes_installed=self.disagg_bytes_installed + served.installed_bytes,
            bytes_served_from_cache=self.bytes_served_from_cache + served.restore_bytes,
            bytes_recomputed=self.bytes_recomputed + served.recomputed_bytes,
            tiers=_counted(self.tiers, (served.source,)),
            shortfalls=_counted(self.shortfalls, served.shortfalls),
            _restored_tokens=self._restored_tokens + restored,
            _here_tokens=self._here_tokens + served.prefilled_here,
            _here_s=self._here_s + served.prefill_s,
            _timings=timings,
            _forgotten=forgotten,
        )
        return after._with_saved(after._saved_by(served)) if fetched else after

    def counters(self) -> dict[str, int]:
        """Every counter by its name; tiers and reasons that never counted are left out."""
        return {
            "cache_hits": self.cache_hits,
            "cache_misses": self.cache_misses,
            "session_continuation_hits": self.session_continuation_hits,
            "disagg_prefills": self.disagg_prefills,
            "delta_prefills": self.delta_prefills,
            "disagg_bytes_installed": self.disagg_bytes_installed,
            "bytes_served_from_cache": self.bytes_served_from_cache,
            "bytes_recomputed": self.bytes_recomputed,
            **{f"tier_{name}": count for name, count in sorted(self.tiers.items())},
            **{f"fell_short_{name}": count for name, count in sorted(self.shortfalls.items())},
        }

    def derived(self, watts: float | None = None) -> dict[str, Figure]:
        """Every derived figure by its name.

        ``watts`` is what prefilling draws, from a power source; without one, energy cannot be
        told. With one it is an estimate: the prefill that did not happen drew nothing.
        """
        saved = self._saved()
        seconds = self._seconds_saved(saved)
        joules = UNAVAILABLE
        if watts is not None and seconds.value is not None:
            joules = Figure(seconds.value * watts, "estimated")
        gflops = UNAVAILABLE
        if self.active_parameters is not None:
            flops = 2 * self.active_parameters * self._restored_tokens
            gflops = Figure(flops / 1e9, "estimated")
        return {
            "hit_rate": self._hit_rate(),
            "restore_speedup": self._speedup(saved),
            "seconds_saved": seconds,
            "gflops_avoided": gflops,
            "joules_saved": joules,
        }

    def on_a_new_day(self) -> Accounts:
        """The same accounts, of a day on which nothing was saved yet."""
        return replace(self, saved_today=UNAVAILABLE, _all_told=True)

    # -- what the figures rest on

    def _hit_rate(self) -> Figure:
        asked = self.cache_hits + self.cache_misses
        return Figure(self.cache_hits / asked, "measured") if asked else UNAVAILABLE

    def _saved(self) -> _Saved:
        saved = self._forgotten
        for timing in self._timings.values():
            saved = saved.with_cut(timing)
        return saved

    def _expected_s(self, tokens: int) -> float | None:
        """How long prefilling ``tokens`` here would take, by the rate measured so far."""
        return tokens * self._here_s / self._here_tokens if self._here_tokens else None

    def _speedup(self, saved: _Saved) -> Figure:
        if saved.paired_restore_s > 0:
            return Figure(saved.paired_prefill_s / saved.paired_restore_s, "measured")
        expected = self._expected_s(saved.unpaired_tokens)
        if expected is None or saved.unpaired_restore_s <= 0:
            return UNAVAILABLE
        return Figure(expected / saved.unpaired_restore_s, "estimated")

    def _seconds_saved(self, saved: _Saved) -> Figure:
        paired = saved.paired_prefill_s - saved.paired_restore_s
        if not saved.unpaired_tokens:
            return Figure(paired, "measured") if saved.paired_restore_s > 0 else UNAVAILABLE
        expected = self._expected_s(saved.unpaired_tokens)
        if expected is None:
            return UNAVAILABLE
        return Figure(paired + expected - saved.unpaired_restore_s, "estimated")

    def _saved_by(self, served: Served) -> Figure:
        """The seconds that one restore saved, as far as that is known once it is booked."""
        timing = self._timings.get(served.cut)
        if timing is not None and timing.prefills:
            return Figure(timing.prefill_s / timing.prefills - served.restore_s, "measured")
        expected = self._expected_s(served.reused_tokens)
        if expected is None:
            return UNAVAILABLE
        return Figure(expected - served.restore_s, "estimated")

    def _with_saved(self, saved: Figure) -> Accounts:
        """One restore more today. One that nothing can be told of makes the sum an estimate."""
        told, sofar = self._all_told and saved.value is not None, self.saved_today
        if saved.value is None:
            value = sofar.value
        else:
            value = saved.value + (sofar.value or 0.0)
        exact = told and saved.tag == "measured" and sofar.tag != "estimated"
        today = UNAVAILABLE
        if value is not None:
            today = Figure(value, "measured" if exact else "estimated")
        return replace(self, saved_today=today, _all_told=told)

    def _timed(self, served: Served, *, fetched: bool) -> tuple[Mapping[bytes, _Timing], _Saved]:
        """The timings after one more; the cut that was timed longest ago gives up its place."""
        computed = served.source == "local" and not served.reused_tokens and served.prefill_s > 0
        if not served.cut or not (fetched or computed):
            return self._timings, self._forgotten
        tokens = served.reused_tokens if fetched else served.prefilled_here
        timings = dict(self._timings)
        timing = timings.pop(served.cut, _Timing(tokens))
        if fetched:
            timing = replace(
                timing, restores=timing.restores + 1, restore_s=timing.restore_s + served.restore_s
            )
        else:
            timing = replace(
                timing, prefills=timing.prefills + 1, prefill_s=timing.prefill_s + served.prefill_s
            )
        timings[served.cut] = timing
        forgotten = self._forgotten
        if len(timings) > REMEMBERED_CUTS:
            forgotten = forgotten.with_cut(timings.pop(next(iter(timings))))
        return timings, forgotten


def _counted(counts: Mapping[str, int], names: Iterable[str]) -> Mapping[str, int]:
    found = dict(counts)
    for name in names:
        found[name] = found.get(name, 0) + 1
    return found
