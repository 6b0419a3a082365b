"""Keeps a producer running: starts the child, restarts it after a fault, gives up in time.

A device that fails takes its process with it (exit 75, or a signal from the driver), and a new
process usually finds it well again. When it does not, as ``protocol.restarts`` counts, the
supervisor says so and ends. A child whose place another is to take (79), to serve another model
or to wait for one with its memory as it was, is started again at once, which is no fault. Other
exit statuses are the child's last word: 0 was asked for, 78 needs a
person.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

from gb10_producer import logs
from gb10_producer.config import ProducerConfig
from gb10_producer.trust import trust_from_key_pipe
from protocol.errors import EXIT_ENGINE_FAULT, EXIT_START_AGAIN, EngineFault
from protocol.restarts import Policy, Restarts

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STOPPING = "stopping…\n".encode()
"""Written past the stream's lock, which the code that a signal interrupts may hold."""
_GRACE_S = 10.0
"""From the signal that asks a child to end to the one that ends it."""


class Supervisor:
    """Runs children of one configuration until one of them has the last word."""

    def __init__(
        self,
        config: ProducerConfig,
        *,
        policy: Policy | None = None,
        grace_s: float = _GRACE_S,
        command: Callable[[ProducerConfig], list[str]] | None = None,
    ) -> None:
        self._config = config
        self._restarts = Restarts(policy or Policy())
        self._grace_s = grace_s
        self._command = command or child_command
        self._key: bytes | None = None
        self._child: subprocess.Popen[str] | None = None
        self._asked = threading.Event()
        self._announced: set[str] = set()
        self.starts = 0

    def run(self) -> int:
        """Supervise until the end; return the exit status for this process."""
        if self._config.key_fd is not None:
            # A pipe is read once, and there may be several children.
            self._key = trust_from_key_pipe(self._config.key_fd).pairing.key
        self._forward_signals()
        while True:
            status, served_s = self._run_child()
            if self._asked.is_set():
                return 0
            if status == EXIT_START_AGAIN:
                log.info("the producer starts again, for another model")
                continue
            if status >= 0 and status != EXIT_ENGINE_FAULT:
                return status
            self._restarts = restarts = self._restarts.after(status, served_s)
            if restarts.latched:
                return self._give_up()
            log.warning(
                "the producer failed and is started again",
                extra={
                    "fault": restarts.last_fault,
                    "in_a_row": restarts.deaths,
                    "pause_s": restarts.pause_s,
                },
            )
            if self._asked.wait(restarts.pause_s):
                return 0

    def _give_up(self) -> int:
        logs.complain(
            EngineFault(
                f"The producer failed {self._restarts.deaths} times in a row and stays off.",
                reason="producer_latched_off",
                found=self._restarts.last_fault,
                hint="See its log above; restart the machine if its device hangs.",
            )
        )
        return EXIT_ENGINE_FAULT

    def _run_child(self) -> tuple[int, float | None]:
        """Start one child and wait for its end: its status, and how long it was ready."""
        lifeline, held = os.pipe()
        config = replace(self._config, lifeline_fd=lifeline)
        passed = [lifeline]
        if self._key is not None:
            key_end, writing = os.pipe()
            os.write(writing, self._key)
            os.close(writing)
            passed.append(key_end)
            config = replace(config, key_fd=key_end)
        self.starts += 1
        try:
            child = subprocess.Popen(
                self._command(config),
                stdout=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                text=True,
                process_group=0,  # a terminal's Ctrl-C reaches the child through us only
            )
        finally:
            for descriptor in passed:
                os.close(descriptor)
        self._child = child
        if self._asked.is_set():
            child.terminate()
        try:
            ready_at = self._read_stdout(child)
            status = child.wait()
        finally:
            os.close(held)
            self._child = None
        return status, None if ready_at is None else time.monotonic() - ready_at

    def _read_stdout(self, child: subprocess.Popen[str]) -> float | None:
        """Read until the child closes its stdout; return when it began to do what it can."""
        assert child.stdout is not None
        began = None
        with child.stdout as lines:
            for line in lines:
                word = line.partition(" ")[0]
                if word in ("ready", "waiting"):
                    began = began or time.monotonic()
                    self._keep_port(line.split()[1])
                    if word not in self._announced:
                        self._announced.add(word)
                        print(line.rstrip(), flush=True)
                elif word == "paired":
                    # What was asked for is done: a later child shows no code.
                    self._config = replace(self._config, pair=False)
                    print(line.rstrip(), flush=True)
        return began

    def _keep_port(self, url: str) -> None:
        """Have later children use the port that the first one got."""
        port = int(url.rsplit(":", 1)[1])
        self._config = replace(self._config, port=port)

    def _forward_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return

        heard: set[int] = set()

        def forward(number: int, _frame: FrameType | None) -> None:
            first, again = not self._asked.is_set(), number in heard
            heard.add(number)
            self._asked.set()
            if first:
                with contextlib.suppress(OSError):  # nobody may be there to read it
                    os.write(2, _STOPPING)
            child = self._child
            if child is None or child.poll() is not None:
                return
            if again:
                child.kill()  # asked twice: whoever asks does not want to wait
            elif first:
                # Not Ctrl-C's: one that still imports would answer that with a traceback.
                child.terminate()
                self._kill_later(child)

        for number in _SIGNALS:
            signal.signal(number, forward)

    def _kill_later(self, child: subprocess.Popen[str]) -> None:
        """End a child that does not go by itself."""
        timer = threading.Timer(self._grace_s, child.kill)
        timer.daemon = True
        timer.start()


def child_command(config: ProducerConfig) -> list[str]:
    """The command that runs a producer without supervision."""
    return [sys.executable, "-m", "gb10_producer", "--no-supervisor", *config.arguments()]


def run(config: ProducerConfig) -> int:
    """Supervise a producer of ``config``; return the exit status of this process."""
    logs.configure(config.log_level)
    return Supervisor(config).run()
