"""For tests of what must not be waited for: a pipe that nobody writes to."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def soon(seconds: int = 20) -> Iterator[None]:
    """The block ends within this time, or the test has failed: in the main thread alone."""

    def late(number: int, frame: object) -> None:
        raise AssertionError("it was waited for")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
