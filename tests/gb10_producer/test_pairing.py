"""`baton produce --pair` as a process: a code on stderr, a decoder, and handoffs."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from gb10_producer.__main__ import main
from protocol.errors import EXIT_CONFIG
from protocol.layouts_named import muse_glimmer
from protocol.pairing.code import read_code
from protocol.pairing.exchange import Paired
from tests.contexts import decoder_context
from tests.gb10_producer.peer import Peer
from tests.gb10_producer.producer import wait_until
from tests.gb10_producer.registered import MAC, STUDIO, kept_of, record_of
from tests.gb10_producer.test_node import producer, refused
from trust.acceptance import accept
from trust.peers import Peers

CODE = re.compile(r"node add 127\.0\.0\.1:(\d+)\n.*this code: +(.*)\n")


class Box:
    """A producer's process, whose output is read as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.out: list[str] = []
        self.err: list[str] = []
        for stream, lines in ((process.stdout, self.out), (process.stderr, self.err)):
            threading.Thread(target=lines.extend, args=(stream,), daemon=True).start()

    def code(self) -> tuple[int, str]:
        """Port and code, once they are shown."""
        wait_until(lambda: CODE.search("".join(self.err)), 15.0)
        port, code = CODE.findall("".join(self.err))[-1]
        return int(port), code

    def pair(self, own=MAC) -> Paired:
        port, code = self.code()
        return accept("127.0.0.1", port, read_code(code), own=own, name="macbook")

    def said(self, line: str) -> None:
        wait_until(lambda: any(one.startswith(line) for one in self.out), 15.0)


@contextmanager
def box(state: Path, *words: str) -> Iterator[Box]:
    fixed = ("--host", "127.0.0.1", "--pair-port", "0", "--state-dir", str(state))
    with producer(*fixed, "--secrets", "file", "--name", "gb10", *words, key=None) as process:
        yield Box(process)


def fetched(paired: Paired) -> None:
    record = paired.record
    with Peer(
        f"wss://127.0.0.1:{paired.port}",
        muse_glimmer(),
        pairing=record.pairing,
        context=decoder_context(record),
        certificates=record.fingerprints,
    ) as peer:
        peer.handshake().fetch(range(40))


def test_a_code_pairs_and_handoffs_follow_at_once(tmp_path: Path) -> None:
    with box(tmp_path, "--synthetic", "muse-glimmer", "--pair") as gb10:
        paired = gb10.pair()
        assert paired.name == "gb10"
        gb10.said("paired macbook")
        gb10.said("ready wss://127.0.0.1:")
        fetched(paired)
        code = gb10.code()[1]
        logged = [line for line in gb10.err if " INFO " in line or " WARNING " in line]
        assert logged
        assert not any(code in line or code.split()[0] in line for line in logged)


def test_a_producer_that_was_started_again_shows_no_code_and_knows_its_peers(
    tmp_path: Path,
) -> None:
    with box(tmp_path, "--synthetic", "muse-glimmer", "--pair") as gb10:
        paired = gb10.pair()
        gb10.said("paired macbook")
        gb10.said("ready ")
        (child,) = psutil.Process(gb10.process.pid).children()
        child.send_signal(signal.SIGKILL)
        child.wait(15.0)
        wait_until(lambda: "started again" in "".join(gb10.err), 15.0)
        wait_until(lambda: "".join(gb10.err).count("gb10_producer.node: ready") == 2, 15.0)
        fetched(paired)
        assert "".join(gb10.err).count("this code") == 1


def test_one_that_only_pairs_ends_and_the_running_one_notices(tmp_path: Path) -> None:
    with box(tmp_path, "--synthetic", "muse-glimmer") as running:
        running.said("ready ")
        port = next(line for line in running.out if line.startswith("ready ")).rsplit(":", 1)[1]
        with box(tmp_path, "--port", port.strip(), "--pair") as pairing:
            paired = pairing.pair()
            assert paired.port == int(port)
            assert pairing.process.wait(10.0) == 0
            wait_until(lambda: pairing.out == ["paired macbook\n"])
        fetched(paired)


def test_a_stop_while_a_code_is_shown_is_one(tmp_path: Path) -> None:
    with box(tmp_path, "--pair", "--cache-dir", str(tmp_path / "cache")) as gb10:
        gb10.code()
        gb10.process.send_signal(signal.SIGTERM)
        assert gb10.process.wait(5.0) == 0


def test_nobody_paired_is_refused_off_loopback(tmp_path: Path) -> None:
    words = ("--synthetic", "muse-glimmer", "--state-dir", str(tmp_path), "--secrets", "file")
    said = refused(*words, key=None)
    assert "pairing_required" in said
    assert "--pair" in said


def test_a_pair_port_that_is_taken_is_named(tmp_path: Path) -> None:
    places = ("--state-dir", str(tmp_path), "--cache-dir", str(tmp_path), "--secrets", "file")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refused("--pair", "--pair-port", port, "--host", "127.0.0.1", *places, key=None)
    assert "port_taken" in said
    assert "--pair-port" in said


# Peers, for people


def known(directory: Path) -> Peers:
    peers = Peers(directory / "producer", "producer")
    peers.add(kept_of(record_of(MAC), "macbook"))
    peers.add(kept_of(record_of(STUDIO, epoch=4), "studio"))
    return peers


def test_peers_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known(tmp_path)
    assert main(["--peers", "--secrets", "file", "--state-dir", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("macbook  ")
    assert second.startswith("studio  ")
    assert "epoch 4" in second


def test_without_peers_it_says_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--peers", "--secrets", "file", "--state-dir", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--pair" in captured.err


def test_a_peer_is_forgotten_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = known(tmp_path)
    words = ["--secrets", "file", "--state-dir", str(tmp_path)]
    assert main(["--forget", "macbook", *words]) == 0
    assert capsys.readouterr().out.startswith("forgotten: macbook  ")
    assert [peer.name for peer in peers.all().peers] == ["studio"]
    for unknown in ("macbook", ""):
        assert main(["--forget", unknown, *words]) == EXIT_CONFIG
        assert "peer_unknown" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_told_and_can_be_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = known(tmp_path)
    name = kept_of(record_of(MAC)).fingerprint.hex()
    (tmp_path / "producer" / "peers" / name).write_text("{}")
    words = ["--secrets", "file", "--state-dir", str(tmp_path)]
    assert main(["--peers", *words]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    assert "peer_unreadable" in captured.err
    assert main(["--forget", name, *words]) == 0
    assert peers.all().faults == ()
