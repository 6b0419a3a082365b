"""Settings in a file: the same options, checked by the same parser, and no others."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from app import cli, settings
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


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes the table serve of the file that is read where none is named."""
    path = tmp_path / "config.toml"
    monkeypatch.setattr(settings, "default_path", lambda: path)
    return lambda text: written(path, f"[serve]\n{text}")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ('model = "m"\nlane = "remote"', None),
        ('state-dir = "s"\nsecrets = "file"', None),
        ("port = 9000", "http://127.0.0.1:9000"),
        ('host = "0.0.0.0"', "https://127.0.0.1:8000"),
        ('host = "::1"\nport = 1', "http://[::1]:1"),
        ('port = 1\ntls-cert = "c"', "https://127.0.0.1:1"),
        ('tls-cert = "c"', "https://127.0.0.1:8000"),
        ('port = "9000"', "http://127.0.0.1:9000"),
        ('port = "9_000"', "http://127.0.0.1:9000"),
        ('no-disk = true\nallow-host = ["a", "b"]', None),
    ],
)
def test_where_the_decoder_listens_is_known_by_it(
    text: str, found: str | None, says: Callable[[str], Path]
) -> None:
    says(text)
    assert settings.decoders_url() == found


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('port = "x"', "port"),
        ("port = true", "port"),
        ("port = 8000.5", "port"),
        ("port = [8000]", "port"),
        ("port = -1", "port"),
        ("port = 99999", "port"),
        (f'port = "{"9" * 5000}"', "port"),
        ('host = "[::1]"', "host"),
        ('host = "127.0.0.1:1/x?#"', "host"),
        ("host = true", "host"),
        ('host = ["a"]', "host"),
        ("tls-cert = true", "tls-cert"),
        ("prot = 9000", "prot"),
        ("key-fd = 3", "key-fd"),
    ],
)
def test_a_wrong_address_leads_nobody_elsewhere(
    text: str, field: str, says: Callable[[str], Path]
) -> None:
    """Not to the default address either: that would be another decoder, or nobody."""
    path = says(text)
    with pytest.raises(ConfigError) as caught:
        settings.decoders_url()
    assert (caught.value.reason, caught.value.field) == ("settings_invalid", field)
    assert str(path) in caught.value.message
    assert len(caught.value.message) < len(str(path)) + 120
    assert len(caught.value.hint or "") < 1000


def test_any_free_port_is_a_setting_and_no_address(says: Callable[[str], Path]) -> None:
    path = says("port = 0")
    assert "--port=0" in settings.arguments("serve", decoder.parser(), [])
    with pytest.raises(ConfigError) as caught:
        settings.decoders_url()
    assert (caught.value.reason, caught.value.field) == ("address_not_known", "port")
    assert str(path) in caught.value.message


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('model = ["a"]', "model"),
        ("state-dir = false", "state-dir"),
        ('secrets = "nowhere"', "secrets"),
        ('ram-max = "many"', "ram-max"),
        ('no-disk = "yes"', "no-disk"),
    ],
)
def test_a_setting_that_its_sides_parser_refuses_is_refused_where_it_is_asked_for(
    text: str, field: str, says: Callable[[str], Path]
) -> None:
    path = says(text)
    with pytest.raises(ConfigError) as caught:
        settings.named("serve", field)
    assert (caught.value.reason, caught.value.field) == ("settings_invalid", field)
    assert str(path) in caught.value.message
    # What is wrong with one is no matter of others.
    assert settings.named("serve", "cache-dir") is None
    assert settings.decoders_url() is None
    says(f'{text}\nport = 9000\ncache-dir = "c"')
    assert settings.named("serve", "cache-dir") == "c"
    assert settings.decoders_url() == "http://127.0.0.1:9000"


def test_a_key_that_is_no_setting_may_be_any_of_them_misspelt(
    says: Callable[[str], Path],
) -> None:
    says('stat-dir = "s"')
    for key in ("state-dir", "model"):
        with pytest.raises(ConfigError) as caught:
            settings.named("serve", key)
        assert (caught.value.reason, caught.value.field) == ("settings_invalid", "stat-dir")


@pytest.mark.parametrize("text", ['{} = "s"', '[serve]\n{} = "s"'])
def test_a_key_without_end_is_not_said_again(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "config.toml", text.format("k" * 30_000))
    with pytest.raises(ConfigError) as caught:
        settings.arguments("serve", decoder.parser(), ["--config", str(path)])
    assert caught.value.reason == "settings_invalid"
    assert len(str(caught.value)) < 200 + len(str(path))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where each command's settings, keys and caches are, unless another place is named."""
    for name in ("CONFIG", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path))
    (tmp_path / "baton").mkdir()
    return tmp_path


