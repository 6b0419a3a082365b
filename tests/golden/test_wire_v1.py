"""Wire version 1, frozen: the same inputs make the same bytes, and the old bytes still work."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol import frames, messages
from protocol.identity import Identity
from protocol.layout import Layout
from protocol.messages import MESSAGES
from tests.golden.record import golden
from tests.machines.joined import TO_DECODER, TO_PRODUCER, Item, Joined

FROZEN: dict[str, Any] = json.loads((Path(__file__).parent / "wire_v1.json").read_text())
DECODER: list[dict[str, str]] = FROZEN["from_decoder"]
PRODUCER: list[dict[str, str]] = FROZEN["from_producer"]
RESUMED: list[dict[str, list[dict[str, str]]]] = FROZEN["resumed"]
"""What went over the first connection, and over the second."""


def item(written: dict[str, str]) -> Item:
    if "text" in written:
        return Item(written["text"].encode())
    return Item(None, bytes.fromhex(written["header"]), bytes.fromhex(written["payload"]))


def texts(kind: str) -> list[str]:
    start = f'{{"type":"{kind}",'
    again = [w for each in RESUMED for part in each.values() for w in part]
    found = (*DECODER, *PRODUCER, *again)
    return [w["text"] for w in found if w.get("text", "").startswith(start)]


@pytest.mark.parametrize(
    "part", ["version", "inputs", "digests", "from_decoder", "from_producer", "resumed"]
)
def test_the_same_inputs_make_the_same_bytes(part: str) -> None:
    assert json.loads(json.dumps(golden()[part])) == FROZEN[part]


@pytest.mark.parametrize("kind", MESSAGES)
def test_every_message_is_frozen_and_still_read(kind: str) -> None:
    assert texts(kind)
    for text in texts(kind):
        message = messages.decode(text.encode())
        assert messages.encode(message) == text.encode()


def test_the_frozen_handoff_still_installs() -> None:
    pair = Joined(name="golden")
    pair.decoder.connect(pair.now)
    rest = [item(written) for written in PRODUCER]
    tokens = FROZEN["inputs"]["tokens"]
    for handed in rest:
        if pair.decoder.state == "READY" and not pair.installed and pair.decoder._generation == 0:
            pair.request(1, tokens=tokens, cut=2, extra_cuts=(8,), credit=3)
        if handed.text is not None and b'"aborted"' in handed.text:
            break
        pair.give(TO_DECODER, handed)
    assert len(pair.installed) == 1
    said = [raw.decode() for raw in pair.decoder.outgoing()]
    assert said == [written["text"] for written in DECODER[: len(said)]]
    assert json.loads(said[-1])["type"] == "committed"


def test_the_frozen_requests_are_still_answered() -> None:
    pair = Joined(name="golden")
    for handed in map(item, DECODER[:3]):
        pair.give(TO_PRODUCER, handed)
    assert pair.producer.state == "STREAMING"


def test_a_stranger_can_compute_every_digest_and_mac() -> None:
    """With hashlib and hmac alone, from the bytes and from what the README says."""

    def prefixed(*parts: bytes) -> bytes:
        return b"".join(len(part).to_bytes(8, "big") + part for part in parts)

    inputs = FROZEN["inputs"]
    key, epoch = bytes.fromhex(inputs["key"]), inputs["epoch"].to_bytes(8, "big")

    def mac(*parts: bytes) -> bytes:
        return hmac.digest(key, prefixed(parts[0], epoch, *parts[1:]), "sha256")

    def value(text: str, field: str) -> bytes:
        return base64.b64decode(json.loads(text)[field])

    hello, ack = texts("hello")[0].encode(), texts("hello_ack")[0].encode()
    of_decoder, of_producer, *_ = texts("proof")
    assert value(of_decoder, "mac") == mac(b"baton proof decoder 1", hello, ack, b"", b"")
    assert value(of_producer, "mac") == mac(b"baton proof producer 1", hello, ack, b"", b"")

    digests = b""
    sizes = []
    for frame in (item(written) for written in PRODUCER if "header" in written):
        assert hashlib.sha256(frame.header[:48] + frame.payload).digest() == frame.header[48:]
        digests += frame.header[48:]
        sizes.append(len(frame.payload))
    seal = texts("seal")[0]
    stream = hashlib.sha256(digests).digest()
    figures = b"".join(
        number.to_bytes(8, "big")
        for number in (
            len(sizes),
            sum(sizes),
            json.loads(seal)["queue_us"],
            json.loads(seal)["compute_us"],
        )
    )
    prefill, begin = texts("prefill")[0].encode(), texts("begin")[0].encode()
    sealed = mac(b"baton seal 1", prefill, begin, stream, figures)
    assert value(seal, "digest") == stream
    assert value(seal, "mac") == sealed
    answer = mac(b"baton committed 1", value(seal, "transfer"), sealed)
    assert value(texts("committed")[0], "mac") == answer

    asked = next(w["text"].encode() for w in RESUMED[0]["from_decoder"] if "prefill" in w["text"])
    assert value(texts("resume")[0], "prefill") == hashlib.sha256(asked).digest()

    components = [text.encode() for text in inputs["identity"].values()]
    identity = hashlib.sha256(prefixed(b"baton identity 1", *components)).hexdigest()
    assert identity == FROZEN["digests"]["identity"]
    layout = json.dumps(inputs["layout"], separators=(",", ":")).encode()
    assert hashlib.sha256(layout).hexdigest() == FROZEN["digests"]["layout"]
    tokens = b"".join(token.to_bytes(4, "little") for token in inputs["tokens"])
    assert hashlib.sha256(tokens).hexdigest() == FROZEN["digests"]["tokens"]
    assert value(texts("prefill")[0], "tokens") == tokens


def test_the_inputs_are_the_real_types() -> None:
    assert (
        msgspec.convert(FROZEN["inputs"]["identity"], Identity).digest().hex()
        == (FROZEN["digests"]["identity"])
    )
    layout = msgspec.convert(FROZEN["inputs"]["layout"], Layout)
    assert layout.digest().hex() == FROZEN["digests"]["layout"]
    for written in PRODUCER:
        if "header" in written:
            header = frames.parse(bytes.fromhex(written["header"]))
            assert layout.layers[header.index].layer == header.index
