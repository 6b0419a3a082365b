"""Text from tokens: characters over token borders, sections, stop strings, what is held back."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
)
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mac_decoder.engine.text import NORMAL, REASONING, TOOL, Piece, TextReader, TokenText
from tests.tiny_tokenizer import save_tokenizer

WRITING = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)

# -- readers over pieces of text that a test chooses


class Pieces:
    """A tokenizer whose token ``n`` is ``pieces[n]``, with marks for thoughts and calls."""

    has_thinking, think_start, think_end = True, "<t>", "</t>"
    has_tool_calling, tool_call_start, tool_call_end = True, "<c>", "</c>"
    structural_markers: tuple[str, ...] = ()
    response_transitions: dict[str, Any] = {}  # noqa: RUF012 - read only
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012 - read only

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces
        self.text = ""
        self._told = 0

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(len(self.pieces))}

    @property
    def detokenizer(self) -> Pieces:
        return self

    def add_token(self, token: int) -> None:
        self.text += self.pieces[token]

    @property
    def last_segment(self) -> str:
        segment, self._told = self.text[self._told :], len(self.text)
        return segment

    def finalize(self) -> None: ...


def read(pieces: list[str], **options: Any) -> tuple[list[Piece], TextReader]:
    """All pieces of a text that comes in ``pieces``, and the reader at its end."""
    reader = TokenText(Pieces(pieces)).reader(**options)  # type: ignore[arg-type]
    found = [piece for token in range(len(pieces)) for piece in reader.add(token)]
    return found + reader.finish(), reader


def sections(pieces: list[Piece]) -> dict[str, str]:
    joined: dict[str, str] = {}
    for piece in pieces:
        joined[piece.section] = joined.get(piece.section, "") + piece.text
    return {section: text for section, text in joined.items() if text}


SNIPPETS = st.lists(
    st.sampled_from(["<t>", "</t>", "<c>", "</c>", "<", "a", "ab", "aab", "b", "<t", ">", "STOP"]),
    max_size=12,
).map("".join)
STOPS = st.lists(st.sampled_from(["STOP", "aab", "ab", "OPa", "b<", "TO"]), max_size=3)


@st.composite
def chopped(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text, and the same text in pieces."""
    text = draw(SNIPPETS)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=len(text))))
    borders = [0, *cuts, len(text)]
    return text, [text[a:b] for a, b in pairwise(borders)]


@given(chopped(), STOPS)
def test_token_borders_make_no_difference(chop: tuple[str, list[str]], stops: list[str]) -> None:
    text, pieces = chop
    whole, reader = read([text], stops=stops)
    parts, other = read(pieces, stops=stops)
    assert sections(whole) == sections(parts)
    assert (reader.stopped, reader.section) == (other.stopped, other.section)
    for piece in parts:
        assert text[piece.start : piece.end] == piece.text


@given(chopped(), STOPS)
def test_a_text_without_sections_ends_before_the_first_stop_string_to_be_whole(
    chop: tuple[str, list[str]], stops: list[str]
) -> None:
    text, pieces = chop
    found, reader = read(pieces, stops=stops, reasoning=False, tools=False)
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    expected = text
    if ends:
        end, length = min(ends)
        expected = text[: end + length]
    assert "".join(piece.text for piece in found) == expected
    assert reader.stopped == bool(ends)


@given(chopped(), STOPS)
def test_only_the_beginning_of_a_marker_is_held_back(
    chop: tuple[str, list[str]], stops: list[str]
) -> None:
    _, pieces = chop
    markers = ["<t>", "</t>", "<c>", "</c>", *stops]
    reader = TokenText(Pieces(pieces)).reader(stops=stops)  # type: ignore[arg-type]
    text = ""
    for number, piece in enumerate(pieces):
        reader.add(number)
        if reader.stopped:
            break
        text += piece
        held = text[reader.settled :]
        assert not held or any(marker.startswith(held) for marker in markers)


def test_a_long_run_of_a_stop_string_s_beginning_is_told_as_it_comes() -> None:
    reader = TokenText(Pieces(["a"] * 50)).reader(stops=["ab"])  # type: ignore[arg-type]
    told = ["".join(piece.text for piece in reader.add(number)) for number in range(50)]
    assert told == ["", *["a"] * 49]


def test_sections_follow_their_marks() -> None:
    found, reader = read(["x<t", ">y</t>z<c", ">w</", "c>", "<c>v"])
    assert sections(found) == {NORMAL: "xz", REASONING: "y", TOOL: "wv"}
    assert reader.section == TOOL
    assert [piece.section for piece in found] == [NORMAL, REASONING, NORMAL, TOOL, NORMAL, TOOL]


def test_a_prompt_may_end_in_thoughts() -> None:
    assert sections(read(["y</t>z"], section=REASONING)[0]) == {REASONING: "y", NORMAL: "z"}


def test_without_tools_their_marks_are_text() -> None:
    found, _ = read(["<c>w</c><t>y</t>"], tools=False)
    assert sections(found) == {NORMAL: "<c>w</c>", REASONING: "y"}
    found, _ = read(["<c>w</c><t>y</t>"], tools=False, reasoning=False)
    assert sections(found) == {NORMAL: "<c>w</c><t>y</t>"}


