"""How `baton doctor` looks at this machine: processes, sockets, files, a decoder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from app import doctor_facts as facts
from gb10_producer.trust import make_records
from mac_decoder.config import DecoderConfig
from tests.app.test_status import STATUS, answering
from trust.peers import Address, Peer, Peers

LISTENS = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_a_free_port_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
    assert facts.port(number, "x") == facts.Port(number, "x")


@pytest.mark.parametrize("words", [(), ("mac_decoder",)])
def test_the_holder_of_a_port_is_named(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", LISTENS, *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        found = facts.port(int(other.stdout.readline()), "x")
        assert other.stdin is not None
        other.stdin.close()
    assert f"({other.pid})" in found.holder
    assert found.is_baton == bool(words)


def test_a_port_on_one_address_alone_is_taken_too() -> None:
    with socket.create_server(("127.0.0.3", 0)) as server:
        assert facts.port(server.getsockname()[1], "x").holder


def test_only_directories_that_there_are_are_looked_at(tmp_path: Path) -> None:
    config = DecoderConfig(model="", state_dir=str(tmp_path / "s"), cache_dir=str(tmp_path / "c"))
    paths = facts.private_directories(config)
    assert facts.directories(paths) == []
    (tmp_path / "c" / "kv").mkdir(parents=True)
    (tmp_path / "c" / "kv").chmod(0o750)
    (found,) = facts.directories(paths)
    assert (found.path, found.mode, found.ours) == (tmp_path / "c" / "kv", 0o750, True)


def test_every_directory_of_ours_is_private_when_baton_makes_it(tmp_path: Path) -> None:
    config = DecoderConfig(model="", state_dir=str(tmp_path / "s"))
    _, record = make_records(1)
    Peers(config.state_path, "decoder").add(Peer("box", record, 0, Address("box", 1)))
    found = {
        one.path.name: one.mode for one in facts.directories(facts.private_directories(config))
    }
    assert found["decoder"] == found["peers"] == 0o700


def test_peers_are_listed_and_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    _, record = make_records(1)
    Peers(tmp_path, "decoder").add(Peer("box", record, 0, Address("box", 1)))
    assert [peer.name for peer in facts.registry("decoder", tmp_path, "file").peers] == ["box"]
    wrong = facts.registry("producer", tmp_path, "file")
    assert [fault.error.reason for fault in wrong.faults] == ["pairing_of_other_side"]
    (tmp_path / "peers").chmod(0o755)
    refused = facts.registry("decoder", tmp_path, "file")
    assert refused.refusal is not None
    assert refused.refusal.reason == "directory_exposed"


def test_looking_for_peers_makes_nothing(tmp_path: Path) -> None:
    assert facts.registry("decoder", tmp_path / "none", "keyring").peers == ()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("import os; os._exit(3)", "status 3"),
        ("raise ImportError('no such library')", "no such library"),
        ("print('[1]')", ""),
        ("import time; time.sleep(60)", "no answer"),
    ],
)
def test_a_framework_that_dies_or_hangs_is_a_fact(
    script: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "_LOOK", {"torch": script})
    monkeypatch.setattr(facts, "_DEVICE_S", 2.0)
    found = facts.device("torch")
    assert found.error
    assert error in found.error


@pytest.mark.parametrize("framework", ["mlx", "torch"])
def test_the_real_frameworks_answer(framework: str) -> None:
    found = facts.device(framework)  # type: ignore[arg-type]
    assert found.error == ""
    assert found.blas == "" or (framework == "mlx" and "openblas" in found.blas)


def test_packages_are_those_of_the_halves_that_are_here() -> None:
    assert [one.name for one in facts.packages(["producer"])] == [
        "baton-llm",
        "torch",
        "transformers",
    ]
    assert [one.name for one in facts.packages([])] == ["baton-llm"]


def test_a_decoder_is_asked_and_one_that_is_away_is_not_an_error() -> None:
    with answering(200, STATUS) as address:
        found = facts.running(address, None)
    assert found.status == STATUS
    assert found.links == STATUS["engine"]["links"]
    away = facts.running("127.0.0.1:1", None)
    assert (away.status, away.reason, list(away.links)) == (None, "decoder_unreachable", [])


def test_the_clock_of_a_decoder_elsewhere_is_compared() -> None:
    with answering(200, STATUS) as address:
        running = facts.running(address, None)
        found = facts.clock(running, elsewhere=True)
        assert found.decoders is not None
        assert abs((found.decoders - datetime.now(UTC)).total_seconds()) < 10
        assert facts.clock(running, elsewhere=False).decoders is None


def test_the_disk_of_a_directory_that_is_not_made_yet(tmp_path: Path) -> None:
    found = facts.disk(tmp_path / "not" / "yet")
    assert found.free > 0
    assert found.cap > found.floor > 0


def test_the_checkpoint_that_is_none_is_a_fact(tmp_path: Path) -> None:
    assert isinstance(facts.model(tmp_path), Exception)


def test_memory_is_the_systems() -> None:
    found = facts.memory()
    assert 0 < found.available < found.total
    assert found.total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
