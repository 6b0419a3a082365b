"""Qt without a screen, for tests that drive it in their own process."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")


@pytest.fixture(scope="session")
def qt() -> Any:
    """The application object: there is one in a process."""
    widgets = pytest.importorskip("PySide6.QtWidgets", exc_type=ImportError)
    found = widgets.QApplication.instance() or widgets.QApplication(["baton"])
    found.setQuitOnLastWindowClosed(False)
    return found
