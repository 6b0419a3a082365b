"""Keeping house from the page: asked first, in exact figures, and only by who may."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from app.dashboard.pages.cache import CachePage
from app.dashboard.pages.screen import Rows
from app.dashboard.pages.walk import Walk
from mac_decoder.housekeeping.conversations import Conversations
from mac_decoder.housekeeping.house import Gone
from mac_decoder.housekeeping.operations import Operation
from mac_decoder.store.catalogue import Footprint, Foreign
from mac_decoder.store.ledger import Tally
from mac_decoder.store.verify import Verified
from protocol.errors import ConfigError, RequestError, TransferError
from tests.app.dashboard.pages.drawing import Looking, seen
from tests.app.view.snapshots import IDLE
from tests.app.view.test_keeping import TALK

pytestmark = pytest.mark.anyio

KEPT_IN = Path("/caches of mine/kv")

GONE = Gone(files=12, nbytes=1_234_567, cuts=2, memory_bytes=999, left=20_000)


class House:
    """Notes what it is asked to do."""

    durable = True

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.latest: Operation[Any] | None = None
        self.walks = 0
        self.kinds: dict[str, Tally] = {}
        self.kept: Conversations | None = None

    async def footprint(self) -> Footprint:
        self.walks += 1
        await asyncio.sleep(0.05)
        return Footprint(self.kinds, Tally(2, 4096), 4096, 4096)

    async def conversations(self) -> Conversations:
        if self.kept is None:
            raise TransferError("not now", reason="not_now")
        return self.kept

    async def would_clear(self) -> Gone:
        return GONE

    async def would_prune(self, to_bytes: int) -> Gone:
        return GONE if to_bytes < 10**10 else Gone(left=1_254_567)

    async def would_forget(self, conversation: str) -> Gone:
        if conversation != "known":
            raise RequestError("no such conversation is kept", reason="conversation_unknown")
        return GONE

    def clear(self) -> Operation[Any]:
        return self._begin("clear")

    def prune(self, to_bytes: int) -> Operation[Any]:
        return self._begin("prune", to_bytes)

    def forget(self, conversation: str) -> Operation[Any]:
        return self._begin("forget", conversation)

    def verify(self) -> Operation[Any]:
        return self._begin("verify")

    def _begin(self, kind: Any, *of: Any) -> Operation[Any]:
        self.done.append((kind, *of))
        self.latest = Operation(kind)
        return self.latest


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture
def page(house: House) -> CachePage:
    made = CachePage(cast(Any, house), Walk(cast(Any, house)), KEPT_IN)
    made.draw(seen(IDLE))
    return made


def spaced(text: str) -> str:
    """A text whose lines may end anywhere."""
    return text.replace("\N{NO-BREAK SPACE}", " ")


def confirmed(question: str) -> dict[str, Any]:
    """What the button of a question says."""
    found = re.search(r'data-number="(\d+)"', question)
    assert found is not None
    return {"do": "confirmed", "number": found[1]}


@pytest.mark.parametrize(
    ("said", "question", "done"),
    [
        ({"do": "clear"}, "Clear all caches of this model?", ("clear",)),
        ({"do": "prune-to", "size": "2 GB"}, "Prune to 2,000,000,000 bytes", ("prune", 2 * 10**9)),
        ({"do": "forget", "id": "known"}, "Forget this conversation?", ("forget", "known")),
    ],
)
async def test_a_deletion_is_confirmed_first(
    page: CachePage, house: House, said: dict[str, Any], question: str, done: tuple[Any, ...]
) -> None:
    looking = Looking(manages=True)
    await page.act(said, looking)
    asked = spaced(looking.last("open")[0])
    assert question in asked
    assert "≈ 12 files, 1,234,567 bytes (1.2 MB) on disk; 2 cuts, 999 bytes in memory" in asked
    assert "≈ 20,000 bytes (20.0 kB) stay on disk" in asked
    assert house.done == []
    yes = confirmed(asked)
    await page.act(yes, looking)
    assert house.done == [done]
    # Once is once.
    await page.act(yes, looking)
    assert house.done == [done]
    page.close()


async def test_a_clearing_says_whose_caches_stay(page: CachePage, house: House) -> None:
    looking = Looking(manages=True)
    await page.act({"do": "clear"}, looking)
    assert "stay on disk: what other models" in spaced(looking.last("open")[0])
    house.kept = Conversations((), 0, Foreign(2, 9, 19_000))
    await page.act({"do": "clear"}, looking)
    asked = spaced(looking.last("open")[0])
    stays = "stay on disk: 9 cuts of 2 other models, 19,000 bytes (19.0 kB); the index"
    assert stays in asked
    assert ">baton cache clear --cache-dir &#39;/caches of mine&#39;</code>" in asked
    await page.act(confirmed(asked), looking)
    assert house.latest is not None
    house.latest.end(GONE)
    await until(lambda: looking.told[-1][0] == "set" and stays in spaced(looking.last("set")[1]))
    page.close()
    # A page that is opened after it says so too, once it has looked.
    later, opened = CachePage(cast(Any, house), Walk(cast(Any, house)), KEPT_IN), Looking()
    later.draw(seen(IDLE))
    later.looked_at(opened)
    await until(lambda: bool(opened.told) and stays in spaced(opened.last("set")[1]))
    later.close()


async def test_no_command_is_named_where_it_would_delete_no_more(
    page: CachePage, house: House
) -> None:
    house.kept = Conversations((), 0, Foreign(0, 0, 0))
    looking = Looking(manages=True)
    await page.act({"do": "clear"}, looking)
    asked = spaced(looking.last("open")[0])
    assert "stay on disk: the index, lock and tag." in asked
    assert "baton cache clear" not in asked


async def test_events_are_said_to_be_of_the_disk(page: CachePage) -> None:
    html = page.body(page.draw(seen(IDLE)))
    assert ">On disk: what went, and why</h2>" in html
    assert "Only files are listed." in html


async def test_a_verification_is_asked_about_what_it_reads(page: CachePage, house: House) -> None:
    house.kinds = {"cuts": Tally(1, 100), "blocks": Tally(1, 900), "index": Tally(2, 5_000)}
    looking = Looking(manages=True)
    await page.act({"do": "verify"}, looking)
    assert "Reads the files of all cuts and blocks" in spaced(looking.last("open")[0])
    await page._walk.found()
    await page.act({"do": "verify"}, looking)
    assert "Reads ≈ 2 files, 1,000 bytes (1.0 kB), and" in spaced(looking.last("open")[0])
    page.close()


async def test_an_answer_to_one_question_is_none_to_the_next(page: CachePage, house: House) -> None:
    looking = Looking(manages=True)
    await page.act({"do": "verify"}, looking)
    yes = confirmed(looking.last("open")[0])
    await page.act({"do": "clear"}, looking)
    await page.act(yes, looking)
    await page.act({"do": "confirmed"}, looking)
    assert house.done == []
    assert "not_confirmed" in looking.last("open")[0]
    page.close()


async def test_a_question_that_was_left_is_not_confirmed_later(
    page: CachePage, house: House
) -> None:
    looking = Looking(manages=True)
    await page.act({"do": "clear"}, looking)
    yes = confirmed(looking.last("open")[0])
    await page.act({"do": "closed"}, looking)
    await page.act(yes, looking)
    assert house.done == []
    assert "not_confirmed" in looking.last("open")[0]


@pytest.mark.parametrize(
    "does", ["verify", "prune", "prune-to", "forget", "clear", "confirmed", "cancel-operation"]
)
async def test_who_may_not_manage_gets_nothing_done(
    page: CachePage, house: House, does: str
) -> None:
    looking = Looking()
    await page.act({"do": does, "id": "known", "size": "1"}, looking)
    assert house.done == []
    (refused,) = looking.last("open")
    assert "may_not_manage" in refused
    assert "baton dashboard" in refused.lower()


async def test_a_right_that_ends_meanwhile_ends_the_deletion(page: CachePage, house: House) -> None:
    looking = Looking(manages=True)
    await page.act({"do": "clear"}, looking)
    looking.manages = False
    await page.act(confirmed(looking.last("open")[0]), looking)
    assert house.done == []


async def test_what_is_no_size_is_asked_again(page: CachePage, house: House) -> None:
    looking = Looking(manages=True)
    await page.act({"do": "prune-to", "size": "much"}, looking)
    assert "That is no size" in looking.last("open")[0]
    await page.act({"do": "confirmed"}, looking)
    assert house.done == []


async def test_nothing_is_asked_where_nothing_would_go(page: CachePage, house: House) -> None:
    looking = Looking(manages=True)
    await page.act({"do": "prune-to", "size": "20GB"}, looking)
    shown = spaced(looking.last("open")[0])
    assert "There is nothing to prune" in shown
    assert "1,254,567 bytes (1.3 MB)" in shown
    assert "data-number" not in shown


async def test_two_conversations_can_be_told_apart(page: CachePage, house: House) -> None:
    two = (TALK, dataclasses.replace(TALK, id="known", mark="77b0e2"))
    house.kept = Conversations(two, 0, Foreign(0, 0, 0))
    looking = Looking(manages=True)
    page.looked_at(looking)
    await until(lambda: "77b0e2" in str(page.draw(seen(IDLE))["conversations"]))
    drawn = page.draw(seen(IDLE, may_manage=True))["conversations"]
    assert isinstance(drawn, Rows)
    for one in two:
        assert one.mark in drawn.html[one.id]
    await page.act({"do": "forget", "id": "known"}, looking)
    assert "Forget conversation 77b0e2 (449 tokens)?" in spaced(looking.last("open")[0])
    page.close()


async def test_an_error_is_told_with_its_reason(page: CachePage) -> None:
    looking = Looking(manages=True)
    await page.act({"do": "forget", "id": "gone"}, looking)
    assert "conversation_unknown" in looking.last("open")[0]


async def test_an_operation_is_followed_to_its_end(page: CachePage, house: House) -> None:
    looking = Looking(manages=True)
    await page.act({"do": "verify"}, looking)
    await page.act(confirmed(looking.last("open")[0]), looking)
    operation = house.latest
    assert operation is not None
    operation.tell(50, 200)
    await until(lambda: 'value="0.25"' in str(looking.told[-1]))
    operation.end(Verified(files=3, nbytes=200))
    await until(lambda: "Read 3 files, 200 bytes: all is well" in spaced(looking.last("set")[1]))


async def test_a_hidden_page_looks_at_nothing_and_tells_nothing(
    page: CachePage, house: House
) -> None:
    looking = Looking(manages=True)
    others = asyncio.all_tasks()
    operation = house.verify()
    page.looked_at(looking)
    await until(lambda: house.walks == 1 and bool(looking.told))
    page.unseen()
    told = len(looking.told)
    operation.end(Verified(files=3, nbytes=200))
    # All that it did has ended, but for a walk that was begun.
    await until(lambda: asyncio.all_tasks() <= others)
    assert (len(looking.told), house.walks) == (told, 1)
    # Seen again it catches up.
    page.looked_at(looking)
    await until(lambda: house.walks == 2)
    await until(lambda: "all is well" in looking.last("set")[1])
    page.close()


async def test_a_walk_that_fails_is_no_number_and_says_why(
    page: CachePage, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.looked_at(Looking())
    await until(lambda: "4,096" in str(page.draw(seen(IDLE))["walked"]))

    async def fails() -> Footprint:
        raise ConfigError("the disk fails", reason="cache_dir_unusable", field="cache-dir")

    monkeypatch.setattr(house, "footprint", fails)
    # An operation's end has it walked again.
    operation = house.verify()
    operation.end(Verified(files=3, nbytes=200))
    page.unseen()
    page.looked_at(Looking())
    await until(lambda: "cache_dir_unusable" in str(page.draw(seen(IDLE))["walked"]))
    assert "4,096" not in str(page.draw(seen(IDLE))["walked"])
    page.close()


async def test_all_pages_share_a_walk(house: House) -> None:
    walk = Walk(cast(Any, house))
    pages = [CachePage(cast(Any, house), walk, KEPT_IN) for _ in range(3)]
    for page in pages:
        page.draw(seen(IDLE))
        page.looked_at(Looking())
    await until(lambda: all("4,096" in str(page.draw(seen(IDLE))["walked"]) for page in pages))
    assert house.walks == 1
    # An operation's end makes it old; one that leaves meanwhile ends nothing for the others.
    house.verify().end(Verified(files=3, nbytes=200))
    leaving, staying = asyncio.create_task(walk.found()), asyncio.create_task(walk.found())
    await asyncio.sleep(0)
    leaving.cancel()
    assert await asyncio.wait_for(staying, 5)
    assert house.walks == 2
    for page in pages:
        page.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.02)


def test_who_may_not_is_told_how(page: CachePage) -> None:
    html = page.body(page.draw(seen(IDLE)))
    assert "baton dashboard" in html
    assert 'data-do="clear" disabled' in html
    assert "baton dashboard" not in page.body(page.draw(seen(IDLE, may_manage=True)))
