"""Pages of other sites in a real browser, and what they can do to the dashboard."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from app.dashboard.addresses import PAGES
from app.dashboard_login import logged_in_address
from tests.e2e.browsing import CHROMIUM, chromium, visit
from tests.e2e.running import until
from tests.mac_decoder.test_node import Decoder

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def running(tmp_path: Path, checkpoint: Callable[[str], Path]) -> Iterator[Decoder]:
    program = (sys.executable, "-m", "app.decoder")
    made = Decoder(
        tmp_path, "--model", str(checkpoint("llama")), "--port", "0", program=program
    ).await_ready()
    yield made
    made.close()


@contextmanager
def elsewhere(body: str) -> Iterator[str]:
    """The address of a page of another site: `localhost` is another one than 127.0.0.1."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = f"<!doctype html><title>Elsewhere</title>{body}".encode()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://localhost:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def refused(running: Decoder) -> dict[str, int]:
    return running.get("/status").json()["door"]["refused"]


def test_seventy_images_and_frames_make_no_page(running: Decoder, browser: Browser) -> None:
    paths = [*sorted(PAGES), "/_nicegui_ws/socket.io/?EIO=4&transport=polling"]
    addresses = [f"{running.url}{paths[n % len(paths)]}" for n in range(70)]
    images = "".join(f'<img src="{one}&{n}">' for n, one in enumerate(addresses) if "?" in one)
    images += "".join(f'<img src="{one}?{n}">' for n, one in enumerate(addresses) if "?" not in one)
    frames = "".join(f'<iframe src="{running.url}{path}"></iframe>' for path in sorted(PAGES))
    with elsewhere(images + frames) as address, visit(browser, address) as foreign:
        foreign.page.goto(address)
        until(lambda: refused(running).get("origin_not_allowed", 0) == 70 + len(PAGES), 30)
    # Nothing was made: what makes pages is not even there.
    assert "the dashboard is up" not in running.log
    with visit(browser, running.url) as ours:
        ours.open("/")
        expect(ours.page.locator("#lost")).to_have_attribute("data-lost", "false")
    assert "too_many_pages" not in refused(running)


def test_a_link_leads_to_a_page_of_the_session_that_there_is(
    running: Decoder, browser: Browser, tmp_path: Path
) -> None:
    with (
        elsewhere(f'<a href="{running.url}/nodes">there</a>') as address,
        visit(browser, running.url) as ours,
    ):
        ours.page.goto(logged_in_address(running.url, tmp_path / "decoder"))
        ours.page.locator("#headline").wait_for()
        ours.page.goto(address)
        ours.page.click("a")
        ours.page.wait_for_url(f"{running.url}/nodes")
        ours.page.locator("#headline").wait_for()
        expect(ours.page.locator(".who")).to_contain_text("You may change things")
        expect(ours.page.locator("#lost")).to_have_attribute("data-lost", "false")
        # It is connected, and not loaded again and again.
        ours.page.wait_for_timeout(2000)
        assert "page_of_another_session" not in refused(running)


def test_a_page_of_before_the_login_is_loaded_again(
    running: Decoder, browser: Browser, tmp_path: Path
) -> None:
    """Two tabs of one browser: the login in one is the other's, too, once it connects again."""
    with visit(browser, running.url) as ours:
        before = ours.open("/")
        expect(before.locator(".who")).to_contain_text("Log in")
        entering = ours.page.context.new_page()
        entering.goto(logged_in_address(running.url, tmp_path / "decoder"))
        entering.locator("#headline").wait_for()
        # The network is gone for a moment: what was connected connects again.
        before.evaluate("window.socket.io.engine.close()")
        expect(before.locator(".who")).to_contain_text("You may change things")
        expect(before.locator("#lost")).to_have_attribute("data-lost", "false")
        before.wait_for_timeout(2000)
        assert refused(running)["page_of_another_session"] == 1
