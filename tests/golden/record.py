"""Makes the frozen bytes of a wire version: ``python -m tests.golden.record > FILE``.

A released file is never made again; a new wire version gets a new file beside it.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from protocol.errors import Cancelled
from protocol.manifest import spans_digest
from protocol.messages import encode_tokens, token_digest
from tests.machines.joined import TO_DECODER, TO_PRODUCER, Item, Joined

TOKENS = [1, 2, 300, 65_536, 4_294_967_295, 0, 7, 8, 9]


def exchange() -> Joined:
    """A handshake, a sealed delta with PROGRESS and CREDIT, and a withdrawn handoff."""
    pair = Joined(name="golden").connect()
    pair.auto_begin = False
    pair.request(1, tokens=TOKENS, cut=2, extra_cuts=(8,), credit=3)
    pair.flush()
    pair.deliver(TO_PRODUCER)
    pair.producer.progress(4, pair.now)
    pair.begin()
    pair.settle()
    pair.request(2, tokens=TOKENS[:1], credit=1)
    pair.settle()
    pair.decoder.abort(Cancelled("withdrawn"), pair.now)
    pair.settle()
    return pair


def resumed() -> tuple[Joined, Joined]:
    """A handoff whose connection is lost after three frames, and the one that goes on with it."""
    pair = Joined(name="lost").connect()
    pair.request(3, tokens=TOKENS, cut=2, credit=3)
    pair.flush()
    pair.deliver(TO_PRODUCER)
    for _ in range(3):
        pair.send_frame()
    pair.flush()
    while pair.wires[TO_DECODER]:
        pair.deliver(TO_DECODER)
    pair.lose()
    other = pair.again("found")
    assert other.reception is not None
    other.decoder.resume(other.reception, other.now, 4)
    other.settle()
    return pair, other


def written(item: Item) -> dict[str, str]:
    """One item as JSON: text, or header and payload as hexadecimal."""
    if item.text is not None:
        return {"text": item.text.decode("ascii")}
    return {"header": item.header.hex(), "payload": item.payload.hex()}


def golden() -> dict[str, Any]:
    """Everything that is frozen."""
    pair = exchange()
    decoder = pair.decoder
    return {
        "version": 1,
        "inputs": {
            "key": decoder._pairing.key.hex(),
            "epoch": decoder._pairing.epoch,
            "identity": msgspec.to_builtins(decoder._identity),
            "layout": msgspec.to_builtins(decoder._layout),
            "tokens": TOKENS,
        },
        "digests": {
            "identity": decoder._identity.digest().hex(),
            "layout": decoder._layout.digest().hex(),
            "tokens": token_digest(encode_tokens(TOKENS)).hex(),
            "spans": spans_digest(decoder._layout, 2, 9).hex(),
        },
        "from_decoder": [written(item) for item in pair.record[TO_PRODUCER]],
        "from_producer": [written(item) for item in pair.record[TO_DECODER]],
        "resumed": [
            {
                "from_decoder": [written(item) for item in each.record[TO_PRODUCER]],
                "from_producer": [written(item) for item in each.record[TO_DECODER]],
            }
            for each in resumed()
        ],
    }


if __name__ == "__main__":
    print(json.dumps(golden(), indent=1))
