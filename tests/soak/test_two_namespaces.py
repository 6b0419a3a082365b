"""Pairing and handoffs between two network namespaces, which share nothing but a link.

Takes root, and Linux with iproute2.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from app.children import Child, start
from tests.benchmarks.links import PRODUCER, Namespaces, namespaces
from tests.e2e.paired import BATON, code_in
from tests.e2e.running import until

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        bool(os.geteuid()) or not (shutil.which("ip") and shutil.which("tc")),
        reason="network namespaces take root, and Linux with iproute2 (ip and tc)",
    ),
]

NAME = "gb10"
CHAT = "the ferry leaves at nine and carries letters, bicycles and bread " * 12
ASK = """
import sys, httpx
url, text = sys.argv[1:]
name = httpx.get(url + "/v1/models").json()["data"][0]["id"]
body = {"model": name, "messages": [{"role": "user", "content": text}], "max_tokens": 6}
body |= {"temperature": 0, "baton": {"reuse": False}}
print(httpx.post(url + "/v1/chat/completions", json=body, timeout=60.0).text)
"""


class Machines:
    """One in each namespace."""

    def __init__(self, spaces: Namespaces, root: Path, model: Path) -> None:
        self._spaces = spaces
        self._root = root
        self._model = model

    def box(self, *words: str, named: bool = True) -> Child:
        """A producer; ``named``: it was given the model, by hand."""
        state = ["--state-dir", str(self._root / "gb10"), "--secrets", "file", "--name", NAME]
        state += ["--cache-dir", str(self._root / "gb10-cache")]
        model = ["--model", str(self._model)] if named else []
        command = ["-m", "gb10_producer", "--device", "cpu", *model, *state]
        return start("producer", self._spaces.inside(self._spaces.producer, *command, *words))

    def mac(self) -> Child:
        """A decoder."""
        state = ["--state-dir", str(self._root / "mac"), "--cache-dir", str(self._root / "cache")]
        command = ["-m", "mac_decoder", "--model", str(self._model), "--port", "0", *state]
        command += ["--secrets", "file", "--remote-threshold", "16"]
        return start("decoder", self._spaces.inside(self._spaces.decoder, *command))

    def node(self, *words: str, typed: str = "") -> str:
        """What `baton node` answers on the decoder's machine."""
        state = ["--state-dir", str(self._root / "mac"), "--secrets", "file"]
        if words[0] == "discover":
            state = []
        return self._run([BATON, "node", *words, *state], typed)

    def ask(self, url: str) -> dict[str, Any]:
        """A chat's answer."""
        python = self._spaces.inside(self._spaces.decoder, "-c", ASK, url, CHAT)
        done = subprocess.run(python, capture_output=True, text=True, timeout=120, check=True)
        return json.loads(done.stdout)

    def _run(self, words: list[str], typed: str) -> str:
        command = ["ip", "netns", "exec", self._spaces.decoder, *words]
        done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def machines(checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[Machines]:
    with namespaces(1.0) as spaces:
        yield Machines(spaces, tmp_path, checkpoint("llama"))


def test_found_by_its_name_paired_by_its_code_asked_and_removed(machines: Machines) -> None:
    with ExitStack() as stack:
        decoder, producer = machines.mac(), machines.box("--pair")
        stack.callback(decoder.end)
        stack.callback(producer.end)
        decoder.wait_ready(60.0)
        until(lambda: code_in("\n".join(producer.log)) is not None)
        code = code_in("\n".join(producer.log))
        assert code is not None

        (seen,) = json.loads(machines.node("discover", "--json"))
        assert (seen["name"], seen["host"]) == (NAME, PRODUCER)
        assert seen["pair"] > 0

        url = ("--url", decoder.url)
        machines.node("add", NAME, "--code-stdin", *url, typed=code)
        (listed,) = json.loads(machines.node("list", "--json", *url))
        assert listed["state"] == "ready"
        assert listed["address"].startswith(f"{PRODUCER}:")
        answer = machines.ask(decoder.url)
        assert answer["baton"]["source"] == "remote"

        machines.node("rotate", NAME)
        (rotated,) = json.loads(machines.node("list", "--json", *url))
        assert rotated["epoch"] == listed["epoch"] + 1
        until(lambda: json.loads(machines.node("list", "--json", *url))[0]["state"] == "ready")
        machines.node("qualify", NAME, *url)
        again = machines.ask(decoder.url)
        assert again["baton"]["source"] == "remote"
        assert again["choices"] == answer["choices"]

        machines.node("remove", NAME)
        assert json.loads(machines.node("list", "--json", *url)) == []
        alone = machines.ask(decoder.url)
        assert alone["baton"]["source"] == "local"
        assert alone["choices"] == answer["choices"]


def test_a_box_that_was_given_nothing_is_sent_the_model_and_asked(
    machines: Machines, checkpoint: Callable[..., Path]
) -> None:
    """Over the link alone: no file of one machine is opened by the other."""
    with ExitStack() as stack:
        decoder, producer = machines.mac(), machines.box("--pair", named=False)
        stack.callback(decoder.end)
        stack.callback(producer.end)
        decoder.wait_ready(60.0)
        until(lambda: code_in("\n".join(producer.log)) is not None)
        code = code_in("\n".join(producer.log))
        assert code is not None
        (seen,) = json.loads(machines.node("discover", "--json"))
        assert seen["model"] == ""

        url = ("--url", decoder.url)
        machines.node("add", NAME, "--code-stdin", "--send", *url, typed=code)
        (listed,) = json.loads(machines.node("list", "--json", *url))
        assert listed["state"] == "ready"
        answer = machines.ask(decoder.url)
        assert answer["baton"]["source"] == "remote"

        again = json.loads(machines.node("send", NAME, "--json", *url))
        assert (again["sent"], again["serving"]) == (0, "now")
        other = checkpoint("llama", seed=1)
        changed = json.loads(machines.node("send", NAME, "--model", str(other), "--json", *url))
        assert changed["sent"] == changed["bytes"] > 1_000_000
        assert changed["serving"] == "restarting"
        back = json.loads(machines.node("send", NAME, "--json", *url))
        assert (back["sent"], back["serving"]) == (0, "restarting")
        until(lambda: json.loads(machines.node("list", "--json", *url))[0]["state"] == "ready")
        once_more = machines.ask(decoder.url)
        assert once_more["baton"]["source"] == "remote"
        assert once_more["choices"] == answer["choices"]
