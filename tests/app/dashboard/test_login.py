"""Logging in and out over real sockets, before NiceGUI is there."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.dashboard.mount import Dashboard
from mac_decoder.api.keys import KeyFiles
from mac_decoder.api.once import VALID_S, Once
from mac_decoder.api.settings import ApiSettings
from protocol.checkpoint import read_checkpoint
from tests.mac_decoder.api.recital import Recital, make_recital
from tests.mac_decoder.api.scripted import Part, ScriptedEngine
from tests.mac_decoder.api.serving import Server, serving

KEY = "a-key-of-the-settings"


async def nothing(_: Part) -> None: ...


@pytest.fixture(scope="module")
def recital(tmp_path_factory: pytest.TempPathFactory) -> Recital:
    return make_recital(tmp_path_factory.mktemp("recital"))


def shown(recital: Recital, state: Path, settings: ApiSettings) -> Any:
    checkpoint = read_checkpoint(recital.path)
    return serving(
        lambda: ScriptedEngine(checkpoint, nothing),
        settings,
        face=Dashboard,
        state=state,
        stored=KeyFiles(state),
    )


@pytest.fixture
def server(recital: Recital, tmp_path: Path) -> Iterator[Server]:
    with shown(recital, tmp_path, ApiSettings()) as running:
        yield running


@pytest.fixture
def locked(recital: Recital, tmp_path: Path) -> Iterator[Server]:
    with shown(recital, tmp_path, ApiSettings(api_keys=(KEY,), keys_demanded=True)) as running:
        yield running


def sessions(server: Server) -> int:
    return len(server.sessions)


def test_a_token_logs_in_once_with_the_right_to_manage(server: Server) -> None:
    token = server.once.leave()
    entered = httpx.get(f"{server.url}/login", params={"once": token})
    assert entered.status_code == 200
    cookie = entered.headers["set-cookie"]
    assert cookie.startswith(f"baton-{server.port}=")
    assert cookie.partition("; ")[2] == "Path=/; HttpOnly; SameSite=Strict"
    assert 'content="0; url=/"' in entered.text
    assert token not in entered.text
    assert entered.headers["referrer-policy"] == "no-referrer"
    assert entered.headers["cache-control"] == "no-store"
    found = server.sessions.find([cookie.partition(";")[0]])
    assert server.sessions.may_manage(found)
    again = httpx.get(f"{server.url}/login", params={"once": token})
    assert (again.status_code, "set-cookie" in again.headers) == (403, False)
    assert sessions(server) == 1
    assert server.door.refusals.counts["login_refused"] == 1


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "OPTIONS"])
def test_only_a_get_uses_a_token_up(server: Server, method: str) -> None:
    token = server.once.leave()
    asked = httpx.request(method, f"{server.url}/login", params={"once": token})
    assert asked.status_code == (200 if method == "HEAD" else 405)
    assert "set-cookie" not in asked.headers
    assert sessions(server) == 0
    assert server.once.waits(token)
    assert "login_refused" not in {
        name for name, count in server.door.refusals.counts.items() if count
    }
    assert httpx.get(f"{server.url}/login", params={"once": token}).status_code == 200


def test_a_cookie_of_somebody_elses_hides_no_session(locked: Server) -> None:
    entered = httpx.post(f"{locked.url}/login", data={"key": KEY})
    good = entered.headers["set-cookie"].partition(";")[0]
    name = good.partition("=")[0]
    junk = [f"{name}=", f"{name}=x", *(f"{name}={letter * 43}" for letter in "abcde")]
    for cookies in ([good, *junk], [*junk, good], [junk[-1], good]):
        asked = {"accept": "image/*", "cookie": "; ".join(cookies)}
        assert httpx.get(f"{locked.url}/", headers=asked).status_code == 200
    httpx.post(f"{locked.url}/logout", headers={"cookie": "; ".join([*junk, good])})
    assert sessions(locked) == 0


@pytest.mark.parametrize("token", ["", "x" * 43, "x" * 100_00, "../../api-keys/x", "%00"])
def test_what_is_no_token_logs_in_nobody(server: Server, token: str) -> None:
    refused = httpx.get(f"{server.url}/login", params={"once": token})
    assert (refused.status_code, "set-cookie" in refused.headers) == (403, False)
    assert sessions(server) == 0


def test_an_expired_or_foreign_token_logs_in_nobody(server: Server, tmp_path: Path) -> None:
    old = Once(tmp_path, server.port, lambda: time.time() - VALID_S).leave()
    other = Once(tmp_path, server.port + 1).leave()
    for token in (old, other):
        assert httpx.get(f"{server.url}/login?once={token}").status_code == 403
    assert sessions(server) == 0


def test_a_page_of_another_site_cannot_bring_one(server: Server) -> None:
    token = server.once.leave()
    sent = {"origin": "http://evil.example"}
    assert httpx.get(f"{server.url}/login?once={token}", headers=sent).status_code == 403
    assert server.once.waits(token)


def test_where_keys_are_demanded_a_key_logs_in_without_the_right_to_manage(
    locked: Server,
) -> None:
    form = httpx.get(f"{locked.url}/login", headers={"accept": "text/html"})
    assert form.status_code == 200
    assert '<label for="key">' in form.text
    assert "<script" not in form.text
    # A form that is sent under "no-referrer" has the origin `null`, and would be refused.
    assert form.headers["referrer-policy"] == "same-origin"
    sent = {"origin": locked.url}
    entered = httpx.post(f"{locked.url}/login", data={"key": f" {KEY} "}, headers=sent)
    assert entered.status_code == 200
    found = locked.sessions.find([entered.headers["set-cookie"].partition(";")[0]])
    assert found is not None
    assert not locked.sessions.may_manage(found)
    assert KEY not in entered.text


def test_the_user_of_the_machine_needs_no_key_even_there(locked: Server) -> None:
    token = locked.once.leave()
    entered = httpx.get(f"{locked.url}/login", params={"once": token})
    found = locked.sessions.find([entered.headers["set-cookie"].partition(";")[0]])
    assert locked.sessions.may_manage(found)


@pytest.mark.parametrize(
    "body",
    [b"", b"key=", b"key=wrong-key-altogether", b"\xff=\xfe", b"&" * 100, b"key=a&" * 99, b"x"],
)
def test_what_is_no_key_logs_in_nobody(locked: Server, body: bytes) -> None:
    refused = httpx.post(f"{locked.url}/login", content=body)
    assert (refused.status_code, "set-cookie" in refused.headers) == (403, False)
    assert 'role="alert"' in refused.text
    assert locked.door.refusals.counts["invalid_api_key"] == 1


def test_a_form_is_short_and_comes_from_here(locked: Server) -> None:
    long = httpx.post(f"{locked.url}/login", content=b"key=" + b"x" * 70_000)
    assert long.status_code == 413
    for origin in ("http://evil.example", "null"):
        headers = {"origin": origin}
        foreign = httpx.post(f"{locked.url}/login", data={"key": KEY}, headers=headers)
        assert foreign.status_code == 403
    assert sessions(locked) == 0


def test_logging_out_ends_the_session(locked: Server) -> None:
    entered = httpx.post(f"{locked.url}/login", data={"key": KEY})
    cookie = {"cookie": entered.headers["set-cookie"].partition(";")[0]}
    assert httpx.get(f"{locked.url}/logout", headers=cookie).status_code == 405
    assert sessions(locked) == 1
    left = httpx.post(f"{locked.url}/logout", headers=cookie)
    assert "Max-Age=0" in left.headers["set-cookie"]
    assert sessions(locked) == 0


LED = {
    "accept": "text/html,application/xhtml+xml",
    "sec-fetch-site": "cross-site",
    "sec-fetch-mode": "navigate",
    "sec-fetch-dest": "document",
}
"""A link of another site's page, with which no strict cookie comes."""


