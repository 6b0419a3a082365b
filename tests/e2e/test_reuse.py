"""What survives: a chat goes on after ``kill -9`` where it was, and the disk holds what it says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mac_decoder.store.store import Store
from tests.e2e.running import RunningProducer, until
from tests.mac_decoder.engine.drive import loaded_copy
from tests.mac_decoder.test_node import Decoder

SYSTEM = "You answer about trains, ferries and the bicycles that they carry. " * 8
DOTS = 5


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
    assert second["choices"][0]["finish_reason"] == "length"
    # The last token of an answer that its length ends is fed to nothing.
    end = second["usage"]["prompt_tokens"] + second["usage"]["completion_tokens"] - 1

    def at_rest() -> bool:
        """Nothing is kept or published, and nothing was for a while."""
        before, _ = cache(), time.sleep(0.5)
        now = cache()
        idle = now["keeping_bytes"] == 0 and now["durable"]["publishing"] == 0
        return idle and now["durable"] == before["durable"]

    until(at_rest)
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


@pytest.mark.soak
def test_the_alibi_with_a_real_producer(
    serve: Callable[..., Decoder], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """One cold request, a warm-up and five warm ones: only hits and their bytes move."""
    model = str(checkpoint("muse_glimmer"))
    key = bytes(range(32))
    producer = RunningProducer(
        tmp_path, "--model", model, "--port", "0", "--device", "cpu", key=key
    )
    try:
        url = producer.await_ready().url
        decoder = serve(
            *("--model", model, "--port", "0", "--producer", url, "--remote-threshold", "64"),
            key=key,
        ).await_ready()
        until(lambda: decoder.get("/status").json()["engine"]["links"][0]["state"] == "ready")
        tokens = [3 + 7919 * (at + 1) % 104729 % 500 for at in range(2048)]

        def ask() -> dict[str, Any]:
            name = decoder.get("/v1/models").json()["data"][0]["id"]
            body = {"model": name, "prompt": tokens, "max_tokens": 2, "temperature": 0}
            answer = decoder.client.post(decoder.url + "/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def counters() -> dict[str, int]:
            return decoder.get("/status").json()["cache"]["counters"]

        cold = ask()
        assert cold["baton"]["source"] == "remote"
        shipped = cold["baton"]["transferred_bytes"]
        before = counters()
        assert (before["cache_hits"], before["disagg_prefills"]) == (0, 1)
        assert before["disagg_bytes_installed"] == shipped
        for hits in range(1, 7):
            warm = ask()
            assert (warm["baton"]["source"], warm["baton"]["reused_tokens"]) == ("resident", 2047)
            assert warm["choices"] == cold["choices"]
            assert counters()["cache_hits"] == hits
        after = counters()
        moved = {name: after[name] - before.get(name, 0) for name in after}
        assert {name: count for name, count in moved.items() if count} == {
            "cache_hits": 6,
            "tier_resident": 6,
            "bytes_served_from_cache": 6 * shipped,
        }
    finally:
        producer.close()


@pytest.mark.soak
def test_two_decoders_do_not_share_a_directory(
    serve: Callable[..., Decoder], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with Store.open(tmp_path / "cache" / "kv", bytes(32), 1 << 30, 0):
        second = serve("--model", str(checkpoint("llama")), "--port", "0")
        assert second.process.wait(60) == 78, second.log
    assert "(store_locked)" in second.log
    assert str(os.getpid()) in second.log


def on_disk(directory: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
