"""One choice of an answer: from the engine's tokens to what a client is told, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mac_decoder.api.logprobs import Entry, Ledger
from mac_decoder.api.tools import Parser, ToolCall, ToolPlan, read_calls
from mac_decoder.engine.events import FinishReason, Token
from mac_decoder.engine.text import NORMAL, REASONING, TOOL, Piece, TextReader
from protocol.errors import BatonError


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in an answer. ``entries`` are the log probabilities that go with it."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class CallMarks:
    """How a model marks its calls, how they are read, and the beginning that was given to it.

    ``given`` is the text of a call's beginning after ``start``, part of the prompt.
    """

    parser: Parser
    start: str
    end: str
    plan: ToolPlan
    given: str = ""


class Choice:
    """Reads one generated text. ``finish_reason`` is set once it has ended, for OpenAI.

    ``content``, ``reasoning`` and ``calls`` are filled by the deltas that were returned;
    ``notes`` are stable codes of what went differently than the client may think.
    """

    def __init__(
        self, index: int, reader: TextReader, marks: CallMarks | None, *, logprobs: bool
    ) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.calls: list[ToolCall] = []
        self.notes: list[str] = []
        self._reader = reader
        self._marks = marks
        self._section = reader.section
        self._call_text: list[str] = [marks.given] if marks else []
        self._ledger = Ledger() if logprobs else None

    def token(self, token: Token) -> list[Delta]:
        """What ``token`` adds. After a stop string, or the only call, the choice is ended."""
        reader = self._reader
        start, section = reader.read, reader.section
        pieces = reader.add(token.id)
        self.completion_tokens += 1
        self.reasoning_tokens += section == REASONING
        if self._ledger is not None:
            self._ledger.token(token, start, reader.read)
        deltas = [delta for piece in pieces for delta in self._piece(piece)]
        single = self._marks is not None and self._marks.plan.single and self.calls
        if reader.stopped or single:
            deltas += self._end("stop", whole=not reader.stopped)
        return self._with_entries(deltas)

    def ended(self, reason: FinishReason) -> list[Delta]:
        """What was held back, now that the model has ended.

        Raises ``BatonError`` (``tool_call_missing``) where a call was required and none came.
        """
        deltas = [delta for piece in self._reader.finish() for delta in self._piece(piece)]
        stopped = self._reader.stopped
        deltas += self._end("stop" if stopped else reason, whole=reason == "stop" and not stopped)
        if self._marks and self._marks.plan.required and reason == "stop" and not self.calls:
            raise BatonError(
                "the model made no call that can be read",
                reason="tool_call_missing",
                field="tool_choice",
            )
        return self._with_entries(deltas)

    def _piece(self, piece: Piece) -> Iterator[Delta]:
        if self._section == TOOL and piece.section != TOOL:
            yield from self._close_call(closed=True)
        self._section = piece.section
        if not piece.text:
            return
        if piece.section == TOOL:
            self._call_text.append(piece.text)
        elif piece.section == REASONING:
            yield Delta(reasoning=piece.text)
        elif piece.section == NORMAL:
            if self._ledger is not None:
                self._ledger.answer(piece.start, piece.end)
            yield Delta(content=piece.text)

    def _close_call(self, *, closed: bool) -> Iterator[Delta]:
        """The calls of a tool section that ended; as text where they cannot be read."""
        marks = self._marks
        if marks is None:
            return
        text = "".join(self._call_text)
        self._call_text = []
        calls = read_calls(marks.parser, text, marks.plan)
        if calls:
            self.calls += calls
            yield Delta(calls=tuple(calls))
        else:
            yield self._raw(text, "tool_call_unreadable", closed=closed)

    def _raw(self, text: str, note: str, *, closed: bool) -> Delta:
        marks = self._marks
        self.notes.append(note)
        start, end = (marks.start, marks.end if closed else "") if marks else ("", "")
        return Delta(content=f"{start}{text}{end}")

    def _end(self, reason: FinishReason, *, whole: bool) -> list[Delta]:
        """Close an open call; one that was cut short is never run, so it is only text."""
        deltas: list[Delta] = []
        if self._section == TOOL and self._marks is not None:
            self._section = NORMAL
            if whole:
                deltas = list(self._close_call(closed=False))
            else:
                deltas = [self._raw("".join(self._call_text), "tool_call_cut", closed=False)]
        self.finish_reason = "tool_calls" if self.calls and reason == "stop" else reason
        return deltas

    def _with_entries(self, deltas: list[Delta]) -> list[Delta]:
        """Attach the log probabilities that are settled by now to the last of ``deltas``."""
        if self._ledger is None:
            return deltas
        reader = self._reader
        if reader.stopped:
            entries = self._ledger.settled(reader.read + 1)
        else:
            entries = self._ledger.settled(reader.settled, last=self.finish_reason is not None)
        if not entries:
            return deltas
        if not deltas:
            return [Delta(entries=entries)]
        return [*deltas[:-1], replace(deltas[-1], entries=entries)]
