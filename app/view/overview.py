"""The decoder in a few lines: its standing, its engine, itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from app.view import facts, words
from app.view.facts import Fact, Tone
from app.view.reasons import meaning
from app.view.requests import ending, stages
from app.view.requests import sentence as request_sentence
from app.view.standing import Standing
from app.view.standing import sentence as standing_sentence
from protocol.status.snapshot import Doing, Nodes, Snapshot

_DOING: Final[dict[Doing, tuple[str, Tone]]] = {
    "loading": ("Loading the model", "busy"),
    "idle": ("Idle", "good"),
    "restoring": ("Restoring a cache", "busy"),
    "prefilling_here": ("Prefilling here", "busy"),
    "prefilling_there": ("Prefilling there", "busy"),
    "decoding": ("Decoding", "good"),
    "qualifying": ("Qualifying", "busy"),
    "trouble": ("Trouble", "bad"),
}


@dataclass(frozen=True)
class Headline:
    """One sentence, and how it looks."""

    text: str
    tone: Tone


def headline(snapshot: Snapshot | None, standing: Standing) -> Headline:
    """What the decoder does: ``Prefilling on gb10, 45 % of 65,535 tokens``."""
    if standing.state != "connected" or snapshot is None:
        return Headline(*standing_sentence(standing))
    engine = snapshot.engine
    text, tone = _DOING[engine.doing]
    if engine.doing == "trouble":
        return Headline(f"{text}: {engine.fault or 'not ready'}", tone)
    if engine.doing == "qualifying":
        text = f"Qualifying {_qualified(snapshot.nodes)}: comparing it with this machine"
    one = snapshot.requests.in_hand
    if len(one) == 1 and engine.doing not in ("loading", "idle", "qualifying"):
        told = request_sentence(one[0], snapshot.nodes)
        return Headline(told[0].upper() + told[1:], tone)
    if one:
        text = f"{text}, {words.counted(len(one), 'request')}"
    apart = len({request.stage for request in one}) > 1
    if apart and engine.doing not in ("loading", "qualifying"):
        text = f"{words.counted(len(one), 'request')}: {stages(one)}"
    return Headline(text, tone)


def _qualified(nodes: Nodes) -> str:
    """Who is qualified, where only one can be meant."""
    several = [node.called for node in nodes.producers]
    asked = [node.called for node in nodes.producers if node.state == "qualifying"]
    found = asked or several
    return found[0] if len(found) == 1 else "a producer"


def where(snapshot: Snapshot | None, standing: Standing) -> str:
    """``SmolLM2 on port 8000``."""
    port = f"port {standing.port}" if standing.port else standing.url
    return port if snapshot is None else f"{snapshot.decoder.model} on {port}"


def engine(snapshot: Snapshot) -> tuple[Fact, ...]:
    """The engine and its queue."""
    found = snapshot.engine
    waiting = found.stages.get("waiting", 0)
    return (
        facts.count("open requests", found.open, "engine.open"),
        facts.count("open at most", found.open_limit, "engine.open_limit"),
        facts.count(
            "queued", waiting, "engine.stages.waiting" if "waiting" in found.stages else ""
        ),
        facts.count(
            "waiting for a producer", found.waiting_for_producer, "engine.waiting_for_producer"
        ),
        facts.count("tokens generated", found.generated_tokens, "engine.generated_tokens"),
        facts.number(
            "prefill here",
            found.local_tokens_per_s,
            "engine.local_tokens_per_s",
            "tokens/s",
            note="moving average",
            term="moving average",
        ),
        facts.asked_from(
            found.asked_from_tokens,
            found.asked_from_by,
            "engine.asked_from_tokens",
            label="producer asked from",
        ),
        facts.size(
            "memory promised to requests",
            found.cache_bytes_reserved,
            "engine.cache_bytes_reserved",
        ),
        facts.size("promised at most", found.cache_bytes_limit, "engine.cache_bytes_limit"),
    )


def counts(snapshot: Snapshot) -> tuple[tuple[str, tuple[Fact, ...]], ...]:
    """How requests ended, why prompts were prefilled here, who was refused at the door."""
    lists = (
        ("Outcomes of requests", "requests.outcomes", snapshot.requests.outcomes, str),
        ("What ended answers", "engine.ended", snapshot.engine.ended, ending),
        ("Why prefilled here instead", "engine.fallbacks", snapshot.engine.fallbacks, str),
        ("Refused at the door", "door.refused", snapshot.door.refused, str),
    )
    return tuple(
        (
            title,
            tuple(
                facts.count(called(str(name)), n, f"{path}.{name}", note=meaning(str(name)))
                for name, n in found.items()
            ),
        )
        for title, path, found, called in lists
        if found
    )


def about(snapshot: Snapshot) -> tuple[tuple[str, tuple[Fact, ...]], ...]:
    """Who answers: the model, its identity by component, releases, the door."""
    decoder, door = snapshot.decoder, snapshot.door
    identity = decoder.identity
    components = (
        ()
        if identity is None
        else tuple(
            facts.text(name, str(getattr(identity, name)), f"decoder.identity.{name}")
            for name in identity.__struct_fields__
        )
    )
    return (
        (
            "Decoder",
            (
                facts.text("model", decoder.model, "decoder.model"),
                facts.count("context", decoder.context_tokens, "decoder.context_tokens", "token"),
                facts.text("address", decoder.address, "decoder.address"),
                facts.text("started", words.moment(decoder.started_at, "%Y-%m-%d %H:%M")),
                facts.count("restarts", decoder.restarts, "decoder.restarts"),
                facts.text("last fault", decoder.last_fault, "decoder.last_fault"),
            ),
        ),
        (
            "Identity",
            (
                facts.text(
                    "digest of all",
                    decoder.identity_digest,
                    "decoder.identity_digest",
                    term="identity",
                ),
                *components,
            ),
        ),
        (
            "Releases",
            tuple(
                facts.text(name, version, f"decoder.versions.{name}")
                for name, version in decoder.versions.items()
            ),
        ),
        (
            "Door",
            (
                facts.count("connections", door.connections, "door.connections"),
                facts.count(
                    "connections at most", door.connections_limit, "door.connections_limit"
                ),
                facts.count("followers", door.streams, "door.streams", term="followers"),
                facts.count("followers at most", door.streams_limit, "door.streams_limit"),
                facts.count("API keys", door.keys, "door.keys"),
                facts.text("a key is", "needed" if door.keys_demanded else "not needed"),
                facts.text("certificate", door.certificate_sha256, "door.certificate_sha256"),
            ),
        ),
    )
