"""Marks of conversations: each keeps its own, and no two have the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from mac_decoder.housekeeping.conversations import Chosen, Marks, identified
from mac_decoder.housekeeping.families import Family, families
from protocol.blocks import BLOCK
from tests.mac_decoder.housekeeping.test_families import Text, member, name_of, nobody, text

SECRET = bytes(32)
SYSTEM = text((1, 300))
LATER = text((1, 300), (2, 30))
ONE, OTHER = text((1, 300), (2, 30), (3, 9)), text((1, 300), (2, 30), (4, 9))
ELSE = text((1, 300), (5, 40))


class Kept:
    """What is held, and the marks of what is shown of it."""

    def __init__(self) -> None:
        self.marks = Marks(SECRET)
        self.held: list[Text] = []

    def keep(self, *texts: Text) -> None:
        self.held += texts

    def let_go(self, *texts: Text) -> None:
        self.held = [one for one in self.held if one not in texts]

    def families(self, most: int = 50) -> tuple[Family, ...]:
        """The conversations; whose cut was kept last is shown first."""
        members = [member(one, float(at)) for at, one in enumerate(self.held)]
        return families(members, nobody, most)[0]

    def look(self, most: int = 50) -> dict[Text, str]:
        """The mark of each that is shown, by its deepest cut."""
        found = self.families(most)
        of_name = {name_of(one): one for one in self.held}
        marks = self.marks.of(found, of_name.keys())
        assert len({*marks}) == len(marks)
        return {of_name[one.cuts[0]]: mark for one, mark in zip(found, marks, strict=True)}

    def forget(self, deepest: Text) -> None:
        """As an operation does."""
        (family,) = [one for one in self.families() if one.cuts[0] == name_of(deepest)]
        self.marks.forget(Chosen(family.own, (), family.cuts))
        self.held = [one for one in self.held if name_of(one) not in family.own]


def went_on() -> tuple[Kept, str]:
    """One conversation that was looked at before and after it went on, and its mark."""
    kept = Kept()
    kept.keep(SYSTEM)
    (mark,) = kept.look().values()
    kept.keep(LATER)
    assert kept.look() == {LATER: mark}
    return kept, mark


def test_one_that_goes_on_and_forks_between_two_looks_keeps_its_mark() -> None:
    kept = Kept()
    kept.keep(SYSTEM, LATER)
    (before,) = kept.look().values()
    kept.keep(ONE, OTHER)
    after = kept.look()
    assert after[OTHER] == before, "the branch that was used last"
    assert after[ONE] != before
    kept.keep(ELSE)
    assert kept.look().items() > after.items()


def test_a_look_that_does_not_show_it_renames_nothing() -> None:
    kept = Kept()
    kept.keep(SYSTEM, LATER)
    (before,) = kept.look().values()
    kept.keep(ONE, *(text((number, 20)) for number in range(10, 15)))
    assert ONE not in kept.look(5)
    assert kept.look()[ONE] == before


def test_whoever_begins_as_one_that_is_not_shown_does_not_take_its_mark() -> None:
    kept, before = went_on()
    kept.keep(ELSE)
    shown = kept.look(1)
    assert shown.keys() == {ELSE}
    assert shown[ELSE] != before
    assert kept.look() == {LATER: before, **shown}


def test_whoever_begins_as_one_that_is_gone_does_not_take_its_mark() -> None:
    kept, before = went_on()
    kept.keep(ELSE)
    kept.look()
    kept.let_go(LATER)
    kept.keep(text((1, 300), (7, 9)))
    assert before not in kept.look().values()


def test_one_whose_deepest_cut_goes_keeps_its_mark() -> None:
    kept = Kept()
    kept.keep(SYSTEM, LATER)
    (before,) = kept.look().values()
    kept.let_go(LATER)
    assert kept.look() == {SYSTEM: before}


def test_the_mark_of_one_that_was_forgotten_is_not_handed_on() -> None:
    """Not even to one that was never shown beside it, and now has alone what both shared."""
    kept = Kept()
    kept.keep(SYSTEM, LATER)
    (before,) = kept.look().values()
    kept.keep(ELSE)
    kept.forget(LATER)
    assert kept.held == [SYSTEM, ELSE]
    (after,) = kept.look().values()
    assert after != before


def test_one_that_was_to_be_forgotten_and_stayed_keeps_its_mark() -> None:
    kept, before = went_on()
    kept.keep(ELSE)
    kept.forget(LATER)
    kept.keep(LATER)
    assert kept.look()[LATER] == before


def test_nothing_is_known_of_what_is_not_held_any_more() -> None:
    kept, before = went_on()
    kept.let_go(SYSTEM, LATER)
    assert kept.look() == {}
    kept.keep(LATER)
    assert kept.look() != {LATER: before}


def test_marks_that_would_be_alike_are_longer() -> None:
    first, second = alike(6)
    marks = Marks(SECRET)
    shown = [Family((name,), frozenset({name})) for name in (first, second)]
    found = marks.of(shown, {first, second})
    assert found == [identified(SECRET, first)[:6], identified(SECRET, second)[:7]]
    # Also where the other one is not shown.
    marks = Marks(SECRET)
    assert marks.of(shown[:1], {first}) == found[:1]
    assert marks.of(shown[1:], {first, second}) == found[1:]


def alike(digits: int) -> tuple[bytes, bytes]:
    """Two names whose ids begin with the same digits, and no more of them."""
    seen: dict[str, bytes] = {}
    for number in count():
        name = hashlib.blake2b(number.to_bytes(8), digest_size=32).digest()
        mark = identified(SECRET, name)[:digits]
        if mark in seen:
            return seen[mark], name
        seen[mark] = name
    raise AssertionError


TEXTS = [
    SYSTEM,
    *(text((1, 300), (branch, 20)) for branch in (2, 3)),
    *(text((1, 300), (branch, 20), (then, 20)) for branch in (2, 3) for then in (4, 5)),
    text((6, BLOCK)),
]


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(range(len(TEXTS))), unique=True),
            st.integers(0, 5),
        ),
        max_size=8,
    )
)
@settings(max_examples=200)
def test_one_that_nobody_extends_has_one_mark(looks: Iterable[tuple[list[int], int]]) -> None:
    """Whatever comes and goes beside it, and whether or not it is shown in between."""
    kept, known = Kept(), dict[Text, str]()
    for those, most in looks:
        held = [TEXTS[number] for number in those]
        kept.held = held
        leaves = {
            one
            for one in held
            if not any(one != other and other[: len(one)] == one for other in held)
        }
        known = {one: mark for one, mark in known.items() if one in leaves}
        shown = kept.look(most)
        assert shown.items() >= {(one, mark) for one, mark in known.items() if one in shown}
        known |= shown
        assert len({*known.values()}) == len(known)
