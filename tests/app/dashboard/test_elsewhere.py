"""Pages of other sites in a real browser, and what they can do to the dashboard."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from app.dashboard.addresses import PAGES
from app.dashboard_login import logged_in_address
from tests.e2e.browsing import CHROMIUM, Visit, chromium, visit
from tests.e2e.running import until
from tests.mac_decoder.test_node import Decoder

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


KEY = "a-key-of-the-settings"

PATIENT_MS = 200_000
"""A browser and a decoder that start have a machine to themselves nowhere: no test here is about
how long that takes.
"""


def decoder(state: Path, model: Path, *args: str) -> Decoder:
    program = (sys.executable, "-m", "app.decoder")
    given = ("--model", str(model), "--port", "0", *args)
    return Decoder(state, *given, program=program).await_ready()


@pytest.fixture
def running(tmp_path: Path, checkpoint: Callable[[str], Path]) -> Iterator[Decoder]:
    made = decoder(tmp_path, checkpoint("llama"))
    yield made
    made.close()


@pytest.fixture
def locked(tmp_path: Path, checkpoint: Callable[[str], Path]) -> Iterator[Decoder]:
    """One that demands keys."""
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(KEY)
    made = decoder(tmp_path, checkpoint("llama"), "--api-keys-file", str(keys))
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


@contextmanager
def visiting(browser: Browser, url: str) -> Iterator[Visit]:
    with visit(browser, url) as made:
        made.page.set_default_timeout(PATIENT_MS)
        yield made


def refused(running: Decoder) -> dict[str, int]:
    asked = running.client.get(f"{running.url}/status", headers={"authorization": f"Bearer {KEY}"})
    return asked.json()["door"]["refused"]


def is_left_alone(page: Page) -> bool:
    """Whether a page that is there is not loaded again and again."""
    page.evaluate("window.isTheSame = true")
    page.wait_for_timeout(2000)
    return page.evaluate("window.isTheSame === true")


def test_seventy_images_and_frames_make_no_page(running: Decoder, browser: Browser) -> None:
    paths = [*sorted(PAGES), "/_nicegui_ws/socket.io/?EIO=4&transport=polling"]
    addresses = [f"{running.url}{paths[n % len(paths)]}" for n in range(70)]
    images = "".join(f'<img src="{one}&{n}">' for n, one in enumerate(addresses) if "?" in one)
    images += "".join(f'<img src="{one}?{n}">' for n, one in enumerate(addresses) if "?" not in one)
    frames = "".join(f'<iframe src="{running.url}{path}"></iframe>' for path in sorted(PAGES))
    with elsewhere(images + frames) as address, visiting(browser, address) as foreign:
        foreign.page.goto(address, wait_until="commit")
        until(
            lambda: refused(running).get("origin_not_allowed", 0) == 70 + len(PAGES),
            PATIENT_MS / 1000,
        )
    # Nothing was made: what makes pages is not even there.
    assert "the dashboard is up" not in running.log
    with visiting(browser, running.url) as ours:
        ours.open("/")
        expect(ours.page.locator("#lost")).to_have_attribute(
            "data-lost", "false", timeout=PATIENT_MS
        )
    assert "too_many_pages" not in refused(running)


@pytest.mark.parametrize("which", ["running", "locked"])
def test_a_link_leads_to_a_page_of_the_session_that_there_is(
    which: str, request: pytest.FixtureRequest, browser: Browser, tmp_path: Path
) -> None:
    running: Decoder = request.getfixturevalue(which)
    with (
        elsewhere(f'<a href="{running.url}/nodes">there</a>') as address,
        visiting(browser, running.url) as ours,
    ):
        ours.page.goto(logged_in_address(running.url, tmp_path / "decoder"))
        ours.page.locator("#headline").wait_for()
        ours.page.goto(address)
        ours.page.click("a")
        ours.page.wait_for_url(f"{running.url}/nodes")
        ours.page.locator("#headline").wait_for()
        expect(ours.page.locator(".who")).to_contain_text(
            "You may change things", timeout=PATIENT_MS
        )
        expect(ours.page.locator("#lost")).to_have_attribute(
            "data-lost", "false", timeout=PATIENT_MS
        )
        assert is_left_alone(ours.page)
        assert "page_of_another_session" not in refused(running)


def test_where_keys_are_demanded_a_link_without_a_session_leads_to_the_login(
    locked: Decoder, browser: Browser
) -> None:
    with (
        elsewhere(f'<a href="{locked.url}/nodes">there</a>') as address,
        visiting(browser, locked.url) as ours,
    ):
        ours.page.goto(address)
        ours.page.click("a")
        ours.page.wait_for_url(f"{locked.url}/login")
        expect(ours.page.get_by_label("API key")).to_be_visible(timeout=PATIENT_MS)
        assert is_left_alone(ours.page)


def test_a_page_of_before_the_login_is_loaded_again(
    running: Decoder, browser: Browser, tmp_path: Path
) -> None:
    """Two tabs of one browser: the login in one is the other's, too, once it connects again."""
    with visiting(browser, running.url) as ours:
        before = ours.open("/")
        expect(before.locator(".who")).to_contain_text("Log in", timeout=PATIENT_MS)
        entering = ours.page.context.new_page()
        entering.set_default_timeout(PATIENT_MS)
        entering.goto(logged_in_address(running.url, tmp_path / "decoder"))
        entering.locator("#headline").wait_for()
        # The network is gone for a moment: what was connected connects again.
        before.evaluate("window.socket.io.engine.close()")
        expect(before.locator(".who")).to_contain_text("You may change things", timeout=PATIENT_MS)
        expect(before.locator("#lost")).to_have_attribute("data-lost", "false", timeout=PATIENT_MS)
        # How often it was refused until it was loaded is the browser's; then it is let in.
        count = refused(running)["page_of_another_session"]
        assert count >= 1
        assert is_left_alone(before)
        assert refused(running)["page_of_another_session"] == count
