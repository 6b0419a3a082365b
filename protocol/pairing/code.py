"""Codes that are spoken from one machine to the other, and how long one may be tried.

A code is six words of :mod:`protocol.pairing.words`, 48 random bits. That is enough because a
code is never tried twice: a guess costs a connection to the producer, and the first one that
fails voids the code (:class:`Codes`).
"""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from protocol.errors import BatonError, CapacityError
from protocol.pairing.words import PLACES, WORDS
from protocol.reasons import refusal

CODE_WORDS: Final = 6
CODE_LIFE_S: Final = 600.0
"""How long a code may be tried, in seconds."""
CODES_PER_LIFE: Final = 3
"""How many codes may be opened within :data:`CODE_LIFE_S`."""
MAX_TYPED: Final = 256
"""Longest text that is read as a code, in characters."""

Entropy = Callable[[int], bytes]
"""Gives so many random bytes; ``secrets.token_bytes`` outside of tests."""

_NO_LETTER: Final = re.compile(r"[^a-z]+")


@dataclass(frozen=True, eq=False)
class Code:
    """Six words. Its ``repr`` shows none of them, and there is no comparing two."""

    words: tuple[str, ...] = field(repr=False)

    @property
    def text(self) -> str:
        """The code for people and for SPAKE2: lower case, joined by hyphens."""
        return "-".join(self.words)

    @property
    def secret(self) -> bytes:
        """The text as SPAKE2's password."""
        return self.text.encode("ascii")


def new_code(entropy: Entropy = secrets.token_bytes) -> Code:
    """A code of :data:`CODE_WORDS` random bytes, a word for each."""
    return Code(tuple(WORDS[byte] for byte in entropy(CODE_WORDS)))


def read_code(typed: str) -> Code:
    """The code that somebody typed, in any case, with anything but letters between words.

    Nothing was tried yet, so that a slip costs nothing. Raises RequestError
    ``code_malformed``, which says which word is not in the list and never what was typed.
    """
    if len(typed) > MAX_TYPED:
        raise _malformed("length", f"more than {MAX_TYPED} characters", f"{CODE_WORDS} words")
    words = tuple(word for word in _NO_LETTER.split(typed.lower()) if word)
    for number, word in enumerate(words, 1):
        if word not in PLACES:
            raise _malformed("words", f"word {number} is not in the list", "words of the list")
    if len(words) != CODE_WORDS:
        raise _malformed("words", f"{len(words)} words", f"{CODE_WORDS} words")
    return Code(words)


def _malformed(field: str, found: str, expected: str) -> BatonError:
    return refusal(
        "code_malformed",
        f"this cannot be a pairing code: {found}",
        field=field,
        found=found,
        expected=expected,
        hint="type the six words as the producer shows them; nothing was tried yet",
    )


class Codes:
    """A producer's codes: one open at a time, ten minutes long, three of them in ten minutes.

    ``now`` is in monotonic seconds. A code is spent when an exchange begins to try it, so that
    whatever becomes of that exchange, nobody can try again.
    """

    def __init__(self) -> None:
        self._opened: deque[float] = deque(maxlen=CODES_PER_LIFE)
        self._code: Code | None = None
        self._spent: Code | None = None
        self._closed_by = "pairing_closed"

    def __repr__(self) -> str:
        return f"Codes(open={self._code is not None})"

    def open(self, now: float, entropy: Entropy = secrets.token_bytes) -> Code:
        """A new code, which takes the place of one that is still open.

        Raises CapacityError ``pairing_paused`` if it would be one too many.
        """
        if (wait := self.pause_s(now)) > 0:
            raise _paused(wait)
        self._opened.append(now)
        self._code = new_code(entropy)
        return self._code

    def spend(self, now: float) -> Code:
        """The open code, for the one exchange that may try it; nobody gets it again.

        Raises ConfigError ``code_burned``, ``code_expired`` or ``pairing_closed``; in the place
        of the first two CapacityError ``pairing_paused`` while no new code can be had either.
        """
        if self.left_s(now) > 0 and (code := self._code) is not None:
            self._code, self._spent, self._closed_by = None, code, "code_burned"
            return code
        if self._code is not None:
            self._code, self._closed_by = None, "code_expired"
        wait = self.pause_s(now)
        if wait > 0 and self._closed_by != "pairing_closed":
            raise _paused(wait)
        raise _closed(self._closed_by)

    def succeed(self, code: Code) -> None:
        """The exchange that spent ``code`` has paired: it was used up, not burned."""
        if code is self._spent:
            self._spent, self._closed_by = None, "pairing_closed"

    def close(self) -> None:
        """Withdraw the open code, if there is one."""
        if self._code is not None:
            self._code, self._closed_by = None, "pairing_closed"

    def left_s(self, now: float) -> float:
        """How long the open code may still be tried, in seconds; 0 if none is open."""
        if self._code is None:
            return 0.0
        return max(0.0, self._opened[-1] + CODE_LIFE_S - now)

    def pause_s(self, now: float) -> float:
        """How long no new code can be opened, in seconds; 0 if one can be now."""
        if len(self._opened) < CODES_PER_LIFE:
            return 0.0
        return max(0.0, self._opened[0] + CODE_LIFE_S - now)


def _paused(wait: float) -> CapacityError:
    error = refusal(
        "pairing_paused",
        f"{CODES_PER_LIFE} codes were opened within {CODE_LIFE_S / 60:.0f} minutes",
        field="codes",
        found=CODES_PER_LIFE,
        hint=f"wait {wait:.0f} seconds, then open a new code; if nobody of yours tried the "
        "others, look for who did",
    )
    assert isinstance(error, CapacityError)
    error.retry_after_s = wait
    return error


_CLOSED: Final = {
    "code_burned": (
        "the producer's last code was tried once and is void",
        "open a new code on the producer; if nobody of yours tried the last one, look for who did",
    ),
    "code_expired": (
        f"the producer's last code is older than {CODE_LIFE_S / 60:.0f} minutes",
        "open a new code on the producer",
    ),
    "pairing_closed": (
        "the producer has no code open",
        "open a code on the producer: baton produce --pair",
    ),
}
"""What is said of a code that cannot be tried any more, and what helps."""


def _closed(reason: str) -> BatonError:
    said, hint = _CLOSED[reason]
    return refusal(reason, said, field="code", hint=hint)
