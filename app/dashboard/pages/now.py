"""Now: what is in hand, what has just ended, and how the machine stands."""

from __future__ import annotations

from typing import Final

from app.dashboard.pages import parts
from app.dashboard.pages.markup import NOTHING, Html, joined, tag
from app.dashboard.pages.requests import only
from app.dashboard.pages.screen import Drawn, Memo, Rows, Seen, Still, part, piece, rows
from app.view.cache import gains
from app.view.facts import Fact
from app.view.nodes import NO_PRODUCER, Producer, producers
from app.view.overview import counts, engine
from app.view.requests import Ended, Running, ended, running
from protocol.status.snapshot import Snapshot

LATEST: Final = 5
"""How many of the requests that have ended are shown here."""

_AGE_S: Final = 5.0
"""How long a text that tells an age may be old."""


class NowPage(Still):
    """``/``"""

    title = "Now"

    def __init__(self) -> None:
        self._memo = Memo()

    def draw(self, seen: Seen) -> Drawn:
        """Every part."""
        memo, snapshot, tick = self._memo, seen.snapshot, int(seen.now / _AGE_S)
        return {
            "in-hand": memo.of(
                "in-hand",
                (snapshot.requests.in_hand, snapshot.nodes, tick),
                lambda: _in_hand(memo, running(snapshot, seen.now)),
            ),
            "latest": memo.of(
                "latest", (snapshot.recent, tick), lambda: _latest(memo, snapshot, seen.now)
            ),
            "engine": memo.of(
                "engine",
                (snapshot.engine,),
                lambda: part("engine", "div", parts.facts(engine(snapshot))),
            ),
            "counts": memo.of(
                "counts",
                (snapshot.requests.outcomes, snapshot.engine, snapshot.door),
                lambda: _counts(snapshot),
            ),
            "producers": memo.of(
                "producers",
                (snapshot.nodes, tick),
                lambda: _producers(producers(snapshot, seen.now)),
            ),
            "gains": memo.of(
                "gains",
                (snapshot.cache, snapshot.decoder, tick),
                lambda: part("gains", "div", parts.facts(gains(snapshot, seen.now))),
            ),
        }

    def body(self, drawn: Drawn) -> Html:
        """Everything below the heading."""
        return joined(
            _section(
                "In hand", rows("in-hand", "div", drawn["in-hand"], class_="cards"), "in-hand"
            ),
            _section(
                "Latest",
                rows("latest", "ul", drawn["latest"], class_="latest"),
                "latest",
                tag("a", "All requests", href="/requests", class_="more"),
            ),
            tag(
                "div",
                tag(
                    "div",
                    _section("Engine", piece(drawn, "engine"), "engine"),
                    _section("Producers", piece(drawn, "producers"), "producers"),
                ),
                tag(
                    "div",
                    _section("Gains", piece(drawn, "gains"), "gains"),
                    _section("Counts", piece(drawn, "counts"), "counts"),
                ),
                class_="columns",
            ),
            parts.glossary("now"),
        )


def _section(title: str, content: Html, name: str, more: Html = NOTHING) -> Html:
    heading = tag("div", tag("h2", title, id=f"h-{name}"), more, class_="heading")
    return tag("section", heading, content, aria_labelledby=f"h-{name}", class_=f"s-{name}")


def _in_hand(memo: Memo, found: tuple[Running, ...]) -> Rows:
    if not found:
        return Rows({"none": tag("p", "No request in hand.", class_="none", data_key="none")})
    return Rows(
        {
            one.id: memo.of(f"card {at}", (one,), lambda one=one: _card(one))
            for at, one in enumerate(found)
        }
    )


def _card(one: Running) -> Html:
    """A request in hand. Every line keeps its height, whatever is known of it."""
    # One place for how far it is and, once that is known, for what it took.
    filling = bool(one.progress_text)
    bar = parts.progress(one.progress, one.title) if filling else parts.bar(one.segments)
    return tag(
        "article",
        tag(
            "div",
            parts.badge(one.stage),
            parts.source(one.source),
            tag("code", one.id, class_="id"),
            class_="badges",
        ),
        tag("p", one.title, class_="title"),
        tag("div", bar, class_="far"),
        parts.legend(one.segments) or tag("div", class_="legend"),
        parts.facts(one.facts, "facts line"),
        class_="card in-hand",
        data_key=one.id,
        data_request=one.id,
        aria_label=f"Request {one.id}",
    )


def _latest(memo: Memo, snapshot: Snapshot, now: float) -> Rows:
    found = ended(only(snapshot, LATEST), now)
    if not found:
        return Rows(
            {"none": tag("li", "No request has ended yet.", class_="none", data_key="none")}
        )
    return Rows(
        {one.id: _row(one, at) for at, one in enumerate(found)},
        {one.id: one.ago for one in found},
        "recent.finished",
    )


def _row(one: Ended, place: int) -> Html:
    return tag(
        "li",
        tag(
            "div",
            tag(
                "span",
                parts.source(one.source),
                parts.badge(one.fallback),
                parts.badge(one.outcome, "outcome"),
                class_="badges",
            ),
            _short(one.tokens),
            _short(one.reused),
            _short(one.first_token),
            _short(one.total),
            _short(one.speed),
            tag("span", one.ago, class_="age", data_age=True),
            class_="line",
        ),
        parts.bar(one.segments),
        parts.legend(one.segments),
        data_key=one.id,
        data_base=f"recent.finished.{place}",
        data_request=one.id,
    )


def _short(fact: Fact) -> Html:
    return tag("span", tag("small", fact.label), parts.value(fact, "b"), class_="short")


def _producers(found: tuple[Producer, ...]) -> Html:
    if not found:
        return part("producers", "div", tag("p", NO_PRODUCER + ".", class_="none"))
    return part(
        "producers",
        "div",
        tag(
            "ul",
            *(
                tag(
                    "li",
                    tag("i", class_="dot", aria_hidden="true", data_tone=one.state.tone),
                    one.line,
                    data_node=one.called,
                )
                for one in found
            ),
            class_="lines",
        ),
    )


def _counts(snapshot: Snapshot) -> Html:
    found = counts(snapshot)
    if not found:
        return part("counts", "div", tag("p", "Nothing has been counted yet.", class_="none"))
    return part(
        "counts",
        "div",
        *(joined(tag("h3", title), parts.facts(those)) for title, those in found),
    )
