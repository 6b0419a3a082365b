"""The decoder's parent process: it owns the port, and outlives what Metal may abort.

It opens the listening socket once, starts the node as a child that inherits it, and starts it
again when it ends unasked (exit 75 after an engine fault, any signal), with growing pauses,
until ``protocol.restarts`` says that this is pointless. Whenever no child answers, it answers
itself: nobody is ever refused a connection, and ``/ready`` is never true too early or too long.
What a dead child left in the middle of an answer it finishes (``custody``, ``farewell``).
A child that says that the configuration must be changed (exit 78) ends the supervisor with the
same status.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from mac_decoder import control, endpoint
from mac_decoder.config import DecoderConfig
from mac_decoder.custody import Custody, Duplicates, inherited
from mac_decoder.farewell import Farewells
from mac_decoder.standin import StandIn, Standing, State
from protocol.errors import EXIT_CONFIG, EXIT_ENGINE_FAULT, ConfigError
from protocol.restarts import Policy, Restarts, described

log = logging.getLogger(__name__)

_GRACE_S: Final = 45.0
"""From SIGTERM to SIGKILL: a node that stops may write caches to disk for a while."""

_STOPPING: Final = "stopping…\n".encode()
"""Written past the stream's lock, which the code that a signal interrupts may hold."""


def command(module: str = "mac_decoder") -> tuple[str, ...]:
    """What starts a child that ``module`` runs; the descriptor's number is appended."""
    return (sys.executable, "-m", module, "--child")


