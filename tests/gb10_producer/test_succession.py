"""Which received model is served, and what becomes of another one that comes."""

from __future__ import annotations

import threading
from pathlib import Path

from gb10_producer.succession import Succession
from tests.gb10_producer.producer import wait_until

FIRST, SECOND = Path("/first"), Path("/second")


def waiting(succession: Succession, stop: threading.Event) -> list[Path | None]:
    """What comes of waiting in another thread."""
    came: list[Path | None] = []
    succession.expect(lambda: None)
    threading.Thread(target=lambda: came.append(succession.wait(stop)), daemon=True).start()
    return came


def test_what_comes_between_is_not_missed_nor_shown_as_missing() -> None:
    """Whether it waits already, or only says that it will, and where it says so again."""
    shown: list[str] = []
    succession = Succession(fixed=False, restart=None, loads=lambda: shown.append("loads"))
    succession.expect(lambda: shown.append("waits"))
    succession.expect(lambda: shown.append("waits"))
    assert succession.received(FIRST) == "now"
    succession.expect(lambda: shown.append("waits"))
    assert succession.wait(threading.Event()) == FIRST
    assert shown == ["waits", "loads"]
    succession.expect(lambda: shown.append("waits"))
    assert succession.received(FIRST) == "now", "it could not be loaded, and comes again"
    assert succession.wait(threading.Event()) == FIRST
    assert shown == ["waits", "loads"] * 2


def test_the_first_model_that_comes_is_loaded_and_the_next_takes_its_place() -> None:
    restarts: list[bool] = []
    succession = Succession(fixed=False, restart=lambda: restarts.append(True))
    came = waiting(succession, threading.Event())
    assert succession.received(FIRST) == "now"
    wait_until(lambda: came)
    assert came == [FIRST]
    assert succession.received(FIRST) == "now", "it is loaded, or was"
    assert restarts == []
    assert succession.received(SECOND) == "restarting"
    assert restarts == [True]


def test_what_is_served_from_the_start_is_replaced_too() -> None:
    restarts: list[bool] = []
    succession = Succession(fixed=False, restart=lambda: restarts.append(True))
    succession.serve(FIRST)
    assert succession.received(FIRST) == "now"
    assert succession.received(SECOND) == "restarting"
    assert restarts == [True]


def test_where_nobody_would_start_again_or_the_model_was_named_it_is_kept() -> None:
    alone = Succession(fixed=False, restart=None)
    alone.serve(FIRST)
    assert alone.received(SECOND) == "kept"
    named = Succession(fixed=True, restart=lambda: None)
    assert named.received(SECOND) == "kept"


def test_a_stop_ends_the_wait() -> None:
    stop = threading.Event()
    came = waiting(Succession(fixed=False, restart=None), stop)
    stop.set()
    wait_until(lambda: came)
    assert came == [None]
