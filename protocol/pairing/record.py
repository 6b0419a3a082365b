"""The pairing file: what one machine keeps of a pairing, as one JSON object.

Two files come out of a pairing, one for each side, and hold the same key and epoch. The file
is a secret (mode 0600). Reading and writing files is the callers' business; here are bytes.

=================  ====================================================================
field              meaning
=================  ====================================================================
type               ``baton_pairing``
version            1
role               ``producer`` or ``decoder``: whose file this is
epoch              number of the pairing; larger than those of earlier ones
key                the shared 32 bytes, base64
certificate        this side's own X.509 certificate (DER), base64
private_key        its private key (PKCS #8 DER), base64
peer_certificate   the other side's certificate (DER), base64; only this one is accepted
=================  ====================================================================
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final, Literal

import msgspec

from protocol.errors import ConfigError
from protocol.messages import Bytes32, Epoch
from protocol.pairing import Pairing, PinnedCertificates

Role = Literal["producer", "decoder"]
Der = Annotated[bytes, msgspec.Meta(min_length=1, max_length=16384)]

MAX_RECORD_BYTES: Final = 128 * 1024


class PairingRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="baton_pairing"):
    """One side's part of a pairing. Its ``repr`` shows no secret."""

    version: Literal[1]
    role: Role
    epoch: Epoch
    key: Bytes32
    certificate: Der
    private_key: Der
    peer_certificate: Der

    def __repr__(self) -> str:
        return f"PairingRecord(role={self.role!r}, epoch={self.epoch})"

    @property
    def pairing(self) -> Pairing:
        """The key and epoch."""
        return Pairing(self.key, self.epoch)

    @property
    def fingerprints(self) -> PinnedCertificates:
        """SHA-256 of both certificates, by role."""
        own, peer = fingerprint(self.certificate), fingerprint(self.peer_certificate)
        if self.role == "decoder":
            return PinnedCertificates(decoder=own, producer=peer)
        return PinnedCertificates(decoder=peer, producer=own)


_decoder: Final = msgspec.json.Decoder(PairingRecord)


def fingerprint(certificate: bytes) -> bytes:
    """SHA-256 of a certificate in DER, 32 bytes."""
    return hashlib.sha256(certificate).digest()


def encode_record(record: PairingRecord) -> bytes:
    """The record as indented JSON with a final line feed."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def decode_record(raw: bytes, role: Role) -> PairingRecord:
    """The record in ``raw``, which must be the file of ``role``.

    Raises ConfigError ``pairing_unreadable``, ``pairing_of_other_side``.
    """
    if len(raw) > MAX_RECORD_BYTES:
        raise _unreadable(f"{len(raw)} bytes are too many")
    try:
        record = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unreadable("it is not the JSON object that it must be") from error
    if record.role != role:
        raise ConfigError(
            f"This pairing file belongs to the {record.role}; the {role} needs the other one.",
            reason="pairing_of_other_side",
            field="role",
            found=record.role,
            expected=role,
        )
    return record


def _unreadable(why: str) -> ConfigError:
    return ConfigError(
        f"The pairing file cannot be read: {why}.",
        reason="pairing_unreadable",
        field="pairing",
        hint="Make a new pairing and copy its two files again.",
    )
