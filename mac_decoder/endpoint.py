"""The listening socket: opened once, by whoever lives longest, and what its address is."""

from __future__ import annotations

import errno
import socket
from typing import Final

from mac_decoder.config import DecoderConfig
from protocol.errors import ConfigError

_BACKLOG: Final = 512


def listen(config: DecoderConfig) -> socket.socket:
    """The socket on which clients are answered; not inherited unless that is asked for.

    Raises ``ConfigError``: ``port_taken``, ``port_forbidden``, ``host_unknown``.
    """
    try:
        found = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, ValueError) as error:  # ValueError: what is not even a name
        raise _unknown(config) from error
    # A name with addresses of both kinds ("localhost") is listened to on the one that most
    # clients try first.
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    family, kind, number, _, address = found[0]
    opened = socket.socket(family, kind, number)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(_BACKLOG)
    except OSError as error:
        opened.close()
        raise _refused(config, error) from error
    return opened


def url_of(listening: socket.socket) -> str:
    """The base URL under which this machine reaches the socket."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _refused(config: DecoderConfig, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {config.port} on {config.host} is taken by another program",
            reason="port_taken",
            field="port",
            found=config.port,
            hint="stop that program, or choose another port with --port (0: any free one)",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(
            f"this user may not listen on port {config.port}",
            reason="port_forbidden",
            field="port",
            found=config.port,
            hint="choose a port above 1023 with --port",
        )
    return _unknown(config)


def _unknown(config: DecoderConfig) -> ConfigError:
    return ConfigError(
        f"this machine has no address {config.host}",
        reason="host_unknown",
        field="host",
        found=config.host,
        hint="give one of this machine's addresses with --host",
    )
