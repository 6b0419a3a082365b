"""Text in lines that a terminal can show, as it comes."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import terminal
from app.terminal import Words, step
from protocol.errors import ConfigError


def wrapped(pieces: list[str], width: int) -> str:
    words = Words(width)
    return "".join([*map(words.add, pieces), words.end()])


def test_lines_part_between_words_whatever_the_pieces() -> None:
    text = "The tides at new moon are called the spring tides.\n\n- one\n- two"
    expected = "The tides at new\nmoon are called the\nspring tides.\n\n- one\n- two"
    assert wrapped([text], 20) == expected
    assert wrapped(list(text), 20) == expected


def test_a_word_is_written_once_it_is_whole() -> None:
    words = Words(80)
    assert [words.add(piece) for piece in ("spr", "ing ti", "des ")] == ["", "spring", " tides"]


def test_a_word_that_no_line_holds_stays_whole() -> None:
    assert wrapped(["a", " ", "b" * 30, " c"], 10) == f"a\n{'b' * 30}\nc"


@given(
    st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 20),
)
def test_lines_are_filled(words: list[str], size: int, width: int) -> None:
    text = " ".join(words)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert wrapped(pieces, width) == textwrap.fill(text, width, break_long_words=False)


def test_without_a_terminal_a_step_says_when_it_begins_and_that_it_is_done(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "err", terminal.Console(stderr=True, highlight=False))
    with step("load [it]"):
        assert capfd.readouterr().err == "… load [it]\n"
    assert capfd.readouterr().err.startswith("✓ load [it] (0.")


def test_a_step_that_fails_is_not_done(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError), step("load"):
        raise ConfigError("x")
    assert "✓" not in capfd.readouterr().err
