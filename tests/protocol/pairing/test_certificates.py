"""Certificates: ten years, told apart, and what the standard library's TLS makes of them."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_der_private_key

from protocol.errors import PeerProtocolError
from protocol.pairing.certificates import (
    MAX_CERTIFICATE,
    OwnCertificate,
    make_certificate,
    require_certificate,
)

NOW = datetime.datetime(2026, 3, 1, 12, 30, tzinfo=datetime.UTC)


def test_a_certificate_lives_ten_years_from_the_day_before() -> None:
    made = x509.load_der_x509_certificate(make_certificate("decoder", NOW).certificate)
    assert made.not_valid_before_utc == NOW - datetime.timedelta(days=1)
    assert made.not_valid_after_utc.date() == datetime.date(2036, 2, 29)


def test_the_key_is_its_own_p256_key() -> None:
    own = make_certificate("producer", NOW)
    made = x509.load_der_x509_certificate(own.certificate)
    key = load_der_private_key(own.private_key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP256R1)
    assert key.public_key() == made.public_key()
    made.verify_directly_issued_by(made)


def test_no_two_are_alike_and_none_names_a_machine() -> None:
    one, other = (
        x509.load_der_x509_certificate(make_certificate("decoder", NOW).certificate)
        for _ in range(2)
    )
    assert one.subject != other.subject
    assert one.serial_number != other.serial_number
    (name,) = one.subject
    assert str(name.value).startswith("baton decoder ")


def test_nothing_shows_the_private_key() -> None:
    assert repr(make_certificate("decoder", NOW)) == "OwnCertificate()"


def context(own: OwnCertificate, peer: bytes, purpose: int, folder: Path) -> ssl.SSLContext:
    made = ssl.SSLContext(purpose)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    made.load_verify_locations(cadata=peer)
    pem = folder / f"{purpose}.pem"
    key = ssl.DER_cert_to_PEM_cert(own.private_key).replace("CERTIFICATE", "PRIVATE KEY")
    pem.write_text(ssl.DER_cert_to_PEM_cert(own.certificate) + key)
    made.load_cert_chain(pem)
    return made


def handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[bytes | None, bytes | None]:
    """What the client and the server saw of each other, over two pipes in memory."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(down, up)
    other = server.wrap_bio(up, down, server_side=True)
    done: set[ssl.SSLObject] = set()
    for _ in range(10):
        for side in (one, other):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                continue
    assert done == {one, other}
    return one.getpeercert(binary_form=True), other.getpeercert(binary_form=True)


def test_tls_takes_each_sides_certificate_as_the_only_one(tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    decoder, producer = make_certificate("decoder", now), make_certificate("producer", now)
    client = context(decoder, producer.certificate, ssl.PROTOCOL_TLS_CLIENT, tmp_path)
    server = context(producer, decoder.certificate, ssl.PROTOCOL_TLS_SERVER, tmp_path)
    assert handshake(client, server) == (producer.certificate, decoder.certificate)


def test_tls_refuses_another_certificate_of_the_same_kind(tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    decoder, producer, other = (make_certificate("decoder", now) for _ in range(3))
    client = context(decoder, producer.certificate, ssl.PROTOCOL_TLS_CLIENT, tmp_path)
    server = context(other, decoder.certificate, ssl.PROTOCOL_TLS_SERVER, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client, server)


def test_a_shown_certificate_is_taken() -> None:
    require_certificate(make_certificate("decoder", NOW).certificate)


@pytest.mark.parametrize(
    "shown",
    [
        b"",
        b"x",
        bytes(MAX_CERTIFICATE + 1),
        make_certificate("decoder", NOW).certificate[:-1],
        # Version 6 of X.509, which there is not.
        make_certificate("decoder", NOW).certificate.replace(b"\xa0\3\2\1\2", b"\xa0\3\2\1\5", 1),
    ],
    ids=["none", "no certificate", "too long", "cut off", "other version"],
)
def test_what_cannot_be_kept_is_refused(shown: bytes) -> None:
    with pytest.raises(PeerProtocolError) as caught:
        require_certificate(shown)
    assert caught.value.reason == "certificate_unusable"
