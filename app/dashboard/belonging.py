"""Whose connection a page's is: that of the session which the page was made for, and of no other.

A page is named by an identifier of its own, in the address of its connection and in every message
of it; NiceGUI asks for nothing more. But a page does what its session may do, so that whoever
brings the identifier has to bring the session, too.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import parse_qs

from nicegui import Client, core
from socketio.exceptions import ConnectionRefusedError as Refused
from starlette.types import Scope

from mac_decoder.api.door import Refusals
from mac_decoder.api.sessions import Session, Sessions
from protocol.errors import RequestError

REASON: Final = "page_of_another_session"

_LOAD_AGAIN: Final = "Implicit handshake failed"
"""By this text NiceGUI's script knows that its page is to be loaded again: it was made before
somebody logged in or out, which is how a browser of good will comes to this.
"""

_SAID: Final = ("event", "javascript_response", "ack", "log")
"""What pages say once they are connected."""

_nicegui: Final[dict[str, Any]] = {
    name: core.sio.handlers["/"][name] for name in ("connect", "handshake", *_SAID)
}
"""What NiceGUI does of each message, as it was at the import."""


class Belonging:
    """Keeps the pages of one process apart by their sessions, from :meth:`watch` on."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals

    def watch(self) -> None:
        """Ask before NiceGUI does anything of what comes over a connection."""
        core.sio.on("connect", self._connect)
        core.sio.on("handshake", self._handshake)
        for name in _SAID:
            core.sio.on(name, self._asking(name))

    def refusal(self, scope: Scope) -> RequestError | None:
        """Why a request that goes on with a connection is refused; ``None`` if it is not."""
        of = parse_qs(scope["query_string"].decode("latin-1")).get("sid", [""])[0]
        before = core.sio.environ.get(of)
        if before is None or _session(before["asgi.scope"]) is _session(scope):
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
        def asked(sid: str, said: object) -> None:
            client = _named(said)
            if client in core.sio.rooms(sid):  # the handshake put it there
                _nicegui[name](sid, said)
            elif client in Client.instances:
                self._refusals.count(REASON)

        return asked

    def _is_of(self, client: str, sid: str) -> bool:
        """Whether a page, if it is there, and a connection are of one session; counted if not."""
        page = Client.instances.get(client)
        environ = core.sio.get_environ(sid)
        ours = None if environ is None else _session(environ["asgi.scope"])
        if page is None or _session(page.request.scope) is ours:
            return True
        self._refusals.count(REASON)
        return False


def _session(scope: Any) -> Session | None:
    return scope.get(Sessions.SCOPE)


def _named(said: object) -> str:
    """The page that a message names; empty where it names none."""
    named = said.get("client_id") if isinstance(said, dict) else None
    return named if isinstance(named, str) else ""
