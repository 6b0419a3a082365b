"""Counters of requests for Prometheus. Labels are stable codes, never a client's text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mac_decoder.api.door import Door
from mac_decoder.engine.events import Report

_TTFT_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)


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


class Metrics:
    """What this process has served since it started; ``counters`` are the engine's, ``door``
    is what stands before it.
    """

    def __init__(self, counters: Callable[[], Mapping[str, int]], door: Door) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.registry.register(_Reuse(counters))
        self.registry.register(_AtTheDoor(door))
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
        self.fallbacks = Counter(
            "baton_fallbacks",
            "Prompts prefilled here although the producer was meant to, by reason",
            ("reason",),
            registry=self.registry,
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
        if report.source == "remote":
            self.handoffs.inc()
            self.handoff_bytes.inc(report.transferred_bytes)
        for reason in report.reasons:
            self.reasons.labels(reason).inc()
        if report.fallback:
            self.fallbacks.labels(report.reasons[-1]).inc()
