"""The window of a first run, driven as a user does: by keys and clicks, without a screen."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before Qt makes its application, once for the process.
os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
pytest.importorskip("PySide6.QtWidgets")

from PySide6.QtCore import QEvent, QObject, Qt
from PySide6.QtGui import QColor, QPalette
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QFileDialog

from app import demo_fetch, demo_model, settings
from app.demo_fetch import Progress
from app.menubar.first_run import FirstRun
from protocol import halves
from protocol.errors import Cancelled, ConfigError


@pytest.fixture(scope="module")
def qt() -> QApplication:
    found = QApplication.instance() or QApplication(["baton"])
    assert isinstance(found, QApplication)
    return found


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(settings, "default_path", lambda: tmp_path / "config.toml")
    monkeypatch.setattr(demo_model, "cache_root", lambda given: tmp_path / "cache")
    return tmp_path


class Fetching:
    """Stands for the download: does as the test says, in the window's own thread for it."""

    def __init__(self) -> None:
        self.model = Path("/models/demo")
        self.go_on = threading.Event()
        self.error: ConfigError | None = None
        self.thread: threading.Thread | None = None
        self.stopped = threading.Event()

    def __call__(self, tell: demo_fetch.Tell, stop: demo_fetch.Stop) -> Path:
        self.thread = threading.current_thread()
        tell(Progress("fetch", 0, 90_000_000))
        tell(Progress("fetch", 45_000_000, 90_000_000))
        until = time.monotonic() + 20
        while not self.go_on.wait(0.01):
            if stop():
                self.stopped.set()
                raise Cancelled("not wanted")
            assert time.monotonic() < until
        if self.error is not None:
            raise self.error
        return self.model


class Opened:
    """An open window, what it told, and how to wait for it."""

    def __init__(self, fetching: Fetching, now: str = "") -> None:
        self.chosen: list[Path] = []
        self.closed: list[bool] = []
        self.window = FirstRun(fetching, now)
        self.finished = 0
        self.window.finished.connect(self._finish)
        self.window.chosen.connect(lambda model: self.chosen.append(model))
        self.window.destroyed.connect(lambda: self.closed.append(True))
        self.window.open_in_front()

    def _finish(self) -> None:
        self.finished += 1

    def until(self, what: Callable[[], object]) -> None:
        """Turn Qt's loop until it holds."""
        end = time.monotonic() + 20
        while not what():
            assert time.monotonic() < end, "it never happened"
            QTest.qWait(5)

    def press(self, key: Qt.Key) -> None:
        QTest.keyClick(self.window, key)

    @property
    def lines(self) -> tuple[str, str]:
        """What it says, and what went wrong."""
        says, wrong = self.window.says, self.window.wrong
        return (
            says.text() if not says.isHidden() else "",
            wrong.text() if not wrong.isHidden() else "",
        )


@pytest.fixture
def fetching() -> Fetching:
    return Fetching()


@pytest.fixture
def opened(qt: QApplication, fetching: Fetching) -> Iterator[Opened]:
    found = Opened(fetching)
    yield found
    if not found.closed:
        found.window.close()
        found.until(lambda: found.closed)


def test_return_fetches_the_demo_model_serves_it_and_closes(
    opened: Opened, fetching: Fetching
) -> None:
    assert "92.9 MB to fetch" in opened.window.demo_about.text()
    opened.press(Qt.Key.Key_Return)
    opened.until(lambda: opened.window.bar.value() == 500)
    assert opened.lines == ("Fetched 45.0 MB of 90.0 MB", "")
    assert fetching.thread is not threading.main_thread()
    assert not opened.window.path.isEnabled()
    fetching.go_on.set()
    opened.until(lambda: opened.closed)
    assert opened.chosen == [fetching.model]
    assert opened.finished == 1
    assert settings.named("serve", "model") == str(fetching.model)


def test_escape_stops_it_first_and_closes_then(opened: Opened, fetching: Fetching) -> None:
    opened.press(Qt.Key.Key_Return)
    opened.until(lambda: fetching.thread)
    opened.press(Qt.Key.Key_Escape)
    opened.until(lambda: opened.window.leave.text() == "Not now")
    assert opened.lines == ("", "")
    assert opened.window.begin.isEnabled()
    opened.press(Qt.Key.Key_Escape)
    opened.until(lambda: opened.closed)
    assert opened.finished == 1
    assert opened.chosen == []
    assert settings.named("serve", "model") is None


def test_closing_it_ends_what_it_began(opened: Opened, fetching: Fetching) -> None:
    opened.press(Qt.Key.Key_Return)
    opened.until(lambda: fetching.thread)
    opened.window.close()
    assert fetching.stopped.wait(10)
    opened.until(lambda: opened.closed)
    assert opened.chosen == []


