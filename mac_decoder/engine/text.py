"""From token ids to text: characters, sections (answer, reasoning, tool call), stop strings.

mlx-lm's streaming detokenizer turns ids into characters, and its ``TextStateMachine`` cuts them
into sections. Two things are added: a stop string ends the text wherever token borders fall,
and no more text is held back than the longest beginning of a marker with which it ends.

Positions count the characters of the whole generated text, markers included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)

NORMAL, REASONING, TOOL = "normal", "reasoning", "tool"
"""Sections whose text a client sees; the text of any other section is dropped."""

_HELD_TOKENS = 32
"""Tokens without text after which held bytes are no character's beginning any more."""

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Piece:
    """``text`` of a section, the characters from ``start`` on. Empty where one merely began."""

    section: str
    text: str
    start: int

    @property
    def end(self) -> int:
        """The position after the last character."""
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class _Marks:
    """A tokenizer's markers, under the names that mlx-lm's state machine reads."""

    has_thinking: bool
    think_start: str | None
    think_end: str | None
    has_tool_calling: bool
    tool_call_start: str | None
    tool_call_end: str | None
    structural_markers: tuple[str, ...]
    response_transitions: Mapping[str, list[tuple[str, str | None]]]


class TokenText:
    """What the tokens of one tokenizer mean as text; made once per model, shared by requests."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._pieces: list[str | None] = tokenizer.convert_ids_to_tokens(
            list(range(len(tokenizer)))
        )
        self._added = {
            int(token): str(added.content)
            for token, added in tokenizer.added_tokens_decoder.items()
        }
        self._letter = int(tokenizer.encode("a", add_special_tokens=False)[-1])
        # The fast detokenizers index a table by id, and read every token's letters as bytes: no
        # use where ids have gaps, or added tokens have letters beyond ASCII that stand for bytes.
        self._gaps = max(tokenizer.get_vocab().values()) >= len(tokenizer)
        letters = {letter for content in self._added.values() for letter in content}
        misread = any(not letter.isascii() and letter in _BYTES for letter in letters)
        self._plain = self._gaps or misread
        self._machines = lru_cache(maxsize=32)(self._machine)

    def known(self, token: int) -> bool:
        """Whether ``token`` has a text; logits may be more than the tokenizer has tokens."""
        if token < len(self._pieces):
            return self._pieces[token] is not None
        return self._gaps and self._tokenizer.convert_ids_to_tokens(token) is not None

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that ``token`` stands for, which need not be whole characters.

        ``None`` where the tokenizer does not say.
        """
        if not self.known(token):
            return b""
        if token in self._added:
            return self._added[token].encode()
        model = self._tokenizer._detokenizer
        if isinstance(model, BPEStreamingDetokenizer) and token < len(self._pieces):
            characters = self._pieces[token] or ""
            return b"".join(_BYTES.get(char) or char.encode() for char in characters)
        if isinstance(model, SPMStreamingDetokenizer) and token < len(model.tokenmap):
            return model.tokenmap[token].replace("▁".encode(), b" ")
        text = self._tokenizer.decode([token])
        return None if _REPLACEMENT in text else text.encode()

    def detokenizer(self) -> Any:
        """A fresh streaming detokenizer."""
        if self._plain:
            return NaiveStreamingDetokenizer(self._tokenizer)
        return self._tokenizer.detokenizer

    def reader(
        self,
        *,
        section: str = NORMAL,
        stops: Iterable[str] = (),
        reasoning: bool = True,
        tools: bool = True,
        continued: bool = False,
    ) -> TextReader:
        """A reader for one generated text.

        ``section`` is the one in which the prompt ends. Without ``reasoning`` or ``tools``
        their markers are ordinary text. ``continued`` text goes on in the middle of a
        prompt's, so that its first space is part of it.
        """
        machine, depths = self._machines(tuple(stops), reasoning, tools)
        detokenizer = self.detokenizer()
        if continued:
            detokenizer.add_token(self._letter)
            _ = detokenizer.last_segment
        return TextReader(self, detokenizer, machine.make_state(section), depths)

    def _machine(
        self, stops: tuple[str, ...], reasoning: bool, tools: bool
    ) -> tuple[TextStateMachine, dict[int, int]]:
        """A state machine, and by the identity of each of its nodes the node's depth."""
        wrapper = self._tokenizer
        edges: dict[str, list[tuple[str, str | None]]] = {
            section: [edge for edge in found if tools or edge[1] != TOOL]
            for section, found in (wrapper.response_transitions if reasoning else {}).items()
        }
        for section in {NORMAL, REASONING, TOOL, *edges}:
            edges[section] = [*edges.get(section, []), *((stop, None) for stop in stops)]
        marks = _Marks(
            reasoning and wrapper.has_thinking,
            wrapper.think_start,
            wrapper.think_end,
            tools and wrapper.has_tool_calling,
            wrapper.tool_call_start,
            wrapper.tool_call_end,
            tuple(wrapper.structural_markers) if reasoning else (),
            edges,
        )
        machine = make_text_state_machine(marks)
        depths: dict[int, int] = {}
        for section in edges:
            state = machine.make_state(section)
            _measure(state[1], 0, depths)
        return machine, depths


