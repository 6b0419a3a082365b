"""The pictures in the README. Run: make screenshots

A producer and a decoder on this machine serve the demo's model, paired as two machines are; some
requests are made. Chromium photographs the dashboard, and the menu is opened in a real tray (Xvfb
and trayer).
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from app.demo_model import ensure
from tests.app.menubar.screen import WIDTH as SCREEN_WIDTH
from tests.app.menubar.screen import App, running, screen, settle
from tests.e2e.browsing import PHONE, WIDE, Visit, chromium, visit
from tests.e2e.paired import BATON, Box, Mac
from tests.e2e.running import until
from tests.mac_decoder.test_node import Decoder

IMAGES: Final = Path(__file__).parents[1] / "docs" / "images"
DOCUMENT: Final = Path(__file__).parents[1] / "app" / "demo_document.txt"


@contextmanager
def two_machines(root: Path, model: str) -> Iterator[Mac]:
    """A decoder with its dashboard, and a producer called gb10 that it is paired with."""
    state = root / "mac"
    state.mkdir()
    box = Box(root / "gb10", "--model", model, "--device", "cpu", "--host", "127.0.0.1", "--pair")
    where = ("--model", model, "--served-name", "SmolLM2-135M-Instruct", "--port", "0")
    decoder = Decoder(
        state,
        *where,
        *("--secrets", "file", "--remote-threshold", "64"),
        program=(BATON, "serve"),
    )
    try:
        mac = Mac(state, decoder.await_ready())
        until(lambda: "ready" in box.said or box.code() != "")
        mac.node(
            "add", f"127.0.0.1:{box.pair_port}", "--code-stdin", "--name", "mac", typed=box.code()
        )
        mac.await_state("ready")
        yield mac
    finally:
        decoder.close()
        box.running.close()


def ask(mac: Mac, messages: list[dict[str, str]], tokens: int, lane: str = "auto") -> str:
    """One answer."""
    body: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct",
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "baton": {"lane": lane},
    }
    url = f"{mac.decoder.url}/v1/chat/completions"
    return httpx.post(url, json=body, timeout=600).json()["choices"][0]["message"]["content"]


def chats(mac: Mac) -> None:
    """A document and questions about it; an edit; a short one; a repetition."""
    document = DOCUMENT.read_text()
    opening = [{"role": "system", "content": document}]
    asked = [*opening, {"role": "user", "content": "What was decided?"}]
    said = ask(mac, asked, 48)
    asked += [{"role": "assistant", "content": said}, {"role": "user", "content": "By whom?"}]
    ask(mac, asked, 32)
    ask(mac, [*opening, {"role": "user", "content": "Who is against it?"}], 40)
    ask(mac, [{"role": "user", "content": "Name three rivers."}], 24)
    ask(mac, [*opening, {"role": "user", "content": "What was decided?"}], 24)


@contextmanager
def busy(mac: Mac) -> Iterator[None]:
    """Two requests are in hand for the time of a block."""
    threads = [
        threading.Thread(
            target=ask, args=(mac, [{"role": "user", "content": f"Write about {what}."}], 700)
        )
        for what in ("tides", "a lighthouse")
    ]
    for thread in threads:
        thread.start()
    time.sleep(2.0)
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def photograph(seen: Visit, path: str, name: str, *, whole: bool = False) -> None:
    """A page as it looks once it has come to rest."""
    page = seen.open(path)
    page.wait_for_timeout(1200)
    page.screenshot(path=IMAGES / f"{name}.png", full_page=whole)


def dashboard(mac: Mac) -> None:
    """The pages, in both themes."""
    chats(mac)
    with chromium() as browser:
        url = mac.decoder.url
        with visit(browser, url, viewport=WIDE, color_scheme="light") as light:
            with busy(mac):
                photograph(light, "/", "now-light")
            photograph(light, "/requests", "requests-light")
            photograph(light, "/cache", "cache-light")
        with visit(browser, url, viewport=WIDE, color_scheme="dark") as dark:
            with busy(mac):
                photograph(dark, "/", "now-dark")
            photograph(dark, "/nodes", "nodes-dark")
        with visit(browser, url, viewport=PHONE, color_scheme="dark") as phone:
            photograph(phone, "/", "now-phone")


def menu(mac: Mac, root: Path) -> None:
    """The open menu, while the producer prefills."""
    home = root / "menu"
    home.mkdir()
    text = DOCUMENT.read_text() * 3 + "What was decided?"
    with screen(home) as tray, running(App(tray, home, "--url", mac.decoder.url)) as app:
        app.await_picture("idle")
        asking = threading.Thread(
            target=ask, args=(mac, [{"role": "user", "content": text}], 8, "remote")
        )
        asking.start()
        until(lambda: (app.shown("icon")[-1]["ring"] or 0) > 0.2)
        tray.click(SCREEN_WIDTH - 13, 12, 3)
        settle()
        os.environ["BATON_SCREENSHOTS"] = str(IMAGES)
        tray.picture("menu")
        asking.join()
        app.quit()


def main() -> None:
    """Make all of them anew."""
    IMAGES.mkdir(exist_ok=True)
    model = str(ensure(None))
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        os.environ["XDG_CONFIG_HOME"] = str(root / "settings")
        with two_machines(root, model) as mac:
            dashboard(mac)
            menu(mac, root)
    print(f"made {', '.join(sorted(one.name for one in IMAGES.glob('*.png')))}")


if __name__ == "__main__":
    main()
