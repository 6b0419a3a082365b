"""What `baton doctor` makes of facts about a machine: any machine, these are written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from app import doctor_findings as findings
from app.doctor_facts import (
    Clock,
    Device,
    Directory,
    Disk,
    Memory,
    Package,
    Port,
    Registry,
    Running,
    System,
    model,
)
from app.doctor_findings import Finding, Verdict
from app.service import Installed
from protocol.errors import ConfigError
from protocol.releases import MEASURED
from trust.peers import Fault

LINUX = System("Linux", "Linux-6.8-aarch64", "3.12.3")
MAC = System("Darwin", "macOS-26.1-arm64", "3.12.3")
GB = 1_000_000_000
NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
RUNS = Installed("baton-decoder.service", Path("/u/x"), (), True, "journalctl --user")
READY: dict[str, Any] = {"model": "m", "engine": {"ready": True, "fault": None}}


def only(found: Finding | Any) -> Finding:
    """The one finding, which says what to do unless all is well."""
    (finding,) = [found] if isinstance(found, Finding) else list(found)
    assert bool(finding.what_to_do) == (finding.verdict != "ok"), finding
    return finding


TORCH = MEASURED["torch"]
MINOR = ".".join(TORCH.split(".")[:2])

CASES: list[tuple[str, Finding | Any, Verdict, str]] = [
    ("python", findings.python(LINUX), "ok", "3.12.3"),
    ("baton itself", findings.package(Package("baton-llm", "0.1.0")), "ok", "0.1.0"),
    (
        "a CUDA build of the measured release",
        findings.package(Package("torch", f"{TORCH}+cu130", TORCH)),
        "ok",
        TORCH,
    ),
    (
        "another patch",
        findings.package(Package("torch", f"{MINOR}.99", TORCH)),
        "remark",
        f"{MINOR}.99",
    ),
    ("another minor", findings.package(Package("torch", "2.1.0", TORCH)), "wrong", "2.1.0"),
    ("one half", findings.sides({"decoder": (), "producer": ("torch",)}), "ok", "decoder"),
    ("no half", findings.sides({"decoder": ("mlx",), "producer": ("torch",)}), "wrong", "neither"),
    ("Metal", findings.decoders_device(Device("mlx", "Apple M4 Max"), MAC), "ok", "M4 Max"),
    ("no Metal on a Mac", findings.decoders_device(Device("mlx"), MAC), "wrong", "no Metal"),
    ("MLX on Linux", findings.decoders_device(Device("mlx"), LINUX), "remark", "slow library"),
    (
        "MLX with OpenBLAS",
        findings.decoders_device(Device("mlx", blas="libopenblas.so.0"), LINUX),
        "remark",
        "with libopenblas.so.0",
    ),
    (
        "MLX that does not load",
        findings.decoders_device(Device("mlx", error="ImportError: libmlx"), MAC),
        "wrong",
        "libmlx",
    ),
    (
        "a GB10",
        findings.producers_device(Device("torch", "NVIDIA GB10", True), LINUX),
        "ok",
        "GB10",
    ),
    (
        "a CPU build beside the driver",
        findings.producers_device(Device("torch", driver=True), LINUX),
        "wrong",
        "sees no CUDA",
    ),
    ("no NVIDIA", findings.producers_device(Device("torch"), LINUX), "remark", "no CUDA"),
    ("torch on a Mac", findings.producers_device(Device("torch"), MAC), "ok", "processor"),
    ("room", findings.memory(Memory(128 * GB, 90 * GB), [], None), "ok", "90.0 GB of 128.0 GB"),
    (
        "the pool of a GB10",
        findings.memory(Memory(128 * GB, 90 * GB), [Device("torch", "GB10", True)], None),
        "ok",
        "GPU shares",
    ),
    ("little memory", findings.memory(Memory(128 * GB, 9 * GB), [], None), "remark", "9.0 GB"),
    (
        "disk",
        findings.disk(Disk(Path("/c"), 500 * GB, 100 * GB, 20 * GB)),
        "ok",
        "at most 100.0 GB",
    ),
    (
        "a disk below the floor",
        findings.disk(Disk(Path("/c"), 19 * GB, 100 * GB, 20 * GB)),
        "remark",
        "no caches are kept on disk",
    ),
    ("a full disk", findings.disk(Disk(Path("/c"), GB // 2, 9, 9)), "wrong", "500.0 MB free"),
    ("a free port", findings.port(Port(8000, "the decoder")), "ok", "free"),
    ("our port", findings.port(Port(8000, "the decoder", "python (7)", True)), "ok", "Baton"),
    ("their port", findings.port(Port(8000, "the decoder", "node (7)")), "wrong", "node (7)"),
    ("no directories", findings.directories([]), "ok", "none"),
    ("a closed directory", findings.directories([Directory(Path("/s"), 0o700, True)]), "ok", "1"),
    (
        "an open directory",
        findings.directories([Directory(Path("/s"), 0o755, True)]),
        "wrong",
        "mode 0755",
    ),
    (
        "root's directory",
        findings.directories([Directory(Path("/s"), 0o700, False)]),
        "wrong",
        "another user",
    ),
    ("secrets in files", findings.secrets(Registry("decoder", "file"), False), "ok", "nobody yet"),
    ("a keyring", findings.secrets(Registry("decoder", "keyring"), True), "ok", "keyring"),
    ("no keyring", findings.secrets(Registry("decoder", "keyring"), False), "wrong", "no keyring"),
    (
        "a locked keyring",
        findings.secrets(
            Registry(
                "decoder",
                "keyring",
                refusal=ConfigError("It is locked.", reason="keychain_locked", hint="unlock it"),
            ),
            True,
        ),
        "wrong",
        "locked",
    ),
    ("the time", findings.clock(Clock(NOW)), "ok", "2026-05-01"),
    ("no battery", findings.clock(Clock(NOW.replace(year=1970))), "wrong", "1970"),
    ("the future", findings.clock(Clock(NOW.replace(year=2100))), "wrong", "2100"),
    (
        "two clocks",
        findings.clock(Clock(NOW, NOW - timedelta(seconds=31))),
        "remark",
        "31 s",
    ),
    ("two equal clocks", findings.clock(Clock(NOW, NOW + timedelta(seconds=29))), "ok", "2026"),
    ("a service", findings.service("decoder", RUNS), "ok", "runs"),
    (
        "a service that ended",
        findings.service("decoder", RUNS._replace(runs=False)),
        "wrong",
        "does not run",
    ),
    (
        "no decoder",
        findings.running(Running("u", None, "decoder_unreachable"), False),
        "ok",
        "none",
    ),
    (
        "a decoder behind TLS",
        findings.running(Running("u", None, "decoder_unreachable"), True),
        "remark",
        "does not answer",
    ),
    (
        "a decoder that starts",
        findings.running(Running("u", None, "decoder_starting", "it is starting"), True),
        "remark",
        "starting",
    ),
    (
        "a decoder that gave up",
        findings.running(Running("u", None, "decoder_latched_off", "it failed too often"), True),
        "wrong",
        "too often",
    ),
    (
        "a decoder with keys",
        findings.running(Running("u", None, "invalid_api_key", "no valid key"), True),
        "remark",
        "no valid key",
    ),
    ("a decoder", findings.running(Running("u", READY), True), "ok", "m at u"),
    (
        "a decoder that loads",
        findings.running(Running("u", {"model": "m", "engine": {"ready": False}}), True),
        "remark",
        "loaded",
    ),
    (
        "a decoder that failed",
        findings.running(Running("u", {"engine": {"ready": False, "fault": "engine_fault"}}), True),
        "wrong",
        "engine_fault",
    ),
    (
        "a decoder that was restarted",
        findings.running(
            Running("u", READY | {"supervisor": {"restarts": 2, "last_fault": "signal SIGABRT"}}),
            True,
        ),
        "remark",
        "SIGABRT",
    ),
]


@pytest.mark.parametrize(
    ("found", "verdict", "told"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_each_fact_has_its_verdict(found: Any, verdict: Verdict, told: str) -> None:
    finding = only(found)
    assert finding.verdict == verdict, finding
    assert told in finding.found


def test_nothing_is_said_of_a_service_that_is_not_installed() -> None:
    assert list(findings.service("producer", None)) == []


def test_every_open_directory_is_named() -> None:
    found = list(
        findings.directories(
            [
                Directory(Path("/one"), 0o750, True),
                Directory(Path("/two"), 0o701, True),
                Directory(Path("/three"), 0o700, True),
            ]
        )
    )
    assert [one.verdict for one in found] == ["wrong", "wrong"]
    assert [one.what_to_do for one in found] == ["chmod 700 /one", "chmod 700 /two"]


def test_a_file_of_a_peer_that_cannot_be_used_is_named_beside_the_rest() -> None:
    fault = Fault("ab" * 32, ConfigError("It is cut.", reason="peer_unreadable", hint="pair again"))
    wrong, rest = findings.secrets(Registry("decoder", "file", faults=(fault,)), True)
    assert (wrong.verdict, wrong.found, wrong.what_to_do) == ("wrong", "It is cut.", "pair again")
    assert wrong.subject == "decoder's secret abababababababab"
    assert rest.verdict == "ok"


def test_a_checkpoint_is_what_it_is_and_has_to_fit(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    whole = model(checkpoint("llama"))
    assert not isinstance(whole, Exception)
    told, identity = findings.model(whole)
    assert (told.verdict, told.found) == ("ok", "llama, float32 cache")
    assert identity.found == whole.identity.digest().hex()[:16]
    assert findings.memory(Memory(GB, whole.nbytes + 1), [], whole).verdict != "wrong"
    full = findings.memory(Memory(GB, whole.nbytes), [], whole)
    assert full.verdict == "wrong"
    assert "smaller" in full.what_to_do
    missing = only(findings.model(model(tmp_path)))
    assert missing.verdict == "wrong"


def test_the_reason_stands_in_for_a_hint() -> None:
    refusal = ConfigError("It is locked.", reason="keychain_locked")
    registry = replace(Registry("decoder", "file"), refusal=refusal)
    assert only(findings.secrets(registry, True)).what_to_do == "keychain_locked"
