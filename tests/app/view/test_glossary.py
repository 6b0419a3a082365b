"""Words that are shown are explained, and those that are explained are shown."""

from __future__ import annotations

import itertools
import math
import re
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import pytest

from app.dashboard.pages.about import AboutPage
from app.dashboard.pages.cache import CachePage
from app.dashboard.pages.nodes import NodesPage
from app.dashboard.pages.now import NowPage
from app.dashboard.pages.requests import RequestsPage, details
from app.dashboard.pages.screen import Page as Drawable
from app.dashboard.pages.walk import Walk
from app.view.glossary import MEANINGS, PHASES, WORDS, Page, listed
from app.view.requests import KINDS, SOURCES, ended
from tests.app.dashboard.pages.drawing import seen
from tests.app.view.snapshots import IDLE, NOW


def pages(state: Path) -> dict[Page, Drawable]:
    return {
        "now": NowPage(),
        "requests": RequestsPage(),
        "cache": CachePage(None, Walk(None), Path("kv")),
        "nodes": NodesPage(state, "file"),
        "about": AboutPage(),
    }


@pytest.mark.parametrize("page", ["now", "requests", "cache", "nodes", "about"])
def test_what_a_page_marks_as_a_word_it_explains(page: Page, tmp_path: Path) -> None:
    made = pages(tmp_path)[page]
    html = made.body(made.draw(seen(IDLE)))
    if page == "requests":
        html += details(ended(IDLE, NOW)[0], "details")
    marked = re.findall(r'aria-describedby="(word-[^"]+)"', html)
    assert marked
    for name in marked:
        assert html.count(f' id="{name}"') == 1


def test_every_meaning_is_on_a_page() -> None:
    assert {word for words in WORDS.values() for word in words} == {*MEANINGS}
    assert {*WORDS} == {*get_args(Page)}
    for page in WORDS:
        assert all(meaning.endswith(".") for _, meaning in listed(page))


def test_every_source_and_every_phase_that_is_shown_is_explained() -> None:
    for page in ("now", "requests", "try"):
        words: Any = {word for word, _ in listed(page)}
        # Try it asks one prompt at a time.
        assert {*SOURCES} - ({"mixed"} if page == "try" else set()) <= words
        assert {called for called, *_ in PHASES.values()} <= words


@pytest.mark.parametrize("code", PHASES)
def test_what_goes_on_in_a_phase_is_a_sentence(code: str) -> None:
    _, says = PHASES[code]
    assert says[0].isupper()
    assert says.endswith(".")
    assert re.search(r"\b(is|are|waits|gives|joins|becomes|travel|could|came)\b", says)


STYLE = (resources.files("app.dashboard") / "assets" / "baton.css").read_text()


def test_every_phase_has_a_colour() -> None:
    assert {*KINDS} == {*PHASES}
    coloured = set(re.findall(r'^\[data-kind="(\w+)"\]', STYLE, re.MULTILINE))
    assert coloured == {*KINDS.values()}


@pytest.mark.parametrize("theme", STYLE.split("--ground:")[1:])
def test_colours_of_phases_are_told_apart(theme: str) -> None:
    """From each other (CIE76), and from what they are on (WCAG 2.2, 1.4.11)."""
    colours = dict(re.findall(r"--k-(\w+): #(\w{6});", theme.partition("}")[0]))
    assert {*colours} == {*KINDS.values()}
    (surface,) = re.findall(r"--surface: #(\w{6});", theme.partition("}")[0])
    for kind, colour in colours.items():
        lighter, darker = sorted((luminance(colour), luminance(surface)), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 3, kind
    for one, other in itertools.combinations(colours, 2):
        assert math.dist(lab(colours[one]), lab(colours[other])) >= 20, (one, other)


def xyz(colour: str) -> tuple[float, float, float]:
    """CIE XYZ of an sRGB colour, of 1 for white."""
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (byte / 255 for byte in bytes.fromhex(colour))
    )
    return (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
    )


def luminance(colour: str) -> float:
    return xyz(colour)[1]


def lab(colour: str) -> tuple[float, float, float]:
    x, y, z = (
        part ** (1 / 3) if part > 0.008856 else 7.787 * part + 4 / 29 for part in xyz(colour)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)
