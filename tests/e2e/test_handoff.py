"""Producer and decoder as two machines run them: real processes, TLS, and a kill in between."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from mac_decoder.handoff.client import ProducerLink
from mac_decoder.handoff.connection import Producer
from mac_decoder.handoff.generations import Generations
from mac_decoder.handoff.trust import trust_of_key
from protocol.errors import TransferError
from protocol.layouts_named import named, stand_in_identity
from tests.e2e.running import until
from tests.mac_decoder.handoff.producer import Memory

KEY = bytes(range(32))
SYNTHETIC = "muse-glimmer"
LONG = "the ferry leaves at nine and carries letters, bicycles and bread " * 12


def test_a_producer_killed_in_mid_handoff_and_started_again(produce, tmp_path):
    layout = named(SYNTHETIC)
    producer = produce(
        "--synthetic", SYNTHETIC, "--port", "0", "--link-mbps", "400", key=KEY
    ).await_ready()
    numbers = Generations(tmp_path / "generations.json", KEY, 0)
    target = Producer(producer.url, trust_of_key(KEY), stand_in_identity(layout), layout)
    with ProducerLink(target, numbers) as link:
        until(lambda: link.state.ready)
        started = time.monotonic()
        killed = threading.Timer(0.5, producer.kill_the_one_that_computes)
        killed.start()
        with pytest.raises(TransferError) as caught:
            link.fetch(list(range(1025)), Memory(layout, 0, 1024))
        assert caught.value.reason == "connection_lost"
        assert time.monotonic() - started < 8.0
        until(lambda: link.state.ready)
        with link.fetch(list(range(129)), Memory(layout, 0, 128)) as handoff:
            assert handoff.transferred_bytes == handoff.manifest.payload_bytes
            handoff.committed()


@pytest.mark.soak
def test_two_machines_with_a_pairing(produce, serve, checkpoint, tmp_path):
    model = str(checkpoint("llama"))
    made = tmp_path / "pairing"
    command = [sys.executable, "-m", "gb10_producer", "--make-pairing", str(made)]
    subprocess.run(command, check=True, capture_output=True)
    producer = produce(
        *("--model", model, "--port", "0", "--device", "cpu"),
        *("--pairing", str(made / "producer.pairing"), "--link-mbps", "8"),
    ).await_ready()
    assert producer.url.startswith("wss://")
    decoder = serve(
        *("--model", model, "--port", "0", "--remote-threshold", "16"),
        *("--producer", producer.url, "--pairing", str(made / "decoder.pairing")),
    ).await_ready()

    def link() -> dict[str, object]:
        return decoder.get("/status").json()["engine"]["links"][0]

    def ask(lane: str, text: str = LONG) -> dict:
        messages = [{"role": "user", "content": text}]
        wanted = {"lane": lane, "reuse": False}
        answer = decoder.chat(messages=messages, max_tokens=6, baton=wanted)
        assert answer.status_code == 200, answer.text
        return answer.json()

    until(lambda: link()["state"] == "ready")
    remote = ask("auto")
    assert remote["baton"]["source"] == "remote"
    assert remote["baton"]["transferred_bytes"] > 0
    local = ask("local")
    assert local["baton"]["source"] == "local"
    assert remote["choices"] == local["choices"]

    # At 8 Mbit/s the rows are on their way when the producer dies.
    seconds = remote["baton"]["transferred_bytes"] * 8 / 8e6
    killed = threading.Timer(seconds / 2, producer.kill_the_one_that_computes)
    killed.start()
    fallen_back = ask("auto")
    assert fallen_back["baton"]["source"] == "local"
    assert "connection_lost" in fallen_back["baton"]["reasons"]
    assert fallen_back["choices"] == local["choices"]

    until(lambda: link()["state"] == "ready", 60)
    again = ask("auto")
    assert again["baton"]["source"] == "remote"
    assert again["choices"] == local["choices"]

    producer.process.send_signal(signal.SIGTERM)
    producer.process.wait(20)
    until(lambda: link()["state"] == "down")
    alone = ask("auto")
    assert alone["baton"]["source"] == "local"
    assert alone["baton"]["reasons"]
    assert decoder.stop() == 0


@pytest.mark.soak
def test_other_weights_on_the_other_side_are_told_and_not_fatal(produce, serve, checkpoint):
    producer = produce(
        *("--model", str(checkpoint("llama", seed=1)), "--port", "0", "--device", "cpu"), key=KEY
    ).await_ready()
    decoder = serve(
        *("--model", str(checkpoint("llama")), "--port", "0", "--remote-threshold", "16"),
        *("--producer", producer.url),
        key=KEY,
    ).await_ready()
    until(lambda: decoder.get("/status").json()["engine"]["links"][0]["state"] == "refused")
    status = decoder.get("/status").json()
    assert status["engine"]["links"][0]["reason"] == "weights_differ"
    messages = [{"role": "user", "content": LONG}]
    answer = decoder.chat(messages=messages, max_tokens=4).json()
    assert answer["baton"]["source"] == "local"
    assert "weights_differ" in answer["baton"]["reasons"]
    assert decoder.stop() == 0
