"""Pure ASGI layers in front of every route: who may call, and how much at once.

They see HTTP and WebSocket scopes alike, which ordinary HTTP middleware does not. A browser
page must not reach a server on its user's machine: a page of another origin is refused by
``Origin``, and a name that an attacker points at 127.0.0.1 (DNS rebinding) by ``Host``.
No CORS header is sent but to origins that were allowed, so other pages could read no answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mac_decoder.api import plain
from mac_decoder.api.door import Refusals
from mac_decoder.api.errors import error_response
from mac_decoder.api.keys import Keys, digest, is_ours
from mac_decoder.api.sessions import Session, Sessions
from protocol.errors import BatonError, CapacityError, RequestError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

WEBSOCKET_POLICY_VIOLATION = 1008

_ANSWERS = "websocket.http.response"
"""The extension of ASGI by which a handshake is refused with more than a 403."""

_HEADER_NAME = re.compile(r"[a-z0-9_-]{1,64}")
_MOST_HEADERS = 64
_USUAL_HEADERS = ("authorization", "content-type")

_LENGTH_DIGITS = 18
"""A Content-Length of more digits is too long, whatever the limit; it is not even parsed."""


def host_name(authority: str) -> str | None:
    """The host of ``name:port`` or ``[address]:port``, lower case; ``None`` if it has no form."""
    try:
        parts = urlsplit(f"//{authority}")
        # Reading the port checks it. Anything but host and port is no authority of ours.
        _ = parts.port
    except ValueError:
        return None
    if parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        return None
    host = parts.hostname
    return host.lower().rstrip(".") if host else None


class Callers:
    """Whose requests are for this server: the hosts and origins of ``HostGuard``."""

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        named = (host_name(host) or host for host in hosts)
        self._hosts = LOOPBACK | {host.lower() for host in named}
        self._origins = frozenset(_plain_origin(origin) for origin in origins)

    def invites(self, origin: str) -> bool:
        """Whether pages of ``origin`` were allowed by whoever started the server."""
        return _plain_origin(origin) in self._origins

    def refusal(self, hosts: list[str], origins: list[str]) -> RequestError | None:
        """Why a request with these headers is refused; ``None`` if it is not."""
        if len(hosts) != 1 or host_name(hosts[0]) not in self._hosts:
            return RequestError(
                "this server is not known by that host name",
                reason="host_not_allowed",
                field="host",
                hint="name it when starting the server if it is meant to be",
            )
        if all(self._own(origin, hosts[0]) for origin in origins):
            return None
        return RequestError(
            "pages of another origin may not call this server",
            reason="origin_not_allowed",
            field="origin",
        )

    def _own(self, origin: str, host: str) -> bool:
        if self.invites(origin):
            return True
        scheme, separator, authority = origin.partition("://")
        return bool(separator) and scheme in ("http", "https") and authority.lower() == host.lower()


class HostGuard:
    """Refuses a Host that this server does not have, and an Origin that is not its own.

    ``hosts`` and ``origins`` are allowed beside its own; pages of those origins may also read
    the answers (CORS), which no other page may.
    """

    def __init__(
        self,
        app: ASGIApp,
        refusals: Refusals,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
    ) -> None:
        self._app = app
        self._refusals = refusals
        self._callers = Callers(hosts, origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        hosts, origins = header_values(scope, b"host"), header_values(scope, b"origin")
        refusal = self._callers.refusal(hosts, origins)
        if refusal is not None:
            self._refusals.count(refusal.reason)
            await refuse(refusal, scope, receive, send)
            return
        invited = next((one for one in origins if self._callers.invites(one)), None)
        if invited is None or scope["type"] == "websocket":
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            asked = header_values(scope, b"access-control-request-headers")
            await _preflight(invited, asked)(scope, receive, send)
        else:
            await self._app(scope, receive, _readable(send, invited))


def _plain_origin(origin: str) -> str:
    return origin.lower().rstrip("/")


def _preflight(origin: str, asked: Iterable[str]) -> Response:
    """The answer to a browser that asks what a page of an allowed origin may send.

    Whatever headers it asks for: OpenAI's own client sends a dozen (``X-Stainless-*``), and
    none here does more than those that any page of that origin may send.
    """
    named = [name.strip().lower() for line in asked for name in line.split(",")]
    allowed = [name for name in named if _HEADER_NAME.fullmatch(name)][:_MOST_HEADERS]
    return Response(
        status_code=204,
        headers={
            "access-control-allow-origin": origin,
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": ", ".join(allowed or _USUAL_HEADERS),
            "access-control-max-age": "600",
            "vary": "origin, access-control-request-headers",
        },
    )


def _readable(send: Send, origin: str) -> Send:
    """``send`` with the headers that let a page of ``origin`` read the response."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            extra = [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"vary", b"origin"),
            ]
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return sending


