"""Whether a producer of this state directory lives: a lock that it holds, its children's too.

A port says less: nobody is on it while a child starts again, and another program may be.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from typing import Final

from gb10_producer.config import ProducerConfig

log = logging.getLogger(__name__)

_LOCK: Final = ".running"
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


@contextlib.contextmanager
def shown(config: ProducerConfig) -> Iterator[None]:
    """While this lasts a producer of ``config`` lives, for whoever asks :func:`port_of_another`.

    Nothing is shown of one without a registry, which nobody could pair with, nor where the
    directory cannot be used: whoever opens the registry says why.
    """
    with contextlib.ExitStack() as stack:
        if config.registered:
            try:
                config.state_path.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = os.open(config.state_path / _LOCK, _FLAGS, 0o600)
                stack.callback(os.close, lock)
                # Several may hold it; who asks has it for a moment only.
                fcntl.flock(lock, fcntl.LOCK_SH)
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(config.port).encode(), 0)
            except OSError as error:
                log.warning("nobody can see that this runs", extra={"error": error.strerror})
        yield


def port_of_another(config: ProducerConfig) -> int | None:
    """The port of the producer that lives with this state directory; 0 if it has any free one.

    ``None`` where none does.
    """
    try:
        lock = os.open(config.state_path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        found = os.pread(lock, 5, 0)
        return int(found) if found.isdigit() else 0
    else:
        return None
    finally:
        os.close(lock)
