"""The producers: whether they can be used, how fast they are, how they qualified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from app.view import facts, words
from app.view.facts import Badge, Fact, Tone
from app.view.reasons import meaning
from protocol.reasons import COMPONENTS, WITHOUT_MODEL, component_reason
from protocol.status.snapshot import Node, Snapshot

TONES: Final[Mapping[str, Tone]] = {
    "off": "plain",
    "connecting": "busy",
    "qualifying": "busy",
    "ready": "good",
    "unfit": "bad",
    "down": "warn",
    "refused": "bad",
}

_ANOTHER: Final = "It serves another model, and is not used until it has this machine's."
_LACKS: Final[Mapping[str, str]] = {
    WITHOUT_MODEL: "It has no model, and is not used until it has this machine's.",
    "identity_differs": _ANOTHER,
    # Sending the model cures what comes of its files, not what other releases compute.
    **{component_reason(name): _ANOTHER for name in COMPONENTS if name != "engine"},
}

NO_PRODUCER: Final = "No producer: every prompt is prefilled here"


@dataclass(frozen=True)
class Producer:
    """One producer. ``name`` is its address, ``called`` what people call it; ``line`` says all
    of it shortly. ``lacks`` says that it has not this machine's model, which has to be sent;
    empty where that is not so, or not known.
    """

    name: str
    called: str
    state: Badge
    line: str
    detail: str
    lacks: str
    facts: tuple[Fact, ...]
    qualified: tuple[Fact, ...]
    failures: tuple[Fact, ...]


def producers(snapshot: Snapshot, now: float) -> tuple[Producer, ...]:
    """Every producer, in the order in which they came."""
    return tuple(
        _producer(node, f"nodes.producers.{place}", now)
        for place, node in enumerate(snapshot.nodes.producers)
    )


def line(node: Node) -> str:
    """``gb10: ready, 2,100 tokens/s, 1.2 GB/s``, or what is wrong with it."""
    if node.state != "ready":
        why = node.reason if node.reason != f"producer_{node.state}" else ""
        return f"{node.called}: {node.state}{f' ({why})' if why else ''}"
    rates = (
        words.figure(node.compute_tokens_per_s, "tokens/s"),
        words.figure_bytes(node.wire_bytes_per_s, "/s"),
    )
    told = ["prefilling" if node.fetching else "ready"]
    told += [rate for rate in rates if rate != words.DASH]
    return f"{node.called}: {', '.join(told)}"


def lacks(node: Node) -> str:
    """That a producer has not this machine's model, in words; empty where that is not so, or not
    known.
    """
    return _LACKS.get(node.reason, "") if node.state in ("down", "refused") else ""


def _producer(node: Node, path: str, now: float) -> Producer:
    return Producer(
        node.name,
        node.called,
        Badge(node.state, TONES[node.state], node.reason),
        line(node),
        node.detail or meaning(node.reason),
        lacks(node),
        (
            facts.number(
                "prefill",
                node.compute_tokens_per_s,
                f"{path}.compute_tokens_per_s",
                "tokens/s",
                note="moving average",
                term="moving average",
            ),
            facts.size_rate(
                "link", node.wire_bytes_per_s, f"{path}.wire_bytes_per_s", note="moving average"
            ),
            facts.time("round trip", node.round_trip_ms, f"{path}.round_trip_ms"),
            facts.time(
                "overhead of a handoff",
                node.handoff_overhead_ms,
                f"{path}.handoff_overhead_ms",
                note="whatever its length",
                term="handoff",
            ),
            facts.count("tile", node.tile, f"{path}.tile", "token", term="tile"),
            facts.asked_from(
                node.asked_from_tokens,
                node.asked_from_by,
                f"{path}.asked_from_tokens",
                label="asked from",
            ),
            facts.count("waiting for it", node.waiting, f"{path}.waiting", "request"),
            facts.count("handoffs received", node.handoffs, f"{path}.handoffs"),
            facts.count("gone on from lost connections", node.resumed, f"{path}.resumed"),
            facts.count("attempts to connect", node.attempts, f"{path}.attempts", note="in a row"),
        ),
        _qualified(node, f"{path}.qualified", now),
        tuple(
            facts.count(name, value, f"{path}.failures.{name}", note=meaning(name))
            for name, value in node.failures.items()
        ),
    )


def _qualified(node: Node, path: str, now: float) -> tuple[Fact, ...]:
    found = node.qualified
    if found is None:
        # What was found before is forgotten when it is qualified anew.
        told = "under way" if node.state == "qualifying" else None
        return (facts.text("when", told),)
    return (
        facts.text("when", words.ago(found.at, now)),
        facts.text(
            "rows",
            "alike" if found.fit else "differ",
            tone="good" if found.fit else "bad",
            term="row",
        ),
        facts.number("largest difference", found.apart, f"{path}.apart", term="largest difference"),
        facts.number("allowed", found.allowed, f"{path}.allowed"),
        facts.text("found in", found.where, f"{path}.where"),
    )
