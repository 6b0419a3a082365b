"""How a surface stands to its decoder: what it knows besides the snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
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
    """``url`` is the decoder's base URL; ``reason`` a stable code, where there is one."""

    state: State
    url: str
    reason: str = ""

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


def sentence(standing: Standing) -> tuple[str, Tone]:
    """What to say of a decoder that tells nothing itself, and how it looks."""
    words, tone = _SENTENCES[standing.state]
    return (f"{words} ({standing.reason})" if standing.reason else words), tone
