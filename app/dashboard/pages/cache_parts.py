"""How the Cache page is drawn: its parts as HTML."""

from __future__ import annotations

from typing import Final

from app.dashboard.pages import parts
from app.dashboard.pages.dialogs import dialog
from app.dashboard.pages.manage import NOT_YOURS
from app.dashboard.pages.markup import NOTHING, Html, tag
from app.dashboard.pages.screen import Rows, part
from app.view.cache import Event
from app.view.exact import exactly
from app.view.facts import Fact
from app.view.keeping import Doing, Kept, Overview
from mac_decoder.housekeeping.house import Gone

MOST_TYPED: Final = 32

_WALK: Final = parts.term("Disk footprint", "disk footprint")


def section(title: str, *content: str, heading: str = "") -> Html:
    name = title.lower()
    return tag(
        "section",
        tag("h2", heading or title, id=f"h-{name}"),
        *content,
        aria_labelledby=f"h-{name}",
        class_=f"s-{name}",
    )


def walked(found: tuple[Fact, ...]) -> Html:
    shown = parts.facts(found) if found else tag("p", "The disk is being walked.", class_="none")
    return part("walked", "div", tag("div", tag("h3", _WALK), shown, class_="card"))


def house(*, may_manage: bool) -> Html:
    return part(
        "house",
        "div",
        tag(
            "div",
            *(
                tag("button", name, type="button", data_do=name.lower(), disabled=not may_manage)
                for name in ("Verify", "Prune", "Clear")
            ),
            class_="buttons",
        ),
        NOTHING if may_manage else NOT_YOURS,
        class_="house",
    )


def prune_form(wrong: str = "") -> Html:
    return dialog(
        "Prune to a size",
        tag(
            "form",
            tag(
                "p",
                "The least recently used goes first, until at most this much is on disk. Cuts go "
                "whole, so that less can be left.",
            ),
            tag("label", "Size", for_="prune-size"),
            tag(
                "input",
                id="prune-size",
                name="size",
                required=True,
                maxlength=MOST_TYPED,
                placeholder="20GB",
                autofocus=True,
                autocomplete="off",
                aria_describedby="prune-wrong" if wrong else None,
            ),
            tag("p", wrong, id="prune-wrong", class_="wrong", role="alert") if wrong else NOTHING,
            tag(
                "div",
                tag("button", "Cancel", type="button", data_dismiss=True),
                tag("button", "Go on", type="submit", class_="main"),
                class_="buttons end",
            ),
            data_do="prune-to",
        ),
    )


def nothing_to_prune(gone: Gone, to_bytes: int) -> Html:
    left = "" if gone.left is None else f"On disk are {exactly(gone.left)}. "
    return dialog(
        "There is nothing to prune",
        tag("p", parts.unbroken(f"{left}Nothing has to go for {exactly(to_bytes)}.")),
        tag(
            "div",
            tag("button", "Close", type="button", data_dismiss=True, autofocus=True),
            class_="buttons end",
        ),
    )


def operation(found: Doing | None) -> Html:
    if found is None:
        return part("operation", "div")
    shown = (
        parts.progress(found.share, found.title)
        if found.running
        else tag("i", class_="dot", aria_hidden="true", data_tone=found.tone)
    )
    stop = tag("button", "Stop", type="button", data_do="cancel-operation")
    return part(
        "operation",
        "div",
        tag("p", tag("b", found.title), class_="what", role="status"),
        tag(
            "div",
            shown,
            tag("span", parts.unbroken(found.text)),
            class_="progress" if found.running else "came",
        ),
        stop if found.running else NOTHING,
        class_="card operation",
    )


def conversations(found: Overview | None, *, may_manage: bool) -> Rows:
    if found is None or not found.shown:
        text = "They are being looked over." if found is None else "Nothing is kept yet."
        return Rows({"none": tag("p", text, class_="none", data_key="none")})
    return Rows({one.id: _conversation(one, may_manage) for one in found.shown})


def _conversation(one: Kept, may_manage: bool) -> Html:
    titles = ("Position", "Taken at", "Kept in", "State", "File", "Used", "")
    head = tag(
        "tr",
        *(
            tag(
                "th", title, scope="col", class_="number" if title in ("Position", "File") else None
            )
            if title
            else tag("td")
            for title in titles
        ),
    )
    cuts = (
        tag(
            "tr",
            tag("td", cut.position, class_="number"),
            tag("td", cut.why),
            tag("td", ", ".join(cut.tiers)),
            tag("td", cut.state),
            tag("td", cut.bytes, class_="number"),
            tag("td", cut.used),
            tag("td", tag("small", cut.note)),
        )
        for cut in one.cuts
    )
    made_by = tag("p", tag("small", "Tokens " + "; ".join(one.made_by))) if one.made_by else ""
    return tag(
        "details",
        tag(
            "summary",
            tag("b", one.title),
            tag("span", tag("code", one.mark), ", ", one.count, class_="mark"),
            tag("span", *(parts.badge(tier) for tier in one.tiers), class_="badges"),
            tag("span", one.size, class_="size"),
            tag("span", one.used, class_="age"),
        ),
        parts.facts(one.facts, "facts two"),
        tag(
            "div",
            tag("table", tag("thead", head), tag("tbody", *cuts), class_="cuts"),
            class_="scroll",
            tabindex="0",
            role="group",
            aria_label="Cuts",
        ),
        made_by,
        tag(
            "button",
            "Forget",
            type="button",
            data_do="forget",
            data_id=one.id,
            disabled=not may_manage,
        ),
        data_key=one.id,
    )


def rest(found: Overview | None) -> Html:
    text = f"Not shown: {found.rest}." if found is not None and found.rest else ""
    return part("rest", "p", text, class_="none")


def events(found: tuple[Event, ...]) -> Html:
    if not found:
        return part("events", "div", tag("p", "Nothing has gone from the disk yet.", class_="none"))
    return part(
        "events",
        "div",
        tag("ul", *(_event(one) for one in found), class_="events card"),
    )


def _event(one: Event) -> Html:
    return tag(
        "li",
        tag(
            "span",
            tag("span", one.kind, class_="badge", data_tone=one.tone),
            tag("code", one.reason),
            class_="badges",
        ),
        tag("span", one.means, class_="none"),
        tag(
            "span",
            *(_counted(fact) for fact in (one.files, one.cuts, one.bytes)),
            class_="counted",
        ),
        tag("span", one.ago, class_="age"),
    )


def _counted(fact: Fact) -> Html:
    return tag("span", tag("small", fact.label), " ", parts.value(fact, "b"))
