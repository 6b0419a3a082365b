"""The shared key of two paired machines, and the certificates they pinned.

How two machines come to share a key is not told here; this is the record both keep.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Final

KEY_BYTES: Final = 32
MAX_EPOCH: Final = (1 << 53) - 1


def length_prefixed(*parts: bytes) -> bytes:
    """The parts, each behind its length as 8 big-endian bytes: no two lists collide."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


@dataclass(frozen=True)
class Pairing:
    """A 32-byte secret and its epoch; a new epoch starts with each new key.

    Its ``repr`` and comparison failures never show the key.
    """

    key: bytes = field(repr=False)
    epoch: int

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"a pairing key has {KEY_BYTES} bytes, got {len(self.key)}")
        if not 0 <= self.epoch <= MAX_EPOCH:
            raise ValueError("the epoch is out of range")

    def authenticate(self, domain: bytes, *parts: bytes) -> bytes:
        """HMAC-SHA256 over the domain tag, the epoch and the parts, each length-prefixed."""
        mac = hmac.new(self.key, digestmod=hashlib.sha256)
        for part in (domain, self.epoch.to_bytes(8, "big"), *parts):
            mac.update(len(part).to_bytes(8, "big"))
            mac.update(part)
        return mac.digest()


@dataclass(frozen=True)
class PinnedCertificates:
    """SHA-256 of the two leaf certificates (DER) of a TLS connection, 32 bytes each."""

    decoder: bytes
    producer: bytes

    def __post_init__(self) -> None:
        if len(self.decoder) != 32 or len(self.producer) != 32:
            raise ValueError("a certificate fingerprint has 32 bytes")
