"""The links of a decoder: those it was given, and those of the producers it is paired with."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from mac_decoder import nodes as module
from mac_decoder.config import DecoderConfig
from mac_decoder.handoff.link import Link, LinkName, LinkState
from mac_decoder.nodes import Nodes, first_attempt
from mac_decoder.qualify.gate import Gate
from protocol.checkpoint import Checkpoint, read_checkpoint
from protocol.errors import ConfigError
from protocol.pairing.record import PairingRecord
from tests.mac_decoder.engine.links import CopyingLink
from tests.trust.keyrings import Locked, Memory, using
from tests.trust.machines import certificate, own
from trust.peers import Address, Peer, Peers
from trust.secrets import Choice

SOON_S = 3.0


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Checkpoint:
    return read_checkpoint(checkpoint("llama"))


@pytest.fixture
def port() -> int:
    """One on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def config_for(state: Path, secrets: Choice = "file", **options: object) -> DecoderConfig:
    config = DecoderConfig(model="m", state_dir=str(state), secrets=secrets)
    return msgspec.structs.replace(config, **options)


def producer(port: int, number: int = 0, epoch: int = 1, name: str = "box") -> Peer:
    """A producer as its decoder knows it."""
    ours = own()
    record = PairingRecord(
        1,
        "decoder",
        epoch,
        secrets.token_bytes(32),
        ours.certificate,
        ours.private_key,
        certificate(number).certificate,
    )
    return Peer(name, record, 1_700_000_000, Address("127.0.0.1", port))


@contextmanager
def opened(config: DecoderConfig, model: Checkpoint) -> Iterator[Nodes]:
    nodes = Nodes(config, model)
    nodes.open()
    yield nodes
    asyncio.run(nodes.close())


