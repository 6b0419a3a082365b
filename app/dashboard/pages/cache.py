"""Cache: the tiers, what is kept in them, and keeping house in them.

What is on disk by the books, which is what the cap is about, and what a walk of the disk finds
are two numbers with two names. The disk is walked while somebody looks at this page.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import shlex
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from app.dashboard.pages import parts
from app.dashboard.pages.dialogs import confirmation, dialog, refusal
from app.dashboard.pages.manage import NOT_YOURS, require_manager
from app.dashboard.pages.markup import NOTHING, Html, joined, tag
from app.dashboard.pages.screen import Browser, Change, Drawn, Memo, Rows, Seen, part, piece, rows
from app.dashboard.pages.walk import Walk
from app.view import keeping
from app.view.cache import Event, cache
from app.view.exact import exactly
from app.view.facts import Fact
from app.view.keeping import Doing, Kept, Overview, Stays
from mac_decoder.config import size
from mac_decoder.housekeeping.conversations import Conversations
from mac_decoder.housekeeping.house import Gone, Housekeeping
from mac_decoder.housekeeping.operations import Kind, Operation
from mac_decoder.store.catalogue import Foreign
from protocol.errors import BatonError, RequestError
from protocol.status.snapshot import Cache

log = logging.getLogger(__name__)

_BOOKS: Final = parts.term("Cap accounting", "cap accounting")
_WALK: Final = parts.term("Disk footprint", "disk footprint")

_AGE_S: Final = 5.0
_LOOK_S: Final = 5.0
"""How often it is looked whether conversations have changed."""

_TELL_S: Final = 0.25
_MOST_TYPED: Final = 32

Begin = Callable[[], Operation[Any]]


class CachePage:
    """``/cache``"""

    title = "Cache"

    def __init__(self, house: Housekeeping | None, walk: Walk, directory: Path) -> None:
        """``walk`` is that of all pages; ``directory`` is where the caches are."""
        self._house = house
        self._directory = directory
        self._walk = walk
        self._memo = Memo()
        self._looking: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._asked: Begin | None = None
        self._questions = 0
        self._stale = asyncio.Event()
        self._overview: Overview | None = None
        self._walked: tuple[Fact, ...] = ()
        self._cache: Cache | None = None
        self._foreign: Foreign | None = None

    def draw(self, seen: Seen) -> Drawn:
        """Every part."""
        snapshot, tick = seen.snapshot, int(seen.now / _AGE_S)
        self._cache = snapshot.cache
        inputs = (snapshot.cache, snapshot.decoder, tick)
        found = self._memo.of("view", inputs, lambda: cache(snapshot, seen.now))
        memo = self._memo
        meters = (found.live, found.resident)
        return {
            "tiers": memo.of(
                "tiers",
                meters,
                lambda: part(
                    "tiers",
                    "div",
                    *(parts.meter(one) for one in meters if one is not None),
                    class_="tiers",
                ),
            ),
            "durable": memo.of(
                "durable",
                (found.durable,),
                lambda: part(
                    "durable",
                    "div",
                    NOTHING if found.durable is None else parts.meter(found.durable, _BOOKS),
                ),
            ),
            "walked": memo.of("walked", (self._walked,), lambda: _walked(self._walked)),
            "gains": memo.of(
                "gains",
                (found.gains,),
                lambda: part("gains", "div", parts.facts(found.gains), class_="card"),
            ),
            "counters": memo.of(
                "counters",
                (found.counters,),
                lambda: part(
                    "counters",
                    "div",
                    *(
                        joined(tag("h3", title), parts.facts(those))
                        for title, those in found.counters
                    ),
                    class_="card",
                ),
            ),
            "events": memo.of("events", (found.events,), lambda: _events(found.events)),
            "conversations": memo.of(
                "conversations",
                (self._overview, seen.may_manage),
                lambda: _conversations(self._overview, may_manage=seen.may_manage),
            ),
            "rest": memo.of("rest", (self._overview,), lambda: _rest(self._overview)),
            "house": memo.of(
                "house",
                (seen.may_manage, self._house is None),
                lambda: _house(may_manage=seen.may_manage and self._house is not None),
            ),
        }

    def body(self, drawn: Drawn) -> Html:
        """Everything below the heading."""
        return joined(
            _section(
                "Disk",
                tag("div", piece(drawn, "durable"), piece(drawn, "walked"), class_="pair"),
                piece(drawn, "house"),
                self._operation(),
            ),
            _section("Memory", piece(drawn, "tiers")),
            _section(
                "Conversations",
                rows("conversations", "div", drawn["conversations"], class_="kept"),
                piece(drawn, "rest"),
            ),
            _section(
                "Events",
                tag(
                    "p",
                    "Only files are listed. What memory and the engine let go of to make room is "
                    "counted under Memory.",
                    class_="none",
                ),
                piece(drawn, "events"),
                heading="On disk: what went, and why",
            ),
            tag(
                "div",
                tag("div", _section("Gains", piece(drawn, "gains"))),
                tag("div", _section("Counters", piece(drawn, "counters"))),
                class_="columns bare",
            ),
            parts.glossary("cache"),
        )

    def looked_at(self, browser: Browser) -> None:
        """Look what is kept, walk the disk, and follow what goes on."""
        if self._house is not None and self._looking is None:
            self._looking = asyncio.create_task(self._look(self._house, browser))
            self._follow(browser)

    def unseen(self) -> None:
        """Look no more, and tell nothing."""
        self.close()

    def close(self) -> None:
        """Look no more. An operation goes on."""
        for task in (self._looking, self._following):
            if task is not None:
                task.cancel()
        self._looking = self._following = None

    async def act(self, said: dict[str, Any], browser: Browser) -> None:
        """Ask for a confirmation, or carry out what was confirmed."""
        house = self._house
        if house is None:
            return
        try:
            match said.get("do"):
                case "verify":
                    require_manager(browser)
                    browser.tell([self._ask_to_verify(house)])
                case "prune":
                    require_manager(browser)
                    browser.tell([("open", _prune_form())])
                case "prune-to":
                    require_manager(browser)
                    browser.tell([await self._ask_to_prune(house, said.get("size"))])
                case "forget":
                    require_manager(browser)
                    name = str(said.get("id"))
                    gone = await house.would_forget(name)
                    browser.tell(
                        [
                            self._ask(
                                "forget",
                                self._called(name),
                                gone,
                                partial(house.forget, name),
                            )
                        ]
                    )
                case "clear":
                    require_manager(browser)
                    gone = await house.would_clear()
                    self._foreign = await _foreign(house)
                    title = "Clear all caches of this model?"
                    more = self._clears_others() if gone.left is not None else ()
                    browser.tell([self._ask("clear", title, gone, house.clear, *more)])
                case "confirmed":
                    require_manager(browser)
                    self._carry_out(said.get("number"), browser)
                case "cancel-operation":
                    require_manager(browser)
                    if house.latest is not None:
                        house.latest.cancel()
                case "closed":
                    self._asked = None
                case _:
                    pass
        except BatonError as error:
            browser.tell([("open", refusal(error))])

    def _called(self, conversation: str) -> str:
        """The question about a conversation names it as the page does."""
        shown = self._overview.shown if self._overview is not None else ()
        for one in shown:
            if one.id == conversation:
                return f"Forget conversation {one.mark} ({one.title})?"
        return "Forget this conversation?"

    # -- asking, and doing

    def _ask_to_verify(self, house: Housekeeping) -> Change:
        self._asked = house.verify
        self._questions += 1
        return (
            "open",
            confirmation(
                "Verify what is on disk?",
                (keeping.verification(self._walk.kinds),),
                "Verify",
                self._questions,
            ),
        )

    async def _ask_to_prune(self, house: Housekeeping, typed: object) -> Change:
        text = typed if isinstance(typed, str) else ""
        try:
            to_bytes = size(text[:_MOST_TYPED])
        except argparse.ArgumentTypeError:
            return ("open", _prune_form(wrong="That is no size: type 500MB, 20GB or 8GiB."))
        gone = await house.would_prune(to_bytes)
        if not gone.files:
            return ("open", _nothing_to_prune(gone, to_bytes))
        title = f"Prune to {exactly(to_bytes)}?"
        return self._ask("prune", title, gone, partial(house.prune, to_bytes))

    def _ask(self, kind: Kind, title: str, gone: Gone, begin: Begin, *more: Html) -> Change:
        self._asked = begin
        self._questions += 1
        text = (*keeping.question(kind, gone, self._stays()), *more)
        return (
            "open",
            confirmation(title, text, kind.capitalize(), self._questions, danger=True),
        )

    def _clears_others(self) -> tuple[Html, ...]:
        """The command that also deletes what others have; none where they have nothing."""
        if not (self._stays() or keeping.UNKNOWN).others:
            return ()
        words = ["baton", "cache", "clear", "--cache-dir", str(self._directory.parent.absolute())]
        return (
            joined(
                "To delete everything on disk, of whatever model, stop this decoder and run ",
                tag("code", shlex.join(words), class_="command"),
            ),
        )

    def _stays(self) -> Stays | None:
        """What a clearing leaves; ``None`` before it was looked whose it is."""
        return None if self._foreign is None else keeping.stays(self._foreign, self._walk.kinds)

    def _carry_out(self, number: object, browser: Browser) -> None:
        if number != str(self._questions):
            raise RequestError("another question was asked meanwhile", reason="not_confirmed")
        begin, self._asked = self._asked, None
        if begin is None:
            raise RequestError("there is nothing to confirm any more", reason="not_confirmed")
        begin()
        browser.tell([("close",)])
        self._follow(browser)

    # -- following

    def _operation(self) -> Html:
        latest = self._house.latest if self._house is not None else None
        return _operation(None if latest is None else keeping.operation(latest, self._stays()))

    def _follow(self, browser: Browser) -> None:
        if self._following is not None and not self._following.done():
            self._following.cancel()
        latest = self._house.latest if self._house is not None else None
        if latest is not None:
            self._following = asyncio.create_task(self._tell(latest, browser))

    async def _tell(self, operation: Operation[Any], browser: Browser) -> None:
        async for _ in operation.follow():
            browser.tell([("set", "operation", self._operation())])
            await asyncio.sleep(_TELL_S)
        browser.tell([("set", "operation", self._operation())])
        self._stale.set()

    async def _look(self, house: Housekeeping, browser: Browser) -> None:
        seen: Cache | None = None
        while True:
            self._walked = await self._walk.found()
            if seen is not self._cache:
                seen = self._cache
                conversations = await _tried(house.conversations())
                if conversations is not None:
                    self._overview = keeping.conversations(conversations, time.time())
                    if self._foreign != conversations.foreign:
                        self._foreign = conversations.foreign
                        browser.tell([("set", "operation", self._operation())])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._stale.wait()
                    seen = None
            self._stale.clear()


async def _foreign(house: Housekeeping) -> Foreign | None:
    """What other models have on disk; ``None`` where that is not found out."""
    conversations: Conversations | None = await _tried(house.conversations())
    return None if conversations is None else conversations.foreign


async def _tried(looking: Awaitable[Any]) -> Any:
    """What a look finds; ``None`` where it finds none this time."""
    try:
        return await looking
    except BatonError as error:
        log.info("the caches were not looked over (%s): %s", error.reason, error.message)
        return None


def _section(title: str, *content: str, heading: str = "") -> Html:
    name = title.lower()
    return tag(
        "section",
        tag("h2", heading or title, id=f"h-{name}"),
        *content,
        aria_labelledby=f"h-{name}",
        class_=f"s-{name}",
    )


def _walked(found: tuple[Fact, ...]) -> Html:
    shown = parts.facts(found) if found else tag("p", "The disk is being walked.", class_="none")
    return part("walked", "div", tag("div", tag("h3", _WALK), shown, class_="card"))


def _house(*, may_manage: bool) -> Html:
    return part(
        "house",
        "div",
        tag(
            "div",
            *(
                tag("button", name, type="button", data_do=name.lower(), disabled=not may_manage)
                for name in ("Verify", "Prune", "Clear")
            ),
            class_="buttons",
        ),
        NOTHING if may_manage else NOT_YOURS,
        class_="house",
    )


def _prune_form(wrong: str = "") -> Html:
    return dialog(
        "Prune to a size",
        tag(
            "form",
            tag(
                "p",
                "The least recently used goes first, until at most this much is on disk. Cuts go "
                "whole, so that less can be left.",
            ),
            tag("label", "Size", for_="prune-size"),
            tag(
                "input",
                id="prune-size",
                name="size",
                required=True,
                maxlength=_MOST_TYPED,
                placeholder="20GB",
                autofocus=True,
                autocomplete="off",
                aria_describedby="prune-wrong" if wrong else None,
            ),
            tag("p", wrong, id="prune-wrong", class_="wrong", role="alert") if wrong else NOTHING,
            tag(
                "div",
                tag("button", "Cancel", type="button", data_dismiss=True),
                tag("button", "Go on", type="submit", class_="main"),
                class_="buttons end",
            ),
            data_do="prune-to",
        ),
    )


def _nothing_to_prune(gone: Gone, to_bytes: int) -> Html:
    left = "" if gone.left is None else f"On disk are {exactly(gone.left)}. "
    return dialog(
        "There is nothing to prune",
        tag("p", parts.unbroken(f"{left}Nothing has to go for {exactly(to_bytes)}.")),
        tag(
            "div",
            tag("button", "Close", type="button", data_dismiss=True, autofocus=True),
            class_="buttons end",
        ),
    )


def _operation(found: Doing | None) -> Html:
    if found is None:
        return part("operation", "div")
    shown = (
        parts.progress(found.share, found.title)
        if found.running
        else tag("i", class_="dot", aria_hidden="true", data_tone=found.tone)
    )
    stop = tag("button", "Stop", type="button", data_do="cancel-operation")
    return part(
        "operation",
        "div",
        tag("p", tag("b", found.title), class_="what", role="status"),
        tag(
            "div",
            shown,
            tag("span", parts.unbroken(found.text)),
            class_="progress" if found.running else "came",
        ),
        stop if found.running else NOTHING,
        class_="card operation",
    )


def _conversations(found: Overview | None, *, may_manage: bool) -> Rows:
    if found is None or not found.shown:
        text = "They are being looked over." if found is None else "Nothing is kept yet."
        return Rows({"none": tag("p", text, class_="none", data_key="none")})
    return Rows({one.id: _conversation(one, may_manage) for one in found.shown})


def _conversation(one: Kept, may_manage: bool) -> Html:
    titles = ("Position", "Taken at", "Kept in", "State", "File", "Used", "")
    head = tag(
        "tr",
        *(
            tag(
                "th", title, scope="col", class_="number" if title in ("Position", "File") else None
            )
            if title
            else tag("td")
            for title in titles
        ),
    )
    cuts = (
        tag(
            "tr",
            tag("td", cut.position, class_="number"),
            tag("td", cut.why),
            tag("td", ", ".join(cut.tiers)),
            tag("td", cut.state),
            tag("td", cut.bytes, class_="number"),
            tag("td", cut.used),
            tag("td", tag("small", cut.note)),
        )
        for cut in one.cuts
    )
    made_by = tag("p", tag("small", "Tokens " + "; ".join(one.made_by))) if one.made_by else ""
    return tag(
        "details",
        tag(
            "summary",
            tag("b", one.title),
            tag("span", tag("code", one.mark), ", ", one.count, class_="mark"),
            tag("span", *(parts.badge(tier) for tier in one.tiers), class_="badges"),
            tag("span", one.size, class_="size"),
            tag("span", one.used, class_="age"),
        ),
        parts.facts(one.facts, "facts two"),
        tag(
            "div",
            tag("table", tag("thead", head), tag("tbody", *cuts), class_="cuts"),
            class_="scroll",
            tabindex="0",
            role="group",
            aria_label="Cuts",
        ),
        made_by,
        tag(
            "button",
            "Forget",
            type="button",
            data_do="forget",
            data_id=one.id,
            disabled=not may_manage,
        ),
        data_key=one.id,
    )


def _rest(found: Overview | None) -> Html:
    text = f"Not shown: {found.rest}." if found is not None and found.rest else ""
    return part("rest", "p", text, class_="none")


def _events(found: tuple[Event, ...]) -> Html:
    if not found:
        return part("events", "div", tag("p", "Nothing has gone from the disk yet.", class_="none"))
    return part(
        "events",
        "div",
        tag("ul", *(_event(one) for one in found), class_="events card"),
    )


def _event(one: Event) -> Html:
    return tag(
        "li",
        tag(
            "span",
            tag("span", one.kind, class_="badge", data_tone=one.tone),
            tag("code", one.reason),
            class_="badges",
        ),
        tag("span", one.means, class_="none"),
        tag(
            "span",
            *(_counted(fact) for fact in (one.files, one.cuts, one.bytes)),
            class_="counted",
        ),
        tag("span", one.ago, class_="age"),
    )


def _counted(fact: Fact) -> Html:
    return tag("span", tag("small", fact.label), " ", parts.value(fact, "b"))
