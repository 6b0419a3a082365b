"""What people are told of unasked: each once, and most of it never."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from app.view.notices import ABSENCE_S, CALM_S, Memory, Notice, events
from protocol.status.snapshot import Nodes, Snapshot
from tests.app.view.snapshots import IDLE, READY, with_node


def told(*moments: tuple[float, Snapshot]) -> list[Notice]:
    """Everything that is told of these snapshots, one after the other."""
    memory, found = Memory(), list[Notice]()
    for at, snapshot in moments:
        memory, notices = events(memory, snapshot, at)
        found += notices
    return found


def kinds(*moments: tuple[float, Snapshot]) -> list[str]:
    return [notice.kind for notice in told(*moments)]


DOWN = with_node(IDLE, state="down", reason="producer_down")
CONNECTING = with_node(IDLE, state="connecting", reason="producer_connecting")
QUALIFYING = with_node(IDLE, state="qualifying", reason="producer_qualifying")
WITHOUT = msgspec.structs.replace(IDLE, nodes=Nodes(()))


def restarted(snapshot: Snapshot) -> Snapshot:
    decoder = msgspec.structs.replace(snapshot.decoder, process="cd")
    return msgspec.structs.replace(snapshot, decoder=decoder)


def short_of_room(count: int, reason: str = "store_under_floor") -> Snapshot:
    durable = IDLE.cache.durable
    assert durable is not None
    durable = msgspec.structs.replace(durable, counts={reason: count, "published": 9})
    return msgspec.structs.replace(IDLE, cache=msgspec.structs.replace(IDLE.cache, durable=durable))


def test_a_producer_that_was_ready_is_missed_after_a_while_and_welcomed_back() -> None:
    long = ABSENCE_S + 1
    found = told((0, IDLE), (1, DOWN), (1 + long, DOWN), (60, DOWN), (61, IDLE), (62, IDLE))
    assert [notice.kind for notice in found] == ["producer_lost", "producer_back"]
    assert found[0].title == "gb10 is gone"
    assert "producer_down" in found[0].text
    assert found[1].title == "gb10 is back"


def test_it_may_be_lost_again() -> None:
    once = [(0.0, IDLE), (1.0, DOWN), (20.0, DOWN), (30.0, IDLE)]
    again = [(at + 100, snapshot) for at, snapshot in once]
    assert kinds(*once, *again) == ["producer_lost", "producer_back"] * 2


def test_a_short_absence_is_none() -> None:
    assert kinds((0, IDLE), (1, DOWN), (ABSENCE_S, CONNECTING), (ABSENCE_S + 0.5, IDLE)) == []


def test_short_absences_do_not_add_up() -> None:
    flapping = [(float(at), DOWN if at % 2 else IDLE) for at in range(100)]
    assert kinds(*flapping) == []


def test_one_that_was_never_ready_is_not_missed() -> None:
    assert kinds((0, DOWN), (60, DOWN), (90, DOWN), (100, IDLE)) == []


def test_one_that_is_being_compared_is_there() -> None:
    assert kinds((0, IDLE), (1, QUALIFYING), (300, QUALIFYING), (301, IDLE)) == []


def test_one_that_was_removed_is_not_missed() -> None:
    assert kinds((0, IDLE), (1, WITHOUT), (100, WITHOUT), (101, DOWN), (200, DOWN)) == []


def test_a_decoder_that_starts_again_is_no_news() -> None:
    again = restarted(DOWN)
    assert kinds((0, IDLE), (1, again), (100, again), (101, restarted(IDLE))) == []


def test_each_of_two_producers_is_told_of_by_its_own_name() -> None:
    other = msgspec.structs.replace(READY, name="wss://10.0.0.7:7431", called="other")
    both = msgspec.structs.replace(IDLE, nodes=Nodes((READY, other)))
    gone = msgspec.structs.replace(other, state="refused", reason="weights_differ")
    one = msgspec.structs.replace(IDLE, nodes=Nodes((READY, gone)))
    found = told((0, both), (1, one), (20, one))
    assert [notice.title for notice in found] == ["other is gone"]


def test_a_full_disk_is_told_of_and_not_again_for_a_while() -> None:
    for reason in ("store_under_floor", "disk_full"):
        found = kinds(
            (0, short_of_room(0, reason)),
            (1, short_of_room(1, reason)),
            (2, short_of_room(5, reason)),
            (CALM_S, short_of_room(6, reason)),
            (CALM_S + 2, short_of_room(6, reason)),
            (CALM_S + 3, short_of_room(7, reason)),
        )
        assert found == ["disk_full", "disk_full"]


def test_the_cap_that_was_asked_for_is_no_news() -> None:
    assert kinds((0, short_of_room(0)), (1, short_of_room(9, "store_over_cap"))) == []


def test_a_disk_that_was_full_before_the_app_began_is_no_news() -> None:
    assert kinds((0, short_of_room(7)), (1, short_of_room(7))) == []
    assert kinds((0, short_of_room(7)), (1, short_of_room(8))) == ["disk_full"]
    cache = msgspec.structs.replace(IDLE.cache, durable=None)
    unknown = msgspec.structs.replace(IDLE, cache=cache)
    assert kinds((0, unknown), (1, short_of_room(7)), (2, unknown), (3, short_of_room(7))) == []


def test_a_decoder_that_starts_again_does_not_bring_the_full_disk_back() -> None:
    first = ((0.0, short_of_room(2)), (1.0, short_of_room(3)))
    assert kinds(*first, (2, restarted(short_of_room(2)))) == ["disk_full"]
    assert kinds(*first, (2, restarted(short_of_room(0))), (3, restarted(short_of_room(1)))) == [
        "disk_full"
    ]
    again = (CALM_S + 2, restarted(short_of_room(0))), (CALM_S + 3, restarted(short_of_room(1)))
    assert kinds(*first, *again) == ["disk_full", "disk_full"]


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from(("ready", "down", "connecting")))))
def test_lost_and_back_take_turns(steps: list[tuple[float, str]]) -> None:
    at, moments = 0.0, list[tuple[float, Snapshot]]()
    for pause, state in steps:
        at += pause
        moments.append((at, with_node(IDLE, state=state)))
    found = kinds(*moments)
    assert found == ["producer_lost", "producer_back"] * (len(found) // 2) + (
        ["producer_lost"] if len(found) % 2 else []
    )
