"""`baton serve --install` and `baton produce --install`, as they are typed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app import install
from app.commands import app
from gb10_producer.trust import make_pairing
from protocol.errors import ConfigError
from tests.app.fake_tools import FakeTool, put_on_path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fake is of systemd")


def baton(*words: str) -> Result:
    return CliRunner().invoke(app, words)


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTool:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(install, "SETTLE_S", 0)
    answers = """
case "$*" in
*UnitPath*) echo /etc/systemd/user;;
*ActiveState*) echo ActiveState=active;;
esac
"""
    return put_on_path(tmp_path / "bin", monkeypatch, systemctl=answers, loginctl="echo no")[
        "systemctl"
    ]


def unit(tmp_path: Path, name: str) -> Path:
    return tmp_path / "home" / ".config" / "systemd" / "user" / name


def test_a_decoder_is_installed_and_removed(
    tmp_path: Path, systemctl: FakeTool, checkpoint: Callable[..., Path]
) -> None:
    model = checkpoint("llama")
    done = baton("serve", "--model", str(model), "--install", "--port", "8123")
    assert done.exit_code == 0, done.exception
    assert "baton-decoder.service is installed and runs" in done.stdout
    assert "journalctl --user" in done.stdout
    assert "systemctl --user stop baton-decoder.service" in done.stdout
    assert "baton serve --uninstall" in done.stdout
    assert "loginctl enable-linger" in done.stderr
    found = install.installed("decoder")
    assert found is not None
    assert found.arguments == (f"--model={model}", "--port=8123")
    text = found.file.read_text()
    assert f'ExecStart=":{sys.executable}" "-m" "app.decoder"' in text
    assert "PYTHONSAFEPATH=1" in text
    done = baton("serve", "--uninstall")
    assert done.exit_code == 0
    assert "baton-decoder.service is stopped and removed" in done.stdout
    assert not unit(tmp_path, "baton-decoder.service").exists()
    assert "no service" in baton("serve", "--uninstall").stdout


def test_a_producer_is_installed_beside_it(
    tmp_path: Path, systemctl: FakeTool, checkpoint: Callable[..., Path]
) -> None:
    pairing, _ = make_pairing(tmp_path / "pairing", 1)
    given = ("--model", str(checkpoint("llama")), "--pairing", str(pairing))
    done = baton("produce", "--install", *given)
    assert done.exit_code == 0, done.exception
    found = install.installed("producer")
    assert found is not None
    assert found.arguments is not None
    assert f"{pairing}" in found.arguments
    assert install.installed("decoder") is None


def test_environment_that_chooses_files_is_kept_and_nothing_else(
    systemctl: FakeTool, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere/100% else")
    monkeypatch.setenv("MY_API_TOKEN", "sesame-open-wide")
    assert baton("serve", "--install", "--model", str(checkpoint("llama"))).exit_code == 0
    found = install.installed("decoder")
    assert found is not None
    text = found.file.read_text()
    assert '"XDG_STATE_HOME=/somewhere/100%% else"' in text
    assert "sesame" not in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("serve", "--install", "--model", "nowhere"), "model_missing"),
        (("serve", "--install", "--model", "x", "--key-fd", "3"), "option_not_for_service"),
        (("produce", "--install"), "config_invalid"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_installed(
    tmp_path: Path, systemctl: FakeTool, words: tuple[str, ...], reason: str
) -> None:
    done = baton(*words)
    assert isinstance(done.exception, ConfigError)
    assert done.exception.reason == reason
    assert not (tmp_path / "home").exists()
    assert systemctl.calls == []


@pytest.mark.parametrize("more", ["--model=x", "--install", "--pair"])
def test_uninstalling_takes_no_other_option(systemctl: FakeTool, more: str) -> None:
    done = baton("produce", more, "--uninstall")
    assert done.exit_code == 2
    assert "stands alone" in done.stderr
    assert systemctl.calls == []


def test_the_two_options_are_in_the_help_of_both_sides() -> None:
    for side in ("serve", "produce"):
        said = baton(side, "--help").stdout
        assert said.startswith(f"usage: baton {side} ")
        assert "--install" in said
        assert "--uninstall" in said


def test_a_system_without_either_manager_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "freebsd14")
    with pytest.raises(ConfigError) as refused:
        install.uninstall("decoder")
    assert refused.value.reason == "service_manager_missing"
