"""Codes: read as people type them, tried once, ten minutes, three, then a pause."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import BatonError, CapacityError, ConfigError, RequestError, told
from protocol.pairing.code import CODE_LIFE_S, MAX_TYPED, Codes, new_code, read_code
from protocol.pairing.words import WORDS
from tests.protocol.pairing.joined import NOW, RIGHT, fixed_code, opened

words = st.lists(st.sampled_from(WORDS), min_size=6, max_size=6)
LATER = NOW + CODE_LIFE_S


def refused(call: Callable[[], object], kind: type[BatonError], reason: str) -> BatonError:
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.reason == reason
    return caught.value


def test_a_code_is_a_word_for_each_of_six_random_bytes() -> None:
    assert new_code(fixed_code).text == RIGHT
    assert new_code(fixed_code).secret == RIGHT.encode()
    assert new_code().text != new_code().text


@given(words, st.sampled_from((" ", "-", "  ", ", ", " - ", "_", "\t", "\n", "\u2013", ". ")))
def test_case_blanks_and_hyphens_do_not_matter(chosen: list[str], between: str) -> None:
    for typed in (between.join(chosen), f"  {between.join(chosen).upper()}\n"):
        assert read_code(typed).words == tuple(chosen)


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("", "0 words"),
        ("acorn", "1 words"),
        (RIGHT + "-acorn", "7 words"),
        (RIGHT.replace("album", "albun"), "word 3 is not in the list"),
        (RIGHT.replace("zodiac", "z0diac"), "word 6 is not in the list"),
        (RIGHT.replace("-", ""), "word 1 is not in the list"),
        ("a" * (MAX_TYPED + 1), f"more than {MAX_TYPED} characters"),
    ],
)
def test_a_slip_is_named_by_its_place(typed: str, found: str) -> None:
    assert refused(lambda: read_code(typed), RequestError, "code_malformed").found == found


@given(words, st.integers(0, 5), st.data())
def test_one_wrong_letter_is_never_another_code(
    chosen: list[str], place: int, data: st.DataObject
) -> None:
    word = chosen[place]
    at = data.draw(st.integers(0, len(word) - 1))
    letter = data.draw(st.sampled_from([x for x in "abcdefghijklmnopqrstuvwxyz" if x != word[at]]))
    chosen[place] = word[:at] + letter + word[at + 1 :]
    error = refused(lambda: read_code(" ".join(chosen)), RequestError, "code_malformed")
    assert chosen[place] not in told(error, "baton")


@given(st.text(max_size=60))
def test_whatever_is_typed_is_read_or_refused(typed: str) -> None:
    with suppress(RequestError):
        assert len(read_code(typed).words) == 6


def test_nothing_shows_a_code() -> None:
    codes = opened()
    shown = f"{read_code(RIGHT)!r} {read_code(RIGHT)} {codes!r} {codes}"
    assert not [word for word in RIGHT.split("-") if word in shown]


def test_two_codes_cannot_be_compared() -> None:
    assert read_code(RIGHT) != read_code(RIGHT)


def test_without_a_code_pairing_is_closed() -> None:
    codes = Codes()
    refused(lambda: codes.spend(NOW), ConfigError, "pairing_closed")
    assert codes.left_s(NOW) == 0


def test_a_code_is_given_to_one_exchange() -> None:
    codes = opened()
    assert codes.spend(NOW).text == RIGHT
    assert codes.left_s(NOW) == 0
    for _ in range(2):
        refused(lambda: codes.spend(NOW), ConfigError, "code_burned")


def test_a_code_that_paired_leaves_pairing_closed() -> None:
    codes = opened()
    codes.succeed(codes.spend(NOW))
    refused(lambda: codes.spend(NOW), ConfigError, "pairing_closed")


def test_success_of_an_earlier_code_does_not_touch_the_open_one() -> None:
    codes = opened()
    earlier = codes.spend(NOW)
    latest = codes.open(NOW)
    codes.succeed(earlier)
    assert codes.spend(NOW) is latest
    codes.succeed(earlier)
    refused(lambda: codes.spend(NOW), ConfigError, "code_burned")


def test_a_code_lives_ten_minutes() -> None:
    assert CODE_LIFE_S == 600
    codes = opened()
    assert codes.left_s(NOW + 10) == 590
    assert opened().spend(LATER - 0.01).text == RIGHT
    for _ in range(2):
        refused(lambda: codes.spend(LATER), ConfigError, "code_expired")
    assert codes.left_s(LATER) == 0


def test_one_code_is_open_at_a_time() -> None:
    codes = opened()
    latest = codes.open(NOW + 1)
    assert codes.left_s(NOW + 1) == CODE_LIFE_S
    assert codes.spend(NOW + 2) is latest


def test_a_withdrawn_code_cannot_be_tried() -> None:
    codes = opened()
    codes.close()
    refused(lambda: codes.spend(NOW), ConfigError, "pairing_closed")
    burned = opened()
    burned.spend(NOW)
    burned.close()
    refused(lambda: burned.spend(NOW), ConfigError, "code_burned")


def test_the_fourth_code_in_ten_minutes_waits() -> None:
    codes = Codes()
    for second in range(3):
        codes.open(NOW + second)
        codes.spend(NOW + second)
    error = refused(lambda: codes.open(NOW + 10), CapacityError, "pairing_paused")
    assert isinstance(error, CapacityError)
    assert error.retry_after_s == codes.pause_s(NOW + 10) == 590
    # Whoever tries meanwhile is told how long it takes, not to ask for a code that is not given.
    error = refused(lambda: codes.spend(NOW + 10), CapacityError, "pairing_paused")
    assert isinstance(error, CapacityError)
    assert error.retry_after_s == 590


def test_the_pause_ends_code_by_code() -> None:
    codes = Codes()
    for second in range(3):
        codes.open(NOW + second)
    refused(lambda: codes.open(LATER - 0.01), CapacityError, "pairing_paused")
    assert codes.open(LATER) is codes.spend(LATER)
    refused(lambda: codes.open(LATER), CapacityError, "pairing_paused")
    assert codes.open(LATER + 1) is codes.spend(LATER + 1)


def test_a_refused_code_does_not_prolong_the_pause_nor_close_the_open_one() -> None:
    codes = Codes()
    for _ in range(3):
        latest = codes.open(NOW)
    for second in range(5):
        at = NOW + second
        refused(lambda at=at: codes.open(at), CapacityError, "pairing_paused")
    assert codes.spend(NOW + 5) is latest
    codes.open(LATER)


def test_the_pause_does_not_hide_that_pairing_went_well() -> None:
    codes = Codes()
    for _ in range(3):
        codes.open(NOW)
    codes.succeed(codes.spend(NOW))
    refused(lambda: codes.spend(NOW), ConfigError, "pairing_closed")


@given(st.lists(st.tuples(st.floats(0, 300), st.booleans()), max_size=60))
def test_three_codes_in_ten_minutes_and_one_try_each(steps: list[tuple[float, bool]]) -> None:
    codes, now = Codes(), 0.0
    opened_at: list[float] = []
    tried: list[str] = []
    given_out: list[str] = []
    for wait, opens in steps:
        now += wait
        try:
            if opens:
                given_out.append(codes.open(now).text)
                opened_at.append(now)
            else:
                tried.append(codes.spend(now).text)
        except BatonError:
            continue
    for first, fourth in zip(opened_at, opened_at[3:], strict=False):
        assert fourth - first >= CODE_LIFE_S - 1e-6
    assert len(set(tried)) == len(tried)
    assert set(tried) <= set(given_out)