def test_a_header_s_text_is_not_the_answer_s() -> None:
    source = Pieces(["to=self|y|to=user|z"])
    source.response_transitions = {
        "header": [("to=self|", REASONING), ("to=user|", NORMAL), ("<c>", TOOL)],
        REASONING: [("|", "header")],
    }
    for tools in (True, False):
        reader = TokenText(source).reader(section="header", tools=tools)  # type: ignore[arg-type]
        source.text, source._told = "", 0
        found = reader.add(0) + reader.finish()
        assert sections(found) == {REASONING: "y", NORMAL: "z"}


# -- real tokenizers


def _sentencepiece(path: Path) -> None:
    """A tokenizer of the SentencePiece kind: spaces as ``▁``, other bytes by their number."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    numbers = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "</s>", *numbers])
    tokenizer.train_from_iterator(["the runner carries the baton to the line"], trainer)
    _save(tokenizer, path, eos="</s>")


def _wordpiece(path: Path) -> None:
    """A tokenizer with a decoder that mlx-lm has no fast detokenizer for."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"])
    tokenizer.train_from_iterator(["the runner carries the baton to the line"], trainer)
    _save(tokenizer, path, eos="[SEP]")


def _save(tokenizer: Tokenizer, path: Path, eos: str) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, clean_up_tokenization_spaces=False
    ).save_pretrained(path)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenText]:
    found: dict[str, TokenText] = {}
    for name, save in (
        ("bpe", save_tokenizer),
        ("spm", _sentencepiece),
        ("naive", _wordpiece),
    ):
        path = tmp_path_factory.mktemp(name)
        save(path)
        found[name] = TokenText(load_tokenizer(path))
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bpe", BPEStreamingDetokenizer),
        ("spm", SPMStreamingDetokenizer),
        ("naive", NaiveStreamingDetokenizer),
    ],
)
def test_each_kind_is_the_one_it_should_be(
    kinds: dict[str, TokenText], name: str, kind: type
) -> None:
    assert isinstance(kinds[name]._kind, kind)


def read_back(source: TokenText, tokens: list[int], **options: Any) -> list[str]:
    """What each token tells, and at the end what was held back."""
    reader = source.reader(**options)
    told = ["".join(piece.text for piece in reader.add(token)) for token in tokens]
    return [*told, "".join(piece.text for piece in reader.finish())]


@pytest.mark.parametrize("name", ["bpe", "spm"])
@given(text=WRITING)
def test_what_was_encoded_is_read_back(name: str, text: str, kinds: dict[str, TokenText]) -> None:
    source = kinds[name]
    tokens = source._tokenizer.encode(text, add_special_tokens=False)
    expected = text if name == "bpe" else text.replace("▁", " ")
    told = read_back(source, tokens, stops=["no such thing"])
    assert "".join(told) == expected
    if "\ufffd" not in text:
        assert not any("\ufffd" in one for one in told)
    # Every token tells its own whole characters at once.
    data = b""
    told = read_back(source, tokens, continued=True, reasoning=False, tools=False)
    for token, one in zip(tokens, told, strict=False):
        data = (data + (source.token_bytes(token) or b"")).removeprefix(one.encode())
        assert len(data) < 4


@given(words=st.lists(st.sampled_from(["the", "runner", "carries", "line"]), max_size=6))
def test_the_plain_kind_reads_what_the_tokenizer_reads(
    words: list[str], kinds: dict[str, TokenText]
) -> None:
    source = kinds["naive"]
    tokens = source._tokenizer.encode(" ".join(words), add_special_tokens=False)
    assert "".join(read_back(source, tokens)) == source._tokenizer.decode(tokens)


@pytest.mark.parametrize("name", ["bpe", "spm"])
def test_a_continued_text_keeps_its_first_space(name: str, kinds: dict[str, TokenText]) -> None:
    source = kinds[name]
    tokens = source._tokenizer.encode("zz zz", add_special_tokens=False)
    texts = [source.token_bytes(token) or b"" for token in tokens]
    after = next(n for n, data in enumerate(texts) if n and data.startswith(b" "))
    assert "".join(read_back(source, tokens[after:], continued=True)) == " zz"
    trimmed = "zz" if name == "spm" else " zz"
    assert "".join(read_back(source, tokens[after:])) == trimmed


def test_a_token_without_a_text_is_silent(kinds: dict[str, TokenText]) -> None:
    for source in kinds.values():
        reader = source.reader()
        assert reader.add(1 << 20) == []
        assert not source.known(1 << 20)
        assert source.token_bytes(1 << 20) == b""


def test_bytes_that_never_become_a_character_do_not_pile_up(kinds: dict[str, TokenText]) -> None:
    source = kinds["bpe"]
    token = next(n for n in range(512) if source.token_bytes(n) == b"\xf0")
    assert read_back(source, [token] * 4) == ["", "\ufffd", "\ufffd", "\ufffd", ""]


def test_added_tokens_with_letters_of_the_byte_alphabet_are_read_right(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.add_tokens(["«né»"])
    tokenizer.save_pretrained(tmp_path)
    source = TokenText(load_tokenizer(tmp_path))
    token = source._tokenizer.convert_tokens_to_ids("«né»")
    assert "".join(read_back(source, [token])) == "«né»"


def test_tokens_beyond_a_gap_in_the_ids_are_read_right(kinds: dict[str, TokenText]) -> None:
    source = kinds["bpe"]
    source._letters[4000] = "Ġfar"
    assert "".join(read_back(source, [4000, 3999, 4000])) == " far far"
    del source._letters[4000]
