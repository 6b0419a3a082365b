"""The status's frozen shape: whoever follows it was built for this one, and refuses another.

What follows may be an app that runs since before an update. Where this fails, the shape has
changed: raise ``VERSION`` beside it, and freeze the new one in a file of its own
(``python -m tests.golden.test_status_v2 > tests/golden/status_vN.json``).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from protocol.status.schema import text
from protocol.status.snapshot import VERSION
from protocol.status.stream import Full, Hello, decode, encode
from tests.app.view.snapshots import FINISHED, IDLE, IN_HAND, with_requests

FILE = Path(__file__).with_name("status_v2.json")


def frozen() -> dict[str, Any]:
    """Two messages, and a digest of the schema of all."""
    busy = with_requests(IDLE, "prefilling_there", IN_HAND)
    messages = (
        Hello(at=1.0, version=VERSION, process="ab", full_every_s=10.0),
        Full(at=2.0, snapshot=busy),
    )
    return {
        "schema": hashlib.sha256(text().encode()).hexdigest(),
        "messages": [encode(message).decode() for message in messages],
    }


def test_the_shape_is_that_of_its_version() -> None:
    assert json.loads(FILE.read_text())["schema"] == frozen()["schema"]


def test_its_messages_are_read_and_written_as_they_were() -> None:
    hello, full = json.loads(FILE.read_text())["messages"]
    read = decode(hello), decode(full)
    assert isinstance(read[0], Hello)
    assert isinstance(read[1], Full)
    assert read[1].snapshot.recent.finished == (FINISHED,)
    assert [encode(message).decode() for message in read] == [hello, full]


if __name__ == "__main__":
    print(json.dumps(frozen(), indent=2))
