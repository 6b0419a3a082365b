"""Producers and links of the tests; each test must leave no thread and no descriptor."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mac_decoder.handoff.client import ProducerLink
from mac_decoder.handoff.connection import Producer
from mac_decoder.handoff.generations import Generations
from mac_decoder.handoff.trust import Trust, trust_of_key
from protocol.deadlines import Timing
from protocol.layout import Layout
from tests.mac_decoder.handoff.producer import IDENTITY, KEY, LAYOUT, TIMING, TestProducer


class Numbers:
    """Generations without a file."""

    failure = None

    def retry(self) -> None:
        """There is nothing that could fail."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def take(self) -> int:
        with self._lock:
            self._last += 1
            return self._last


def _descriptors() -> int:
    path = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return len(os.listdir(path))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    deadline = time.monotonic() + 2.0
    while True:
        left = [t for t in threading.enumerate() if t not in threads and t.is_alive()]
        if not left and _descriptors() <= descriptors:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
        gc.collect()  # takes a second where both frameworks are loaded, and is hardly ever needed
    assert not left
    assert _descriptors() <= descriptors


@pytest.fixture
def make_producer(nothing_left: None) -> Iterator[Callable[..., TestProducer]]:
    made: list[TestProducer] = []

    def make(**options: object) -> TestProducer:
        made.append(TestProducer(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for producer in made:
        producer.stop()


@pytest.fixture
def make_link(
    nothing_left: None, make_producer: Callable[..., TestProducer]
) -> Iterator[Callable[..., ProducerLink]]:
    made: list[ProducerLink] = []

    def make(
        producer: TestProducer | None = None,
        *,
        url: str = "",
        layout: Layout = LAYOUT,
        trust: Trust | None = None,
        max_connections: int = 4,
        timing: Timing = TIMING,
        numbers: Generations | None = None,
        called: str = "",
    ) -> ProducerLink:
        target = Producer(
            url=url or (producer.url if producer else ""),
            trust=trust or trust_of_key(KEY),
            identity=IDENTITY,
            layout=layout,
            timing=timing,
        )
        made.append(
            ProducerLink(
                target, numbers or Numbers(), max_connections=max_connections, called=called
            )
        )
        made[-1].start()
        return made[-1]

    yield make
    for link in made:
        link.close()


@pytest.fixture
def producer(make_producer: Callable[..., TestProducer]) -> TestProducer:
    return make_producer()


@pytest.fixture
def link(producer: TestProducer, make_link: Callable[..., ProducerLink]) -> ProducerLink:
    return make_link(producer)


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]
