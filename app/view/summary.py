"""A decoder in a dozen lines, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from app.view import facts, words
from app.view.cache import cache, saved_today
from app.view.facts import Fact, Tone
from app.view.nodes import NO_PRODUCER, producers
from app.view.overview import headline
from app.view.standing import Standing
from protocol.status.snapshot import Snapshot


@dataclass(frozen=True)
class Line:
    """A title, and text about it."""

    title: str
    text: str
    tone: Tone = "plain"


def summary(snapshot: Snapshot, now: float) -> tuple[Line, ...]:
    """What people are shown of a decoder that answers."""
    return tuple(_lines(snapshot, now))


def _lines(told: Snapshot, now: float) -> Iterator[Line]:
    decoder, engine = told.decoder, told.engine
    said = headline(told, Standing("connected", decoder.address or ""))
    yield Line("model", decoder.model)
    yield Line("does", said.text, said.tone)
    if decoder.restarts:
        last = f"{decoder.restarts}, the last after {decoder.last_fault}"
        yield Line("restarts", last, "warn")
    yield Line("requests", _requests(told))
    if engine.ended:
        tokens = words.counted(engine.generated_tokens, "token")
        yield Line("ended", f"{_counts(engine.ended)}; {tokens} generated")
    yield from _producers(told, now)
    rates = ", ".join(f"{fact.label} {fact.text}" for fact in _rates(told))
    yield Line("rates", rates or "nothing measured yet")
    if engine.cache_bytes_limit is not None:
        reserved = words.nbytes(engine.cache_bytes_reserved)
        yield Line("memory", f"{reserved} of {words.nbytes(engine.cache_bytes_limit)} for requests")
    yield from _cache(told, now)


def _requests(told: Snapshot) -> str:
    engine = told.engine
    stages = {name: count for name, count in engine.stages.items() if count}
    text = f"{engine.open} open of at most {words.count(engine.open_limit)}"
    return f"{text} ({_counts(stages)})" if stages else text


def _producers(told: Snapshot, now: float) -> Iterator[Line]:
    found = producers(told, now)
    if not found:
        yield Line("producer", NO_PRODUCER)
        return
    for node, shown in zip(told.nodes.producers, found, strict=True):
        text = f"{shown.line}: {shown.detail}" if shown.detail else shown.line
        if node.state in ("down", "refused"):
            text += f"; tried {words.counted(node.attempts, 'time')}"
        yield Line("producer", text, shown.state.tone)
        handoffs = f"{node.handoffs} received"
        if node.resumed:
            handoffs += f", {node.resumed} lost connections gone on from"
        failed = f"; failed: {_counts(node.failures)}" if node.failures else ""
        yield Line("handoffs", f"{handoffs}{failed}")
    engine = told.engine
    if engine.asked_from_tokens is not None or engine.asked_from_by is not None:
        asked = facts.asked_from(
            engine.asked_from_tokens, engine.asked_from_by, "", label="asked from"
        )
        yield Line(asked.label, f"{asked.text} ({asked.note})" if asked.note else asked.text)
    fallbacks = engine.fallbacks
    yield Line(
        "fallbacks", f"{_counts(fallbacks)} (prefilled here instead)" if fallbacks else "none"
    )


def _rates(told: Snapshot) -> Iterator[Fact]:
    here = told.engine.local_tokens_per_s
    known = [Fact("prefill here", words.figure(here, "tokens/s"))]
    for node in told.nodes.producers[:1]:
        known += [
            Fact("producer", words.figure(node.compute_tokens_per_s, "tokens/s")),
            Fact("overhead of a handoff", words.milliseconds(node.handoff_overhead_ms)),
            Fact("round trip", words.milliseconds(node.round_trip_ms)),
            Fact("link", words.figure_bytes(node.wire_bytes_per_s, "/s")),
        ]
    yield from (fact for fact in known if fact.text != words.DASH)


def _cache(told: Snapshot, now: float) -> Iterator[Line]:
    shown = cache(told, now)
    for meter in (shown.live, shown.resident, shown.durable):
        if meter is not None:
            yield Line(f"{meter.label.lower()} cache", meter.text)
    counters = told.cache.counters
    if counters:
        hits, misses = counters.get("cache_hits", 0), counters.get("cache_misses", 0)
        continued = counters.get("session_continuation_hits", 0)
        found = f"{words.counted(hits, 'hit')}, {words.counted(misses, 'miss', 'misses')}"
        yield Line("reuse", f"{found}, {continued:,} continued live")
        saved = saved_today(told, now)
        yield Line(saved.label, saved.text)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())
