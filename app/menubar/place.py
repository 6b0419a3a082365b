"""Where the decoder is, and what it takes to be let in: what the settings say at this moment.

Read again whenever a connection is made, so that another port in ``config.toml`` is followed.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from app import settings
from app.service_arguments import value_of
from app.status import DEFAULT_PORT, DEFAULT_URL, base_url, first_key
from mac_decoder.api import tls
from mac_decoder.config import DecoderConfig
from protocol.addresses import is_loopback
from protocol.errors import ConfigError
from trust import plain_file

_MOST_CERTIFICATES: Final = 1 << 20
"""Bytes of a file of them."""


@dataclass(frozen=True)
class Place:
    """``url`` is the decoder's base URL; ``certificate`` the file of the one it has to show,
    ``None`` where authorities vouch for it, and without TLS.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    certificate: Path | None = None

    @property
    def stream(self) -> str:
        """Where its status is followed."""
        return "ws" + self.url.removeprefix("http") + "/status/stream"

    def context(self) -> ssl.SSLContext | None:
        """What it has to prove; ``None`` without TLS.

        Raises ``ConfigError``: ``certificate_missing`` (a decoder makes its own at its first
        start), ``certificate_unusable``.
        """
        if not self.url.startswith("https://"):
            return None
        if self.certificate is None:
            return ssl.create_default_context()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # The very certificate is meant: its name may be another than this machine's address.
        context.check_hostname = False
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_verify_locations(cadata=_leaf(self.certificate))
        except (OSError, ValueError) as error:
            missing = isinstance(error, FileNotFoundError)
            raise ConfigError(
                f"{self.certificate} is no certificate that can be trusted",
                reason="certificate_missing" if missing else "certificate_unusable",
                field="certificate",
                found=type(error).__name__,
                hint="`baton serve` makes it when it starts; tls-cert in [serve] names another",
            ) from error
        return context


@dataclass(frozen=True)
class Given:
    """What the command line says, and the arguments of the decoder's service if there is one."""

    url: str | None = None
    api_keys_file: Path | None = None
    service: Sequence[str] = ()

    def place(self) -> Place:
        """Where the decoder is now.

        Raises ``ConfigError``: what ``settings.decoders_url`` and ``first_key`` do, and
        ``address_invalid``; of settings that are not used here, nothing.
        """
        keys = self.keys_file()
        key = None if keys is None else _sendable(first_key(keys), keys)
        url = base_url(self.url or _url(self.service) or settings.decoders_url() or DEFAULT_URL)
        return Place(url, key, self._own_certificate() if self._shows_its_own(url) else None)

    def state_dir(self) -> str:
        """The decoder's ``--state-dir``; empty where it has none."""
        return self.option("state-dir")

    def keys_file(self) -> Path | None:
        """Where an API key of the decoder's lies, if that is known."""
        if self.url is not None:
            # The settings' are this machine's decoder's, and no other is shown them.
            return self.api_keys_file
        return self.api_keys_file or _path(self.option("api-keys-file"))

    def option(self, name: str) -> str:
        """What the decoder was given for an option; empty if nothing. Raises ``ConfigError``."""
        # A service keeps the options with which it was installed, whatever the file says since.
        if self.service:
            return value_of(f"--{name}", self.service)
        return settings.named("serve", name) or ""

    def _shows_its_own(self, url: str) -> bool:
        """Whether this machine's decoder is at ``url``, and shows a certificate there."""
        parts = urlsplit(url)
        return parts.scheme == "https" and (self.url is None or is_loopback(parts.hostname or ""))

    def _own_certificate(self) -> Path:
        named = _path(self.option("tls-cert"))
        config = DecoderConfig(model="", state_dir=self.state_dir())
        return named or tls.shown(config.state_path)


def _leaf(file: Path) -> bytes:
    """The certificate that a decoder with this file shows, DER: the first one.

    An authority that stands behind it in the file has certified others, too, and without their
    names any of those would be believed. Raises ``OSError``, ``ValueError``.
    """
    content = plain_file.read(file, _MOST_CERTIFICATES).content
    return x509.load_pem_x509_certificate(content).public_bytes(Encoding.DER)


def settings_now() -> bytes:
    """The settings as they are written; empty where there are none that could be read."""
    try:
        return plain_file.read(settings.default_path(), settings.MAX_BYTES).content
    except (OSError, ValueError):
        return b""


def has_model() -> bool:
    """Whether the settings say which model `baton serve` serves. Raises as ``settings.named``."""
    return bool(settings.named("serve", "model"))


def _sendable(key: str, file: Path) -> str:
    """The key, if a header can hold it."""
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"there is no API key in {file}", reason="api_keys_invalid", field="api-keys-file"
        )
    return key


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _url(service: Sequence[str]) -> str | None:
    """Where a service with these arguments listens; ``None`` if there is none."""
    if not service:
        return None
    host, port = value_of("--host", service) or "127.0.0.1", value_of("--port", service)
    return settings.url_of(
        host, port or str(DEFAULT_PORT), tls=bool(value_of("--tls-cert", service))
    )
