"""Requests in hand and requests that have ended, as cards and rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from app.view import facts, words
from app.view.facts import Badge, Fact, Segment, Tone
from app.view.glossary import PHASES
from app.view.reasons import meaning, why_not_more
from protocol.status.figures import Figure
from protocol.status.snapshot import Finished, InHand, Nodes, Outcome, Served, Snapshot, Stage

_STAGES: Final[dict[Stage, tuple[str, Tone]]] = {
    "queued": ("queued", "plain"),
    "looking_up": ("looking up", "busy"),
    "restoring": ("restoring", "busy"),
    "prefilling_there": ("prefilling there", "busy"),
    "prefilling_here": ("prefilling here", "busy"),
    "decoding": ("decoding", "good"),
    "answering": ("answering", "good"),
}

_OUTCOMES: Final[dict[Outcome, Tone]] = {
    "completed": "good",
    "refused": "warn",
    "failed": "bad",
    "cancelled": "plain",
}

SOURCES: Final[Mapping[str, str]] = {
    "live": "went on in the conversation's own sequence",
    "resident": "restored from memory",
    "durable": "restored from disk",
    "remote": "prefilled by a producer",
    "local": "prefilled on this machine",
    "mixed": "several prompts, from different places",
}
"""What the badges of sources mean."""

_FELL_BACK: Final = Badge(
    "fell back", "warn", "a producer was meant to prefill it; the reasons say what came between"
)

_IMPERCEPTIBLE_MS: Final = 0.05
"""What would read as 0.0 ms is in no bar."""

ENDINGS: Final[Mapping[str, str]] = {
    "stop": "its own end",
    "length": "the length asked for",
    "cancelled": "the client's leaving",
    "tool_calls": "a call of a tool",
}
"""What ends answers, in words."""

DECODE: Final = "decode"

KINDS: Final[Mapping[str, str]] = {
    "queue": "queue",
    "failed_restore": "failed",
    "failed_handoff": "failed",
    "lookup": "lookup",
    "read": "wire",
    "compute": "compute",
    "wire": "wire",
    "verify": "verify",
    "place": "place",
    "compose": "compose",
    "swap": "swap",
    "install": "install",
    "boundary_decode": "first",
    DECODE: "decode",
}
"""The kind of each phase, which has the colour of its part of a bar."""


@dataclass(frozen=True)
class Running:
    """A request in hand. ``progress`` is of 1, ``None`` where nothing was told."""

    id: str
    stage: Badge
    source: Badge | None
    title: str
    progress: float | None
    progress_text: str
    facts: tuple[Fact, ...]
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Ended:
    """A request that has ended. ``reasons`` are codes with what they mean, ``shortfall`` says
    where reuse stopped and why, in one line; empty where nothing fell short.
    """

    id: str
    ago: str
    route: str
    outcome: Badge
    source: Badge | None
    fallback: Badge | None
    tokens: Fact
    reused: Fact
    prefilled: Fact
    transferred: Fact
    first_token: Fact
    total: Fact
    speed: Fact
    facts: tuple[Fact, ...]
    segments: tuple[Segment, ...]
    shortfall: str
    reasons: tuple[tuple[str, str], ...]


def source(name: str | None) -> Badge | None:
    """The badge of where a cache came from."""
    if name is None:
        return None
    return Badge(name, "busy" if name in ("local", "mixed") else "good", SOURCES.get(name, ""))


def running(snapshot: Snapshot, now: float) -> tuple[Running, ...]:
    """The requests in hand, the oldest first."""
    return tuple(
        _running(one, f"requests.in_hand.{place}", snapshot.nodes, now)
        for place, one in enumerate(snapshot.requests.in_hand)
    )


def ended(snapshot: Snapshot, now: float) -> tuple[Ended, ...]:
    """The latest requests that have ended, the latest first."""
    return tuple(
        _ended(one, f"recent.finished.{place}", now)
        for place, one in enumerate(snapshot.recent.finished)
    )


def sentence(request: InHand, nodes: Nodes) -> str:
    """What a request does, in a few words: "prefilling on gb10, 45 % of 65,535 tokens"."""
    stage = _STAGES[request.stage][0]
    if request.stage == "prefilling_there":
        # Of several that prefill, it is not told which one has this request.
        busy = [node.called for node in nodes.producers if node.fetching]
        stage = f"prefilling on {busy[0]}" if len(busy) == 1 else stage
    if request.stage in ("prefilling_here", "prefilling_there"):
        return f"{stage}, {_progress(request)}"
    if request.stage == "decoding":
        speed = words.figure(request.tokens_per_s, "tokens/s")
        told = [stage, words.counted(request.generated_tokens, "token"), speed]
        return ", ".join(part for part in told if part != words.DASH)
    return f"{stage}, {words.counted(request.prompt_tokens, 'token')}"


def stages(requests: Sequence[InHand]) -> str:
    """Where several stand: "1 prefilling there, 2 decoding", those first that others wait for."""
    counted = Counter(one.stage for one in requests)
    return ", ".join(
        f"{counted[stage]} {text}" for stage, (text, _) in _STAGES.items() if counted[stage]
    )


def ending(reason: str) -> str:
    """What ended an answer, in words; a code that has none is shown as it is."""
    return ENDINGS.get(reason, reason)


def segments(
    phases: Mapping[str, Figure], path: str, decode: Figure | None = None, decode_path: str = ""
) -> tuple[Segment, ...]:
    """A stacked bar of phases, and of the decoding behind them; what took no time is left out."""
    order: Mapping[str, int] = {name: place for place, name in enumerate(PHASES)}
    parts = sorted(
        ((name, one, f"{path}.{name}") for name, one in phases.items()),
        key=lambda phase: order.get(phase[0], len(order)),
    )
    if decode is not None:
        parts.append((DECODE, decode, decode_path))
    lasted = [(*part, part[1].value or 0.0) for part in parts]
    lasted = [part for part in lasted if part[3] >= _IMPERCEPTIBLE_MS]
    whole = sum(value for *_, value in lasted)
    return tuple(_segment(name, one, at, value / whole) for name, one, at, value in lasted)


def _segment(name: str, known: Figure, path: str, share: float) -> Segment:
    label, note = PHASES.get(name, (name.replace("_", " "), ""))
    return Segment(label, KINDS.get(name, "compute"), share, facts.time(label, known, path), note)


def _running(one: InHand, path: str, nodes: Nodes, now: float) -> Running:
    text, tone = _STAGES[one.stage]
    filling = one.stage in ("prefilling_here", "prefilling_there")
    known = filling and one.processed is not None and bool(one.total)
    return Running(
        id=one.id,
        stage=Badge(text, tone),
        source=source(one.source),
        title=sentence(one, nodes),
        progress=(one.processed or 0) / one.total if known and one.total else None,
        progress_text=_progress(one) if filling else "",
        facts=(
            facts.count("prompt tokens", one.prompt_tokens, f"{path}.prompt_tokens"),
            facts.count("generated", one.generated_tokens, f"{path}.generated_tokens"),
            facts.number("rate", one.tokens_per_s, f"{path}.tokens_per_s", "tokens/s"),
            facts.text("began", words.ago(one.began_at, now)),
        ),
        segments=segments(one.phases, f"{path}.phases"),
    )


def _progress(one: InHand) -> str:
    if one.processed is None or not one.total:
        return words.counted(one.prompt_tokens, "token")
    return f"{100 * one.processed // one.total} % of {words.counted(one.total, 'token')}"


def _ended(one: Finished, path: str, now: float) -> Ended:
    at, served = f"{path}.served", one.served
    known = served is not None
    return Ended(
        id=one.id,
        ago=words.ago(one.ended_at, now),
        route=one.route,
        outcome=Badge(one.outcome, _OUTCOMES[one.outcome], one.code or ""),
        source=source(served.source) if served else None,
        # It is right, and cost more than it had to.
        fallback=_FELL_BACK if served and served.fallback else None,
        tokens=facts.count("prompt tokens", one.prompt_tokens, f"{path}.prompt_tokens"),
        reused=facts.count(
            "reused", served.reused_tokens if served else None, _at(at, known, "reused_tokens")
        ),
        prefilled=facts.count(
            "prefilled",
            served.prefilled_tokens if served else None,
            _at(at, known, "prefilled_tokens"),
        ),
        transferred=facts.size(
            "transferred",
            served.transferred_bytes if served else None,
            _at(at, known, "transferred_bytes"),
        ),
        first_token=_first_token(served, at),
        total=facts.time("total", one.total_ms, f"{path}.total_ms"),
        speed=facts.number("rate", one.tokens_per_s, f"{path}.tokens_per_s", "tokens/s"),
        facts=_details(one, path),
        segments=segments(
            served.phases if served else {}, f"{at}.phases", one.decode_ms, f"{path}.decode_ms"
        ),
        shortfall=_shortfall(served),
        reasons=tuple((code, meaning(code)) for code in served.reasons) if served else (),
    )


def _at(path: str, known: bool, field: str) -> str:
    """No path leads into what is not there."""
    return f"{path}.{field}" if known else ""


def _first_token(served: Served | None, path: str) -> Fact:
    if served is None:
        return facts.count("first token", None, "")
    return facts.time("first token", served.ttft_ms, f"{path}.ttft_ms")


def _details(one: Finished, path: str) -> tuple[Fact, ...]:
    common = (
        facts.count("generated", one.generated_tokens, f"{path}.generated_tokens"),
        facts.time("decoding took", one.decode_ms, f"{path}.decode_ms"),
        facts.text("ended with", ", ".join(map(ending, one.finish_reasons)) or (one.code or "")),
    )
    served, at = one.served, f"{path}.served"
    if served is None:
        return common
    return (
        *common,
        facts.count(
            "computed",
            served.computed_tokens,
            f"{at}.computed_tokens",
            note="tokens, by whoever prefilled",
        ),
        facts.count(
            "longest shared beginning", served.shared_tokens, f"{at}.shared_tokens", "token"
        ),
        facts.count("parts at", served.parts_at, f"{at}.parts_at", term="parts at"),
        facts.time(
            "restoring took",
            served.restore_ms,
            f"{at}.restore_ms",
            note="while the rest was received" if served.source == "remote" else "",
        ),
        facts.size("restored", served.restore_bytes, f"{at}.restore_bytes"),
        facts.size(
            "staging",
            served.staging_bytes,
            f"{at}.staging_bytes",
            term="staging",
        ),
        facts.size("let go of for it", served.evicted_bytes, f"{at}.evicted_bytes"),
    )


def _shortfall(served: Served | None) -> str:
    if served is None:
        return ""
    codes = why_not_more(served.reasons)
    if not codes:
        return ""
    stopped = f"stopped at {words.counted(served.reused_tokens, 'token')}"
    if served.parts_at is not None:
        stopped += f", parts at {served.parts_at:,}"
    return f"{stopped}: {', '.join(codes)}"
