"""Letting Qt work, in a test that has no event loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from PySide6.QtWidgets import QApplication


def spin(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Let Qt work until it holds. The clock may stand still: turns are counted."""
    for _ in range(int(timeout_s / 0.005)):
        if condition():
            return
        QApplication.processEvents()
        time.sleep(0.005)
    raise AssertionError("it did not happen in time")


def rest(seconds: float) -> None:
    """Let Qt work for so long."""
    for _ in range(int(seconds / 0.005)):
        QApplication.processEvents()
        time.sleep(0.005)
