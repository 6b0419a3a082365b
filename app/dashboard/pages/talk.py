"""Try it: a small chat that shows below each answer what reuse did for it.

The conversation is in the memory of this page alone, for as long as it is open. With
reuse asked for, the caches keep what was asked and answered as they do for any client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from app.dashboard.pages import parts
from app.dashboard.pages.feed import Feed
from app.dashboard.pages.markup import NOTHING, Html, joined, tag
from app.dashboard.pages.requests import only
from app.dashboard.pages.screen import Browser, Drawn, Rows, Seen, part, rows
from app.view.facts import Fact
from app.view.requests import Ended, ended
from mac_decoder.api.face import Facing
from mac_decoder.reuse.facts import Lane

MOST_TYPED: Final = 20_000
MOST_TURNS: Final = 200

_MOST_TOKENS: Final = 4096
_DEFAULT_TOKENS: Final = 200
_TELL_S: Final = 0.15
"""The shortest time between two pieces of an answer."""

_RECORDED_S: Final = 1.0
"""So long after its end an answer's figures may come."""

_LANES: Final[Mapping[Lane, str]] = {
    "auto": "as Baton finds best",
    "local": "here",
    "remote": "by a producer",
}


_NOT_KEPT: Final = (
    "Without that tick nothing of it is kept in a cache: it is gone when this page is closed or "
    "cleared. What was sent with the tick before stays kept. None of it is in a log."
)


@dataclass(frozen=True)
class Asked:
    """A question with its options."""

    text: str
    max_tokens: int
    lane: Lane
    reuse: bool


def read(said: Mapping[str, Any]) -> Asked | None:
    """What a form says; ``None`` where it says nothing, or what no form of ours would."""
    text = said.get("text")
    lane: Lane | None = next((one for one in get_args(Lane) if one == said.get("lane")), None)
    if not isinstance(text, str) or not text.strip() or len(text) > MOST_TYPED:
        return None
    if lane is None:
        return None
    typed = str(said.get("max_tokens"))
    tokens = int(typed) if typed.isascii() and typed.isdecimal() and len(typed) < 8 else 0
    tokens = min(tokens, _MOST_TOKENS) or _DEFAULT_TOKENS
    return Asked(text, tokens, lane, said.get("reuse") is True)


