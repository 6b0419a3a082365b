"""Which tokens are reported: those whose characters are all the answer's, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mac_decoder.api.logprobs import Ledger
from mac_decoder.engine.events import Token

WIDTHS = st.lists(st.integers(0, 3), min_size=1, max_size=12)
MARKS = st.lists(st.booleans(), min_size=48, max_size=48)


@given(widths=WIDTHS, mine=MARKS, steps=st.lists(st.integers(0, 4), min_size=12, max_size=12))
def test_a_token_is_reported_if_all_its_characters_are_the_answer_s(
    widths: list[int], mine: list[bool], steps: list[int]
) -> None:
    """Characters are settled later than they are read, by any number of steps."""
    ledger = Ledger()
    reported: list[int] = []
    read = settled = 0
    for number, width in enumerate(widths):
        ledger.token(Token(number), read, read + width)
        read += width
        reach = min(read, settled + steps[number])
        for position in range(settled, reach):
            if mine[position]:
                ledger.answer(position, position + 1)
        settled = reach
        reported += [entry.token.id for entry in ledger.settled(settled)]
    for position in range(settled, read):
        if mine[position]:
            ledger.answer(position, position + 1)
    reported += [entry.token.id for entry in ledger.settled(read, last=True)]

    expected: list[int] = []
    start = 0
    for number, width in enumerate(widths):
        if width == 0 and start == read:
            # Nothing follows: it belongs to what was told last.
            told = read > 0 and mine[read - 1]
        else:
            told = all(mine[start : start + max(width, 1)])
        if told:
            expected.append(number)
        start += width
    assert reported == expected


def test_nothing_of_an_answer_without_text_is_reported() -> None:
    ledger = Ledger()
    ledger.token(Token(1), 0, 0)
    assert ledger.settled(0, last=True) == ()


def test_a_token_waits_for_the_character_that_it_begins() -> None:
    ledger = Ledger()
    ledger.token(Token(1), 0, 0)
    assert ledger.settled(0) == ()
    ledger.token(Token(2), 0, 1)
    ledger.answer(0, 1)
    assert [entry.token.id for entry in ledger.settled(1)] == [1, 2]
