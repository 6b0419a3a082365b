"""The messages of ``/status/stream`` as JSON Schema, for clients in any language.

``docs/status.schema.json`` is what ``python -m protocol.status`` prints; a test compares them.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from protocol.status.snapshot import VERSION
from protocol.status.stream import Message

_FIGURE: Final = [
    {"properties": {"value": {"type": "number"}, "basis": {"enum": ["measured", "estimated"]}}},
    {"properties": {"value": {"type": "null"}, "basis": {"const": "unavailable"}}},
]
"""What ``Figure`` checks beyond its types."""


def schema() -> dict[str, Any]:
    """The schema: any message at the top, its parts (``Snapshot`` among them) under ``$defs``."""
    found = msgspec.json.schema(Message)
    parts = found["$defs"]
    parts["Figure"]["oneOf"] = _FIGURE
    for component in parts["Identity"]["properties"].values():
        # The regular expressions of JSON Schema are JavaScript's, which has no \A and \Z.
        component["pattern"] = component["pattern"].replace(r"\A", "^").replace(r"\Z", "$")
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Baton: messages of /status/stream, version {VERSION}",
    }
    return head | found


def text() -> str:
    """The schema as the file has it."""
    return msgspec.json.format(msgspec.json.encode(schema()), indent=2).decode() + "\n"
