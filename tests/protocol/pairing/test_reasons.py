"""The reasons of pairing: all of them given somewhere, all of them in the README."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import protocol
from protocol.aborts import from_abort, to_abort
from protocol.messages import Abort
from protocol.pairing.code import _CLOSED
from protocol.reasons import PAIRING_REASONS, REASONS, refusal

PACKAGE = Path(protocol.__file__).parent


def named_in_code() -> set[str]:
    """The first argument of every refusal in the package."""
    found = set()
    for path in (PACKAGE / "pairing").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("refusal", "differs")
                and isinstance(node.args[0], ast.Constant)
            ):
                found.add(node.args[0].value)
    return found


def test_every_reason_given_is_listed_and_every_listed_one_is_given() -> None:
    named = named_in_code() | set(_CLOSED)
    assert named - set(REASONS) == set(PAIRING_REASONS)


def test_the_readme_lists_them() -> None:
    readme = (PACKAGE / "README.md").read_text()
    for code, reason in PAIRING_REASONS.items():
        assert f"| `{code}` | {reason.error.__name__} | {reason.meaning} |\n" in readme


@pytest.mark.parametrize("reason", PAIRING_REASONS)
def test_none_travels_in_an_abort_or_is_believed_there(reason: str) -> None:
    assert to_abort(refusal(reason, "x"), 1).reason not in PAIRING_REASONS
    abort = Abort(1, reason, "", "", "", (), 0)
    assert from_abort(abort).reason == "peer_aborted"
