"""What one browser shows, part by part, and what has changed since it was told.

A page draws parts out of a snapshot, each a piece of HTML or rows of it. Drawing is skipped
where nothing that a part is made of has changed, and only parts that differ are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from app.dashboard.pages.markup import Html, tag
from app.view.standing import Standing
from protocol.status.snapshot import Snapshot

T = TypeVar("T")

Change = Sequence[Any]
"""The name of an operation of ``live.js``, and what it is given."""


@dataclass(frozen=True)
class Seen:
    """What a page is drawn from. ``now`` is the time of day in seconds since 1970."""

    snapshot: Snapshot
    now: float
    standing: Standing
    may_manage: bool


@dataclass(frozen=True)
class Rows:
    """Parts of the same kind in their order, by key. ``ages`` are texts that change alone;
    ``base`` is the path of the list in the snapshot, where the keys' places are in it.
    """

    html: Mapping[str, Html]
    ages: Mapping[str, str] = field(default_factory=dict)
    base: str = ""


Drawn = Mapping[str, Html | Rows]
"""Parts by name. A part's element bears its name as ``data-part``."""


class Browser(Protocol):
    """Who looks at a page, and what may be done for them."""

    def tell(self, found: Sequence[Change]) -> None:
        """Change what is shown."""
        ...

    def may_manage(self) -> bool:
        """Whether they may change things, now; to be asked again when something is done."""
        ...

    @property
    def salt(self) -> bytes:
        """What keeps the caches of their prompts apart from those of others."""
        ...

    def allowed(self) -> bool:
        """Whether they would still be let in."""
        ...


class Page(Protocol):
    """A page of the dashboard, for one browser."""

    title: str

    def draw(self, seen: Seen) -> Drawn:
        """Every part."""
        ...

    def body(self, drawn: Drawn) -> Html:
        """Everything below the heading, with the parts in it."""
        ...

    async def act(self, said: dict[str, Any], browser: Browser) -> None:
        """Do what somebody asks for; ``said["do"]`` names it. Nothing of it is to be believed."""
        ...

    def looked_at(self, browser: Browser) -> None:
        """It is seen from now on."""
        ...

    def unseen(self) -> None:
        """It is hidden from now on: nothing is done for whoever would look; what was asked for
        goes on.
        """
        ...

    def close(self) -> None:
        """Its browser has left; it may come back."""
        ...


class Still:
    """What a page is that only shows."""

    async def act(self, said: dict[str, Any], browser: Browser) -> None:
        """There is nothing to do."""

    def looked_at(self, browser: Browser) -> None:
        """Nothing begins."""

    def unseen(self) -> None:
        """Nothing ends."""

    def close(self) -> None:
        """Nothing goes on."""


class Memo:
    """What was made of the same things last time."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def of(self, name: str, inputs: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What ``make`` gives, or gave for equal ``inputs``."""
        known = self._made.get(name)
        if known is not None and known[0] == inputs:
            return known[1]
        made = make()
        self._made[name] = (inputs, made)
        return made


def part(name: str, element: str, *pieces: str, **attributes: str | None) -> Html:
    """The element of a part."""
    return tag(element, *pieces, data_part=name, **attributes)


def rows(
    name: str, element: str, drawn: Html | Rows, before: str = "", **attributes: str | None
) -> Html:
    """The element of a part that has rows, after what stands ``before`` them and is no row."""
    assert isinstance(drawn, Rows)
    return tag(element, before, *drawn.html.values(), data_part=name, **attributes)


def piece(drawn: Drawn, name: str) -> Html:
    """A part that is one piece."""
    found = drawn[name]
    assert isinstance(found, Html)
    return found


def changes(before: Drawn, after: Drawn) -> list[Change]:
    """What makes a browser that shows ``before`` show ``after``."""
    made: list[Change] = []
    for name, now in after.items():
        was = before.get(name)
        if now is was:
            continue
        if isinstance(now, Rows):
            made.extend(_of_rows(name, was if isinstance(was, Rows) else Rows({}), now))
        elif now != was:
            made.append(("set", name, now))
    return made


def _of_rows(name: str, was: Rows, now: Rows) -> list[Change]:
    made: list[Change] = []
    changed = {
        key: html
        for key, html in now.html.items()
        if (old := was.html.get(key)) is not html and old != html
    }
    if changed or was.html.keys() != now.html.keys() or [*was.html] != [*now.html]:
        made.append(("rows", name, [*now.html], changed, now.base))
    aged = {key: age for key, age in now.ages.items() if was.ages.get(key) != age}
    if aged:
        made.append(("text", name, aged))
    return made
