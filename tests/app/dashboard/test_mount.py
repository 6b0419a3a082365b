"""The dashboard in a decoder as a user starts it: what it costs, who reaches it, how it ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from app.dashboard.addresses import PAGES
from app.dashboard.mount import MOST_PAGES
from mac_decoder.api.keys import KeyFiles
from mac_decoder.api.once import Once
from tests.e2e.page_socket import act, client_of, greeted, hears, page_of, query_of, socket_of
from tests.e2e.running import until
from tests.mac_decoder.test_node import Decoder

SERVE = (sys.executable, "-m", "app.decoder")
KEY = "a-key-of-the-settings"


@pytest.fixture
def decoder(tmp_path: Path, checkpoint: Callable[[str], Path]) -> Iterator[Callable[..., Decoder]]:
    made: list[Decoder] = []

    def make(*args: str, program: tuple[str, ...] = SERVE) -> Decoder:
        model = str(checkpoint("llama"))
        made.append(Decoder(tmp_path, "--model", model, "--port", "0", *args, program=program))
        return made[-1].await_ready()

    yield make
    for running in made:
        running.close()


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]
) -> Iterator[Decoder]:
    """One for all tests that leave it as it was."""
    made = Decoder(
        tmp_path_factory.mktemp("state"),
        *("--model", str(checkpoint("llama")), "--port", "0"),
        program=SERVE,
    )
    yield made.await_ready()
    made.close()


def page(running: Decoder, path: str = "/", **headers: str) -> httpx.Response:
    return page_of(running.url, path, **headers)


def test_it_costs_nothing_before_the_first_page_and_then_answers(decoder) -> None:
    running = decoder()
    if sys.platform == "linux":
        assert not loaded(running)
    shown = page(running)
    assert shown.status_code == 200
    assert "the dashboard is up" in running.log
    if sys.platform == "linux":
        assert loaded(running)
    with socket_of(running.url, shown, origin=running.url) as opened:
        assert greeted(opened).startswith("40{")
    assert not Path(".nicegui").exists()


def loaded(running: Decoder) -> bool:
    """Whether a library is mapped that only NiceGUI imports."""
    return any("/aiohttp/" in mapped.path for mapped in running.child().memory_maps())


def test_nothing_of_a_page_leads_elsewhere(running: Decoder) -> None:
    shown = page(running, **{"x-forwarded-prefix": "//evil.example"})
    policy = dict(
        part.split(" ", 1) for part in shown.headers["content-security-policy"].split("; ")
    )
    nonce = re.search(r"'nonce-([\w-]+)'", policy.pop("script-src"))
    assert nonce is not None
    elsewhere = {source for value in policy.values() for source in value.split()}
    assert elsewhere == {"'none'", "'self'", "'unsafe-inline'", "data:"}
    assert policy["frame-ancestors"] == "'none'"
    scripts = re.findall(r"<script[^>]*>", shown.text)
    assert scripts
    assert all(f'nonce="{nonce[1]}"' in script for script in scripts)
    assert nonce[1] not in page(running).headers["content-security-policy"]
    assert "evil.example" not in shown.text
    for name, value in (
        ("x-frame-options", "DENY"),
        ("referrer-policy", "no-referrer"),
        ("x-content-type-options", "nosniff"),
        ("cross-origin-resource-policy", "same-origin"),
        ("cache-control", "no-store"),
    ):
        assert shown.headers[name] == value
    named = re.findall(r'(?:src|href)="([^"]+)"', shown.text)
    named += re.findall(r'@import url\("([^"]+)"\)', shown.text)
    assert len(named) > 5
    assert [one for one in named if not one.startswith(("/_nicegui/", "/assets/", "data:"))] == []


@pytest.mark.parametrize("transport", ["websocket", "polling"])
def test_a_page_of_another_site_gets_no_connection(running: Decoder, transport: str) -> None:
    path = f"/_nicegui_ws/socket.io/?EIO=4&transport={transport}"
    foreign = {"origin": "http://evil.example"}
    for headers in (foreign, {"host": "evil.example"}):
        assert running.client.get(running.url + path, headers=headers).status_code == 403
    here = ("127.0.0.1", int(running.url.rpartition(":")[2]))
    for name, headers in (("127.0.0.1", foreign), ("evil.example", {})):
        opened = socket.create_connection(here, 10)  # led here under that name
        url = f"ws://{name}:{here[1]}{path}"
        with pytest.raises(InvalidStatus) as caught:
            connect(url, sock=opened, proxy=None, additional_headers=headers)
        assert caught.value.response.status_code == 403


def test_a_page_whose_websocket_hangs_polls(running: Decoder) -> None:
    asked = query_of(page(running)).replace("websocket", "polling")
    url = f"{running.url}/_nicegui_ws/socket.io/?{asked}"
    own = {"origin": running.url}
    opened = httpx.get(url, headers=own)
    assert not [name for name in opened.headers if name.startswith("access-control")]
    url += f"&sid={json.loads(opened.text[1:])['sid']}"
    assert httpx.post(url, headers=own, content="40").text == "OK"
    assert httpx.get(url, headers=own).text.startswith("40{")
    for foreign in ("http://evil.example", "null"):
        assert httpx.post(url, headers={"origin": foreign}, content="41").status_code == 403
    assert httpx.post(url, headers=own, content="4" * 70_000).status_code == 413


def test_where_keys_are_demanded_there_is_no_page_without_a_login(decoder, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(KEY)
    running = decoder("--api-keys-file", str(keys))
    assert (page(running).status_code, page(running).headers["location"]) == (303, "/login")
    for path in ("/", "/_nicegui/3/x.js", "/favicon.ico", "/assets/baton.css"):
        assert page(running, path, accept="*/*").status_code == 401
    port = int(running.url.rpartition(":")[2])
    token = Once(tmp_path / "decoder", port).leave()
    entered = page(running, f"/login?once={token}")
    cookie = entered.headers["set-cookie"].partition(";")[0]
    shown = page(running, cookie=cookie)
    assert shown.status_code == 200
    with pytest.raises(InvalidStatus) as caught:
        socket_of(running.url, shown)
    assert caught.value.response.status_code == 401
    with socket_of(running.url, shown, cookie=cookie) as opened:
        assert greeted(opened).startswith("40{")
        httpx.post(f"{running.url}/logout", headers={"cookie": cookie})
        assert end_of(opened, 5) == 1008
    for secret in (token, cookie.partition("=")[2], KEY):
        assert secret not in running.log


def logged_in(running: Decoder, state: Path) -> dict[str, str]:
    """The cookie of a browser of this user's."""
    token = Once(state, int(running.url.rpartition(":")[2])).leave()
    entered = page(running, f"/login?once={token}")
    return {"cookie": entered.headers["set-cookie"].partition(";")[0]}


