"""`docs/security.md` names a test for every attack, and each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "security.md"
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE.read_text())


def rows() -> list[str]:
    """The rows of the tables of attacks."""
    lines = PAGE.read_text().splitlines()
    return [line for line in lines if line.startswith("| ") and line.count(" | ") == 2]


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_every_named_test_is_there(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    tests = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    tests = [one for one in tests if one.startswith("test_")]
    assert name in tests if name else tests


def test_every_attack_has_a_test() -> None:
    attacks = [row for row in rows() if "| an attacker |" not in row and "| who |" not in row]
    trusted = [row for row in attacks if row.split("|")[1].split()[0] in ("decoder", "producer")]
    attacks = [row for row in attacks if row not in trusted and "`baton demo`" not in row]
    attacks = [row for row in attacks if not row.startswith("| decoder's")]
    assert len(attacks) > 25
    assert [row for row in attacks if not re.search(r"`tests/[\w/]+\.py", row)] == []
