"""The command line: what it makes, and what it refuses with which reason."""

from __future__ import annotations

import argparse
import os

import msgspec
import pytest

from mac_decoder.api.keys import KeyFiles
from mac_decoder.config import (
    DecoderConfig,
    check,
    config_from,
    read_key,
    size,
)
from mac_decoder.endpoint import listen
from protocol.errors import EXIT_CONFIG, ConfigError
from tests.patience import soon

KEY = bytes(range(32))


def piped(content: bytes) -> int:
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    return reading


def test_defaults_serve_this_machine_alone():
    config = config_from(["--model", "m"])
    assert config == DecoderConfig(model="m")
    assert (config.host, config.lane, config.producers) == ("127.0.0.1", "auto", ())


def test_every_option_arrives(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first-key-of-all-of-them\n\n  second-key-of-all-of-them \n")
    keys.chmod(0o600)
    text = (
        "--model m --served-name n --host 0.0.0.0 --port 1 --producer wss://box:9 "
        "--pairing p --lane remote --remote-threshold 2 --max-concurrent 3 --max-waiting 4 "
        "--prefill-step 5 --memory-max 1.5GB --ram-max 2GiB --cache-dir c --cache-max 3tb "
        "--no-disk --share-caches --default-max-tokens 6 --default-temperature 0.5 "
        "--allow-host a --allow-host b --allow-origin https://c --tls-cert d --tls-key e "
        "--state-dir s --secrets keyring "
        "--log-level debug"
    )
    config = config_from([*text.split(), "--api-keys-file", str(keys)])
    assert config == DecoderConfig(
        model="m",
        served_name="n",
        host="0.0.0.0",
        port=1,
        producers=("wss://box:9",),
        pairings=("p",),
        lane="remote",
        remote_threshold=2,
        max_concurrent=3,
        max_waiting=4,
        prefill_step=5,
        cache_bytes=1_500_000_000,
        ram_max=2 << 30,
        disk=False,
        cache_dir="c",
        cache_max=3 * 10**12,
        share_caches=True,
        default_max_tokens=6,
        default_temperature=0.5,
        hosts=("a", "b"),
        origins=("https://c",),
        api_keys=("first-key-of-all-of-them", "second-key-of-all-of-them"),
        tls_cert="d",
        tls_key="e",
        state_dir="s",
        secrets="keyring",
        log_level="debug",
    )


def test_a_quantised_cache_is_refused_by_name():
    with pytest.raises(ConfigError) as caught:
        config_from(["--model", "m", "--kv-bits", "4"])
    assert (caught.value.reason, caught.value.found) == ("kv_format_unsupported", 4)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0", 0),
        ("800000", 800_000),
        ("500MB", 500_000_000),
        ("1.5 GiB", 3 << 29),
        ("2k", 2000),
        ("7b", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, found: int) -> None:
    assert size(text) == found


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "1 PB", "0x10", "1.2.3", "９MB", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        size(text)


def test_the_key_comes_through_a_pipe_that_is_closed_afterwards():
    descriptor = piped(KEY)
    args = ["--model", "m", "--producer", "ws://127.0.0.1:1", "--key-fd", str(descriptor)]
    assert config_from(args).key == KEY
    with pytest.raises(OSError):
        os.fstat(descriptor)


@pytest.mark.parametrize("content", [b"", KEY[:31], KEY + b"\n"])
def test_a_key_of_another_length_is_refused(content):
    with pytest.raises(ConfigError) as caught:
        read_key(piped(content))
    assert caught.value.reason == "key_invalid"


def test_a_descriptor_that_is_not_open_is_refused():
    with pytest.raises(ConfigError) as caught:
        read_key(987)
    assert caught.value.reason == "key_invalid"


def test_secrets_are_not_shown_and_survive_the_pipe_to_the_child():
    config = DecoderConfig(model="m", key=KEY, api_keys=("a-secret-that-is-long",))
    assert "a-secret" not in repr(config)
    assert repr(KEY) not in repr(config)
    assert msgspec.json.decode(msgspec.json.encode(config), type=DecoderConfig) == config


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"host": "0.0.0.0"}, "bind_needs_keys"),
        ({"host": "192.168.1.4"}, "bind_needs_keys"),
        ({"host": ""}, "bind_needs_keys"),
        ({"host": "::"}, "bind_needs_keys"),
        ({"host": "localhost.example"}, "bind_needs_keys"),
        ({"tls_cert": "c"}, "tls_incomplete"),
        ({"tls_key": "k"}, "tls_incomplete"),
        ({"producers": ("http://box:1",)}, "producer_url_invalid"),
        ({"producers": ("wss://",)}, "producer_url_invalid"),
        ({"producers": ("wss://:7431",), "pairings": ("p",)}, "producer_url_invalid"),
        ({"producers": ("wss://box:x",), "pairings": ("p",)}, "producer_url_invalid"),
        ({"producers": ("wss://box:70000",), "pairings": ("p",)}, "producer_url_invalid"),
        ({"producers": ("wss://box:0",), "pairings": ("p",)}, "producer_url_invalid"),
        ({"producers": ("wss://a..b:1",), "pairings": ("p",)}, "producer_url_invalid"),
        ({"producers": (f"wss://{'a' * 64}:1",), "pairings": ("p",)}, "producer_url_invalid"),
        ({"producers": ("wss://a\0b:1",), "pairings": ("p",)}, "producer_url_invalid"),
        ({"producers": ("wss://[::1:1",), "pairings": ("p",)}, "producer_url_invalid"),
        ({"producers": ("ws://box:1",), "key": KEY}, "producer_needs_tls"),
        ({"producers": ("ws://10.0.0.2:1",), "pairings": ("p",)}, "producer_needs_tls"),
        ({"producers": ("ws://127.0.0.1:1",), "pairings": ("p",)}, "producer_needs_tls"),
        ({"producers": ("wss://box:1",)}, "producer_needs_key"),
        ({"producers": ("wss://box:1",), "key": KEY}, "producer_needs_key"),
        ({"producers": ("ws://127.0.0.1:1",)}, "producer_needs_key"),
        ({"producers": ("wss://a:1", "wss://b:1"), "pairings": ("p",)}, "producer_needs_key"),
        ({"producers": ("wss://a:1", "wss://a:1"), "pairings": ("p", "q")}, "producer_repeated"),
        ({"producers": ("wss://a:1", "wss://A:1/"), "pairings": ("p", "q")}, "producer_repeated"),
        ({"pairings": ("p",)}, "producer_url_invalid"),
        ({"port": 65536}, "option_out_of_range"),
        ({"port": -1}, "option_out_of_range"),
        ({"max_concurrent": 0}, "option_out_of_range"),
        ({"remote_threshold": 0}, "option_out_of_range"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path, changes, reason):
    config = DecoderConfig(model="m", state_dir=str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        check(msgspec.structs.replace(config, **changes))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "0.0.0.0", "api_keys": ("a-key-that-is-long",)},
        {"host": "::1"},
        {"host": "localhost"},
        {"producers": ("ws://127.0.0.1:1",), "key": KEY},
        {"producers": ("ws://[::1]:1",), "key": KEY},
        {"producers": ("ws://localhost:1/",), "key": KEY},
        {"producers": ("wss://box:1",), "pairings": ("p",), "lane": "remote"},
        {"producers": ("wss://a:1", "wss://b:1"), "pairings": ("p", "q")},
    ],
)
def test_what_can_be_served(changes):
    config = msgspec.structs.replace(DecoderConfig(model="m"), **changes)
    assert check(config) is config


