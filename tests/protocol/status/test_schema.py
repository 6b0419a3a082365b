"""The published schema is the code's, and takes exactly what the code takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from protocol.status.schema import text
from protocol.status.snapshot import Snapshot
from protocol.status.stream import Full, diff, encode
from tests.protocol.status.conforming import complaints
from tests.protocol.status.made import few, snapshots
from tests.protocol.status.test_stream import HELLO, an_example

FILE = Path(__file__).parents[3] / "docs" / "status.schema.json"
SCHEMA: dict[str, Any] = json.loads(FILE.read_text())


def test_the_file_is_what_the_code_says() -> None:
    told = "python -m protocol.status > docs/status.schema.json"
    assert FILE.read_text() == text(), f"make it anew: {told}"


@few
@given(snapshots)
def test_every_message_conforms(snapshot: Snapshot) -> None:
    for message in (HELLO, Full(at=2.0, snapshot=snapshot), diff(snapshot, snapshot, 3.0)):
        assert complaints(json.loads(encode(message)), SCHEMA, SCHEMA) == []


@pytest.mark.parametrize(
    "figure",
    [
        {"value": 0, "basis": "unavailable"},
        {"value": None, "basis": "measured"},
        {"value": 1.0},
        {"value": 1.0, "basis": "guessed"},
        1.0,
    ],
)
def test_the_schema_knows_what_a_figure_is(figure: Any) -> None:
    told = json.loads(encode(Full(at=2.0, snapshot=an_example())))
    told["snapshot"]["cache"]["hit_rate"] = figure
    assert complaints(told, SCHEMA, SCHEMA)


def test_no_field_is_for_text_of_clients() -> None:
    """Every field that holds free text is on this list, and none of them is a client's."""
    ours = {
        *("process", "model", "address", "identity_digest", "last_fault"),  # Decoder
        *("weights", "revision", "quantisation", "adapter"),  # Identity
        *("tokenizer", "template", "context", "engine"),
        *("id", "route", "code"),  # made here
        *("name", "called", "reason", "detail", "where"),  # of producers and layers
        *("fault", "certificate_sha256"),
    }
    assert set(_texts(SCHEMA["$defs"])) == ours


def _texts(parts: dict[str, Any]) -> list[str]:
    """Names of the fields that may be a string of any content."""
    return [
        name
        for part in parts.values()
        for name, kind in part.get("properties", {}).items()
        if any(one.get("type") == "string" for one in [kind, *kind.get("anyOf", [])])
    ]
