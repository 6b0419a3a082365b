"""What is kept: the tiers, what they take, what they gave, and what went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from app.view import facts, words
from app.view.facts import Fact, Meter, Tone
from app.view.reasons import meaning
from app.view.requests import SOURCES
from protocol.status.snapshot import CacheEvent, Snapshot

_KINDS: Final[dict[str, tuple[str, Tone]]] = {
    "deleted": ("deleted", "plain"),
    "invalid": ("set aside", "bad"),
    "index_rebuilt": ("index made anew", "warn"),
}

_PROMPTS: Final = "Prompts"
_GROUPS: Final[Mapping[str, str]] = {
    "tier_": "Where caches came from",
    "fell_short_": "Why not more was reused",
}
"""Counters whose names begin so are a group of their own."""

_COUNTED: Final[Mapping[str, tuple[str, str]]] = {
    "cache_hits": ("hits", "went on from memory or disk"),
    "cache_misses": ("misses", "nothing of them could be reused"),
    "session_continuation_hits": ("went on live", "no hits: nothing had to be restored"),
    "disagg_prefills": ("prefilled by producers", ""),
    "delta_prefills": ("of them in part", "the beginning was held: neither hits nor misses"),
    "disagg_bytes_installed": ("received from producers", ""),
    "bytes_served_from_cache": ("restored from memory and disk", ""),
    "bytes_recomputed": ("computed although held", "the reasons are below"),
}
"""What counters are called, and what they count."""


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
    counters: tuple[tuple[str, tuple[Fact, ...]], ...]
    events: tuple[Event, ...]


def cache(snapshot: Snapshot, now: float) -> Cache:
    """Everything about what is kept."""
    return Cache(
        _live(snapshot),
        _resident(snapshot),
        _durable(snapshot),
        gains(snapshot, now),
        _counters(snapshot.cache.counters),
        tuple(
            _event(one, f"cache.events.{place}", now)
            for place, one in enumerate(snapshot.cache.events)
        ),
    )


def gains(snapshot: Snapshot, now: float) -> tuple[Fact, ...]:
    """What reuse gave."""
    found = snapshot.cache
    since_the_start = facts.seconds(
        "saved since the start", found.seconds_saved, "cache.seconds_saved"
    )
    return (
        facts.share("hit rate", found.hit_rate, "cache.hit_rate", term="hit"),
        saved_today(snapshot, now),
        *(() if _began_today(snapshot, now) else (since_the_start,)),
        facts.number(
            "restoring is faster", found.restore_speedup, "cache.restore_speedup", "times"
        ),
        facts.number("work avoided", found.gflops_avoided, "cache.gflops_avoided", "GFLOP"),
        facts.number("energy saved", found.joules_saved, "cache.joules_saved", "J"),
    )


def saved_today(snapshot: Snapshot, now: float) -> Fact:
    """Seconds saved since midnight, or since the decoder's start where that was later."""
    since = words.moment(snapshot.decoder.started_at, "%H:%M")
    label = f"saved since {since}" if _began_today(snapshot, now) else "saved today"
    return facts.seconds(label, snapshot.cache.seconds_saved_today, "cache.seconds_saved_today")


def _began_today(snapshot: Snapshot, now: float) -> bool:
    """Whether today and the time since the decoder's start are the same."""
    started, today = words.local(snapshot.decoder.started_at), words.local(now)
    return started is not None and today is not None and started.date() == today.date()


def _counters(found: Mapping[str, int]) -> tuple[tuple[str, tuple[Fact, ...]], ...]:
    """Every counter in its group; one that has none stands with the first."""
    groups: dict[str, list[Fact]] = {title: [] for title in (_PROMPTS, *_GROUPS.values())}
    for name, value in found.items():
        path = f"cache.counters.{name}"
        start = next((start for start in _GROUPS if name.startswith(start)), "")
        if start:
            code = name.removeprefix(start)
            note = SOURCES.get(code) or meaning(code)
            groups[_GROUPS[start]].append(facts.count(code, value, path, note=note))
            continue
        label, note = _COUNTED.get(name, (name.replace("_", " "), ""))
        make = facts.size if "bytes" in name else facts.count
        groups[_PROMPTS].append(make(label, value, path, note=note))
    return tuple((title, tuple(those)) for title, those in groups.items() if those)


def _live(snapshot: Snapshot) -> Meter | None:
    live = snapshot.cache.live
    if live is None:
        return None
    return Meter(
        "Live",
        f"{words.counted(live.sequences, 'sequence')}, {words.nbytes(live.bytes)}",
        None,
        (
            facts.count("sequences", live.sequences, "cache.live.sequences", term="sequence"),
            facts.size("size", live.bytes, "cache.live.bytes"),
            facts.count("let go of", live.evicted, "cache.live.evicted", note="to make room"),
        ),
    )


def _resident(snapshot: Snapshot) -> Meter | None:
    tier = snapshot.cache.resident
    if tier is None:
        return None
    at = "cache.resident"
    return Meter(
        "Memory",
        f"{words.nbytes(tier.used_bytes)} of {words.nbytes(tier.budget_bytes)}, "
        f"{words.counted(tier.cuts, 'cut')}",
        _share(tier.used_bytes, tier.budget_bytes),
        (
            facts.count("cuts", tier.cuts, f"{at}.cuts"),
            facts.count("blocks", tier.blocks, f"{at}.blocks"),
            facts.size("used", tier.used_bytes, f"{at}.used_bytes"),
            facts.size("at most", tier.budget_bytes, f"{at}.budget_bytes"),
            facts.size(
                "referenced",
                tier.referenced_bytes,
                f"{at}.referenced_bytes",
                note="every cut counted whole",
            ),
            facts.size("in use now", tier.pinned_bytes, f"{at}.pinned_bytes"),
            facts.count(
                "cuts let go of", tier.evicted_cuts, f"{at}.evicted_cuts", note="to make room"
            ),
            facts.size("size of these", tier.evicted_bytes, f"{at}.evicted_bytes"),
        ),
    )


def _durable(snapshot: Snapshot) -> Meter | None:
    tier = snapshot.cache.durable
    if tier is None:
        return None
    at = "cache.durable"
    return Meter(
        "Disk",
        f"{words.nbytes(tier.on_disk)} of {words.nbytes(tier.cap_bytes)}, "
        f"{words.counted(tier.cuts, 'cut')}",
        _share(tier.on_disk, tier.cap_bytes),
        (
            facts.count("cuts", tier.cuts, f"{at}.cuts", term="cut"),
            facts.count("blocks", tier.blocks, f"{at}.blocks", term="block"),
            facts.size("on disk", tier.on_disk, f"{at}.on_disk"),
            facts.size("cap", tier.cap_bytes, f"{at}.cap_bytes", note="never more than this"),
            facts.size(
                "referenced",
                tier.referenced,
                f"{at}.referenced",
                note="each conversation counted whole",
                term="referenced",
            ),
            facts.size("left free for others", tier.floor_bytes, f"{at}.floor_bytes"),
            facts.count(
                "cuts on the way to the disk", tier.publishing, f"{at}.publishing", term="published"
            ),
            facts.count("cuts withheld", tier.withheld, f"{at}.withheld", term="withheld"),
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
