"""What the app starts and stops: its own child, the installed service, and nothing else."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app import install
from app.menubar import decoder as decoder_module
from app.menubar.decoder import Decoder
from app.menubar.logfile import LogFile, tail
from app.service import Installed, manager_missing
from mac_decoder.reporting import FORMAT
from protocol.errors import BatonError
from tests.e2e.running import until

SERVES = (
    "import os, signal, sys, time\n"
    "print('ready http://127.0.0.1:1', os.getpid(), flush=True)\n"
    "def stop(*_):\n"
    "    print('stopping', file=sys.stderr, flush=True)\n"
    "    sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, stop)\n"
    "time.sleep(600)\n"
)
REFUSES = "import sys; print('baton serve: error: no model', file=sys.stderr); sys.exit(78)"


class Manager:
    """A service manager: whether a service is there, whether it runs, and what it was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there, self.runs = False, False
        self.told: list[str] = []
        monkeypatch.setattr(install, "installed", self.installed)
        monkeypatch.setattr(install, "start", lambda side: self._tell("start", True))
        monkeypatch.setattr(install, "stop", lambda side: self._tell("stop", False))

    def installed(self, side: str) -> Installed | None:
        assert side == "decoder"
        return Installed("unit", Path("/u"), (), self.runs, "/log") if self.there else None

    def _tell(self, what: str, runs: bool) -> None:
        self.told.append(what)
        self.runs = runs


class Desk:
    """A decoder, and what it tells."""

    def __init__(self, log: Path, code: str) -> None:
        self.errors: list[BatonError] = []
        self.changes = 0
        self.decoder = Decoder(
            LogFile(log), self._changed, self.errors.append, (sys.executable, "-c", code)
        )

    def _changed(self) -> None:
        self.changes += 1

    def said(self, text: str) -> bool:
        return text in tail(self.decoder.log.path)

    def pid(self, number: int = -1) -> int:
        lines = [line for line in tail(self.decoder.log.path).splitlines() if "ready" in line]
        return int(lines[number].split()[-1])


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    return Manager(monkeypatch)


@pytest.fixture
def desk(tmp_path: Path, manager: Manager) -> Iterator[Any]:
    made: list[Desk] = []

    def make(code: str = SERVES) -> Desk:
        made.append(Desk(tmp_path / "logs" / "decoder.log", code))
        return made[-1]

    yield make
    for one in made:
        one.decoder.quit()


def test_what_the_app_starts_it_may_stop_and_its_log_has_every_word(desk) -> None:
    found = desk()
    assert not found.decoder.ours
    found.decoder.start()
    until(lambda: found.said("ready"))
    assert found.decoder.ours
    pid = found.pid()
    found.decoder.stop()
    until(lambda: not found.decoder.ours)
    assert not psutil.pid_exists(pid)
    assert found.said("stopping")
    assert not found.errors, "what was asked for is no failure"
    assert os.stat(found.decoder.log.path).st_mode & 0o077 == 0


def test_a_restart_is_another_process_after_the_end_of_the_first(desk) -> None:
    found = desk()
    found.decoder.start()
    until(lambda: found.said("ready"))
    found.decoder.restart()
    until(lambda: tail(found.decoder.log.path).count("ready") == 2)
    assert found.pid(0) != found.pid(1)
    assert not psutil.pid_exists(found.pid(0))
    assert found.decoder.ours


def test_starting_twice_is_starting_once(desk) -> None:
    found = desk()
    found.decoder.start()
    found.decoder.start()
    until(lambda: found.said("ready"))
    time.sleep(0.5)
    assert tail(found.decoder.log.path).count("ready") == 1


def test_with_other_settings_starting_is_starting_again(desk, monkeypatch) -> None:
    settings = [b"port = 1"]
    monkeypatch.setattr(decoder_module, "settings_now", lambda: settings[0])
    found = desk()
    assert not found.decoder.coming
    found.decoder.start()
    until(lambda: found.said("ready"))
    assert found.decoder.coming
    settings[0] = b"port = 2"
    assert not found.decoder.coming, "it listens where nobody looks for it any more"
    found.decoder.start()
    until(lambda: tail(found.decoder.log.path).count("ready") == 2)
    assert found.decoder.coming
    assert not psutil.pid_exists(found.pid(0))


def test_one_that_ends_by_itself_is_told_of_with_its_last_words(desk) -> None:
    found = desk(REFUSES)
    found.decoder.start()
    until(lambda: bool(found.errors))
    (error,) = found.errors
    assert (error.reason, error.found) == ("child_failed", "exit 78")
    assert error.hint == "baton serve: error: no model"
    until(lambda: not found.decoder.ours)


def test_one_that_is_gone_before_anything_else_happens_is_not_coming(desk, monkeypatch) -> None:
    class Gone(threading.Thread):
        """As a thread that goes first, however short its work."""

        def start(self) -> None:
            super().start()
            if self.name == "baton-decoder-log":
                self.join()

    monkeypatch.setattr(decoder_module.threading, "Thread", Gone)
    found = desk(REFUSES)
    found.decoder.start()
    until(lambda: found.changes == 2)
    assert [error.reason for error in found.errors] == ["child_failed"]
    assert not found.decoder.coming
    assert not found.decoder.ours


