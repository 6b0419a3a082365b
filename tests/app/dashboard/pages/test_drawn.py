"""The pages that only show, drawn from snapshots."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given

from app.dashboard.pages import frame
from app.dashboard.pages.about import AboutPage, licence
from app.dashboard.pages.cache import CachePage
from app.dashboard.pages.nodes import NodesPage
from app.dashboard.pages.now import LATEST, NowPage
from app.dashboard.pages.requests import RequestsPage
from app.dashboard.pages.screen import Memo, Page, Rows, changes
from app.dashboard.pages.walk import Walk
from protocol.status.snapshot import MOST_RECENT, Recent, Snapshot
from tests.app.dashboard.pages.drawing import Looking, seen
from tests.app.view.snapshots import FINISHED, IDLE, IN_HAND, NOW, SERVED, with_node, with_requests
from tests.app.view.test_pages import at
from tests.protocol.status.made import few, snapshots

BUSY = with_requests(with_node(IDLE, fetching=True), "prefilling_there", IN_HAND)


def finished(count: int, first: int = 0) -> Snapshot:
    ended = tuple(
        msgspec.structs.replace(FINISHED, id=f"chatcmpl-{first + number}")
        for number in reversed(range(count))
    )
    return msgspec.structs.replace(IDLE, recent=Recent(ended))


def pages(tmp_path: Any) -> list[Page]:
    return [
        NowPage(),
        RequestsPage(),
        CachePage(None, Walk(None), Path("kv")),
        AboutPage(),
        NodesPage(tmp_path, "file"),
    ]


@few
@given(snapshots)
def test_every_number_on_every_page_is_where_it_says(snapshot: Snapshot) -> None:
    told = msgspec.json.decode(msgspec.json.encode(snapshot))
    for page in (NowPage(), RequestsPage(), CachePage(None, Walk(None), Path("kv")), AboutPage()):
        html = page.body(page.draw(seen(snapshot)))
        found = re.findall(r'data-path="([^"]+)" data-value="([^"]*)" data-basis="', html)
        for path, value in found:
            there = at(unescape(path), told)
            expected = there["value"] if isinstance(there, dict) else there
            assert msgspec.json.decode(unescape(value)) == expected, path


def test_nothing_that_comes_from_elsewhere_becomes_html(tmp_path: Any) -> None:
    nasty = "<script>alert(1)</script>"
    served = msgspec.structs.replace(SERVED, reasons=(nasty,))
    one = msgspec.structs.replace(FINISHED, id=nasty, code=nasty, served=served)
    snapshot = msgspec.structs.replace(
        BUSY,
        decoder=msgspec.structs.replace(BUSY.decoder, model=nasty, last_fault=nasty),
        recent=Recent((one,)),
        nodes=msgspec.structs.replace(
            BUSY.nodes,
            producers=(msgspec.structs.replace(BUSY.nodes.producers[0], name=nasty, detail=nasty),),
        ),
    )
    for page in pages(tmp_path):
        told = seen(snapshot, may_manage=True)
        drawn = {**frame.draw(Memo(), told), **page.draw(told)}
        html = frame.whole("/", page.title, drawn, page.body(drawn), session="", disk=True)
        assert "<script" not in html


def test_a_page_has_one_heading_and_marks_where_one_is() -> None:
    drawn = {**frame.draw(Memo(), seen(IDLE)), **NowPage().draw(seen(IDLE))}
    html = frame.whole("/", "Now", drawn, NowPage().body(drawn), session="manage", disk=True)
    assert html.count("<h1") == 1
    assert html.count('aria-current="page"') == 1
    assert html.count('aria-live="polite"') == 1
    assert 'data-page="now"' in html


def test_without_a_disk_there_is_no_way_to_the_cache() -> None:
    drawn = frame.draw(Memo(), seen(IDLE))
    html = frame.whole(
        "/", "Now", drawn, NowPage().body(NowPage().draw(seen(IDLE))), session="", disk=False
    )
    assert 'href="/cache"' not in html
    assert 'href="/nodes"' in html


def test_how_far_a_prefill_is_is_not_announced() -> None:
    html = frame.draw(Memo(), seen(BUSY))["headline"]
    assert isinstance(html, str)
    announced, _, quiet = html.partition('aria-live="off"')
    assert "Prefilling on gb10" in announced
    assert "45 %" not in announced
    assert "45 %" in quiet


def test_a_token_changes_a_card_and_no_list() -> None:
    page = NowPage()
    before = page.draw(seen(BUSY))
    moved = msgspec.structs.replace(IN_HAND, processed=30_000)
    after = page.draw(seen(with_requests(BUSY, "prefilling_there", moved), NOW + 0.5))
    told = changes(before, after)
    assert [(name, part) for name, part, *_ in told] == [("rows", "in-hand")]
    assert list(told[0][3]) == [IN_HAND.id]


def test_that_there_were_more_requests_is_said_only_where_that_can_be() -> None:
    page = RequestsPage()
    few_ended = page.draw(seen(finished(MOST_RECENT - 1)))
    full = page.draw(seen(finished(MOST_RECENT)))
    said = f"The latest {MOST_RECENT} are shown."
    assert said not in page.body(few_ended)
    assert said in page.body(full)
    # A page that is open says so once it is true.
    assert any(name == "most" and said in html for _, name, html, *_ in changes(few_ended, full))


def test_only_the_latest_are_shown_now() -> None:
    drawn = NowPage().draw(seen(finished(LATEST + 3)))["latest"]
    assert isinstance(drawn, Rows)
    assert list(drawn.html) == [f"chatcmpl-{number}" for number in (7, 6, 5, 4, 3)]


def test_all_requests_come_a_few_at_a_time_and_a_new_one_alone() -> None:
    page, shown, told = RequestsPage(), seen(finished(MOST_RECENT)), 0
    first = last = page.draw(shown)
    assert isinstance(first["requests"], Rows)
    assert 0 < len(first["requests"].html) < MOST_RECENT
    for _ in range(10):
        last = page.draw(shown)
    assert isinstance(last["requests"], Rows)
    assert len(last["requests"].html) == MOST_RECENT
    told = changes(last, page.draw(seen(finished(MOST_RECENT, 1))))
    (operation, part, order, changed, base), *_ = told
    assert (operation, part, base) == ("rows", "requests", "recent.finished")
    assert list(changed) == [order[0]] == [f"chatcmpl-{MOST_RECENT}"]
    assert len(order) == MOST_RECENT


def test_a_row_that_comes_late_has_the_age_that_it_has() -> None:
    assert "1 min ago" in RequestsPage().body(RequestsPage().draw(seen(IDLE)))


@pytest.mark.anyio
async def test_a_request_opens_to_everything_known_of_it() -> None:
    page, looking = RequestsPage(), Looking()
    page.draw(seen(IDLE))
    await page.act({"do": "details", "id": FINISHED.id}, looking)
    name, html = looking.last("set")
    assert name == f"details-{FINISHED.id}"
    assert "stopped at 3,840 tokens, parts at 3,900: prompts_part, between_blocks" in html
    assert "Too short to be worth asking a producer." in html
    await page.act({"do": "details", "id": "chatcmpl-none"}, looking)
    assert len(looking.told) == 1


def test_licences_are_told_in_a_line() -> None:
    assert licence("baton-llm") == "Apache-2.0"
    assert licence("nicegui") == "MIT"
    assert licence("there-is-no-such-package") == ""