def refused(running: Decoder, reason: str) -> int:
    return running.get("/status").json()["door"]["refused"].get(reason, 0)


def test_a_connection_belongs_to_the_session_of_its_page(decoder, tmp_path: Path) -> None:
    running = decoder()
    mine, other = (logged_in(running, tmp_path / "decoder") for _ in range(2))
    wrong = ((mine, {}), (mine, other), ({}, mine))
    for count, (of_the_page, given) in enumerate(wrong, start=1):
        shown = page(running, **of_the_page)
        with socket_of(running.url, shown, **given) as opened:
            told = greeted(opened)
        assert told.startswith("44")  # refused: the browser then loads the page
        assert "handshake" in json.loads(told[2:])["message"]
        assert refused(running, "page_of_another_session") == count
        # Nothing of the page has gone with it.
        with socket_of(running.url, shown, **of_the_page) as opened:
            assert greeted(opened).startswith("40{")
    assert "Traceback" not in running.log


def test_a_page_that_was_asked_for_with_a_key_belongs_to_that_key(decoder, tmp_path: Path) -> None:
    keys = KeyFiles(tmp_path / "decoder")
    # Two whose caches are shared have nothing else that tells them apart.
    first, second = (
        {"authorization": f"Bearer {keys.create(name, shares_caches=True)}"} for name in "ab"
    )
    running = decoder()
    shown = page(running, **first)
    others = (second, {}, logged_in(running, tmp_path / "decoder"))
    for count, given in enumerate(others, start=1):
        with socket_of(running.url, shown, **given) as opened:
            assert greeted(opened).startswith("44")
        assert refused(running, "page_of_another_session") == count
    with socket_of(running.url, shown, **first) as opened:
        assert greeted(opened).startswith("40{")
    with socket_of(running.url, page(running), **first) as opened:
        assert greeted(opened).startswith("44")


def test_so_does_one_that_polls_and_every_request_of_it(decoder, tmp_path: Path) -> None:
    running = decoder()
    mine = logged_in(running, tmp_path / "decoder")
    asked = query_of(page(running, **mine)).replace("websocket", "polling")
    url = f"{running.url}/_nicegui_ws/socket.io/?{asked}"
    opened = httpx.get(url)
    foreign = f"{url}&sid={json.loads(opened.text[1:])['sid']}"
    httpx.post(foreign, content="40")
    assert httpx.get(foreign).text.startswith("44")
    assert refused(running, "page_of_another_session") == 1
    opened = httpx.get(url, headers=mine)
    url += f"&sid={json.loads(opened.text[1:])['sid']}"
    for method in ("GET", "POST"):
        taken = httpx.request(method, url, content="40" if method == "POST" else None)
        told = (taken.status_code, taken.json()["error"]["code"])
        assert told == (403, "page_of_another_session")
    upgrade = url.replace("http", "ws", 1).replace("polling", "websocket")
    with pytest.raises(InvalidStatus) as caught:
        connect(upgrade, proxy=None)
    assert caught.value.response.status_code == 403
    assert refused(running, "page_of_another_session") == 4
    assert httpx.post(url, headers=mine, content="40").text == "OK"
    assert httpx.get(url, headers=mine).text.startswith("40{")


