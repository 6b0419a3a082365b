"""Work that would hold up the windows, in a thread, with its answers in theirs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
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
        value: Any = None
        error: BatonError | None = None
        try:
            value = self._what(self)
        except BatonError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001 - the last frame of this thread
            log.error("work for a window broke: %s", traced(raised))
            error = EngineFault(
                "something in the app broke",
                reason="internal_error",
                found=type(raised).__name__,
                hint="the app's log says where",
            )
        self._ended.emit(value, error)

    def _tell(self, value: Any, error: BatonError | None) -> None:
        _going_on.discard(self)
        if self._forgotten:
            return
        if error is None:
            self._done(value)
        else:
            self._failed(error)


_going_on: Final[set[Work]] = set()
"""Held until they are heard: a Qt object must not be the last thing that a thread lets go of."""
