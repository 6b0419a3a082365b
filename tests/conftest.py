"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import checkpoints
from tests.ordinary import THOROUGH

OURS = ("app", "gb10_producer", "mac_decoder", "protocol", "trust")

# Two busy cores make any example slow now and then; the time limit of a test is enough.
settings.register_profile("house", deadline=None, max_examples=40)
settings.register_profile("thorough", deadline=None, max_examples=THOROUGH)  # `make soak`
settings.load_profile("house")


def pytest_collection_finish() -> None:
    """Thousands of tests are there for good: a twentieth of the time went into searches for garbage
    among them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_settings_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands that tests run read no settings of whoever runs them."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        yield


@pytest.fixture(autouse=True)
def no_log_of_another_test() -> Iterator[None]:
    """What a node that a test ran in this process set up of logging ends with the test: its
    handlers write to a stream that is closed by then.
    """
    root = logging.getLogger()
    handlers = root.handlers[:]
    levels = {name: logger.level for name, logger in _loggers()}
    yield
    root.handlers[:] = handlers
    for name, logger in _loggers():
        logger.setLevel(levels.get(name, logging.NOTSET))


def _loggers() -> Iterator[tuple[str, logging.Logger]]:
    yield "", logging.getLogger()
    for package in OURS:
        yield package, logging.getLogger(package)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint(name, dtype="float32", seed=0, reasoning=False)``: its directory, made once.

    Read only: a test that changes files copies the directory first.
    """
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[tuple[str, str, int, bool], Path] = {}

    def get(name: str, dtype: str = "float32", seed: int = 0, reasoning: bool = False) -> Path:
        key = (name, dtype, seed, reasoning)
        if key not in made:
            path = root / f"{name}-{dtype}-{seed}-{'thinks' if reasoning else 'plain'}"
            made[key] = checkpoints.make(name, path, dtype=dtype, seed=seed, reasoning=reasoning)
        return made[key]

    return get
