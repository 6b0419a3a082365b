"""From what the parts of a decoder say of themselves to the sections of a snapshot. Pure.

The engine and the keeper tell plain types (``Engine.status``, ``Engine.cache_status``), from
which parts are missing while a model is loaded: what they do not tell is unavailable here, and
a rate of 0 there is one that was never measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protocol.status.figures import Figure, measured, rate
from protocol.status.snapshot import (
    Cache,
    CacheEvent,
    Doing,
    Durable,
    Engine,
    Live,
    Node,
    Nodes,
    Qualified,
    Resident,
)

_DOING: tuple[tuple[str, Doing], ...] = (
    ("remote", "prefilling_there"),
    ("prefill", "prefilling_here"),
    ("restore", "restoring"),
    ("lookup", "restoring"),
    ("decode", "decoding"),
)
"""Stages of requests, those first that others wait for."""


def engine(told: Mapping[str, Any], *, loaded: bool) -> Engine:
    """The engine, of ``Engine.status``; ``loaded``: it was ready before."""
    ready, fault = bool(told.get("ready")), told.get("fault")
    troubled = (loaded and not ready) or fault is not None
    asked = bool(told.get("producers"))
    stages: Mapping[str, int] = told.get("requests", {})
    rates: Mapping[str, float] = told.get("rates", {})
    return Engine(
        doing=_doing(stages, told.get("qualifying", 0), ready=ready, troubled=troubled),
        ready=ready,
        fault=fault,
        open=told.get("open", 0),
        open_limit=told.get("open_limit"),
        stages=dict(stages),
        waiting_for_producer=told.get("waiting_for_producer", 0),
        cache_bytes_reserved=told.get("cache_bytes_reserved"),
        cache_bytes_limit=told.get("cache_bytes_limit"),
        generated_tokens=told.get("generated_tokens", 0),
        ended=dict(told.get("ended", {})),
        fallbacks=dict(told.get("fallbacks", {})),
        asked_from_tokens=told.get("remote_threshold") if asked else None,
        local_tokens_per_s=rate(rates.get("local_tokens_per_s", 0.0)),
        keeps_awake=bool(told.get("power_assertion")),
        asked_from_by=told.get("threshold_by") if asked else None,
    )


def nodes(told: Mapping[str, Any]) -> Nodes:
    """The producers, of ``Engine.status``."""
    left = list(told.get("producers", ()))
    found: list[Node] = []
    for link in told.get("links", ()):
        # Links and the engine's producers come in one order; some of either may be missing.
        asked = next((one for one in left if one["name"] == link["name"]), None)
        if asked is not None:
            left.remove(asked)
        found.append(_node(link, asked or {}))
    return Nodes(tuple(found))


def cache(told: Mapping[str, Any]) -> Cache:
    """The tiers and what reuse gave, of ``Engine.cache_status``."""
    live, resident, durable = (told.get(name) for name in ("live", "resident", "durable"))
    derived: Mapping[str, Mapping[str, Any]] = told.get("derived", {})
    return Cache(
        live=None if live is None else Live(**live),
        resident=None if resident is None else Resident(**_only(Resident, resident)),
        durable=None if durable is None else Durable(**_only(Durable, durable)),
        counters=dict(told.get("counters", {})),
        **{name: Figure(figure["value"], figure["tag"]) for name, figure in derived.items()},
        events=tuple(CacheEvent(**event) for event in told.get("events", ())),
    )


def _doing(stages: Mapping[str, int], qualifying: int, *, ready: bool, troubled: bool) -> Doing:
    if troubled:
        return "trouble"
    if not ready:
        return "loading"
    for stage, doing in _DOING:
        if stages.get(stage):
            return doing
    return "qualifying" if qualifying else "idle"


def _node(link: Mapping[str, Any], asked: Mapping[str, Any]) -> Node:
    past, rates = link["qualified"], asked.get("rates", {})
    return Node(
        name=link["name"],
        called=link["called"],
        state=link["state"],
        reason=link["reason"],
        detail=link["detail"],
        attempts=link["attempts"],
        tile=link["tile"] or None,
        handoffs=link["handoffs"],
        resumed=link["resumed"],
        failures=dict(link["failures"]),
        waiting=asked.get("waiting_for_producer", 0),
        fetching=asked.get("fetching", False),
        asked_from_tokens=asked.get("remote_threshold"),
        compute_tokens_per_s=rate(link["compute_tokens_per_s"]),
        wire_bytes_per_s=rate(link["wire_bytes_per_s"]),
        round_trip_ms=rate(link["round_trip_ms"], 2),
        handoff_overhead_ms=rate(rates.get("handoff_overhead_ms", 0.0), 3),
        qualified=None if past is None else _qualified(past),
        asked_from_by=asked.get("threshold_by"),
    )


def _qualified(past: Mapping[str, Any]) -> Qualified:
    return Qualified(
        at=past["at"],
        fit=past["fit"],
        apart=measured(past["apart"]),
        allowed=measured(past["allowed"]),
        where=past["where"],
    )


def _only(kind: type[Resident] | type[Durable], told: Mapping[str, Any]) -> dict[str, Any]:
    fields: Sequence[str] = kind.__struct_fields__
    return {name: told[name] for name in fields}
