"""Control version 1, frozen: the same inputs make the same bytes, and anybody can compute them.

``python -m tests.protocol.control.test_control_v1 > tests/protocol/control/control_v1.json`` made
the file. A released version's file never changes; another version has another file.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

from protocol.control import Rekeyed
from tests.protocol.control.joined import CERTIFICATES, CONTENTS, KEY, MANIFEST, Joined

FILE = Path(__file__).parent / "control_v1.json"
FROZEN: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}


def golden() -> dict[str, Any]:
    """A connection that describes and rotates, one that unpairs, and one that sends a model."""
    pair = Joined().start().ask("describe").ask("rotate")
    event = pair.of("decoder")[-1]
    assert isinstance(event, Rekeyed)
    return {
        "version": 1,
        "key": KEY.key.hex(),
        "epoch": KEY.epoch,
        "certificates": {
            "decoder": CERTIFICATES.decoder.hex(),
            "producer": CERTIFICATES.producer.hex(),
        },
        "rotation": [[side, raw.decode()] for side, raw in pair.record],
        "unpairing": [[side, raw.decode()] for side, raw in Joined().start().ask("unpair").record],
        "sending": [
            [side, raw.decode()] for side, raw in Joined().start().ask("send_model").record
        ],
        "stream": (MANIFEST.raw + b"".join(CONTENTS[name] for name in sorted(CONTENTS))).hex(),
        "rotated": event.pairing.key.hex(),
    }


def test_the_same_inputs_make_the_same_bytes() -> None:
    assert golden() == FROZEN


# The same by the README alone: hashlib and hmac.


def prefixed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def test_anybody_computes_the_same_from_the_readme() -> None:
    key, epoch = bytes.fromhex(FROZEN["key"]), FROZEN["epoch"].to_bytes(8, "big")
    seen = [bytes.fromhex(FROZEN["certificates"][side]) for side in ("decoder", "producer")]
    macs = 0
    for name in ("rotation", "unpairing", "sending"):
        (_, hello), (_, answer), *sealed = FROZEN[name]
        openings = prefixed(b"baton control 1", hello.encode(), answer.encode(), *seen)
        transcript = hashlib.sha256(openings).digest()
        counts = {"decoder": 0, "producer": 0}
        for side, raw in sealed:
            mac = json.loads(raw)["mac"]
            zeroed = raw.replace(mac, base64.b64encode(bytes(32)).decode()).encode()
            number = counts[side].to_bytes(8, "big")
            counts[side] += 1
            domain = f"baton control {side} 1".encode()
            over = prefixed(domain, epoch, transcript, number, zeroed)
            assert base64.b64decode(mac) == hmac.digest(key, over, "sha256")
            macs += 1
    assert macs == 15


def test_anybody_reads_the_stream_from_the_readme() -> None:
    offer = json.loads(FROZEN["sending"][4][1])
    stream = bytes.fromhex(FROZEN["stream"])
    assert len(stream) == offer["nbytes"]
    listed, rest = stream[: offer["manifest_bytes"]], stream[offer["manifest_bytes"] :]
    assert base64.b64decode(offer["digest"]) == hashlib.sha256(listed).digest()
    files = json.loads(listed)
    assert json.dumps(files, separators=(",", ":")).encode() == listed
    assert [file["name"] for file in files] == sorted(file["name"] for file in files)
    for file in files:
        content, rest = rest[: file["nbytes"]], rest[file["nbytes"] :]
        assert hashlib.sha256(content).hexdigest() == file["sha256"]
    assert rest == b""


def test_anybody_computes_the_rotated_key() -> None:
    messages = [json.loads(raw) for _, raw in FROZEN["rotation"]]
    nonces = b"".join(base64.b64decode(message["nonce"]) for message in messages[:2])
    shares = [base64.b64decode(message["share"]) for message in messages[-2:]]
    assert messages[-2]["epoch"] == FROZEN["epoch"] + 1
    seen = [bytes.fromhex(FROZEN["certificates"][side]) for side in ("decoder", "producer")]
    epoch = messages[-2]["epoch"].to_bytes(8, "big")
    info = prefixed(b"baton rotation 1", *shares, *seen, epoch)
    extracted = hmac.digest(nonces, bytes.fromhex(FROZEN["key"]), "sha256")
    assert hmac.digest(extracted, info + b"\x01", "sha256").hex() == FROZEN["rotated"]


if __name__ == "__main__":
    print(json.dumps(golden(), indent=1))
