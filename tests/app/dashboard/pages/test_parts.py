"""Every number says where it comes from."""

from __future__ import annotations

import re

from app.dashboard.pages import parts
from app.view import facts
from app.view.facts import Fact, Meter
from app.view.glossary import MEANINGS
from app.view.requests import segments
from protocol.status.figures import UNAVAILABLE
from tests.app.view.snapshots import SERVED, about, exactly


def test_a_number_bears_its_place_its_value_and_its_basis() -> None:
    made = parts.value(facts.number("rate", about(49.52), "a.b", "tokens/s"))
    assert 'data-path="a.b"' in made
    assert 'data-value="49.52"' in made
    assert 'data-basis="estimated"' in made
    assert ">≈ 49.5 tokens/s<" in made


def test_what_is_not_known_is_a_dash_with_a_name() -> None:
    made = parts.labelled(facts.number("energy", UNAVAILABLE, "a.b", "J", note="since then"))
    assert 'aria-label="not available">–<' in made
    assert 'data-value="null"' in made
    assert "<small>since then</small></dt>" in made


def test_no_line_ends_between_a_number_and_what_it_counts() -> None:
    made = parts.unbroken("Prune to 3,000 bytes (3.0 kB)? ≈ 14 files go")
    assert made.split(" ") == [
        "Prune",
        "to",
        "3,000\xa0bytes",
        "(3.0\xa0kB)?",
        "≈\xa014\xa0files",
        "go",
    ]


def test_what_has_no_place_has_none() -> None:
    assert "data-" not in parts.value(Fact("began", "just now"))


def test_a_bar_is_as_long_as_its_parts_and_says_what_they_are() -> None:
    found = segments(SERVED.phases, "p")
    made = parts.bar(found)
    assert 'aria-label="Phases: waiting 10 ms, computing 160 ms, checking 30 ms"' in made
    assert [float(grow) for grow in re.findall(r"flex-grow:([\d.]+)", made)] == [0.05, 0.8, 0.15]
    assert parts.legend(found).count("data-path") == 3
    assert "role" not in parts.bar(())


def test_a_word_of_batons_own_is_explained_where_it_stands_and_to_whoever_listens() -> None:
    made = parts.labelled(Fact("cuts", "3", term="cut"))
    assert 'tabindex="0"' in made
    assert MEANINGS["cut"] in made
    (named,) = re.findall(r'aria-describedby="([^"]+)"', made)
    assert f'<span id="{named}">{MEANINGS["cut"]}</span>' in parts.glossary("cache")


def test_a_part_of_no_length_is_not_drawn() -> None:
    assert (
        parts.bar(segments({"queue": exactly(0.0), "compute": exactly(5.0)}, "p")).count("<i") == 1
    )


def test_a_meter_has_a_name_and_a_value() -> None:
    made = parts.meter(Meter("disk", "3 of 4", 0.75), parts.term("Cap", "cap accounting"))
    assert ">Cap</dfn></h3>" in made
    assert 'aria-valuenow="75"' in made
    assert 'role="meter"' not in parts.meter(Meter("live", "2 sequences", None))