def test_quitting_ends_the_child(desk) -> None:
    found = desk()
    found.decoder.start()
    until(lambda: found.said("ready"))
    pid = found.pid()
    found.decoder.quit()
    assert not psutil.pid_exists(pid)
    assert found.said("stopping")


def test_the_child_ends_with_an_app_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "decoder.log"
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from app.menubar.decoder import Child\n"
        "from app.menubar.logfile import LogFile\n"
        f"command = [sys.executable, '-c', {SERVES!r}]\n"
        f"child = Child(command, LogFile(Path({str(log)!r})), print)\n"
        "child.listen()\n"
        "time.sleep(600)\n"
    )
    app = subprocess.Popen([sys.executable, "-c", program])
    until(lambda: "ready" in tail(log))
    pid = int(tail(log).split()[2])
    app.send_signal(signal.SIGKILL)
    app.wait(10)
    until(lambda: not psutil.pid_exists(pid), 10)


def test_a_service_is_started_and_stopped_where_one_is_installed(desk, manager: Manager) -> None:
    manager.there = True
    found = desk()
    found.decoder.start()
    until(lambda: found.decoder.ours)
    assert not found.decoder.log.path.exists(), "a child was started beside the service"
    found.decoder.restart()
    until(lambda: manager.told == ["start", "stop", "start"])
    found.decoder.stop()
    until(lambda: not found.decoder.ours)
    found.decoder.start()
    until(lambda: found.decoder.ours)
    found.decoder.quit()
    assert manager.runs, "the service was stopped because the app was quit"


def test_what_somebody_else_started_is_left_alone(desk, manager: Manager) -> None:
    manager.there = True  # installed, and not what runs
    found = desk()
    found.decoder.look()
    found.decoder.stop()
    found.decoder.restart()
    until(lambda: found.changes == 3)
    assert manager.told == []
    assert not found.decoder.ours


def test_a_machine_without_a_service_manager_has_no_service(desk, monkeypatch) -> None:
    def none(side: str) -> None:
        raise manager_missing("no systemd")

    monkeypatch.setattr(install, "installed", none)
    found = desk()
    found.decoder.start()
    until(lambda: found.said("ready"))
    assert not found.errors


def test_a_service_that_does_not_start_is_told(desk, manager: Manager, monkeypatch) -> None:
    def fails(side: str) -> None:
        raise manager_missing("gone")

    manager.there = True
    monkeypatch.setattr(install, "start", fails)
    found = desk()
    found.decoder.start()
    until(lambda: [error.reason for error in found.errors] == ["service_manager_missing"])


def test_a_full_log_is_moved_aside_and_no_line_is_lost(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log", most_bytes=100, kept=2)
    lines = [f"line {number:03}\n" for number in range(30)]
    for line in lines:
        log.write(line.encode())
    log.close()
    names = ("a.log.2", "a.log.1", "a.log")
    texts = [(tmp_path / name).read_text() for name in names]
    assert all(len(text) <= 100 for text in texts)
    assert "".join(texts) == "".join(lines[-sum(text.count("\n") for text in texts) :])
    assert not (tmp_path / "a.log.3").exists()
    assert log.last_words().splitlines() == [line.strip() for line in lines[-6:]]


def test_last_words_are_what_says_why_it_ended(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log")

    def logged(level: int, name: str, message: str) -> str:
        record = logging.LogRecord(name, level, "", 0, message, None, None)
        return logging.Formatter(FORMAT).format(record) + "\n"

    lines = [
        "ready http://127.0.0.1:1\n",
        logged(logging.INFO, "mac_decoder.api", '{"event":"request"}'),
        logged(logging.WARNING, "mac_decoder.handoff.pool", "not available"),
        "baton serve: error: there is no model (model_missing)\n  → give one\n",
        logged(logging.ERROR, "mac_decoder.supervisor", "the process ended (exit 78)"),
        f"{'a' * 5000}\n",
    ]
    for line in lines:
        log.write(line.encode())
    log.close()
    assert log.last_words().splitlines() == [
        "baton serve: error: there is no model (model_missing)",
        "  → give one",
        "the process ended (exit 78)",
        "a" * 300,
    ]


def test_a_log_goes_on_where_it_was(tmp_path: Path) -> None:
    for text in (b"one\n", b"two\n"):
        log = LogFile(tmp_path / "a.log")
        log.write(text)
        log.close()
    assert tail(tmp_path / "a.log") == "one\ntwo\n"
    assert tail(tmp_path / "a.log", 5) == "two\n"
    assert tail(tmp_path / "none") == ""


def test_a_log_that_cannot_be_written_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = LogFile(tmp_path / "file" / "a.log")
    log.write(b"lost on the disk\n")
    assert log.last_words() == "lost on the disk"
