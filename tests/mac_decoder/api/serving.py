"""A real server for a test: uvicorn and the engine on an event loop in a thread."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from mac_decoder import endpoint
from mac_decoder.api.app import create_routes, guarded, server_config
from mac_decoder.api.door import MOST_CONNECTIONS
from mac_decoder.api.face import Face, Facing, Facts, MakeFace
from mac_decoder.api.inside import Inside
from mac_decoder.api.keys import KeyFiles
from mac_decoder.api.once import Once
from mac_decoder.api.service import Service
from mac_decoder.api.sessions import Sessions
from mac_decoder.api.settings import ApiSettings
from mac_decoder.config import DecoderConfig

T = TypeVar("T")

MODEL = "tiny"


class Server:
    """A server that answers at ``url``; ``engine`` belongs to its loop."""

    def __init__(
        self,
        make_engine: Callable[[], Any],
        settings: ApiSettings,
        stored: KeyFiles | None = None,
        tls: ssl.SSLContext | None = None,
        most_connections: int = MOST_CONNECTIONS,
        face: MakeFace | None = None,
        state: Path = Path("nowhere"),
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server", daemon=True)
        self._thread.start()
        self.engine = make_engine()
        service = Service(
            self.engine, MODEL, settings, stored=stored, most_connections=most_connections
        )
        self.service = service
        self.door = service.door
        # As the decoder does: asyncio sends at once only where the socket says that it is TCP's.
        listening = endpoint.listen(DecoderConfig(model="none", port=0))
        self.port: int = listening.getsockname()[1]
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        self.sessions = Sessions(service.keys, port=self.port, secured=tls is not None)
        self.once = Once(state, self.port)
        self.routes = create_routes(service)
        self.face: Face | None = None if face is None else face(self._facing(state))
        sessions = None if face is None else self.sessions
        app = guarded(service, self.routes, self.face, sessions)
        config = server_config(app, service.door, tls=tls, faced=face is not None)
        self._server = uvicorn.Server(config)
        self.run(self.engine.start())
        self.run(service.warm())
        serving = self._server.serve(sockets=[listening])
        self._serving = asyncio.run_coroutine_threadsafe(serving, self._loop)
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            threading.Event().wait(0.01)

    def _facing(self, state: Path) -> Facing:
        service = self.service
        return Facing(
            board=service.board,
            inside=Inside(self.routes),
            sessions=self.sessions,
            once=self.once,
            refusals=service.door.refusals,
            facts=Facts(
                model=state,
                served_name=MODEL,
                address=self.url,
                state=state,
                cache=state,
                disk=False,
                keys_demanded=service.settings.keys_demanded,
                secured=self.url.startswith("https"),
                secrets="file",
            ),
        )

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 60) -> T:
        """Run ``work`` on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def close(self) -> None:
        self._server.should_exit = True
        self._serving.result(30)
        if self.face is not None:
            self.run(self.face.close())
        self.run(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@contextmanager
def serving(
    make_engine: Callable[[], Any], settings: ApiSettings | None = None, **more: Any
) -> Iterator[Server]:
    """A server for the time of a block; ``more`` as ``Server`` takes it."""
    server = Server(make_engine, settings or ApiSettings(), **more)
    try:
        yield server
    finally:
        server.close()
