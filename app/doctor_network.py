"""What `baton doctor` finds out about the network and about producers: facts, and the looking.

What a system's tool prints is read by pure functions, so that a Mac's can be tested anywhere.
"""

from __future__ import annotations

import errno
import re
import socket
import ssl
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

import psutil

from app.doctor_facts import LINK_PORT, Registry, System
from app.service import Installed
from protocol.control.messages import Description
from protocol.errors import BatonError, ConfigError
from protocol.pairing.record import PairingRecord, fingerprint
from trust.control import Control
from trust.pairing_file import load_record
from trust.peers import Address
from trust.tls import client_context

Eee = Literal["on", "off", "unknown"]
Duplex = Literal["full", "half", ""]

CONNECT_S: Final = 5.0
NO_ADDRESS: Final = -1
"""What stands for an errno where a name has no address."""

_TOOL_S: Final = 20.0
_ETHERNET_HEADERS: Final = 40
"""Bytes of IP and TCP headers in a packet, without options."""
_MEDIA: Final = re.compile(r"media:.*?\((\d+)(G?)base", re.IGNORECASE)
_PORT: Final = re.compile(r"^Hardware Port: (.+)\nDevice: (\S+)", re.MULTILINE)
_TUNNELS: Final = ("utun", "ipsec", "ppp", "tun", "tap", "wg", "tailscale", "zt")


@dataclass(frozen=True)
class Interface:
    """A network interface. ``speed_mbps`` is 0, ``duplex`` empty, where the system tells none."""

    name: str
    speed_mbps: int = 0
    duplex: Duplex = ""
    mtu: int = 1500
    wireless: bool = False
    tunnel: bool = False
    eee: Eee = "unknown"


@dataclass(frozen=True)
class Firewall:
    """A firewall, and whether it is on; ``None`` where that cannot be read without root."""

    name: str
    on: bool | None


@dataclass(frozen=True)
class Target:
    """A producer to look at. ``record`` is the pairing with it, if there is one."""

    name: str
    host: str
    port: int
    record: PairingRecord | None = None

    @property
    def url(self) -> str:
        """What a decoder's status calls the link to it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"wss://{host}:{self.port}"


@dataclass(frozen=True)
class Reached:
    """What became of an attempt to reach a producer.

    ``failed`` is an errno, 0 if TCP connected, ``NO_ADDRESS`` where the name has none. ``mss``
    is the largest TCP segment in bytes. ``interface`` is ``None`` for a producer on this machine.
    ``shown`` is the certificate's SHA-256, ``pinned`` the
    one that it has to be. ``answer`` is what a paired producer says of itself, or why not.
    """

    target: Target
    failed: int = 0
    connect_ms: float = 0.0
    mss: int = 0
    interface: Interface | None = None
    shown: bytes | None = None
    tls_error: str = ""
    pinned: bytes | None = None
    answer: Description | BatonError | None = None


def targets(
    registry: Registry | None, service: Installed | None, given: Sequence[str]
) -> list[Target]:
    """The producers of this machine: paired ones, those of the installed service, given ones.

    Raises ``ConfigError`` (``address_invalid``) for one that was given and is none.
    """
    found: dict[tuple[str, int], Target] = {}
    for peer in registry.peers if registry is not None else ():
        if peer.address is not None:
            place = (peer.address.host, peer.address.port)
            found[place] = Target(peer.name, *place, peer.record)
    for target in _of_service(service):
        found.setdefault((target.host, target.port), target)
    for text in given:
        host, port = _place(text)
        found.setdefault((host, port), Target(text, host, port))
    return list(found.values())


def _of_service(service: Installed | None) -> list[Target]:
    """The producers in the options of an installed decoder."""
    if service is None or service.arguments is None:
        return []
    words = [word.partition("=") for word in service.arguments]
    urls = [value for option, _, value in words if option == "--producer"]
    files = [value for option, _, value in words if option == "--pairing"]
    found: list[Target] = []
    for number, url in enumerate(urls):
        host, port = _place(url)
        record = None
        if number < len(files):
            try:
                record = load_record(Path(files[number]), "decoder")
            except ConfigError:
                record = None  # the service's own start tells
        found.append(Target(host, host, port, record))
    return found


def _place(text: str) -> tuple[str, int]:
    parts = urlsplit(text if "://" in text else f"wss://{text}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host:
        raise ConfigError(
            f"{text} is no address of a producer",
            reason="address_invalid",
            field="producer",
            expected="HOST, HOST:PORT or wss://HOST:PORT",
        )
    return host, port or LINK_PORT


def reach(target: Target, system: System) -> Reached:
    """Connect to a producer, see its certificate, and ask a paired one what it is."""
    pinned = None if target.record is None else fingerprint(target.record.peer_certificate)
    began = time.perf_counter()
    try:
        sock = socket.create_connection((target.host, target.port), CONNECT_S)
    except TimeoutError:
        return Reached(target, errno.ETIMEDOUT, pinned=pinned)
    except (socket.gaierror, UnicodeError):
        return Reached(target, NO_ADDRESS, pinned=pinned)
    except OSError as error:
        return Reached(target, error.errno or errno.EIO, pinned=pinned)
    took = (time.perf_counter() - began) * 1000
    with sock:
        mss = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        through = _way(sock.getsockname()[0], sock.getpeername()[0], system)
        shown, failure = _certificate(sock, target)
    answer = None
    if target.record is not None and shown == pinned:
        answer = _ask(target, target.record)
    return Reached(target, 0, took, mss, through, shown, failure, pinned, answer)


def _certificate(sock: socket.socket, target: Target) -> tuple[bytes | None, str]:
    """The SHA-256 of the certificate that is shown, or why none is."""
    if target.record is not None:
        context = client_context(target.record.certificate, target.record.private_key)
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    try:
        with context.wrap_socket(sock) as secured:
            return fingerprint(secured.getpeercert(binary_form=True) or b""), ""
    except OSError as error:
        said = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        return None, said or type(error).__name__


def _ask(target: Target, record: PairingRecord) -> Description | BatonError:
    try:
        with Control.open(Address(target.host, target.port), record) as control:
            return control.describe()
    except BatonError as error:
        return error


def _way(here: str, there: str, system: System) -> Interface | None:
    """The interface between two addresses; ``None`` where both are this machine's: what goes to
    one of its own goes through no port, whichever has it.
    """
    if _bearer(there) is not None:
        return None
    name = _bearer(here)
    return None if name is None else interface(name, system)


def _bearer(address: str) -> str | None:
    """The name of the interface that has this address; ``None`` if it is not this machine's."""
    plain = address.partition("%")[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == plain for one in addresses):
            return name
    return None


