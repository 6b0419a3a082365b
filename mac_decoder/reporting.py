"""What the decoder's processes write for people: log lines and complaints, to standard error.

Exceptions carry values in their messages, and values here are prompts; so no message of an
unexpected exception reaches a log, only its type and the lines that it came through.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Final

from protocol.errors import BatonError, told

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""Of a line of the log; who starts a decoder reads in it why one has ended."""


def start_logging(level: str) -> None:
    """Log to standard error, one line an event, from ``level`` on."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=FORMAT,
        force=True,
    )
    # uvicorn tells of its start and stop, which ours does better.
    logging.getLogger("uvicorn").setLevel("WARNING")


def complain(error: BatonError) -> None:
    """Tell a person what is wrong and what can be done."""
    print(told(error, "baton serve"), file=sys.stderr, flush=True)


def traced(error: BaseException) -> str:
    """An unexpected exception's type and the lines it came through, innermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in frames[::-1])
    return f"{type(error).__name__} at {places or 'an unknown place'}"
