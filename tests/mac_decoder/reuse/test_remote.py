"""What the producer is thought to hold: the longest prefix that it was handed, on its grid."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mac_decoder.reuse.remote import PROMPTS, RemotePrefixes

TILE = 4
SPACE = b"s" * 32


def prompt(*tokens: int) -> NDArray[np.uint32]:
    return np.array(tokens, np.uint32)


def counting(length: int, start: int = 0) -> NDArray[np.uint32]:
    return np.arange(start, start + length, dtype=np.uint32)


def test_nothing_is_held_of_what_was_never_handed_off() -> None:
    held = RemotePrefixes()
    assert held.holds(SPACE, counting(100), TILE) == 0
    held.handed_off(SPACE, counting(50), 50, TILE)
    assert held.holds(SPACE, counting(100, 1), TILE) == 0


def test_whole_tiles_of_the_longest_prefix_are_held() -> None:
    held = RemotePrefixes()
    held.handed_off(SPACE, counting(50), 50, TILE)
    held.handed_off(SPACE, np.concatenate((counting(22), counting(20, 500))), 22, TILE)
    assert [held.holds(SPACE, counting(length), TILE) for length in (3, 4, 47, 48, 50, 60)] == [
        *(0, 4, 44, 48, 48, 48)
    ]
    assert held.holds(SPACE, np.concatenate((counting(22), counting(40, 500))), TILE) == 40


def test_a_prompt_that_goes_on_takes_the_place_of_its_beginning() -> None:
    held = RemotePrefixes()
    for turn in range(1, 40):
        held.handed_off(SPACE, counting(10 * turn), 10, TILE)
    assert len(held) == 1
    assert held.holds(SPACE, counting(400), TILE) == 388


def test_only_the_last_prompts_are_remembered() -> None:
    held = RemotePrefixes()
    for number in range(PROMPTS + 1):
        held.handed_off(SPACE, counting(20, 1000 * number), 20, TILE)
    assert len(held) == PROMPTS
    assert held.holds(SPACE, counting(20), TILE) == 0
    assert held.holds(SPACE, counting(20, 1000), TILE) == 20


def test_a_manifest_that_shows_otherwise_is_believed() -> None:
    """The producer computed what it was thought to hold: that is gone for others too."""
    held = RemotePrefixes()
    held.handed_off(SPACE, counting(40), 40, TILE)
    held.handed_off(SPACE, counting(40, 1000), 40, TILE)
    branch = np.concatenate((counting(30), counting(30, 500)))
    held.handed_off(SPACE, branch, 60 - 12, TILE)
    assert held.holds(SPACE, counting(40), TILE) == 28, "through the branch"
    assert held.holds(SPACE, counting(40, 1000), TILE) == 40
    held.handed_off(SPACE, np.concatenate((counting(20, 1000), counting(4))), 24, TILE)
    assert held.holds(SPACE, counting(40, 1000), TILE) == 20
    assert held.holds(SPACE, counting(40), TILE) == 28


def test_a_producer_that_was_away_holds_nothing() -> None:
    held = RemotePrefixes()
    held.handed_off(SPACE, counting(40), 40, TILE)
    held.forget()
    assert held.holds(SPACE, counting(40), TILE) == 0


def test_less_than_a_tile_is_not_remembered() -> None:
    held = RemotePrefixes()
    held.handed_off(SPACE, prompt(1, 2, 3), 3, TILE)
    assert len(held) == 0


prompts = st.lists(st.integers(0, 1), max_size=24).map(lambda tokens: prompt(*tokens))


@given(st.lists(prompts, max_size=8), prompts)
def test_of_a_producer_with_room_it_is_exact(handed: list[NDArray[np.uint32]], asked) -> None:
    """As long as no more prompts are handed off than are remembered."""
    held = RemotePrefixes()
    tiles: set[bytes] = {b""}

    def really(tokens: NDArray[np.uint32]) -> int:
        length = 0
        while length + TILE <= len(tokens) and tokens[: length + TILE].tobytes() in tiles:
            length += TILE
        return length

    for tokens in handed:
        assert held.holds(SPACE, tokens, TILE) == really(tokens)
        held.handed_off(SPACE, tokens, len(tokens) - really(tokens), TILE)
        tiles |= {tokens[:last].tobytes() for last in range(TILE, len(tokens) + 1, TILE)}
    assert held.holds(SPACE, asked, TILE) == really(asked)


def test_what_another_key_handed_off_is_not_held_for_this_one() -> None:
    held = RemotePrefixes()
    held.handed_off(SPACE, counting(50), 50, TILE)
    assert held.holds(b"t" * 32, counting(50), TILE) == 0
    held.handed_off(b"t" * 32, counting(50), 50, TILE)
    assert [held.holds(space, counting(50), TILE) for space in (SPACE, b"t" * 32)] == [48, 48]


def test_what_is_not_to_be_reused_is_not_remembered() -> None:
    held = RemotePrefixes()
    held.handed_off(b"", counting(50), 50, TILE)
    assert held.holds(b"", counting(50), TILE) == 0
    assert len(held) == 0
