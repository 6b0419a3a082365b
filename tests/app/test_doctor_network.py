"""What `baton doctor` reads of tools, and how it reaches producers."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from msgspec import structs

from app import doctor_links as links
from app import doctor_network as network
from app.doctor_facts import Registry, Running, System, system
from app.doctor_network import Interface, Target
from app.service import Installed
from gb10_producer.trust import make_pairing, make_records
from protocol.control.messages import Description
from protocol.errors import BatonError, ConfigError
from protocol.pairing.record import PairingRecord, fingerprint
from tests.app.fake_tools import put_on_path
from tests.protocol.control.joined import DESCRIPTION
from tests.trust.answering import answering, records
from trust.peers import Address, Peer
from trust.tls import server_context

NONE_RUNS = Running("u", None, "decoder_unreachable")
MAC = System("Darwin", "macOS-26.1-arm64", "3.12.3")

PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 1c:1d:d3:00:00:01

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 1c:1d:d3:00:00:02

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 36:00:00:00:00:00

VLAN Configurations
===================
"""
IFCONFIG = """en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\toptions=567<RXCSUM,TXCSUM,VLAN_MTU,TSO4,TSO6,AV,CHANNEL_IO>
\tether 1c:1d:d3:00:00:01
\tinet 192.168.1.20 netmask 0xffffff00 broadcast 192.168.1.255
\tmedia: autoselect (10Gbase-T <full-duplex,flow-control,energy-efficient-ethernet>)
\tstatus: active
"""
ETHTOOL = """EEE settings for eth0:
\tEEE status: enabled - active
\tTx LPI: 0 (us)
"""


def test_the_ports_of_a_mac_are_read() -> None:
    assert network.hardware_ports(PORTS) == {
        "en0": "Ethernet",
        "en1": "Wi-Fi",
        "bridge0": "Thunderbolt Bridge",
    }
    assert network.hardware_ports("") == {}


@pytest.mark.parametrize(
    ("media", "speed", "eee"),
    [
        ("autoselect (10Gbase-T <full-duplex,energy-efficient-ethernet>)", 10_000, "on"),
        ("autoselect (2500Base-T <full-duplex>)", 2500, "off"),
        ("autoselect (1000baseT <full-duplex,flow-control>)", 1000, "off"),
        ("1000baseT <full-duplex> (100baseTX <full-duplex>)", 100, "off"),
        ("autoselect (none)", 0, "unknown"),
        ("autoselect", 0, "unknown"),
    ],
)
def test_speed_and_eee_of_a_mac_are_read(media: str, speed: int, eee: str) -> None:
    told = f"en0: flags=8863<UP> mtu 1500\n\tmedia: {media}\n\tstatus: active\n"
    assert (network.speed_in_ifconfig(told), network.eee_in_ifconfig(told)) == (speed, eee)


@pytest.mark.parametrize(
    ("told", "eee"),
    [
        (ETHTOOL, "on"),
        (ETHTOOL.replace("enabled - active", "disabled"), "off"),
        (ETHTOOL.replace("enabled - active", "not supported"), "off"),
        ("netlink error: Operation not supported", "unknown"),
        ("", "unknown"),
    ],
)
def test_what_ethtool_says_of_eee_is_read(told: str, eee: str) -> None:
    assert network.eee_in_ethtool(told) == eee


def test_firewalls_are_read() -> None:
    assert network.on_in_ufw("# comment\nENABLED=yes\nLOGLEVEL=low\n")
    assert not network.on_in_ufw("ENABLED=no\n#ENABLED=yes\n")
    assert network.on_in_socketfilterfw("Firewall is enabled. (State = 1)") is True
    assert network.on_in_socketfilterfw("Firewall is disabled. (State = 0)") is False
    assert network.on_in_socketfilterfw("") is None


def test_a_macs_interface_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ports").write_text(PORTS)
    (tmp_path / "ifconfig").write_text(IFCONFIG)
    put_on_path(
        tmp_path / "bin",
        monkeypatch,
        networksetup=f"cat {tmp_path}/ports",
        ifconfig=f'test "$1" = en0 && cat {tmp_path}/ifconfig',
    )
    stats = {
        name: SimpleNamespace(
            isup=True, duplex=psutil.NIC_DUPLEX_FULL, speed=0, mtu=1500, flags="up,running"
        )
        for name in ("en0", "en1", "utun3", "lo0")
    }
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    wired, wireless = network.cables(MAC)
    assert wired == Interface("en0", 10_000, "full", 1500, eee="on")
    assert (wireless.name, wireless.wireless) == ("en1", True)
    tunnel = network.interface("utun3", MAC)
    assert tunnel is not None
    assert tunnel.tunnel
    assert network.interface("lo0", MAC) is None
    assert network.interface("en9", MAC) is None


def test_a_tool_that_is_missing_or_fails_says_nothing() -> None:
    assert network.said("baton-no-such-tool") == ""
    assert network.said("false") == ""


