"""A producer that waits for a model: what it says of itself meanwhile, and what ends that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gb10_producer.config import parse
from gb10_producer.control import Desk
from gb10_producer.front import Asked, Front
from gb10_producer.received import MANIFEST
from gb10_producer.registry import open_registry
from gb10_producer.trust import RegistryTrust
from protocol.errors import EXIT_START_AGAIN, CapacityError, ConfigError, EngineFault
from tests.gb10_producer.producer import wait_until


class Waiting:
    """A front whose model is loaded in a thread of its own; ``tries`` are what was loaded."""

    def __init__(self, directory: Path, *words: str) -> None:
        places = ["--state-dir", str(directory / "state"), "--cache-dir", str(directory / "cache")]
        config = parse([*places, "--secrets", "file", "--host", "127.0.0.1", *words]).config
        registry = open_registry(config)
        self.asked = Asked()
        self.front = Front(config, registry, self.asked)
        desk = self.front.desk(RegistryTrust(registry.peers, registry.own))
        assert desk is not None
        self.desk: Desk = desk
        self.waited = 0
        self.tries: list[Path | None] = []
        self.fails: list[Exception] = []
        self.result: list[str | None] = []

    def _make(self, model: Path | None) -> str:
        self.tries.append(model)
        if self.fails:
            raise self.fails.pop()
        return "loaded"

    def _waits(self) -> None:
        self.waited += 1

    def load(self) -> None:
        """Load at once, in this thread."""
        self.result.append(self.front.load(self._make, self._waits))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load in another thread; stopped in the end."""
        thread = threading.Thread(target=self.load)
        thread.start()
        try:
            yield
        finally:
            self.asked.stop.set()
            thread.join(5.0)

    @property
    def described(self) -> tuple[str, bool]:
        return self.desk.profile.model, self.desk.profile.waiting

    def send(self, model: Path) -> str:
        taking = self.desk._taking
        assert taking is not None
        return taking.received(model)


def kept(directory: Path, name: str) -> Path:
    path = directory / "cache" / "models" / name
    path.mkdir(parents=True)
    (path / MANIFEST).write_text("[]")
    return path


def test_it_waits_and_loads_the_first_model_that_comes(tmp_path: Path) -> None:
    front = Waiting(tmp_path)
    assert front.described == ("", True)
    with front.loading():
        wait_until(lambda: front.waited == 1)
        assert front.asked.serving.is_set(), "a stop is looked at"
        model = kept(tmp_path, "one")
        assert front.send(model) == "now"
        assert not front.desk.profile.waiting, "before anybody was told"
        wait_until(lambda: front.result)
    assert (front.result, front.tries) == (["loaded"], [model])
    assert front.described == ("one", False)
    assert not front.asked.serving.is_set(), "who loads is not asked to stop"


def test_one_that_comes_before_it_is_waited_for_is_loaded_too(tmp_path: Path) -> None:
    """The door is open before anything is loaded."""
    front = Waiting(tmp_path)
    model = kept(tmp_path, "one")
    assert front.send(model) == "now"
    assert front.described == ("", False)
    front.load()
    assert (front.result, front.tries) == (["loaded"], [model])
    assert front.described == ("one", False)


def test_what_was_received_last_is_loaded_at_the_start(tmp_path: Path) -> None:
    model = kept(tmp_path, "one")
    front = Waiting(tmp_path, "--lifeline-fd", "0")
    assert front.described == ("one", False)
    front.load()
    assert (front.tries, front.waited) == ([model], 0)
    assert front.front.status() == 0
    assert front.send(kept(tmp_path, "two")) == "restarting"
    assert front.asked.stop.is_set()
    assert front.front.status() == EXIT_START_AGAIN


@pytest.mark.parametrize(
    "error", [ConfigError("x", reason="not_enough_memory"), CapacityError("x")]
)
def test_a_received_model_that_cannot_be_loaded_is_waited_past(
    tmp_path: Path, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    model = kept(tmp_path, "one")
    front = Waiting(tmp_path)
    front.fails = [error]
    with front.loading():
        wait_until(lambda: front.waited == 1)
        assert front.described == ("", True)
        other = kept(tmp_path, "two")
        assert front.send(other) == "now"
        wait_until(lambda: front.result)
    assert front.tries == [model, other]
    assert "error" in capsys.readouterr().err


def test_a_device_that_fails_ends_it_all_the_same(tmp_path: Path) -> None:
    kept(tmp_path, "one")
    front = Waiting(tmp_path)
    front.fails = [EngineFault("x")]
    with pytest.raises(EngineFault):
        front.load()


def test_a_model_that_was_named_and_cannot_be_loaded_ends_it(tmp_path: Path) -> None:
    front = Waiting(tmp_path, "--model", str(tmp_path / "named"))
    front.fails = [ConfigError("x")]
    with pytest.raises(ConfigError):
        front.load()
    assert front.tries == [None]
    assert front.send(kept(tmp_path, "one")) == "kept"


def test_a_stop_ends_the_wait(tmp_path: Path) -> None:
    front = Waiting(tmp_path)
    with front.loading():
        wait_until(lambda: front.waited == 1)
    assert (front.result, front.tries) == ([None], [])
    assert front.front.status() == 0


def test_made_up_rows_take_no_model(tmp_path: Path) -> None:
    assert Waiting(tmp_path, "--synthetic", "muse-glimmer").desk._taking is None
