"""Try it: what is asked is asked as a client would, and it says what of that is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from app.dashboard.pages.talk import MOST_TYPED, TryPage, read
from mac_decoder.api.guard import KeyGuard
from mac_decoder.api.inside import Inside
from tests.app.dashboard.pages.drawing import Looking
from tests.app.view.snapshots import FINISHED, IDLE

pytestmark = pytest.mark.anyio

SAID = {"do": "send", "text": "hello", "max_tokens": "7", "lane": "local", "reuse": False}


class Routes:
    """Answers every request with two tokens, or with a refusal; waits where it is told to."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.salts: list[bytes] = []
        self.refuses = self.waits = False
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(msgspec.json.decode((await receive())["body"]))
        self.salts.append(scope[KeyGuard.SALT])
        status = 503 if self.refuses else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        if self.refuses:
            error = {"error": {"message": "the queue is full", "code": "queue_full"}}
            await send({"type": "http.response.body", "body": msgspec.json.encode(error)})
            return
        for text in ("Good ", "day"):
            event = {"id": FINISHED.id, "choices": [{"delta": {"content": text}}]}
            body = b"data: " + msgspec.json.encode(event) + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
        if self.waits:
            await receive()
            self.left.set()
            return
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


class Feeding:
    async def now(self) -> Any:
        return IDLE


@pytest.fixture
def routes() -> Routes:
    return Routes()


@pytest.fixture
def page(routes: Routes) -> TryPage:
    return made(routes)


def made(routes: Routes, *, disk: bool = True) -> TryPage:
    facts = SimpleNamespace(served_name="a-model", disk=disk)
    facing = SimpleNamespace(inside=Inside(routes), facts=facts)
    return TryPage(cast(Any, facing), cast(Any, Feeding()))


def answer(looking: Looking) -> str:
    return "".join(given[1] for name, *given in looking.told if name == "append")


async def test_an_answer_streams_and_its_figures_follow(page: TryPage, routes: Routes) -> None:
    looking = Looking()
    await page.act(SAID, looking)
    asked = routes.asked[0]
    assert asked["messages"] == [{"role": "user", "content": "hello"}]
    assert (asked["max_tokens"], asked["stream"]) == (7, True)
    assert asked["baton"] == {"lane": "local", "reuse": False}
    assert routes.salts == [b"salt"]
    assert answer(looking) == "Good day"
    how = next(html for name, part, html in told(looking, "set") if part == "turn-1-how")
    assert 'class="badge source"' in how
    assert ">durable<" in how
    assert "stopped at 3,840 tokens" in how
    # Where it is in the snapshot changes; a page that stays must not say it.
    assert "data-path" not in how


async def test_a_second_turn_goes_on_and_the_same_again_does_not(
    page: TryPage, routes: Routes
) -> None:
    looking = Looking()
    await page.act(SAID, looking)
    await page.act({**SAID, "text": "and on"}, looking)
    await page.act({"do": "again"}, looking)
    said = [[one["content"] for one in asked["messages"]] for asked in routes.asked]
    assert said == [["hello"], ["hello", "Good day", "and on"], ["hello", "Good day", "and on"]]
    await page.act({"do": "clear"}, looking)
    await page.act(SAID, looking)
    assert [one["content"] for one in routes.asked[-1]["messages"]] == ["hello"]


async def test_a_refusal_is_told_with_its_reason(page: TryPage, routes: Routes) -> None:
    routes.refuses = True
    looking = Looking()
    await page.act(SAID, looking)
    assert any("the queue is full (queue_full)" in str(change) for change in looking.told)
    assert '<button type="submit" class="main">' in looking.last("set")[1]
    routes.refuses = False
    await page.act({**SAID, "text": "and now"}, looking)
    await page.act({"do": "again"}, looking)
    # What was refused is no part of the conversation, and the same again is the same.
    for asked in routes.asked[1:]:
        assert asked["messages"] == [{"role": "user", "content": "and now"}]


async def test_stop_leaves_as_a_client_leaves(page: TryPage, routes: Routes) -> None:
    routes.waits = True
    looking = Looking()
    asking = asyncio.create_task(page.act(SAID, looking))
    while not answer(looking):
        await asyncio.sleep(0.01)
    await page.act({**SAID, "text": "meanwhile"}, looking)
    assert len(routes.asked) == 1
    await page.act({"do": "stop"}, looking)
    await asyncio.wait_for(asking, 5)
    assert routes.left.is_set()
    assert "Stopped." in next(str(one) for one in looking.told if "turn-1-how" in one)
    routes.waits = False
    await page.act({**SAID, "text": "after"}, looking)
    assert routes.asked[-1]["messages"] == [{"role": "user", "content": "after"}]


async def test_what_was_cleared_is_not_in_the_next_conversation(
    page: TryPage, routes: Routes
) -> None:
    routes.waits = True
    looking = Looking()
    asking = asyncio.create_task(page.act(SAID, looking))
    while not answer(looking):
        await asyncio.sleep(0.01)
    await page.act({"do": "clear"}, looking)
    routes.waits = False
    # At once: what is being left may take a while to end.
    await page.act({**SAID, "text": "anew"}, looking)
    await asyncio.wait_for(asking, 5)
    await page.act({**SAID, "text": "and on"}, looking)
    said = [[one["content"] for one in asked["messages"]] for asked in routes.asked]
    assert said == [["hello"], ["anew"], ["anew", "Good day", "and on"]]


async def test_a_question_that_breaks_leaves_the_buttons_usable(
    page: TryPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Feeding, "now", broken)
    looking = Looking()
    with pytest.raises(ZeroDivisionError):
        await page.act(SAID, looking)
    name, html = looking.last("set")
    assert name == "buttons"
    assert '<button type="submit" class="main">' in html


async def broken(*_: Any) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize("disk", [True, False])
def test_it_says_what_is_kept_and_how_to_forget_it(routes: Routes, *, disk: bool) -> None:
    html = made(routes, disk=disk).body({})
    assert ("on disk" in html) == disk
    assert ("forgotten on Cache" in html) == disk
    assert ("when the decoder ends" in html) == (not disk)
    kept, not_kept = html.index("when-kept"), html.index("when-not-kept")
    assert html.index("are kept in the caches") > kept
    assert html.index("nothing of it is kept in a cache") > not_kept
    assert "Nothing typed here is stored" not in html


@pytest.mark.parametrize(
    "wrong",
    [
        {"text": " "},
        {"text": 5},
        {"text": "a" * (MOST_TYPED + 1)},
        {"lane": "theirs"},
        {"lane": None},
    ],
)
async def test_what_no_form_says_is_not_asked(
    page: TryPage, routes: Routes, wrong: Mapping[str, Any]
) -> None:
    await page.act({**SAID, **wrong}, Looking())
    assert routes.asked == []


@pytest.mark.parametrize(
    ("typed", "tokens"), [("7", 7), ("99999", 4096), ("0", 200), ("", 200), ("٣", 200), (None, 200)]
)
async def test_numbers_of_tokens(typed: object, tokens: int) -> None:
    asked = read({**SAID, "max_tokens": typed})
    assert asked is not None
    assert asked.max_tokens == tokens


def told(looking: Looking, name: str) -> list[Any]:
    return [change for change in looking.told if change[0] == name]
