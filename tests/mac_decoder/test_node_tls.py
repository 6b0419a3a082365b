"""The decoder as others reach it: keys from ``baton key``, TLS, and an abort in the middle."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from app.commands import app
from tests.e2e.running import until
from tests.mac_decoder.test_node import CHAT, Decoder

ELSEWHERE = ("--host", "0.0.0.0", "--port", "0", "--allow-host", "decoder.example")


def baton_key(*args: str, state: Path) -> str:
    done = CliRunner().invoke(app, ["key", *args, "--state-dir", str(state)])
    assert done.exit_code == 0, done.exception
    return done.stdout.strip()


class Reached:
    """A decoder that other machines can reach, as one of them sees it."""

    def __init__(self, state: Path, model: Path) -> None:
        self.running = Decoder(state, "--model", str(model), *ELSEWHERE)
        assert self.running.process.stdout is not None
        ready = self.running.process.stdout.readline()
        assert ready.startswith("ready https://127.0.0.1:"), self.running.log
        self.url = ready.split()[1]
        self.port = int(self.url.rpartition(":")[2])
        name, path, kind, self.fingerprint = self.running.process.stdout.readline().split()
        assert (name, kind) == ("certificate", "sha256")
        self.context = ssl.create_default_context(cafile=path)

    def client(self, key: str | None) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(
            base_url=self.url, verify=self.context, headers=headers, timeout=30, trust_env=False
        )

    def raw(self, name: str = "decoder.example") -> ssl.SSLSocket:
        opened = socket.create_connection(("127.0.0.1", self.port), 30)
        return self.context.wrap_socket(opened, server_hostname=name)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def key(state: Path) -> str:
    return baton_key("create", "laptop", state=state)


@pytest.fixture(scope="module")
def reached(checkpoint, state: Path, key: str) -> Iterator[Reached]:
    found = Reached(state, checkpoint("llama"))
    with closing(found.running):
        yield found


def test_clients_need_a_key_which_is_known_and_revoked_while_it_runs(
    reached: Reached, state: Path, key: str
) -> None:
    with reached.client(key) as http, reached.client(None) as nobody:
        assert nobody.get("/health").status_code == 200
        for path in ("/v1/models", "/status", "/metrics"):
            assert nobody.get(path).status_code == 401
            assert http.get(path).status_code == 200
        assert http.get("/status").json()["model_path"] is None, "it is nobody's business"
        door = http.get("/status").json()["door"]
        assert door["certificate_sha256"] == reached.fingerprint
        assert (door["keys"], door["keys_demanded"]) == (1, True)
        assert door["refused"]["invalid_api_key"] == 3
        another = baton_key("create", "another", state=state)
        with reached.client(another) as second:
            until(lambda: second.get("/v1/models").status_code == 200, 2)
            baton_key("revoke", "another", state=state)
            until(lambda: second.get("/v1/models").status_code == 401, 2)
    with httpx.Client(verify=reached.context, trust_env=False) as http:
        hostile = {"host": "evil.example", "authorization": f"Bearer {key}"}
        assert http.get(f"{reached.url}/v1/models", headers=hostile).status_code == 403


def test_the_certificate_is_the_one_that_was_printed_and_logged(reached: Reached) -> None:
    with reached.raw() as connection:
        shown = connection.getpeercert(binary_form=True)
        assert shown is not None
    assert hashlib.sha256(shown).hexdigest() == reached.fingerprint
    assert reached.fingerprint in reached.running.log


def test_no_secret_is_seen_anywhere(reached: Reached, state: Path, key: str) -> None:
    secret = key.removeprefix("baton-")
    supervisor = psutil.Process(reached.running.process.pid)
    for process in (supervisor, *supervisor.children(recursive=True)):
        assert secret not in " ".join(process.cmdline())
        assert secret not in json.dumps(process.environ())
    with reached.client(key) as http:
        for path in ("/status", "/metrics", "/ready"):
            assert secret not in http.get(path).text
    for path in state.rglob("*"):
        if path.is_file():
            raw = path.read_bytes()
            assert secret.encode() not in raw, path
            named = path.name == "identity.pem"
            assert (b"PRIVATE KEY" in raw) == named, path
            if named:
                assert path.stat().st_mode & 0o077 == 0


def test_an_abort_never_makes_it_speak_in_the_clear(reached: Reached, key: str) -> None:
    """A stream is cut off without TLS's goodbye; who comes then is told, over TLS."""
    running = reached.running
    first = running.child()
    with reached.client(key) as http:
        name = http.get("/v1/models").json()["data"][0]["id"]
    body = json.dumps({"model": name, **CHAT, "stream": True, "max_tokens": 2000}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: decoder.example\r\n"
    head += f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    opened = socket.create_connection(("127.0.0.1", reached.port), 30)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = reached.context.wrap_bio(incoming, outgoing, server_hostname="decoder.example")
    on_the_wire = b""

    def step(doing, *args):
        nonlocal on_the_wire
        while True:
            try:
                return doing(*args)
            except ssl.SSLWantReadError:
                opened.sendall(outgoing.read())
                piece = opened.recv(1 << 16)
                on_the_wire += piece
                incoming.write(piece) if piece else incoming.write_eof()
            finally:
                opened.sendall(outgoing.read())

    def to_the_end():
        nonlocal seen
        while piece := step(session.read, 1 << 16):
            seen += piece

    seen = b""
    with opened:
        step(session.do_handshake)
        step(session.write, head.encode() + body)
        while seen.count(b"data: ") < 5:
            seen += step(session.read, 1 << 16)
        os.kill(first.pid, signal.SIGABRT)
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            to_the_end()
    assert b"[DONE]" not in seen
    assert b"decoder_restarted" not in on_the_wire
    assert b"HTTP/1.1" not in on_the_wire
    codes: list[str] = []
    deadline = time.monotonic() + 60
    with reached.client(key) as http:
        while time.monotonic() < deadline and codes[-1:] != ["200"]:
            answer = http.get("/v1/models", headers={"connection": "close"})
            known = answer.status_code == 200
            codes.append("200" if known else answer.json()["error"]["code"])
            time.sleep(0.05)
        assert codes[-1] == "200"
        assert "decoder_restarting" in codes
        past = http.get("/status").json()["supervisor"]
        assert past["last_fault"] == "signal SIGABRT"
    with reached.raw() as connection:
        assert connection.version() == "TLSv1.3", "and the certificate is still the trusted one"
