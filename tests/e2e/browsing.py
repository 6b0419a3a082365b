"""A real Chromium that looks at a real decoder's pages, and what it noticed on the way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final
from urllib.parse import urlsplit

from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    ViewportSize,
    expect,
    sync_playwright,
)

CHROMIUM: Final = shutil.which("chromium") or shutil.which("google-chrome")

PATIENCE_MS: Final = 20_000
"""For what has no limit of its own: pages of a machine that does other things too."""

WIDE: Final[ViewportSize] = {"width": 1000, "height": 800}
PHONE: Final[ViewportSize] = {"width": 390, "height": 844}

expect.set_options(timeout=PATIENCE_MS)

_ON_THIS_MACHINE: Final = ("http", "https", "ws", "wss")


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium, headless."""
    with sync_playwright() as play:
        # Without a sandbox, which needs a user that tests in a container do not have.
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Noticed:
    """What went wrong on a page, and whom it asked."""

    errors: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)


class Visit:
    """A browser's page of one decoder."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url = url
        self.noticed = Noticed()
        self.page: Page = context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.noticed.errors.append(str(error)))
        context.on("request", self._request)
        self.page.on("websocket", lambda socket: self._address(socket.url))

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.noticed.errors.append(f"{message.text} ({message.location.get('url')})")

    def _request(self, request: Request) -> None:
        self._address(request.url)

    def _address(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme in _ON_THIS_MACHINE and parts.netloc != urlsplit(self.url).netloc:
            self.noticed.elsewhere.append(url)

    def open(self, path: str) -> Page:
        """The page at a path, once it is fed."""
        self.page.goto(self.url + path)
        self.page.locator("#headline").wait_for()
        return self.page

    def figures(self) -> dict[str, Any]:
        """Every number of the page by its place in the snapshot; a place that is shown twice
        must say the same.
        """
        found: dict[str, Any] = {}
        read = """() => [...document.querySelectorAll('[data-path]')]
            .filter(e => e.dataset.path)
            .map(e => [e.dataset.path, e.dataset.value, e.dataset.basis, e.textContent])"""
        for path, value, basis, text in self.page.evaluate(read):
            told = (json.loads(value), basis, text.strip())
            assert found.setdefault(path, told)[:2] == told[:2], path
        return found

    def faults(self) -> list[str]:
        """What axe-core calls a serious fault, or worse."""
        script = resources.files("axe_playwright_python") / "axe.min.js"
        # The page's own policy lets no script in but its own; this one comes from the test.
        self.page.evaluate(script.read_text())
        found = self.page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{fault['id']}: {fault['help']} {[node['html'][:160] for node in fault['nodes']]}"
            for fault in found["violations"]
            if fault["impact"] in ("serious", "critical")
        ]

    def overflows(self) -> bool:
        """Whether one has to scroll sideways."""
        return self.page.evaluate(
            "() => document.documentElement.scrollWidth > document.documentElement.clientWidth"
        )


@contextmanager
def visit(browser: Browser, url: str, **options: Any) -> Iterator[Visit]:
    """A fresh profile: no cookie of another visit."""
    context = browser.new_context(**options)
    try:
        yield Visit(context, url)
    finally:
        context.close()
