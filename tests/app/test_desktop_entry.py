"""Desktop entries and icons: read back by the specification's rules, and by its own checker."""

from __future__ import annotations

import configparser
import os
import shutil
import stat
import struct
import subprocess
from pathlib import Path

import pytest

from app import desktop_entry
from app.desktop_entry import Kind
from protocol.errors import ConfigError

COMMAND = ("/venv/bin/python", "-P", "-m", "app.cli", "app")
AWKWARD = (
    "/a b/python",
    "100%",
    'say "x"',
    "$HOME",
    "`id`",
    "back\\slash",
    "a;b&c|d<e>f*?#()~",
    "",
)
KINDS: tuple[Kind, Kind] = ("application", "autostart")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    return home


def read(text: str) -> dict[str, str]:
    parser = configparser.RawConfigParser(delimiters="=", strict=True)
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read_string(text)
    assert parser.sections() == ["Desktop Entry"]
    return dict(parser["Desktop Entry"])


def words_of(value: str) -> list[str]:
    """The words of ``Exec``, by the specification: the text's escapes first, then the quotes."""
    escapes = {"s": " ", "n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    text, at = "", 0
    while at < len(value):
        if value[at] == "\\":
            at += 1
            text += escapes[value[at]]
        else:
            text += value[at]
        at += 1
    words: list[str] = []
    word: str | None = None
    inside = False
    at = 0
    while at < len(text):
        one = text[at]
        if inside and one == "\\":
            at += 1
            assert text[at] in '"`$\\'
            word = (word or "") + text[at]
        elif one == '"':
            inside, word = not inside, word or ""
        elif one == " " and not inside:
            if word is not None:
                words.append(word)
            word = None
        else:
            assert inside or one not in "\t\n\"'\\><~|&;$*?#()`"
            assert one != "%" or text[at : at + 2] == "%%", "a field code"
            at += one == "%"
            word = (word or "") + one
        at += 1
    assert not inside
    return words if word is None else [*words, word]


def test_the_entry_of_the_menu_is_this() -> None:
    found = read(desktop_entry.entry(COMMAND, "application"))
    assert found == {
        "Type": "Application",
        "Version": "1.4",
        "Name": "Baton",
        "GenericName": "Language model server",
        "Comment": "Prefill on an NVIDIA machine, decode here",
        "Exec": "/venv/bin/python -P -m app.cli app",
        "Icon": "llm.baton.app",
        "Terminal": "false",
        "StartupNotify": "false",
        "Categories": "Utility;",
        "Keywords": "LLM;OpenAI;chat;model;",
    }


def test_the_entry_of_a_login_says_that_it_counts() -> None:
    found = read(desktop_entry.entry(COMMAND, "autostart"))
    assert found["X-GNOME-Autostart-enabled"] == "true"
    assert "Categories" not in found


def test_any_printable_word_is_read_back_as_it_was() -> None:
    for kind in KINDS:
        assert words_of(read(desktop_entry.entry(AWKWARD, kind))["Exec"]) == [*AWKWARD]


@pytest.mark.parametrize("words", [("/a=b/python",), ("/python", "a\nb"), ("/\udcff",)])
def test_what_no_entry_can_hold_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        desktop_entry.entry(words, "application")
    assert refused.value.reason == "app_path_unusable"
    assert "Exec=/python a=b\n" in desktop_entry.entry(("/python", "a=b"), "application").replace(
        '"', ""
    )


@pytest.mark.skipif(
    shutil.which("desktop-file-validate") is None, reason="desktop-file-utils is not installed"
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_desktops_own_checker_finds_nothing(kind: Kind, tmp_path: Path) -> None:
    file = tmp_path / desktop_entry.FILE_NAME
    file.write_text(desktop_entry.entry(AWKWARD, kind))
    done = subprocess.run(["desktop-file-validate", file], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_places_are_those_of_the_base_directories(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert desktop_entry.place("application") == home / ".local/share/applications/baton.desktop"
    assert desktop_entry.place("autostart") == home / ".config/autostart/baton.desktop"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", "not/absolute")
    assert desktop_entry.place("application") == tmp_path / "data/applications/baton.desktop"
    assert desktop_entry.place("autostart") == home / ".config/autostart/baton.desktop"


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_put_once_replaced_where_it_differs_and_taken_away(kind: Kind) -> None:
    assert not desktop_entry.stands(kind)
    file = desktop_entry.put(("/old/python",), kind)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    desktop_entry.put(COMMAND, kind)
    assert file.read_text() == desktop_entry.entry(COMMAND, kind)
    assert desktop_entry.stands(kind)
    before = file.stat().st_ino
    desktop_entry.put(COMMAND, kind)
    assert file.stat().st_ino == before, "what is right is not written"
    assert os.listdir(file.parent) == [file.name]
    assert desktop_entry.take_away(kind) == file
    assert desktop_entry.take_away(kind) is None
    assert not desktop_entry.stands(kind)


@pytest.mark.parametrize("content", [b"[Desktop Entry]\nName=Baton\n", b"", b"\xff\xfe"])
def test_somebody_elses_entry_stays(content: bytes) -> None:
    file = desktop_entry.place("application")
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        desktop_entry.put(COMMAND, "application")
    assert refused.value.reason == "app_not_ours"
    assert desktop_entry.take_away("application") is None
    assert file.read_bytes() == content
    assert not desktop_entry.stands("application")


@pytest.mark.parametrize("line", ["Hidden=true", "X-GNOME-Autostart-enabled=false"])
def test_one_that_the_user_switched_off_does_not_stand(line: str) -> None:
    file = desktop_entry.put(COMMAND, "autostart")
    name = line.partition("=")[0]
    kept = [one for one in file.read_text().splitlines() if not one.startswith(name)]
    file.write_text("\n".join([*kept, line, ""]))
    assert not desktop_entry.stands("autostart")
    desktop_entry.put(COMMAND, "autostart")
    assert desktop_entry.stands("autostart")


def test_icons_are_put_in_every_size_and_taken_away_and_the_theme_is_new(home: Path) -> None:
    desktop_entry.put_icons()
    theme = home / ".local/share/icons/hicolor"
    found = sorted(theme.rglob("*.png"))
    assert len(found) == len(desktop_entry.SIZES)
    for file in found:
        width = struct.unpack_from(">I", file.read_bytes(), 16)[0]
        assert file == theme / f"{width}x{width}" / "apps" / "llm.baton.app.png"
    os.utime(theme, (0, 0))
    desktop_entry.take_icons_away()
    assert [*theme.rglob("*.png")] == []
    assert theme.stat().st_mtime > 0
    desktop_entry.take_icons_away()


def test_another_programs_icon_of_the_name_baton_stays(home: Path) -> None:
    theirs = home / ".local/share/icons/hicolor/48x48/apps/baton.png"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"a conductor's")
    desktop_entry.put_icons()
    assert theirs.read_bytes() == b"a conductor's"
    desktop_entry.take_icons_away()
    assert theirs.read_bytes() == b"a conductor's"


def test_where_nothing_can_be_written_the_refusal_says_so(home: Path) -> None:
    home.mkdir()
    (home / ".local").write_text("a file")
    with pytest.raises(ConfigError) as refused:
        desktop_entry.put(COMMAND, "application")
    assert refused.value.reason == "app_unwritable"
