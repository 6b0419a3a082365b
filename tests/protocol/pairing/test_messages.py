"""Messages of pairing: one encoding each, bounds in every field, nothing else accepted."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError, PeerProtocolError
from protocol.pairing.messages import (
    MAX_MESSAGE,
    MESSAGES,
    Message,
    PairAnswer,
    PairConfirm,
    PairConfirmed,
    PairHello,
    PairRefused,
    decode,
    encode,
    require_name,
)
from tests.ordinary import examples

HIGHEST = (1 << 53) - 1
PRINTABLE = "".join(chr(code) for code in range(32, 127) if chr(code) not in '"\\')
names = st.text(PRINTABLE, min_size=1, max_size=64).filter(lambda name: name == name.strip())
nonces = st.binary(min_size=32, max_size=32)
elements = st.binary(min_size=33, max_size=33)
ports = st.integers(1, 65535)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(PairHello, st.just(1), nonces, names, st.integers(0, HIGHEST), elements),
    st.builds(PairAnswer, nonces, names, st.integers(1, HIGHEST), ports, elements),
    st.builds(PairConfirm, nonces),
    st.builds(PairConfirmed, nonces),
    st.builds(PairRefused, st.from_regex(r"\A[a-z0-9_]{1,64}\Z"), st.integers(0, 86_400_000)),
)


@given(messages)
def test_what_is_encoded_decodes_to_the_same(message: Message) -> None:
    raw = encode(message)
    assert decode(raw) == message
    assert len(raw) <= MAX_MESSAGE


@given(messages)
def test_the_encoding_is_what_the_readme_says(message: Message) -> None:
    fields = json.loads(encode(message))
    assert list(fields) == ["type", *message.__struct_fields__]
    assert json.dumps(fields, separators=(",", ":")).encode() == encode(message)


@given(messages, st.data())
def test_no_other_spelling_is_accepted(message: Message, data: st.DataObject) -> None:
    raw = encode(message)
    spelled = data.draw(
        st.sampled_from(
            (
                raw + b"\n",
                b" " + raw,
                raw.replace(b'"type"', b'"\\u0074ype"'),
                raw.replace(b'":', b'": ', 1),
                raw[:-1] + b',"type":"x"}',
                raw[:-1] + b',"more":1}',
                raw[:-1],
            )
        )
    )
    with pytest.raises(PeerProtocolError):
        decode(spelled)


@examples(300)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(PeerProtocolError):
        decode(raw)


HELLO = encode(PairHello(1, bytes(32), "mac", 0, bytes(33)))
ANSWER = encode(PairAnswer(bytes(32), "gb10", 1, 7431, bytes(33)))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "message_malformed"),
        (b"null", "message_malformed"),
        (b'{"type":1}', "message_malformed"),
        (b'{"type":"\xff"}', "message_malformed"),
        (b"[" * 1000, "message_malformed"),
        (b'{"type":"hello"}', "message_unknown"),
        (HELLO.replace(b'"version":1', b'"version":2'), "version_unsupported"),
        (b'{"type":"pair_hello","version":2,"other":[]}', "version_unsupported"),
        (HELLO.replace(b'"version":1,', b""), "message_malformed"),
        (HELLO.replace(b'"mac"', b'""'), "message_malformed"),
        (HELLO.replace(b'"mac"', b'"%s"' % (b"m" * 65)), "message_malformed"),
        (HELLO.replace(b'"mac"', b'" mac"'), "message_malformed"),
        (HELLO.replace(b'"mac"', b'"m\\u0000c"'), "message_malformed"),
        (HELLO.replace(b'"mac"', '"mäc"'.encode()), "message_malformed"),
        (HELLO.replace(b'"mac"', b'"m\x7fc"'), "message_malformed"),
        (HELLO.replace(b'"earlier":0', b'"earlier":-1'), "message_malformed"),
        (HELLO.replace(b'"earlier":0', b'"earlier":9007199254740992'), "message_malformed"),
        (HELLO.replace(b'"earlier":0', b'"earlier":0.0'), "message_malformed"),
        (HELLO.replace(b'"element":"AAAA', b'"element":"'), "message_malformed"),
        (ANSWER.replace(b'"epoch":1', b'"epoch":0'), "message_malformed"),
        (ANSWER.replace(b'"port":7431', b'"port":0'), "message_malformed"),
        (ANSWER.replace(b'"port":7431', b'"port":65536'), "message_malformed"),
        (b'{"type":"pair_confirm","mac":"AAAA"}', "message_malformed"),
        (b'{"type":"pair_confirm","mac":"' + b"A" * 42 + b'B="}', "message_not_canonical"),
        (
            b'{"type":"pair_refused","retry_after_ms":0,"reason":"x"}',
            "message_not_canonical",
        ),
        (b'{"type":"pair_refused","reason":"x","retry_after_ms":86400001}', "message_malformed"),
        (b'{"type":"pair_refused","reason":"A b","retry_after_ms":0}', "message_malformed"),
        (b" " * (MAX_MESSAGE + 1), "message_too_long"),
    ],
)
def test_refusals(raw: bytes, reason: str) -> None:
    with pytest.raises(PeerProtocolError) as caught:
        decode(raw)
    assert caught.value.reason == reason


def test_every_message_is_known_by_its_tag() -> None:
    assert list(MESSAGES) == [
        *("pair_hello", "pair_answer", "pair_confirm", "pair_confirmed", "pair_refused")
    ]


def test_own_messages_are_checked_as_a_peer_would() -> None:
    with pytest.raises(msgspec.ValidationError):
        encode(PairConfirm(mac=bytes(31)))


@given(names)
def test_printable_names_are_names(name: str) -> None:
    require_name(name)


@pytest.mark.parametrize("name", ["", " ", " a", "a ", "a" * 65, 'a"', "a\\b", "a\n", "ä", "a\tb"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_name(name)
    assert caught.value.reason == "name_malformed"
