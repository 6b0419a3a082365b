"""What the decoder remembers of how a producer qualified, in words. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from app.view import words
from app.view.facts import Badge
from mac_decoder.qualify.verdicts import Past, Verdict


@dataclass(frozen=True)
class Qualified:
    """One qualification: what comparing its rows with the decoder's own found."""

    at: str
    ago: str
    rows: Badge
    apart: str
    allowed: str
    where: str


@dataclass(frozen=True)
class History:
    """The qualifications, the latest first, and what computed on either side."""

    here: str
    there: str
    past: tuple[Qualified, ...]


def history(verdict: Verdict | None, now: float) -> History | None:
    """What is on record; ``None`` if nothing is."""
    if verdict is None:
        return None
    recipe = verdict.recipe
    there = f"{recipe.device}, {recipe.dtype}, tiles of {words.counted(recipe.tile, 'token')}"
    past = (_qualified(one, now) for one in reversed(verdict.past))
    return History(verdict.here, there, tuple(past))


def _qualified(one: Past, now: float) -> Qualified:
    return Qualified(
        words.moment(one.at, "%Y-%m-%d %H:%M"),
        words.ago(one.at, now),
        Badge("alike", "good") if one.fit else Badge("differ", "bad"),
        words.plain(one.apart),
        words.plain(one.allowed),
        one.where or words.DASH,
    )
