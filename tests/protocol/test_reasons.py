"""The list of reasons: complete, used, and the same in the README."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import protocol
from protocol.reasons import COMPONENTS, REASONS, component_reason, differs, refusal

PACKAGE = Path(protocol.__file__).parent
MODULES = (
    "aborts",
    "canonical",
    "decoder_machine",
    "frames",
    "hello",
    "identity",
    "machine",
    "manifest",
    "messages",
    "outstanding",
    "producer_machine",
    "reception",
    "seal",
    "sending",
)
SHELLS = {
    *("queue_full", "memory_exceeded", "producer_stopping", "capacity_exceeded", "cancelled"),
    *("transfer_unknown", "transfer_expired", "transfer_committed", "pairing_revoked"),
}
"""Reasons that machines do not give themselves, but carry."""


def named_in_code() -> set[str]:
    """Every literal that looks like a reason in the modules of the wire."""
    found: set[str] = set()
    for name in MODULES:
        tree = ast.parse((PACKAGE / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if node.func.id in ("refusal", "differs"):
                found.update(
                    text.value
                    for text in ast.walk(node.args[0])
                    if isinstance(text, ast.Constant) and isinstance(text.value, str)
                )
    return found


def test_every_reason_given_is_listed_and_every_listed_one_is_given() -> None:
    components = {component_reason(component) for component in COMPONENTS}
    # These two are chosen by an expression; the machines' tests provoke them.
    chosen = {"generation_used", "generation_unknown", "engine_fault", "peer_engine_fault"}
    assert named_in_code() | components | SHELLS | chosen == set(REASONS)


def test_the_readme_lists_exactly_these() -> None:
    readme = (PACKAGE / "README.md").read_text()
    for code, reason in REASONS.items():
        assert f"| `{code}` | {reason.error.__name__} | {reason.meaning} |\n" in readme
    listed = [line for line in readme.splitlines() if line.startswith("| `") and "Error" in line]
    assert sum(line.split("`")[1] in REASONS for line in listed) <= len(REASONS)


@pytest.mark.parametrize("code", sorted(REASONS))
def test_codes_are_stable_words(code: str) -> None:
    assert code == code.lower().strip("_")
    assert code.replace("_", "").isalnum()
    assert len(code) <= 64


def test_a_reason_that_is_not_listed_cannot_be_given() -> None:
    with pytest.raises(KeyError):
        refusal("made_up", "x")


def test_bytes_are_shown_as_hexadecimal() -> None:
    error = differs("spans_differ", "spans", b"\x01\xff", b"\x00")
    assert error.details() == {
        "reason": "spans_differ",
        "field": "spans",
        "found": "01ff",
        "expected": "00",
    }
