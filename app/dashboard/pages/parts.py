"""The parts of the view as HTML: a fact, a badge, a bar. Pure; words and numbers are the view's.

A fact's element says where its number comes from: ``data-path`` in the snapshot, ``data-value``
as JSON, and ``data-basis``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from app.dashboard.pages.markup import NOTHING, Attribute, Html, joined, tag
from app.view import words
from app.view.facts import Badge, Fact, Meter, Segment
from app.view.glossary import MEANINGS, Page, listed

_PAIRED: Final = re.compile(r"(?<=[\d≈]) (?=\w)")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_NOT_AVAILABLE: Final = tag("span", words.DASH, role="img", aria_label="not available")


def unbroken(text: str) -> str:
    """A text in which no line ends between a number and what it counts."""
    return _PAIRED.sub("\N{NO-BREAK SPACE}", text)


def known(fact: Fact) -> dict[str, Attribute]:
    """The attributes by which a fact's element says where its number comes from."""
    if not fact.path:
        return {}
    value = msgspec.json.encode(fact.value).decode()
    return {"data_path": fact.path, "data_value": value, "data_basis": fact.basis}


def figure(fact: Fact) -> Html:
    """A fact's text; a dash has a name."""
    if fact.text == words.DASH:
        return _NOT_AVAILABLE
    return tag("code", fact.text) if _DIGEST.fullmatch(fact.text) else joined(fact.text)


def value(fact: Fact, name: str = "span", **attributes: Attribute) -> Html:
    """A fact without its label."""
    return tag(name, figure(fact), **known(fact), data_tone=_tone(fact), **attributes)


def labelled(fact: Fact) -> Html:
    """A fact in a description list. Its note stands below its name, so that numbers are in line."""
    name = term(fact.label, fact.term) if fact.term else fact.label
    note = tag("small", fact.note) if fact.note else None
    return tag("div", tag("dt", name, note), tag("dd", value(fact)), class_="fact")


def term(text: str, word: str) -> Html:
    """A word of Baton's own. What it means is shown where it is pointed at or has the focus, and
    is told to whoever listens: the text stands in :func:`glossary`.
    """
    return tag(
        "dfn",
        text,
        class_="term",
        tabindex="0",
        data_means=MEANINGS[word],
        aria_describedby=_named(word),
    )


def glossary(page: Page) -> Html:
    """Baton's own words that stand on a page, at its foot."""
    meanings = listed(page)
    rows = (tag("div", tag("dt", word), tag("dd", says), class_="fact") for word, says in meanings)
    # What is folded away is told to nobody; what is hidden is where something refers to it.
    told = (tag("span", says, id=_named(word)) for word, says in meanings)
    return tag(
        "div",
        tag(
            "details",
            tag("summary", tag("b", "Words on this page")),
            tag("dl", *rows, class_="facts wide"),
        ),
        tag("div", *told, hidden=True),
        class_="words",
    )


def _named(word: str) -> str:
    return f"word-{word.replace(' ', '-')}"


def facts(found: Iterable[Fact], class_: str = "facts") -> Html:
    """Facts with their labels."""
    return tag("dl", *(labelled(fact) for fact in found), class_=class_)


def badge(found: Badge | None, class_: str = "") -> Html:
    """A word in a frame; what it means is its title."""
    if found is None:
        return NOTHING
    return tag(
        "span",
        found.text,
        class_=f"badge {class_}".rstrip(),
        data_tone=found.tone,
        title=found.note or None,
    )


def source(found: Badge | None) -> Html:
    """The badge of where a cache came from."""
    return badge(found, "source")


def bar(segments: Sequence[Segment]) -> Html:
    """A stacked bar. Its accessible text lists what the legend shows."""
    if not segments:
        return tag("div", class_="bar empty", aria_hidden="true")
    said = ", ".join(f"{one.label} {one.fact.text}" for one in segments)
    return tag(
        "div",
        *(
            tag("i", data_kind=one.kind, style=f"flex-grow:{one.share:.4f}")
            for one in segments
            if one.share > 0
        ),
        class_="bar",
        role="img",
        aria_label=f"Phases: {said}",
    )


def legend(segments: Sequence[Segment]) -> Html:
    """What the parts of a stacked bar are."""
    if not segments:
        return NOTHING
    return tag(
        "ul",
        *(
            tag(
                "li",
                tag("i", data_kind=one.kind, aria_hidden="true"),
                tag("span", one.label),
                value(one.fact, "b"),
                title=one.note or None,
            )
            for one in segments
        ),
        class_="legend",
        aria_label="Phases",
    )


def progress(share: float | None, name: str) -> Html:
    """How far something is; without ``share`` nothing is known of it."""
    return tag("progress", max=1, value=None if share is None else round(share, 4), aria_label=name)


def meter(found: Meter, title: Html = NOTHING) -> Html:
    """How much of something is used, with what there is to know of it."""
    head = tag("h3", title or found.label)
    line = tag("p", found.text, class_="meter-text")
    used = NOTHING
    if found.share is not None:
        full = "warn" if found.share > 0.9 else None
        used = tag(
            "div",
            tag("i", style=f"width:{found.share * 100:.2f}%"),
            class_="meter",
            role="meter",
            aria_label=f"{found.label}: {found.text}",
            aria_valuemin=0,
            aria_valuemax=100,
            aria_valuenow=round(found.share * 100),
            data_tone=full,
        )
    return tag("div", head, line, used, facts(found.facts), class_="card")


def _tone(fact: Fact) -> str | None:
    return None if fact.tone == "plain" else fact.tone
