"""A page works while somebody sees it: not in a tab behind others, not hidden, not left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from nicegui import Client, ui

from app.dashboard.pages.live import Live
from app.dashboard.pages.now import NowPage
from tests.app.view.snapshots import IDLE, NOW

pytestmark = pytest.mark.anyio


class Noting(NowPage):
    """Notes what it is told of who looks."""

    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self._told = told

    def looked_at(self, browser: Any) -> None:
        self._told.append("looked at")

    def unseen(self) -> None:
        self._told.append("unseen")

    def close(self) -> None:
        self._told.append("closed")


class Feeding:
    def __init__(self) -> None:
        self.watchers: set[Any] = set()

    def join(self, one: Any) -> None:
        self.watchers.add(one)

    def leave(self, one: Any) -> None:
        self.watchers.discard(one)


async def test_it_works_while_it_is_seen() -> None:
    told: list[str] = []
    feed = Feeding()
    facing = SimpleNamespace(
        sessions=SimpleNamespace(may_manage=lambda session: False),
        facts=SimpleNamespace(address="http://127.0.0.1:8000", disk=True),
    )
    request = SimpleNamespace(scope={}, url=SimpleNamespace(path="/"))
    client = Client(ui.page(""), request=None)
    with client:
        live = Live(cast(Any, facing), cast(Any, feed), Noting(told), cast(Any, request), IDLE, NOW)

    async def said(does: str) -> None:
        await live._act(cast(Any, SimpleNamespace(args={"do": does})))

    # NiceGUI's own page would be another one.
    assert "q-page" not in {one.tag for one in client.elements.values()}
    assert live._props["html"].count("<main ") == 1

    (come,), (left,) = client.connect_handlers, client.disconnect_handlers
    come()
    assert (told, feed.watchers) == ([], set())  # nobody has said that it is seen
    await said("hidden")
    assert (told, feed.watchers) == (["unseen"], set())
    await said("shown")
    assert (told, feed.watchers) == (["unseen", "looked at"], {live})
    await said("hidden")
    assert (told[2:], feed.watchers) == (["unseen"], set())
    # A lost connection that comes back makes nobody look.
    left()
    come()
    assert (told[3:], feed.watchers) == (["closed"], set())
    await said("shown")
    left()
    assert feed.watchers == set()
    come()
    assert (told[4:], feed.watchers) == (["looked at", "closed", "looked at"], {live})
    client.delete()
