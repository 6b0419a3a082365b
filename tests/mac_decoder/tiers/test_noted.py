"""The latest events of the durable tier, bounded, without a name or a path."""

from __future__ import annotations

from itertools import count

from mac_decoder.store.events import Deleting, IndexRebuilt, Invalid
from mac_decoder.tiers.noted import MOST, Noted
from protocol.status.snapshot import MOST_EVENTS, CacheEvent


def noted() -> Noted:
    times = count(100)
    return Noted(lambda: float(next(times)))


def test_what_happens_for_one_reason_in_a_row_is_one_entry() -> None:
    found = noted()
    for number in range(1000):
        found.note(Deleting(f"blocks/{number}", 10, "room", b"cut" if number < 3 else b""))
    (entry,) = found.latest()
    assert CacheEvent(**entry) == CacheEvent(1099.0, "deleted", "room", 1000, 3, 10000)


def test_another_reason_is_another_entry_and_the_newest_comes_first() -> None:
    found = noted()
    found.note(IndexRebuilt(7))
    found.note(Deleting("a", 1, "prune"))
    found.note(Invalid("b", "digest_differs", (b"x",)))
    found.note(Deleting("c", 2, "prune"))
    entries = [CacheEvent(**entry) for entry in found.latest()]
    assert [(one.kind, one.reason) for one in entries] == [
        ("deleted", "prune"),
        ("invalid", "digest_differs"),
        ("deleted", "prune"),
        ("index_rebuilt", "index_rebuilt"),
    ]
    assert [one.cuts for one in entries] == [0, 1, 0, 7]


def test_there_are_never_too_many() -> None:
    found = noted()
    for number in range(3 * MOST):
        found.note(Deleting("a", number, "room" if number % 2 else "prune"))
    entries = found.latest()
    assert len(entries) == MOST == MOST_EVENTS
    assert entries[0]["bytes"] == 3 * MOST - 1
