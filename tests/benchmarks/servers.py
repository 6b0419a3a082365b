"""Servers to be measured, as processes of their own, and a client that times their streams.

Both are asked in the same way: a new connection for every request, a chat request that is
streamed, the time until the first chunk that says something.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from app.children import start

_START_S: Final = 120.0
_ANSWER_S: Final = 600.0
_WORDS: Final = (
    "the runner takes the baton and the other runner carries it to the line",
    "a cache that is wrong does not fail it answers fluently",
    "between two turns of a conversation most of what was said stays where it was",
    "please summarise this document it describes a garden a river and seven small bridges",
)


@dataclass(frozen=True)
class Server:
    """A server that is ready; ``model`` is what it calls its model."""

    url: str
    model: str


@contextmanager
def baton(model: Path, *options: str) -> Iterator[Server]:
    """`baton serve` on ``model``, on a free port."""
    command = [sys.executable, "-m", "mac_decoder", "--model", str(model), "--port", "0"]
    child = start("decoder", [*command, "--served-name", "bench", *options])
    try:
        yield Server(child.wait_ready(_START_S), "bench")
    finally:
        child.end()


@contextmanager
def mlx_lm(model: Path) -> Iterator[Server]:
    """mlx-lm's own server on ``model``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model)]
    child = start("mlx_lm.server", [*command, "--port", str(port), "--log-level", "WARNING"])
    try:
        until = time.monotonic() + _START_S
        while not _answers(port):
            child.require_running()
            if time.monotonic() > until:
                raise SystemExit("mlx_lm.server does not answer")
            time.sleep(0.1)
        yield Server(f"http://127.0.0.1:{port}", "default_model")
    finally:
        child.end()


def _answers(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@dataclass(frozen=True)
class Heard:
    """One streamed answer: chunks that said something, and when they came."""

    texts: tuple[str, ...]
    arrivals_ms: tuple[float, ...]
    usage: dict[str, Any]
    baton: dict[str, Any]

    @property
    def text(self) -> str:
        """All that was said."""
        return "".join(self.texts)

    @property
    def ttft_ms(self) -> float:
        """From the request's first byte to the first chunk that says something."""
        return self.arrivals_ms[0]

    @property
    def decode_ms(self) -> float:
        """From the first token on, for each of the others."""
        others = self.usage["completion_tokens"] - 1
        return (self.arrivals_ms[-1] - self.arrivals_ms[0]) / others if others > 0 else 0.0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that nobody prefilled for this request."""
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def ask(server: Server, messages: list[dict[str, str]], max_tokens: int) -> Heard:
    """Stream one greedy answer."""
    body = json.dumps(
        {
            "model": server.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    texts: list[str] = []
    arrivals: list[float] = []
    last: dict[str, Any] = {}
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=_ANSWER_S)
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{server.url} refused: {response.read(2000)!r}")
    while (line := response.readline()) != b"data: [DONE]\n":
        if not line:
            raise SystemExit(f"{server.url} ended a stream early")
        if not line.startswith(b"data: "):
            continue
        now = time.perf_counter()
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise SystemExit(f"{server.url} failed: {chunk['error']}")
        said = "".join((c.get("delta") or {}).get("content") or "" for c in chunk["choices"])
        if said:
            arrivals.append((now - began) * 1e3)
            texts.append(said)
        last |= {name: chunk[name] for name in ("usage", "baton") if chunk.get(name)}
    connection.close()
    return Heard(tuple(texts), tuple(arrivals), last.get("usage", {}), last.get("baton", {}))


def status(server: Server) -> dict[str, Any]:
    """What a decoder says about itself."""
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=_ANSWER_S)
    connection.request("GET", "/status")
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found


def words(model: Path, tokens: int, label: str = "") -> str:
    """A text of about ``tokens`` tokens of the tokenizer in ``model``, ``label`` first."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text, number = label, 0
    while (have := len(tokenizer.encode(text).ids)) < tokens:
        for _ in range(max(1, (tokens - have) // 25)):
            text += f" {number} {_WORDS[number % len(_WORDS)]}."
            number += 1
    return text
