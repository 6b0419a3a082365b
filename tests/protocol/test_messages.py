"""Control messages: one encoding each, bounds in every field, nothing else accepted."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import protocol
from protocol.errors import PeerProtocolError
from protocol.messages import (
    CONTROL_BYTES,
    MESSAGES,
    NO_SPACE,
    Credit,
    Message,
    Prefill,
    Progress,
    Recipe,
    decode,
    decode_tokens,
    encode,
    encode_tokens,
    prefill_limit,
    space_of,
    token_digest,
)
from tests import strategies
from tests.ordinary import examples


@given(strategies.messages)
def test_what_is_encoded_decodes_to_the_same(message: Message) -> None:
    raw = encode(message)
    assert decode(raw) == message
    assert len(raw) <= CONTROL_BYTES


@given(strategies.messages)
def test_the_encoding_is_what_the_readme_says(message: Message) -> None:
    raw = encode(message)
    fields = json.loads(raw)
    assert list(fields) == ["type", *message.__struct_fields__]
    assert json.dumps(fields, separators=(",", ":"), ensure_ascii=True).encode() == raw


@given(strategies.messages, st.data())
def test_no_other_spelling_is_accepted(message: Message, data: st.DataObject) -> None:
    raw = encode(message)
    spelled = data.draw(
        st.sampled_from(
            (
                raw + b"\n",
                b" " + raw,
                raw.replace(b",", b", ", 1),
                raw.replace(b'"type"', b'"\\u0074ype"'),
                json.dumps(json.loads(raw), sort_keys=True, separators=(",", ":")).encode(),
                raw[:-1] + b',"type":"x"}',
            )
        )
    )
    if spelled != raw:
        with pytest.raises(PeerProtocolError):
            decode(spelled)


@examples(300)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(PeerProtocolError):
        decode(raw)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(("type", "version", "x")), inner, max_size=3)
        ),
    )
)
def test_arbitrary_json_is_refused(value: object) -> None:
    with pytest.raises(PeerProtocolError):
        decode(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "message_malformed"),
        (b"null", "message_malformed"),
        (b'{"type":1}', "message_malformed"),
        (b'{"kind":"hello"}', "message_malformed"),
        (b'{"type":"\xff"}', "message_malformed"),
        (b"[" * 10_000, "message_malformed"),
        (b'{"type":"hello","x":' + b"[" * 10_000, "message_malformed"),
        (b'{"type":"rewind"}', "message_unknown"),
        (b'{"type":"Hello"}', "message_unknown"),
        (b'{"type":"hello","version":2,"new":[]}', "version_unsupported"),
        (b'{"type":"hello","version":0}', "version_unsupported"),
        (b'{"type":"hello","version":true}', "message_malformed"),
        (b'{"type":"progress","generation":0,"done":0}', "message_malformed"),
        (b'{"type":"progress","generation":1,"done":-1}', "message_malformed"),
        (b'{"type":"progress","generation":1,"done":1.0}', "message_malformed"),
        (b'{"type":"progress","generation":1,"done":9223372036854775808}', "message_malformed"),
        (b'{"type":"progress","generation":1,"done":1e3}', "message_malformed"),
        (b'{"type":"progress","generation":1}', "message_malformed"),
        (b'{"type":"progress","generation":1,"done":1,"x":1}', "message_malformed"),
        (b'{"type":"progress","done":1,"generation":1}', "message_not_canonical"),
        (b'{"type":"progress","generation":1,"done":01}', "message_malformed"),
        (b'{"type":"credit","generation":1,"frames":1025}', "message_malformed"),
        (b'{"type":"proof","mac":"AAAA"}', "message_malformed"),
        (b'{"type":"proof","mac":"' + b"A" * 42 + b'B="}', "message_not_canonical"),
        (b'{"type":"credit","generation":1,"frames":1}{}', "message_malformed"),
        (b" " * (CONTROL_BYTES + 1), "message_too_long"),
    ],
)
def test_each_fault_has_its_reason(raw: bytes, reason: str) -> None:
    with pytest.raises(PeerProtocolError) as caught:
        decode(raw)
    assert caught.value.reason == reason


def test_refusals_repeat_nothing_that_was_sent() -> None:
    for raw in (
        b'{"type":"secret-prompt-text"}',
        b'{"type":"progress","generation":"secret-prompt-text"}',
        b'{"type":"prefill","tokens":"secret-prompt-text"}',
    ):
        with pytest.raises(PeerProtocolError) as caught:
            decode(raw)
        assert "secret" not in f"{caught.value} {caught.value.details()}"


def test_our_own_messages_are_held_to_the_same_bounds() -> None:
    for message in (
        Progress(generation=0, done=0),
        Credit(generation=1, frames=0),
        Progress(generation=1, done=-1),
    ):
        with pytest.raises(msgspec.ValidationError):
            encode(message)


def test_every_message_has_its_tag() -> None:
    assert list(MESSAGES) == [
        "hello",
        "hello_ack",
        "proof",
        "prefill",
        "begin",
        "progress",
        "credit",
        "seal",
        "committed",
        "resume",
        "resumed",
        "abort",
        "aborted",
    ]


@given(strategies.tokens)
def test_tokens_are_32_bits_little_endian(tokens: list[int]) -> None:
    raw = encode_tokens(tokens)
    assert raw == b"".join(token.to_bytes(4, "little") for token in tokens)
    assert decode_tokens(raw).tolist() == tokens
    assert encode_tokens(np.array(tokens, dtype=np.uint32)) == raw
    assert token_digest(raw) == hashlib.sha256(raw).digest()
    assert not decode_tokens(raw).flags.writeable


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], [1 << 40]])
def test_tokens_are_never_cut_to_fit(tokens: list[int]) -> None:
    with pytest.raises(ValueError):
        encode_tokens(tokens)


def test_tokens_come_in_fours() -> None:
    with pytest.raises(PeerProtocolError):
        decode_tokens(b"\0" * 5)


@pytest.mark.parametrize("count", [1, 2, 3, 1000])
def test_the_limit_of_prefill_holds_its_tokens(count: int) -> None:
    message = Prefill(
        request="r" * 64,
        generation=(1 << 53) - 1,
        nonce=bytes(32),
        identity=bytes(32),
        space=bytes(32),
        cut=0,
        extra_cuts=tuple(range(1 << 19, (1 << 19) + 64)),
        deadline_ms=864_000_000,
        credit=1024,
        tokens=b"\xff" * (4 * count),
    )
    assert len(encode(message)) <= prefill_limit(count)
    with pytest.raises(PeerProtocolError):
        decode(encode(message), 100)


def test_prefill_shows_no_tokens() -> None:
    message = Prefill("r", 1, bytes(32), bytes(32), bytes(32), 0, (), 1, 1, b"SECRET!!")
    assert "SECRET" not in repr(message)


def test_a_recipe_is_bounded() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"who": "producer", "device": "cpu", "dtype": "float32", "tile": 0}, Recipe)


@pytest.mark.parametrize("tag", MESSAGES)
def test_the_readme_lists_the_fields_in_order(tag: str) -> None:
    readme = (Path(protocol.__file__).parent / "README.md").read_text()
    line = next(line for line in readme.splitlines() if line.startswith(f"| `{tag}` | "))
    assert re.findall(r"`([a-z_]+)`", line)[1:] == list(MESSAGES[tag].__struct_fields__)


def test_a_space_names_no_namespace() -> None:
    assert space_of(b"") == NO_SPACE
    assert space_of(bytes(32)) == hashlib.sha256(b"baton space 1" + bytes(32)).digest()
    assert space_of(bytes(32)) != space_of(b"\x01" * 32)
