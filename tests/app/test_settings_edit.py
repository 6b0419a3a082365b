"""Changing one setting in a file: what it said otherwise stays, to the last comment."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from app import settings
from app.settings_edit import edited, put
from protocol.errors import ConfigError

FULL = """\
# Mine; do not touch.
[produce]   # the other side
port = 9000

[serve]
# where it listens
port    = 8_123     # not 8000
model   = "/old" # the small one
no-disk = true
"""


def test_comments_order_and_spacing_stay() -> None:
    assert edited(FULL, "serve", "model", "/new dir") == FULL.replace('"/old"', '"/new dir"')


def test_a_missing_key_table_or_file_is_added() -> None:
    without = FULL.replace('model   = "/old" # the small one\n', "")
    made = edited(without, "serve", "model", "/new")
    assert made.startswith(without)
    assert tomllib.loads(made)["serve"] == {"port": 8123, "no-disk": True, "model": "/new"}
    alone = FULL[: FULL.index("[serve]")]
    made = edited(alone, "serve", "model", "/new")
    assert made.startswith(alone)
    assert tomllib.loads(made)["serve"] == {"model": "/new"}
    assert tomllib.loads(edited("", "serve", "model", "/new")) == {"serve": {"model": "/new"}}


@pytest.mark.parametrize("text", ["serve.port = 1\n", "serve = { port = 1 }\n", "serve = {}\n"])
def test_other_ways_to_write_a_table_are_understood(text: str) -> None:
    before = tomllib.loads(text)
    said = tomllib.loads(edited(text, "serve", "model", "/new"))
    assert said == {"serve": {**before["serve"], "model": "/new"}}


DOTTED = """\
serve.port = 8123  # not 8000
produce.port = 9000
serve.model = "/old" # the small one
"""


def test_dotted_keys_stay_dotted() -> None:
    assert edited(DOTTED, "serve", "model", "/new") == DOTTED.replace("/old", "/new")
    without = "".join(line for line in DOTTED.splitlines(True) if "model" not in line)
    made = edited(without, "serve", "model", "/new")
    assert [line for line in made.splitlines() if "model" not in line] == without.splitlines()
    assert "[serve]" not in made
    assert tomllib.loads(made)["serve"] == {"port": 8123, "model": "/new"}


_LINES = {
    "dotted": ["serve.port = 1", "serve.no-disk = true # mine", 'serve.model = "/old"'],
    "others": ["produce.port = 2", "# a comment", ""],
}


@given(
    st.permutations(_LINES["dotted"] + _LINES["others"]).flatmap(
        lambda lines: st.integers(0, len(lines)).map(lambda count: lines[:count])
    ),
    st.sampled_from(["", "[produce.more]\n", "[more]\nserve = 1\n", "[serve.more]\nx = 1\n"]),
)
def test_whatever_the_order_everything_else_stays(lines: list[str], after: str) -> None:
    text = "".join(f"{line}\n" for line in lines) + after
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        reject()
    made = edited(text, "serve", "model", "/new")
    said = tomllib.loads(made)
    assert said == {**found, "serve": {**found.get("serve", {}), "model": "/new"}}
    kept = [line for line in text.splitlines() if "model" not in line and line]
    assert [line for line in made.splitlines() if line in kept] == kept


def test_what_is_no_table_is_refused() -> None:
    for text in ("serve = 3\n", "[[serve]]\nport = 1\n"):
        with pytest.raises(ConfigError) as refused:
            edited(text, "serve", "model", "/new")
        assert refused.value.reason == "settings_unwritable"
        assert "is no table" in refused.value.message


@given(
    value=st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), max_size=40).filter(
        str.isprintable
    ),
    port=st.none() | st.integers(1, 65535),
)
def test_any_path_is_read_back_as_it_was(value: str, port: int | None) -> None:
    text = "" if port is None else f"[serve]\nport = {port}\n"
    said = tomllib.loads(edited(text, "serve", "model", value))
    expected = {"model": value} if port is None else {"port": port, "model": value}
    assert said == {"serve": expected}


def test_what_is_no_text_of_a_path_or_no_toml_is_refused() -> None:
    for value in ("/a\nb", "/\udcff"):
        with pytest.raises(ConfigError) as refused:
            edited("", "serve", "model", value)
        assert refused.value.reason == "settings_unwritable"
    for text in ("[serve", "[serve]\nport = 1\nport = 2\n"):
        with pytest.raises(ConfigError) as refused:
            edited(text, "serve", "model", "/new")
        assert refused.value.reason == "settings_unreadable"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "conf" / "config.toml"
    monkeypatch.setattr(settings, "default_path", lambda: file)
    return file


def test_a_new_file_is_private_and_what_it_says_is_read(file: Path) -> None:
    assert put("serve", "model", "/m") == file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert settings.named("serve", "model") == "/m"
    assert os.listdir(file.parent) == ["config.toml"]


def test_a_file_keeps_its_mode_and_a_link_stays_one(file: Path, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.toml"
    real.write_text(FULL)
    real.chmod(0o640)
    file.parent.mkdir()
    file.symlink_to(real)
    put("serve", "model", "/new")
    assert file.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert real.read_text() == FULL.replace("/old", "/new")


def test_what_cannot_be_read_or_written_stays_as_it_is(file: Path) -> None:
    file.parent.mkdir()
    for content, mode, reason in (
        (FULL, 0o666, "settings_exposed"),
        ("[serve", 0o600, "settings_unreadable"),
        ("[other]\n", 0o600, "settings_invalid"),
        ("serve = 3\n", 0o600, "settings_invalid"),
    ):
        file.write_text(content)
        file.chmod(mode)
        with pytest.raises(ConfigError) as refused:
            put("serve", "model", "/new")
        assert refused.value.reason == reason
        assert file.read_text() == content
        file.unlink()
    file.parent.rmdir()
    file.parent.write_text("a file")
    with pytest.raises(ConfigError) as refused:
        put("serve", "model", "/new")
    assert refused.value.reason in ("settings_unwritable", "settings_unreadable")


def test_a_file_that_would_be_too_long_to_be_read_is_not_written(file: Path) -> None:
    file.parent.mkdir()
    line = 'model = "/new"\n'
    most = settings.MAX_BYTES - len("[serve]\n") - len(line) - len("#\n")
    file.write_text(f"#{'x' * most}\n[serve]\n")
    put("serve", "model", "/new")
    assert file.stat().st_size == settings.MAX_BYTES
    assert settings.named("serve", "model") == "/new"
    whole = file.read_text()
    with pytest.raises(ConfigError) as refused:
        put("serve", "model", "/newer")
    assert refused.value.reason == "settings_unwritable"
    assert str(settings.MAX_BYTES) in refused.value.message
    assert refused.value.hint is not None
    assert "shorter" in refused.value.hint
    assert file.read_text() == whole
    assert os.listdir(file.parent) == ["config.toml"]