class Watching:
    """Nodes that are watched, and what was added meanwhile."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.added: list[Link] = []

    @property
    def gates(self) -> list[Gate]:
        return list(self.nodes.gates())

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            await asyncio.sleep(0.02)

    async def look(self) -> None:
        """Let it look again, twice."""
        await asyncio.sleep(2.5 * module.LOOK_S)


@asynccontextmanager
async def watched(config: DecoderConfig, model: Checkpoint) -> AsyncIterator[Watching]:
    nodes = Nodes(config, model)
    nodes.open()
    found = Watching(nodes)
    await nodes.start(lambda: False)
    task = asyncio.create_task(nodes.watch(found.added.append))
    try:
        yield found
    finally:
        task.cancel()
        await nodes.close()
        assert all(gate.state.name == "off" for gate in nodes.gates())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.1)
    monkeypatch.setattr(module, "RETRY_S", 0.2)


# At the start


def test_nobody_is_paired_and_nothing_is_asked_of_the_keyring(tmp_path, model) -> None:
    async def main() -> None:
        async with watched(config_for(tmp_path, "keyring"), model) as found:
            await found.look()
            assert found.gates == []

    backend = Locked()
    with using(backend):
        asyncio.run(main())
    assert backend.reads == 0


def test_those_that_are_paired_and_the_one_that_was_given_have_links(tmp_path, model, port) -> None:
    given = f"ws://127.0.0.1:{port}"
    config = config_for(tmp_path, producers=(given,), key=bytes(32))
    peer = producer(port)
    config.peers().add(peer)

    async def main() -> None:
        async with watched(config, model) as found:
            assert [(gate.name, gate.fingerprint) for gate in found.gates] == [
                (given, None),
                (f"wss://127.0.0.1:{port}", peer.fingerprint),
            ]
            assert {gate.state.name for gate in found.gates} == {"down"}
            assert found.added == []

    asyncio.run(main())


def test_the_keyring_is_asked_once_where_somebody_is_paired(tmp_path, model, port) -> None:
    config = config_for(tmp_path, "keyring")
    backend = Memory()
    with using(backend):
        for number in range(3):
            config.peers().add(producer(port, number))
        before = backend.reads
        with opened(config, model):
            assert backend.reads == before + 1


def test_a_keyring_that_cannot_be_read_ends_the_start_with_a_hint(tmp_path, model, port) -> None:
    config = config_for(tmp_path, "keyring")
    with using(Memory()):
        config.peers().add(producer(port))
    with using(Locked()), pytest.raises(ConfigError) as caught:
        Nodes(config, model).open()
    assert caught.value.reason == "keychain_locked"
    assert "--secrets file" in (caught.value.hint or "")


def test_a_registry_that_others_may_enter_ends_the_start(tmp_path, model, port) -> None:
    config = config_for(tmp_path)
    config.peers().add(producer(port))
    (config.state_path / "peers").chmod(0o755)
    with pytest.raises(ConfigError) as caught:
        Nodes(config, model).open()
    assert caught.value.reason == "directory_exposed"


def test_a_file_that_is_no_peers_keeps_nobody_else_out(tmp_path, model, port, caplog) -> None:
    config = config_for(tmp_path)
    for number in range(2):
        config.peers().add(producer(port, number))
    spoiled = config.state_path / "peers" / producer(port, 0).fingerprint.hex()
    spoiled.write_text("{}")
    with caplog.at_level(logging.WARNING), opened(config, model) as nodes:
        (gate,) = nodes.gates()
        assert gate.fingerprint == producer(port, 1).fingerprint
    assert "peer_unreadable" in caplog.text


def test_the_lane_remote_needs_somebody(tmp_path, model, port) -> None:
    config = config_for(tmp_path, lane="remote")
    with pytest.raises(ConfigError) as caught:
        Nodes(config, model).open()
    assert caught.value.reason == "lane_needs_producer"
    config.peers().add(producer(port))
    with opened(config, model) as nodes:
        assert len(nodes.gates()) == 1


# While it runs


def test_a_new_one_is_noticed_and_a_removed_one_is_off(tmp_path, model, port) -> None:
    config = config_for(tmp_path)
    first, second = producer(port, 0), producer(port, 1)
    other = Peers(config.state_path, "decoder")

    async def main() -> None:
        async with watched(config, model) as found:
            other.add(first)
            await found.until(lambda: len(found.added) == 1)
            assert found.added == found.gates
            await found.until(lambda: found.gates[0].state.name == "down")
            other.add(second)
            await found.until(lambda: len(found.added) == 2)
            gone = found.gates[0]
            other.remove(first.fingerprint)
            await found.until(lambda: gone.state.name == "off")
            assert [gate.fingerprint for gate in found.gates] == [second.fingerprint]
            assert found.gates[0].state.name != "off"
            other.add(first)
            await found.until(lambda: len(found.added) == 3)
            assert found.added[2] is not gone

    asyncio.run(main())


def test_a_new_epoch_or_place_is_a_new_link_and_a_new_name_is_none(tmp_path, model, port) -> None:
    config = config_for(tmp_path)
    peer = producer(port)
    other = Peers(config.state_path, "decoder")
    other.add(peer)
    rotated = replace(peer, record=msgspec.structs.replace(peer.record, epoch=2))
    moved = replace(rotated, address=Address("127.0.0.1", port % 65535 + 1))

    async def main() -> None:
        async with watched(config, model) as found:
            (gate,) = found.gates
            assert (gate.called, gate.link.called) == ("box", "box")
            other.add(replace(peer, name="another name"))
            await found.look()
            assert found.added == []
            assert (gate.called, gate.link.called) == ("another name", "another name")
            for number, changed in enumerate((rotated, moved), 1):
                (before,) = found.gates
                other.add(changed)
                await found.until(lambda: len(found.added) == number)  # noqa: B023
                await found.until(lambda: before.state.name == "off")  # noqa: B023
                assert [gate.fingerprint for gate in found.gates] == [peer.fingerprint]
                assert found.gates == found.added[-1:]

    asyncio.run(main())


@pytest.mark.parametrize("what", ["peers", "file"])
def test_links_stay_where_nobody_can_be_read_any_more(tmp_path, model, port, caplog, what) -> None:
    config = config_for(tmp_path)
    peer, second = producer(port, 0), producer(port, 1)
    config.peers().add(peer)
    directory = config.state_path / "peers"
    place = directory if what == "peers" else directory / peer.fingerprint.hex()
    mode = place.stat().st_mode

    async def main() -> None:
        async with watched(config, model) as found:
            (gate,) = found.gates
            place.chmod(mode | 0o044)
            await found.look()
            await found.look()
            assert found.gates == [gate]
            assert gate.state.name != "off"
            told = [record for record in caplog.records if "not used" in record.message]
            assert len(told) == 1
            assert "_exposed" in told[0].message
            place.chmod(mode)
            config.peers().add(second)
            await found.until(lambda: len(found.added) == 1)
            assert found.gates[0] is gate

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("outcome", "stop", "waited"),
    [
        ("ready", False, (0.1, 1.5)),
        ("down", False, (0.1, 1.5)),
        (None, False, (2.0, 9.0)),
        (None, True, (0.0, 1.5)),
    ],
    ids=["reached", "refused", "silent", "stopped"],
)
def test_ready_waits_a_bounded_while_for_the_producer(
    model: Checkpoint, outcome: LinkName | None, stop: bool, waited: tuple[float, float]
) -> None:
    link = CopyingLink(model.layout, state=LinkState("connecting"))

    async def main() -> float:
        if outcome is not None:
            known = LinkState(outcome)
            asyncio.get_running_loop().call_later(0.1, setattr, link, "state", known)
        began = time.monotonic()
        await first_attempt(link, lambda: stop, 2.0)
        return time.monotonic() - began

    least, most = waited
    assert least <= asyncio.run(main()) + 0.01 <= most
