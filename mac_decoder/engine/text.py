"""From token ids to text: characters, sections (answer, reasoning, tool call), stop strings.

mlx-lm's ``TextStateMachine`` cuts the text into sections. Two things are added to it: a stop
string ends the text wherever token borders fall, and no more text is held back than the longest
beginning of a marker with which it ends.

Positions count the characters of the whole generated text, markers included.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)

NORMAL, REASONING, TOOL = "normal", "reasoning", "tool"
"""Sections whose text a client sees; the text of any other section is dropped."""

_NUMBERED = re.compile("<0x([0-9A-Fa-f]{2})>")
"""A token of the SentencePiece kind that is one byte."""

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
        self._letters = {int(token): text for text, token in tokenizer.get_vocab().items()}
        self._added = {
            int(token): str(added.content)
            for token, added in tokenizer.added_tokens_decoder.items()
        }
        # mlx-lm has looked at the tokenizer's decoder; its choice says what tokens are made of.
        self._kind = tokenizer.detokenizer
        self._machines = lru_cache(maxsize=32)(self._machine)
        self._bytes: dict[int, bytes | None] = {}

    def known(self, token: int) -> bool:
        """Whether ``token`` has a text; logits may be more than the tokenizer has tokens."""
        return token in self._letters

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that ``token`` stands for, which need not be whole characters.

        ``None`` where the tokenizer does not say.
        """
        if token not in self._bytes:
            self._bytes[token] = self._read_bytes(token) if self.known(token) else b""
        return self._bytes[token]

    def _read_bytes(self, token: int) -> bytes | None:
        letters = self._letters[token]
        if isinstance(self._kind, SPMStreamingDetokenizer):
            number = _NUMBERED.fullmatch(letters)
            if number is not None:
                return bytes([int(number[1], 16)])
            return letters.replace("▁", " ").encode()
        if token in self._added:
            return self._added[token].encode()
        if isinstance(self._kind, BPEStreamingDetokenizer):
            return b"".join(_BYTES.get(letter) or letter.encode() for letter in letters)
        text = self._tokenizer.decode([token])
        return None if _REPLACEMENT in text else text.encode()

    def _characters(self, continued: bool) -> _Characters:
        if isinstance(self._kind, SPMStreamingDetokenizer):
            return _BytesDecoder(self, trim=self._kind.trim_space and not continued)
        if isinstance(self._kind, BPEStreamingDetokenizer):
            return _BytesDecoder(self, trim=False)
        return _PlainDecoder(self._tokenizer)

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
        characters = self._characters(continued)
        return TextReader(self, characters, machine.make_state(section), depths)

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
        self, source: TokenText, characters: _Characters, state: Any, depths: Mapping[int, int]
    ) -> None:
        self._source = source
        self._characters = characters
        self._state = state
        self._depths = depths
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
        return self._split(self._characters.add(token))

    def finish(self) -> list[Piece]:
        """The text still held back. The beginning of a character that never ended is none."""
        if self.stopped:
            return []
        pieces = self._split(self._characters.finish())
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


class _Characters(Protocol):
    """Characters from tokens; those of one token may come with a later one."""

    def add(self, token: int) -> str: ...

    def finish(self) -> str: ...


class _BytesDecoder:
    """Decodes tokens that are bytes. With ``trim`` a text's first space is not part of it.

    Not mlx-lm's fast detokenizers: those hold a lone space back until the next token, take the
    first space from a completion, read a zero byte as ``Ā``, and the letters of added tokens
    as bytes. Here only the beginning of a character waits.
    """

    def __init__(self, source: TokenText, *, trim: bool) -> None:
        self._source = source
        self._trim = trim
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, token: int) -> str:
        text = self._decode(self._source.token_bytes(token) or b"")
        if self._trim and text:
            self._trim = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        return ""


class _PlainDecoder:
    """mlx-lm's detokenizer for tokenizers whose tokens only have a text together."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._detokenizer = tokenizer.detokenizer

    def add(self, token: int) -> str:
        self._detokenizer.add_token(token)
        return self._detokenizer.last_segment

    def finish(self) -> str:
        self._detokenizer.finalize()
        return self._detokenizer.last_segment.rstrip(_REPLACEMENT)


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
