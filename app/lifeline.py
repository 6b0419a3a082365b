"""Runs a command and ends it when its starter is gone: ``python -m app.lifeline FD S -- COMMAND``.

FD is the reading end of a pipe whose writing end only the starter holds. Its end of file
means that the starter is done or dead, even by SIGKILL; the command is then terminated, and
killed if it does not go within S seconds. Other inherited descriptors stay open for the
command. Exit status: the command's own, or 128 plus the signal that ended it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys


def main(arguments: list[str]) -> int:
    """Run ``arguments[3:]`` until it ends or the lifeline does."""
    lifeline, grace_s, command = int(arguments[0]), float(arguments[1]), arguments[3:]
    kept = [int(name) for name in os.environ.pop("BATON_KEEP_FDS", "").split(",") if name]
    child = subprocess.Popen(command, pass_fds=kept, process_group=0)
    for descriptor in kept:
        os.close(descriptor)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: _terminate(child, signal.SIGTERM))
    ended, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(tell)
    with selectors.DefaultSelector() as selector:
        selector.register(lifeline, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while child.poll() is None:
            for key, _ in selector.select():
                if key.fd == ended:
                    os.read(ended, 4096)
                elif not os.read(lifeline, 4096):
                    selector.unregister(lifeline)
                    return _status(_end(child, grace_s))
    # The command is gone; what it may have left in its group goes too.
    _terminate(child, signal.SIGKILL)
    return _status(child.returncode)


def _end(child: subprocess.Popen[bytes], grace_s: float) -> int:
    """Terminate the command's group, then kill what is left of it."""
    _terminate(child, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace_s)
    _terminate(child, signal.SIGKILL)
    return child.wait()


def _terminate(child: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the command's process group; a group that is gone is fine."""
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return


def _status(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
