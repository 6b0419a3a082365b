"""The picture in the menu bar: which of a few states, and how far a prefill there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from app.view.standing import Standing
from protocol.status.snapshot import Doing, InHand, LinkName, Snapshot

Picture = Literal[
    "off", "starting", "idle", "prefilling_here", "prefilling_there", "decoding", "trouble"
]

_PICTURES: Final[dict[Doing, Picture]] = {
    "loading": "starting",
    "idle": "idle",
    "restoring": "prefilling_here",
    "prefilling_here": "prefilling_here",
    "prefilling_there": "prefilling_there",
    "decoding": "decoding",
    # Nobody waits for it.
    "qualifying": "idle",
    "trouble": "trouble",
}

AMISS: Final[frozenset[LinkName]] = frozenset({"down", "refused", "unfit"})
"""States of a link to a producer that somebody should look at."""


@dataclass(frozen=True)
class Icon:
    """``ring`` is how much of it is filled, of 1, ``None`` for none; ``attention`` adds a dot:
    a producer cannot be used.
    """

    picture: Picture
    ring: float | None = None
    attention: bool = False


def icon(snapshot: Snapshot | None, standing: Standing) -> Icon:
    """The picture of a decoder; ``snapshot`` is the latest one, if it is connected."""
    if standing.state != "connected" or snapshot is None:
        return Icon(_without(standing))
    picture = _PICTURES[snapshot.engine.doing]
    attention = any(node.state in AMISS for node in snapshot.nodes.producers)
    ring = filled(snapshot.requests.in_hand) if picture.startswith("prefilling") else None
    return Icon(picture, ring, attention)


def filled(requests: tuple[InHand, ...]) -> float | None:
    """How much of the prompts that are prefilled now is done, of 1."""
    told = [
        (one.processed, one.total)
        for one in requests
        if one.stage in ("prefilling_here", "prefilling_there")
        and one.processed is not None
        and one.total
    ]
    total = sum(of for _, of in told)
    return min(1.0, sum(done for done, _ in told) / total) if total else None


def _without(standing: Standing) -> Picture:
    match standing.state:
        case "absent" | "stopping":
            return "off"
        case "connecting" | "connected" | "starting":
            return "starting"
        case _:
            return "trouble"