def test_producers_come_from_pairings_the_service_and_the_command_line(tmp_path: Path) -> None:
    _, record = make_records(1)
    peer = Peer("box", record, 0, Address("box.local", 7431))
    _, file = make_pairing(tmp_path / "pairing", 1)
    options = (
        "--producer=wss://10.0.0.2:7500",
        f"--pairing={file}",
        "--producer=wss://[fe80::1]:7431",
        f"--pairing={tmp_path}/missing",
    )
    service = Installed("x", tmp_path, options, True, "log")
    found = network.targets(
        Registry("decoder", "file", (peer,)), service, ["box.local", "other:1", "wss://a:2"]
    )
    assert [(one.name, one.host, one.port, one.record is not None) for one in found] == [
        ("box", "box.local", 7431, True),
        ("10.0.0.2", "10.0.0.2", 7500, True),
        ("fe80::1", "fe80::1", 7431, False),
        ("other:1", "other", 1, False),
        ("wss://a:2", "a", 2, False),
    ]
    assert found[0].url == "wss://box.local:7431"
    assert found[2].url == "wss://[fe80::1]:7431"
    assert network.targets(None, None, []) == []


@pytest.mark.parametrize("text", ["", "host:port", "host:99999", "wss://"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        network.targets(None, None, [text])
    assert refused.value.reason == "address_invalid"


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port at which each connection is served so, one after the other."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        done = threading.Event()

        def run() -> None:
            while not done.is_set():
                with suppress(TimeoutError):
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        connection.settimeout(5)
                        serve(connection)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            done.set()
            thread.join()


def over_tls(record: PairingRecord) -> Callable[[socket.socket], None]:
    context = server_context(record.certificate, record.private_key, [record.peer_certificate])

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            secured.recv(1000)

    return serve


def test_a_paired_producer_shows_its_certificate() -> None:
    theirs, ours = make_records(1)
    with listening(over_tls(theirs)) as port:
        reached = network.reach(Target("box", "127.0.0.1", port, ours), system())
    assert (reached.failed, reached.tls_error) == (0, "")
    assert reached.shown == reached.pinned == fingerprint(theirs.certificate)
    assert 0 < reached.connect_ms < 1000
    assert network.path_mtu(reached) > 1000
    assert reached.interface is None, "loopback is no cable"
    assert isinstance(reached.answer, BatonError), "it hangs up before it says anything"


@pytest.mark.parametrize(("theirs", "judged"), [("127.0.0.1", False), ("127.0.0.9", True)])
def test_a_port_of_this_machine_is_not_judged_for_a_producer_on_it(
    monkeypatch: pytest.MonkeyPatch, theirs: str, judged: bool
) -> None:
    """It may be called by this machine's address in the network: what goes there uses no port,
    and nobody has to set anything for it.
    """
    port = SimpleNamespace(isup=True, duplex=2, speed=1000, mtu=1400, flags="up")
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"en0": port})
    ours = [SimpleNamespace(address=one) for one in ("127.0.0.1", "127.0.0.2")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"en0": ours})
    found = network._way("127.0.0.2", theirs, system())
    assert (found is not None) == judged
    with listening(lambda connection: None) as number:
        reached = network.reach(Target("box", "127.0.0.1", number), system())
    assert reached.interface is None
    told = list(links.producer(reached, system(), NONE_RUNS, None, "0.1.0"))
    assert not any("MTU" in one.subject or "way to" in one.subject for one in told)


def test_a_paired_producer_says_what_it_is() -> None:
    theirs, ours = records()
    with answering(theirs) as (_, address):
        reached = network.reach(Target("box", address.host, address.port, ours), system())
    assert isinstance(reached.answer, Description)
    assert reached.answer.name == DESCRIPTION.name


def test_one_that_has_another_key_refuses() -> None:
    theirs, ours = records()
    with answering(theirs) as (_, address):
        rotated = structs.replace(ours, key=bytes(32))
        reached = network.reach(Target("box", address.host, address.port, rotated), system())
    assert reached.shown == reached.pinned
    assert isinstance(reached.answer, BatonError)
    assert reached.answer.reason == "proof_differs"


def test_another_certificate_is_seen_and_nothing_is_asked() -> None:
    theirs, _ = make_records(1)
    _, ours = make_records(1)
    with listening(over_tls(theirs)) as port:
        reached = network.reach(Target("box", "127.0.0.1", port, ours), system())
    assert reached.shown == fingerprint(theirs.certificate)
    assert reached.pinned == fingerprint(ours.peer_certificate)
    assert reached.answer is None


def test_an_unpaired_producers_certificate_is_seen_too() -> None:
    theirs, _ = make_records(1)
    with listening(over_tls(theirs)) as port:
        reached = network.reach(Target("box", "localhost", port), system())
    assert (reached.shown, reached.pinned) == (fingerprint(theirs.certificate), None)


def test_what_speaks_no_tls_is_told() -> None:
    _, ours = make_records(1)
    with listening(lambda connection: connection.sendall(b"HTTP/1.1 400 no\r\n\r\n")) as port:
        reached = network.reach(Target("box", "127.0.0.1", port, ours), system())
    assert reached.failed == 0
    assert reached.shown is None
    assert reached.tls_error


def test_a_closed_port_and_a_name_without_address_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert network.reach(Target("b", "127.0.0.1", port), system()).failed == errno.ECONNREFUSED
    for name in ("box.invalid", "a" * 70 + ".invalid"):
        assert network.reach(Target("b", name, port), system()).failed == network.NO_ADDRESS


@pytest.mark.parametrize("number", [65, errno.ENETUNREACH])
def test_the_systems_own_number_is_kept(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "No route to host")

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert network.reach(Target("b", "10.0.0.2", 1), MAC).failed == number
