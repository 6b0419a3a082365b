"""A start without a model: for a producer that runs, for one that will be sent one, or refused."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gb10_producer import presence, supervisor
from gb10_producer.__main__ import main
from gb10_producer.beginnings import for_one_that_runs, require_something
from gb10_producer.config import ProducerConfig, parse
from gb10_producer.received import MANIFEST
from gb10_producer.supervisor import Supervisor
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


def test_a_code_is_for_the_producer_that_runs_with_this_state(words: list[str]) -> None:
    asked = config(words, "--pair")
    assert for_one_that_runs(asked) is None
    with presence.shown(config(words, "--port", "7777")):
        found = for_one_that_runs(asked)
        assert found is not None
        assert (found.port, found.pair) == (7777, True), "where it is, not where it would be"
        for given in ((), ("--pair", "--model", "m"), ("--pair", "--lifeline-fd", "9")):
            assert for_one_that_runs(config(words, *given)) is None
    assert for_one_that_runs(asked) is None
    with presence.shown(config(words, "--port", "0")):
        found = for_one_that_runs(config(words, "--pair", "--port", "7654"))
        assert found is not None
        assert found.port == 7654


def test_another_program_on_the_port_is_no_producer(words: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert for_one_that_runs(config(words, "--pair", "--port", port)) is None


def test_several_may_run_and_the_last_to_end_ends_it(words: list[str]) -> None:
    asked = config(words, "--pair")
    with presence.shown(config(words)):
        with presence.shown(config(words)):
            assert for_one_that_runs(asked) is not None
        assert for_one_that_runs(asked) is not None
    assert for_one_that_runs(asked) is None


def test_one_that_nobody_could_pair_with_is_not_shown(words: list[str], tmp_path: Path) -> None:
    with presence.shown(config(words, "--key-fd", "3", "--model", "m")):
        assert not (tmp_path / "state").exists()


def test_a_state_that_cannot_be_used_is_for_others_to_tell(
    words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "state").touch()
    with presence.shown(config(words)):
        assert for_one_that_runs(config(words, "--pair")) is None


def test_it_is_shown_by_the_supervisor_whatever_its_child_does(words: list[str]) -> None:
    """Between two children nobody listens on the port."""
    seen: list[bool] = []

    class Between(Supervisor):
        def _run_child(self) -> tuple[int, float | None]:
            seen.append(for_one_that_runs(config(words, "--pair")) is not None)
            return 0, None

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(supervisor, "Supervisor", Between)
        assert main([*words, "--synthetic", "muse-glimmer"]) == 0
    assert seen == [True]
    assert for_one_that_runs(config(words, "--pair")) is None
