"""What is kept: the tiers, what they take, what they gave, and what went."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from app.view import facts, words
from app.view.facts import Fact, Meter, Tone
from app.view.reasons import meaning
from protocol.status.snapshot import CacheEvent, Snapshot

_KINDS: Final[dict[str, tuple[str, Tone]]] = {
    "deleted": ("deleted", "plain"),
    "invalid": ("set aside", "bad"),
    "index_rebuilt": ("index made anew", "warn"),
}


@dataclass(frozen=True)
class Event:
    """Files that went, in one line; ``reason`` is a code, ``means`` says it in words."""

    ago: str
    kind: str
    tone: Tone
    reason: str
    means: str
    files: Fact
    cuts: Fact
    bytes: Fact


@dataclass(frozen=True)
class Cache:
    """``durable`` is ``None`` without a tier on disk: then there is no page of it."""

    live: Meter | None
    resident: Meter | None
    durable: Meter | None
    gains: tuple[Fact, ...]
    counters: tuple[Fact, ...]
    events: tuple[Event, ...]


def cache(snapshot: Snapshot, now: float) -> Cache:
    """Everything about what is kept."""
    return Cache(
        _live(snapshot),
        _resident(snapshot),
        _durable(snapshot),
        gains(snapshot, now),
        tuple(
            facts.count(name.replace("_", " "), value, f"cache.counters.{name}")
            for name, value in snapshot.cache.counters.items()
        ),
        tuple(
            _event(one, f"cache.events.{place}", now)
            for place, one in enumerate(snapshot.cache.events)
        ),
    )


def gains(snapshot: Snapshot, now: float) -> tuple[Fact, ...]:
    """What reuse gave."""
    found = snapshot.cache
    return (
        facts.share("hit rate", found.hit_rate, "cache.hit_rate"),
        saved_today(snapshot, now),
        facts.seconds("saved since the start", found.seconds_saved, "cache.seconds_saved"),
        facts.number(
            "restoring is faster", found.restore_speedup, "cache.restore_speedup", "times"
        ),
        facts.number("work avoided", found.gflops_avoided, "cache.gflops_avoided", "GFLOP"),
        facts.number("energy saved", found.joules_saved, "cache.joules_saved", "J"),
    )


def saved_today(snapshot: Snapshot, now: float) -> Fact:
    """Seconds saved since midnight, or since the decoder's start where that was later."""
    started = datetime.fromtimestamp(snapshot.decoder.started_at).astimezone()
    today = started.date() == datetime.fromtimestamp(now).astimezone().date()
    label = f"saved since {started:%H:%M}" if today else "saved today"
    return facts.seconds(label, snapshot.cache.seconds_saved_today, "cache.seconds_saved_today")


def _live(snapshot: Snapshot) -> Meter | None:
    live = snapshot.cache.live
    if live is None:
        return None
    return Meter(
        "live",
        f"{words.counted(live.sequences, 'sequence')}, {words.nbytes(live.bytes)}",
        None,
        (
            facts.count("sequences", live.sequences, "cache.live.sequences"),
            facts.size("bytes", live.bytes, "cache.live.bytes"),
            facts.count("evicted", live.evicted, "cache.live.evicted"),
        ),
    )


def _resident(snapshot: Snapshot) -> Meter | None:
    tier = snapshot.cache.resident
    if tier is None:
        return None
    at = "cache.resident"
    return Meter(
        "memory",
        f"{words.nbytes(tier.used_bytes)} of {words.nbytes(tier.budget_bytes)}, "
        f"{words.counted(tier.cuts, 'cut')}",
        _share(tier.used_bytes, tier.budget_bytes),
        (
            facts.count("cuts", tier.cuts, f"{at}.cuts"),
            facts.count("blocks", tier.blocks, f"{at}.blocks"),
            facts.size("used", tier.used_bytes, f"{at}.used_bytes", note="shared blocks once"),
            facts.size("budget", tier.budget_bytes, f"{at}.budget_bytes"),
            facts.size(
                "referenced",
                tier.referenced_bytes,
                f"{at}.referenced_bytes",
                note="shared blocks once for every cut",
            ),
            facts.size("pinned", tier.pinned_bytes, f"{at}.pinned_bytes", note="in use now"),
            facts.count("cuts evicted", tier.evicted_cuts, f"{at}.evicted_cuts"),
            facts.size("bytes evicted", tier.evicted_bytes, f"{at}.evicted_bytes"),
        ),
    )


def _durable(snapshot: Snapshot) -> Meter | None:
    tier = snapshot.cache.durable
    if tier is None:
        return None
    at = "cache.durable"
    return Meter(
        "disk",
        f"{words.nbytes(tier.on_disk)} of {words.nbytes(tier.cap_bytes)}, "
        f"{words.counted(tier.cuts, 'cut')}",
        _share(tier.on_disk, tier.cap_bytes),
        (
            facts.count("cuts", tier.cuts, f"{at}.cuts"),
            facts.count("blocks", tier.blocks, f"{at}.blocks"),
            facts.size(
                "on disk", tier.on_disk, f"{at}.on_disk", note="every byte; what the cap is about"
            ),
            facts.size("cap", tier.cap_bytes, f"{at}.cap_bytes"),
            facts.size(
                "referenced",
                tier.referenced,
                f"{at}.referenced",
                note="each conversation counted whole",
            ),
            facts.size("left free for others", tier.floor_bytes, f"{at}.floor_bytes"),
            facts.count("being published", tier.publishing, f"{at}.publishing"),
            facts.count(
                "withheld",
                tier.withheld,
                f"{at}.withheld",
                note="cuts that lack a block which was set aside",
            ),
        ),
    )


def _event(one: CacheEvent, path: str, now: float) -> Event:
    kind, tone = _KINDS[one.kind]
    return Event(
        words.ago(one.at, now),
        kind,
        tone,
        one.reason,
        meaning(one.reason),
        facts.count("files", one.files, f"{path}.files"),
        facts.count("cuts", one.cuts, f"{path}.cuts"),
        facts.size("bytes", one.bytes, f"{path}.bytes"),
    )


def _share(used: int, most: int) -> float | None:
    return min(1.0, used / most) if most else None
