"""The dashboard's addresses. Known before any page is made, so that no other is its own."""

from __future__ import annotations

from typing import Final

LOGIN: Final = "/login"
LOGOUT: Final = "/logout"

PAGES: Final = frozenset({"/", "/about", "/cache", "/nodes", "/requests", "/try"})
"""Each has a ``ui.page`` in ``pages``."""

ASSETS: Final = "/assets"
"""Files of ``app/dashboard/assets``."""

SOCKET: Final = "/_nicegui_ws/"

_FILES: Final = ("/_nicegui/", f"{ASSETS}/")
_ICON: Final = "/favicon.ico"


def is_ours(path: str) -> bool:
    """Whether the dashboard answers there."""
    known = path in PAGES or path in (LOGIN, LOGOUT, _ICON)
    return known or path.startswith((*_FILES, SOCKET))
