"""How many pages are held in memory, and whose make room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.dashboard import nice
from app.dashboard.mount import MOST_MANAGING
from app.dashboard.nice import MOST_CLIENTS, Bounded
from mac_decoder.api.door import Refusals
from mac_decoder.api.sessions import Sessions

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Held:
    """Stands where NiceGUI's clients do: a page for each request, and which of them are left."""

    def __init__(self) -> None:
        self.instances: dict[str, SimpleNamespace] = {}
        self._made = 0

    def make(self, session: object, *, connected: bool = False) -> str:
        name = f"{self._made:04d}"
        self._made += 1
        self.instances[name] = SimpleNamespace(
            id=name,
            created=float(self._made),
            environ={} if connected else None,
            request=SimpleNamespace(scope={Sessions.SCOPE: session}),
            delete=lambda: self.instances.pop(name),
        )
        return name


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    made = Held()
    monkeypatch.setattr(nice, "Client", made)
    return made


@pytest.fixture
def bounded(held: Held) -> Bounded:
    async def make(scope: Any, receive: Any, send: Any) -> None:
        held.make(scope[Sessions.SCOPE])

    sessions = SimpleNamespace(may_manage=lambda session: session == "manages")
    facing = cast(Any, SimpleNamespace(sessions=sessions, refusals=Refusals()))
    return Bounded(make, facing, lambda _: None)


async def refused(bounded: Bounded, session: object) -> bool:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], Sessions.SCOPE: session}
    await bounded(scope, receive, send)
    return bool(sent) and sent[0]["status"] == 503


async def test_pages_that_nobody_goes_on_with_make_room_oldest_first(
    held: Held, bounded: Bounded
) -> None:
    seen = held.make(None, connected=True)
    managing = held.make("manages")
    for _ in range(2 * MOST_CLIENTS):
        assert not await refused(bounded, None)
    assert len(held.instances) == MOST_CLIENTS
    assert seen in held.instances
    # A flood does not take away the page that whoever may manage is about to open.
    assert managing in held.instances
    assert f"{2 * MOST_CLIENTS + 1:04d}" in held.instances


async def test_where_all_are_looked_at_there_are_places_for_who_may_manage(
    held: Held, bounded: Bounded
) -> None:
    for _ in range(MOST_CLIENTS):
        held.make(None, connected=True)
    assert await refused(bounded, None)
    for _ in range(MOST_MANAGING):
        assert not await refused(bounded, "manages")
    # One more replaces their own oldest; others do not.
    assert not await refused(bounded, "manages")
    assert await refused(bounded, None)
    assert len(held.instances) == MOST_CLIENTS + MOST_MANAGING
