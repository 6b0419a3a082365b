"""What both sides compute out of a code: SPAKE2, the transcript, the keys under both.

SPAKE2 turns a code that both know into a secret that nobody else can compute or search for,
but does not say whether they knew the same code. The proofs say it: each is a MAC under a key
that depends on the secret, on every byte of both first messages, and on both certificates as
TLS showed them to its sender. The keys have labels of their own, so that no proof is another
side's, and none of them tells anything of the pairing key.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from spake2 import SPAKE2_A, SPAKE2_B, SPAKEError
from spake2.ed25519_basic import NotOnCurve, bytes_to_unknown_group_element

from protocol.pairing import KEY_BYTES, PinnedCertificates, length_prefixed
from protocol.pairing.code import Code, Entropy
from protocol.pairing.record import Role
from protocol.reasons import refusal

ID_DECODER: Final = b"baton decoder 1"
ID_PRODUCER: Final = b"baton producer 1"
TRANSCRIPT_DOMAIN: Final = b"baton pairing 1"
_SIDES: Final = {"decoder": SPAKE2_A, "producer": SPAKE2_B}


class Guess:
    """One try of a code by one side: its SPAKE2 message, then the shared secret, once."""

    def __init__(self, role: Role, code: Code, entropy: Entropy) -> None:
        self._spake = _SIDES[role](code.secret, idA=ID_DECODER, idB=ID_PRODUCER, entropy_f=entropy)
        self.element: bytes = self._spake.start()
        """This side's SPAKE2 message, 33 bytes."""

    def secret(self, element: bytes) -> bytes:
        """The 32 bytes that follow from the other side's message.

        Both sides have the same if both tried the same code. Raises PeerProtocolError
        ``element_malformed``: the same side's message, our own, or no point of the group in
        its one encoding.
        """
        try:
            # The library would take the neutral element where it is spelt in another way.
            if bytes_to_unknown_group_element(element[1:]).to_bytes() != element[1:]:
                raise ValueError("not the point's one encoding")
            return self._spake.finish(element)
        except (SPAKEError, NotOnCurve, ValueError) as error:
            text = "the other side's SPAKE2 message is none"
            raise refusal("element_malformed", text, field="element") from error


def transcript(hello: bytes, answer: bytes, certificates: PinnedCertificates) -> bytes:
    """SHA-256 over PAIR_HELLO and PAIR_ANSWER as they travelled, and both fingerprints."""
    parts = (hello, answer, certificates.decoder, certificates.producer)
    return hashlib.sha256(length_prefixed(TRANSCRIPT_DOMAIN, *parts)).digest()


@dataclass(frozen=True)
class Keys:
    """The keys of an exchange; no ``repr`` shows them."""

    transcript: bytes = field(repr=False)
    decoder: bytes = field(repr=False)
    producer: bytes = field(repr=False)
    pairing: bytes = field(repr=False)

    def proof(self, role: Role) -> bytes:
        """What ``role`` proves its knowledge with, 32 bytes."""
        key = self.decoder if role == "decoder" else self.producer
        return hmac.digest(key, self.transcript, "sha256")

    def verify(self, role: Role, mac: bytes) -> None:
        """Return only if ``role`` tried the same code over the same messages and certificates.

        Raises IntegrityError ``code_differs``.
        """
        if not hmac.compare_digest(mac, self.proof(role)):
            raise refusal(
                "code_differs",
                f"the {role} has another code, or somebody sits between the two machines",
                field="mac",
                hint="open a new code on the producer and type it again; if that fails too, "
                "check what sits between the machines",
            )


def derive(secret: bytes, over: bytes) -> Keys:
    """The keys of SPAKE2's secret over a transcript: HKDF-SHA256, the transcript as salt."""

    def key(label: bytes) -> bytes:
        return HKDF(hashes.SHA256(), KEY_BYTES, salt=over, info=label).derive(secret)

    return Keys(
        transcript=over,
        decoder=key(b"baton pairing decoder confirms 1"),
        producer=key(b"baton pairing producer confirms 1"),
        pairing=key(b"baton pairing key 1"),
    )
