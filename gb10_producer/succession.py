"""Which received model a producer serves, and what becomes of another one that comes.

A producer that was started without ``--model`` serves the model that was received last. One that
has none loads the first that comes; in place of one that is served, or that has taken memory and
could not be, another process takes over: no model is ever unloaded from memory that a device has
used, where somebody starts this process again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from protocol.control.messages import Serving

_LOOK_S: Final = 0.1


class Succession:
    """All methods may be called from any thread, :meth:`wait` by whoever loads."""

    def __init__(
        self,
        *,
        fixed: bool,
        restart: Callable[[], None] | None,
        loads: Callable[[], None] = lambda: None,
    ) -> None:
        """``fixed``: the model was named at the start, and stays.

        ``restart`` ends this process and has it started again; ``None`` where nobody would.
        ``loads`` is called before anybody is told that a model is loaded now.
        """
        self._fixed = fixed
        self._loads = loads
        self._restart = restart
        self._lock = threading.Lock()
        self._serves: Path | None = None
        self._waits = False
        self._came = threading.Event()

    def serve(self, model: Path) -> None:
        """This received model is served from now on, or loaded."""
        with self._lock:
            self._serves = model

    def expect(self, shows: Callable[[], None]) -> None:
        """From now on the next model that comes is to be loaded; nothing, if that is so already.

        ``shows`` is called if it was not, before anybody can be told that theirs is loaded.
        """
        with self._lock:
            if not self._waits and not self._came.is_set():
                self._serves, self._waits = None, True
                shows()

    def wait(self, stop: threading.Event) -> Path | None:
        """The expected model, once it has come; ``None`` once ``stop`` is set."""
        while not self._came.is_set():
            if stop.wait(_LOOK_S):
                return None
        with self._lock:
            self._came.clear()
            return self._serves

    def received(self, model: Path) -> Serving:
        """A model was received; what becomes of it."""
        with self._lock:
            if self._fixed:
                return "kept"
            if self._serves == model:
                return "now"
            if self._waits:
                self._serves, self._waits = model, False
                self._loads()
                self._came.set()
                return "now"
        if self._restart is None:
            return "kept"
        self._restart()
        return "restarting"
