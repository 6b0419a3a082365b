"""Whose connection a page's is: that of the session which the page was made for, and of no other.
Where it was asked for with an API key and without a session, that key stands in its place.

A page is named by an identifier of its own, in the address of its connection and in every message
of it; NiceGUI asks for nothing more. But a page does what its session may do, so that whoever
brings the identifier has to bring the session, too.
"""

from __future__ import annotations

from inspect import isawaitable
from typing import Any, Final
from urllib.parse import parse_qs

from nicegui import Client, core
from socketio.exceptions import ConnectionRefusedError as Refused
from starlette.types import Scope

from mac_decoder.api.door import Refusals
from mac_decoder.api.guard import KeyGuard
from mac_decoder.api.sessions import Session, Sessions
from protocol.errors import RequestError

REASON: Final = "page_of_another_session"

_LOAD_AGAIN: Final = "Implicit handshake failed"
"""By this text NiceGUI's script knows that its page is to be loaded again: it was made before
somebody logged in or out, which is how a browser of good will comes to this.
"""

_nicegui: Final[dict[str, Any]] = dict(core.sio.handlers["/"])
"""What NiceGUI does of each message, as it was at the import."""

_OTHERWISE: Final = frozenset({"connect", "handshake", "disconnect"})
"""Those that make a page's connection are asked in their own way, and nobody says the end of one.
All others, whatever they will be, come over a connection that has to be the page's.
"""


class Belonging:
    """Keeps the pages of one process apart by their sessions, from :meth:`watch` on."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals

    def watch(self) -> None:
        """Ask before NiceGUI does anything of what comes over a connection."""
        core.sio.on("connect", self._connect)
        core.sio.on("handshake", self._handshake)
        for name in _nicegui.keys() - _OTHERWISE:
            core.sio.on(name, self._asking(name))

    def refusal(self, scope: Scope) -> RequestError | None:
        """Why a request that goes on with a connection is refused; ``None`` if it is not."""
        of = parse_qs(scope["query_string"].decode("latin-1")).get("sid", [""])[0]
        before = core.sio.environ.get(of)
        if before is None or _whose(before["asgi.scope"]) == _whose(scope):
            return None
        self._refusals.count(REASON)
        return RequestError("this is a connection of another session", reason=REASON)

    async def _connect(self, sid: str, environ: dict[str, Any], auth: object = None) -> None:
        named = parse_qs(environ.get("QUERY_STRING", "")).get("client_id", [""])[0]
        if not self._is_of(named, sid):
            raise Refused(_LOAD_AGAIN)
        await _nicegui["connect"](sid, environ, auth)

    async def _handshake(self, sid: str, said: object) -> bool:
        named = _named(said)
        return bool(named) and self._is_of(named, sid) and await _nicegui["handshake"](sid, said)

    def _asking(self, name: str) -> Any:
        async def asked(sid: str, *said: object) -> Any:
            client = _named(*said[:1])
            if client in core.sio.rooms(sid):  # the handshake put it there
                done = _nicegui[name](sid, *said)
                return await done if isawaitable(done) else done
            if client in Client.instances:
                self._refusals.count(REASON)
            return None

        return asked

    def _is_of(self, client: str, sid: str) -> bool:
        """Whether a page, if it is there, and a connection are of one session; counted if not."""
        page = Client.instances.get(client)
        if page is None:
            return True
        # Of whom nothing is known is nobody's, which is not the same as one without a session.
        environ = core.sio.get_environ(sid)
        if environ is not None and _whose(environ["asgi.scope"]) == _whose(page.request.scope):
            return True
        self._refusals.count(REASON)
        return False


def _whose(scope: Any) -> Session | bytes | None:
    """The session that a request brings, or the key; ``None``: nobody in particular asks."""
    return scope.get(Sessions.SCOPE) or scope.get(KeyGuard.KEY)


def _named(said: object = None) -> str:
    """The page that a message names; empty where it names none."""
    named = said.get("client_id") if isinstance(said, dict) else None
    return named if isinstance(named, str) else ""
