"""Producers and decoders that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.running import RunningProducer
from tests.mac_decoder.test_node import Decoder


@pytest.fixture
def produce(tmp_path: Path) -> Iterator[Callable[..., RunningProducer]]:
    made: list[RunningProducer] = []

    def make(*args: str, key: bytes | None = None) -> RunningProducer:
        made.append(RunningProducer(tmp_path, *args, key=key))
        return made[-1]

    yield make
    for running in made:
        running.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Decoder]]:
    made: list[Decoder] = []

    def make(*args: str, key: bytes | None = None) -> Decoder:
        made.append(Decoder(tmp_path, *args, key=key))
        return made[-1]

    yield make
    for running in made:
        running.close()
