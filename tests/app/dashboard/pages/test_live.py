"""What ``live.js`` does in a browser, alone with a document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from playwright.sync_api import Browser, Page

from app.dashboard import pages
from app.dashboard.pages.talk import TryPage
from tests.e2e.browsing import CHROMIUM, chromium

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

SCRIPT = Path(pages.__file__).with_name("live.js").read_text()
STYLE = (Path(pages.__file__).parents[1] / "assets" / "baton.css").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    made = browser.new_page()
    yield made
    made.close()


def shown(page: Page, html: str, *, hidden: bool = False) -> None:
    """Mount it with this HTML; what it says is in ``said``."""
    page.evaluate(
        """async ([script, html, hidden]) => {
            Object.defineProperty(document, "hidden", { get: () => hidden });
            const address = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
            const { default: live } = await import(address);
            window.said = [];
            window.patch = live.methods.patch;
            live.mounted.call({ html, $emit: (name, told) => window.said.push([name, told]) });
        }""",
        [SCRIPT, html, hidden],
    )


def patch(page: Page, *changes: Any) -> None:
    page.evaluate("(changes) => window.patch(changes)", list(changes))


@pytest.mark.parametrize("hidden", [True, False])
def test_it_says_at_once_whether_it_is_seen(page: Page, *, hidden: bool) -> None:
    shown(page, "<p></p>", hidden=hidden)
    assert page.evaluate("said") == [["act", {"do": "hidden" if hidden else "shown"}]]


def test_what_try_it_says_is_kept_follows_the_tick(page: Page) -> None:
    facing = SimpleNamespace(facts=SimpleNamespace(disk=True))
    shown(page, TryPage(cast(Any, facing), cast(Any, None)).body({}))
    page.add_style_tag(content=STYLE)
    kept, not_kept = page.locator(".when-kept"), page.locator(".when-not-kept")
    assert (kept.is_visible(), not_kept.is_visible()) == (True, False)
    page.get_by_role("checkbox").uncheck()
    assert (kept.is_visible(), not_kept.is_visible()) == (False, True)


def row(key: str) -> str:
    return f'<li data-key="{key}"><button id="{key}">{key}</button></li>'


def order(page: Page) -> list[str]:
    return page.eval_on_selector_all("li", "all => all.map(one => one.dataset.key)")


@pytest.mark.parametrize(
    "after", [["b", "c"], ["b"], ["new", "b", "c"], ["b", "c", "new"], ["new", "b"]]
)
def test_rows_that_stay_keep_the_focus(page: Page, after: list[str]) -> None:
    shown(page, f'<ul data-part="r"><p>before</p>{row("a")}{row("b")}{row("c")}</ul>')
    page.focus("#b")
    changed = {key: row(key) for key in after if key == "new"}
    patch(page, ("rows", "r", after, changed, ""))
    assert order(page) == after
    assert page.evaluate("document.activeElement.id") == "b"
    assert page.evaluate("document.querySelector('ul').firstElementChild.tagName") == "P"


def test_rows_are_put_in_order_and_all_may_go(page: Page) -> None:
    shown(page, f'<ul data-part="r">{row("a")}{row("b")}{row("c")}</ul>')
    patch(page, ("rows", "r", ["c", "a"], {}, ""))
    assert order(page) == ["c", "a"]
    patch(page, ("rows", "r", ["d"], {"d": row("d")}, ""))
    assert order(page) == ["d"]
    patch(page, ("rows", "r", [], {}, ""))
    assert order(page) == []
