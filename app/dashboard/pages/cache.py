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

from app.dashboard.pages import cache_parts, parts
from app.dashboard.pages.cache_parts import MOST_TYPED
from app.dashboard.pages.dialogs import confirmation, refusal
from app.dashboard.pages.manage import require_manager
from app.dashboard.pages.markup import NOTHING, Html, joined, tag
from app.dashboard.pages.screen import Browser, Change, Drawn, Memo, Seen, part, piece, rows
from app.dashboard.pages.walk import Walk
from app.view import keeping
from app.view.cache import cache
from app.view.exact import exactly
from app.view.facts import Fact
from app.view.keeping import Overview, Stays
from mac_decoder.config import size
from mac_decoder.housekeeping.conversations import Conversations
from mac_decoder.housekeeping.house import Gone, Housekeeping
from mac_decoder.housekeeping.operations import Kind, Operation
from mac_decoder.store.catalogue import Foreign
from protocol.errors import BatonError, RequestError
from protocol.status.snapshot import Cache

log = logging.getLogger(__name__)

_BOOKS: Final = parts.term("Cap accounting", "cap accounting")

_AGE_S: Final = 5.0
_LOOK_S: Final = 5.0
"""How often it is looked whether conversations have changed."""

_TELL_S: Final = 0.25

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
            "walked": memo.of("walked", (self._walked,), lambda: cache_parts.walked(self._walked)),
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
            "events": memo.of("events", (found.events,), lambda: cache_parts.events(found.events)),
            "conversations": memo.of(
                "conversations",
                (self._overview, seen.may_manage),
                lambda: cache_parts.conversations(self._overview, may_manage=seen.may_manage),
            ),
            "rest": memo.of("rest", (self._overview,), lambda: cache_parts.rest(self._overview)),
            "house": memo.of(
                "house",
                (seen.may_manage, self._house is None),
                lambda: cache_parts.house(may_manage=seen.may_manage and self._house is not None),
            ),
        }

    def body(self, drawn: Drawn) -> Html:
        """Everything below the heading."""
        return joined(
            cache_parts.section(
                "Disk",
                tag("div", piece(drawn, "durable"), piece(drawn, "walked"), class_="pair"),
                piece(drawn, "house"),
                self._operation(),
            ),
            cache_parts.section("Memory", piece(drawn, "tiers")),
            cache_parts.section(
                "Conversations",
                rows("conversations", "div", drawn["conversations"], class_="kept"),
                piece(drawn, "rest"),
            ),
            cache_parts.section(
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
                tag("div", cache_parts.section("Gains", piece(drawn, "gains"))),
                tag("div", cache_parts.section("Counters", piece(drawn, "counters"))),
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
                    browser.tell([("open", cache_parts.prune_form())])
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
            to_bytes = size(text[:MOST_TYPED])
        except argparse.ArgumentTypeError:
            return (
                "open",
                cache_parts.prune_form(wrong="That is no size: type 500MB, 20GB or 8GiB."),
            )
        gone = await house.would_prune(to_bytes)
        if not gone.files:
            return ("open", cache_parts.nothing_to_prune(gone, to_bytes))
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
        return cache_parts.operation(
            None if latest is None else keeping.operation(latest, self._stays())
        )

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
