"""Requests: the latest that have ended, each of which opens to everything that is known of it."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from app.dashboard.pages import parts
from app.dashboard.pages.markup import NOTHING, Html, joined, tag
from app.dashboard.pages.screen import Browser, Drawn, Memo, Rows, Seen, Still, part, piece, rows
from app.view import words
from app.view.facts import Fact
from app.view.requests import SOURCES, Ended, ended
from protocol.status.snapshot import MOST_RECENT, Finished, Recent, Snapshot

_AGE_S: Final = 5.0
_AT_ONCE: Final = 40
"""Rows that are made in one go; who asks for a token does not wait for all of them."""

_BASE: Final = "recent.finished"
_OUTCOMES: Final = ("completed", "refused", "failed", "cancelled")
_NUMBERS: Final = ("Prompt", "Reused", "Prefilled", "Sent", "First token", "Total", "Rate")
_COLUMNS: Final = ("When", "Source", "Outcome", *_NUMBERS)


class RequestsPage(Still):
    """``/requests``: rows are made once; a new one goes before the others."""

    title = "Requests"

    def __init__(self) -> None:
        self._memo = Memo()
        self._snapshot: Snapshot | None = None
        self._rows: dict[str, Html] = {}

    def draw(self, seen: Seen) -> Drawn:
        """Every part."""
        recent = seen.snapshot.recent
        more = min(len(recent.finished), max(_AT_ONCE, len(self._rows) + _AT_ONCE))
        if self._snapshot is None or self._snapshot.recent is not recent or more > len(self._rows):
            self._rows = _with_new(only(seen.snapshot, more), self._rows, seen.now)
        self._snapshot = seen.snapshot
        tick = int(seen.now / _AGE_S)
        all_kept = len(recent.finished) >= MOST_RECENT
        return {
            "most": self._memo.of("most", (all_kept,), lambda: _most(all_kept)),
            "requests": self._memo.of(
                "requests",
                (recent, len(self._rows), tick),
                lambda: Rows(self._rows, _ages(recent.finished[:more], seen.now), _BASE),
            ),
        }

    def body(self, drawn: Drawn) -> Html:
        """Everything below the heading."""
        head = tag(
            "tr",
            *(tag("th", name, scope="col", role="columnheader") for name in _COLUMNS),
            role="row",
        )
        caption = tag("caption", "Requests that have ended, the latest first", class_="sr")
        before = joined(caption, tag("thead", head, role="rowgroup"))
        table = rows(
            "requests", "table", drawn["requests"], before, class_="requests", role="table"
        )
        shown = tag(
            "section",
            tag(
                "div",
                _filter("source", "Source", tuple(SOURCES)),
                _filter("outcome", "Outcome", _OUTCOMES),
                piece(drawn, "most"),
                class_="filters",
            ),
            table,
            tag("p", "No request to show.", class_="none", data_none=True, hidden=True),
            aria_label="Requests that have ended",
        )
        return joined(shown, parts.glossary("requests"))

    async def act(self, said: dict[str, Any], browser: Browser) -> None:
        """Open a request."""
        if said.get("do") != "details" or self._snapshot is None:
            return
        finished = self._snapshot.recent.finished
        place = next((at for at, one in enumerate(finished) if one.id == said.get("id")), None)
        if place is not None:
            found = ended(only(self._snapshot, place + 1), 0.0)[place]
            browser.tell([("set", f"details-{found.id}", details(found, f"details-{found.id}"))])


def details(one: Ended, name: str) -> Html:
    """Everything that is known of a request, as a part called ``name``."""
    reasons = tag(
        "dl",
        *(
            tag("div", tag("dt", tag("code", code)), tag("dd", meaning or NOTHING), class_="reason")
            for code, meaning in one.reasons
        ),
        class_="reasons",
    )
    return part(
        name,
        "div",
        tag("p", "Reuse ", one.shortfall, class_="shortfall") if one.shortfall else NOTHING,
        parts.legend(one.segments),
        parts.facts(one.facts, "facts two"),
        reasons if one.reasons else NOTHING,
        tag("p", tag("small", "id "), tag("code", one.id)),
        class_="details",
    )


def _with_new(snapshot: Snapshot, known: dict[str, Html], now: float) -> dict[str, Html]:
    """The rows in their order; only those that are not ``known`` are made."""
    finished = snapshot.recent.finished
    new = [at for at, one in enumerate(finished) if one.id not in known]
    made = ended(only(snapshot, new[-1] + 1), now) if new else ()
    fresh = {made[at].id: _row(made[at], at) for at in new}
    return {one.id: known.get(one.id) or fresh[one.id] for one in finished}


def only(snapshot: Snapshot, most: int) -> Snapshot:
    """A snapshot that tells of the latest ``most`` requests alone: no more is worded than shown."""
    return msgspec.structs.replace(snapshot, recent=Recent(snapshot.recent.finished[:most]))


def _most(all_kept: bool) -> Html:
    """That there were more, where there may have been."""
    text = f"The latest {MOST_RECENT} are shown." if all_kept else ""
    return part("most", "p", text, class_="none")


def _ages(finished: tuple[Finished, ...], now: float) -> dict[str, str]:
    return {one.id: words.ago(one.ended_at, now) for one in finished}


def _row(one: Ended, place: int) -> Html:
    numbers = (
        *(one.tokens, one.reused, one.prefilled, one.transferred),
        *(one.first_token, one.total, one.speed),
    )
    when = tag(
        "button",
        tag("span", one.ago, data_age=True),
        type="button",
        class_="toggle",
        aria_expanded="false",
        aria_controls=f"more-{one.id}",
        data_expands=f"more-{one.id}",
        data_do="details",
        data_id=one.id,
    )
    cells = (
        _cell("When", when, "when"),
        _cell("Source", joined(parts.source(one.source), parts.badge(one.fallback))),
        _cell("Outcome", parts.badge(one.outcome, "outcome")),
        *(_number(name, fact) for name, fact in zip(_NUMBERS, numbers, strict=True)),
    )
    wide = len(_COLUMNS)
    return tag(
        "tbody",
        tag("tr", *cells, role="row", class_="first"),
        tag(
            "tr",
            tag("td", parts.bar(one.segments), colspan=wide, role="cell"),
            role="row",
            class_="stack",
        ),
        tag(
            "tr",
            tag(
                "td",
                part(f"details-{one.id}", "div", tag("p", "…", class_="none"), class_="details"),
                colspan=wide,
                role="cell",
            ),
            id=f"more-{one.id}",
            role="row",
            hidden=True,
        ),
        role="rowgroup",
        data_key=one.id,
        data_request=one.id,
        data_base=f"{_BASE}.{place}",
        data_source=one.source.text if one.source else "",
        data_outcome=one.outcome.text,
    )


def _cell(name: str, content: Html, class_: str | None = None) -> Html:
    return tag("td", content, role="cell", data_label=name, class_=class_)


def _number(name: str, fact: Fact) -> Html:
    return _cell(name, parts.value(fact), "number")


def _filter(name: str, label: str, values: tuple[str, ...]) -> Html:
    return tag(
        "label",
        tag("span", label),
        tag(
            "select",
            tag("option", "all", value=""),
            *(tag("option", one, value=one) for one in values),
            data_filter=name,
            name=name,
        ),
    )
