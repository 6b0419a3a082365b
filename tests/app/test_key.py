"""`baton key`: what is printed, where, and what happens to names."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.commands import app
from mac_decoder.api.keys import KeyFiles, Keys
from mac_decoder.config import DecoderConfig
from protocol.errors import ConfigError


def baton(*args: str, state: Path) -> Result:
    return CliRunner().invoke(app, ["key", *args, "--state-dir", str(state)])


def files(state: Path) -> KeyFiles:
    return KeyFiles(DecoderConfig(model="", state_dir=str(state)).state_path)


def test_a_key_is_printed_alone_and_is_one_of_the_decoders(tmp_path: Path) -> None:
    made = baton("create", "laptop", state=tmp_path)
    assert made.exit_code == 0
    key = made.stdout.removesuffix("\n")
    assert key.split() == [key], "what a script reads is the key and nothing else"
    assert "not shown again" in made.stderr
    assert key not in made.stderr
    assert Keys((), files(tmp_path)).salt_of(key)


def test_the_list_tells_names_and_no_secrets(tmp_path: Path) -> None:
    keys = [
        baton("create", "laptop", state=tmp_path).stdout.strip(),
        baton("create", "desk", "--share-caches", state=tmp_path).stdout.strip(),
    ]
    listed = json.loads(baton("list", "--json", state=tmp_path).stdout)
    assert [(one["name"], one["shares_caches"]) for one in listed] == [
        ("desk", True),
        ("laptop", False),
    ]
    assert all(abs(one["created"] - time.time()) < 60 for one in listed)
    assert all(set(one) == {"name", "created", "shares_caches"} for one in listed)
    shown = baton("list", state=tmp_path).stdout
    assert "laptop" in shown
    assert "shared" in shown
    assert not any(key in shown for key in keys)


def test_a_revoked_key_is_none(tmp_path: Path) -> None:
    key = baton("create", "laptop", state=tmp_path).stdout.strip()
    assert baton("revoke", "laptop", state=tmp_path).exit_code == 0
    assert Keys((), files(tmp_path)).salt_of(key) is None
    assert json.loads(baton("list", "--json", state=tmp_path).stdout) == []
    assert "baton key create" in baton("list", state=tmp_path).stderr


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("create", "laptop"), "key_name_taken"),
        (("create", "a/b"), "key_name_invalid"),
        (("revoke", "desk"), "key_unknown"),
    ],
)
def test_a_name_that_will_not_do_is_told(
    tmp_path: Path, args: tuple[str, str], reason: str
) -> None:
    baton("create", "laptop", state=tmp_path)
    refused = baton(*args, state=tmp_path)
    assert isinstance(refused.exception, ConfigError)
    assert refused.exception.reason == reason
    assert [key.name for key in files(tmp_path).all()] == ["laptop"]
