"""How the Nodes page is drawn: its parts as HTML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from app.dashboard.pages import parts
from app.dashboard.pages.dialogs import dialog, problem
from app.dashboard.pages.manage import NOT_YOURS
from app.dashboard.pages.markup import NOTHING, Html, joined, tag
from app.dashboard.pages.screen import part
from app.discovery import Seen as Answered
from app.view.nodes import Producer
from app.view.qualifications import History
from protocol.errors import BatonError
from protocol.pairing.code import MAX_TYPED
from trust.peers import Peer

LONGEST_HOST: Final = 260
LONGEST_NAME: Final = 64
_NUMBERS: Final = ("Largest difference", "Allowed")


@dataclass(frozen=True)
class Known:
    """A paired producer, and what is on record of it."""

    peer: Peer
    past: History | None


@dataclass(frozen=True)
class Adding:
    """The dialog in which a producer is added."""

    host: str = ""
    says: str = ""
    wrong: BatonError | None = None
    seen: tuple[Answered, ...] | None = None
    busy: bool = False


def lacks(text: str, command: Html) -> Html:
    return tag(
        "div",
        tag("p", f"{text} To send it, in a terminal here:"),
        tag("p", command),
        class_="callout",
    )


def adding(may_manage: bool) -> Html:
    return part(
        "adding",
        "div",
        tag(
            "div",
            tag(
                "button",
                "Add a producer",
                type="button",
                data_do="add",
                class_="main",
                disabled=not may_manage,
            ),
            class_="buttons",
        ),
        NOTHING if may_manage else NOT_YOURS,
        class_="house",
    )


def node(one: Producer, known: Known | None, may_manage: bool, lacks: Html) -> Html:
    name = known.peer.name if known is not None else one.called
    return tag(
        "article",
        tag(
            "div",
            tag("h2", name),
            parts.badge(one.state),
            tag("code", one.name, class_="id") if name != one.name else NOTHING,
            class_="badges",
        ),
        tag("p", one.line.removeprefix(f"{one.called}: "), class_="title"),
        tag("p", one.detail, class_="none") if one.detail else NOTHING,
        lacks,
        parts.facts(one.facts, "facts two"),
        tag("h3", parts.term("Latest qualification", "qualify")),
        parts.facts(one.qualified, "facts two"),
        joined(tag("h3", "Failures"), parts.facts(one.failures, "facts two"))
        if one.failures
        else NOTHING,
        _history(known.past if known is not None else None),
        _actions(one.name, may_manage)
        if known is not None
        else tag("p", "Not paired: the decoder was given it with --producer.", class_="none"),
        class_="card node",
        data_key=one.name,
        data_node=name,
        aria_label=name,
    )


def _actions(link: str, may_manage: bool) -> Html:
    return tag(
        "div",
        *(
            tag(
                "button",
                text,
                type="button",
                data_do=does,
                data_node_link=link,
                disabled=not may_manage,
            )
            for text, does in (
                ("Qualify now", "qualify"),
                ("New key", "rotate"),
                ("Remove", "remove"),
            )
        ),
        class_="buttons",
    )


def _history(past: History | None) -> Html:
    if past is None:
        return NOTHING
    titles = ("When", "", "Rows", "Largest difference", "Allowed", "Found in")
    return tag(
        "details",
        tag("summary", tag("b", f"Qualifications ({len(past.past)})")),
        tag("p", tag("small", f"Here {past.here}; there {past.there}")),
        tag(
            "div",
            tag(
                "table",
                tag(
                    "thead",
                    tag(
                        "tr",
                        *(
                            tag(
                                "th",
                                name,
                                scope="col",
                                class_="number" if name in _NUMBERS else None,
                            )
                            if name
                            else tag("td")
                            for name in titles
                        ),
                    ),
                ),
                tag(
                    "tbody",
                    *(
                        tag(
                            "tr",
                            tag("td", each.at),
                            tag("td", tag("small", each.ago)),
                            tag("td", parts.badge(each.rows)),
                            tag("td", each.apart, class_="number"),
                            tag("td", each.allowed, class_="number"),
                            tag("td", each.where),
                        )
                        for each in past.past
                    ),
                ),
                class_="cuts",
            ),
            class_="scroll",
            tabindex="0",
            role="group",
            aria_label="Qualifications",
        ),
        class_="past",
    )


def form(adding: Adding) -> Html:
    return dialog(
        "Add a producer",
        tag(
            "form",
            tag("p", "On the producer, ", tag("code", "baton produce --pair"), " shows six words."),
            tag("label", "Address, or the name it answers with", for_="node-host"),
            tag(
                "input",
                id="node-host",
                name="host",
                required=True,
                maxlength=LONGEST_HOST,
                autofocus=True,
                autocomplete="off",
                spellcheck="false",
                autocapitalize="none",
            ),
            tag(
                "div",
                tag(
                    "button",
                    "Look for producers",
                    type="button",
                    data_do="discover",
                    disabled=adding.busy,
                ),
                _seen(adding.seen or ()),
                class_="seen",
            ),
            tag("label", "Six words", for_="node-words"),
            tag(
                "input",
                id="node-words",
                name="words",
                required=True,
                maxlength=MAX_TYPED,
                autocomplete="off",
                spellcheck="false",
                autocapitalize="none",
            ),
            tag("label", "What to call it (optional)", for_="node-called"),
            tag(
                "input",
                id="node-called",
                name="called",
                maxlength=LONGEST_NAME,
                autocomplete="off",
            ),
            tag("p", adding.says, role="status", class_="none"),
            problem(adding.wrong) if adding.wrong is not None else tag("div"),
            tag(
                "div",
                tag("button", "Cancel", type="button", data_dismiss=True),
                tag("button", "Pair", type="submit", class_="main", disabled=adding.busy),
                class_="buttons end",
            ),
            data_do="pair",
        ),
    )


def _seen(seen: tuple[Answered, ...]) -> Html:
    return tag(
        "ul",
        *(
            tag(
                "li",
                tag(
                    "button",
                    tag("b", one.name),
                    tag("small", f"{one.host}, {one.model or 'no model'}"),
                    type="button",
                    data_fills="node-host",
                    data_with=f"{one.host}:{one.pair}"
                    if ":" not in one.host
                    else f"[{one.host}]:{one.pair}",
                    disabled=not one.pair,
                    title=None if one.pair else "No code is open there",
                ),
            )
            for one in seen
        ),
    )
