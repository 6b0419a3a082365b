"""Who may change things. Asked on the decoder's side, at the moment at which something is done."""

from __future__ import annotations

from typing import Final

from app.dashboard.pages.markup import Html, tag
from app.dashboard.pages.screen import Browser
from protocol.errors import RequestError

HOW: Final = "baton dashboard"

NOT_YOURS: Final[Html] = tag(
    "p",
    "To change anything, open these pages with ",
    tag("code", HOW),
    " on the machine that runs Baton.",
    class_="none",
)
"""What is told where the buttons are of no use."""


def require_manager(browser: Browser) -> None:
    """Raise ``RequestError`` (``may_not_manage``) unless who looks may change things, now."""
    if not browser.may_manage():
        raise RequestError(
            "this session may look and try, not change anything",
            reason="may_not_manage",
            hint=f"open these pages with `{HOW}` on the machine that runs Baton",
        )
