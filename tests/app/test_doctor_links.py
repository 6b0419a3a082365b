"""What `baton doctor` makes of the way to a producer, and of what it and the decoder say."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

import pytest

from app import doctor_links as links
from app.doctor_facts import Running, System
from app.doctor_findings import Finding, Verdict
from app.doctor_network import NO_ADDRESS, Firewall, Interface, Reached, Target
from protocol.control.messages import Description
from protocol.errors import TransferError
from protocol.identity import Identity
from protocol.messages import Recipe

LINUX = System("Linux", "Linux-6.8-aarch64", "3.12.3")
MAC = System("Darwin", "macOS-26.1-arm64", "3.12.3")
CABLE = Interface("eth0", 10_000, "full", 1500, eee="off")
TARGET = Target("box", "box.local", 7431)
PIN = bytes(32)
REACHED = Reached(TARGET, 0, 0.4, 1448, CABLE, PIN, "", PIN)
NONE_RUNS = Running("u", None, "decoder_unreachable")
RECIPE = Recipe("producer", "cuda", "bfloat16", 512)
SAME = Identity(*["a" * 64] * 8)
READY = Description("box", "0.1.0", "ready", "qwen", SAME, RECIPE)


def verdicts(found: Any) -> list[Verdict]:
    every = [found] if isinstance(found, Finding) else list(found)
    for finding in every:
        assert bool(finding.what_to_do) == (finding.verdict != "ok"), finding
    return [finding.verdict for finding in every]


def one(found: Any) -> Finding:
    every = [found] if isinstance(found, Finding) else list(found)
    assert len(verdicts(every)) == 1
    return every[0]


@pytest.mark.parametrize(
    ("cable", "expected", "told"),
    [
        (CABLE, ["ok"], "10 Gb/s"),
        (replace(CABLE, mtu=9000), ["ok"], "MTU 9000"),
        (replace(CABLE, speed_mbps=2500), ["remark"], "2.5 Gb/s"),
        (replace(CABLE, speed_mbps=1000), ["remark"], "10 times as long"),
        (replace(CABLE, speed_mbps=100), ["wrong"], "0.1 Gb/s"),
        (replace(CABLE, duplex="half"), ["wrong"], "half duplex"),
        (replace(CABLE, speed_mbps=0), ["remark"], "no speed"),
        (replace(CABLE, speed_mbps=0, eee="unknown"), ["remark"], "no speed"),
        (replace(CABLE, wireless=True, eee="unknown"), ["remark"], "Wi-Fi"),
        (replace(CABLE, name="utun4", tunnel=True, eee="unknown"), ["remark"], "VPN"),
        (replace(CABLE, mtu=1400), ["ok", "remark"], "eth0, 10"),
        (replace(CABLE, eee="on"), ["ok", "remark"], "eth0, 10"),
        (replace(CABLE, eee="unknown"), ["ok", "remark"], "eth0, 10"),
    ],
)
def test_a_cable_is_judged(cable: Interface, expected: list[Verdict], told: str) -> None:
    found = list(links.interface(cable, "network"))
    assert verdicts(found) == expected
    assert told in found[0].found


def test_energy_efficient_ethernet_comes_with_the_command_that_ends_it() -> None:
    on = list(links.interface(replace(CABLE, eee="on"), "network"))[-1]
    assert "ethtool --set-eee eth0 eee off" in on.what_to_do
    unknown = list(links.interface(replace(CABLE, eee="unknown"), "network"))[-1]
    assert "ethtool --show-eee eth0" in unknown.what_to_do


@pytest.mark.parametrize(
    ("found", "produces", "verdict", "told"),
    [
        ([], True, "ok", "none seen"),
        ([Firewall("ufw", False)], True, "ok", "none seen"),
        ([Firewall("ufw", True)], True, "remark", "ufw is on"),
        ([Firewall("ufw", True)], False, "ok", "only calls"),
        ([Firewall("ufw", None)], False, "remark", "cannot be read"),
    ],
)
def test_a_firewall_matters_to_a_producer(
    found: list[Firewall], produces: bool, verdict: Verdict, told: str
) -> None:
    finding = one(links.firewall(found, produces))
    assert (finding.verdict, told in finding.found) == (verdict, True)
    assert ("7431:7432" in finding.what_to_do) == ("is on" in told)


@pytest.mark.parametrize(
    ("system", "number", "told"),
    [
        (LINUX, errno.ECONNREFUSED, "nobody listens"),
        (LINUX, errno.ETIMEDOUT, "no answer"),
        (LINUX, errno.EHOSTUNREACH, "no route"),
        (LINUX, NO_ADDRESS, "no address"),
        (LINUX, errno.EACCES, "cannot be reached (EACCES)"),
        (MAC, 65, "denies a program the local network"),
    ],
)
def test_a_producer_that_is_not_reached_says_why(system: System, number: int, told: str) -> None:
    reached = replace(REACHED, failed=number, shown=None)
    finding = one(links.producer(reached, system, NONE_RUNS, None, "0.1.0"))
    assert finding.verdict == "wrong"
    assert told in finding.found


def test_macos_is_told_where_the_permission_is_and_others_are_not() -> None:
    found = one(links.reached(replace(REACHED, failed=65), MAC, "p", "box"))
    assert "Privacy & Security, Local Network" in found.what_to_do
    assert "Terminal" in found.what_to_do
    other = one(links.reached(replace(REACHED, failed=65), LINUX, "p", "box"))
    assert "Local Network" not in other.what_to_do


def test_a_long_round_trip_is_told() -> None:
    assert links.reached(REACHED, LINUX, "p", "box").verdict == "ok"
    assert one(links.reached(replace(REACHED, connect_ms=7.0), LINUX, "p", "x")).verdict == "remark"


@pytest.mark.parametrize(
    ("mtu", "mss", "expected"),
    [
        (1500, 1448, []),
        (1500, 1000, []),  # said by the interface's own finding, or somebody else's network
        (9000, 8948, []),
        (9000, 8960, []),
        (9000, 1448, ["remark"]),
        (9000, 0, []),
    ],
)
def test_unequal_packets_are_told(mtu: int, mss: int, expected: list[Verdict]) -> None:
    found = links.packets(replace(REACHED, mss=mss), replace(CABLE, mtu=mtu))
    assert verdicts(found) == expected


@pytest.mark.parametrize(
    ("shown", "pinned", "error", "verdict", "told"),
    [
        (PIN, PIN, "", "ok", "pinned"),
        (b"x" * 32, PIN, "", "wrong", "7878787878787878"),
        (PIN, None, "", "remark", "not paired"),
        (None, PIN, "WRONG_VERSION_NUMBER", "wrong", "WRONG_VERSION_NUMBER"),
    ],
)
def test_the_certificate_is_the_pinned_one_or_not(
    shown: bytes | None, pinned: bytes | None, error: str, verdict: Verdict, told: str
) -> None:
    reached = replace(REACHED, shown=shown, pinned=pinned, tls_error=error)
    finding = one(links.certificate(reached, "p"))
    assert (finding.verdict, told in finding.found) == (verdict, True)


def test_what_it_says_of_itself() -> None:
    assert one(links.described(READY, "p", None, "0.1.0")).verdict == "ok"
    loading = Description("box", "0.1.0", "loading", "qwen", None, None)
    assert one(links.described(loading, "p", None, "0.1.0")).verdict == "remark"
    older = one(links.described(READY, "p", None, "0.2.0"))
    assert (older.verdict, "baton 0.1.0, here it is 0.2.0" in older.found) == ("remark", True)
    refusal = TransferError("this machine is not paired there", reason="pairing_revoked", hint="do")
    refused = one(links.described(refusal, "p", None, "0.1.0"))
    assert (refused.verdict, refused.what_to_do) == ("wrong", "do")


@pytest.mark.parametrize(("model", "told"), [("", "waits for one"), ("m", "not load m, see its")])
def test_one_that_waits_for_a_model_is_sent_one(model: str, told: str) -> None:
    waiting = Description("box", "0.1.0", "waiting", model, None, None)
    found = one(links.described(waiting, "p", None, "0.1.0"))
    assert found.verdict == "remark"
    assert "box serves no model" in found.found
    assert told in found.found
    assert "baton node send" in found.what_to_do


def test_its_model_is_compared_with_the_given_one() -> None:
    class Given:
        identity = SAME

    found = list(links.described(READY, "p", Given(), "0.1.0"))  # type: ignore[arg-type]
    assert verdicts(found) == ["ok", "ok"]
    Given.identity = Identity(*["b" * 64] * 2, *["a" * 64] * 6)
    found = list(links.described(READY, "p", Given(), "0.1.0"))  # type: ignore[arg-type]
    assert verdicts(found) == ["ok", "wrong"]
    assert "weights, revision differ" in found[-1].found
    assert "baton node send" in found[-1].what_to_do


@pytest.mark.parametrize(
    ("link", "system", "reachable", "verdict", "told"),
    [
        ({"state": "ready", "round_trip_ms": 0.4}, LINUX, True, "ok", "0.4 ms"),
        ({"state": "ready"}, LINUX, True, "ok", "uses it"),
        ({"state": "qualifying", "detail": "rows are compared"}, LINUX, True, "remark", "rows"),
        ({"state": "unfit", "detail": "layer 3 is off"}, LINUX, True, "wrong", "layer 3"),
        ({"state": "refused", "reason": "weights_differ"}, LINUX, True, "wrong", "weights_differ"),
        ({"state": "down", "detail": "gone"}, LINUX, True, "wrong", "down: gone"),
        ({"state": "down", "detail": "gone"}, MAC, False, "wrong", "down: gone"),
        ({"state": "down", "detail": "gone"}, MAC, True, "wrong", "local network"),
    ],
)
def test_the_decoders_own_word_counts(
    link: dict[str, Any], system: System, reachable: bool, verdict: Verdict, told: str
) -> None:
    finding = one(links.linked(link, "p", system, reachable=reachable))
    assert (finding.verdict, told in finding.found) == (verdict, True)


def test_one_producer_from_the_cable_to_the_qualification() -> None:
    engine = {"links": [{"name": "wss://box.local:7431", "state": "unfit", "detail": "off"}]}
    running = Running("u", {"engine": engine})
    found = list(links.producer(replace(REACHED, answer=READY), LINUX, running, None, "0.1.0"))
    assert verdicts(found) == ["ok", "ok", "ok", "ok", "wrong"]
    assert {finding.subject for finding in found} == {"producer box", "way to box"}
    assert "baton node qualify" in found[-1].what_to_do
    other = replace(REACHED, target=replace(TARGET, port=7439))
    assert "wrong" not in verdicts(links.producer(other, LINUX, running, None, "0.1.0"))
