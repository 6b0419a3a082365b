"""The threads that turn text into tokens, and what a text may cost them.

Tokenising takes time in proportion to the text, and a request body holds far more text than
any context. So a long text is first measured in pieces, only until it is known not to fit; and
it is measured and tokenised beside the short ones, which never wait for it.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from mac_decoder.engine import template
from mac_decoder.engine.template import Rendered
from protocol.errors import Cancelled, RequestError

T = TypeVar("T")

LONG_CHARACTERS: Final = 1 << 16
"""From here on a text is tokenised in the thread for long ones."""

PIECE: Final = 1 << 14
"""Characters measured at once; a cut between two may cost a few tokens."""

_USUAL: Final = 4
"""Characters of a usual token: as many times the context are tokenised without measuring."""

_CUT: Final = 8
"""Tokens that a text may have more, for each cut, in pieces than as a whole."""

_ENVELOPE: Final = 64
"""Characters counted for a message, a tool or another object beside its texts."""


class Prompts:
    """Renders and encodes off the event loop, short texts and long ones apart.

    ``context`` is the model's in tokens. Tokenizers are not safe to share between threads:
    that of the long texts is a copy, made when it is first needed.
    """

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer = tokenizer
        self._context = context
        self._copy: Any = None
        self._short = ThreadPoolExecutor(1, thread_name_prefix="baton-text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="baton-long-text")

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        continue_final: bool = False,
    ) -> Rendered:
        """:func:`template.render`; ``RequestError`` (``context_length_exceeded``) too."""
        size = _characters(messages) + _characters(tools or ())

        def work(tokenizer: Any, gone: Callable[[], bool]) -> Rendered:
            asked = (tokenizer, messages, tools, options)
            if size > _USUAL * self._context:
                text = template.written(*asked, continue_final=continue_final)
                self._measure(tokenizer, text, "messages", gone)
            return template.render(*asked, continue_final=continue_final)

        return await self._run(size, work)

    async def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """:func:`template.encode`; ``RequestError`` (``context_length_exceeded``) too."""

        def work(tokenizer: Any, gone: Callable[[], bool]) -> tuple[int, ...]:
            self._measure(tokenizer, text, "prompt", gone)
            return template.encode(tokenizer, text, special=special)

        return await self._run(len(text), work)

    def close(self) -> None:
        """Drop what waits, and wait for what runs."""
        for threads in (self._short, self._long):
            threads.shutdown(cancel_futures=True)

    async def _run(self, size: int, work: Callable[[Any, Callable[[], bool]], T]) -> T:
        """``work`` in the thread for its size; a cancelled caller's is dropped or cut short."""
        gone = threading.Event()
        long = size > LONG_CHARACTERS

        def call() -> T:
            return work(self._copied() if long else self._tokenizer, gone.is_set)

        threads = self._long if long else self._short
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, call)
        finally:
            gone.set()

    def _copied(self) -> Any:
        if self._copy is None:
            self._copy = copy.deepcopy(self._tokenizer)
        return self._copy

    def _measure(self, tokenizer: Any, text: str, field: str, gone: Callable[[], bool]) -> None:
        """Raise ``RequestError`` for a text that is surely longer than the context.

        Its pieces have more tokens than the whole has, by a few for each cut: what is close
        is left to be tokenised, and is then no longer than about a context.
        """
        if len(text) <= _USUAL * self._context:
            return
        found, most = 0, self._context + self._context // 8
        for start in range(0, len(text), PIECE):
            if gone():
                raise Cancelled("the client left", reason="client_left")
            found += len(template.encode(tokenizer, text[start : start + PIECE], special=False))
            most += _CUT
            if found > most:
                raise RequestError(
                    f"this model's context is {self._context} tokens; the prompt has more",
                    reason="context_length_exceeded",
                    field=field,
                )


def _characters(value: Any) -> int:
    """About how much text ``value`` has, itself plain JSON."""
    total, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, Mapping):
            total += _ENVELOPE
            left += one.keys()
            left += one.values()
        elif isinstance(one, (list, tuple)):
            left += one
        else:
            total += 1
    return total