class _Caller(NamedTuple):
    """The digest of the valid key that was given, and what keeps the caches of whoever gave it
    apart; nobody in particular has neither.
    """

    key: bytes | None
    salt: bytes


class KeyGuard:
    """Asks for one of ``keys`` as a bearer token, or does no more than look at it.

    Without ``demanded``, whoever gives no key is let in, and so is what clients are made to
    send although nobody asked for it; but what has the form of a key of ours must be one, so
    that a revoked key is not taken for none. ``OPEN`` paths tell nothing but that the process
    is there, and need none. What separates the caches of the caller from those of others is
    left in the scope, under ``SALT``.

    With ``sessions`` a browser that has logged in is let in by its cookie, to pages and to what
    they are fed by; not to the API. One that has not is sent to ``LOGIN``; one that another
    site has led here may have, and is first led to the same address by a page from here.
    """

    SALT = "baton.salt"

    KEY = "baton.key"
    """In the scope too: the digest of the valid key that was given as a bearer token, ``None``
    where there was none.
    """

    ALLOWED = "baton.allowed"
    """In the scope too: called, it says whether the caller would still be let in."""

    OPEN = frozenset({"/health", "/ready"})

    LOGIN = "/login"

    FOR_KEYS = ("/v1/", "/status", "/metrics")
    """Beginnings of paths where no cookie counts, but for ``/status/stream``."""

    def __init__(
        self,
        app: ASGIApp,
        refusals: Refusals,
        keys: Keys,
        *,
        demanded: bool,
        sessions: Sessions | None = None,
    ) -> None:
        self._app = app
        self._refusals = refusals
        self._keys = keys
        self._demanded = demanded
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The routes are found by this same text, so no other spelling of a path opens another.
        guarded = scope["type"] in ("http", "websocket") and scope["path"] not in self.OPEN
        if not guarded:
            await self._app(scope, receive, send)
            return
        given = header_values(scope, b"authorization")
        if self._sessions is not None and await self._by_session(
            self._sessions, scope, receive, send, bare=not given
        ):
            return
        caller = self._caller(given)
        if caller is not None:

            def allowed() -> bool:
                return self._caller(given) is not None

            known = {self.SALT: caller.salt, self.ALLOWED: allowed, self.KEY: caller.key}
            await self._app({**scope, **known, Sessions.SCOPE: None}, receive, send)
            return
        refusal = RequestError("no valid API key was given", reason="invalid_api_key")
        self._refusals.count(refusal.reason)
        await refuse(refusal, scope, receive, send)

    async def _by_session(
        self, sessions: Sessions, scope: Scope, receive: Receive, send: Send, *, bare: bool
    ) -> bool:
        """Let in, or send to the login, who comes as a browser does; false for everybody else.

        ``bare``: without an Authorization header, which would go before.
        """
        path = scope["path"]
        if path == self.LOGIN:
            await self._app({**scope, Sessions.SCOPE: None}, receive, send)
            return True
        pages = path == "/status/stream" or not path.startswith(self.FOR_KEYS)
        session = sessions.find(header_values(scope, b"cookie")) if bare and pages else None
        if session is not None and _from_itself(scope):
            await self._app(self._as(sessions, session, scope), receive, send)
            return True
        if pages and bare and self._demanded and wants_page(scope):
            answer = onward(path) if is_led_by_others(scope) else RedirectResponse(self.LOGIN, 303)
            await answer(scope, receive, send)
            return True
        return False

    def _as(self, sessions: Sessions, session: Session, scope: Scope) -> Scope:
        """The scope of a request that ``session`` brings."""

        def allowed() -> bool:
            return sessions.holds(session)

        known = {Sessions.SCOPE: session, self.SALT: sessions.salt(session) or b"", self.KEY: None}
        return {**scope, **known, self.ALLOWED: allowed}

    def _caller(self, given: list[str]) -> _Caller | None:
        """Whoever gives these Authorization headers; ``None``: is not let in."""
        tokens = [_bearer(value) for value in given]
        if len(tokens) == 1 and tokens[0] is not None:
            key = digest(tokens[0])
            salt = self._keys.salt_by(key)
            if salt is not None:
                return _Caller(key, salt)
        if self._demanded or any(token is not None and is_ours(token) for token in tokens):
            return None
        return _Caller(None, b"")


