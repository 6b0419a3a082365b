"""The parts that surfaces lay out: text that is ready, and where its number comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.view import words
from protocol.status.figures import Basis, Figure

Tone = Literal["plain", "good", "busy", "warn", "bad"]
"""How a surface colours; it never says more than the text beside it."""


@dataclass(frozen=True)
class Fact:
    """``label: text``. ``path`` is where the snapshot has the ``value`` that was worded:
    field names and positions, joined by dots. ``basis`` is ``None`` for what is no number.
    """

    label: str
    text: str
    path: str = ""
    value: float | str | None = None
    basis: Basis | None = None
    tone: Tone = "plain"
    note: str = ""


@dataclass(frozen=True)
class Badge:
    """A word in a coloured frame."""

    text: str
    tone: Tone = "plain"
    note: str = ""


@dataclass(frozen=True)
class Segment:
    """A part of a stacked bar; ``share`` of its length, of 1. ``kind`` chooses the colour."""

    label: str
    kind: str
    share: float
    fact: Fact


@dataclass(frozen=True)
class Meter:
    """How much of something is used, of 1; ``None`` where the whole is not known."""

    label: str
    text: str
    share: float | None
    facts: tuple[Fact, ...] = ()


def number(label: str, known: Figure, path: str, unit: str = "", *, note: str = "") -> Fact:
    """A figure with its unit."""
    return _of(label, words.figure(known, unit), known, path, note)


def time(label: str, known: Figure, path: str, *, note: str = "") -> Fact:
    """A figure in milliseconds."""
    return _of(label, words.milliseconds(known), known, path, note)


def seconds(label: str, known: Figure, path: str, *, note: str = "") -> Fact:
    """A figure in seconds."""
    return _of(label, words.seconds(known), known, path, note)


def size_rate(label: str, known: Figure, path: str, *, note: str = "") -> Fact:
    """A figure in bytes per second."""
    return _of(label, words.figure_bytes(known, "/s"), known, path, note)


def share(label: str, known: Figure, path: str, *, note: str = "") -> Fact:
    """A figure that is a fraction of 1."""
    return _of(label, words.share(known), known, path, note)


def count(label: str, value: int | None, path: str, *, note: str = "") -> Fact:
    """A count; ``None``: not known."""
    return Fact(label, words.count(value), path, value, _counted(value), note=note)


def size(label: str, value: int | None, path: str, *, note: str = "") -> Fact:
    """A count of bytes; ``None``: not known."""
    return Fact(label, words.nbytes(value), path, value, _counted(value), note=note)


def text(
    label: str, value: str | None, path: str = "", tone: Tone = "plain", note: str = ""
) -> Fact:
    """What is no number; a dash where there is none."""
    return Fact(label, value or words.DASH, path, value, None, tone, note)


def _of(label: str, worded: str, known: Figure, path: str, note: str) -> Fact:
    return Fact(label, worded, path, known.value, known.basis, note=note)


def _counted(value: int | None) -> Basis:
    return "unavailable" if value is None else "measured"
