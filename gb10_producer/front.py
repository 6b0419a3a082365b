"""How a producer shows itself: on the network, on its control channel, to whoever sits before it;
and which model it is that it serves.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from gb10_producer import logs
from gb10_producer.advertise import Advertisement, addresses_of
from gb10_producer.beginnings import received_models
from gb10_producer.config import ProducerConfig
from gb10_producer.control import Desk, Profile, Taking
from gb10_producer.registry import Registry
from gb10_producer.server import bind
from gb10_producer.succession import Succession
from gb10_producer.trust import RegistryTrust, Trust
from gb10_producer.welcome import Welcome, tell
from protocol import releases
from protocol.errors import EXIT_START_AGAIN, CapacityError, ConfigError
from trust.peers import Peer

_Loaded = TypeVar("_Loaded")

_WAITING: Final = (
    "There is no model here yet: this waits for a paired Mac to send one (baton node send)."
)


def say_paired(name: str) -> None:
    """On stdout."""
    print(f"paired {name}", flush=True)


@dataclass(frozen=True)
class Asked:
    """What ends a producer, and whether it looks at it.

    ``stop``: it is to end, or ``again``: its place is to be taken by another. While ``serving``
    is not set, a model is loaded and nothing looks.
    """

    stop: threading.Event = field(default_factory=threading.Event)
    serving: threading.Event = field(default_factory=threading.Event)
    again: threading.Event = field(default_factory=threading.Event)

    def restart(self) -> None:
        """Have another process take this one's place."""
        self.again.set()
        self.stop.set()


class Front:
    """How this producer shows itself, and which model it serves."""

    def __init__(self, config: ProducerConfig, registry: Registry | None, asked: Asked) -> None:
        self._config = config
        self._registry = registry
        self._asked = asked
        takes = registry is not None and config.synthetic is None
        self._models = received_models(config) if takes else None
        self._named = None
        if config.unnamed and self._models is not None:
            self._named = self._models.last()
        supervised = config.lifeline_fd is not None
        self._succession = Succession(
            fixed=not config.unnamed,
            restart=asked.restart if supervised else None,
            loads=lambda: self._describe(waiting=False),
        )
        self._desk: Desk | None = None
        self._advertisement: Advertisement | None = None

    def status(self) -> int:
        """The exit status where nothing has failed."""
        return EXIT_START_AGAIN if self._asked.again.is_set() else 0

    def desk(self, trust: Trust) -> Desk | None:
        """For a producer with a registry; else nobody asks."""
        if self._registry is None:
            return None
        assert isinstance(trust, RegistryTrust)
        taking = None
        if self._models is not None:
            self._models.sweep(time.time())
            taking = Taking(self._models, self._succession.received)
        profile = Profile(self._registry.name, _version(), self._model)
        self._desk = Desk(trust, profile, taking)
        if self._waits:
            self._succession.expect(self._show_waiting)
        return self._desk

    def open(self, port: int, trust: Trust, stack: ExitStack) -> None:
        """Say on the network where this is, and show a code if one is wanted."""
        config, registry = self._config, self._registry
        assert registry is not None
        self._advertisement = advertise(config, registry, port, stack, self._model)
        if config.pair:
            shown = welcome(config, registry, port, self._advertisement, trust.refresh)
            stack.callback(shown.stop)
            shown.start()

    def load(
        self, make: Callable[[Path | None], _Loaded], waits: Callable[[], None]
    ) -> _Loaded | None:
        """What ``make`` makes of the model, once there is one; ``None`` if a stop comes before.

        ``make`` is given what was received, ``None`` for what the configuration names; ``waits``
        is called when there is none, each time. Raises what ``make`` does, but for a received
        model's ``ConfigError`` and ``CapacityError``: another one is waited for then.
        """
        while True:
            if self._waits:
                self._asked.serving.set()
                self._succession.expect(self._show_waiting)
                self._advertise()
                waits()
                tell(_WAITING)
                self._named = self._succession.wait(self._asked.stop)
                if self._named is None:
                    return None
                self._asked.serving.clear()
                if self._asked.stop.is_set():
                    return None
            try:
                if self._named is not None:
                    self._succession.serve(self._named)
                self._describe(model=self._model)
                self._advertise()
                return make(self._named)
            except (ConfigError, CapacityError) as error:
                if self._named is None:
                    raise
                # Whoever sent it can send another: nobody has to come to this machine.
                logs.complain(error)
                self._named = None

    @property
    def _waits(self) -> bool:
        return self._config.unnamed and self._named is None

    @property
    def _model(self) -> str:
        """What is served, by its directory's name; empty if nothing is."""
        if self._named is not None:
            return self._named.name
        return _model_name(self._config)

    def _show_waiting(self) -> None:
        self._describe(model="", waiting=True)

    def _advertise(self) -> None:
        if self._advertisement is not None:
            self._advertisement.serve(self._model)

    def _describe(self, **changes: Any) -> None:
        if self._desk is not None:
            self._desk.profile = replace(self._desk.profile, **changes)


def advertise(
    config: ProducerConfig,
    registry: Registry,
    port: int,
    stack: ExitStack,
    model: str,
    instance: str | None = None,
) -> Advertisement | None:
    """Say where this is while ``stack`` lasts, if that is wanted; see :class:`Advertisement`."""
    if not config.advertised:
        return None
    advertisement = Advertisement(
        name=registry.name,
        addresses=addresses_of(config.address),
        port=port,
        model=model,
        instance=instance,
    )
    stack.callback(advertisement.stop)
    advertisement.start()
    return advertisement


def _model_name(config: ProducerConfig) -> str:
    """What is served, by its directory's name; empty if nothing is."""
    return (config.synthetic or "") if config.model is None else config.model.resolve().name


def _version() -> str:
    """Of Baton, as a message can carry it."""
    (found,) = releases.installed(["baton-llm"]).values()
    return re.sub(r"[^A-Za-z0-9_.:-]", "-", found)[:64] or "unknown"


def welcome(
    config: ProducerConfig,
    registry: Registry,
    port: int,
    advertisement: Advertisement | None,
    changed: Callable[[], None] = lambda: None,
) -> Welcome:
    """Codes for the producer that serves on ``port``; ``changed`` is called once one was good."""
    listener = bind(config.address, config.pair_port, "--pair-port")
    pair_port = listener.getsockname()[1]
    called = _called(config.address, pair_port)
    if advertisement is not None:
        called = [registry.name, *called]

    def paired(peer: Peer) -> None:
        changed()
        say_paired(peer.name)

    def opened(open: bool) -> None:
        if advertisement is not None:
            advertisement.pair(pair_port if open else 0)

    return Welcome(
        listener,
        registry.peers,
        registry.own,
        name=registry.name,
        port=port,
        called=called,
        paired=paired,
        opened=opened,
    )


def _called(host: str, port: int) -> list[str]:
    """What may be typed at the decoder for what is bound there, without zeroconf."""
    hosts = addresses_of(host) or [socket.gethostname()]
    if port == ProducerConfig.pair_port:
        return hosts
    return [f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in hosts]
