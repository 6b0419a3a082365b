"""The user's browser: asked for in any thread, opened in Qt's, which alone may."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Final

from PySide6.QtCore import QObject, Qt, QUrl, Signal
from PySide6.QtGui import QDesktopServices

_OPENS_S: Final = 10.0


class Browser(QObject):
    """Made in Qt's thread."""

    _wanted = Signal(str, object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._wanted.connect(self._open, Qt.ConnectionType.QueuedConnection)

    def open(self, address: str) -> bool:
        """Whether the desktop has a browser for it. Any thread but Qt's, which it waits for."""
        opened: Future[bool] = Future()
        self._wanted.emit(address, opened)
        try:
            return opened.result(_OPENS_S)
        except TimeoutError:
            return False

    def _open(self, address: str, opened: Future[bool]) -> None:
        opened.set_result(QDesktopServices.openUrl(QUrl(address)))