def clears(opened: ClientConnection, shown: httpx.Response) -> bool:
    """Whether a page does what is said to it: the browser is then told to show new buttons."""
    opened.send(act(shown, do="clear"))
    while "buttons" not in hears(opened):
        pass
    return True


def test_a_connection_says_nothing_for_another_page(decoder, tmp_path: Path) -> None:
    """Whatever address a message names: the identifier of a page is no right to it."""
    running = decoder()
    mine = logged_in(running, tmp_path / "decoder")
    theirs, own = page(running, "/try", **mine), page(running, "/try")
    with socket_of(running.url, own) as opened:
        assert greeted(opened).startswith("40{")
        for number, (name, more) in enumerate(
            {
                "event": json.loads(act(theirs, do="clear")[2:])[1],
                "javascript_response": {"request_id": "x", "result": 1},
                "ack": {"next_message_id": 1},
                "log": {"level": "error", "message": "x"},
                "handshake": {"tab_id": "t", "document_id": "d", "next_message_id": 0},
            }.items(),
            start=1,
        ):
            opened.send(f"42{json.dumps([name, {**more, 'client_id': client_of(theirs)}])}")
            until(lambda n=number: refused(running, "page_of_another_session") == n)
        for strange in (["event"], *(["event", one] for one in (None, 7, [], {}, "x"))):
            opened.send("42" + json.dumps(strange))
        opened.send("42" + json.dumps(["ack", {"client_id": "none", "next_message_id": 1}]))
        # It goes on as before, and the other page is as good as it was.
        assert clears(opened, own)
        assert refused(running, "page_of_another_session") == 5
    with socket_of(running.url, theirs, **mine) as opened:
        assert greeted(opened).startswith("40{")
        assert clears(opened, theirs)
    assert "Traceback" not in running.log


def test_what_no_page_says_is_in_no_log_and_not_held(running: Decoder) -> None:
    own = page(running, "/try")
    with socket_of(running.url, own) as opened:
        assert greeted(opened).startswith("40{")
        for said in (
            *(
                '42["handshake"]',
                '42["event"]',
                '42["ack"]',
                '42[["SECRET"]]',
                "42{}",
                '42"SECRET"',
            ),
            f'42["event",{{"client_id":"{client_of(own)}","listener_id":"SECRET","args":[]}}]',
            f'42["event",{{"client_id":"{client_of(own)}","id":"SECRET","args":"SECRET"}}]',
            f'42["ack",{{"client_id":"{client_of(own)}","next_message_id":"SECRET"}}]',
            f'42["log",{{"client_id":"{client_of(own)}","level":"SECRET"}}]',
            '42["SECRET",{"a":[{"SECRET":1}]}]',
            "4SECRET",
        ):
            opened.send(said)
        assert clears(opened, own), "it goes on as before"
    assert "Traceback" not in running.log
    assert "SECRET" not in running.log


def test_pieces_that_are_said_to_come_are_not_collected(running: Decoder) -> None:
    own = page(running, "/try")
    with socket_of(running.url, own) as opened:
        assert greeted(opened).startswith("40{")
        before = running.child().memory_info().rss
        opened.send('45999999999-["event",{"client_id":"x"}]')
        for _ in range(2500):
            opened.send(bytes(60_000))
        assert clears(opened, own), "it goes on as before"
        assert running.child().memory_info().rss - before < 75_000_000


IMAGE = {
    "accept": "image/avif,image/webp,image/apng,image/svg+xml,image/*,*/*;q=0.8",
    "sec-fetch-site": "cross-site",
    "sec-fetch-mode": "no-cors",
    "sec-fetch-dest": "image",
    "referer": "http://evil.example/",
}


