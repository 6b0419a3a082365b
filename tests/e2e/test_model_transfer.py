"""A box that was never given a model: sent one by its Mac, which then prefills on it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.model_stream import outgoing
from protocol.control.messages import Description
from tests.e2e.paired import BATON, Box, Mac
from tests.e2e.running import RunningProducer, until
from tests.e2e.test_pairing import CHAT, registry, serve, source
from tests.proxy import Line, Proxy
from trust.control import Control
from trust.peers import Address


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Box]:
    """A box without a model that shows a code."""
    box = Box(tmp_path / "gb10", *words(tmp_path), "--pair")
    with closing(box.running):
        yield box


def words(tmp_path: Path, *more: str) -> tuple[str, ...]:
    cache = str(tmp_path / "gb10-cache")
    return ("--device", "cpu", "--host", "127.0.0.1", "--cache-dir", cache, *more)


def again(box: Box, tmp_path: Path, *more: str) -> RunningProducer:
    """The same box, started once more on its port, without a code."""
    port = box.running.url.rpartition(":")[2]
    state = ("--state-dir", str(box.state), "--secrets", "file", "--name", "gb10")
    return RunningProducer(box.state, *state, *words(tmp_path, "--port", port, *more))


def said(box: Box, word: str) -> str:
    """The address that it says beside ``ready`` or ``waiting``."""
    stdout = box.running.process.stdout
    assert stdout is not None
    for line in stdout:
        if line.startswith(f"{word} "):
            box.running.url = line.split()[1]
            return box.running.url
    raise AssertionError(box.said)


@pytest.fixture
def mac(tmp_path: Path, model: Path) -> Iterator[Mac]:
    state = tmp_path / "mac"
    state.mkdir()
    with closing(serve(state, str(model))) as decoder:
        yield Mac(state, decoder.await_ready())


@pytest.fixture
def alone(tmp_path: Path) -> Mac:
    """A machine whose decoder does not run."""
    state = tmp_path / "mac"
    state.mkdir()
    return Mac(state, Absent())  # type: ignore[arg-type]


class Absent:
    url = "127.0.0.1:9"


def sent(mac: Mac, model: Path, *more: str) -> dict[str, Any]:
    """What `baton node send` says that it did."""
    told = mac.node("send", "gb10", "--model", str(model), "--json", *more)
    found, _ = json.JSONDecoder().raw_decode(told)
    return found


def described(mac: Mac) -> Description:
    (peer,) = registry(mac).all().peers
    assert peer.address is not None
    with Control.open(peer.address, peer.record) as control:
        return control.describe()


def add(box: Box, mac: Mac, *more: str) -> str:
    target = f"127.0.0.1:{box.pair_port}"
    told = mac.node("add", target, "--code-stdin", "--name", "mac", *more, typed=box.code())
    return " ".join(told.split())


def kept(tmp_path: Path) -> Path:
    return tmp_path / "gb10-cache" / "models"


def test_a_box_without_a_model_is_sent_one_while_it_is_added_and_prefills_with_it(
    empty: Box, mac: Mac, tmp_path: Path, model: Path
) -> None:
    said(empty, "waiting")
    assert "no model here yet" in empty.said
    told = add(empty, mac, "--send")
    assert "it serves no model (waiting)" in told
    assert f"gb10 has {model.name}" in told
    said(empty, "ready")
    (listed,) = mac.listed()
    assert listed["state"] == "ready"
    there, remote = source(mac, CHAT, reuse=False)
    here, local = source(mac, CHAT, reuse=False, lane="local")
    assert (there, here) == ("remote", "local")
    assert remote == local
    (received,) = [one for one in kept(tmp_path).iterdir() if one.is_dir()]
    assert received.name == model.name

    # Once more, and nothing is sent.
    once_more = sent(mac, model)
    assert (once_more["sent"], once_more["serving"]) == (0, "now")
    assert once_more["bytes"] > 1_000_000


@pytest.mark.soak
def test_who_is_not_asked_is_told_what_to_type_and_another_model_takes_over(
    empty: Box, alone: Mac, tmp_path: Path, model: Path, checkpoint: Callable[..., Path]
) -> None:
    said(empty, "waiting")
    told = add(empty, alone, "--model", str(model))
    assert f"gb10 does not have {model.name} (1.5 MB)" in told
    assert "baton node send 'gb10' sends it" in told
    assert described(alone).state == "waiting"
    assert not kept(tmp_path).exists()
    assert sent(alone, model)["serving"] == "now"
    first = described(alone)
    assert (first.state, first.model) == ("ready", model.name)

    (child,) = psutil.Process(empty.running.process.pid).children()
    other = checkpoint("llama", seed=1)
    assert sent(alone, other)["serving"] == "restarting"
    second = described(alone)
    assert (second.state, second.model) == ("ready", other.name)
    assert second.identity != first.identity
    assert not child.is_running()
    assert "failed and is started again" not in empty.said


@pytest.mark.soak
def test_a_box_that_was_started_with_a_model_keeps_another_beside_it(
    mac: Mac, tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    named = checkpoint("llama", seed=2)
    box = Box(tmp_path / "gb10", *words(tmp_path), "--model", str(named), "--pair")
    with closing(box.running):
        said(box, "ready")
        told = add(box, mac, "--send")
        assert "baton produce, without --model" in told
        assert described(mac).model == named.name
        until(lambda: mac.listed()[0]["reason"] == "weights_differ")
        assert source(mac, CHAT, reuse=False)[0] == "local"
    with closing(again(box, tmp_path)) as running:
        running.await_ready()
        mac.await_state("ready")
        assert source(mac, CHAT, reuse=False)[0] == "remote"


@pytest.mark.soak
def test_a_model_that_cannot_be_served_leaves_a_box_that_takes_another(
    tmp_path: Path, alone: Mac, model: Path
) -> None:
    limit = ("--memory-limit", "1M")
    box = Box(tmp_path / "gb10", *words(tmp_path, *limit), "--pair")
    with closing(box.running):
        said(box, "waiting")
        add(box, alone, "--no-send")
        told = alone.node("send", "gb10", "--model", str(model), status=1)
        assert "model_not_served" in told
        assert "not_enough_memory" in box.said
        assert described(alone).state == "waiting"
        assert box.running.process.poll() is None


@pytest.mark.soak
def test_a_model_that_torch_cannot_build_leaves_a_box_that_takes_another(
    empty: Box, tmp_path: Path, alone: Mac, model: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    config = json.loads((broken / "config.json").read_text())
    config["pad_token_id"] = config["vocab_size"]
    (broken / "config.json").write_text(json.dumps(config))
    said(empty, "waiting")
    add(empty, alone, "--no-send")
    told = alone.node("send", "gb10", "--model", str(broken), status=1)
    assert "model_not_served" in told
    # The process that took its place does not try it again, and says which it was.
    until(lambda: "model_given_up" in empty.said)
    assert "model_not_buildable" in empty.said
    found = described(alone)
    assert (found.state, found.model) == ("waiting", "broken")
    assert sent(alone, model)["serving"] == "now"
    assert described(alone).state == "ready"
    assert "failed and is started again" not in empty.said


# Interrupted


def test_sending_goes_on_after_ctrl_c_and_after_the_box_was_killed(
    empty: Box, alone: Mac, tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    """Through a line that is so slow that there is a middle; the model is larger than sockets."""
    large = tmp_path / "large"
    shutil.copytree(checkpoint("llama"), large)
    words_of = json.dumps({str(n): "x" * 1000 for n in range(24_000)})
    (large / "added_tokens.json").write_text(words_of)
    total = outgoing(large, None).manifest.nbytes
    assert total > 20 << 20
    said(empty, "waiting")
    add(empty, alone, "--no-send")

    (peer,) = registry(alone).all().peers
    assert peer.address is not None
    with Proxy(f"wss://127.0.0.1:{peer.address.port}", up=Line(bytes_per_s=4 << 20)) as proxy:
        slowly = Address("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        registry(alone).update(peer.fingerprint, lambda known: replace(known, address=slowly))
        command = [BATON, "node", "send", "gb10", "--model", str(large), "--json"]
        command += [
            "--state-dir",
            str(alone.state),
            "--secrets",
            "file",
            "--url",
            alone.decoder.url,
        ]

        def sending() -> subprocess.Popen[str]:
            return subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )

        def there() -> int:
            return sum(
                one.stat().st_size
                for part in kept(tmp_path).glob(".receiving-*")
                for one in part.iterdir()
            )

        first = sending()
        until(lambda: there() > 1 << 20)
        first.send_signal(signal.SIGINT)
        _, complaint = first.communicate(timeout=20)
        assert first.returncode == 130
        assert "baton node send 'gb10' goes on from there" in " ".join(
            complaint.replace("`", "").split()
        )

        second = sending()
        # What the first one had under way still arrived: this one's bytes begin behind that.
        until(lambda: empty.said.count("model wanted") == 2)
        after_first = there()
        assert 1 << 20 < after_first < total
        until(lambda: there() > after_first + (1 << 20))
        (child,) = psutil.Process(empty.running.process.pid).children()
        child.kill()
        _, complaint = second.communicate(timeout=30)
        assert second.returncode == 1
        assert "connection_lost" in complaint
        until(lambda: empty.said.count("no model here yet") == 2)
        after_second = there()
        assert after_second < total

        proxy.lines["up"] = Line()
        third = sending()
        answer, complaint = third.communicate(timeout=60)
        assert third.returncode == 0, complaint
        found = json.loads(answer)
        assert found["bytes"] == total
        assert found["sent"] <= total - after_second
        assert found["serving"] == "now"
    (received,) = [one for one in kept(tmp_path).iterdir() if one.is_dir()]
    assert (received / "added_tokens.json").read_text() == words_of
