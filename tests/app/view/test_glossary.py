"""Words that are shown are explained, and those that are explained are shown."""

from __future__ import annotations

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
        "cache": CachePage(None, Walk(None)),
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
        assert {*SOURCES} - {"mixed"} <= words
        assert {called for called, *_ in PHASES.values()} <= words


def test_every_phase_has_a_colour() -> None:
    assert {*KINDS} == {*PHASES}
    style = (resources.files("app.dashboard") / "assets" / "baton.css").read_text()
    coloured = set(re.findall(r'^\[data-kind="(\w+)"\]', style, re.MULTILINE))
    assert coloured == {*KINDS.values()}