class TryPage:
    """``/try``"""

    title = "Try it"

    def __init__(self, facing: Facing, feed: Feed) -> None:
        self._facing = facing
        self._feed = feed
        self._messages: list[dict[str, str]] = []
        self._latest: Asked | None = None
        self._before = 0
        self._turns: list[str] = []
        self._count = 0
        self._asking: asyncio.Task[None] | None = None

    def draw(self, seen: Seen) -> Drawn:
        """Every part: what is said is told when it is, and not drawn."""
        return {}

    def body(self, drawn: Drawn) -> Html:
        """Everything below the heading."""
        return joined(
            tag(
                "section",
                rows("talk", "div", Rows({}), class_="talk"),
                _form(_kept(disk=self._facing.facts.disk)),
                aria_label="Chat",
                class_="try",
            ),
            parts.glossary("try"),
        )

    async def act(self, said: dict[str, Any], browser: Browser) -> None:
        """Ask, stop, ask the same again, or forget all of it."""
        match said.get("do"):
            case "send":
                if not self._busy and (asked := read(said)) is not None:
                    await self._ask(asked, browser)
            case "again":
                if not self._busy and self._latest is not None:
                    # As if the last question had not been asked: what is the same is the prompt.
                    del self._messages[self._before :]
                    await self._ask(self._latest, browser)
            case "stop":
                self.close()
            case "clear":
                self.close()
                # What is being answered ends by itself, and belongs to nothing that is shown.
                self._asking = None
                self._messages, self._turns, self._latest = [], [], None
                browser.tell([("rows", "talk", [], {}, ""), ("set", "buttons", _buttons())])
            case _:
                pass

    def looked_at(self, browser: Browser) -> None:
        """Nothing begins by itself."""

    def unseen(self) -> None:
        """An answer goes on: it was asked for."""

    def close(self) -> None:
        """Stop what is being answered."""
        if self._asking is not None:
            self._asking.cancel()

    @property
    def _busy(self) -> bool:
        return self._asking is not None and not self._asking.done()

    async def _ask(self, asked: Asked, browser: Browser) -> None:
        self._latest = asked
        self._count += 1
        name = f"turn-{self._count}"
        self._turns = [*self._turns, name][-MOST_TURNS:]
        self._before = len(self._messages)
        turn = tag(
            "div",
            tag("p", asked.text, class_="asked"),
            tag(
                "div",
                part(f"{name}-said", "p", class_="said"),
                part(f"{name}-how", "div", tag("p", "…", class_="none"), class_="how"),
                data_answer=name,
                class_="answer",
            ),
            data_key=name,
        )
        browser.tell(
            [("rows", "talk", self._turns, {name: turn}, ""), ("set", "buttons", _buttons(True))]
        )
        asking = self._asking = asyncio.create_task(self._answer(asked, name, browser))
        try:
            await asyncio.wait({asking})
            if not asking.cancelled():
                asking.result()
        finally:
            if self._asking is asking:
                browser.tell([("set", "buttons", _buttons(again=self._latest is not None))])

    async def _answer(self, asked: Asked, name: str, browser: Browser) -> None:
        answer = _Answer(name, browser)
        # Of this conversation: when it is cleared meanwhile, another one begins.
        messages = self._messages
        question = {"role": "user", "content": asked.text}
        try:
            async with self._facing.inside.post(
                "/v1/chat/completions",
                {
                    "model": self._facing.facts.served_name,
                    "messages": [*messages, question],
                    "max_tokens": asked.max_tokens,
                    "stream": True,
                    "baton": {"lane": asked.lane, "reuse": asked.reuse},
                },
                salt=browser.salt,
                allowed=browser.allowed,
            ) as reply:
                if reply.status != 200:
                    answer.fail(await reply.json())
                else:
                    async for event in reply.events():
                        answer.take(event)
        except asyncio.CancelledError:
            answer.stop()
            raise
        finally:
            answer.tell()
        if not answer.failed:
            messages += [question, {"role": "assistant", "content": answer.text}]
        await self._show_how(answer, browser)

    async def _show_how(self, answer: _Answer, browser: Browser) -> None:
        until = time.monotonic() + _RECORDED_S
        while answer.id and time.monotonic() < until:
            snapshot = await self._feed.now()
            ids = [one.id for one in snapshot.recent.finished]
            if answer.id in ids:
                place = ids.index(answer.id)
                found = ended(only(snapshot, place + 1), time.time())[place]
                browser.tell([("set", f"{answer.name}-how", how(found, f"{answer.name}-how"))])
                return
            await asyncio.sleep(0.05)
        if not answer.failed:
            browser.tell([("set", f"{answer.name}-how", part(f"{answer.name}-how", "div"))])


class _Answer:
    """An answer as it comes."""

    def __init__(self, name: str, browser: Browser) -> None:
        self.name = name
        self.id = ""
        self.text = ""
        self.failed = False
        self._browser = browser
        self._untold = ""
        self._told_at = 0.0

    def take(self, event: Mapping[str, Any]) -> None:
        """An event of the stream."""
        if "error" in event:
            self.fail(event)
            return
        self.id = event.get("id") or self.id
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            self.text += delta.get("content") or ""
            self._untold += (delta.get("reasoning_content") or "") + (delta.get("content") or "")
        if time.monotonic() - self._told_at >= _TELL_S:
            self.tell()

    def tell(self) -> None:
        """Show what has come."""
        if self._untold:
            self._browser.tell([("append", f"{self.name}-said", self._untold)])
        self._untold, self._told_at = "", time.monotonic()

    def fail(self, told: Mapping[str, Any]) -> None:
        """Show what went wrong."""
        self.failed = True
        error = told.get("error") or {}
        text = f"{error.get('message', 'no answer')} ({error.get('code', '')})"
        self._end(tag("p", text, class_="wrong", role="alert"))

    def stop(self) -> None:
        """Show that no more of it comes."""
        self._end(tag("p", "Stopped. What is asked next is asked without this.", class_="none"))

    def _end(self, shown: Html) -> None:
        name = f"{self.name}-how"
        self._browser.tell([("set", name, part(name, "div", shown, class_="how"))])


