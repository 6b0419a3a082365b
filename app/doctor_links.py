"""What `baton doctor` says about the way to each producer: pure functions of facts."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from app.doctor_facts import LINK_PORT, PAIRING_PORT, Model, Running, System
from app.doctor_findings import Finding
from app.doctor_network import NO_ADDRESS, Firewall, Interface, Reached, path_mtu
from protocol.control.messages import Description
from protocol.errors import BatonError
from protocol.identity import identity_differences

MACOS_EHOSTUNREACH: Final = 65
"""macOS says "no route to host" where it denies a program the local network."""

PERMISSION: Final = (
    "allow it in System Settings, Privacy & Security, Local Network. A Python that launchd started "
    "is not asked: run `baton serve` in Terminal, which has the permission, and remove the service "
    "(baton serve --uninstall)"
)

SLOW_MBPS: Final = 1000
GOOD_MBPS: Final = 10_000
"""What a GB10 and a Mac with the option have; a long prompt's cache is gigabytes."""

SLOW_ROUND_TRIP_MS: Final = 5.0
_PLAIN_MTU: Final = 1500
_TIMESTAMPS: Final = 12
"""Bytes of TCP's usual option, which some systems leave out of the segment that they tell."""


def interface(found: Interface, subject: str) -> Iterator[Finding]:
    """Whether a cable is a good one: kind, speed, duplex, packets, sleep."""
    name = found.name
    if found.tunnel:
        yield Finding(
            subject,
            "remark",
            f"{name} is a tunnel (VPN)",
            "give the producer's address in the local network",
        )
        return
    if found.wireless:
        yield Finding(
            subject,
            "remark",
            f"{name} is Wi-Fi: slower than a cable, and unsteady",
            "connect both machines with a cable, and use its address",
        )
        return
    yield _speed(found, subject)
    if found.mtu < _PLAIN_MTU:
        yield Finding(
            f"{subject}, MTU",
            "remark",
            f"{name} sends packets of at most {found.mtu} bytes",
            f"set 1500, or 9000 on both machines and the switch: ip link set {name} mtu 1500; "
            "on macOS System Settings, Network, Hardware",
        )
    if found.eee == "on":
        yield Finding(
            f"{subject}, EEE",
            "remark",
            f"Energy-Efficient Ethernet is on at {name}: some ports wake late or lose packets",
            f"sudo ethtool --set-eee {name} eee off; on macOS System Settings, Network, Hardware, "
            "Manually, a duplex without energy-efficient-ethernet",
        )
    elif found.eee == "unknown" and found.speed_mbps:  # without a speed it is no Ethernet port
        yield Finding(
            f"{subject}, EEE",
            "remark",
            f"whether Energy-Efficient Ethernet is on at {name} could not be read",
            f"look with: ethtool --show-eee {name} (package ethtool)",
        )


def _speed(found: Interface, subject: str) -> Finding:
    name, speed = found.name, found.speed_mbps
    if found.duplex == "half":
        return Finding(
            subject,
            "wrong",
            f"{name} runs at half duplex",
            "set both ends to autoselect; try another cable and another port",
        )
    if not speed:
        return Finding(
            subject,
            "remark",
            f"{name}, MTU {found.mtu}; the system tells no speed",
            "`baton status` shows what handoffs reach",
        )
    text = f"{name}, {speed / 1000:g} Gb/s, MTU {found.mtu}"
    if speed < SLOW_MBPS:
        return Finding(
            subject,
            "wrong",
            f"{text}: too slow to be meant",
            "try another cable (all eight wires), port or switch",
        )
    if speed < GOOD_MBPS:
        return Finding(
            subject,
            "remark",
            f"{text}: a prompt's cache takes {GOOD_MBPS / speed:g} times as long as over 10 Gb/s",
            "connect ports of 10 Gb/s where both machines have them",
        )
    return Finding(subject, "ok", text)


def firewall(found: Sequence[Firewall], produces: bool) -> Finding:
    """Whether a firewall may keep decoders out. Only a producer is called."""
    on = [one.name for one in found if one.on]
    unknown = [one.name for one in found if one.on is None]
    if on and produces:
        return Finding(
            "firewall",
            "remark",
            f"{', '.join(on)} is on, which may keep decoders out",
            f"let TCP {LINK_PORT} and {PAIRING_PORT} in, as with: "
            f"sudo ufw allow {LINK_PORT}:{PAIRING_PORT}/tcp",
        )
    if unknown:
        return Finding(
            "firewall",
            "remark",
            f"the state of {', '.join(unknown)} cannot be read",
            "look as root: ufw status, nft list ruleset",
        )
    if on:
        return Finding("firewall", "ok", f"{', '.join(on)} is on; a decoder only calls")
    looked = ", ".join(one.name for one in found) or "ufw, firewalld, nftables"
    return Finding("firewall", "ok", f"none seen (looked for {looked})")


def producer(
    found: Reached,
    system: System,
    running: Running,
    model: Model | None,
    version: str,
) -> Iterator[Finding]:
    """Everything about one producer, from the cable to what it serves."""
    subject = f"producer {found.target.name}"
    place = f"{found.target.host}:{found.target.port}"
    link = next((one for one in running.links if one.get("name") == found.target.url), None)
    yield reached(found, system, subject, place)
    if found.failed:
        if link is not None:
            yield linked(link, subject, system, reachable=False)
        return
    if found.interface is not None:
        yield from interface(found.interface, f"way to {found.target.name}")
        yield from packets(found, found.interface)
    yield certificate(found, subject)
    if found.answer is not None:
        yield from described(found.answer, subject, model, version)
    if link is not None:
        yield linked(link, subject, system, reachable=True)


