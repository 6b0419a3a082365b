"""How a surface stands to its decoder: what it knows besides the snapshot."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit

from app.view.facts import Tone

State = Literal[
    "connecting",
    "connected",
    "absent",
    "starting",
    "restarting",
    "latched",
    "stopping",
    "key_needed",
    "refused",
    "version_differs",
]
"""``absent``: nobody listens there. ``starting``, ``restarting``, ``latched`` and ``stopping``
are what the decoder's supervisor says while no decoder answers; ``key_needed``: an API key is
asked for; ``refused``: for another reason."""


@dataclass(frozen=True)
class Standing:
    """``url`` is the decoder's base URL; ``reason`` a stable code, where there is one, and
    ``said`` what this side's own error says: never a text of whoever answers there.
    """

    state: State
    url: str
    reason: str = ""
    said: str = ""

    @property
    def port(self) -> int | None:
        """The port in ``url``."""
        return urlsplit(self.url).port


_SENTENCES: dict[State, tuple[str, Tone]] = {
    "connecting": ("Connecting to the decoder", "busy"),
    "connected": ("Connected", "good"),
    "absent": ("No decoder runs", "plain"),
    "starting": ("The decoder starts", "busy"),
    "restarting": ("The decoder starts again after a fault", "warn"),
    "latched": ("The decoder failed three times in a row and is not started again", "bad"),
    "stopping": ("The decoder stops", "busy"),
    "key_needed": ("The decoder asks for an API key", "bad"),
    "refused": ("The decoder refuses this app", "bad"),
    "version_differs": ("The decoder is of another release", "bad"),
}


_REASONS: Final[dict[str, str]] = {
    "no_answer": "What listens there does not answer",
    "connection_lost": "What listens there hangs up",
    "not_a_decoder": "What listens there is no decoder",
    "status_malformed": "What listens there does not speak as a decoder does",
    "status_out_of_place": "What listens there does not speak as a decoder does",
    "status_out_of_order": "What listens there does not speak as a decoder does",
}
"""In place of the state's own words."""

MOST_CODE: Final = 64
_CODE: Final = re.compile(rf"[a-z][a-z0-9_]{{0,{MOST_CODE - 1}}}")
_MOST_SAID: Final = 160


def known_code(found: object) -> str:
    """A reason that came from elsewhere, if it has the form of one; else ``unknown``."""
    return found if isinstance(found, str) and _CODE.fullmatch(found) else "unknown"


def sentence(standing: Standing) -> tuple[str, Tone]:
    """What to say of a decoder that tells nothing itself, and how it looks: one short line."""
    words, tone = _SENTENCES[standing.state]
    if not standing.reason:
        return words, tone
    if standing.state == "refused":
        words = one_line(standing.said) or _REASONS.get(standing.reason, words)
    return f"{words} ({known_code(standing.reason)})", tone


def one_line(said: str, most: int = _MOST_SAID) -> str:
    """What somebody says, as one line of any surface: printable, and cut after ``most``."""
    shown = "".join(letter if letter.isprintable() else " " for letter in said)
    return shown if len(shown) <= most else f"{shown[:most]}…"
