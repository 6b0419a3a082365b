"""Starting and stopping this machine's decoder: only what this app may.

A decoder that runs is used as it is. Where none does, the installed service is started, or
`baton serve` as a child of this app, which ends with it, however it ends. A decoder that
somebody else started is never stopped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from app import install
from app.children import GRACE_S
from app.menubar.logfile import LogFile
from app.menubar.place import settings_now
from app.service import Installed, environment
from protocol.errors import BatonError, ConfigError

COMMAND: Final = (sys.executable, "-m", "app.cli", "serve")

_LIFELINE: Final = (sys.executable, "-m", "app.lifeline")


class Child:
    """A running `baton serve` under a lifeline: it ends when this process lets go of it, or is
    gone. From :meth:`listen` on, what it says goes to a log, and ``ended`` is called with its exit
    status in a thread of its own.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: LogFile,
        ended: Callable[[int], None],
        grace_s: float = GRACE_S,
    ) -> None:
        self._log, self._ended = log, ended
        lifeline, self._held = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*_LIFELINE, str(lifeline), str(grace_s), "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[lifeline],
                start_new_session=True,
                env=os.environ | environment(),
            )
        except OSError:
            os.close(self._held)
            raise
        finally:
            os.close(lifeline)
        self._reader = threading.Thread(target=self._read, name="baton-decoder-log", daemon=True)

    def listen(self) -> None:
        """Begin to keep what it says. Not before the caller is ready for its end, which comes at
        once where it is gone already.
        """
        self._reader.start()

    def ask_to_end(self) -> None:
        """Have it end; returns at once."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within this time, and all that it said is in the log."""
        self._reader.join(timeout_s)
        return not self._reader.is_alive()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as said:
            while piece := os.read(said.fileno(), 1 << 16):
                self._log.write(piece)
        status = self._process.wait()
        self._log.close()
        self._ended(status)


class Decoder:
    """The decoder of this machine, as far as it is this app's.

    Everything that takes time is done in a thread of its own, in order; ``changed`` is called
    from it whenever :attr:`ours` may be another, ``failed`` with what did not work. Both also
    when the decoder ends by itself.
    """

    def __init__(
        self,
        log: LogFile,
        changed: Callable[[], None],
        failed: Callable[[BatonError], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.log = log
        self._changed, self._failed = changed, failed
        self._command = command
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="baton-decoder")
        self._child: Child | None = None
        self._settings = b""
        """Those with which the child was started."""

        self._asked_to_end = False
        self._again = False
        self._quitting = self._stopping_service = False
        self._service: Installed | None = None

    @property
    def service(self) -> Installed | None:
        """The installed service as it was last looked at, if there is one."""
        return self._service

    @property
    def ours(self) -> bool:
        """Whether the decoder that runs, if one does, may be stopped here."""
        return self._child is not None or bool(self._service and self._service.runs)

    @property
    def coming(self) -> bool:
        """Whether a child runs that will listen where the settings say now."""
        started = self._child is not None and not self._asked_to_end
        return started and self._settings == settings_now()

    @property
    def ending(self) -> bool:
        """Whether it was asked to end and has not yet: no fault is one now."""
        return (self._child is not None and self._asked_to_end) or self._stopping_service

    def look(self) -> None:
        """Look for the installed service; ``changed`` follows."""
        self._do(self._look)

    def start(self) -> None:
        """Start a decoder: the service where one is installed, else a child, which is replaced if
        it was started with other settings.
        """
        self._do(self._start)

    def stop(self) -> None:
        """Stop it, if it is this app's."""
        self._do(self._stop)

    def restart(self) -> None:
        """Stop it and start it again, with the settings as they are now."""
        self._do(self._restart)

    def quit(self, patience_s: float = GRACE_S + 5) -> None:
        """End what this app has started; a service, and a decoder of somebody else, stay."""
        self._quitting = True
        self._worker.shutdown(wait=True, cancel_futures=True)
        child = self._child
        self._end_child(again=False)
        if child is not None:
            child.wait(patience_s)

    def _do(self, what: Callable[[], None]) -> None:
        def done() -> None:
            try:
                what()
            except BatonError as error:
                self._failed(error)
            finally:
                self._changed()

        if not self._quitting:
            self._worker.submit(done)

    def _look(self) -> None:
        try:
            self._service = install.installed("decoder")
        except ConfigError:
            self._service = None  # no service manager: nothing is installed

    def _start(self) -> None:
        self._look()
        if self._service is not None:
            install.start("decoder")
            self._look()
        elif self._child is not None and not self.coming:
            self._end_child(again=True)
        elif self._child is None:
            self._asked_to_end = self._again = False
            self._settings = settings_now()
            try:
                child = Child(self._command, self.log, self._has_ended)
            except OSError as error:
                raise ConfigError(
                    "the decoder cannot be started",
                    reason="child_failed",
                    field="decoder",
                    found=error.strerror,
                ) from error
            self._child = child
            child.listen()

    def _stop(self) -> None:
        self._look()
        if self._child is not None:
            self._end_child(again=False)
        elif self._service is not None and self._service.runs:
            self._stop_service()
            self._look()

    def _restart(self) -> None:
        self._look()
        if self._child is not None:
            # The next one cannot have the port before this one has let go of it.
            self._end_child(again=True)
        elif self._service is not None and self._service.runs:
            self._stop_service()
            install.start("decoder")
            self._look()

    def _stop_service(self) -> None:
        self._stopping_service = True
        self._changed()
        try:
            install.stop("decoder")
        finally:
            self._stopping_service = False

    def _end_child(self, *, again: bool) -> None:
        """Have the child end; ``again``: and another one start then."""
        child = self._child
        self._asked_to_end, self._again = True, again
        if child is not None:
            child.ask_to_end()

    def _has_ended(self, status: int) -> None:
        """The child has ended; in its own thread."""
        asked, again = self._asked_to_end, self._again
        self._child = None
        if again:
            self.start()
        elif not asked:
            self._failed(
                ConfigError(
                    "the decoder has ended",
                    reason="child_failed",
                    field="decoder",
                    found=f"exit {status}",
                    hint=self.log.last_words() or None,
                )
            )
        self._changed()
