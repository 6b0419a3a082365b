"""TLS contexts of pairing records, as each side makes them."""

from __future__ import annotations

import ssl

from protocol.pairing.record import PairingRecord
from trust.tls import client_context, server_context


def producer_context(record: PairingRecord) -> ssl.SSLContext:
    """The server's context of a producer's record: its decoder is the only pin."""
    return server_context(record.certificate, record.private_key, [record.peer_certificate])


def decoder_context(record: PairingRecord) -> ssl.SSLContext:
    """The client's context of a decoder's record."""
    return client_context(record.certificate, record.private_key)