def cables(system: System) -> list[Interface]:
    """The network ports of this machine that are up, without what software made."""
    stats = psutil.net_if_stats()
    if system.is_macos:
        physical = set(hardware_ports(said("networksetup", "-listallhardwareports")))
    else:
        physical = {name for name in stats if Path(f"/sys/class/net/{name}/device").exists()}
    up = [name for name in sorted(physical) if name in stats and stats[name].isup]
    return [found for name in up if (found := interface(name, system)) is not None]


def interface(name: str, system: System) -> Interface | None:
    """What the system tells of an interface; ``None`` for loopback, and if it is gone."""
    stats = psutil.net_if_stats().get(name)
    if stats is None or "loopback" in stats.flags.split(",") or name.startswith("lo"):
        return None
    duplexes: dict[int, Duplex] = {
        psutil.NIC_DUPLEX_FULL: "full",
        psutil.NIC_DUPLEX_HALF: "half",
    }
    duplex: Duplex = duplexes.get(stats.duplex, "")
    tunnel = name.startswith(_TUNNELS)
    if system.is_macos:
        told = said("ifconfig", name)
        ports = hardware_ports(said("networksetup", "-listallhardwareports"))
        speed = speed_in_ifconfig(told) or stats.speed
        wireless = ports.get(name) == "Wi-Fi"
        return Interface(name, speed, duplex, stats.mtu, wireless, tunnel, eee_in_ifconfig(told))
    directory = Path("/sys/class/net") / name
    wireless = any((directory / mark).exists() for mark in ("wireless", "phy80211"))
    tunnel = tunnel or (directory / "tun_flags").exists()
    # Drivers without a speed say -1, which the kernel shows as the largest number.
    speed = stats.speed if 0 < stats.speed < 1_000_000 else 0
    eee = eee_in_ethtool(said("ethtool", "--show-eee", name))
    return Interface(name, speed, duplex, stats.mtu, wireless, tunnel, eee)


def firewalls(system: System) -> list[Firewall]:
    """The firewalls of this machine, as far as they can be asked without root."""
    if system.is_macos:
        told = said("/usr/libexec/ApplicationFirewall/socketfilterfw", "--getglobalstate")
        return [Firewall("macOS's firewall", on_in_socketfilterfw(told))]
    found: list[Firewall] = []
    try:
        found.append(Firewall("ufw", on_in_ufw(Path("/etc/ufw/ufw.conf").read_text())))
    except FileNotFoundError:
        pass
    except OSError:
        found.append(Firewall("ufw", None))
    for name in ("firewalld", "nftables"):
        state = said("systemctl", "is-active", name)
        if state in ("active", "inactive", "failed"):
            found.append(Firewall(name, state == "active"))
    return found


def said(*command: str) -> str:
    """What a tool prints; empty if there is none, or it fails to answer in time."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TOOL_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def path_mtu(found: Reached) -> int:
    """The largest packet that both ends agreed on, in bytes; 0 where that is not known."""
    return found.mss + _ETHERNET_HEADERS if found.mss else 0


def hardware_ports(listed: str) -> dict[str, str]:
    """Device -> kind (``Wi-Fi``, ``Ethernet``) in ``networksetup -listallhardwareports``."""
    return {device: kind.strip() for kind, device in _PORT.findall(listed)}


def speed_in_ifconfig(told: str) -> int:
    """Mb/s in what macOS's ``ifconfig`` says of an interface; 0 if it says none."""
    found = _MEDIA.search(told)
    return int(found[1]) * (1000 if found[2] else 1) if found else 0


def eee_in_ifconfig(told: str) -> Eee:
    """Whether Energy-Efficient Ethernet is in use, by macOS's ``ifconfig``."""
    if "energy-efficient-ethernet" in told:
        return "on"
    return "off" if _MEDIA.search(told) else "unknown"


def eee_in_ethtool(told: str) -> Eee:
    """Whether Energy-Efficient Ethernet is on, by ``ethtool --show-eee``."""
    found = re.search(r"EEE status:\s*(enabled|disabled|not supported)", told)
    if found is None:
        return "unknown"
    return "on" if found[1] == "enabled" else "off"


def on_in_ufw(config: str) -> bool:
    """Whether ``/etc/ufw/ufw.conf`` turns the firewall on."""
    return re.search(r"^\s*ENABLED=yes\s*$", config, re.MULTILINE | re.IGNORECASE) is not None


def on_in_socketfilterfw(told: str) -> bool | None:
    """Whether macOS's firewall is on, by ``socketfilterfw --getglobalstate``."""
    found = re.search(r"State = (\d)", told)
    return None if found is None else found[1] != "0"
