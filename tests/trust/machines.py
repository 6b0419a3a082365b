"""Records, peers and TLS meetings of made-up machines."""

from __future__ import annotations

import datetime
import functools
import secrets
import socket
import ssl
import threading
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_der_private_key,
)
from cryptography.x509.oid import NameOID

from protocol.pairing.certificates import OwnCertificate, make_certificate
from protocol.pairing.record import PairingRecord
from trust.peers import Address, Peer

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@functools.cache
def certificate(number: int) -> OwnCertificate:
    """A decoder's certificate; the same for the same number."""
    return make_certificate("decoder", NOW)


@functools.cache
def own() -> OwnCertificate:
    """The producer's certificate."""
    return make_certificate("producer", NOW)


def peer(number: int = 0, name: str = "mac", epoch: int = 1, key: bytes | None = None) -> Peer:
    """A decoder as its producer knows it."""
    record = PairingRecord(
        1,
        "producer",
        epoch,
        key or secrets.token_bytes(32),
        own().certificate,
        own().private_key,
        certificate(number).certificate,
    )
    return Peer(name, record, 1_700_000_000, Address("gb10.local", 7431))


def old_style(name: str, issuer: OwnCertificate | None = None) -> OwnCertificate:
    """A leaf as earlier pairings had them, which may issue others; or one that was issued."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuing, signer = subject, key
    if issuer is not None:
        issuing = x509.load_der_x509_certificate(issuer.certificate).subject
        loaded = load_der_private_key(issuer.private_key, None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        signer = loaded
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuing)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
    if issuer is None:
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    leaf = made.sign(signer, hashes.SHA256()).public_bytes(Encoding.DER)
    return OwnCertificate(
        leaf, key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    )


@dataclass
class Meeting:
    """What each side of a TLS connection was shown; ``None`` where it failed."""

    to_server: bytes | None = None
    to_client: bytes | None = None
    version: str | None = None
    session: ssl.SSLSession | None = None


def meet(server: ssl.SSLContext, client: ssl.SSLContext) -> Meeting:
    """Shake hands over a pair of sockets, and pass one byte each way."""
    meeting = Meeting()
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(10.0)

    def serve() -> None:
        try:
            with server.wrap_socket(ours, server_side=True) as wrapped:
                wrapped.sendall(wrapped.recv(1))
                meeting.to_server = wrapped.getpeercert(binary_form=True)
        except (ssl.SSLError, ConnectionError):
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(theirs) as wrapped:
            wrapped.sendall(b"x")
            if wrapped.recv(1) == b"x":
                meeting.to_client = wrapped.getpeercert(binary_form=True)
                meeting.version = wrapped.version()
                meeting.session = wrapped.session
    except (ssl.SSLError, ConnectionError):
        theirs.close()
    thread.join()
    return meeting
