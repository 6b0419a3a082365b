"""Messages of control: one encoding each, bounds in every field, nothing else accepted."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.control.messages import (
    MAX_MESSAGE,
    MESSAGES,
    ControlAnswer,
    ControlHello,
    ControlProof,
    ControlRefused,
    Describe,
    Description,
    Message,
    ModelKept,
    ModelWanted,
    Rotate,
    Rotated,
    SendModel,
    Unpair,
    Unpaired,
    decode,
    encode,
    note,
)
from protocol.control.models import MAX_MANIFEST, MAX_STREAM
from protocol.errors import PeerProtocolError
from tests.ordinary import examples
from tests.protocol.control.joined import DESCRIPTION, OFFER
from tests.protocol.pairing.test_messages import names

HIGHEST = (1 << 53) - 1
b32 = st.binary(min_size=32, max_size=32)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(ControlHello, st.just(1), b32, st.integers(0, HIGHEST)),
    st.builds(ControlAnswer, b32),
    st.builds(ControlProof, b32),
    st.builds(Describe, b32),
    st.builds(
        Description,
        names,
        st.from_regex(r"\A[A-Za-z0-9_.:-]{1,64}\Z"),
        st.sampled_from(("waiting", "loading", "ready", "stopping")),
        st.text().map(note),
        st.sampled_from((None, DESCRIPTION.identity)),
        st.sampled_from((None, DESCRIPTION.recipe)),
        b32,
    ),
    st.builds(Unpair, b32),
    st.builds(Unpaired, b32),
    st.builds(Rotate, st.integers(1, HIGHEST), b32, b32),
    st.builds(Rotated, b32, b32),
    st.builds(
        SendModel,
        st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"),
        st.just(OFFER.identity),
        st.integers(0, MAX_STREAM),
        st.integers(1, MAX_MANIFEST),
        b32,
        b32,
    ),
    st.builds(ModelWanted, st.integers(0, MAX_STREAM), b32),
    st.builds(ModelKept, st.text().map(note), st.sampled_from(("now", "restarting", "kept")), b32),
    st.builds(ControlRefused, st.from_regex(r"\A[a-z0-9_]{1,64}\Z")),
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


HELLO = encode(ControlHello(1, bytes(32), 7))
DESCRIBED = encode(DESCRIPTION)
SEND = encode(OFFER)
ROTATE = encode(Rotate(1, bytes(32), bytes(32)))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "message_malformed"),
        (b"null", "message_malformed"),
        (b"[" * 1000, "message_malformed"),
        (b'{"type":"hello"}', "message_unknown"),
        (b'{"type":"pair_hello"}', "message_unknown"),
        (HELLO.replace(b'"version":1', b'"version":2'), "version_unsupported"),
        (b'{"type":"control_hello","version":2,"other":[]}', "version_unsupported"),
        (HELLO.replace(b'"version":1,', b""), "message_malformed"),
        (HELLO.replace(b'"epoch":7', b'"epoch":-1'), "message_malformed"),
        (HELLO.replace(b'"epoch":7', b'"epoch":9007199254740992'), "message_malformed"),
        (ROTATE.replace(b'"epoch":1', b'"epoch":0'), "message_malformed"),
        (ROTATE.replace(b'"share":"AAAA', b'"share":"'), "message_malformed"),
        (DESCRIBED.replace(b'"state":"ready"', b'"state":"fine"'), "message_malformed"),
        (DESCRIBED.replace(b'"some-model"', b'"%s"' % (b"m" * 97)), "message_malformed"),
        (DESCRIBED.replace(b'"some-model"', '"mödel"'.encode()), "message_malformed"),
        (b'{"type":"describe","mac":"' + b"A" * 42 + b'B="}', "message_not_canonical"),
        (SEND.replace(b'"some-model"', b'"../model"'), "message_malformed"),
        (SEND.replace(b'"some-model"', b'".hidden"'), "message_malformed"),
        (SEND.replace(b'"some-model"', b'"%s"' % (b"m" * 65)), "message_malformed"),
        (SEND.replace(b'"nbytes":', b'"nbytes":99999999999'), "message_malformed"),
        (SEND.replace(b'"manifest_bytes":', b'"manifest_bytes":99999'), "message_malformed"),
        (encode(ModelWanted(0, bytes(32))).replace(b":0", b":-1"), "message_malformed"),
        (b" " * (MAX_MESSAGE + 1), "message_too_long"),
    ],
)
def test_refusals(raw: bytes, reason: str) -> None:
    with pytest.raises(PeerProtocolError) as caught:
        decode(raw)
    assert caught.value.reason == reason


def test_every_message_is_known_by_its_tag() -> None:
    assert [kind.__struct_config__.tag for kind in MESSAGES.values()] == list(MESSAGES)
    assert len(MESSAGES) == 13


def test_own_messages_are_checked_as_a_peer_would() -> None:
    with pytest.raises(msgspec.ValidationError):
        encode(ControlProof(mac=bytes(31)))


@pytest.mark.parametrize(
    ("text", "noted"), [("Qwen3-4B", "Qwen3-4B"), ('mö"del\n', "m??del?"), ("m" * 200, "m" * 96)]
)
def test_a_note_of_any_text_can_travel(text: str, noted: str) -> None:
    assert note(text) == noted
