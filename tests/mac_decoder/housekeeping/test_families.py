"""Conversations out of cuts: those that a plain comparison of all tokens gives."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_decoder.housekeeping.families import Family, Member, families
from protocol.blocks import BLOCK, chain, cut_digest
from tests.mac_decoder.reuse.made import OTHER_SPACE, SPACE

Text = tuple[int, ...]

LENGTHS = (1, 3, 255, 256, 257, 300, 511, 512, 513)


def name_of(text: Text, space: bytes = SPACE) -> bytes:
    blocks = chain(space, text)
    return cut_digest(space, blocks[-1] if blocks else b"", text[len(blocks) * BLOCK :], len(text))


def member(
    text: Text, at: float = 0.0, *, known: bool = True, parent: bytes = b"", space: bytes = SPACE
) -> Member:
    blocks = chain(space, text)
    return Member(
        name_of(text, space),
        space,
        blocks[-1] if blocks else b"",
        len(text),
        (at, 0),
        parent,
        np.array(text, np.uint32) if known else None,
        blocks if known else None,
    )


def text(*parts: tuple[int, int]) -> Text:
    """Tokens: so many of each."""
    return tuple(token for token, count in parts for _ in range(count))


def nobody(name: bytes) -> None:
    raise AssertionError("tokens were asked for")


def test_two_conversations_share_their_beginning() -> None:
    system, one = text((1, 300)), text((1, 300), (2, 30))
    other = text((1, 300), (3, 900))
    found, left = families([member(system), member(one, 1.0), member(other, 2.0)], nobody, most=9)
    assert left == 0
    assert found == (
        Family((name_of(other), name_of(system)), frozenset({name_of(other)})),
        Family((name_of(one), name_of(system)), frozenset({name_of(one)})),
    )


def test_what_memory_holds_of_a_conversation_on_disk_is_a_part_of_it() -> None:
    step, deep = text((1, 100)), text((1, 100), (2, 500))
    members = [member(step, 5.0), member(deep, 1.0, known=False)]
    asked: list[bytes] = []

    def tokens_of(name: bytes) -> np.ndarray:
        asked.append(name)
        return np.array(deep, np.uint32)

    found, left = families(members, tokens_of, most=9)
    assert (found, left) == (
        (Family((name_of(deep), name_of(step)), frozenset({name_of(deep), name_of(step)})),),
        0,
    )
    assert asked == [name_of(deep)]
    assert families(members, lambda _name: None, most=9)[0] == (
        Family((name_of(step),), frozenset({name_of(step)})),
        Family((name_of(deep),), frozenset({name_of(deep)})),
    )


def test_the_latest_are_shown_and_the_others_counted() -> None:
    texts = [text((number, 20)) for number in range(1, 8)]
    members = [member(one, float(at)) for at, one in enumerate(texts)]
    found, left = families(members, nobody, most=3)
    assert [family.cuts[0] for family in found] == [name_of(one) for one in texts[:3:-1]]
    assert left == 4


def test_equal_tokens_of_two_namespaces_are_two_conversations() -> None:
    said = text((1, 300))
    members = [member(said), member(said[:256], space=OTHER_SPACE)]
    assert [len(family.cuts) for family in families(members, nobody, most=9)[0]] == [1, 1]


@given(
    st.lists(
        st.tuples(st.sampled_from(LENGTHS), st.integers(0, 3), st.booleans(), st.integers(0, 5)),
        max_size=12,
    ),
    st.integers(0, 12),
)
@settings(max_examples=60)
def test_families_are_those_of_a_plain_comparison(
    drawn: list[tuple[int, int, bool, int]], most: int
) -> None:
    """Texts agree up to a place and part there; some are in memory, some on disk alone."""
    texts: dict[Text, tuple[bool, int]] = {}
    for length, branch, known, at in drawn:
        texts[text((1, min(length, 256)), (1 + branch, max(0, length - 256)))] = (known, at)
    durable = [one for one, (known, _at) in texts.items() if not known]

    def parent(one: Text) -> bytes:
        shorter = [other for other in durable if one != other and one[: len(other)] == other]
        return name_of(max(shorter, key=len)) if shorter else b""

    members = [
        member(one, float(at), known=known, parent=b"" if known else parent(one))
        for one, (known, at) in texts.items()
    ]
    of_name = {name_of(one): one for one in texts}
    found, left = families(members, lambda name: np.array(of_name[name], np.uint32), most)
    leaves = [
        one
        for one in texts
        if not any(one != other and other[: len(one)] == one for other in texts)
    ]
    assert len(found) <= most
    assert len(found) + left >= len(leaves)
    if most < len(texts):
        return
    assert left == 0
    assert {of_name[family.cuts[0]] for family in found} == set(leaves)
    for family in found:
        line = [of_name[name] for name in family.cuts]
        assert set(line) == {one for one in texts if line[0][: len(one)] == one}
        assert all(longer[: len(shorter)] == shorter for longer, shorter in pairwise(line))
        others = [leaf for leaf in leaves if leaf != line[0]]
        alone = {one for one in line if not any(leaf[: len(one)] == one for leaf in others)}
        assert {of_name[name] for name in family.own} == alone
