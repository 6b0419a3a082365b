"""One short line for whatever stands where a decoder should."""

from __future__ import annotations

from typing import get_args

import pytest

from app.view.standing import MOST_CODE, Standing, State, known_code, one_line, sentence

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    "found", ["", "X", "a b", "9a", "_a", "ä", "a\n", "a" * (MOST_CODE + 1), "a" * 100_000, 7, None]
)
def test_what_has_not_the_form_of_a_code_is_unknown(found: object) -> None:
    assert known_code(found) == "unknown"


@pytest.mark.parametrize("found", ["a", "no_answer", "tls_1_3", "a" * MOST_CODE])
def test_what_has_it_is_shown(found: str) -> None:
    assert known_code(found) == found


@pytest.mark.parametrize("state", get_args(State))
@pytest.mark.parametrize("reason", ["x" * 100_000, "two\nlines", "<b>"])
def test_no_line_holds_what_somebody_sent(state: State, reason: str) -> None:
    words, _ = sentence(Standing(state, URL, reason))
    assert words == f"{sentence(Standing(state, URL))[0]} (unknown)"


def test_a_refusal_has_its_code_and_for_some_a_sentence() -> None:
    said = {
        reason: sentence(Standing("refused", URL, reason))[0]
        for reason in ("host_not_allowed", "no_answer", "not_a_decoder")
    }
    assert said == {
        "host_not_allowed": "The decoder refuses this app (host_not_allowed)",
        "no_answer": "What listens there does not answer (no_answer)",
        "not_a_decoder": "What listens there is no decoder (not_a_decoder)",
    }


def test_what_is_wrong_here_is_said_in_one_line() -> None:
    said = "port in /x/config.toml is a number from 1 to 65535"
    standing = Standing("refused", URL, "settings_invalid", said)
    assert sentence(standing) == (f"{said} (settings_invalid)", "bad")
    long, _ = sentence(Standing("refused", URL, "settings_invalid", "a\nb" * 1000))
    assert "\n" not in long
    assert len(long) < 200


def test_a_line_is_as_long_as_there_is_room() -> None:
    assert one_line("a" * 161) == "a" * 160 + "…"
    assert one_line("a" * 161, 600) == "a" * 161
    assert one_line("a" * 601, 600) == "a" * 600 + "…"
