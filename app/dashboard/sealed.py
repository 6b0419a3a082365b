"""What a page of ours may do in a browser: nothing that leaves this machine.

NiceGUI writes scripts into its pages and evaluates what its events say, so both have to be
allowed; but a script in the page has to bear a number of this one answer, which nothing that
gets into a page as content can know.
"""

from __future__ import annotations

import secrets
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ALWAYS: Final = {
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}

_PREFIX: Final = b"x-forwarded-prefix"
"""A header by which a client would have its own text in the page's addresses."""


def policy(nonce: str) -> str:
    """The Content-Security-Policy of a page whose scripts bear ``nonce``."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'self' 'nonce-{nonce}' 'unsafe-eval'",
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data:",
            "font-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'self'",
            "frame-ancestors 'none'",
        )
    )


class Sealed:
    """``app`` with the headers that say so; its HTML with the scripts' number."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name != _PREFIX]
        nonce = secrets.token_urlsafe(16)
        start: Message | None = None
        held = bytearray()

        async def sealed(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                seen = MutableHeaders(scope=message)
                seen.update(_ALWAYS)
                if seen.get("content-type", "").startswith("text/html"):
                    seen["content-security-policy"] = policy(nonce)
                    start = message
                    return
            elif message["type"] == "http.response.body" and start is not None:
                held.extend(message.get("body", b""))
                if message.get("more_body", False):
                    return
                marked = held.replace(b"<script", f'<script nonce="{nonce}"'.encode())
                if scope["method"] != "HEAD":
                    MutableHeaders(scope=start)["content-length"] = str(len(marked))
                await send(start)
                await send({"type": "http.response.body", "body": bytes(marked)})
                return
            await send(message)

        await self._app({**scope, "headers": headers}, receive, sealed)
