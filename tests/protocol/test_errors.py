"""How an error looks on every terminal of Baton's."""

from __future__ import annotations

from protocol.errors import CapacityError, ConfigError, IdentityMismatch, told


def test_an_error_is_a_line_and_what_is_known_of_it() -> None:
    error = ConfigError(
        "The port is taken.",
        reason="port_taken",
        field="port",
        found=8000,
        expected="a free one",
        hint="stop the other program\nor choose another",
    )
    assert told(error, "baton serve") == (
        "baton serve: error: The port is taken (port_taken)\n"
        "  field: port\n"
        "  found: 8000\n"
        "  expected: a free one\n"
        "  → stop the other program\n"
        "    or choose another"
    )


def test_what_is_not_known_has_no_line() -> None:
    assert told(CapacityError("full"), "baton") == "baton: error: full (capacity_exceeded)"


def test_another_model_comes_with_what_helps_even_where_the_peer_said_nothing() -> None:
    assert "baton node send" in (IdentityMismatch("x").hint or "")
    assert IdentityMismatch("x", hint="better").hint == "better"
    assert ConfigError("x").hint is None


def test_a_value_cannot_play_with_the_terminal() -> None:
    error = ConfigError("no", field="\x1b[31mX", found="a\nb", expected="\u202e")
    assert told(error, "baton").splitlines()[1:] == [
        "  field: \\x1b[31mX",
        "  found: a\\nb",
        "  expected: \\u202e",
    ]
