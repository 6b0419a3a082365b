"""The parts that surfaces lay out: text that is ready, and where its number comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from app.view import words
from protocol.status.figures import Basis, Figure
from protocol.status.snapshot import AskedFromBy

Tone = Literal["plain", "good", "busy", "warn", "bad"]
"""How a surface colours; it never says more than the text beside it."""

_ASKED_FROM_BY: Final[dict[AskedFromBy, str]] = {
    "set": "as it was set (--remote-threshold)",
    "rates": "follows from the measured rates",
    "first_guess": "a first guess: not every rate is measured yet",
}


@dataclass(frozen=True)
class Fact:
    """``label: text``. ``path`` is where the snapshot has the ``value`` that was worded:
    field names and positions, joined by dots. ``basis`` is ``None`` for what is no number.
    ``term`` is the word of the glossary that the label is about.
    """

    label: str
    text: str
    path: str = ""
    value: float | str | None = None
    basis: Basis | None = None
    tone: Tone = "plain"
    note: str = ""
    term: str = ""


@dataclass(frozen=True)
class Badge:
    """A word in a coloured frame."""

    text: str
    tone: Tone = "plain"
    note: str = ""


@dataclass(frozen=True)
class Segment:
    """A part of a stacked bar; ``share`` of its length, of 1. ``kind`` chooses the colour, and
    ``note`` says what is done in it.
    """

    label: str
    kind: str
    share: float
    fact: Fact
    note: str = ""


@dataclass(frozen=True)
class Meter:
    """How much of something is used, of 1; ``None`` where the whole is not known."""

    label: str
    text: str
    share: float | None
    facts: tuple[Fact, ...] = ()


def number(
    label: str, known: Figure, path: str, unit: str = "", *, note: str = "", term: str = ""
) -> Fact:
    """A figure with its unit."""
    return _of(label, words.figure(known, unit), known, path, note, term)


def time(label: str, known: Figure, path: str, *, note: str = "", term: str = "") -> Fact:
    """A figure in milliseconds."""
    return _of(label, words.milliseconds(known), known, path, note, term)


def seconds(label: str, known: Figure, path: str, *, note: str = "", term: str = "") -> Fact:
    """A figure in seconds."""
    return _of(label, words.seconds(known), known, path, note, term)


def size_rate(label: str, known: Figure, path: str, *, note: str = "", term: str = "") -> Fact:
    """A figure in bytes per second."""
    return _of(label, words.figure_bytes(known, "/s"), known, path, note, term)


def share(label: str, known: Figure, path: str, *, note: str = "", term: str = "") -> Fact:
    """A figure that is a fraction of 1."""
    return _of(label, words.share(known), known, path, note, term)


def count(
    label: str, value: int | None, path: str, unit: str = "", *, note: str = "", term: str = ""
) -> Fact:
    """A count, of ``unit`` where that is named in the singular; ``None``: not known."""
    text = words.counted(value, unit) if unit and value is not None else words.count(value)
    return Fact(label, text, path, value, _counted(value), note=note, term=term)


def size(label: str, value: int | None, path: str, *, note: str = "", term: str = "") -> Fact:
    """A count of bytes; ``None``: not known."""
    return Fact(label, words.nbytes(value), path, value, _counted(value), note=note, term=term)


def text(
    label: str,
    value: str | None,
    path: str = "",
    tone: Tone = "plain",
    note: str = "",
    term: str = "",
) -> Fact:
    """What is no number; a dash where there is none."""
    return Fact(label, value or words.DASH, path, value, None, tone, note, term)


def asked_from(tokens: int | None, by: AskedFromBy | None, path: str, *, label: str) -> Fact:
    """From which prompt length a producer is asked, and why; a dash where it never is."""
    text = words.DASH if tokens is None else f"{words.counted(tokens, 'token')} on"
    note = "" if by is None else _ASKED_FROM_BY[by]
    if tokens is None and by == "rates":
        note = "by the measured rates this machine is faster at any length"
    return Fact(label, text, path, tokens, _counted(tokens), note=note)


def _of(label: str, worded: str, known: Figure, path: str, note: str, term: str) -> Fact:
    return Fact(label, worded, path, known.value, known.basis, note=note, term=term)


def _counted(value: int | None) -> Basis:
    return "unavailable" if value is None else "measured"
