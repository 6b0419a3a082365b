"""A producer that shows a code and a decoder that is told it, as two machines have them."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protocol.pairing.code import CODE_WORDS
from protocol.pairing.words import PLACES
from tests.e2e.running import RunningProducer, until
from tests.mac_decoder.test_node import Decoder

BATON = str(Path(sys.executable).with_name("baton"))


def code_in(text: str) -> str | None:
    """The last code in what a producer has said, if it has shown one."""
    found: list[str] = []
    code = None
    for word in re.findall(r"[a-z]+|[^a-z\s]+|\n", text):
        found = [*found, word] if word in PLACES else []
        if len(found) == CODE_WORDS:
            code = " ".join(found)
    return code


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Box:
    """The producer's machine: its state, and a process of `baton produce` with these arguments."""

    def __init__(self, state: Path, *args: str) -> None:
        state.mkdir(parents=True)
        self.state = state
        self.pair_port = free_port()
        where = ("--state-dir", str(state), "--secrets", "file", "--name", "gb10")
        ports = ("--pair-port", str(self.pair_port), "--port", "0")
        self.running = RunningProducer(state, *where, *ports, *args)

    @property
    def said(self) -> str:
        return self.running.log_path.read_text()

    def code(self) -> str:
        """The code that it shows."""
        until(lambda: code_in(self.said) is not None)
        code = code_in(self.said)
        assert code is not None
        return code

    def produce(self, *args: str) -> str:
        """`baton produce` once more on this machine; what it answers."""
        where = ("--state-dir", str(self.state), "--secrets", "file")
        return _run([BATON, "produce", *where, *args]).stdout


class Mac:
    """The decoder's machine: its state, and `baton node` on it."""

    def __init__(self, state: Path, decoder: Decoder) -> None:
        self.state = state
        self.decoder = decoder

    def node(
        self, command: str, *args: str, typed: str = "", status: int = 0, asks: bool = True
    ) -> str:
        """What `baton node` says, both streams; ``asks``: the command asks the decoder."""
        words = [BATON, "node", command, *args]
        words += ["--state-dir", str(self.state), "--secrets", "file"]
        words += ["--url", self.decoder.url] if asks else []
        done = _run(words, typed, status)
        return done.stdout + done.stderr

    def listed(self) -> list[dict[str, Any]]:
        words = ["list", "--json", "--state-dir", str(self.state), "--secrets", "file"]
        return json.loads(_run([BATON, "node", *words, "--url", self.decoder.url]).stdout)

    def await_state(self, state: str) -> dict[str, Any]:
        """The one producer, once it is in this state."""
        until(lambda: [one["state"] for one in self.listed()] == [state])
        (found,) = self.listed()
        return found


def _run(
    words: Sequence[str], typed: str = "", status: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, input=typed, capture_output=True, text=True, timeout=150)
    assert done.returncode == status, done.stdout + done.stderr
    return done
