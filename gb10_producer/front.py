"""How a producer shows itself: on the network, on its control channel, to whoever sits before it;
and which model it is that it serves.
"""

from __future__ import annotations

import logging
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
from gb10_producer.attempts import MOST, Attempt, forget, unended
from gb10_producer.beginnings import received_models
from gb10_producer.config import ProducerConfig
from gb10_producer.control import Desk, Profile, Taking
from gb10_producer.registry import Registry
from gb10_producer.server import bind
from gb10_producer.succession import Succession
from gb10_producer.trust import RegistryTrust, Trust
from gb10_producer.welcome import Welcome, tell
from protocol import releases
from protocol.control.messages import Serving
from protocol.errors import EXIT_START_AGAIN, CapacityError, ConfigError
from trust.peers import Peer

log = logging.getLogger(__name__)

_Loaded = TypeVar("_Loaded")

_WAITING: Final = (
    "There is no model here yet: this waits for a paired Mac to send one (baton node send)."
)


def say_paired(name: str) -> None:
    """On stdout."""
    print(f"paired {name}", flush=True)


@dataclass
class Asked:
    """What ends a producer, and whether it looks at it.

    ``stop``: it is to end, or ``again``: its place is to be taken by another. While ``serving``
    is not set, a model is loaded and nothing looks; ``attempt`` is that load, where the model
    was received.
    """

    stop: threading.Event = field(default_factory=threading.Event)
    serving: threading.Event = field(default_factory=threading.Event)
    again: threading.Event = field(default_factory=threading.Event)
    attempt: Attempt | None = None

    def withdraw(self) -> None:
        """Whoever asks for a stop while a model is loaded says nothing against the model."""
        if self.attempt is not None:
            self.attempt.withdraw()

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
        self._failed: Path | None = None
        self._given_up = False
        if config.unnamed and self._models is not None:
            self._named = self._models.last()
        if self._named is not None and unended(self._named) >= MOST:
            self._named, self._failed, self._given_up = None, self._named, True
        supervised = config.lifeline_fd is not None
        self._succession = Succession(
            fixed=not config.unnamed,
            restart=asked.restart if supervised else None,
            loads=lambda: self._describe(model="", waiting=False),
        )
        self._supervised = supervised
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
            taking = Taking(self._models, self._received)
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
        self,
        make: Callable[[Path | None, Callable[[], None]], _Loaded],
        waits: Callable[[], None],
        drop: Callable[[], None] = lambda: None,
    ) -> _Loaded | None:
        """What ``make`` makes of the model, once there is one; ``None`` if it is to end before.

        ``make`` is given what was received, ``None`` for what the configuration names, and is to
        call its second argument before it takes memory for it. ``waits`` is called when there is
        no model, each time; ``drop`` frees what a model has taken that came to nothing.

        Raises what ``make`` does, but for a received model's ``ConfigError`` and
        ``CapacityError``. Where the model had taken no memory yet, or nobody would start this
        process again, another model is waited for here; else by the process that takes this
        one's place (see ``status``), which finds the memory as it was.
        """
        while True:
            if self._waits and not self._await(waits):
                return None
            if self._named is None:
                self._show_loading()
                return make(None, lambda: None)
            attempt = self._asked.attempt = Attempt(self._named)
            took = threading.Event()
            try:
                self._succession.serve(self._named)
                self._show_loading()
                attempt.begin()
                made = make(self._named, took.set)
            except (ConfigError, CapacityError) as error:
                # Whoever sent it can send another: nobody has to come to this machine.
                logs.complain(error)
                log.warning(
                    "a received model is not served",
                    extra={"model": self._named.name, "reason": error.reason},
                )
            else:
                attempt.end()
                return made
            finally:
                self._asked.attempt = None
            self._failed, self._named = self._named, None
            if took.is_set() and self._supervised:
                attempt.give_up()
                self._asked.restart()
                return None
            attempt.end()
            if took.is_set():
                drop()  # only here: until the error was forgotten, its frames held the model

    def _await(self, waits: Callable[[], None]) -> bool:
        """Wait for a model; whether there is one now, and no stop."""
        self._asked.serving.set()
        if self._given_up:
            self._say_given_up()
        self._succession.expect(self._show_waiting)
        self._advertise()
        waits()
        tell(_WAITING)
        self._named = self._succession.wait(self._asked.stop)
        if self._named is None:
            return False
        self._asked.serving.clear()
        return not self._asked.stop.is_set()

    def _say_given_up(self) -> None:
        assert self._failed is not None
        self._given_up = False
        name = self._failed.name
        log.warning("a received model is given up", extra={"model": name, "loads": MOST})
        logs.complain(
            ConfigError(
                f"{name} was received, and is not loaded: it has failed before",
                reason="model_given_up",
                field="model",
                found=name,
                hint="the log of the starts before says why; send another model, or this one "
                "again to have it tried again: baton node send, on the Mac",
            )
        )

    def _received(self, model: Path) -> Serving:
        """A model was received; what becomes of it. Any thread."""
        if model != self._named:
            forget(model)
        return self._succession.received(model)

    def _show_loading(self) -> None:
        self._describe(model=self._model)
        self._advertise()

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
        failed = "" if self._failed is None else self._failed.name
        self._describe(model=failed, waiting=True)

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
