"""The rules of the house, checked on the files themselves.

What a linter checks is not repeated here: import rules are in pyproject.toml, and the first
test runs them; broad excepts are ruff's BLE.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "trust", "mac_decoder", "gb10_producer", "app")
LAST_FRAME = "mac_decoder/api/errors.py"
"""The one broad except: what turns a bug in a request into a 500, logged, and nothing else."""

VAGUE = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
MACHINE_PATH = re.compile(r"(^|[^A-Za-z0-9_.~/-])/(work|root|home|Users)/")
TEXT = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".cfg", ""}


def sources(*packages: str) -> Iterator[Path]:
    for package in packages:
        yield from sorted((ROOT / package).rglob("*.py"))


def texts() -> Iterator[Path]:
    """Every text file of the project; what tools leave behind is in hidden folders."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name == ".ci"
            or not (name.startswith((".", "__pycache__", "build", "dist")) or name.endswith("info"))
        ]
        yield from (Path(folder) / name for name in names if Path(name).suffix in TEXT)


def test_import_rules_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mac_decoder/api/planted.py", "import mlx.core"),
        ("gb10_producer/planted.py", "import torch"),
        ("gb10_producer/planted.py", "import mac_decoder"),
        ("trust/planted.py", "import torch"),
        ("trust/planted.py", "import mlx.core"),
        ("trust/planted.py", "import gb10_producer"),
        ("protocol/planted.py", "import trust"),
        ("mac_decoder/planted.py", "import app.cli"),
        ("protocol/planted.py", "import socket"),
        ("protocol/planted.py", "from pathlib import Path"),
    ],
)
def test_import_rules_would_notice(name: str, line: str, tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for module in ("app/cli.py", "protocol/checkpoint.py"):
        (tmp_path / module).touch()
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    planted = tmp_path / name
    planted.parent.mkdir(exist_ok=True)
    (planted.parent / "__init__.py").touch()
    planted.write_text(line + "\n")
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout[-3000:]
    assert "BROKEN" in done.stdout


def test_no_module_has_a_vague_name() -> None:
    assert [path for path in sources(*PACKAGES) if path.stem in VAGUE] == []


def test_every_module_says_what_belongs_in_it() -> None:
    silent = [
        path.relative_to(ROOT)
        for path in sources(*PACKAGES)
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_no_except_is_broad() -> None:
    """Ruff's BLE lets a broad except pass that logs; here none is broad, whatever it does."""
    broad = []
    for path in sources(*PACKAGES):
        if path == ROOT / LAST_FRAME:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else ""
                reraises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                if caught in ("", "Exception", "BaseException") and not reraises:
                    broad.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert broad == []


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    found = []
    for path in texts():
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == []


def test_nothing_is_left_unfinished() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX)\b|NotImplementedError")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources(*PACKAGES)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert found == []


def test_documents_name_files_that_exist() -> None:
    """Backticked paths and relative links in the README and docs/ lead somewhere."""
    missing = []
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
        folders = "|".join((*PACKAGES, "tests", "docs"))
        named = re.findall(rf"`((?:{folders})/[\w./*-]*)`", text)
        for name in named:
            if not (ROOT / name).exists() and not list(ROOT.glob(name)):
                missing.append(f"{document.name}: {name}")
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            if not (document.parent / link).exists():
                missing.append(f"{document.name}: {link}")
    assert missing == []