class TextReader:
    """Reads one generated text, token by token. Not shared; not thread-safe."""

    def __init__(
        self, source: TokenText, detokenizer: Any, state: Any, depths: Mapping[int, int]
    ) -> None:
        self._source = source
        self._detokenizer = detokenizer
        self._state = state
        self._depths = depths
        self._silent = 0
        self.section: str = state[0]
        """The section in which the text stands, or stood when a stop string came."""
        self.read = 0
        """Characters read so far, those held back included."""
        self.stopped = False
        """Whether a stop string has come; the text ends before it."""

    @property
    def settled(self) -> int:
        """The position up to which it is decided what each character is."""
        return self.read - len(self._state[3])

    def add(self, token: int) -> list[Piece]:
        """The text that ``token`` settles. Bytes of a character wait for its last one."""
        if self.stopped or not self._source.known(token):
            return []
        self._detokenizer.add_token(token)
        text = self._detokenizer.last_segment
        if text:
            self._silent = 0
            return self._split(text)
        self._silent += 1
        if self._silent < _HELD_TOKENS:
            return []
        self._silent = 0
        self._detokenizer.finalize()
        return self._split(self._detokenizer.last_segment)

    def finish(self) -> list[Piece]:
        """The text still held back. The beginning of a character that never ended is none."""
        if self.stopped:
            return []
        self._detokenizer.finalize()
        pieces = self._split(self._detokenizer.last_segment.rstrip(_REPLACEMENT))
        if self.stopped:
            return pieces
        start = self.settled
        self._state, rest, _ = TextStateMachine.flush(self._state)
        if rest:
            pieces.append(Piece(self.section, rest, start))
        return pieces

    def _split(self, text: str) -> list[Piece]:
        before, start = self._state, self.settled
        after, segments = TextStateMachine.split(before, text)
        if len(segments) == 1:
            self._state = after
            self.read += len(text)
            section, settled = segments[0]
            settled += self._release()
            return [Piece(section, settled, start)] if settled else []
        # A marker or a stop string ended in this text: where it lies is found by going through
        # it again, one character at a time, since the machine does not tell.
        pieces: list[Piece] = []
        for character in text:
            start = self.settled
            self._state, segments = TextStateMachine.split(self._state, character)
            self.read += 1
            if len(segments) == 1:
                _append(pieces, Piece(segments[0][0], segments[0][1] + self._release(), start))
                continue
            _append(pieces, Piece(segments[0][0], segments[0][1], start))
            if self._state[0] is None:
                self.stopped = True
                break
            self.section = self._state[0]
            pieces.append(Piece(self.section, "", self.read))
        return pieces

    def _release(self) -> str:
        """Take from the held text what no marker can begin with any more."""
        section, node, states, held = self._state
        excess = len(held) - self._depths[id(node)]
        if excess <= 0:
            return ""
        self._state = (section, node, states, held[excess:])
        return held[:excess]


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Join ``piece`` to the last one where it goes on in the same section."""
    if not piece.text:
        return
    last = pieces[-1] if pieces else None
    if last is not None and last.section == piece.section and last.end == piece.start:
        pieces[-1] = Piece(last.section, last.text + piece.text, last.start)
    else:
        pieces.append(piece)


def _measure(node: Mapping[str, Any], depth: int, depths: dict[int, int]) -> None:
    """Note the depth of a trie's node and of all below it."""
    waiting = [(node, depth)]
    while waiting:
        node, depth = waiting.pop()
        depths[id(node)] = depth
        below = (child for key, child in node.items() if len(key) == 1)
        waiting.extend((child, depth + 1) for child in below)


def _byte_alphabet() -> dict[str, bytes]:
    """Character to byte in byte-level BPE: printable Latin-1 is itself, the rest is moved up.

    Source: the byte-to-unicode table of OpenAI's GPT-2 encoder.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    moved = {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}
    return {chr(byte): bytes([byte]) for byte in printable} | moved


_BYTES = _byte_alphabet()
