"""What a page of ours may do in a browser: nothing that leaves this machine.

NiceGUI writes scripts into its pages and evaluates what its events say, so both have to be
allowed; but a script in the page has to bear a number of this one answer. The scripts of
NiceGUI's template are given it in the template, so that a script which gets into a page as
content has none, and cannot know it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

from jinja2 import BaseLoader, Environment
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ALWAYS: Final = {
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}

NONCE: Final = "baton.nonce"
"""Where a request's scope has the number of the scripts in its answer."""

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
    """``app`` with the headers that say so, told the number for its scripts in the scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name != _PREFIX]
        nonce = secrets.token_urlsafe(16)

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen = MutableHeaders(scope=message)
                seen.update(_ALWAYS)
                if seen.get("content-type", "").startswith("text/html"):
                    seen["content-security-policy"] = policy(nonce)
            await send(message)

        await self._app({**scope, "headers": headers, NONCE: nonce}, receive, sealed)


class Marked(BaseLoader):
    """Templates whose own scripts bear the number: marked before any content is put in."""

    def __init__(self, templates: BaseLoader) -> None:
        self._templates = templates

    def get_source(
        self, environment: Environment, template: str
    ) -> tuple[str, str | None, Callable[[], bool] | None]:
        """See ``BaseLoader``."""
        source, name, is_fresh = self._templates.get_source(environment, template)
        marked = f"<script nonce=\"{{{{ request.scope['{NONCE}'] }}}}\""
        return source.replace("<script", marked), name, is_fresh
