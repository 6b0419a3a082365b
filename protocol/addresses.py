"""What a host's name or number says before the network is asked. Pure."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether ``host`` names this machine and no other can reach it.

    IPv6 numbers may be in brackets. A name other than ``localhost`` is never believed.
    """
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def can_be_a_host(host: str) -> bool:
    """Whether ``host`` has the form of a name or number: resolvers crash on some that have not."""
    if not host or not host.isprintable() or any(character.isspace() for character in host):
        return False
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True
