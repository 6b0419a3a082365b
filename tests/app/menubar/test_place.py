"""Where the decoder is: by the settings, by its service, by the command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.menubar.place import Given, Place, has_model, settings_now
from mac_decoder.api import tls
from protocol.errors import ConfigError
from tests.patience import soon


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def says(home: Path, *lines: str) -> None:
    file = home / "config" / "baton" / "config.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(["[serve]", *lines, ""]))


def test_without_settings_it_is_where_it_is_by_default() -> None:
    place = Given().place()
    assert (place.url, place.key) == ("http://127.0.0.1:8000", None)
    assert place.stream == "ws://127.0.0.1:8000/status/stream"
    assert place.context() is None
    assert not has_model()


def test_the_settings_are_read_each_time(home: Path) -> None:
    given = Given()
    says(home, "port = 8123", 'model = "m"')
    assert given.place().url == "http://127.0.0.1:8123"
    assert has_model()
    says(home, "port = 8124")
    assert given.place().url == "http://127.0.0.1:8124"
    assert not has_model()


def test_a_service_goes_before_the_settings_that_it_was_not_installed_with(home: Path) -> None:
    says(home, "port = 8123", 'state-dir = "/other"')
    given = Given(service=("--model=/m", "--port=9001", "--state-dir=/its"))
    assert given.place().url == "http://127.0.0.1:9001"
    assert given.state_dir() == "/its"
    assert Given(service=("--model=/m", "--host=0.0.0.0")).place().url == "https://127.0.0.1:8000"


def test_what_the_command_line_says_goes_before_all() -> None:
    given = Given("desk.local:9002", service=("--port=9001",))
    assert given.place() == Place("http://desk.local:9002")


def test_a_key_is_taken_from_its_file(home: Path) -> None:
    file = home / "keys"
    file.write_text("baton-one\nbaton-two\n")
    says(home, f'api-keys-file = "{file}"')
    place = Given().place()
    assert place.key == "baton-one"
    assert "baton-one" not in repr(place)
    other = home / "other"
    other.write_text("baton-three\n")
    assert Given(api_keys_file=other).place().key == "baton-three"
    with pytest.raises(ConfigError) as refused:
        Given(api_keys_file=home / "none").place()
    assert refused.value.reason == "api_keys_invalid"
    other.write_text("schlüssel\n")
    with pytest.raises(ConfigError) as refused:
        Given(api_keys_file=other).place()
    assert refused.value.reason == "api_keys_invalid"


def test_this_machines_decoder_shows_its_own_certificate_and_another_one_an_authoritys(
    home: Path,
) -> None:
    own = tls.own(home / "state" / "baton" / "decoder", ["localhost"])
    says(home, 'host = "0.0.0.0"')
    place = Given().place()
    assert place.url == "https://127.0.0.1:8000"
    assert place.certificate == own.path
    assert place.context() is not None
    assert Given("https://127.0.0.1:9000").place().certificate == own.path
    assert Given("https://desk.local:9000").place().certificate is None
    says(home, 'host = "0.0.0.0"', 'tls-cert = "/given.pem"')
    assert Given().place().certificate == Path("/given.pem")


def test_a_certificate_that_is_not_there_cannot_be_believed(home: Path) -> None:
    says(home, 'host = "0.0.0.0"')
    with pytest.raises(ConfigError) as refused:
        Given().place().context()
    assert refused.value.reason == "certificate_missing"
    file = tls.shown(home / "state" / "baton" / "decoder")
    file.parent.mkdir(parents=True)
    file.write_text("no certificate")
    with pytest.raises(ConfigError) as refused:
        Given().place().context()
    assert refused.value.reason == "certificate_unusable"


def test_settings_that_others_may_write_are_refused(home: Path) -> None:
    says(home, "port = 8123")
    (home / "config" / "baton" / "config.toml").chmod(0o666)
    with pytest.raises(ConfigError) as refused:
        Given().place()
    assert refused.value.reason == "settings_exposed"


def test_what_lies_there_and_is_no_file_is_not_waited_for(home: Path) -> None:
    """Pipes that nobody writes to, and what has no end."""
    pipe, zeros = home / "pipe", Path("/dev/zero")
    os.mkfifo(pipe)
    for wrong in (pipe, zeros):
        says(home, 'host = "0.0.0.0"', f'tls-cert = "{wrong}"')
        with soon(), pytest.raises(ConfigError) as refused:
            Given().place().context()
        assert refused.value.reason == "certificate_unusable"
        says(home, f'api-keys-file = "{wrong}"')
        with soon(), pytest.raises(ConfigError) as refused:
            Given().place()
        assert refused.value.reason == "api_keys_invalid"
    file = home / "config" / "baton" / "config.toml"
    file.unlink()
    os.mkfifo(file)
    with soon():
        assert settings_now() == b""
        with pytest.raises(ConfigError) as refused:
            Given().place()
    assert refused.value.reason == "settings_unreadable"


def test_settings_that_are_wrong_lead_to_no_other_decoder(home: Path) -> None:
    for line, reason, field in (
        ('port = "x"', "settings_invalid", "port"),
        ("prot = 8123", "settings_invalid", "prot"),
        ("port = 0", "address_not_known", "port"),
    ):
        says(home, line)
        with pytest.raises(ConfigError) as refused:
            Given().place()
        assert (refused.value.reason, refused.value.field) == (reason, field)
        assert "config.toml" in refused.value.message
        # Nothing of the file is needed for one that was named.
        assert Given("http://127.0.0.1:9000").place() == Place("http://127.0.0.1:9000")
    says(home, "host = 1.5")
    assert Given().place().url == "https://1.5:8000", "as it would be typed"


def test_what_is_wrong_with_other_settings_is_no_matter_of_the_address(home: Path) -> None:
    says(home, "port = 8123", 'ram-max = "many"', "max-concurrent = -3")
    assert Given().place().url == "http://127.0.0.1:8123"


def test_this_machines_key_is_shown_to_no_decoder_that_was_named(home: Path) -> None:
    file = home / "keys"
    file.write_text("baton-one\n")
    says(home, f'api-keys-file = "{file}"')
    assert Given().place().key == "baton-one"
    assert Given("desk.local:9002").place().key is None
    service = (f"--api-keys-file={file}",)
    assert Given("desk.local:9002", service=service).place().key is None
    assert Given("desk.local:9002", file).place().key == "baton-one"