def table_serve(home: Path, text: str) -> Path:
    return written(home / "baton" / "config.toml", f"[serve]\n{text}")


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Baton = Callable[..., Done]


@pytest.fixture
def baton(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Baton:
    """`baton`, in this process."""

    def run(*words: str) -> Done:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["baton", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return run


def in_a_process(*words: str) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", *words], capture_output=True, text=True, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_they_take_their_options_from_it(home: Path, baton: Baton) -> None:
    """What is kept is kept where the decoder looks; what is typed goes before."""
    state, other = home / "state", home / "other"
    table_serve(home, f'port = 1\nstate-dir = "{state}"')
    assert baton("key", "create", "one").returncode == 0
    assert list((state / "decoder").rglob("*"))
    assert baton("key", "create", "one", "--state-dir", str(other)).returncode == 0
    assert list((other / "decoder").rglob("*"))
    assert "http://127.0.0.1:1/status" in baton("status").stderr
    table_serve(home, "[serve")
    broken = baton("node", "list")
    assert (broken.returncode, "settings_unreadable" in broken.stderr) == (78, True)


def test_an_empty_directory_is_the_usual_one_as_for_the_decoder(
    home: Path, baton: Baton, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "here").mkdir()
    monkeypatch.chdir(home / "here")
    table_serve(home, 'state-dir = ""')
    assert baton("key", "create", "one").returncode == 0
    assert list((home / "baton" / "decoder").rglob("*"))
    assert not list((home / "here").iterdir())


WRONG_ADDRESS = [
    ("port = 'x'", "settings_invalid", "port"),
    ("port = 0", "address_not_known", "port"),
    ("prot = 9000", "settings_invalid", "prot"),
]


@pytest.mark.parametrize(("text", "reason", "field"), WRONG_ADDRESS)
def test_who_needs_the_address_is_told_what_is_wrong_with_it(
    home: Path, baton: Baton, text: str, reason: str, field: str
) -> None:
    path = table_serve(home, text)
    asking = [("status",), ("dashboard", "--print"), ("node", "send", "x", "--secrets", "file")]
    told = [baton(*words) for words in asking]
    # Where Qt is missing that is said first; where it is there, it stays in its process.
    told += [in_a_process("app")] if importlib.util.find_spec("PySide6") else []
    for wrong in told:
        assert (wrong.returncode, reason in wrong.stderr) == (78, True), wrong.stderr
        assert f"field: {field}" in wrong.stderr
        assert str(path) in wrong.stderr


@pytest.mark.parametrize(("text", "reason", "field"), WRONG_ADDRESS)
def test_who_needs_nothing_of_it_goes_on(
    home: Path, baton: Baton, text: str, reason: str, field: str
) -> None:
    table_serve(home, text)
    kept = ("--state-dir", str(home / "state"))
    nobody = "127.0.0.1:9"
    for words in (
        ("plan", "--help"),
        ("node", "list", "--help"),
        ("node", "discover", "--seconds", "0"),
        ("key", "list", *kept),
        ("node", "list", *kept, "--secrets", "file"),
        ("cache", "stats", *kept, "--cache-dir", str(home / "cache")),
    ):
        done = baton(*words)
        assert (done.returncode, reason in done.stderr) == (0, False), (words, done.stderr)
    for words in (("status", nobody), ("dashboard", nobody, "--print", *kept)):
        done = baton(*words)
        assert (done.returncode, reason in done.stderr) == (1, False), (words, done.stderr)


@pytest.mark.parametrize(("text", "reason", "field"), WRONG_ADDRESS[:2])
def test_where_things_are_kept_is_known_without_the_address(
    home: Path, baton: Baton, text: str, reason: str, field: str
) -> None:
    table_serve(home, f"{text}\nstate-dir = '{home / 'state'}'\nsecrets = 'file'")
    assert baton("key", "create", "one").returncode == 0
    assert list((home / "state" / "decoder").rglob("*"))
    assert baton("node", "list").returncode == 0
    cached = baton("cache", "stats", "--json")
    assert cached.returncode == 0
    assert json.loads(cached.stdout)["source"] == "directory"
    assert reason in cached.stderr, "and that the decoder was not asked is said"


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
