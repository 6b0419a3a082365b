"""The decoder's process: the only place where its concrete objects meet.

Checkpoint, links, engine and endpoint are made here, in this order, and ended in the reverse
one. Under a supervisor the listening socket and a control channel are inherited; without one
the node opens the socket itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from mac_decoder import control, endpoint
from mac_decoder.api.app import create_routes, guarded, server_config
from mac_decoder.api.face import Face, Facing, Facts, MakeFace
from mac_decoder.api.inside import Inside
from mac_decoder.api.keys import KeyFiles
from mac_decoder.api.once import Once
from mac_decoder.api.service import FIRST, Past, Service
from mac_decoder.api.sessions import Sessions
from mac_decoder.api.settings import ApiSettings
from mac_decoder.config import DecoderConfig
from mac_decoder.custody import Custody
from mac_decoder.engine import model
from mac_decoder.engine.facade import Engine
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.housekeeping.house import Housekeeping
from mac_decoder.keeper import Keeper
from mac_decoder.nodes import Nodes
from mac_decoder.qualify.qualifier import Qualifier, Subject
from mac_decoder.qualify.verdicts import Verdicts
from mac_decoder.reporting import complain, start_logging
from mac_decoder.store.key import load_or_make
from mac_decoder.store.limits import MIN_CAP, default_limits
from mac_decoder.store.store import Store
from protocol import releases
from protocol.addresses import is_loopback
from protocol.checkpoint import Checkpoint, read_checkpoint
from protocol.errors import (
    EXIT_CONFIG,
    EXIT_ENGINE_FAULT,
    Cancelled,
    ConfigError,
    EngineFault,
)

log = logging.getLogger(__name__)

EXIT_OK: Final = 0
_DRAIN_S: Final = 3
"""How long answers that are being written may take once the node stops."""

_STOP_S: Final = 8.0
"""When a stop that hangs, in native code say, is cut short."""

_PUBLISH_S: Final = 20.0
"""How long a stop waits for caches to be written to disk."""

_TELL_EVERY_S: Final = 2.0


def run(
    config: DecoderConfig,
    listening: socket.socket | None = None,
    channel: socket.socket | None = None,
    past: Past = FIRST,
    custody: Custody | None = None,
    multiplies: str = "",
    face: MakeFace | None = None,
) -> int:
    """Serve until SIGTERM, SIGINT, a fault, or the end of ``channel``; the exit status.

    0 after a stop, 75 after an engine fault, 78 for what the user must change first. Prints
    ``ready URL`` on standard output once a token can be generated. ``custody`` is told of the
    clients' connections; ``multiplies`` names the library that took the place of MLX's own;
    ``face`` makes what shows the decoder to browsers.
    """
    start_logging(config.log_level)
    faulthandler.enable()
    node: _Node | None = None
    try:
        sock = endpoint.listen(config) if listening is None else listening
        node = _Node(config, sock, channel, past, custody, multiplies, face)
        return asyncio.run(node.run())
    except ConfigError as error:
        complain(error)
        return EXIT_CONFIG
    except EngineFault as error:
        complain(error)
        return EXIT_ENGINE_FAULT
    finally:
        if node is not None and node.last_resort is not None:
            node.last_resort.cancel()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the node decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Node:
    def __init__(
        self,
        config: DecoderConfig,
        listening: socket.socket,
        channel: socket.socket | None,
        past: Past,
        custody: Custody | None,
        multiplies: str,
        face: MakeFace | None,
    ) -> None:
        self._config = config
        self._multiplies = multiplies
        self._make_face = face
        self._face: Face | None = None
        self._past = past
        self._custody = custody
        self._listening = listening
        self._tls = endpoint.tls_of(config)
        self._url = endpoint.url_of(listening, secured=self._tls is not None)
        self._channel = channel
        self._stopping = asyncio.Event()
        self._told_to_go = asyncio.Event()
        self.last_resort: threading.Timer | None = None

    async def run(self) -> int:
        self._listen_to_signals()
        self._listen_to_supervisor()
        try:
            checkpoint = await asyncio.to_thread(self._read_checkpoint)
        except Cancelled:
            return EXIT_OK
        nodes = Nodes(self._config, checkpoint)
        # In a thread: the keyring may ask the user, and another process hold a lock for a while.
        await asyncio.to_thread(nodes.open)
        keeper = await asyncio.to_thread(self._make_keeper, checkpoint)
        load = partial(model.load, checkpoint)
        engine = Engine(load, self._engine_settings(), nodes.gates(), keeper)
        house = Housekeeping(keeper, engine)
        service = self._service(engine, checkpoint)
        context = None if self._tls is None else self._tls.context
        app = self._app(service, checkpoint, house)
        faced = self._face is not None
        server = _Server(
            server_config(app, service.door, _DRAIN_S, self._custody, context, faced=faced)
        )
        status = EXIT_ENGINE_FAULT
        try:
            status = await self._serve(engine, service, server, nodes)
            return status
        finally:
            await nodes.close()
            # After a fault nobody answers on the port until this process has ended.
            publish_s = _PUBLISH_S if status == EXIT_OK else 0.0
            self._cut_short(status, publish_s + _STOP_S)
            await house.close()
            await asyncio.to_thread(self._close_keeper, keeper, publish_s)
            log.info("stopped")

    async def _serve(self, engine: Engine, service: Service, server: _Server, nodes: Nodes) -> int:
        serving = asyncio.create_task(server.serve(sockets=[self._listening]))
        stopping = asyncio.create_task(self._stopping.wait())
        tasks = [serving, stopping]
        status = EXIT_OK
        try:
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            await self._take_the_port()
            tasks.append(starting := asyncio.create_task(self._start(engine, service)))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return EXIT_OK
            starting.result()
            await nodes.start(self._stopping.is_set)
            self._tell_ready()
            tasks.append(failing := asyncio.create_task(engine.failed()))
            endless = [
                asyncio.create_task(nodes.watch(engine.add_producer)),
                asyncio.create_task(self._qualifier(engine, nodes).run()),
            ]
            tasks += endless
            await asyncio.wait(
                [serving, stopping, failing, *endless], return_when=asyncio.FIRST_COMPLETED
            )
            for task in endless:
                if task.done():
                    task.result()  # it never ends by itself
            if failing.done():
                log.error("engine fault (%s): stopping", failing.result().reason)
                status = EXIT_ENGINE_FAULT
            return status
        finally:
            self._cut_short(status)
            # First the engine: open streams then end with an error event, not with a reset.
            await engine.close()
            server.should_exit = True
            await serving
            if self._face is not None:
                await self._face.close()
            for task in tasks[1:]:
                task.cancel()

    async def _start(self, engine: Engine, service: Service) -> None:
        """Load the model, and read what the first request would otherwise wait for."""
        began = time.monotonic()
        await engine.start()
        log.info("loaded %s in %.1f s", service.served_name, time.monotonic() - began)
        await service.warm()
        # What was imported and loaded stays: to look for garbage in it, again and again, would
        # stop decoding and every answer for 65 ms each time.
        gc.collect()
        gc.freeze()

    def _cut_short(self, status: int, seconds: float = _STOP_S) -> None:
        """End the process with ``status`` if what begins now takes longer."""
        if self.last_resort is not None:
            self.last_resort.cancel()
        self.last_resort = threading.Timer(seconds, os._exit, (status,))
        self.last_resort.daemon = True
        self.last_resort.start()

    # Parts

    def _read_checkpoint(self) -> Checkpoint:
        cache = self._config.state_path / "digests.json"
        try:
            cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"the state directory cannot be made: {error.strerror}",
                reason="state_dir_unusable",
                field="state-dir",
                found=cache.parent,
                hint="give another one with --state-dir",
            ) from error
        return read_checkpoint(Path(self._config.model), cache, self._hashing_progress())

    def _hashing_progress(self) -> Callable[[int, int], None]:
        told_at = time.monotonic()

        def report(done: int, total: int) -> None:
            nonlocal told_at
            if self._stopping.is_set():
                raise Cancelled("the node stops")
            if time.monotonic() - told_at > _TELL_EVERY_S and total:
                told_at = time.monotonic()
                log.info("reading the weights' digests: %d %%", 100 * done // total)

        return report

    def _qualifier(self, engine: Engine, nodes: Nodes) -> Qualifier:
        loaded = engine.loaded
        known = loaded.checkpoint
        found = releases.installed(releases.DECODER)
        here = ", ".join(f"{name} {version}" for name, version in found.items())
        if self._multiplies:
            here = f"{here}, {self._multiplies}"
        subject = Subject(known.identity, loaded.layout, loaded.vocabulary, known.max_context, here)
        return Qualifier(
            engine,
            subject,
            nodes.gates,
            Verdicts(self._config.state_path),
            every_s=self._config.qualify_every_h * 3600.0,
        )

    def _make_keeper(self, checkpoint: Checkpoint) -> Keeper:
        """The tiers. Raises ``ConfigError`` (``store_locked``, ``cache_dir_unusable``, ...)."""
        config, directory = self._config, self._config.cache_path
        if not config.disk:
            return Keeper(checkpoint.identity, checkpoint.layout, secrets.token_bytes(32))
        limits = default_limits(directory)
        if config.cache_max is not None:
            limits = limits._replace(cap_bytes=config.cache_max)
        elif limits.cap_bytes < MIN_CAP:
            log.warning("the volume of %s is too small: caches are not kept on disk", directory)
            return Keeper(checkpoint.identity, checkpoint.layout, secrets.token_bytes(32))
        store_key = load_or_make(config.store_key_path)
        keeper = Keeper(checkpoint.identity, checkpoint.layout, store_key)
        keeper.attach(Store.open(directory, store_key, *limits, listener=keeper.heard))
        log.info(
            "caches are kept in %s, at most %.1f GB of them", directory, limits.cap_bytes / 1e9
        )
        return keeper

    def _close_keeper(self, keeper: Keeper, publish_s: float) -> None:
        """Publish what waits, which is the last chance to, and let go of the directory."""
        if not keeper.close(publish_s):
            log.warning("not everything could be written to disk in %.0f s", publish_s)

    def _engine_settings(self) -> EngineSettings:
        config = self._config
        return EngineSettings(
            prefill_step=config.prefill_step,
            max_active=config.max_concurrent,
            max_waiting=config.max_waiting,
            cache_bytes=config.cache_bytes,
            ram_bytes=config.ram_max,
            remote_threshold=config.remote_threshold,
        )

    def _service(self, engine: Engine, checkpoint: Checkpoint) -> Service:
        config = self._config
        return Service(
            engine,
            config.served_name or checkpoint.name,
            ApiSettings(
                hosts=config.own_names,
                origins=config.origins,
                api_keys=config.api_keys,
                keys_demanded=config.keys_demanded,
                share_caches=config.share_caches,
                default_max_tokens=config.default_max_tokens,
                default_temperature=config.default_temperature,
                lane=config.lane,
                # For `baton node`, which sends it to a producer; others have no use for it.
                model_path=str(checkpoint.path.resolve()) if is_loopback(config.host) else "",
            ),
            self._past,
            self._custody,
            KeyFiles(config.state_path),
            None if self._tls is None else self._tls.fingerprint,
            endpoint.make_room(),
            self._url,
        )

    def _app(self, service: Service, checkpoint: Checkpoint, house: Housekeeping) -> ASGIApp:
        """The endpoint, with a face if there is one to be made."""
        routes = create_routes(service)
        if self._make_face is None:
            return guarded(service, routes)
        config, secured = self._config, self._tls is not None
        port = self._listening.getsockname()[1]
        sessions = Sessions(service.keys, port=port, secured=secured)
        facing = Facing(
            board=service.board,
            inside=Inside(routes),
            sessions=sessions,
            once=Once(config.state_path, port),
            refusals=service.door.refusals,
            facts=Facts(
                model=checkpoint.path,
                served_name=service.served_name,
                address=self._url,
                state=config.state_path,
                cache=config.cache_path,
                disk=config.disk,
                keys_demanded=config.keys_demanded,
                secured=secured,
                secrets=config.secrets,
            ),
            manage=house,
        )
        self._face = self._make_face(facing)
        return guarded(service, routes, self._face, sessions)

    # The world outside

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)

    def _listen_to_supervisor(self) -> None:
        if self._channel is None:
            return
        channel, lines = self._channel, control.Lines()
        channel.setblocking(False)
        loop = asyncio.get_running_loop()

        def heard() -> None:
            try:
                data = channel.recv(4096)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                # The supervisor is dead; a decoder that nobody watches must not stay.
                loop.remove_reader(channel)
                self._stopping.set()
                self._told_to_go.set()
            elif control.GO in lines.take(data):
                self._told_to_go.set()

        loop.add_reader(channel, heard)

    async def _take_the_port(self) -> None:
        """From here on this process answers clients; the supervisor has stopped doing so."""
        if self._channel is not None:
            control.send_line(self._channel, control.SERVING)
            await self._told_to_go.wait()

    def _tell_ready(self) -> None:
        if self._channel is not None:
            control.send_line(self._channel, control.READY)
        with contextlib.suppress(BrokenPipeError):  # nobody waits for the line
            print(f"ready {self._url}", flush=True)
            if self._tls is not None:
                print(f"certificate {self._tls.path} sha256 {self._tls.fingerprint}", flush=True)
