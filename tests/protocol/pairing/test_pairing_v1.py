"""Pairing version 1, frozen: the same inputs make the same bytes, and anybody can compute them.

``python -m tests.protocol.pairing.test_pairing_v1 > tests/protocol/pairing/pairing_v1.json`` made
the file. A released version's file never changes; another version has another file.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

from protocol.pairing.certificates import OwnCertificate
from protocol.pairing.exchange import DecoderPairing, ProducerPairing
from tests.protocol.pairing.joined import (
    DECODER,
    NOW,
    PRODUCER,
    RIGHT,
    Stream,
    decoder,
    producer,
    sent,
)

FILE = Path(__file__).parent / "pairing_v1.json"
FROZEN: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
README = Path(__file__).parents[3] / "protocol" / "README.md"


def machines(certificates: dict[str, str]) -> tuple[DecoderPairing, ProducerPairing]:
    one, other = (bytes.fromhex(certificates[role]) for role in ("decoder", "producer"))
    return (
        decoder(own=OwnCertificate(one, b"-"), seen=other, entropy=Stream("golden decoder")),
        producer(own=OwnCertificate(other, b"-"), seen=one, entropy=Stream("golden producer")),
    )


def golden(certificates: dict[str, str]) -> dict[str, Any]:
    """One whole exchange with its inputs and results."""
    one, other = machines(certificates)
    one.start(NOW)
    other.start(NOW)
    raws = [sent(one)]
    other.receive(raws[-1], NOW)
    raws.append(sent(other))
    one.receive(raws[-1], NOW)
    raws.append(sent(one))
    other.receive(raws[-1], NOW)
    raws.append(sent(other))
    paired = one.receive(raws[-1], NOW)
    assert paired is not None
    # On both sides SPAKE2's scalar is the first thing that takes randomness: 64 bytes.
    scalars = (int.from_bytes(Stream(f"golden {side}")(64), "big") for side in certificates)
    return {
        "version": 1,
        "code": RIGHT,
        "certificates": certificates,
        "scalars": {side: f"{x % L:064x}" for side, x in zip(certificates, scalars, strict=True)},
        "messages": [raw.decode() for raw in raws],
        "epoch": paired.record.epoch,
        "key": paired.record.key.hex(),
    }


def test_the_same_inputs_make_the_same_bytes() -> None:
    assert golden(FROZEN["certificates"]) == FROZEN


# The same by the README alone: Ed25519 in affine coordinates, hashlib and hmac.

Q = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, Q) % Q
Point = tuple[int, int]


def add(one: Point, other: Point) -> Point:
    (x1, y1), (x2, y2) = one, other
    both = D * x1 * x2 * y1 * y2
    return (
        (x1 * y2 + x2 * y1) * pow(1 + both, -1, Q) % Q,
        (y1 * y2 + x1 * x2) * pow(1 - both, -1, Q) % Q,
    )


def times(count: int, point: Point) -> Point:
    total = (0, 1)
    while count:
        if count & 1:
            total = add(total, point)
        point = add(point, point)
        count >>= 1
    return total


def written(point: Point) -> bytes:
    return (point[1] | (point[0] & 1) << 255).to_bytes(32, "little")


def read(raw: bytes) -> Point:
    both = int.from_bytes(raw, "little")
    y, sign = both & ((1 << 255) - 1), both >> 255
    square = (y * y - 1) * pow(D * y * y + 1, -1, Q) % Q
    x = pow(square, (Q + 3) // 8, Q)
    if x * x % Q != square:
        x = x * pow(2, (Q - 1) // 4, Q) % Q
    assert x * x % Q == square
    return (x if x & 1 == sign else Q - x, y)


def hkdf(secret: bytes, salt: bytes, label: bytes, count: int) -> bytes:
    extracted = hmac.digest(salt, secret, "sha256")
    made = block = b""
    number = 0
    while len(made) < count:
        number += 1
        block = hmac.digest(extracted, block + label + bytes((number,)), "sha256")
        made += block
    return made[:count]


def prefixed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def sha(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()


BASE = read((4 * pow(5, -1, Q) % Q).to_bytes(32, "little"))
M = read(bytes.fromhex("15cfd18e385952982b6a8f8c7854963b58e34388c8e6dae891db756481a02312"))
N = read(bytes.fromhex("f04f2e7eb734b2a8f8b472eaf9c3c632576ac64aea650b496a8a20ff00e583c3"))


def test_anybody_computes_the_same_from_the_readme() -> None:
    hello, answer, confirm, confirmed = (text.encode() for text in FROZEN["messages"])
    code = FROZEN["code"].encode()
    w = int.from_bytes(hkdf(code, b"", b"SPAKE2 pw", 48), "big") % L
    x, y = (int(FROZEN["scalars"][side], 16) for side in ("decoder", "producer"))
    one = written(add(times(x, BASE), times(w, M)))
    other = written(add(times(y, BASE), times(w, N)))
    assert base64.b64decode(json.loads(hello)["element"]) == b"A" + one
    assert base64.b64decode(json.loads(answer)["element"]) == b"B" + other
    shared = times(x, add(read(other), times(L - w, N)))
    assert shared == times(y, add(read(one), times(L - w, M)))
    sides = sha(b"baton decoder 1") + sha(b"baton producer 1")
    secret = sha(sha(code) + sides + one + other + written(shared))
    certificates = FROZEN["certificates"]
    seen = (sha(bytes.fromhex(certificates[side])) for side in ("decoder", "producer"))
    over = sha(prefixed(b"baton pairing 1", hello, answer, *seen))
    for raw, label in (
        (confirm, b"baton pairing decoder confirms 1"),
        (confirmed, b"baton pairing producer confirms 1"),
    ):
        mac = hmac.digest(hkdf(secret, over, label, 32), over, "sha256")
        assert base64.b64decode(json.loads(raw)["mac"]) == mac
    assert hkdf(secret, over, b"baton pairing key 1", 32).hex() == FROZEN["key"]


def test_the_readme_names_the_two_points() -> None:
    text = README.read_text()
    assert f"`{written(M).hex()}`" in text
    assert f"`{written(N).hex()}`" in text


if __name__ == "__main__":
    fresh = {"decoder": DECODER.certificate.hex(), "producer": PRODUCER.certificate.hex()}
    print(json.dumps(golden(FROZEN.get("certificates", fresh)), indent=1))
