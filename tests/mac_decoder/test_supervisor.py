"""The supervisor with a child that costs nothing, and what clients see of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest

CHILD = """
import json, os, signal, socket, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from mac_decoder import control, endpoint, supervisor

start, listening, channel = supervisor.take_over(int(sys.argv[1]))
state = start.config.state_dir
with open(os.path.join(state, "starts"), "a") as file:
    file.write(f"{os.getpid()} {start.restarts} {start.last_fault}\\n")
plan = open(os.path.join(state, "plan")).read().split()
step = plan[min(start.restarts, len(plan) - 1)]
if step.startswith("exit"):
    sys.exit(int(step[4:]))
ready = False

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"pid": os.getpid()}).encode()
        self.send_response(200 if ready or self.path != "/ready" else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if self.path == "/abort":
            os.kill(os.getpid(), signal.SIGABRT)
        if self.path == "/fault":
            os._exit(75)
        if self.path == "/config":
            os._exit(78)
    def log_message(self, *args):
        pass

if step == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
control.send_line(channel, control.SERVING)
assert channel.recv(100) == b"go\\n"
server = HTTPServer(("", 0), Handler, bind_and_activate=False)
server.socket.close()
server.socket = listening
threading.Thread(target=server.serve_forever, daemon=True).start()
time.sleep(0.2)
ready = True
control.send_line(channel, control.READY)
print("ready " + endpoint.url_of(listening), flush=True)
try:
    left = not channel.recv(1)
except ConnectionResetError:  # it had not read everything
    left = True
if left:
    with open(os.path.join(state, "orphaned"), "w"):
        os._exit(0)
"""

PROGRAM = """
import sys
from mac_decoder import supervisor
from mac_decoder.config import DecoderConfig
from mac_decoder.reporting import start_logging
from protocol.restarts import Policy

start_logging("info")
supervisor._GRACE_S = float(sys.argv[2])
config = DecoderConfig(model="m", port=0, state_dir=sys.argv[1], key=bytes(32))
command = (sys.executable, sys.argv[1] + "/child.py")
sys.exit(supervisor.run(config, command, Policy(first_pause_s=0.2, quick_deaths=5)))
"""


class Running:
    """A supervisor in a process of its own."""

    def __init__(self, state: Path, plan: str, grace_s: float = 0.5, child: str = CHILD) -> None:
        (state / "child.py").write_text(textwrap.dedent(child))
        (state / "plan").write_text(plan)
        self.state = state
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        with (state / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(state), str(grace_s)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self.client = httpx.Client(timeout=5.0)
        self.url = ""

    def await_ready(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready http://127.0.0.1:"), (self.state / "log").read_text()
        self.url = line.split()[1]
        return self.url

    def get(self, path: str) -> httpx.Response:
        return self.client.get(self.url + path, headers={"Connection": "close"})

    def ready(self) -> int:
        """The status of ``/ready``; 0 where a dying child had accepted the connection."""
        try:
            return self.get("/ready").status_code
        except httpx.TransportError:
            return 0

    def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, (self.state / "log").read_text()
            time.sleep(0.02)

    def starts(self) -> list[list[str]]:
        path = self.state / "starts"
        return [line.split(maxsplit=2) for line in path.read_text().splitlines()]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(10)

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children()
            self.process.kill()
            self.process.wait()
            # These ask nobody whether their supervisor still lives.
            for left in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Callable[[str], Running]]:
    made: list[Running] = []

    def make(plan: str) -> Running:
        made.append(Running(tmp_path, plan))
        return made[-1]

    yield make
    for running in made:
        running.close()


def port_of(running: Running) -> None:
    """Learn the port from the log of a supervisor whose child never becomes ready."""
    # The socket is open as soon as the first child was started; ask the kernel for it.
    running.until(lambda: (running.state / "starts").exists())
    import psutil

    listening = [
        connection.laddr.port
        for connection in psutil.Process(running.process.pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    running.url = f"http://127.0.0.1:{listening[0]}"


def test_ready_is_printed_once_the_child_is(supervised):
    running = supervised("serve")
    running.await_ready()
    assert running.get("/ready").status_code == 200
    assert running.get("/").json()["pid"] != running.process.pid
    assert running.stop() == 0
    with pytest.raises(httpx.ConnectError):
        running.get("/health")


@pytest.mark.parametrize("path", ["/abort", "/fault"])
def test_a_fault_is_answered_by_the_supervisor_and_then_by_a_new_child(supervised, path):
    running = supervised("serve")
    running.await_ready()
    first = running.get(path).json()["pid"]
    running.until(lambda: running.ready() == 503)
    answer = running.get("/v1/models")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "decoder_restarting"
    assert int(answer.headers["Retry-After"]) >= 1
    health = running.get("/health")
    assert health.status_code == 200
    assert health.json()["state"] == "restarting"
    assert health.json()["last_fault"] == ("signal SIGABRT" if path == "/abort" else "exit 75")
    running.await_ready()
    assert running.get("/ready").status_code == 200
    assert running.get("/").json()["pid"] != first
    assert [start[1] for start in running.starts()] == ["0", "1"]
    assert running.stop() == 0


def test_no_connection_is_refused_and_ready_never_lies_through_a_restart(supervised):
    running = supervised("serve")
    running.await_ready()
    running.get("/abort")
    seen = []
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and seen[-3:] != [200, 200, 200]:
        seen.append(running.ready())
    assert seen[-3:] == [200, 200, 200]
    first_ready = max(index for index, status in enumerate(seen) if status != 200) + 1
    assert 503 in seen
    assert all(status == 200 for status in seen[first_ready:])


def test_a_request_with_a_body_gets_its_answer_while_the_child_is_down(supervised):
    running = supervised("exit75")
    port_of(running)
    answer = running.client.post(running.url + "/v1/chat/completions", content=b"x" * 300_000)
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "server_error"


def test_children_that_were_ready_have_not_failed_to_start(supervised):
    running = supervised("serve")
    for number in range(4):
        running.await_ready()
        assert len(running.starts()) == number + 1
        running.get("/fault")
    running.await_ready()
    assert running.get("/ready").status_code == 200
    assert [start[1:] for start in running.starts()[1:]] == [
        [str(number), "exit 75"] for number in range(1, 5)
    ]
    running.get("/fault")
    running.until(lambda: running.get("/health").json()["state"] == "latched", 20)
    assert running.stop() == 75


def test_three_failed_starts_in_a_row_latch_it_off(supervised):
    running = supervised("exit75")
    port_of(running)
    running.until(lambda: running.get("/health").json()["state"] == "latched", 20)
    assert len(running.starts()) == 3
    answer = running.get("/v1/models")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "decoder_latched_off"
    assert "Retry-After" not in answer.headers
    assert running.get("/ready").status_code == 503
    time.sleep(0.5)
    assert len(running.starts()) == 3
    assert running.stop() == 75


def test_a_configuration_fault_ends_the_supervisor(supervised):
    running = supervised("exit78")
    assert running.process.wait(10) == 78
    assert len(running.starts()) == 1


def test_a_child_that_does_not_go_is_killed(supervised):
    running = supervised("stubborn")
    running.await_ready()
    child = int(running.starts()[0][0])
    assert running.stop(signal.SIGINT) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_at_once_that_it_stops_and_does_not_wait_when_asked_again(tmp_path, number):
    with closing(Running(tmp_path, "stubborn", grace_s=60.0)) as running:
        running.await_ready()
        began = time.monotonic()
        running.process.send_signal(number)
        running.until(lambda: "stopping…" in (running.state / "log").read_text(), 2.0)
        time.sleep(0.2)
        assert running.process.poll() is None, "the child has its time"
        running.process.send_signal(number)
        assert running.process.wait(5.0) == 0
        assert time.monotonic() - began < 5.0
        with pytest.raises(ProcessLookupError):
            os.kill(int(running.starts()[0][0]), 0)


def test_signals_of_two_kinds_are_not_impatience(tmp_path):
    """A terminal that closes and a service manager may both ask."""
    with closing(Running(tmp_path, "stubborn", grace_s=60.0)) as running:
        running.await_ready()
        for number in (signal.SIGHUP, signal.SIGTERM):
            running.process.send_signal(number)
            time.sleep(0.2)
        assert running.process.poll() is None
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(5.0) == 0


def test_a_child_notices_that_its_supervisor_was_killed(supervised):
    running = supervised("serve")
    running.await_ready()
    running.stop(signal.SIGKILL)
    running.until(lambda: (running.state / "orphaned").exists())


def test_no_secret_is_in_the_childs_arguments_or_environment(supervised):
    running = supervised("serve")
    running.await_ready()
    import psutil

    child = psutil.Process(int(running.starts()[0][0]))
    assert len(child.cmdline()) == 3
    seen = json.dumps([child.cmdline(), child.environ()])
    assert "key" not in " ".join(child.cmdline())
    assert bytes(32).hex() not in seen
    assert running.stop() == 0
