"""The list of words: one byte each, none taken for another, never changed."""

from __future__ import annotations

import hashlib
from itertools import combinations

from protocol.pairing.words import PLACES, WORDS


def changes(one: str, other: str) -> int:
    """How many letters must be put in, left out or changed to make one word of the other."""
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        below = [i]
        for j, wanted in enumerate(other, 1):
            below.append(min(row[j] + 1, below[-1] + 1, row[j - 1] + (letter != wanted)))
        row = below
    return row[-1]


def test_each_byte_has_one_word() -> None:
    assert len(WORDS) == len(set(WORDS)) == 256
    assert [WORDS[PLACES[word]] for word in WORDS] == list(WORDS)


def test_words_are_short_and_of_plain_letters() -> None:
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)
    assert {len(word) for word in WORDS} == {4, 5, 6, 7}


def test_no_two_begin_alike() -> None:
    assert len({word[:3] for word in WORDS}) == 256


def test_two_slips_make_no_other_word_of_one() -> None:
    assert changes("monkey", "donkey") == 1
    assert [pair for pair in combinations(WORDS, 2) if changes(*pair) < 3] == []


def test_words_and_order_are_frozen() -> None:
    """Another machine may have an older Baton: its list must be this one."""
    assert (WORDS[0], WORDS[100], WORDS[255]) == ("acorn", "hotel", "zodiac")
    assert hashlib.sha256(" ".join(WORDS).encode()).hexdigest() == (
        "b4f4a3f1ddf63c81922c3a3cc2eef2b9472ceaa2c94149b0ecf3a95e87687452"
    )
