"""A real server for a test: uvicorn and the engine on an event loop in a thread."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvicorn

from mac_decoder import endpoint
from mac_decoder.api.app import create_app, server_config
from mac_decoder.api.door import MOST_CONNECTIONS
from mac_decoder.api.keys import KeyFiles
from mac_decoder.api.service import Service
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
        config = server_config(create_app(service), service.door, tls=tls)
        self._server = uvicorn.Server(config)
        self.run(self.engine.start())
        self.run(service.warm())
        # As the decoder does: asyncio sends at once only where the socket says that it is TCP's.
        listening = endpoint.listen(DecoderConfig(model="none", port=0))
        serving = self._server.serve(sockets=[listening])
        self._serving = asyncio.run_coroutine_threadsafe(serving, self._loop)
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            threading.Event().wait(0.01)
        self.port: int = listening.getsockname()[1]
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 60) -> T:
        """Run ``work`` on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def close(self) -> None:
        self._server.should_exit = True
        self._serving.result(30)
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
