"""One run of the app: what it needs, the signals that end it, and its end."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from platformdirs import user_log_path, user_state_path
from PySide6.QtCore import QEventLoop, QSocketNotifier, QTimer
from PySide6.QtWidgets import QApplication, QSystemTrayIcon

from app.menubar import desktop
from app.menubar.alone import alone
from app.menubar.place import Given
from app.menubar.tray import Options, Tray

_TRAY_S: Final = 15.0
"""At login the panel may come after the app."""

_AT_ONCE: Final = 130


def run(given: Given, *, attach_only: bool, trace: Path | None = None) -> int:
    """Show the app until it is quit; the exit status.

    Raises ``ConfigError``: ``no_display``, ``no_tray``, ``app_running``, and what the settings
    are wrong with.
    """
    given.place()  # what is wrong with the settings is told now, where somebody reads it
    desktop.require_display()
    with alone(user_state_path("baton", appauthor=False)):
        desktop.before_qt()
        # Qt's own arguments are not this command's.
        application = QApplication(["baton"])
        application.setApplicationName("Baton")
        application.setApplicationDisplayName("Baton")
        application.setQuitOnLastWindowClosed(False)
        desktop.stay_out_of_the_dock()
        with _ended_by_signals(application) as asked_to_end:
            if not _tray_is_there(asked_to_end):
                if asked_to_end():
                    return 0
                raise desktop.no_tray()
            options = Options(given, log_file(), attach_only, trace)
            tray = Tray(options)
            tray.begin()
            try:
                return application.exec()
            finally:
                tray.end()


def log_file() -> Path:
    """Where the log of a decoder goes that the app starts."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Logs" / "Baton" / "decoder.log"
    return user_log_path("baton", appauthor=False) / "decoder.log"


def _tray_is_there(asked_to_end: Callable[[], bool]) -> bool:
    until = time.monotonic() + _TRAY_S
    while not QSystemTrayIcon.isSystemTrayAvailable():
        if asked_to_end() or time.monotonic() > until:
            return False
        waiting = QEventLoop()
        QTimer.singleShot(500, waiting.quit)
        waiting.exec()
    return True


@contextmanager
def _ended_by_signals(application: QApplication) -> Iterator[Callable[[], bool]]:
    """Ctrl-C, SIGTERM and SIGHUP quit as the menu does; a second one ends the process at once.

    What is given says whether one has come: before the event loop runs nothing ends it.
    """
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    heard: set[int] = set()

    def quit_by(number: int, _frame: object) -> None:
        if number in heard:
            os._exit(_AT_ONCE)  # what was started ends by its lifeline
        heard.add(number)
        application.quit()

    def read() -> None:
        # Python runs handlers between its own instructions only: this is one.
        ours.recv(4096)

    notifier = QSocketNotifier(ours.fileno(), QSocketNotifier.Type.Read)
    notifier.activated.connect(read)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    previous = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        for number in numbers:
            if before[number] != signal.SIG_IGN:
                signal.signal(number, quit_by)
        yield lambda: bool(heard)
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        notifier.setEnabled(False)
        ours.close()
        theirs.close()
