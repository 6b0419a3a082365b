"""A producer and a decoder on one machine: two real processes, an ephemeral key, loopback only.

The key exists in this process' memory and in two pipes; nothing writes it anywhere.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from app.children import Child, start

START_TIMEOUT_S: Final = 600.0
"""How long a process may take to load its model."""


@dataclass(frozen=True)
class Loopback:
    """Both processes, ready."""

    producer: Child
    decoder: Child

    @property
    def url(self) -> str:
        """Where the OpenAI endpoint is."""
        return self.decoder.url


@contextmanager
def loopback(
    model: Path,
    *,
    producer_arguments: tuple[str, ...] = (),
    decoder_arguments: tuple[str, ...] = (),
) -> Iterator[Loopback]:
    """Start both processes on ``model``, wait until both are ready, and end both on exit."""
    with ExitStack() as stack:
        state = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-demo-"))
        key = secrets.token_bytes(32)
        shared = ["--model", str(model), "--host", "127.0.0.1", "--port", "0"]
        shared += ["--key-fd", "{key_fd}"]
        producer = start(
            "producer",
            [sys.executable, "-m", "gb10_producer", *shared, *producer_arguments],
            key,
        )
        stack.callback(producer.end)
        producer.wait_ready(START_TIMEOUT_S)
        decoder = start(
            "decoder",
            [
                *[sys.executable, "-m", "mac_decoder", *shared, *decoder_arguments],
                *["--producer", producer.url, "--state-dir", state],
            ],
            key,
        )
        stack.callback(decoder.end)
        decoder.wait_ready(START_TIMEOUT_S)
        # Both leave at once; their ends are then waited for one after the other.
        stack.callback(_end_both, producer, decoder)
        yield Loopback(producer, decoder)


def _end_both(*children: Child) -> None:
    with ThreadPoolExecutor(len(children)) as pool:
        list(pool.map(Child.end, children))
