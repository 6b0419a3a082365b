"""Options in the form of a service: absolute, complete, checked first, and without secrets."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.service_arguments import (
    DECODER_PATHS,
    decoder_arguments,
    producer_arguments,
    value_of,
)
from gb10_producer import config as producer
from gb10_producer.trust import make_pairing
from mac_decoder import config as decoder
from protocol.errors import ConfigError
from tests.gb10_producer.registered import kept_of, record_of
from trust.peers import Peers

PATHS = {"DIR", "FILE"}
OTHERS = {"N", "T", "SIZE", "NAME", "URL", "HOST", "LAYOUT", "HOST:PORT", "LIBRARY"}


def with_value(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [one for one in parser._actions if one.option_strings and one.nargs != 0]


def is_path(option: argparse.Action) -> bool:
    return option.metavar in PATHS or option.type is Path


@pytest.mark.parametrize("parser", [decoder.parser(), producer.parser()], ids=lambda one: one.prog)
def test_every_option_says_whether_it_is_a_path(parser: argparse.ArgumentParser) -> None:
    """Below, options are taken for paths by these signs: a new one has to have one of them."""
    unknown = [
        option.option_strings
        for option in with_value(parser)
        if not is_path(option)
        and option.metavar not in OTHERS
        and option.choices is None
        and option.type not in (int, float)
        and option.dest not in ("host", "name")
    ]
    assert unknown == []


def test_the_decoders_paths_are_all_known() -> None:
    found = {option.dest for option in with_value(decoder.parser()) if is_path(option)}
    assert found == set(DECODER_PATHS)
    for option in decoder.parser()._actions:
        assert f"--{option.dest.replace('_', '-')}" in option.option_strings, (
            "how it is named again"
        )


def test_the_producers_paths_are_paths() -> None:
    config = producer.ProducerConfig.__annotations__
    for option in with_value(producer.parser()):
        if is_path(option) and option.dest in config:
            assert option.type is Path, f"{option.dest} would stay relative"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., Path]) -> Path:
    """A directory with a model and pairings in it, which is the working directory."""
    shutil.copytree(checkpoint("llama"), tmp_path / "model")
    make_pairing(tmp_path / "pairing", 1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_decoder_is_told_the_same_with_absolute_paths(here: Path) -> None:
    keys = here / "keys"
    keys.write_text("a-key-of-sixteen-letters\n")
    keys.chmod(0o600)
    options = (
        "--producer wss://box:7431 --pairing pairing/decoder.pairing --max-concurrent 3 "
        "--cache-max 20GB --no-disk --allow-host a --allow-host=b --api-keys-file keys "
        "--state-d state --default-temperature 0.5"
    )
    given = ["--model", "model", "--served-name=-a name-", *options.split()]
    made = decoder_arguments(given)
    assert f"--model={here}/model" in made
    assert f"--pairing={here}/pairing/decoder.pairing" in made
    assert f"--state-dir={here}/state" in made
    meant = decoder.config_from(given)
    read = decoder.config_from(list(made))
    changed = {
        name for name in meant.__struct_fields__ if getattr(meant, name) != getattr(read, name)
    }
    assert changed == {"model", "pairings", "state_dir"}
    back = msgspec.structs.replace(
        read, model="model", pairings=("pairing/decoder.pairing",), state_dir="state"
    )
    assert back == meant
    assert "a-key-of-sixteen-letters" not in " ".join(made)


def test_the_producer_is_told_the_same_with_absolute_paths(here: Path) -> None:
    given = "--model model --pairing pairing/producer.pairing --host 0.0.0.0 --memory-limit 80G"
    made = producer_arguments([*given.split(), "--cache-dir", "cache", "--device=cpu"])
    read = producer.parse(list(made))
    assert read.config.model == here / "model"
    assert read.config.pairing == here / "pairing" / "producer.pairing"
    assert read.config.cache_dir == here / "cache"
    assert (read.config.host, read.config.memory_limit) == ("0.0.0.0", 80 << 30)
    assert read.supervised


def test_a_producer_that_is_sent_its_model_can_be_a_service_once_it_is_paired(here: Path) -> None:
    given = ["--state-dir", "state", "--cache-dir", "cache", "--secrets", "file", "--device", "cpu"]
    with pytest.raises(ConfigError) as caught:
        producer_arguments(given)
    assert (caught.value.reason, caught.value.field) == ("config_invalid", "model")
    Peers(here / "state" / "producer", "producer").add(kept_of(record_of()))
    read = producer.parse(list(producer_arguments(given))).config
    assert (read.model, read.cache_dir) == (None, here / "cache")


@pytest.mark.parametrize(
    ("side", "given", "reason", "field"),
    [
        (decoder_arguments, "--model model --key-fd 3", "option_not_for_service", "key-fd"),
        (decoder_arguments, "--model model --key 3", "option_not_for_service", "key-fd"),
        (decoder_arguments, "--model nowhere", "model_missing", None),
        (decoder_arguments, "--model model --tls-cert x", "tls_incomplete", "tls-key"),
        (producer_arguments, "--model model --key-fd 3", "option_not_for_service", "key-fd"),
        (
            producer_arguments,
            "--model model --pairing pairing/producer.pairing --no-supervisor",
            "option_not_for_service",
            "no-supervisor",
        ),
        (producer_arguments, "--model model --pair", "option_not_for_service", "pair"),
        (producer_arguments, "--peers", "option_not_for_service", "peers"),
        (producer_arguments, "--make-pairing x", "option_not_for_service", "make-pairing"),
        (producer_arguments, "--model model --pairing nowhere", "pairing_missing", "pairing"),
        (
            producer_arguments,
            "--model nowhere --pairing pairing/producer.pairing",
            "model_missing",
            None,
        ),
    ],
)
def test_what_no_service_could_run_is_refused(
    here: Path, side: Callable[..., Any], given: str, reason: str, field: str | None
) -> None:
    with pytest.raises(ConfigError) as refused:
        side(given.split())
    assert refused.value.reason == reason
    if field is not None:
        assert refused.value.field == field


@pytest.mark.parametrize("side", [decoder_arguments, producer_arguments])
def test_an_unknown_option_ends_as_in_the_side_itself(
    side: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        side(["--model", "model", "--nonsense"])
    assert ended.value.code == 2
    assert "--nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--port=8123", "--x"], ["--x", "--port", "8123"]])
def test_an_installed_option_is_found(arguments: list[str]) -> None:
    assert value_of("--port", arguments) == "8123"
    assert value_of("--p", arguments) == ""
    assert value_of("--x", arguments[-1:]) == ""


def test_a_key_is_not_even_read(here: Path) -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, bytes(32))
        with pytest.raises(ConfigError):
            decoder_arguments(["--model", "model", "--key-fd", str(reading)])
        assert os.read(reading, 32) == bytes(32)
    finally:
        os.close(reading)
        os.close(writing)
