"""Settings in a file: the same options, checked by the same parser, and no others."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app import settings
from app.settings import FOR_ONE_RUN, Table
from gb10_producer import config as producer
from mac_decoder import config as decoder
from protocol.errors import ConfigError

SERVE = """
[serve]
model = "/models/one two"
port = 9000
lane = "remote"
no-disk = true
share-caches = false
allow-host = ["a.local", "b.local"]
default-temperature = 0.5
served-name = "-7"
"""


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(0o644)
    return path


def served(path: Path, *given: str) -> argparse.Namespace:
    return decoder.parser().parse_args(
        settings.arguments("serve", decoder.parser(), [*given, "--config", str(path)])
    )


def test_what_the_file_says_is_as_if_it_had_been_typed(tmp_path: Path) -> None:
    found = served(written(tmp_path / "config.toml", SERVE))
    assert found.model == "/models/one two"
    assert (found.port, found.lane, found.default_temperature) == (9000, "remote", 0.5)
    assert (found.no_disk, found.share_caches) == (True, False)
    assert found.allow_host == ["a.local", "b.local"]
    assert found.served_name == "-7"
    typed = ["--model=/models/one two", "--port=9000", "--lane=remote", "--no-disk"]
    typed += ["--allow-host=a.local", "--allow-host=b.local", "--default-temperature=0.5"]
    assert found == decoder.parser().parse_args([*typed, "--served-name=-7"])


def test_the_command_line_goes_before(tmp_path: Path) -> None:
    path = written(tmp_path / "config.toml", SERVE)
    found = served(path, "--port", "1", "--allow-host=c.local", "--model", "other")
    assert (found.port, found.allow_host, found.model) == (1, ["c.local"], "other")
    assert found.lane == "remote"


def test_each_side_has_its_table(tmp_path: Path) -> None:
    path = written(tmp_path / "config.toml", SERVE + '\n[produce]\nmodel = "m"\nport = 7000\n')
    found = settings.arguments("produce", producer.parser(), [f"--config={path}"])
    assert found == ["--model=m", "--port=7000"]
    config = producer.parse(found).config
    assert (config.model, config.port) == (Path("m"), 7000)


def test_one_setting_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    monkeypatch.setattr(settings, "default_path", lambda: path)
    assert settings.named("serve", "model") is None
    written(path, SERVE)
    assert settings.named("serve", "model") == "/models/one two"
    assert settings.named("serve", "port") == "9000"
    assert settings.named("serve", "no-disk") is None, "nothing is typed behind it"
    assert settings.named("produce", "model") is None
    written(path, "[serve")
    with pytest.raises(ConfigError):
        settings.named("serve", "model")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ('model = "m"\nlane = "remote"', {}),
        ('state-dir = "s"\nsecrets = "file"', {"state_dir": "s", "secrets": "file"}),
        ("port = 9000", {"url": "http://127.0.0.1:9000"}),
        ('host = "0.0.0.0"', {"url": "https://127.0.0.1:8000"}),
        ('host = "::1"\nport = 1', {"url": "http://[::1]:1"}),
        ('port = 1\ntls-cert = "c"', {"url": "https://127.0.0.1:1"}),
        ('port = "9000"', {"url": "http://127.0.0.1:9000"}),
        ("state-dir = 5", {"state_dir": "5"}),
        ('no-disk = true\nallow-host = ["a", "b"]', {}),
    ],
)
def test_other_commands_know_the_decoder_by_it(
    text: str, found: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "config.toml", f"[serve]\n{text}")
    monkeypatch.setattr(settings, "default_path", lambda: path)
    assert settings.of_the_decoder() == found


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('port = "x"', "port"),
        ("port = true", "port"),
        ("port = 8000.5", "port"),
        ("port = [8000]", "port"),
        ("port = 0", "port"),
        ("port = -1", "port"),
        ("port = 99999", "port"),
        (f'port = "{"9" * 5000}"', "port"),
        ('host = "[::1]"', "host"),
        ('host = "127.0.0.1:1/x?#"', "host"),
        ("host = true", "host"),
        ('host = ["a"]', "host"),
        ("prot = 9000", "prot"),
        ("state-dir = false", "state-dir"),
        ('secrets = "nowhere"', "secrets"),
        ('no-disk = "yes"', "no-disk"),
        ('ram-max = "many"', "ram-max"),
        ('model = ["a"]', "model"),
    ],
)
def test_what_the_decoder_would_refuse_leads_nobody_elsewhere(
    text: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to the default address either: that would be another decoder, or nobody."""
    path = written(tmp_path / "config.toml", f"[serve]\n{text}")
    monkeypatch.setattr(settings, "default_path", lambda: path)
    with pytest.raises(ConfigError) as caught:
        settings.of_the_decoder()
    assert (caught.value.reason, caught.value.field) == ("settings_invalid", field)
    assert str(path) in caught.value.message
    assert len(caught.value.message) < len(str(path)) + 120
    if field not in ("port", "host"):
        with pytest.raises(ConfigError):
            settings.named("serve", "model")