@pytest.mark.parametrize("knows_metadata", [True, False])
def test_images_of_another_sites_page_make_no_page_here(decoder, *, knows_metadata: bool) -> None:
    """They come without an Origin, so only what a browser says of their use tells them."""
    running = decoder()
    sent = {k: v for k, v in IMAGE.items() if knows_metadata or not k.startswith("sec-")}
    paths = sorted(PAGES)
    if knows_metadata:
        paths += ["/favicon.ico", "/assets/baton.css", "/_nicegui/x.js"]
        paths += ["/_nicegui_ws/socket.io/?EIO=4&transport=polling"]

    def flood() -> None:
        with httpx.Client(headers=sent) as client:
            for number in range(70):
                answer = client.get(running.url + paths[number % len(paths)])
                assert answer.status_code == (403 if knows_metadata else 200)

    flood()
    # NiceGUI is not even imported: there is no page of it, nor anything that could be one.
    assert "the dashboard is up" not in running.log
    with socket_of(running.url, page(running)) as first:
        assert greeted(first).startswith("40{")
        flood()
        with ExitStack() as stack:
            for _ in range(MOST_PAGES - 1):
                opened = stack.enter_context(socket_of(running.url, page(running)))
                assert greeted(opened).startswith("40{")
    assert refused(running, "too_many_pages") == 0
    assert refused(running, "origin_not_allowed") == (140 if knows_metadata else 0)


@pytest.mark.parametrize("dest", ["iframe", "embed", "object", "frame", "empty"])
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_nor_do_frames_of_it(running: Decoder, dest: str, site: str) -> None:
    """A page of ours is shown in no frame: it would be made for nothing."""
    framed = {"sec-fetch-site": site, "sec-fetch-mode": "navigate", "sec-fetch-dest": dest}
    told = page(running, **framed)
    assert (told.status_code, told.json()["error"]["code"]) == (403, "origin_not_allowed")


def test_a_link_of_another_site_leads_here_by_a_page_of_ours(running: Decoder) -> None:
    """A browser sends no strict cookie with such a navigation, and does with the next."""
    led = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    led |= {"sec-fetch-dest": "document", "sec-fetch-user": "?1"}
    shown = page(running, "/requests", **led)
    assert shown.status_code == 200
    assert 'content="0; url=/requests"' in shown.text
    assert "client_id" not in shown.text
    assert shown.headers["cache-control"] == "no-store"
    for site in ("none", "same-origin", "same-site"):
        assert "client_id" in page(running, "/requests", **{**led, "sec-fetch-site": site}).text


def end_of(opened: ClientConnection, within_s: float) -> int | None:
    """The code that a connection is closed with, whatever is said before."""
    until_s = time.monotonic() + within_s
    try:
        while True:
            if str(opened.recv(max(0.0, until_s - time.monotonic()))) == "2":
                opened.send("3")
    except ConnectionClosed:
        return opened.close_code


@pytest.mark.parametrize("how", ["option", "module"])
def test_without_it_there_is_no_page(decoder, how: str) -> None:
    if how == "option":
        running = decoder("--no-dashboard")
    else:
        running = decoder(program=(sys.executable, "-m", "mac_decoder"))
    for path in ("/", "/login", "/favicon.ico", "/_nicegui_ws/socket.io/"):
        missing = page(running, path)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "route_not_found")


def test_an_open_page_does_not_hold_up_the_end(decoder) -> None:
    running = decoder()
    with socket_of(running.url, page(running)) as opened:
        greeted(opened)
        began = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        assert end_of(opened, 5) == 1012
        assert running.process.wait(15) == 0
    assert time.monotonic() - began < 8
    assert "stopped" in running.log
    assert "Traceback" not in running.log


def test_a_page_of_the_process_before_is_told_to_load_again(decoder) -> None:
    running = decoder()
    shown = page(running)
    with socket_of(running.url, shown) as opened:
        greeted(opened)
        first = running.child().pid
        running.child().kill()
        end_of(opened, 10)
    until(lambda: running.ready() == 200 and running.child().pid != first)
    with socket_of(running.url, shown) as opened:
        told = greeted(opened)
    assert told.startswith("44")  # refused: the browser then loads the page
    assert "handshake" in json.loads(told[2:])["message"]
    with socket_of(running.url, page(running)) as opened:
        assert greeted(opened).startswith("40{")


def test_pages_are_bounded(running: Decoder) -> None:
    with ExitStack() as stack:
        for _ in range(MOST_PAGES - 1):
            stack.enter_context(socket_of(running.url, page(running)))
        with socket_of(running.url, page(running)):
            with pytest.raises(InvalidStatus) as caught:
                socket_of(running.url, page(running))
            assert caught.value.response.status_code == 503
            assert running.get("/status").json()["door"]["refused"]["too_many_pages"] == 1
        # One has left, and makes room.
        until(lambda: lets_in(running), 5)


def lets_in(running: Decoder) -> bool:
    try:
        with socket_of(running.url, page(running)) as opened:
            return greeted(opened).startswith("40{")
    except InvalidStatus:
        return False