def test_without_internet_it_says_why_and_a_directory_still_works(
    opened: Opened, fetching: Fetching, checkpoint
) -> None:
    fetching.error = ConfigError(
        "nobody answers", reason="demo_model_unavailable", hint="choose a directory"
    )
    fetching.go_on.set()
    opened.press(Qt.Key.Key_Return)
    opened.until(lambda: opened.lines[1])
    assert opened.lines[1] == "Nobody answers (demo_model_unavailable).\n→ choose a directory"
    model = checkpoint("llama")
    opened.window.path.setFocus()
    QTest.keyClicks(opened.window.path, str(model))
    assert opened.window.own.isChecked()
    assert not opened.window.begin.isEnabled(), "it was not looked at yet"
    opened.until(lambda: opened.window.begin.isEnabled())
    assert opened.lines[0].startswith("Can be served: llama, ")
    assert opened.lines[1] == ""
    QTest.keyClick(opened.window.path, Qt.Key.Key_Return)
    opened.until(lambda: opened.closed)
    assert opened.chosen == [model]
    assert settings.named("serve", "model") == str(model)


def test_a_directory_that_cannot_be_served_is_refused_and_another_can_be_typed(
    opened: Opened, home: Path, checkpoint
) -> None:
    opened.window.take(str(home))
    opened.until(lambda: opened.lines[1])
    assert "(model_missing)" in opened.lines[1]
    assert not opened.window.begin.isEnabled()
    opened.window.take(str(checkpoint("llama")))
    opened.until(lambda: opened.window.begin.isEnabled())


def test_the_model_that_is_served_now_is_there_to_be_changed(
    qt: QApplication, fetching: Fetching, checkpoint, home: Path
) -> None:
    now = str(checkpoint("llama"))
    opened = Opened(fetching, now)
    assert opened.window.own.isChecked()
    assert opened.window.path.text() == now
    opened.until(lambda: opened.window.begin.isEnabled())
    opened.press(Qt.Key.Key_Escape)
    opened.until(lambda: opened.closed)
    assert opened.chosen == []
    assert settings.named("serve", "model") is None, "nothing was chosen"


def test_the_chooser_offers_directories(
    opened: Opened, checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[QFileDialog] = []
    monkeypatch.setattr(QFileDialog, "open", lambda dialog: asked.append(dialog))
    opened.window.browse.click()
    (dialog,) = asked
    assert dialog.fileMode() == QFileDialog.FileMode.Directory
    dialog.fileSelected.emit(str(checkpoint("llama")))
    opened.until(lambda: opened.window.begin.isEnabled())
    assert opened.window.path.text() == str(checkpoint("llama"))


def test_settings_that_cannot_be_changed_are_told(opened: Opened, home: Path, checkpoint) -> None:
    opened.window.take(str(checkpoint("llama")))
    opened.until(lambda: opened.window.begin.isEnabled())
    (home / "config.toml").write_text("[serve")
    opened.window.begin.click()
    opened.until(lambda: opened.lines[1])
    assert "(settings_unreadable)" in opened.lines[1]
    assert opened.chosen == []


def test_everything_is_reached_by_tab_and_told_by_name(opened: Opened) -> None:
    window = opened.window
    opened.until(window.isActiveWindow)
    window.demo.setFocus()
    reached = []
    for _ in range(8):
        reached.append(window.focusWidget())
        opened.press(Qt.Key.Key_Tab)
    assert {window.demo, window.path, window.browse, window.leave, window.begin} <= {*reached}
    window.demo.setFocus()
    QTest.keyClick(window.demo, Qt.Key.Key_Down)
    assert window.own.isChecked(), "arrows go from one choice to the other"
    assert window.path.accessibleName()


def test_where_the_demo_model_cannot_be_made_a_directory_is_asked_for(
    qt: QApplication, fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "find_spec", lambda name: None if name == "torch" else object())
    opened = Opened(fetching)
    assert opened.window.own.isChecked()
    assert not opened.window.demo.isEnabled()
    assert "torch is not installed" in opened.window.demo_about.text()
    opened.window.close()
    opened.until(lambda: opened.closed)


def _contrast(one: QColor, other: QColor) -> float:
    """The contrast of two colours, by WCAG."""
    lights = []
    for colour in (one, other):
        parts = [colour.redF(), colour.greenF(), colour.blueF()]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        lights.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize(("back", "ink"), [("#efefef", "#000000"), ("#2b2b2f", "#eeeeee")])
def test_an_error_can_be_read_in_light_and_in_dark(opened: Opened, back: str, ink: str) -> None:
    palette = QPalette(QColor(back))
    palette.setColor(QPalette.ColorRole.Window, QColor(back))
    palette.setColor(QPalette.ColorRole.WindowText, QColor(ink))
    opened.window.setPalette(palette)
    opened.window.take("/nowhere")
    opened.until(lambda: opened.lines[1])
    wrong = opened.window.wrong
    said = wrong.palette().color(QPalette.ColorRole.WindowText)
    assert _contrast(said, QColor(back)) >= 4.5
    assert said != QColor(ink), "it is told apart"


def test_its_thread_holds_nothing_up(opened: Opened, fetching: Fetching) -> None:
    class Beats(QObject):
        count = 0

        def timerEvent(self, event: QEvent) -> None:
            self.count += 1

    beats = Beats()
    beats.startTimer(5)
    opened.press(Qt.Key.Key_Return)
    opened.until(lambda: fetching.thread)
    before = beats.count
    opened.until(lambda: beats.count > before + 20)
