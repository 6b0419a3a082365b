"""Work that would hold up the windows, in a thread, with its answers in theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from PySide6.QtCore import QObject, Qt, Signal

from protocol.errors import BatonError


class Work(QObject):
    """``what`` is done in a thread of its own; ``done`` or ``failed`` is then called in Qt's.

    ``said`` may be sent from within, and is heard in Qt's thread, too. Who owns this may be gone
    by then: nothing is called once :meth:`forget` was.
    """

    said = Signal(object)
    _ended = Signal(object, object)

    def __init__(
        self,
        what: Callable[[Work], Any],
        done: Callable[[Any], None],
        failed: Callable[[BatonError], None],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._what, self._done, self._failed = what, done, failed
        self._forgotten = False
        self._ended.connect(self._tell, Qt.ConnectionType.QueuedConnection)
        self._thread = threading.Thread(target=self._run, name="baton-work", daemon=True)

    def start(self) -> Work:
        """Begin."""
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
        if not self._forgotten:
            self._ended.emit(value, error)

    def _tell(self, value: Any, error: BatonError | None) -> None:
        if self._forgotten:
            return
        if error is None:
            self._done(value)
        else:
            self._failed(error)