@dataclass
class _Child:
    """A running node and the supervisor's end of its channel."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    duplicates: Duplicates | None
    lines: control.Lines = field(default_factory=control.Lines)
    ready_at: float | None = None


def run(
    config: DecoderConfig, command: Sequence[str] = command(), policy: Policy | None = None
) -> int:
    """Serve until SIGTERM or SIGINT; the exit status.

    0 after a stop, 78 for what the user must change first, 75 if it was stopped after it had
    given up on its child. ``command`` starts a child; the number of its channel's descriptor
    is appended. Raises ``ConfigError`` if the port cannot be had, and what ``endpoint.tls_of``
    does. Main thread only.
    """
    endpoint.make_room()
    secured = endpoint.tls_of(config)
    if secured is not None:
        log.info("clients are shown %s, SHA-256 %s", secured.path, secured.fingerprint)
    listening = endpoint.listen(config)
    wake_in, wake_out = socket.socketpair()
    wake_out.setblocking(False)
    # What was ignored stays ignored: that is how nohup works.
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.getsignal(number) for number in numbers}
    previous_fd = signal.set_wakeup_fd(wake_out.fileno(), warn_on_full_buffer=False)
    context = None if secured is None else secured.context
    supervisor = _Supervisor(config, listening, wake_in, command, policy or Policy(), context)
    try:
        for number in numbers:
            signal.signal(number, supervisor.stop)
        return supervisor.run()
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        for opened in (listening, wake_in, wake_out):
            opened.close()


class _Supervisor:
    def __init__(
        self,
        config: DecoderConfig,
        listening: socket.socket,
        wake: socket.socket,
        command: Sequence[str],
        policy: Policy,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._config = config
        self._listening = listening
        self._wake = wake
        self._command = command
        self._restarts = Restarts(policy)
        self._state: State = "starting"
        self._stopping = False
        self._heard: set[int] = set()
        self._child: _Child | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake, selectors.EVENT_READ)
        self._farewells = Farewells()
        # As the node will.
        self._stand_in = StandIn(listening, self._standing, config.own_names, config.origins, tls)

    def stop(self, number: int, _frame: object) -> None:
        """Signal handler: leave as soon as the child has; asked twice, at once."""
        if not self._stopping:
            with contextlib.suppress(OSError):  # nobody may be there to read it
                os.write(2, _STOPPING)
        if number in self._heard and self._child is not None:
            self._child.process.kill()
        self._heard.add(number)
        self._stopping = True

    def run(self) -> int:
        self._stand_in.begin()
        try:
            while not self._stopping:
                status = self._one_life()
                if self._stopping:
                    break
                if status == EXIT_CONFIG:
                    return EXIT_CONFIG
                self._pause()
            return EXIT_ENGINE_FAULT if self._restarts.latched else 0
        finally:
            self._stand_in.end()
            self._farewells.end()
            self._selector.close()

    def _one_life(self) -> int:
        """Start a child and watch it to its end; its exit status."""
        self._child = child = self._start()
        try:
            self._watch(child)
            status = self._end(child)
            left = [] if child.duplicates is None else child.duplicates.taken()
        finally:
            self._child = None
            child.channel.close()
            if child.duplicates is not None:
                child.duplicates.close()
        if not self._stopping:
            # Before anything else: clients that wait in the socket's queue get an answer.
            served_s = None if child.ready_at is None else time.monotonic() - child.ready_at
            self._restarts = self._restarts.after(status, served_s)
            self._state = "latched" if self._restarts.latched else "restarting"
            if status == EXIT_CONFIG:
                self._state = "stopping"
            self._stand_in.begin()
            log.error(
                "the decoder's process ended (%s), %d in a row",
                described(status),
                self._restarts.deaths,
            )
        self._farewells.begin(left, self._farewell())
        return status

    def _start(self) -> _Child:
        ours, theirs = socket.socketpair()
        # Without the child's session nobody can go on with a connection behind TLS.
        duplicates = None if self._config.uses_tls else _duplicates()
        passed = [theirs.fileno(), self._listening.fileno()]
        if duplicates is not None:
            passed += [duplicates.theirs.fileno(), duplicates.page_fd]
        start = control.Start(
            self._config,
            self._listening.fileno(),
            self._restarts.total,
            self._restarts.last_fault,
            *passed[2:],
        )
        with theirs:
            process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                # A terminal's Ctrl-C reaches the supervisor alone, which then ends the child.
                process_group=0,
            )
        if duplicates is not None:
            duplicates.passed_on()
        try:
            control.send_start(ours, start)
        except OSError:
            log.error("the decoder's process ended before it was told what to do")
        return _Child(process, ours, duplicates)

    def _watch(self, child: _Child) -> None:
        """Return when the child's channel ends or a stop is asked for."""
        ears: dict[socket.socket, Callable[[], bool]] = {
            child.channel: partial(self._heard_from, child)
        }
        if child.duplicates is not None:
            ears[child.duplicates.channel] = child.duplicates.hear
        for channel in ears:
            self._selector.register(channel, selectors.EVENT_READ)
        try:
            while not self._stopping and child.channel in ears:
                for channel in self._select(None):
                    if channel in ears and not ears[channel]():
                        del ears[channel]
                        self._selector.unregister(channel)
        finally:
            for channel in ears:
                self._selector.unregister(channel)

    def _heard_from(self, child: _Child) -> bool:
        """Go by what the child says; false once it says nothing more."""
        try:
            data = child.channel.recv(4096)
        except OSError:
            data = b""
        for line in child.lines.take(data):
            self._hear(child, line)
        return bool(data)

    def _hear(self, child: _Child, line: bytes) -> None:
        if line == control.SERVING:
            self._stand_in.end()
            control.send_line(child.channel, control.GO)
        elif line == control.READY:
            child.ready_at = time.monotonic()

    def _end(self, child: _Child) -> int:
        """Wait for the child, with as much force as it takes; its exit status."""
        if self._stopping:
            self._state = "stopping"
            child.process.terminate()
        try:
            return child.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            log.error("the decoder's process does not end: killing it")
            child.process.kill()
            return child.process.wait()

    def _pause(self) -> None:
        """Wait before the next start; for ever once it is given up."""
        if self._restarts.latched:
            log.error("%d faults in a row: not starting it again", self._restarts.deaths)
        until = time.monotonic() + self._restarts.pause_s
        while not self._stopping:
            left = until - time.monotonic()
            if not self._restarts.latched and left <= 0:
                return
            self._select(None if self._restarts.latched else left)

    def _select(self, timeout_s: float | None) -> list[socket.socket]:
        """Wait for a channel, a signal, or the time; returns what is readable."""
        readable = [
            key.fileobj
            for key, _ in self._selector.select(timeout_s)
            if isinstance(key.fileobj, socket.socket)
        ]
        if self._wake in readable:
            self._wake.recv(4096)
        return readable

    def _standing(self) -> Standing:
        restarts = self._restarts
        code, message, retry_after_s = {
            "starting": ("decoder_starting", "the decoder is starting", 2),
            "restarting": ("decoder_restarting", "the decoder failed and is starting again", 5),
            "stopping": ("decoder_stopping", "the decoder is stopping", 5),
            "latched": (
                "decoder_latched_off",
                "the decoder failed too often in a row; see its log, then restart it",
                None,
            ),
        }[self._state]
        return Standing(
            self._state, code, message, retry_after_s, restarts.total, restarts.last_fault
        )

    def _farewell(self) -> Standing:
        """What is told to clients whose answer a child did not finish."""
        standing = self._standing()
        if self._state != "restarting":
            return standing
        message = "the decoder failed while it worked on this request, and is starting again"
        return replace(standing, code="decoder_restarted", message=message)


def _duplicates() -> Duplicates | None:
    """A new child's connections; ``None`` where there is no room for them."""
    try:
        return Duplicates()
    except OSError as error:
        log.warning("a fault will reset clients' connections: %s", error.strerror)
        return None


def take_over(descriptor: int) -> tuple[control.Start, socket.socket, socket.socket]:
    """A child's side: what it is told, the listening socket, and the channel.

    Raises ``ConfigError`` (``not_supervised``).
    """
    try:
        channel = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ConfigError(
            "this process was not started by a supervisor", reason="not_supervised"
        ) from error
    start = control.receive_start(channel)
    # macOS does not say what protocol a socket has, and asyncio writes without delay where it
    # says TCP alone: else every second piece of an answer waits for the client's kernel.
    listening = socket.socket(proto=socket.IPPROTO_TCP, fileno=start.listening_fd)
    for opened in (channel, listening):
        os.set_inheritable(opened.fileno(), False)
    return start, listening, channel


def custody(start: control.Start) -> Custody | None:
    """A child's side of what its supervisor knows of its connections."""
    if start.custody_fd is None or start.page_fd is None:
        return None
    return inherited(start.custody_fd, start.page_fd)
