"""A start without a model: for a producer that runs, for one that will be sent one, or refused."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gb10_producer.beginnings import require_something, runs_elsewhere
from gb10_producer.config import ProducerConfig, parse
from gb10_producer.received import MANIFEST
from protocol.errors import ConfigError
from tests.gb10_producer.registered import kept_of, record_of
from trust.peers import Peers


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    state = ["--state-dir", str(tmp_path / "state"), "--cache-dir", str(tmp_path / "cache")]
    return ["--host", "127.0.0.1", "--secrets", "file", *state]


def config(words: list[str], *more: str) -> ProducerConfig:
    return parse([*words, *more]).config


def test_nothing_to_serve_and_nobody_to_send_it_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        require_something(config(words))
    assert (caught.value.reason, caught.value.field) == ("config_invalid", "model")
    assert "--model DIR" in caught.value.message
    assert "--pair" in str(caught.value.hint)


@pytest.mark.parametrize("given", [["--pair"], ["--model", "m"], ["--synthetic", "s"]])
def test_what_was_asked_for_is_something(words: list[str], given: list[str]) -> None:
    require_something(config(words, *given))


def test_who_is_paired_can_send_one(words: list[str], tmp_path: Path) -> None:
    Peers(tmp_path / "state" / "producer", "producer").add(kept_of(record_of()))
    require_something(config(words))


def test_what_was_received_is_served(words: list[str], tmp_path: Path) -> None:
    model = tmp_path / "cache" / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    with pytest.raises(ConfigError):
        require_something(config(words))  # imported here, by whoever will name it
    (model / MANIFEST).write_text("[]")
    require_something(config(words))


def test_a_code_is_for_the_producer_that_runs_on_the_port(words: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = ("--port", str(listener.getsockname()[1]))
        assert runs_elsewhere(config(words, "--pair", *port))
        for given in ((), ("--pair", "--model", "m"), ("--pair", "--lifeline-fd", "9")):
            assert not runs_elsewhere(config(words, *port, *given))
    assert not runs_elsewhere(config(words, "--pair", *port))
    assert not runs_elsewhere(config(words, "--pair", "--port", "0"))
