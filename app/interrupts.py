"""Ctrl-C while a command has nothing to end yet."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_once() -> Iterator[None]:
    """Within, Ctrl-C ends this process as it ends any program: at once, and without a traceback.

    Whoever starts something that must be ended sets a handler of its own first. What was
    ignored (``nohup``) stays ignored.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
