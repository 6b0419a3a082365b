"""The menu of the menu bar, as a tree that any toolkit can lay out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from app.view import words
from app.view.cache import saved_today
from app.view.clients import CLIENTS
from app.view.facts import Tone
from app.view.nodes import NO_PRODUCER, TONES, lacks, line
from app.view.overview import headline, where
from app.view.requests import sentence
from app.view.standing import Standing, one_line
from protocol.status.snapshot import Snapshot

MOST_REQUESTS: Final = 5
"""How many requests have a line of their own."""

Action = Literal[
    "add_node",
    "start",
    "stop",
    "restart",
    "copy_url",
    "copy_client",
    "dashboard",
    "doctor",
    "login_item",
    "logs",
    "choose_model",
    "quit",
]


@dataclass(frozen=True)
class Item:
    """A line: something to do (``action``, for some with an ``argument``), a menu of its own
    (``children``), or text that only tells. A line without text separates.
    """

    text: str = ""
    action: Action | None = None
    argument: str = ""
    enabled: bool = True
    checked: bool | None = None
    tone: Tone = "plain"
    children: tuple[Item, ...] = ()

    @property
    def separates(self) -> bool:
        """Whether this is a line between groups."""
        return not self.text


@dataclass(frozen=True)
class Around:
    """What a menu needs to know besides the decoder. ``ours``: this app may stop and restart
    the decoder, which it started, or whose service it knows; ``startable``: it may start one;
    ``model_follows``: what it serves is what the settings name, which an installed service does
    not do that was given its model; ``login_item`` is ``None`` where there is no such thing.
    """

    ours: bool = False
    startable: bool = True
    has_model: bool = True
    model_follows: bool = True
    login_item: bool | None = None


ELSEWHERE: Final = "It was not started by this app, and is stopped where it was"

_LINE: Final = Item()


def menu(
    snapshot: Snapshot | None, standing: Standing, around: Around, now: float
) -> tuple[Item, ...]:
    """Everything, from the top to the bottom."""
    told = snapshot if standing.state == "connected" else None
    groups = [
        _status(told, standing),
        *([_requests(told), _producers(told), _cache(told, now)] if told else []),
        _decoder(standing, around),
        _copies(told),
        _windows(told, around),
        (Item("Quit Baton", "quit"),),
    ]
    return tuple(_separated([group for group in groups if group]))


def _separated(groups: Sequence[tuple[Item, ...]]) -> list[Item]:
    items: list[Item] = []
    for group in groups:
        items += [_LINE, *group] if items else group
    return items


def _status(told: Snapshot | None, standing: Standing) -> tuple[Item, ...]:
    said = headline(told, standing)
    return (_text(said.text, said.tone), _text(where(told, standing)))


def _requests(told: Snapshot) -> tuple[Item, ...]:
    found = told.requests.in_hand
    if len(found) < 2:
        return ()  # the status line says it
    lines = [_text(_upper(sentence(one, told.nodes)), "busy") for one in found[:MOST_REQUESTS]]
    if more := len(found) - len(lines):
        lines.append(_text(f"and {words.counted(more, 'more', 'more')}"))
    return tuple(lines)


def _producers(told: Snapshot) -> tuple[Item, ...]:
    found = told.nodes.producers
    lines = [] if found else [_text(NO_PRODUCER)]
    for node in found:
        lines.append(_text(line(node), TONES[node.state]))
        if lacks(node):
            lines.append(_text(f"It gets this model by: baton node send {node.called}"))
    return (*lines, Item("Add a node…", "add_node"))


def _cache(told: Snapshot, now: float) -> tuple[Item, ...]:
    kept = told.cache
    sizes: list[str] = []
    if kept.resident is not None:
        used, most = kept.resident.used_bytes, kept.resident.budget_bytes
        sizes.append(f"memory {words.nbytes(used)} of {words.nbytes(most)}")
    if kept.durable is not None:
        used, most = kept.durable.on_disk, kept.durable.cap_bytes
        sizes.append(f"disk {words.nbytes(used)} of {words.nbytes(most)}")
    saved = saved_today(told, now)
    return (
        _text(_upper(", ".join(sizes)) if sizes else "No caches are kept"),
        _text(f"Hit rate {words.share(kept.hit_rate)}"),
        _text(f"{_upper(saved.label)}: {saved.text}"),
    )


def _decoder(standing: Standing, around: Around) -> tuple[Item, ...]:
    if not around.has_model:
        return (Item("Choose a model…", "choose_model"),)
    absent = standing.state == "absent"
    may = around.startable if absent else around.ours
    change = Item("Change the model…", "choose_model", enabled=may and around.model_follows)
    if absent:
        return (Item("Start the decoder", "start", enabled=may), change)
    return (
        Item("Stop the decoder", "stop", enabled=may),
        Item("Restart the decoder", "restart", enabled=may),
        change,
        *(() if may else (_text(ELSEWHERE),)),
    )


def _copies(told: Snapshot | None) -> tuple[Item, ...]:
    there = told is not None
    return (
        Item("Copy base URL", "copy_url", enabled=there),
        Item(
            "Copy client configuration",
            enabled=there,
            children=tuple(Item(client.name, "copy_client", client.id) for client in CLIENTS),
        ),
    )


def _windows(told: Snapshot | None, around: Around) -> tuple[Item, ...]:
    login = around.login_item
    return (
        Item("Open dashboard", "dashboard", enabled=told is not None),
        Item("Check-up…", "doctor"),
        *(() if login is None else (Item("Launch at login", "login_item", checked=login),)),
        Item("Logs", "logs"),
    )


def _text(text: str, tone: Tone = "plain") -> Item:
    return Item(one_line(text), enabled=False, tone=tone)


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
