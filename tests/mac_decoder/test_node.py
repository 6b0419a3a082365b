"""The decoder as a user starts it: a real process, a real (tiny) model, real sockets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.e2e.running import until

CHAT = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}


class Decoder:
    """``python -m mac_decoder``, or another program that takes its arguments."""

    def __init__(
        self,
        state: Path,
        *args: str,
        key: bytes | None = None,
        program: Sequence[str] = (sys.executable, "-m", "mac_decoder"),
    ) -> None:
        self.log_path = state / "log"
        command = [*program, "--state-dir", str(state), *args]
        command += ["--cache-dir", str(state / "cache")]
        inherited: tuple[int, ...] = ()
        if key is not None:
            reading, writing = os.pipe()
            os.write(writing, key)
            os.close(writing)
            inherited = (reading,)
            command += ["--key-fd", str(reading)]
        with self.log_path.open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, pass_fds=inherited
            )
        for descriptor in inherited:
            os.close(descriptor)
        self.client = httpx.Client(timeout=30.0)
        self.url = ""
        self.lines: list[str] = []

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def await_ready(self) -> Decoder:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready http://127.0.0.1:"), self.log
        self.url = line.split()[1]
        return self

    def get(self, path: str) -> httpx.Response:
        return self.client.get(self.url + path, headers={"Connection": "close"})

    def ready(self) -> int:
        try:
            return self.get("/ready").status_code
        except httpx.TransportError:
            return 0

    def chat(self, **more: object) -> httpx.Response:
        name = self.get("/v1/models").json()["data"][0]["id"]
        body = {"model": name, **CHAT, **more}
        return self.client.post(self.url + "/v1/chat/completions", json=body)

    def stream(self, body: object, in_the_middle: Callable[[], object]) -> None:
        """Read a stream into ``lines``; do something after five of them."""
        self.lines = []
        url = self.url + "/v1/chat/completions"
        with self.client.stream("POST", url, json=body) as stream:
            for line in stream.iter_lines():
                self.lines.append(line)
                if len(self.lines) == 5:
                    in_the_middle()

    def child(self) -> psutil.Process:
        return psutil.Process(self.process.pid).children()[0]

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(15)

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.stop()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def decoder(tmp_path: Path) -> Iterator[Callable[..., Decoder]]:
    made: list[Decoder] = []

    def make(*args: str, key: bytes | None = None) -> Decoder:
        made.append(Decoder(tmp_path, *args, key=key))
        return made[-1]

    yield make
    for running in made:
        running.close()


def refused(running: Decoder, reason: str) -> str:
    """The complaint of a decoder that must end with status 78."""
    assert running.process.wait(60) == 78, running.log
    complaint = running.log.strip().splitlines()
    told = [line for line in complaint if line.startswith("baton serve: ")]
    assert len(told) == 1, running.log
    assert f"({reason})" in told[0]
    assert "Traceback" not in running.log
    return told[0]


FROZEN = """
import gc, sys
from mac_decoder import node
from mac_decoder.config import config_from

tell = node._Node._tell_ready

def told(self):
    print("frozen", gc.get_freeze_count(), len(gc.get_objects()), flush=True)
    tell(self)

node._Node._tell_ready = told
sys.exit(node.run(config_from(sys.argv[1:])))
"""


def test_no_search_for_garbage_goes_through_what_stays(tmp_path, checkpoint):
    alone = ("--model", str(checkpoint("llama")), "--port", "0")
    running = Decoder(tmp_path, *alone, program=(sys.executable, "-c", FROZEN))
    try:
        assert running.process.stdout is not None
        _, frozen, others = running.process.stdout.readline().split()
        assert running.await_ready().stop() == 0
    finally:
        running.close()
    assert int(frozen) > 50 * int(others)


def test_it_serves_restarts_after_an_abort_and_stops(decoder, checkpoint):
    running = decoder("--model", str(checkpoint("llama")), "--port", "0").await_ready()
    assert running.ready() == 200
    # What the first request would wait for was done before.
    assert "read the texts of all tokens" in running.log
    if sys.platform == "linux":
        loaded = {Path(mapped.path).name for mapped in running.child().memory_maps()}
        assert not any("torch" in name for name in loaded), "the other half's, and two seconds"
    # A terminal shows both; it is said once.
    assert "ready" not in running.log
    answer = running.chat(max_tokens=5).json()
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert answer["baton"]["source"] == "local"

    # Clients get an error that they can tell from an end: one in mid-stream, one that waits.
    name = running.get("/v1/models").json()["data"][0]["id"]
    body = {"model": name, **CHAT, "stream": True, "max_tokens": 2000}
    first = running.child().pid
    with ThreadPoolExecutor(1) as threads:
        client = openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)
        # Drawn at random, an end would come soon and to anybody.
        asking = partial(client.chat.completions.create, model=name, max_tokens=2000, **CHAT)
        waiting = threads.submit(asking)
        stream = iter(asking(stream=True))
        for _ in range(5):
            assert next(stream).choices
        until(lambda: running.get("/status").json()["engine"]["open"] == 2)
        os.kill(first, signal.SIGABRT)
        with pytest.raises(openai.APIError) as told:
            list(stream)
        assert told.value.code == "decoder_restarted"
        refusal = waiting.exception(10)
        assert isinstance(refusal, openai.InternalServerError)
        assert (refusal.status_code, refusal.code) == (503, "decoder_restarted")
        assert refusal.response.headers["retry-after"] == "5"

    statuses: list[int] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not statuses or statuses[-1] != 200):
        statuses.append(running.get("/ready").status_code)
        time.sleep(0.05)
    assert statuses[-1] == 200
    assert set(statuses[:-1]) == {503}
    assert running.await_ready().child().pid != first
    past = running.get("/status").json()["supervisor"]
    assert past == {"restarts": 1, "last_fault": "signal SIGABRT", "connections_missed": 0}
    assert running.chat(max_tokens=5).json()["choices"] == answer["choices"]

    # SIGTERM: the open stream ends with an error event, and soon.
    running.stream(body, running.process.terminate)
    events = [json.loads(line[6:]) for line in running.lines if line.startswith("data: {")]
    assert "error" in events[-1]
    assert running.process.wait(10) == 0


def test_a_missing_model_is_told(decoder, tmp_path):
    complaint = refused(
        decoder("--model", str(tmp_path / "nowhere"), "--port", "0"), "model_missing"
    )
    assert "nowhere" in complaint


def test_a_port_that_is_taken_is_told(decoder, checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        complaint = refused(
            decoder("--model", str(checkpoint("llama")), "--port", port), "port_taken"
        )
    assert port in complaint


def test_an_architecture_that_cannot_be_carried_over_is_told(decoder, checkpoint, tmp_path):
    import shutil

    copied = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), copied)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "model_type": "jamba"}))
    complaint = refused(decoder("--model", str(copied), "--port", "0"), "architecture_unsupported")
    assert "jamba" in complaint


def test_binding_elsewhere_without_keys_is_told(decoder, tmp_path):
    refused(decoder("--model", str(tmp_path), "--host", "0.0.0.0"), "bind_needs_keys")


def test_a_pairing_that_others_can_read_is_told(decoder, checkpoint, tmp_path):
    path = tmp_path / "decoder.pairing"
    path.write_text("{}")
    path.chmod(0o644)
    args = ("--model", str(checkpoint("llama")), "--producer", "wss://127.0.0.1:1")
    refused(decoder(*args, "--port", "0", "--pairing", str(path)), "pairing_exposed")
