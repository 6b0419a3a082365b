"""Dialogs: a question before something is done, and why something was not.

They are the browser's own, which keep the focus inside and give it back; Escape is a no.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.dashboard.pages.markup import NOTHING, Html, tag
from app.dashboard.pages.parts import unbroken
from protocol.errors import BatonError


def dialog(title: str, *content: str) -> Html:
    """A dialog with a heading."""
    return tag(
        "dialog",
        tag("h2", title, id="dialog-title", tabindex="-1"),
        *content,
        aria_labelledby="dialog-title",
    )


def confirmation(
    title: str, text: Sequence[str], verb: str, number: int, *, danger: bool = False
) -> Html:
    """A question in paragraphs; its button does ``confirmed``, with the question's ``number``: an
    answer to one that was shown before is none to this one.
    """
    return dialog(
        unbroken(title),
        *(tag("p", each if isinstance(each, Html) else unbroken(each)) for each in text),
        tag(
            "div",
            tag("button", "Cancel", type="button", data_dismiss=True, autofocus=True),
            tag(
                "button",
                verb,
                type="button",
                data_do="confirmed",
                data_number=str(number),
                class_="danger" if danger else "main",
            ),
            class_="buttons end",
        ),
    )


def refusal(error: BatonError) -> Html:
    """Why something was not done, and what to do about it."""
    return dialog(
        "That was not done",
        problem(error),
        tag(
            "div",
            tag("button", "Close", type="button", data_dismiss=True, autofocus=True),
            class_="buttons end",
        ),
    )


def problem(error: BatonError) -> Html:
    """An error in words, with its reason and what to do about it."""
    said = error.message[:1].upper() + error.message[1:]
    hint = tag("p", error.hint[:1].upper() + error.hint[1:] + ".") if error.hint else NOTHING
    return tag(
        "div",
        tag("p", said.rstrip("."), ". ", tag("code", error.reason), class_="wrong"),
        hint,
        role="alert",
        class_="problem",
    )
