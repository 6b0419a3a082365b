"""`baton app --install` and `--uninstall`: all that they put and take away; on any system."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from app import app_bundle, app_install, desktop_entry, login_item
from tests.app.fake_tools import put_on_path

COMPILES = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo x > "$2"; shift; done'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return home


def files_in(home: Path) -> list[str]:
    return sorted(str(file.relative_to(home)) for file in home.rglob("*") if file.is_file())


def test_on_linux_it_is_in_the_menu_and_opens_at_login(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    app_install.install()
    said = capsys.readouterr().out.replace("\n", "")
    for kind in ("application", "autostart"):
        assert str(desktop_entry.place(kind)) in said
    assert "llm.baton.app.png of 5 sizes" in said
    icons = [
        f".local/share/icons/hicolor/{n}x{n}/apps/llm.baton.app.png" for n in desktop_entry.SIZES
    ]
    entries = [".config/autostart/baton.desktop", ".local/share/applications/baton.desktop"]
    assert files_in(home) == sorted([*entries, *icons])
    app_install.install()
    assert files_in(home) == sorted([*entries, *icons])
    app_install.uninstall()
    assert files_in(home) == []
    assert "does not open at login" in capsys.readouterr().out
    app_install.uninstall()
    assert capsys.readouterr().out == "Baton was not among the applications\n"


def test_on_macos_the_bundle_opens_now_and_at_login(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/conf")
    bodies = {"xcode-select": "", "cc": COMPILES, "codesign": "", "open": ""}
    tools = put_on_path(tmp_path / "bin", monkeypatch, **bodies)
    app_install.install()
    bundle = app_bundle.path(home)
    assert app_bundle.ours(bundle)
    assert login_item.installed()
    assert tools["open"].calls == [f"-g -a {bundle}"]
    told = capsys.readouterr()
    assert str(login_item.agent_file(home)) in told.out.replace("\n", "")
    assert "Local Network" in told.err
    command = (bundle / "Contents" / "Resources" / "command").read_text().splitlines()
    assert "env XDG_CONFIG_HOME=/conf" in command
    assert "env PYTHONSAFEPATH=1" in command
    assert command[-5:] == [f"arg {word}" for word in login_item.COMMAND]
    tools["open"].becomes("echo 'no screen' >&2; exit 1")
    app_install.install()
    assert "(no screen)" in capsys.readouterr().err.replace("\n", " ")
    app_install.uninstall()
    assert files_in(home) == []
