"""Logging in and out: plain HTML that works without a script, before NiceGUI is there.

Two ways lead in. A token that `baton dashboard` left in the state directory opens a session
that may manage; an API key, where keys are demanded, one that may look and try.
"""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import parse_qs

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mac_decoder.api import plain
from mac_decoder.api.errors import error_response
from mac_decoder.api.face import Facing
from protocol.errors import RequestError

_BODY_S: Final = 10.0
_MOST_FIELDS: Final = 4
_LONGEST_TOKEN: Final = 128

_HOW: Final = (
    "<p>On the machine that runs Baton, <code>baton dashboard</code> opens this page logged in, "
    "with the right to change things.</p>"
)
_FORM: Final = """
<form method="post" action="/login">
<label for="key">API key</label>
<input id="key" name="key" type="password" autocomplete="current-password" required autofocus
 aria-describedby="about">
<p id="about">Made with <code>baton key create NAME</code>. With it you may look and try, and
change nothing.</p>
<button type="submit">Log in</button>
</form>
"""


class Login:
    """``/login`` and ``/logout``."""

    def __init__(self, facing: Facing) -> None:
        self._facing = facing

    async def login(self, request: Request) -> Response:
        """Show the page, or take what it or `baton dashboard` brings.

        A GET alone uses a token up: a HEAD is of somebody who looks where a link leads.
        """
        if request.method == "POST":
            return await self._with_key(request)
        if request.method not in ("GET", "HEAD"):
            return error_response(RequestError("not with this method", reason="method_not_allowed"))
        token = request.query_params.get("once")
        if token is None or request.method == "HEAD":
            return self._page()
        if len(token) <= _LONGEST_TOKEN and await asyncio.to_thread(self._facing.once.take, token):
            return self._enter(self._facing.sessions.open_for_user())
        self._facing.refusals.count("login_refused")
        return self._page("That link has been used, or is older than a minute.", 403)

    async def logout(self, request: Request) -> Response:
        """End the session of whoever asks. A POST: no link does it."""
        if request.method != "POST":
            return error_response(RequestError("not with this method", reason="method_not_allowed"))
        sessions = self._facing.sessions
        for token in sessions.tokens(request.headers.getlist("cookie")):
            sessions.end(token)
        return self._moved(sessions.set_cookie(""), "/login", "You are logged out")

    async def _with_key(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(_BODY_S):
                body = await request.body()
        except (TimeoutError, ClientDisconnect):
            late = RequestError("the request body did not come on", reason="request_timeout")
            return error_response(late)
        try:
            fields = parse_qs(body.decode("ascii"), max_num_fields=_MOST_FIELDS)
        except ValueError:
            fields = {}
        key = fields.get("key", [""])[0].strip()
        token = self._facing.sessions.open_for_key(key)
        if token is not None:
            return self._enter(token)
        self._facing.refusals.count("invalid_api_key")
        return self._page("That is no valid API key.", 403)

    def _enter(self, token: str) -> Response:
        # A redirect would be part of the navigation that led here. Where another site's page, or
        # a file, began that, a browser would not send a strict cookie with it; a page of ours is
        # a beginning of its own.
        return self._moved(self._facing.sessions.set_cookie(token), "/", "Logged in")

    def _moved(self, cookie: str, to: str, title: str) -> Response:
        onward = plain.page(title, f'<p><a href="{to}">Go on</a></p>', to)
        extra = {"set-cookie": cookie, "referrer-policy": "no-referrer"}
        return Response(onward, headers={**plain.HEADERS, **extra})

    def _page(self, wrong: str = "", status: int = 200) -> Response:
        said = f'<p role="alert">{wrong}</p>' if wrong else ""
        form = _FORM if self._facing.facts.keys_demanded else '<p><a href="/">Look only</a></p>'
        return Response(plain.page("Log in", said + form + _HOW), status, plain.HEADERS)
