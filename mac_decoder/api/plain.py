"""Pages that need nothing but themselves: no script, no file, one style for light and dark.

The supervisor's stand-in and the login are such pages: they have to work when nothing else does.
"""

from __future__ import annotations

import base64
import hashlib
import html
from typing import Final

_STYLE: Final = """
:root { color-scheme: light dark; }
body { margin: 0; min-height: 100vh; display: grid; place-items: center;
  background: Canvas; color: CanvasText; font: 1rem/1.5 system-ui, sans-serif; }
main { box-sizing: border-box; width: 100%; max-width: 30rem; padding: 2rem; }
h1 { font-size: 1.25rem; margin: 0 0 1rem; }
code { font-family: ui-monospace, monospace; }
label { display: block; margin: 1rem 0 .25rem; }
input { box-sizing: border-box; width: 100%; }
input, button { font: inherit; padding: .5rem; }
button { margin-top: 1rem; }
"""

_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

HEADERS: Final = {
    "cache-control": "no-store",
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_HASH}'; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    ),
    "content-type": "text/html; charset=utf-8",
    # Not "no-referrer": a form would then be sent with the origin `null`, which is nobody's.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""What every such page is sent with."""


def page(title: str, body: str, goes_to: str | None = None) -> bytes:
    """A whole page. ``title`` is text, ``body`` is HTML; ``goes_to`` is an address of ours that
    it leads to at once.
    """
    moves = (
        f'<meta http-equiv="refresh" content="0; url={html.escape(goes_to)}">' if goes_to else ""
    )
    shown = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{moves}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{shown} – Baton</title><style>{_STYLE}</style></head>"
        f"<body><main><h1>{shown}</h1>{body}</main></body></html>"
    ).encode()


def text(*paragraphs: str) -> str:
    """Paragraphs of text, as HTML."""
    return "".join(f"<p>{html.escape(one)}</p>" for one in paragraphs if one)