def test_a_link_of_another_site_loses_no_session(locked: Server) -> None:
    entered = httpx.post(f"{locked.url}/login", data={"key": KEY})
    cookie = entered.headers["set-cookie"].partition(";")[0]
    led = httpx.get(f"{locked.url}/nodes", headers=LED)
    assert (led.status_code, led.headers["cache-control"]) == (200, "no-store")
    assert 'content="0; url=/nodes"' in led.text
    assert "set-cookie" not in led.headers
    # What that page begins is a navigation of its own. Who has no session ends at the login.
    own = {**LED, "sec-fetch-site": "same-origin"}
    asked = httpx.get(f"{locked.url}/nodes", headers=own)
    assert (asked.status_code, asked.headers["location"]) == (303, "/login")
    # Whoever brings the cookie is let in; without HTML, so that no page is made for it.
    brought = {**own, "cookie": cookie, "accept": "image/*"}
    assert httpx.get(f"{locked.url}/nodes", headers=brought).status_code == 200


@pytest.mark.parametrize(
    ("path", "to"),
    [
        ("//evil.example/x", "/evil.example/x"),
        ("///evil.example", "/evil.example"),
        ("/%5Cevil.example", "/%5Cevil.example"),
        ('/"><script>', "/%22%3E%3Cscript%3E"),
        ("/%0d%0ax;url=//evil.example", "/%0D%0Ax%3Burl%3D//evil.example"),
    ],
)
def test_a_link_of_another_site_leads_nowhere_else(locked: Server, path: str, to: str) -> None:
    led = httpx.get(f"{locked.url}{path}", headers=LED)
    assert f'content="0; url={to}"' in led.text
    assert f'href="{to}"' in led.text


@pytest.mark.parametrize("dest", ["iframe", "image", "empty"])
def test_what_is_no_link_is_sent_to_the_login(locked: Server, dest: str) -> None:
    asked = httpx.get(f"{locked.url}/nodes", headers={**LED, "sec-fetch-dest": dest})
    assert (asked.status_code, asked.headers["location"]) == (303, "/login")


def test_nobody_pays_for_what_nobody_opens() -> None:
    script = (
        "import sys, app.decoder, app.dashboard.mount, app.dashboard_command, mac_decoder.node\n"
        "print([name for name in sys.modules if name.partition('.')[0] in "
        "('nicegui', 'socketio', 'engineio', 'aiohttp')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_where_nicegui_is_not_installed_a_page_says_what_installs_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: Dashboard) -> None:
        raise ModuleNotFoundError("No module named 'nicegui'", name="nicegui")

    monkeypatch.setattr(Dashboard, "_build", missing)
    for _ in range(2):
        told = httpx.get(f"{server.url}/", headers={"accept": "text/html"})
        assert told.status_code == 400
        assert "is not installed" in told.text
        assert "pip install" in told.text
    # Whoever only logs in does without it.
    assert httpx.get(f"{server.url}/login").status_code == 200


def test_only_what_a_page_asks_is_answered(server: Server) -> None:
    for method in ("POST", "PUT", "DELETE"):
        refused = httpx.request(method, f"{server.url}/")
        assert refused.json()["error"]["code"] == "method_not_allowed"
    assert httpx.get(f"{server.url}/about/../nowhere").json()["error"]["code"] == "route_not_found"
