"""What survives: a chat goes on after ``kill -9`` where it was, and the disk holds what it says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mac_decoder.engine.drive import loaded_copy
from tests.mac_decoder.test_node import Decoder

SYSTEM = "You answer about trains, ferries and the bicycles that they carry. " * 8
DOTS = 5


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Decoder]]:
    made: list[Decoder] = []

    def make(*args: str) -> Decoder:
        made.append(Decoder(tmp_path, *args))
        return made[-1]

    yield make
    for running in made:
        running.close()


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "name", ["muse_glimmer", pytest.param("qwen3_next", marks=pytest.mark.soak)]
)
def test_a_chat_goes_on_after_kill_9(
    serve: Callable[..., Decoder], checkpoint: Callable[..., Path], name: str, tmp_path: Path
) -> None:
    path = checkpoint(name)
    (dot,) = loaded_copy(path).tokenizer.encode(".", add_special_tokens=False)
    decoder = serve("--model", str(path), "--port", "0", "--prefill-step", "64").await_ready()
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "When?"}]

    def ask(**more: Any) -> dict[str, Any]:
        answer = decoder.chat(messages=messages, max_tokens=DOTS, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def cache() -> dict[str, Any]:
        return decoder.get("/status").json()["cache"]

    first = ask(logit_bias={str(dot): 100})
    assert first["baton"]["source"] == "local"
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    second = ask(logit_bias={str(dot): 100})
    assert second["baton"]["source"] == "live"
    messages += [second["choices"][0]["message"], {"role": "user", "content": "And back?"}]
    end = second["usage"]["prompt_tokens"] + second["usage"]["completion_tokens"]
    until(lambda: cache()["keeping_bytes"] == 0 and cache()["durable"]["publishing"] == 0)
    durable = cache()["durable"]
    assert durable["on_disk"] == on_disk(tmp_path / "cache" / "kv")

    os.kill(decoder.child().pid, signal.SIGKILL)
    until(lambda: decoder.ready() != 200)
    until(lambda: decoder.ready() == 200)
    assert cache()["durable"]["cuts"] == durable["cuts"]
    third = ask()
    assert third["baton"]["source"] == "durable"
    assert third["baton"]["reused_tokens"] == end
    assert third["baton"]["prefilled_tokens"] == third["usage"]["prompt_tokens"] - 1 - end
    assert third["baton"]["restore_bytes"] > 0
    assert {"lookup", "read", "verify", "swap", "boundary_decode"} <= third["baton"][
        "phases"
    ].keys()
    control = ask(baton={"reuse": False})
    assert control["baton"]["source"] == "local"
    assert control["choices"] == third["choices"]
    assert decoder.stop() == 0
    assert "When?" not in decoder.log
    # A stop publishes what waits: the third turn is there for the next process.
    again = serve("--model", str(path), "--port", "0", "--prefill-step", "64").await_ready()
    messages += [third["choices"][0]["message"], {"role": "user", "content": "At last?"}]
    answer = again.chat(messages=messages, max_tokens=2).json()
    assert answer["baton"]["source"] == "durable"
    assert answer["baton"]["reused_tokens"] >= third["usage"]["prompt_tokens"] - 1
    assert again.stop() == 0


def test_two_decoders_do_not_share_a_directory(
    serve: Callable[..., Decoder], checkpoint: Callable[..., Path]
) -> None:
    path = str(checkpoint("llama"))
    first = serve("--model", path, "--port", "0").await_ready()
    second = serve("--model", path, "--port", "0")
    assert second.process.wait(60) == 78, second.log
    assert "(store_locked)" in second.log
    third = serve("--model", path, "--port", "0", "--no-disk").await_ready()
    assert third.get("/status").json()["cache"]["durable"] is None
    assert (third.stop(), first.stop()) == (0, 0)


def on_disk(directory: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
