"""A line knows where what was handed over is kept, and from where its next cut has to bring."""

from __future__ import annotations

import pytest

from mac_decoder.reuse.line import Line
from mac_decoder.reuse.resident import Pinned, Resident
from tests.mac_decoder.reuse.made import FULL, SPACE, made_of

FILES = (b"1", b"2", b"3")


@pytest.fixture
def tier() -> Resident:
    return Resident(1 << 30)


def pinned(tier: Resident, position: int = 600) -> Pinned:
    key = tier.put(SPACE, *made_of(FULL, range(position))).key
    found = tier.pin(key)
    assert found is not None
    return found


def pinned_bytes(tier: Resident) -> int:
    return tier.stats().pinned_bytes


def test_a_new_line_has_to_bring_all() -> None:
    line = Line()
    assert line.follows(0)
    assert not line.follows(1)
    assert line.broken
    assert line.follows(0)


def test_memory_alone_is_gone_on_from(tier: Resident) -> None:
    line = Line(pinned(tier), 2)
    assert line.follows(2)
    line.release()
    assert pinned_bytes(tier) == 0
    assert not line.follows(2)
    assert line.renewed().blocks == 0


def test_the_disk_alone_is_gone_on_from_also_before_it_is_told() -> None:
    line = Line(None, 3, FILES)
    assert line.follows(3)
    line.sent(5)
    assert line.follows(5)
    line.told(5)
    assert line.broken
    new = line.renewed()
    assert (new.blocks, new.files, new.broken) == (3, FILES, False)
    assert new.follows(3)
    assert not new.follows(4)


def test_a_publication_that_leaves_no_block_out_breaks_nothing() -> None:
    line = Line(None, 3, FILES)
    line.sent(3)
    line.told(3)
    line.told(2)
    assert not line.broken
    assert line.follows(3)


def test_a_refusal_does_not_matter_while_memory_has_it(tier: Resident) -> None:
    line = Line(pinned(tier), 2)
    line.sent(2)
    line.told(2)
    assert not line.broken
    assert line.follows(2)
    line.rest()
    line.told(2)
    line.wake(tier, 2)
    assert not line.broken
    # Once memory has let go of it nothing is left.
    line.rest()
    tier.resize(0)
    line.wake(tier, 2)
    assert line.broken


def test_what_memory_let_go_of_while_it_rested_is_gone_on_from_on_disk(tier: Resident) -> None:
    line = Line(pinned(tier), 2)
    line.rest()
    assert pinned_bytes(tier) == 0
    line.files = FILES[:2]
    tier.resize(0)
    line.wake(tier, 2)
    assert line.pinned is None
    assert not line.broken
    assert line.follows(2)


def test_another_cut_of_the_same_name_is_not_woken_up_to(tier: Resident) -> None:
    line = Line(pinned(tier), 2)
    line.rest()
    tier.resize(0)
    tier.resize(1 << 30)
    pinned(tier).release()
    line.wake(tier, 2)
    assert line.pinned is None
    assert line.broken


def test_leaving_memory_hands_the_cut_to_the_caller(tier: Resident) -> None:
    line = Line(pinned(tier), 2)
    left = line.leave_memory()
    assert left is not None
    assert pinned_bytes(tier) > 0
    line.release()
    left.release()
    assert pinned_bytes(tier) == 0
    line.hold(pinned(tier))
    line.hold(pinned(tier, 700))
    line.release()
    assert pinned_bytes(tier) == 0
