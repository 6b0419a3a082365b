"""Two machines from the first code to the last handoff: real processes, each with its state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mac_decoder.config import DecoderConfig
from protocol.errors import BatonError
from tests.e2e.paired import Box, Mac
from tests.e2e.running import until
from tests.mac_decoder.test_node import Decoder
from trust.control import Control
from trust.peers import Peer, Peers

LONG = "the ferry leaves at nine and carries letters, bicycles and bread " * 12
CHAT = [{"role": "user", "content": LONG}]
OTHER = [{"role": "user", "content": "another question, and " + LONG}]


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint("llama"))


def serve(state: Path, model: str) -> Decoder:
    return Decoder(state, "--model", model, "--port", "0", "--remote-threshold", "16")


@pytest.fixture
def machines(model: str, tmp_path: Path) -> Iterator[tuple[Box, Mac]]:
    """A producer that shows a code, and a decoder that knows nobody."""
    box = Box(
        tmp_path / "gb10",
        *("--model", model, "--device", "cpu", "--host", "127.0.0.1", "--pair"),
    )
    state = tmp_path / "mac"
    state.mkdir()
    decoder = serve(state, model)
    try:
        yield box, Mac(state, decoder.await_ready())
    finally:
        box.running.close()
        decoder.close()


def paired(box: Box, mac: Mac) -> str:
    """What is said while the two pair."""
    said = mac.node(
        "add", f"127.0.0.1:{box.pair_port}", "--code-stdin", "--name", "mac", typed=box.code()
    )
    return " ".join(said.split())


def source(mac: Mac, messages: list[dict[str, str]], **options: object) -> tuple[str, object]:
    """Where the cache of a chat came from, and its choices."""
    body = mac.decoder.chat(messages=messages, max_tokens=6, baton=options).json()
    assert "choices" in body, body
    return body["baton"]["source"], body["choices"]


def registry(mac: Mac) -> Peers:
    return DecoderConfig(model="", state_dir=str(mac.state), secrets="file").peers()


def test_from_a_code_to_a_prompt_that_the_other_machine_prefills_and_to_being_forgotten(
    machines: tuple[Box, Mac],
) -> None:
    box, mac = machines
    code = box.code()
    said = paired(box, mac)
    assert "paired with gb10" in said
    assert "ready" in said
    box.running.await_ready()
    (listed,) = mac.listed()
    assert (listed["name"], listed["state"], listed["epoch"]) == ("gb10", "ready", 1)
    assert listed["address"] == box.running.url.removeprefix("wss://")
    for figure in ("tokens_per_s", "tile", "link_bytes_per_s", "round_trip_ms", "qualified_at"):
        assert listed[figure] > 0, figure
    there, remote = source(mac, CHAT, reuse=False)
    here, local = source(mac, CHAT, reuse=False, lane="local")
    assert (there, here) == ("remote", "local")
    assert remote == local
    assert "mac" in box.produce("--peers")

    # The code was good for one pairing, and is nowhere.
    again = mac.node(*("add", f"127.0.0.1:{box.pair_port}", "--code-stdin"), typed=code, status=1)
    assert "error" in again
    for log in (mac.decoder.log, said, again):
        assert code not in log
        assert code.replace(" ", "-") not in log

    # A decoder that was forgotten is refused, and goes on alone.
    box.produce("--forget", "mac")
    until(lambda: mac.listed()[0]["state"] in ("down", "refused"))
    found, _ = source(mac, CHAT, reuse=False)
    assert found == "local"
    (peer,) = registry(mac).all().peers
    assert refusal(peer) == "tls_failed"
    said = mac.node("remove", "gb10", asks=False)
    assert "tls_failed" in said
    assert mac.listed() == []


@pytest.mark.soak
def test_a_new_key_a_new_comparison_and_the_end_leave_the_caches(
    machines: tuple[Box, Mac], model: str
) -> None:
    box, mac = machines
    paired(box, mac)
    (first,) = registry(mac).all().peers
    assert source(mac, CHAT)[0] == "remote"

    mac.node("rotate", "gb10", asks=False)
    (second,) = registry(mac).all().peers
    assert (first.record.epoch, second.record.epoch) == (1, 2)
    assert first.record.key != second.record.key
    mac.await_state("ready")
    assert source(mac, OTHER, reuse=False)[0] == "remote"
    until(lambda: refusal(first) == "epoch_differs")

    before = mac.listed()[0]["qualified_at"]
    time.sleep(1.1)
    mac.node("qualify", "gb10")
    assert mac.listed()[0]["qualified_at"] > before

    assert "could not be told" not in mac.node("remove", "gb10", asks=False)
    assert mac.listed() == []
    assert "mac" not in box.produce("--peers")
    until(lambda: mac.decoder.get("/status").json()["engine"]["links"] == [])
    assert refusal(second) == "tls_failed"
    assert source(mac, OTHER, reuse=False)[0] == "local"

    # What was cached before is there, in memory and on disk.
    reused, choices = source(mac, CHAT)
    assert reused in ("live", "resident", "durable")
    assert mac.decoder.stop() == 0
    once_more = serve(mac.state, model)
    try:
        mac.decoder = once_more.await_ready()
        assert source(mac, CHAT) == ("durable", choices)
    finally:
        once_more.close()


def refusal(peer: Peer) -> str:
    """Why a producer refuses what this decoder holds; empty if it does not."""
    assert peer.address is not None
    try:
        with Control.open(peer.address, peer.record) as control:
            control.describe()
    except BatonError as error:
        return error.reason
    return ""