def wants_page(scope: Scope) -> bool:
    """Whether a browser asks for something to show: a GET that takes HTML."""
    if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
        return False
    return takes_html(header_values(scope, b"accept"))


def takes_html(accepts: Iterable[str]) -> bool:
    """Whether these Accept headers name HTML, as browsers do and other clients do not."""
    kinds = (kind.partition(";")[0] for line in accepts for kind in line.split(","))
    return any(kind.strip().lower() == "text/html" for kind in kinds)


def is_navigation(scope: Scope) -> bool:
    """Whether a browser goes here with a whole window, as by a link: not for an image or a frame,
    which are asked for without an Origin.
    """
    said = (header_values(scope, b"sec-fetch-mode"), header_values(scope, b"sec-fetch-dest"))
    return said == (["navigate"], ["document"])


def is_led_by_others(scope: Scope) -> bool:
    """Whether another site began such a navigation: a browser sends no strict cookie with it."""
    return header_values(scope, b"sec-fetch-site") == ["cross-site"] and is_navigation(scope)


def onward(path: str) -> Response:
    """A page of ours that leads to this path of ours: what it begins comes with the cookie."""
    # A path that begins with two slashes would be the name of a host.
    to = f"/{quote(path.lstrip('/'))}"
    return Response(
        plain.page("Dashboard", f'<p><a href="{to}">Go on</a></p>', to), headers=plain.HEADERS
    )


def _from_itself(scope: Scope) -> bool:
    """Whether no page but the server's own asks: an origin that is allowed gets no session."""
    hosts = header_values(scope, b"host")
    return all(
        origin.partition("://")[2].lower() == hosts[0].lower()
        for origin in header_values(scope, b"origin")
    )


def _bearer(authorization: str) -> str | None:
    """The token of an Authorization header; ``None`` where it has another scheme."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


class BodyLimit:
    """Refuses a request body above ``limit`` bytes, as soon as it is known to be longer."""

    def __init__(self, app: ASGIApp, refusals: Refusals, limit: int) -> None:
        self._app = app
        self._refusals = refusals
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._declared_refusal(header_values(scope, b"content-length"))
        if refusal is not None:
            self._refusals.count(refusal.reason)
            await refuse(refusal, scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self._limit:
                    refusal = self._too_large()
                    self._refusals.count(refusal.reason)
                    raise refusal
            return message

        await self._app(scope, counted, send)

    def _declared_refusal(self, lengths: list[str]) -> RequestError | None:
        for length in lengths:
            if not (length.isascii() and length.isdigit()):
                return RequestError("Content-Length is not a number", reason="invalid_header")
            if len(length) > _LENGTH_DIGITS or int(length) > self._limit:
                return self._too_large()
        return None

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the request body is longer than {self._limit} bytes", reason="request_too_large"
        )


class RequestLimit:
    """Refuses POST requests above ``limit`` at once, before their bodies are read."""

    def __init__(self, app: ASGIApp, refusals: Refusals, limit: int) -> None:
        self._app = app
        self._refusals = refusals
        self._limit = limit
        self._in_hand = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._in_hand >= self._limit:
            busy = CapacityError("too many requests are in hand", reason="too_many_requests")
            self._refusals.count(busy.reason)
            await refuse(busy, scope, receive, send)
            return
        self._in_hand += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_hand -= 1


def header_values(scope: Scope, name: bytes) -> list[str]:
    """What the headers of this name hold, which is in lower case."""
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


async def refuse(error: BatonError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request, or the handshake of a WebSocket, with ``error``."""
    if scope["type"] == "websocket" and _ANSWERS not in scope.get("extensions", {}):
        # Closing before accepting makes the server answer the handshake with a bare 403.
        await send({"type": "websocket.close", "code": WEBSOCKET_POLICY_VIOLATION})
        return
    await error_response(error)(scope, receive, send)