def how(one: Ended, name: str) -> Html:
    """What reuse did for an answer, as a part called ``name``."""
    # Where it is in the snapshot changes with every request; here it stays.
    segments = [replace(each, fact=_unplaced(each.fact)) for each in one.segments]
    shown = (one.tokens, one.reused, one.prefilled, one.transferred, one.first_token, one.speed)
    return part(
        name,
        "div",
        tag(
            "div",
            tag("span", parts.source(one.source), class_="badges"),
            *(_short(_unplaced(fact)) for fact in shown),
            class_="line",
        ),
        tag("p", one.source.note, class_="none") if one.source and one.source.note else NOTHING,
        parts.bar(segments),
        parts.legend(segments),
        tag("p", "Reuse ", one.shortfall, class_="shortfall") if one.shortfall else NOTHING,
        tag(
            "ul",
            *(tag("li", tag("code", code), " ", meaning) for code, meaning in one.reasons),
            class_="why",
        ),
        class_="how",
    )


def _unplaced(fact: Fact) -> Fact:
    return replace(fact, path="")


def _short(fact: Fact) -> Html:
    return tag("span", tag("small", fact.label), parts.value(fact, "b"), class_="short")


def _kept(*, disk: bool) -> str:
    """What becomes of a question that is sent with the tick."""
    where, forgotten = ("memory", "They go when the decoder ends, or needs the room.")
    if disk:
        where, forgotten = "memory and on disk", "They stay until they are forgotten on Cache."
    return (
        f"With that tick the prompt and its answer are kept in the caches, in {where}. {forgotten} "
        "A producer that prefills keeps the prompt in its memory, until it ends or needs the room: "
        "Cache does not reach that. None of it is in a log."
    )


def _form(kept: str) -> Html:
    return tag(
        "form",
        tag("label", "Message", for_="message", class_="sr"),
        tag(
            "textarea",
            id="message",
            name="text",
            rows=3,
            maxlength=MOST_TYPED,
            required=True,
            placeholder="Type something. Enter sends; Shift and Enter is a new line.",
            data_enter=True,
        ),
        tag(
            "div",
            tag(
                "label",
                tag("span", "Tokens at most"),
                tag(
                    "input",
                    name="max_tokens",
                    type="number",
                    min=1,
                    max=_MOST_TOKENS,
                    value=_DEFAULT_TOKENS,
                ),
            ),
            tag(
                "label",
                tag("span", "Prefill"),
                tag(
                    "select",
                    *(tag("option", text, value=lane) for lane, text in _LANES.items()),
                    name="lane",
                ),
            ),
            tag(
                "label",
                tag("input", name="reuse", type="checkbox", checked=True),
                tag("span", "Reuse what is kept, and keep this"),
                class_="check",
            ),
            class_="filters",
        ),
        _buttons(),
        # The style sheet shows the one that is so; where it cannot, both say when they are.
        tag("p", kept, class_="none when-kept"),
        tag("p", _NOT_KEPT, class_="none when-not-kept"),
        data_do="send",
        data_clears=True,
        class_="ask card",
    )


def _buttons(busy: bool = False, *, again: bool = False) -> Html:
    return part(
        "buttons",
        "div",
        tag("button", "Send", type="submit", class_="main", disabled=busy),
        tag("button", "Stop", type="button", data_do="stop", disabled=not busy),
        tag("button", "Same again", type="button", data_do="again", disabled=busy or not again),
        tag("button", "Clear", type="button", data_do="clear"),
        class_="buttons",
    )