def test_others_are_let_in_where_there_is_a_key_for_them(tmp_path):
    config = DecoderConfig(model="m", host="0.0.0.0", state_dir=str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert f"baton key create NAME --state-dir {tmp_path}" in str(caught.value.hint)
    files = KeyFiles(config.state_path)
    files.create("laptop")
    assert check(config) is config
    files.revoke("laptop")
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert caught.value.reason == "bind_needs_keys"


@pytest.mark.parametrize(
    ("changes", "demanded", "secured", "names"),
    [
        ({}, False, False, ()),
        ({"hosts": ("desk",)}, False, False, ("desk",)),
        ({"api_keys": ("a-key-that-is-long",)}, True, False, ()),
        ({"tls_cert": "c", "tls_key": "k"}, False, True, ()),
        ({"host": "10.0.0.7", "hosts": ("desk",)}, True, True, ("desk", "10.0.0.7")),
    ],
)
def test_whoever_others_can_reach_asks_for_keys_over_tls(changes, demanded, secured, names):
    config = msgspec.structs.replace(DecoderConfig(model="m"), **changes)
    assert (config.keys_demanded, config.uses_tls) == (demanded, secured)
    assert config.own_names == names


@pytest.mark.parametrize("content", ["", "short\n", "a-key-that-is-long-enöugh\n"])
def test_a_file_of_keys_must_hold_keys(tmp_path, content):
    path = tmp_path / "keys"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        config_from(["--model", "m", "--api-keys-file", str(path)])
    assert caught.value.reason == "api_keys_invalid"


def test_a_file_of_keys_that_others_may_read_is_refused(tmp_path):
    path = tmp_path / "keys"
    path.write_text("a-key-that-is-long-enough\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError) as caught:
        config_from(["--model", "m", "--api-keys-file", str(path)])
    assert caught.value.reason == "api_keys_exposed"
    assert "chmod 600" in str(caught.value.hint)


def test_a_file_of_keys_is_never_read_in_part(tmp_path):
    path = tmp_path / "keys"
    keys = [f"key-number-{number:06d}-of-many" for number in range(4000)]
    path.write_text("\n".join(keys))
    path.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        config_from(["--model", "m", "--api-keys-file", str(path)])
    assert caught.value.reason == "api_keys_invalid"


@pytest.mark.parametrize("what", ["pipe", "/dev/zero", "directory", "a\0b"])
def test_what_is_no_file_of_keys_is_not_waited_for(tmp_path, what):
    os.mkfifo(tmp_path / "pipe")
    name = str(tmp_path / "pipe") if what == "pipe" else what
    name = str(tmp_path) if what == "directory" else name
    with soon(), pytest.raises(ConfigError) as caught:
        config_from(["--model", "m", "--api-keys-file", name])
    assert caught.value.reason == "api_keys_invalid"


@pytest.mark.parametrize("host", ["a" * 64, "a..b", "a\0b"])
def test_a_host_that_is_no_name_cannot_be_listened_to(host):
    with pytest.raises(ConfigError) as caught:
        listen(DecoderConfig(model="m", host=host, port=0))
    assert caught.value.reason == "host_unknown"


def test_a_missing_file_of_keys():
    with pytest.raises(ConfigError) as caught:
        config_from(["--model", "m", "--api-keys-file", "nowhere"])
    assert caught.value.reason == "api_keys_invalid"


def test_the_exit_status_is_sysexits():
    assert EXIT_CONFIG == os.EX_CONFIG
