"""Counters of requests for Prometheus. Labels are stable codes, never a client's text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mac_decoder.api.door import Door
from mac_decoder.engine.events import Report
from protocol.status.figures import Figure
from protocol.status.snapshot import Cache, Doing, Engine, LinkName, Node, Nodes

_TTFT_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
_PHASE_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
_RATE_BUCKETS = (1, 2, 5, 10, 15, 20, 30, 40, 60, 80, 120, 200, 500)


class _Reuse(Collector):
    """The accounts of reuse, as they are when somebody asks."""

    def __init__(self, counters: Callable[[], Mapping[str, int]]) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """One family; its label is the counter's name in ``/status``."""
        family = CounterMetricFamily(
            "baton_cache",
            "Reuse of kept caches (see docs/cache.md), by counter",
            labels=("counter",),
        )
        for name, count in self._counters().items():
            family.add_metric((name,), count)
        yield family


class _AtTheDoor(Collector):
    """Refusals and connections, as they are when somebody asks."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def collect(self) -> Iterator[Metric]:
        """Two families: refusals by reason, and how many connections are open."""
        refusals = CounterMetricFamily(
            "baton_door_refusals",
            "Requests and connections refused before any work was done for them, by reason",
            labels=("reason",),
        )
        for reason, count in self._door.refusals.counts.items():
            refusals.add_metric((reason,), count)
        yield refusals
        yield GaugeMetricFamily(
            "baton_connections", "Connections that are open", len(self._door.crowd)
        )


class _Now(Collector):
    """The engine, its producers and its caches, as they are when somebody asks.

    They are made of the sections of ``/status``. What is unavailable there has no sample here:
    a gauge of 0 would be a measurement.
    """

    def __init__(self, told: Callable[[], tuple[Engine, Nodes, Cache]]) -> None:
        self._told = told

    def collect(self) -> Iterator[Metric]:
        """All families, of one moment."""
        engine, nodes, cache = self._told()
        yield from _of_engine(engine)
        # Who has the same name has the same series: the latest is shown.
        yield from _of_producers({node.name: node for node in nodes.producers})
        yield from _of_cache(cache)


def _of_engine(engine: Engine) -> Iterator[Metric]:
    stages = _gauge("baton_requests_by_stage", "Requests in the engine, by stage", "stage")
    for stage, count in engine.stages.items():
        stages.add_metric((stage,), count)
    yield stages
    doing = _gauge("baton_engine_state", "1 for what the engine does now, else 0", "state")
    for state in get_args(Doing):
        doing.add_metric((state,), state == engine.doing)
    yield doing
    fallbacks = CounterMetricFamily(
        "baton_fallbacks",
        "Prompts prefilled here although the producer was meant to, by reason",
        labels=("reason",),
    )
    for reason, count in engine.fallbacks.items():
        fallbacks.add_metric((reason,), count)
    yield fallbacks
    memory = _gauge("baton_request_bytes", "Cache memory promised to requests, and its bound", "of")
    if engine.cache_bytes_reserved is not None:
        memory.add_metric(("reserved",), engine.cache_bytes_reserved)
    if engine.cache_bytes_limit is not None:
        memory.add_metric(("limit",), engine.cache_bytes_limit)
    yield memory
    local = _gauge("baton_local_tokens_per_second", "Measured rate of prefilling here")
    _add(local, (), engine.local_tokens_per_s)
    yield local


def _of_producers(nodes: Mapping[str, Node]) -> Iterator[Metric]:
    state = _gauge("baton_producer_state", "1 for a producer's state, else 0", "producer", "state")
    tokens = _gauge("baton_producer_tokens_per_second", "Its measured prefill", "producer")
    wire = _gauge("baton_link_bytes_per_second", "Measured rate of handoffs", "producer")
    trip = _gauge("baton_link_round_trip_seconds", "The last ping", "producer")
    for name, node in nodes.items():
        for known in get_args(LinkName):
            state.add_metric((name, known), known == node.state)
        _add(tokens, (name,), node.compute_tokens_per_s)
        _add(wire, (name,), node.wire_bytes_per_s)
        _add(trip, (name,), node.round_trip_ms, 1e-3)
    yield from (state, tokens, wire, trip)


def _of_cache(cache: Cache) -> Iterator[Metric]:
    sizes = _gauge(
        "baton_cache_bytes",
        "Bytes of kept caches by tier: of resident ones 'used' is bounded by 'limit', of durable "
        "ones 'on_disk' is; 'referenced' counts what is shared for each that shares it",
        "tier",
        "of",
    )
    held = _gauge("baton_cache_held", "Kept cuts by tier, and live sequences", "tier")
    if (live := cache.live) is not None:
        sizes.add_metric(("live", "used"), live.bytes)
        held.add_metric(("live",), live.sequences)
    if (resident := cache.resident) is not None:
        sizes.add_metric(("resident", "used"), resident.used_bytes)
        sizes.add_metric(("resident", "referenced"), resident.referenced_bytes)
        sizes.add_metric(("resident", "limit"), resident.budget_bytes)
        held.add_metric(("resident",), resident.cuts)
    if (durable := cache.durable) is not None:
        sizes.add_metric(("durable", "on_disk"), durable.on_disk)
        sizes.add_metric(("durable", "referenced"), durable.referenced)
        sizes.add_metric(("durable", "limit"), durable.cap_bytes)
        held.add_metric(("durable",), durable.cuts)
    yield from (sizes, held)
    saved = _gauge("baton_saved_seconds", "Prefill that restored caches saved, net", "basis")
    if cache.seconds_saved.basis != "unavailable":
        _add(saved, (cache.seconds_saved.basis,), cache.seconds_saved)
    yield saved


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=labels)


def _add(
    family: GaugeMetricFamily, labels: tuple[str, ...], figure: Figure, scale: float = 1.0
) -> None:
    """A sample, if the figure has a value."""
    if figure.value is not None:
        family.add_metric(labels, figure.value * scale)


class Metrics:
    """What this process has served since it started; ``counters`` are the engine's, ``door``
    is what stands before it, ``told`` has the sections of ``/status``, of one moment.
    """

    def __init__(
        self,
        counters: Callable[[], Mapping[str, int]],
        door: Door,
        told: Callable[[], tuple[Engine, Nodes, Cache]],
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.registry.register(_Reuse(counters))
        self.registry.register(_AtTheDoor(door))
        self.registry.register(_Now(told))
        self.requests = Counter(
            "baton_requests",
            "Requests by endpoint, outcome (completed, refused, failed, cancelled) and source",
            ("route", "outcome", "source"),
            registry=self.registry,
        )
        self.refusals = Counter(
            "baton_request_errors",
            "Requests that were refused or failed, by reason",
            ("reason",),
            registry=self.registry,
        )
        self.tokens = Counter(
            "baton_tokens",
            "Tokens: prompt, reused (of the prompt), prefilled (of the prompt), generated",
            ("kind",),
            registry=self.registry,
        )
        self.handoffs = Counter(
            "baton_handoffs", "Handoffs that were installed", registry=self.registry
        )
        self.handoff_bytes = Counter(
            "baton_handoff_bytes", "Payload bytes of handoffs", registry=self.registry
        )
        self.reasons = Counter(
            "baton_lane_reasons",
            "Reasons for the lane that prompts took",
            ("reason",),
            registry=self.registry,
        )
        self.ttft = Histogram(
            "baton_ttft_seconds",
            "Seconds from submission to the first token, by source of the prompt",
            ("source",),
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.phases = Histogram(
            "baton_phase_seconds",
            "Phases of prompts before their first token (see docs/cache.md), by phase",
            ("phase",),
            buckets=_PHASE_BUCKETS,
            registry=self.registry,
        )
        self.decode = Histogram(
            "baton_decode_tokens_per_second",
            "Tokens per second of a request, from its first token to its last",
            buckets=_RATE_BUCKETS,
            registry=self.registry,
        )
        self.started = Gauge(
            "baton_start_time_seconds",
            "When this process started, in seconds since 1970",
            registry=self.registry,
        )
        self.in_hand = Gauge(
            "baton_requests_in_hand", "Requests that are being answered", registry=self.registry
        )
        self.ready = Gauge(
            "baton_ready", "Whether a token can be generated", registry=self.registry
        )

    def count_report(self, report: Report) -> None:
        """Count where one prompt came from."""
        self.tokens.labels("reused").inc(report.reused_tokens)
        self.tokens.labels("prefilled").inc(report.prefilled_tokens)
        self.ttft.labels(report.source).observe(report.ttft_ms / 1e3)
        for phase, milliseconds in report.phases.items():
            self.phases.labels(phase).observe(milliseconds / 1e3)
        if report.source == "remote":
            self.handoffs.inc()
            self.handoff_bytes.inc(report.transferred_bytes)
        for reason in report.reasons:
            self.reasons.labels(reason).inc()