def test_they_take_their_options_from_it(tmp_path: Path) -> None:
    """What is kept is kept where the decoder looks; what is typed goes before."""
    home, state, other = tmp_path / "home", tmp_path / "state", tmp_path / "other"
    (home / "baton").mkdir(parents=True)
    written(home / "baton" / "config.toml", f'[serve]\nport = 1\nstate-dir = "{state}"')

    def baton(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "app.cli", *words],
            capture_output=True,
            text=True,
            env=os.environ | {"XDG_CONFIG_HOME": str(home), "HOME": str(home)},
        )

    assert baton("key", "create", "one").returncode == 0
    assert list((state / "decoder").rglob("*"))
    assert baton("key", "create", "one", "--state-dir", str(other)).returncode == 0
    assert list((other / "decoder").rglob("*"))
    assert "http://127.0.0.1:1/status" in baton("status").stderr
    written(home / "baton" / "config.toml", "[serve")
    broken = baton("node", "list")
    assert (broken.returncode, "settings_unreadable" in broken.stderr) == (78, True)
    written(home / "baton" / "config.toml", "[serve]\nport = 'x'")
    asking = [("status",), ("dashboard", "--print"), ("node", "list")]
    # Where Qt is missing that is said first.
    asking += [("app",)] if importlib.util.find_spec("PySide6") else []
    for words in asking:
        wrong = baton(*words)
        assert (wrong.returncode, "settings_invalid" in wrong.stderr) == (78, True), wrong.stderr
        assert "field: port" in wrong.stderr
        assert str(home / "baton" / "config.toml") in wrong.stderr
    assert baton("plan", "--help").returncode == 0
    assert baton("node", "list", "--help").returncode == 0


def test_without_a_file_there_are_no_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "default_path", lambda: tmp_path / "config.toml")
    given = ["--model", "m"]
    assert settings.arguments("serve", decoder.parser(), given) == given
    written(tmp_path / "config.toml", SERVE)
    assert "--port=9000" in settings.arguments("serve", decoder.parser(), given)
    # Help is help, whatever the file says.
    written(tmp_path / "config.toml", "nonsense")
    assert settings.arguments("serve", decoder.parser(), ["--help"]) == ["--help"]


@pytest.mark.parametrize(
    ("text", "reason", "field"),
    [
        (b"\xff\xfe", "settings_unreadable", "config"),
        ("model = ", "settings_unreadable", "config"),
        ("model = " + "[" * 30_000, "settings_unreadable", "config"),
        ("port = " + "1" * 5_000, "settings_unreadable", "config"),
        ("#" * (settings.MAX_BYTES + 1), "settings_unreadable", "config"),
        ("[server]\n", "settings_invalid", "server"),
        ("model = 'm'\n", "settings_invalid", "model"),
        ("[serve]\nmodels = 'm'\n", "settings_invalid", "models"),
        ("[serve]\nkey-fd = 3\n", "settings_invalid", "key-fd"),
        ("[serve]\nport = true\n", "settings_invalid", "port"),
        ("[serve]\nport = [1, 2]\n", "settings_invalid", "port"),
        ("[serve]\nport = 2020-01-01\n", "settings_invalid", "port"),
        ("[serve]\nno-disk = 'yes'\n", "settings_invalid", "no-disk"),
        ("[serve]\nallow-host = [['a']]\n", "settings_invalid", "allow-host"),
        ("[serve.port]\n", "settings_invalid", "port"),
        ("serve = 3\n", "settings_invalid", "serve"),
    ],
)
def test_what_is_no_setting_is_refused(
    text: str | bytes, reason: str, field: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        served(written(tmp_path / "config.toml", text))
    assert (caught.value.reason, caught.value.field) == (reason, field)


def test_a_file_that_others_may_write_to_says_nothing_here(tmp_path: Path) -> None:
    path = written(tmp_path / "config.toml", SERVE)
    for mode in (0o664, 0o646):
        path.chmod(mode)
        with pytest.raises(ConfigError) as caught:
            served(path)
        assert caught.value.reason == "settings_exposed"
    path.chmod(0o600)
    assert served(path).port == 9000


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(ConfigError) as caught:
        settings.arguments("serve", decoder.parser(), ["--config", str(tmp_path / "config.toml")])
    assert caught.value.reason == "settings_unreadable"


def test_a_file_that_was_named_has_to_be_there(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "none", "settings_missing"),
        (tmp_path, "settings_unreadable"),
    ):
        with pytest.raises(ConfigError) as caught:
            served(path)
        assert caught.value.reason == reason
    with pytest.raises(ConfigError) as caught:
        settings.arguments("serve", decoder.parser(), ["--config"])
    assert caught.value.reason == "settings_invalid"


@pytest.mark.parametrize(
    ("table", "parser"), [("serve", decoder.parser), ("produce", producer.parser)]
)
def test_every_lasting_option_can_be_set_and_no_secret(
    table: Table, parser: Callable[[], argparse.ArgumentParser], tmp_path: Path
) -> None:
    """Each option is a setting, or known to be for one run."""
    seen = 0
    for action in parser()._actions:
        for option in action.option_strings:
            if not option.startswith("--"):
                continue
            key = option[2:]
            value = "true" if action.nargs == 0 else '"x"'
            path = written(tmp_path / "config.toml", f"[{table}]\n{key} = {value}\n")
            given = [f"--config={path}"]
            if key in FOR_ONE_RUN:
                with pytest.raises(ConfigError):
                    settings.arguments(table, parser(), given)
                continue
            word = f"--{key}" if action.nargs == 0 else f"--{key}=x"
            assert settings.arguments(table, parser(), given) == [word]
            seen += 1
    assert seen > 15


@pytest.mark.parametrize("command", ["serve", "produce"])
def test_the_commands_read_it(command: str, tmp_path: Path) -> None:
    """In processes of their own: both sides set up the logging of theirs."""

    def refused(text: str) -> str:
        path = written(tmp_path / "config.toml", text)
        words = [Path(sys.executable).with_name("baton"), command, "--config", path]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert done.returncode == 78
        return done.stderr

    kept = f"state-dir = '{tmp_path}'\nhost = '127.0.0.1'\nport = 0\n"
    assert "nowhere" in refused(f"[{command}]\nmodel = '{tmp_path / 'nowhere'}'\n{kept}")
    assert "settings_invalid" in refused(f"[{command}]\nmodle = 'm'\n")
