"""Children of a demo: they get their key through a pipe and end with their starter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from app.children import start
from app.loopback import _end
from protocol.errors import ConfigError

READS_KEY = """
import os, sys, time
secret = os.read(int(sys.argv[1]), 100)
assert os.read(int(sys.argv[1]), 100) == b""
print("ready", "ws://" + secret.hex(), flush=True)
time.sleep(600)
"""

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("ready", grandchild.pid, flush=True)
time.sleep(600)
"""

STARTER = """
import sys
from app.children import start
from app.loopback import _end
child = start("child", [sys.executable, "-c", sys.argv[1]], grace_s=0.5)
print(child.wait_ready(60), child.process.pid, flush=True)
import time; time.sleep(600)
"""


def gone(pid: int, within_s: float = 20.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_the_key_arrives_by_pipe_and_in_no_argument() -> None:
    key = bytes(range(32))
    child = start("child", [sys.executable, "-c", READS_KEY, "{key_fd}"], key)
    try:
        assert child.wait_ready(60) == "ws://" + key.hex()
        family = [child.process.pid]
        family += [one.pid for one in psutil.Process(child.process.pid).children(recursive=True)]
        for pid in family:
            process = psutil.Process(pid)
            assert key.hex() not in " ".join(process.cmdline())
            assert key.hex() not in str(process.environ())
    finally:
        child.end()
    assert all(gone(pid) for pid in family)


def test_a_child_that_fails_is_reported_with_its_last_words() -> None:
    child = start("child", [sys.executable, "-c", "raise SystemExit('no such model')"])
    with pytest.raises(ConfigError) as failed:
        child.wait_ready(60)
    child.end()
    assert failed.value.reason == "child_failed"
    assert "no such model" in (failed.value.hint or "")
    assert child.process.returncode == 1


def test_ending_twice_is_ending_once() -> None:
    child = start("child", [sys.executable, "-c", "print('ready x', flush=True); input()"])
    child.wait_ready(60)
    child.end()
    child.end()


WAITS_UNLESS_HURRIED = """
import os, signal, sys, time
asked = []
def ask(*_):
    asked.append(1)
    if len(asked) == 2:
        os._exit(3)
signal.signal(signal.SIGTERM, ask)
print("ready x", flush=True)
time.sleep(600)
"""


def test_a_child_that_is_asked_twice_need_not_wait() -> None:
    child = start("child", [sys.executable, "-c", WAITS_UNLESS_HURRIED], grace_s=60.0)
    child.wait_ready(60)
    child.ask_to_end()
    time.sleep(0.3)
    assert child.process.poll() is None
    child.hurry()
    began = time.monotonic()
    child.end()
    assert time.monotonic() - began < 10
    assert child.process.returncode == 3


def test_whoever_interrupts_the_end_of_a_pair_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = start("child", [sys.executable, "-c", WAITS_UNLESS_HURRIED], grace_s=60.0)
    child.wait_ready(60)
    real, interrupts = child.process.wait, [KeyboardInterrupt()]

    def wait(timeout: float | None = None) -> int:
        if interrupts:
            time.sleep(0.3)
            raise interrupts.pop()
        return real(timeout)

    monkeypatch.setattr(child.process, "wait", wait)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        _end([child])
    assert time.monotonic() - began < 10
    assert child.process.returncode == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("2026-01-02T03:04:05.678 INFO gb10_producer.progress: reading m percent=40", None),
        ("2026-01-02 03:04:05,678 INFO mac_decoder.node: reading m percent=40", None),
        ("baton produce: error: no", "baton produce: error: no"),
    ],
)
def test_a_childs_last_words_are_told_without_time_and_place(line: str, words: str | None) -> None:
    script = f"import sys; print({line!r}, file=sys.stderr)"
    child = start("child", [sys.executable, "-c", script])
    child.process.wait(60)
    child.end()
    assert child.last_words() == (words or "reading m percent=40")


def test_children_end_when_their_starter_is_killed() -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, STUBBORN], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    grandchild, wrapper = (int(word) for word in starter.stdout.readline().split())
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    assert gone(wrapper)
    assert gone(grandchild)


def test_the_wrapper_passes_on_the_commands_status(tmp_path: Path) -> None:
    lifeline, held = os.pipe()
    try:
        dies = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
        done = subprocess.run(
            [sys.executable, "-m", "app.lifeline", str(lifeline), "1", "--", *dies],
            pass_fds=[lifeline],
            timeout=60,
        )
    finally:
        os.close(lifeline)
        os.close(held)
    assert done.returncode == 128 + signal.SIGKILL