def reached(found: Reached, system: System, subject: str, place: str) -> Finding:
    """Whether TCP reaches it, and how quickly."""
    number = found.failed
    if not number:
        text = f"{place} answers in {found.connect_ms:.1f} ms"
        if found.connect_ms > SLOW_ROUND_TRIP_MS:
            return Finding(
                subject,
                "remark",
                f"{text}: long for a cable",
                "look whether Wi-Fi, a VPN or a busy switch is in between",
            )
        return Finding(subject, "ok", text)
    if system.is_macos and number == MACOS_EHOSTUNREACH:
        return Finding(
            subject,
            "wrong",
            f"{place}: no route (errno 65), which macOS also says where it denies a program the "
            "local network",
            f"if other programs reach it: {PERMISSION}",
        )
    text, what = _FAILURES.get(number, ("cannot be reached", "check cable, address and firewall"))
    told = f" ({errno.errorcode[number]})" if number in errno.errorcode else ""
    return Finding(subject, "wrong", f"{place}: {text}{told}", what)


_FAILURES: Final[Mapping[int, tuple[str, str]]] = {
    NO_ADDRESS: ("the name has no address", "give its number, or see `baton node discover`"),
    errno.ECONNREFUSED: ("nobody listens", "start `baton produce` there; check the port"),
    errno.ETIMEDOUT: (
        "no answer",
        f"switch it on; check the address; let TCP {LINK_PORT} through its firewall",
    ),
    errno.EHOSTUNREACH: ("no route", "check the cable, and that both are in one network"),
    errno.ENETUNREACH: ("no network", "check the cable, and that this machine has an address"),
}


def packets(found: Reached, through: Interface) -> Iterator[Finding]:
    """Whether the other end, or what is between, takes smaller packets than this one."""
    agreed = path_mtu(found)
    if agreed and agreed + _TIMESTAMPS < through.mtu and through.mtu > _PLAIN_MTU:
        yield Finding(
            f"way to {found.target.name}, MTU",
            "remark",
            f"{through.mtu} bytes here, about {agreed} there",
            "set the same MTU on both machines and the switch",
        )


def certificate(found: Reached, subject: str) -> Finding:
    """Whether it shows the certificate that was pinned."""
    if found.shown is None:
        return Finding(
            subject,
            "wrong",
            f"TLS failed: {found.tls_error}",
            "check the port: what listens there is no producer that is paired",
        )
    shown = found.shown.hex()
    if found.pinned is None:
        return Finding(
            subject,
            "remark",
            f"its certificate is {shown[:16]}…; this machine is not paired with it",
            "pair them: baton produce --pair there, baton node add here",
        )
    if found.shown != found.pinned:
        return Finding(
            subject,
            "wrong",
            f"it shows certificate {shown[:16]}…, and {found.pinned.hex()[:16]}… is pinned",
            "check the address and what is in between; if it was set up anew, pair again",
        )
    return Finding(subject, "ok", f"it shows the pinned certificate {shown[:16]}…")


def described(
    answer: Description | BatonError, subject: str, model: Model | None, version: str
) -> Iterator[Finding]:
    """What it says of itself: release, model, state; or why it does not."""
    if isinstance(answer, BatonError):
        hint = answer.hint or answer.reason
        yield Finding(subject, "wrong", f"it refuses: {answer.message}", hint)
        return
    how = "" if answer.recipe is None else f", {answer.recipe.device}, {answer.recipe.dtype}"
    waits = answer.state == "waiting"
    model_name = (not waits and answer.model) or "no model"
    text = f"{answer.name} serves {model_name}{how}; baton {answer.version}"
    if answer.version != version:
        yield Finding(
            subject, "remark", f"{text}, here it is {version}", "install the same release on both"
        )
    elif waits:
        failed = f"; it could not load {answer.model}, see its log" if answer.model else ""
        yield Finding(
            subject,
            "remark",
            f"{text}; it waits for one{failed}",
            "send it the decoder's model: baton node send",
        )
    elif answer.state != "ready":
        yield Finding(subject, "remark", f"{text}; it is {answer.state}", "look again in a minute")
    else:
        yield Finding(subject, "ok", text)
    if answer.identity is not None and model is not None and not isinstance(model, BatonError):
        if differing := identity_differences(model.identity, answer.identity):
            yield Finding(
                subject,
                "wrong",
                f"its model is another one than the given: {', '.join(differing)} differ",
                "send it the decoder's model (baton node send); started with --model, it serves "
                "that alone",
            )
        else:
            yield Finding(subject, "ok", "its model is the given one")


def linked(link: Mapping[str, Any], subject: str, system: System, *, reachable: bool) -> Finding:
    """What the running decoder says of its link, and of the producer's qualification."""
    state, reason = str(link.get("state")), str(link.get("reason") or "")
    detail = str(link.get("detail") or reason)
    if state == "ready":
        trip = link.get("round_trip_ms")
        text = f"the decoder uses it; round trip {trip} ms" if trip else "the decoder uses it"
        return Finding(subject, "ok", text)
    if state in ("connecting", "qualifying"):
        return Finding(
            subject, "remark", f"the decoder does not use it yet: {detail}", "wait a minute"
        )
    if state == "unfit":
        return Finding(
            subject,
            "wrong",
            f"the decoder does not use it: {detail}",
            "see what is wrong above; then measure again with `baton node qualify`",
        )
    if state == "down" and reachable and system.is_macos:
        return Finding(
            subject,
            "wrong",
            f"reached from here, but not by the decoder ({detail}): macOS may deny it the local "
            "network",
            PERMISSION,
        )
    return Finding(
        subject,
        "wrong",
        f"the decoder says {state}: {detail}",
        "see the producer's log; `baton status` shows when it is tried again",
    )
