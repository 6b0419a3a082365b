"""The listening socket: opened once, by whoever lives longest, and what its address is.

With it goes what both processes that answer on it need: the certificate to show, and
descriptors for many clients.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
from pathlib import Path
from typing import Final

from mac_decoder.api import tls
from mac_decoder.api.door import MOST_CONNECTIONS
from mac_decoder.api.guard import LOOPBACK
from mac_decoder.config import DecoderConfig
from protocol.errors import ConfigError

_BACKLOG: Final = 512
_DESCRIPTORS: Final = 4096
"""How many this process would like to have. macOS gives 256 unless it is asked."""


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


def tls_of(config: DecoderConfig) -> tls.Tls | None:
    """What clients are shown, from its files as they are now; ``None`` without TLS.

    Raises ``ConfigError``: ``tls_unusable``, ``tls_key_exposed``, and what ``tls.own`` does.
    """
    if config.tls_cert:
        return tls.given(Path(config.tls_cert), Path(config.tls_key))
    if not config.uses_tls:
        return None
    return tls.own(config.state_path, (*sorted(LOOPBACK), *config.own_names))


def make_room() -> int:
    """Raise this process's limit of descriptors, where that is allowed; how many clients'
    connections it may then have open at once.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    # The other half is for files of caches, producers and models.
    return max(1, min(MOST_CONNECTIONS, soft // 2))


def url_of(listening: socket.socket, *, secured: bool = False) -> str:
    """The base URL under which this machine reaches the socket."""
    scheme = "https" if secured else "http"
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


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
