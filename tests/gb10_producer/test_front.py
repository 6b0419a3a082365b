"""A producer that waits for a model: what it says of itself meanwhile, and what ends that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gb10_producer.attempts import MOST, Attempt, unended
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
        self.marks: list[int] = []
        self.fails: list[Exception] = []
        self.takes_memory = False
        self.dropped = 0
        self.result: list[str | None] = []

    def _make(self, model: Path | None, begun: Callable[[], None]) -> str:
        self.tries.append(model)
        self.marks.append(0 if model is None else unended(model))
        if self.takes_memory:
            begun()
        if self.fails:
            raise self.fails.pop()
        return "loaded"

    def _waits(self) -> None:
        self.waited += 1

    def _drop(self) -> None:
        self.dropped += 1

    def load(self) -> None:
        """Load at once, in this thread."""
        self.result.append(self.front.load(self._make, self._waits, self._drop))

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
        assert front.described == ("one", True), "what could not be loaded is named"
        other = kept(tmp_path, "two")
        assert front.send(other) == "now"
        assert front.described[1] is False
        wait_until(lambda: front.result)
    assert front.tries == [model, other]
    assert front.described == ("two", False)
    assert "error" in capsys.readouterr().err
    assert (unended(model), front.dropped) == (0, 0), "it took no memory, and is tried again"


@pytest.mark.parametrize("error", [EngineFault("x"), AssertionError("a bug")])
def test_what_ends_the_process_while_it_loads_is_counted_in_the_models_directory(
    tmp_path: Path, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    model = kept(tmp_path, "one")
    for loads in range(1, MOST + 1):
        front = Waiting(tmp_path)
        front.fails = [error]
        with pytest.raises(type(error)):
            front.load()
        assert front.marks == [loads]
        assert unended(model) == loads
    assert "baton node send" not in capsys.readouterr().err

    # The next one leaves it alone, says so, and tries it again once it is sent again.
    front = Waiting(tmp_path)
    assert front.described == ("one", True)
    with front.loading():
        wait_until(lambda: front.waited == 1)
        assert front.tries == []
        assert "one was received, and is not loaded" in capsys.readouterr().err
        assert front.send(model) == "now"
        wait_until(lambda: front.result)
    assert (front.tries, front.marks, front.result) == ([model], [1], ["loaded"])
    assert front.described == ("one", False)
    assert unended(model) == 0


def test_a_stop_while_it_loads_counts_against_nobody(tmp_path: Path) -> None:
    model = kept(tmp_path, "one")
    Attempt(model).begin()
    front = Waiting(tmp_path)
    front.takes_memory = True
    seen: list[int] = []

    def stopped(model: Path | None, begun: Callable[[], None]) -> str:
        assert model is not None
        front.asked.withdraw()
        seen.append(unended(model))
        return "loaded"

    front.front.load(stopped, lambda: None)
    assert seen == [1], "as it was before"
    front.asked.withdraw()
    assert unended(model) == 0, "nothing is loaded any more"


def test_what_failed_with_memory_taken_leaves_it_to_another_process(tmp_path: Path) -> None:
    model = kept(tmp_path, "one")
    front = Waiting(tmp_path, "--lifeline-fd", "0")
    front.fails, front.takes_memory = [ConfigError("x", reason="model_not_finite")], True
    front.load()
    assert (front.result, front.tries, front.waited) == ([None], [model], 0)
    assert front.front.status() == EXIT_START_AGAIN
    assert front.dropped == 0

    # Which waits, and does not try it once more.
    front = Waiting(tmp_path, "--lifeline-fd", "0")
    with front.loading():
        wait_until(lambda: front.waited == 1)
        assert (front.tries, front.described) == ([], ("one", True))


def test_where_nobody_starts_another_process_what_was_taken_is_given_back(tmp_path: Path) -> None:
    model = kept(tmp_path, "one")
    front = Waiting(tmp_path)
    front.fails, front.takes_memory = [ConfigError("x", reason="model_not_finite")], True
    with front.loading():
        wait_until(lambda: front.waited == 1)
        assert front.dropped == 1
        assert front.send(model) == "now"
        wait_until(lambda: front.result)
    assert (front.tries, front.dropped) == ([model, model], 1)


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
