"""Log probabilities of the tokens that a client sees, in both of OpenAI's forms.

A token is reported when its text is known to be the answer's: tokens of markers, of
reasoning and of tool calls are not, nor is any token that holds a part of a stop string.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from mac_decoder.engine.events import Token
from mac_decoder.engine.text import TokenText


@dataclass(frozen=True, slots=True)
class Entry:
    """A reported token and the characters ``[start, end)`` of the text that it settled."""

    token: Token
    start: int
    end: int


class Ledger:
    """Holds tokens back until all of their characters are known to be the answer's, or not.

    A token with no characters of its own (one byte of several) shares the fate of the
    character that follows.
    """

    def __init__(self) -> None:
        self._waiting: deque[Entry] = deque()
        self._answer: deque[tuple[int, int]] = deque()

    def token(self, token: Token, start: int, end: int) -> None:
        """``token`` was read; its text is the characters ``[start, end)``."""
        self._waiting.append(Entry(token, start, end))

    def answer(self, start: int, end: int) -> None:
        """The characters ``[start, end)`` were given to the client. In order."""
        if self._answer and self._answer[-1][1] == start:
            start = self._answer.pop()[0]
        self._answer.append((start, end))

    def settled(self, position: int, *, last: bool = False) -> tuple[Entry, ...]:
        """The tokens to report now that all characters before ``position`` are decided.

        With ``last`` no more text comes.
        """
        released: list[Entry] = []
        while self._waiting:
            entry = self._waiting[0]
            if not last and max(entry.end, entry.start + 1) > position:
                break
            self._waiting.popleft()
            while self._answer and self._answer[0][1] <= entry.start and len(self._answer) > 1:
                self._answer.popleft()
            if self._answer and self._within(entry, position if last else None):
                released.append(entry)
        return tuple(released)

    def _within(self, entry: Entry, end_of_text: int | None) -> bool:
        start, end = self._answer[0]
        if entry.start == entry.end == end_of_text:
            return end == end_of_text
        return start <= entry.start and max(entry.end, entry.start + 1) <= end


def chat_entry(entry: Entry, texts: TokenText) -> dict[str, Any]:
    """An entry of ``choices[].logprobs.content``."""
    return {
        **_described(entry.token.id, entry.token.logprob, texts),
        "top_logprobs": [_described(token, value, texts) for token, value in entry.token.top],
    }


def text_logprobs(entries: tuple[Entry, ...], texts: TokenText, wanted: int) -> dict[str, Any]:
    """``choices[].logprobs`` of the older form; offsets count from the text's beginning.

    ``wanted`` is the request's figure; with 0 no other tokens are told.
    """
    tops: list[dict[str, float | None]] = []
    for entry in entries:
        top = {token_text(token, texts): _told(value) for token, value in entry.token.top}
        top.setdefault(token_text(entry.token.id, texts), _told(entry.token.logprob))
        tops.append(top)
    return {
        "tokens": [token_text(entry.token.id, texts) for entry in entries],
        "token_logprobs": [_told(entry.token.logprob) for entry in entries],
        "top_logprobs": tops if wanted else None,
        "text_offset": [entry.start for entry in entries],
    }


def token_text(token: int, texts: TokenText) -> str:
    """A token as text; where it is no whole characters, as ``bytes:\\xe2\\x82``."""
    data = texts.token_bytes(token)
    if data is None:
        return f"token:{token}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _told(logprob: float | None) -> float | None:
    """JSON has no infinity; OpenAI writes -9999 for a token that could not have come."""
    return None if logprob is None else max(logprob, -9999.0)


def _described(token: int, logprob: float | None, texts: TokenText) -> dict[str, Any]:
    data = texts.token_bytes(token)
    return {
        "token": token_text(token, texts),
        "logprob": _told(logprob),
        "bytes": None if data is None else list(data),
    }
