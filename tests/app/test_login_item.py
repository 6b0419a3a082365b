"""Launch at login, on macOS and on Linux; on any system."""

from __future__ import annotations

import plistlib
import sys
from pathlib import Path

import pytest

from app import app_bundle, desktop_entry, login_item
from protocol.errors import ConfigError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home dir"
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CONFIG_HOME", "BATON_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    return home


def put_bundle(home: Path) -> Path:
    bundle = app_bundle.path(home)
    (bundle / "Contents").mkdir(parents=True)
    information = app_bundle.information("1", "script")
    (bundle / "Contents" / "Info.plist").write_bytes(plistlib.dumps(information))
    return bundle


def test_on_macos_launch_services_opens_the_bundle(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    bundle = put_bundle(home)
    assert not login_item.installed()
    file = login_item.install()
    assert file == home / "Library" / "LaunchAgents" / "llm.baton.login.plist"
    assert plistlib.loads(file.read_bytes()) == {
        "Label": "llm.baton.login",
        "ProgramArguments": ["/usr/bin/open", "-g", "-a", str(bundle)],
        "RunAtLoad": True,
        "LimitLoadToSessionType": "Aqua",
        "AssociatedBundleIdentifiers": ["llm.baton.app"],
    }
    assert login_item.installed()
    login_item.install()
    assert login_item.remove() == file
    assert not login_item.installed()
    assert login_item.remove() is None


def test_on_macos_a_build_that_lies_elsewhere_opens_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    elsewhere = tmp_path / "Applications" / "Baton.app"
    elsewhere.mkdir(parents=True)
    monkeypatch.setenv("BATON_BUNDLE", str(elsewhere))
    agent = plistlib.loads(login_item.install().read_bytes())
    assert agent["ProgramArguments"][-1] == str(elsewhere)
    elsewhere.rmdir()
    with pytest.raises(ConfigError):
        login_item.install()


def test_on_macos_there_must_be_something_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError) as refused:
        login_item.install()
    assert (refused.value.reason, refused.value.hint) == (
        "bundle_missing",
        "baton app --install",
    )
    assert not login_item.installed()


def test_on_linux_the_desktop_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert not login_item.installed()
    file = login_item.install()
    assert file == desktop_entry.place("autostart")
    assert file.read_text() == desktop_entry.entry(login_item.COMMAND, "autostart")
    assert login_item.installed()
    assert login_item.remove() == file
    assert login_item.remove() is None


def test_elsewhere_there_is_no_login_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "freebsd14")
    for ask in (login_item.installed, login_item.install, login_item.remove):
        with pytest.raises(ConfigError) as refused:
            ask()
        assert refused.value.reason == "service_manager_missing"


def test_what_is_run_does_not_depend_on_the_working_directory() -> None:
    assert (sys.executable, "-P", "-m", "app.cli", "app") == login_item.COMMAND
