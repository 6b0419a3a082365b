"""Other releases of the frameworks: refused, told of, or as measured; and every list agrees."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.releases import DECODER, MEASURED, PRODUCER, installed, require_measured

ROOT = Path(__file__).parents[2]


def test_the_measured_releases_are_fine() -> None:
    assert require_measured(MEASURED) == ()
    assert require_measured({"torch": f"{MEASURED['torch']}+cu130"}) == ()


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("mlx-lm", "0.31.9"),
        ("mlx", "0.33.0"),
        ("torch", "2.1.0"),
        ("torch", "3.13.0"),
        ("transformers", "4.57.1"),
        ("transformers", ""),
    ],
)
def test_another_minor_release_is_refused_by_name(name: str, version: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_measured({name: version})
    assert (caught.value.reason, caught.value.field) == ("release_not_measured", name)
    assert MEASURED[name] in str(caught.value.hint)


def test_another_patch_release_is_told_of() -> None:
    (remark,) = require_measured({"transformers": "5.24.9"})
    assert "5.24.9" in remark
    assert MEASURED["transformers"] in remark


def test_what_is_installed_here_is_what_was_measured() -> None:
    assert require_measured(installed((*DECODER, *PRODUCER))) == ()
    assert installed(["no-such-package-anywhere"]) == {"no-such-package-anywhere": ""}


def test_the_constraints_pin_what_was_measured() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.M))
    assert {name: pins[name] for name in MEASURED} == dict(MEASURED)


def test_the_package_asks_for_the_measured_minor_releases() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["optional-dependencies"]
    for half, names in (("decoder", DECODER), ("producer", PRODUCER)):
        for name in names:
            lines = [
                line
                for line in asked[half]
                if re.match(rf"{re.escape(name)}(\[cpu\])?[^\w-]", line)
            ]
            assert lines, (half, name)
            major, minor = MEASURED[name].split(".")[:2]
            for line in lines:
                assert f">={MEASURED[name]},<{major}.{int(minor) + 1}" in line, line
