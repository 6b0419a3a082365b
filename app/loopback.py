"""A producer and a decoder on one machine: two real processes, an ephemeral key, loopback only.

The key exists in this process' memory and in two pipes; nothing writes it anywhere.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from app.children import Child, start
from app.status import fetch_status
from app.terminal import err, step
from protocol.checkpoint import read_layout, require_tokenizer
from protocol.errors import TransferError

LINK_TIMEOUT_S: Final = 60.0
"""How long both may take to find each other once they are ready."""

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
    """Start both processes on ``model``, wait until both are ready, and end both on exit.

    Raises ConfigError for a checkpoint that they would refuse, before either is started.
    """
    read_layout(model)
    require_tokenizer(model)
    with ExitStack() as stack:
        state = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-demo-"))
        children: list[Child] = []
        stack.callback(_end, children)
        key = secrets.token_bytes(32)
        shared = ["--model", str(model), "--host", "127.0.0.1", "--port", "0"]
        shared += ["--key-fd", "{key_fd}"]
        producer = start(
            "producer",
            [sys.executable, "-m", "gb10_producer", *shared, *producer_arguments],
            key,
        )
        children.append(producer)
        with step("start the producer: torch loads the model", producer.last_words):
            producer.wait_ready(START_TIMEOUT_S)
        decoder = start(
            "decoder",
            [
                *[sys.executable, "-m", "mac_decoder", *shared, *decoder_arguments],
                *["--producer", producer.url, "--state-dir", state, "--no-disk"],
            ],
            key,
        )
        children.append(decoder)
        with step("start the decoder: MLX loads the model", decoder.last_words):
            decoder.wait_ready(START_TIMEOUT_S)
            _wait_for_link(decoder.url)
        yield Loopback(producer, decoder)


def _wait_for_link(url: str) -> None:
    """Wait until both have proven the key to each other.

    A decoder serves before it has met its producer, since it can prefill by itself; a demo or
    benchmark wants both. Raises TransferError with the link's own reason when it is refused.
    """
    until = time.monotonic() + LINK_TIMEOUT_S
    while True:
        link = fetch_status(url, timeout_s=60.0)["engine"]["links"][0]
        if link["state"] == "ready":
            return
        if link["state"] == "refused" or time.monotonic() > until:
            raise TransferError(
                "the decoder does not reach its producer",
                reason=link["reason"] or "link_not_ready",
                found=link["detail"] or link["state"],
            )
        time.sleep(0.05)


def _end(children: list[Child]) -> None:
    """End all of them. Whoever interrupts this does not want to wait."""
    err.print("stopping…")
    for child in children:
        child.ask_to_end()
    try:
        for child in children:
            child.end()
    except KeyboardInterrupt:
        for child in children:
            child.hurry()
        for child in children:
            child.end()
        raise
