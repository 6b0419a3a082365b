"""Work that would hold up the windows, in a thread, with its answers in theirs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

from PySide6.QtCore import QObject, Qt, Signal

from mac_decoder.reporting import traced
from protocol.errors import BatonError, EngineFault

log = logging.getLogger(__name__)


class Work(QObject):
    """``what`` is done in a thread of its own; ``done`` or ``failed`` is then called in Qt's.

    ``said`` may be sent from within, and is heard in Qt's thread, too. Nothing is called any more
    once ``owner`` is gone, or :meth:`forget` was called; the thread may outlive both. What is no
    ``BatonError`` is heard as ``EngineFault`` (``internal_error``): no window waits for ever.
    """

    said = Signal(object)
    _ended = Signal(object, object)

    def __init__(
        self,
        what: Callable[[Work], Any],
        done: Callable[[Any], None],
        failed: Callable[[BatonError], None],
        owner: QObject,
    ) -> None:
        # No child of its owner's: the thread still has it when that is gone.
        super().__init__()
        self._what, self._done, self._failed = what, done, failed
        self._forgotten = False
        owner.destroyed.connect(self.forget)
        self._ended.connect(self._tell, Qt.ConnectionType.QueuedConnection)
        self._thread = threading.Thread(target=self._run, name="baton-work", daemon=True)

    def start(self) -> Work:
        """Begin."""
        _going_on.add(self)
        self._thread.start()
        return self

    def forget(self) -> None:
        """Whatever comes of it is of no interest any more."""
        self._forgotten = True

    def _run(self) -> None:
        outcome = _Outcome()
        with outcome:
            outcome.value = self._what(self)
        self._ended.emit(outcome.value, outcome.error)

    def _tell(self, value: Any, error: BatonError | None) -> None:
        _going_on.discard(self)
        if self._forgotten:
            return
        if error is None:
            self._done(value)
        else:
            self._failed(error)


class _Outcome:
    """What came of a block: the last frame of its thread, beyond which nothing is raised."""

    value: Any = None
    error: BatonError | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if isinstance(error, BatonError):
            self.error = error
        elif error is not None:
            # The place alone: what it says may hold what nobody should read.
            log.error("work for a window broke: %s", traced(error))
            self.error = EngineFault(
                "something in the app broke",
                reason="internal_error",
                found=type(error).__name__,
                hint="the app's log says where",
            )
        return True


_going_on: Final[set[Work]] = set()
"""Held until they are heard: a Qt object must not be the last thing that a thread lets go of."""
