"""Which hosts are this machine, and which are hosts at all."""

from __future__ import annotations

from protocol.addresses import can_be_a_host, is_loopback


def test_loopback_is_judged_by_address() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "LOCALHOST")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "", "example.com", "127.0.0.1.nip.io")))


def test_what_can_be_a_host() -> None:
    for host in (
        "box",
        "box.example",
        "127.0.0.1",
        "::1",
        "fe80::1%eth0",
        "käse.example",
        "a" * 63,
    ):
        assert can_be_a_host(host), host
    for host in ("", "a" * 64, "a..b", ".a", "a\0b", "a b", "a\n"):
        assert not can_be_a_host(host), host
