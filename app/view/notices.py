"""What people are told of without having asked: as little as possible. Pure.

A producer that was ready and has been gone for a while, and that it is back; that the disk has no
room for caches any more. Each once. A decoder that starts again is no news, nor is a producer
that somebody removed, or that was never ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from protocol.status.snapshot import LinkName, Node, Snapshot

Kind = Literal["producer_lost", "producer_back", "disk_full"]

ABSENCE_S: Final = 8.0
"""A producer that is back sooner was not lost: cables are moved, boxes restart their process."""

CALM_S: Final = 3600.0
"""For so long nothing more is said of a full disk."""

_PRESENT: Final[frozenset[LinkName]] = frozenset({"ready", "qualifying"})
_NO_ROOM: Final = ("store_under_floor", "disk_full")
"""Why a cut is not on disk; the cap is no trouble: it is what was asked for."""


@dataclass(frozen=True)
class Notice:
    """A title and a sentence."""

    kind: Kind
    title: str
    text: str


@dataclass(frozen=True)
class Memory:
    """What has to be remembered from one snapshot to the next. ``ready`` are producers that
    were, by name; ``missing`` since when those are gone; ``lost`` those that were told of;
    ``without_room`` how many caches found no room, ``None`` until this process has said so.
    """

    process: str = ""
    ready: frozenset[str] = frozenset()
    missing: Mapping[str, float] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    without_room: int | None = None
    room_told_at: float | None = None


def events(memory: Memory, snapshot: Snapshot, now: float) -> tuple[Memory, tuple[Notice, ...]]:
    """What to tell of a new snapshot, and what to remember; ``now`` in seconds that only grow."""
    told: list[Notice] = []
    if memory.process != snapshot.decoder.process:
        # Its producers have yet to be met again. What it has counted is not of now: it may have
        # run for weeks before this app.
        memory = Memory(snapshot.decoder.process, room_told_at=memory.room_told_at)
    memory = _producers(memory, snapshot, now, told)
    return _disk(memory, snapshot, now, told), tuple(told)


def _producers(memory: Memory, snapshot: Snapshot, now: float, told: list[Notice]) -> Memory:
    ready, missing, lost = set[str](), dict[str, float](), set[str]()
    for node in snapshot.nodes.producers:
        name = node.name
        if node.state == "ready":
            ready.add(name)
            if name in memory.lost:
                told.append(Notice("producer_back", f"{node.called} is back", _BACK))
        elif name in memory.ready:
            ready.add(name)
            since = memory.missing.get(name, now)
            if name in memory.lost:
                lost.add(name)
            elif node.state not in _PRESENT:
                missing[name] = since
                if now - since >= ABSENCE_S:
                    lost.add(name)
                    told.append(Notice("producer_lost", f"{node.called} is gone", _why(node)))
    return replace(memory, ready=frozenset(ready), missing=missing, lost=frozenset(lost))


def _disk(memory: Memory, snapshot: Snapshot, now: float, told: list[Notice]) -> Memory:
    durable = snapshot.cache.durable
    if durable is None:
        return memory
    count = sum(durable.counts.get(reason, 0) for reason in _NO_ROOM)
    before, at = memory.without_room, memory.room_told_at
    if before is not None and count > before and (at is None or now - at >= CALM_S):
        at = now
        told.append(Notice("disk_full", "The disk is nearly full", _NO_MORE))
    return replace(memory, without_room=count, room_told_at=at)


_BACK: Final = "Prompts can be prefilled there again."
_NO_MORE: Final = (
    "New caches stay in memory alone. Free space on the volume, or lower what Baton may use of it."
)


def _why(node: Node) -> str:
    reason = f" ({node.reason})" if node.reason else ""
    return f"Prompts are prefilled on this machine until it is back{reason}."
