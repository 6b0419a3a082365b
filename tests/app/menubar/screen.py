"""A screen of the test's own, with a tray on it: Xvfb and trayer. And the app on it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.running import until

WIDTH, HEIGHT = 640, 440
TOOLS = ("Xvfb", "trayer", "xdotool", "import", "convert")
LACKING = [tool for tool in TOOLS if shutil.which(tool) is None]

needs_screen = pytest.mark.skipif(
    bool(LACKING), reason=f"Debian's xvfb, trayer, xdotool and imagemagick: no {LACKING}"
)


class Screen:
    """A screen with a tray at its upper right."""

    def __init__(self, display: str, pictures: Path) -> None:
        self.display, self._pictures = display, pictures

    @property
    def environment(self) -> dict[str, str]:
        return {"DISPLAY": self.display, "QT_QPA_PLATFORM": "xcb", "LC_ALL": "C.UTF-8"}

    def tool(self, *words: str) -> str:
        environment = os.environ | self.environment
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def picture(self, name: str) -> Path:
        """A screenshot, kept in the test's directory; without what is empty of the screen, if
        asked for, in $BATON_SCREENSHOTS.
        """
        file = self._pictures / f"{name}.png"
        self.tool("import", "-window", "root", str(file))
        if wanted := os.environ.get("BATON_SCREENSHOTS"):
            Path(wanted).mkdir(parents=True, exist_ok=True)
            # The screen is black where nothing is.
            self.tool("convert", str(file), "-trim", "+repage", f"{wanted}/{name}.png")
        return file

    def icon_in(self, name: str) -> str:
        """A digest of what the tray's icon looks like in the screenshot of that name."""
        crop = f"24x24+{WIDTH - 25}+0"
        words = ("-crop", crop, "+repage", "-format", "%#", "info:")
        return self.tool("convert", str(self._pictures / f"{name}.png"), *words)

    def click(self, x: int, y: int, button: int = 1) -> None:
        self.tool("xdotool", "mousemove", str(x), str(y), "click", str(button))

    def press(self, *keys: str) -> None:
        self.tool("xdotool", "key", "--delay", "60", *keys)


@contextmanager
def screen(directory: Path, tint: str = "0x2b2b2b") -> Iterator[Screen]:
    """A screen until the end of the block."""
    reading, writing = os.pipe()
    server = subprocess.Popen(
        ["Xvfb", "-displayfd", str(writing), "-screen", "0", f"{WIDTH}x{HEIGHT}x24"],
        pass_fds=[writing],
        stderr=subprocess.DEVNULL,
    )
    os.close(writing)
    with os.fdopen(reading) as said:
        display = f":{said.readline().strip()}"
    made = Screen(display, directory)
    panel = subprocess.Popen(
        [
            *("trayer", "--edge", "top", "--align", "right", "--widthtype", "request"),
            *("--height", "24", "--transparent", "true", "--alpha", "0", "--tint", tint),
        ],
        env=os.environ | made.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield made
    finally:
        for process in (panel, server):
            process.terminate()
            process.wait(10)


class App:
    """``baton app`` on a screen, and what it says that it shows."""

    def __init__(
        self, on: Screen | None, home: Path, *arguments: str, more: dict[str, str] | None = None
    ) -> None:
        self.trace = home / "trace.jsonl"
        self.trace.touch()
        self.log = home / "app.log"
        where = {
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_CACHE_HOME": str(home / "cache"),
        }
        environment = os.environ | where | (on.environment if on else {}) | (more or {})
        words = [sys.executable, "-m", "app.cli", "app", "--trace", str(self.trace), *arguments]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, env=environment)

    def shown(self, what: str) -> list[Any]:
        """Everything of a kind that was shown, the latest last."""
        lines = self.trace.read_text().splitlines()
        return [value for line in lines for name, value in json.loads(line).items() if name == what]

    @property
    def picture(self) -> str:
        """Which icon is shown now."""
        found = self.shown("icon")
        return found[-1]["picture"] if found else ""

    def lines(self) -> list[str]:
        """The lines of the menu as it was last laid out."""
        return [item["text"] for item in self.shown("menu")[-1] if item["text"]]

    def await_picture(self, *wanted: str, timeout_s: float = 60.0) -> None:
        """Wait until one of these icons is shown."""
        with suppress(AssertionError):
            return until(lambda: self.picture in wanted, timeout_s)
        pytest.fail(f"{wanted} is not shown, but {self.shown('icon')}; {self.log.read_text()}")

    def quit(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


@contextmanager
def running(app: App) -> Iterator[App]:
    try:
        yield app
    finally:
        app.close()


def settle(seconds: float = 0.6) -> None:
    """Until the screen shows what the app has painted."""
    time.sleep(seconds)


def settings(home: Path, lines: Sequence[str]) -> Path:
    """A file of settings with these lines in ``[serve]``."""
    file = home / "config" / "baton" / "config.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(["[serve]", *lines, ""]))
    return file
