"""What every page has around it: the way to the others, the headline, the theme, who looks."""

from __future__ import annotations

from typing import Final

from app.dashboard.pages import icons
from app.dashboard.pages.markup import NOTHING, Html, joined, tag
from app.dashboard.pages.screen import Drawn, Memo, Seen, part, piece
from app.view.overview import headline, where

LINKS: Final = (
    ("/", "Now", icons.NOW),
    ("/requests", "Requests", icons.REQUESTS),
    ("/cache", "Cache", icons.CACHE),
    ("/nodes", "Nodes", icons.NODES),
    ("/try", "Try it", icons.TRY),
    ("/about", "About", icons.ABOUT),
)

_THEMES: Final = (
    ("auto", "System", icons.AUTO),
    ("light", "Light", icons.LIGHT),
    ("dark", "Dark", icons.DARK),
)

LOST: Final = "Not connected to the decoder. This page comes back by itself."

_THEME: Final = (
    'try{const t=localStorage.getItem("baton-theme");'
    'if(t==="dark"||t==="light")document.documentElement.dataset.theme=t}catch{}'
)


def head(nonce: str) -> str:
    """What stands in the head: the theme is set before anything is drawn."""
    return f'<script nonce="{nonce}">{_THEME}</script>'


def draw(memo: Memo, seen: Seen) -> Drawn:
    """The parts of the frame."""
    said = headline(seen.snapshot, seen.standing)
    place = where(seen.snapshot, seen.standing)
    return {
        "headline": memo.of("headline", (said,), lambda: _headline(said.text, said.tone)),
        "where": memo.of("where", (place,), lambda: part("where", "p", place, id="where")),
    }


def whole(path: str, title: str, drawn: Drawn, body: Html, *, session: str, disk: bool) -> Html:
    """A page. ``session``: ``manage`` or ``look`` for one that logged in, empty for none."""
    shown = [link for link in LINKS if disk or link[0] != "/cache"]
    return joined(
        tag("a", "Skip to content", href="#main", class_="skip"),
        tag(
            "header",
            tag(
                "a", icons.BRAND, tag("span", "Baton"), href="/", class_="brand", aria_label="Baton"
            ),
            tag(
                "nav",
                tag("ul", *(_link(*link, here=link[0] == path) for link in shown)),
                aria_label="Pages",
            ),
            tag("div", _who(session), _themes(), class_="corner"),
            class_="side",
        ),
        tag(
            "main",
            tag("div", tag("p"), id="lost", role="status", data_lost="false", data_says=LOST),
            tag(
                "div",
                tag("h1", title),
                piece(drawn, "headline"),
                piece(drawn, "where"),
                class_="top",
            ),
            body,
            id="main",
            tabindex="-1",
            data_page=title.lower().replace(" it", ""),
        ),
        tag("div", id="dialogs"),
    )


def _headline(text: str, tone: str) -> Html:
    # What it does is announced when it changes, how far it is is not.
    what, comma, rest = text.partition(", ")
    return part(
        "headline",
        "p",
        tag("i", class_="dot", aria_hidden="true"),
        tag("span", what),
        tag("span", comma + rest, aria_live="off") if rest else NOTHING,
        id="headline",
        aria_live="polite",
        data_tone=tone,
    )


def _link(path: str, name: str, icon: Html, *, here: bool) -> Html:
    return tag(
        "li", tag("a", icon, tag("span", name), href=path, aria_current="page" if here else None)
    )


def _who(session: str) -> Html:
    if not session:
        return tag("p", tag("a", "Log in", href="/login"), class_="who")
    may = "You may change things" if session == "manage" else "You may look and try"
    return tag(
        "p",
        tag("span", may),
        tag("button", "Log out", type="button", data_logout=True),
        class_="who",
    )


def _themes() -> Html:
    return tag(
        "div",
        *(
            tag(
                "button",
                icon,
                type="button",
                aria_label=f"{name} theme",
                title=name,
                aria_pressed="false",
                data_theme_choice=choice,
            )
            for choice, name, icon in _THEMES
        ),
        class_="themes",
        role="group",
        aria_label="Theme",
    )
