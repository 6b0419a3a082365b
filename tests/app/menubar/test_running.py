"""`baton app` as a process: where it cannot be shown, and one app for each user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app import app_command
from app.menubar.alone import alone
from app.menubar.desktop import require_display
from protocol.errors import ConfigError
from tests.app.menubar.fake import fake
from tests.app.menubar.screen import App, needs_screen, running, screen, settings
from tests.app.view.snapshots import IDLE
from tests.e2e.running import until


def baton_app(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    where = {"XDG_CONFIG_HOME": str(home / "config"), "XDG_STATE_HOME": str(home / "state")}
    kept = {name: value for name, value in os.environ.items() if name not in _SCREENS}
    return subprocess.run(
        [sys.executable, "-m", "app.cli", "app", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=kept | where | environment,
    )


_SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM")


def test_without_a_screen_it_says_so_and_what_works_instead(tmp_path: Path) -> None:
    done = baton_app(tmp_path)
    assert done.returncode == 78
    assert "no_display" in done.stderr
    assert "baton status" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_screen_that_nobody_is_behind_is_none() -> None:
    with pytest.raises(ConfigError) as refused:
        require_display({"DISPLAY": ":59"})
    assert (refused.value.reason, refused.value.found) == ("no_display", ":59")
    require_display({"WAYLAND_DISPLAY": "wayland-0"})
    require_display({"DISPLAY": "elsewhere:10.0"})  # only X11 itself can tell


def test_without_a_tray_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PySide6.QtWidgets", exc_type=ImportError)
    program = (
        "import sys\n"
        "from app.menubar import running\n"
        "running._TRAY_S = 0.0\n"
        "from app.cli import main\n"
        "sys.argv = ['baton', 'app']\n"
        "main()\n"
    )
    environment = {"QT_QPA_PLATFORM": "offscreen", "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )
    assert done.returncode == 78
    assert "no_tray" in done.stderr
    assert "AppIndicator" in done.stderr


def test_without_qt_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        app_command.require_qt()
    assert refused.value.reason == "app_not_installed"
    assert ".[app" in (refused.value.hint or "")


def test_settings_that_cannot_be_read_are_told_before_an_icon_is_shown(tmp_path: Path) -> None:
    settings(tmp_path, ["port = ["])
    done = baton_app(tmp_path, QT_QPA_PLATFORM="offscreen")
    assert done.returncode == 78
    assert "settings_unreadable" in done.stderr


def test_one_app_for_each_user(tmp_path: Path) -> None:
    with alone(tmp_path):
        with pytest.raises(ConfigError) as refused, alone(tmp_path):
            pytest.fail("two of them")
        assert refused.value.reason == "app_running"
    with alone(tmp_path):
        pass


def test_a_state_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as refused, alone(tmp_path / "file"):
        pytest.fail("it can")
    assert refused.value.reason == "state_dir_unwritable"


@needs_screen
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)]
)
def test_a_signal_quits_it_and_a_second_app_is_refused(tmp_path: Path, number: int) -> None:
    with screen(tmp_path) as tray, fake() as decoder:
        decoder.begins_with(IDLE)
        with running(App(tray, tmp_path, "--url", decoder.url)) as app:
            app.await_picture("idle")
            if number == signal.SIGTERM:
                second = baton_app(tmp_path, **tray.environment)
                assert second.returncode == 78
                assert "app_running" in second.stderr
            assert app.quit(number) == 0
            assert "Traceback" not in app.log.read_text()
            until(lambda: decoder.followers == 0)
