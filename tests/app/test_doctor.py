"""`baton doctor` as it is typed: what is listed, in which form, and with which status."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app import doctor_exact, doctor_facts
from app.commands import app
from app.doctor_facts import Device, Package, System
from app.probe import Agreement
from gb10_producer.trust import make_records
from mac_decoder.config import DecoderConfig
from protocol.errors import ConfigError
from tests.app.test_doctor_network import listening, over_tls
from tests.app.test_status import STATUS, answering
from trust.peers import Address, Peer, Peers


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No framework is started, and no service of this user is looked at."""
    monkeypatch.setattr(doctor_facts, "device", lambda name: Device(name, "a GPU"))
    monkeypatch.setattr(doctor_facts, "installed_service", lambda side: None)
    return tmp_path


def baton(state: Path, *words: str) -> Result:
    places = ("--state-dir", str(state / "s"), "--cache-dir", str(state / "c"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    given = () if "--port" in words else ("--port", str(port))
    return CliRunner().invoke(app, ["doctor", *places, "--secrets", "file", *given, *words])


def listed(result: Result) -> dict[str, list[dict[str, str]]]:
    """The findings by subject."""
    assert result.exit_code in (0, 1), result.exception
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(result.stdout):
        assert set(finding) == {"subject", "verdict", "found", "what_to_do"}
        assert bool(finding["what_to_do"]) == (finding["verdict"] != "ok")
        found.setdefault(finding["subject"], []).append(finding)
    assert result.exit_code == any(f["verdict"] == "wrong" for s in found.values() for f in s)
    return found


def test_this_machine_is_looked_at(quick: Path) -> None:
    found = listed(baton(quick, "--json"))
    for subject in (
        *("python", "baton-llm", "mlx", "torch", "can run", "MLX", "memory", "disk"),
        *("directories", "decoder's secrets", "producer's secrets", "clock"),
        *("port 7431", "port 7432", "firewall", "decoder"),
    ):
        assert subject in found
    assert not (quick / "s").exists(), "looking makes nothing"
    assert not (quick / "c").exists()


def test_people_get_a_list_with_what_to_do(quick: Path) -> None:
    (quick / "c" / "kv").mkdir(parents=True)
    (quick / "c" / "kv").chmod(0o755)
    done = baton(quick)
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert any(line.startswith("ok") and "python" in line for line in lines)
    assert any(line.startswith("wrong") and "directory" in line for line in lines)
    assert "→ chmod 700" in done.stdout


def test_a_taken_port_is_wrong(quick: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        (found,) = listed(baton(quick, "--json", "--port", port))[f"port {port}"]
    assert found["verdict"] == "wrong"
    assert "--port" in found["what_to_do"]


def test_a_paired_producer_is_reached_and_its_qualification_is_told(quick: Path) -> None:
    theirs, ours = make_records(1)
    with listening(over_tls(theirs)) as port:
        state = DecoderConfig(model="", state_dir=str(quick / "s")).state_path
        Peers(state, "decoder").add(Peer("box", ours, 0, Address("127.0.0.1", port)))
        link = {"name": f"wss://127.0.0.1:{port}", "state": "unfit", "detail": "layer 3 is off"}
        other = {"name": "wss://box2:7431", "state": "ready"}
        status = STATUS | {"engine": STATUS["engine"] | {"links": [link, other]}}
        with answering(200, status) as address:
            found = listed(baton(quick, "--json", "--url", address))
    told = [(one["verdict"], one["found"]) for one in found["producer box"]]
    assert told[0][0] == "ok"
    assert "answers in" in told[0][1]
    assert "it shows the pinned certificate" in told[1][1]
    assert told[-1] == ("wrong", "the decoder does not use it: layer 3 is off")
    assert [one["verdict"] for one in found["producer wss://box2:7431"]] == ["ok"]
    assert found["decoder's secrets"][0]["found"].endswith("paired with box")


def test_a_given_producer_that_is_away_is_wrong(quick: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
    (found,) = listed(baton(quick, "--json", "--producer", place))[f"producer {place}"]
    assert (found["verdict"], "nobody listens" in found["found"]) == ("wrong", True)


def test_the_installed_service_says_where_to_look(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = (f"--port={port}", f"--state-dir={quick}/elsewhere", f"--cache-dir={quick}/kept")
    service = doctor_facts.Installed("baton-decoder", quick, options, False, "the log")
    monkeypatch.setattr(
        doctor_facts, "installed_service", lambda side: service if side == "decoder" else None
    )
    _, ours = make_records(1)
    Peers(quick / "elsewhere" / "decoder", "decoder").add(Peer("box", ours, 0, None))
    done = CliRunner().invoke(app, ["doctor", "--json", "--secrets", "file"])
    found = listed(done)
    assert f"port {port}" in found
    assert found["decoder's service"][0]["verdict"] == "wrong"
    assert "the log" in found["decoder's service"][0]["what_to_do"]
    assert found["decoder's secrets"][0]["found"].endswith("paired with box")
    assert f"{quick}/kept" in found["disk"][0]["found"]


def test_a_model_is_looked_at(quick: Path, checkpoint: Callable[..., Path]) -> None:
    found = listed(baton(quick, "--json", "--model", str(checkpoint("llama"))))
    assert found["model"][0]["verdict"] == "ok"
    found = listed(baton(quick, "--json", "--model", str(quick)))
    assert found["model"][0]["verdict"] == "wrong"


AGREEMENT = Agreement("a|b", "float32", False, 96, (1e-6, 2e-6), 1.0, 32)
PACKAGES = [Package("baton-llm", "0.1.0"), Package("torch", "2.13.1", "2.13.0")]


def written(found: Agreement) -> str:
    now = datetime(2026, 5, 1, tzinfo=UTC)
    mac = System("Darwin", "macOS-26", "3.12")
    devices = [Device("mlx", "Apple M4"), Device("torch")]
    return doctor_exact.markdown(found, bytes(32), mac, PACKAGES, devices, now)


def test_the_report_has_versions_devices_layers_and_bounds() -> None:
    text = written(AGREEMENT)
    for part in (
        "within the bounds",
        r"a\|b, identity `0000000000000000`, computed in float32",
        "| mlx computes on | Apple M4 |",
        "| torch computes on | the processor |",
        "| torch | 2.13.1 (Baton was measured with 2.13.0) |",
        "| largest relative error of a row | 2.00e-06 | 1e-03 |",
        "| same next token, of 32 | 100.0% | 95% |",
        "| 1 | 2.00e-06 | 0.2% |",
    ):
        assert part in text
    assert "beyond" not in text


@pytest.mark.parametrize("wrong", [0.5, float("nan")])
def test_a_layer_beyond_its_bound_is_marked(wrong: float) -> None:
    found = Agreement("m", "float32", False, 96, (1e-6, wrong), 1.0, 32)
    text = written(found)
    assert "**beyond the bounds" in text
    assert [line.split("|")[1].strip() for line in text.splitlines() if "**beyond** |" in line] == [
        "1"
    ]
    assert not doctor_exact.agrees(found)


def exact(model: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["doctor", "--exact", str(model), *words])


def test_both_frameworks_are_compared_for_real(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    to = tmp_path / "report.md"
    done = exact(checkpoint("llama"), "--output", str(to))
    assert done.exit_code == 0, done.exception
    assert done.stdout == ""
    text = to.read_text()
    assert text.startswith("# Exactness of llama")
    assert "within the bounds" in text
    told = json.loads(exact(checkpoint("llama"), "--json").stdout)
    assert told["agrees"] is True
    assert max(told["kv_error_by_layer"]) == told["kv_error"] < 1e-3


def test_frameworks_that_differ_are_status_1_and_reported_all_the_same(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Agreement("m", "float32", False, 96, (0.5,), 0.1, 32)
    monkeypatch.setattr(doctor_exact, "compare", lambda model: wrong)
    monkeypatch.setattr(doctor_facts, "device", lambda name: Device(name))
    done = exact(checkpoint("llama"))
    assert done.exit_code == 1
    assert "**beyond the bounds" in done.stdout


@pytest.mark.parametrize(
    ("lacking", "told"),
    [
        ({"decoder": (), "producer": ("torch",)}, "baton node qualify NAME"),
        ({"decoder": ("mlx",), "producer": ()}, "on the Mac"),
    ],
)
def test_one_half_alone_is_told_how_the_other_is_compared(
    lacking: dict[Any, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        doctor_exact.require_both(lacking)
    assert refused.value.reason == "half_not_installed"
    assert told in str(refused.value.hint)


def test_a_place_for_the_report_that_is_none_is_told_before_the_work(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_exact, "compare", lambda model: pytest.fail("it was compared"))
    done = exact(checkpoint("llama"), "--output", str(tmp_path / "no" / "report.md"))
    assert isinstance(done.exception, ConfigError)
    assert done.exception.reason == "output_unusable"
    assert CliRunner().invoke(app, ["doctor", "--output", "x"]).exit_code == 2


def test_a_damaged_checkpoint_is_refused_before_the_work(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint("llama"), tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("{")
    done = exact(tmp_path / "m")
    assert isinstance(done.exception, ConfigError)
