"""Which messages a page's connection may bring, and whose they have to be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.dashboard.nice import Client, core

# isort: split
# The one above imports NiceGUI, once it has told it to keep nothing.
from app.dashboard import belonging
from app.dashboard.belonging import REASON, Belonging
from mac_decoder.api.door import Refusals
from mac_decoder.api.guard import KeyGuard
from mac_decoder.api.sessions import Session, Sessions

pytestmark = pytest.mark.anyio

PAGE = "a-page"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Those that messages come to, for the time of a test."""
    found: dict[str, Any] = {}
    monkeypatch.setitem(core.sio.handlers, "/", found)
    return found


@pytest.fixture
def refusals() -> Refusals:
    return Refusals()


def have_page(monkeypatch: pytest.MonkeyPatch, scope: dict[str, Any]) -> None:
    page = SimpleNamespace(request=SimpleNamespace(scope=scope))
    monkeypatch.setitem(Client.instances, PAGE, page)  # pyright: ignore[reportArgumentType]


def test_what_nicegui_hears_is_what_was_looked_at() -> None:
    """One more, in another release, is for a person to read before it is let through."""
    assert belonging._nicegui.keys() == {
        *("connect", "handshake", "disconnect"),
        *("event", "javascript_response", "ack", "log"),
    }
    assert core.sio.handlers.keys() == {"/"}
    assert core.sio.namespace_handlers == {}


async def test_what_is_heard_one_day_is_asked_for_its_page_too(
    handlers: dict[str, Any], refusals: Refusals, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, object]] = []

    async def added(sid: str, said: object) -> str:
        heard.append((sid, said))
        return "done"

    monkeypatch.setitem(belonging._nicegui, "added", added)
    monkeypatch.setattr(core.sio, "rooms", lambda sid: [sid, PAGE] if sid == "of-it" else [sid])
    have_page(monkeypatch, {})
    Belonging(refusals).watch()
    said = {"client_id": PAGE}
    assert await handlers["added"]("another", said) is None
    assert (heard, refusals.counts[REASON]) == ([], 1)
    for nothing in ((), ({},), (None,), ({"client_id": "none"},)):
        assert await handlers["added"]("of-it", *nothing) is None
    assert await handlers["added"]("of-it", said) == "done"
    assert (heard, refusals.counts[REASON]) == ([("of-it", said)], 1)


async def test_of_whom_nothing_is_known_gets_no_page_of_nobodys(
    handlers: dict[str, Any], refusals: Refusals, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def handshake(sid: str, _: object) -> bool:
        asked.append(sid)
        return True

    monkeypatch.setitem(belonging._nicegui, "handshake", handshake)
    environs = {"known": {"asgi.scope": {}}}
    monkeypatch.setattr(core.sio, "get_environ", environs.get)
    have_page(monkeypatch, {})
    Belonging(refusals).watch()
    assert not await handlers["handshake"]("unknown", {"client_id": PAGE})
    assert (asked, refusals.counts[REASON]) == ([], 1)
    assert await handlers["handshake"]("known", {"client_id": PAGE})
    assert (asked, refusals.counts[REASON]) == (["known"], 1)


@pytest.mark.parametrize(
    ("of_the_page", "given", "lets_in"),
    [
        ({}, {}, True),
        ({KeyGuard.KEY: b"a"}, {KeyGuard.KEY: bytes([97])}, True),
        ({KeyGuard.KEY: b"a"}, {KeyGuard.KEY: b"b"}, False),
        ({KeyGuard.KEY: b"a"}, {KeyGuard.KEY: None}, False),
        ({}, {KeyGuard.KEY: b"a"}, False),
        ({Sessions.SCOPE: Session(True, 1.0)}, {Sessions.SCOPE: Session(True, 1.0)}, False),
        ({Sessions.SCOPE: Session(False, 1.0, b"a")}, {KeyGuard.KEY: b"a"}, False),
    ],
)
async def test_a_request_that_goes_on_is_of_the_same_session_or_key(
    refusals: Refusals,
    monkeypatch: pytest.MonkeyPatch,
    of_the_page: dict[str, Any],
    given: dict[str, Any],
    *,
    lets_in: bool,
) -> None:
    monkeypatch.setitem(core.sio.environ, "begun", {"asgi.scope": of_the_page})
    wrong = Belonging(refusals).refusal({"query_string": b"sid=begun", **given})
    assert (wrong is None) is lets_in
    assert refusals.counts.get(REASON, 0) == (0 if lets_in else 1)
