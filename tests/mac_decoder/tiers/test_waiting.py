"""What may wait to be kept, and who waits for it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from mac_decoder.tiers import waiting
from mac_decoder.tiers.waiting import Waiting

SPACE = bytes(32)
MOST = 1000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MOST_QUEUED", MOST)


def tokens(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.uint32)


def test_so_many_bytes_may_wait_beside_one_cut_that_is_longer() -> None:
    queue = Waiting()
    longer = queue.add(SPACE, tokens(3), 5 * MOST)
    assert not queue.accepts(MOST + 1)
    assert queue.accepts(MOST)
    queue.add(SPACE, tokens(4), MOST - 10)
    assert queue.accepts(10)
    assert not queue.accepts(11)
    queue.freed(longer)
    assert queue.accepts(100 * MOST)
    assert (queue.nbytes, queue.brought) == (MOST - 10, 6 * MOST - 10)


def test_rows_wait_for_as_long_as_they_are_needed_and_a_lookup_for_as_long_as_nothing_is_kept() -> (
    None
):
    queue = Waiting()
    number = queue.add(SPACE, tokens(300), 700)
    before = queue.now()
    found = threading.Event()

    def looks() -> None:
        queue.wait(SPACE, tokens(200), before)
        found.set()

    thread = threading.Thread(target=looks)
    thread.start()
    queue.wait(SPACE, tokens(200, 7), before)
    queue.wait(bytes([1] * 32), tokens(200), before)
    assert not found.wait(0.05)
    assert not queue.drain(0.01)
    queue.kept(number)
    assert found.wait(20)
    thread.join()
    assert queue.drain(0)
    assert queue.nbytes == 700
    assert not queue.accepts(301)
    queue.freed(number)
    assert queue.nbytes == 0
