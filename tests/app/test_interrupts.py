"""Ctrl-C while a command is only starting: it ends, and no traceback is seen."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from app.interrupts import at_once
from protocol.errors import EXIT_CONFIG
from tests.ordinary import usual


@pytest.mark.parametrize(
    ("command", "delay_s"),
    usual(
        itertools.product(["serve", "produce", "demo"], [0.0, 0.1, 0.3, 0.6]),
        [
            ("serve", 0.0),
            ("serve", 0.3),
            ("produce", 0.1),
            ("produce", 0.6),
            ("demo", 0.0),
            ("demo", 0.6),
        ],
    ),
)
def test_ctrl_c_in_the_first_moments_is_no_traceback(
    command: str, delay_s: float, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    arguments = [command, "--model", str(checkpoint("llama"))]
    arguments += {"serve": ["--port", "0", "--state-dir", str(tmp_path), "--no-disk"]}.get(
        command, []
    )
    # With this Python says what it has imported.
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    said: list[str] = []
    begun = threading.Event()

    def listen() -> None:
        """Its own first module is imported, then a first one of those that take long."""
        assert process.stderr is not None
        first = False
        for line in process.stderr:
            if not line.startswith("import time:"):
                said.append(line)
            elif first:
                begun.set()
            first = first or line.rstrip().endswith("| app.interrupts")

    with process, ExitStack() as ending:
        ending.callback(process.kill)
        listening = threading.Thread(target=listen)
        listening.start()
        assert begun.wait(60)
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        status = process.wait(60)
        listening.join()
    assert not [line for line in said if "Traceback" in line or "KeyboardInterrupt" in line], said
    # Shells show 130 for a death by SIGINT too; 0 is a supervisor's, which had begun. Without a
    # key or a pairing a producer ends by itself: on a fast machine that is before the signal.
    assert status in (-signal.SIGINT, 130, 0) or (command == "produce" and status == EXIT_CONFIG)


def test_what_was_ignored_stays_ignored_and_what_was_handled_stays_handled() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler in (signal.SIG_IGN, lambda *_: None):
            signal.signal(signal.SIGINT, handler)
            with at_once():
                assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with at_once():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
