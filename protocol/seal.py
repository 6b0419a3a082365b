"""The seal: what a producer authenticates, and how a decoder answers.

Nothing of a handoff may be installed before :func:`verify_seal` returned.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final

from protocol.messages import Committed, Seal
from protocol.pairing import Pairing
from protocol.reasons import differs, refusal

SEAL_DOMAIN: Final = b"baton seal 1"
COMMIT_DOMAIN: Final = b"baton committed 1"
_FIGURES: Final = struct.Struct(">QQQQ")


class StreamDigest:
    """SHA-256 over all frame digests of a handoff in order, kept as they come."""

    def __init__(self) -> None:
        self._state = hashlib.sha256(b"")
        self.frames = 0
        self.payload_bytes = 0

    def add(self, frame_digest: bytes, nbytes: int) -> None:
        """Take in the next frame: its 32-byte digest and its payload's size in bytes."""
        self._state.update(frame_digest)
        self.frames += 1
        self.payload_bytes += nbytes

    def digest(self) -> bytes:
        """The digest so far, 32 bytes."""
        return self._state.digest()


def seal_mac(pairing: Pairing, prefill: bytes, begin: bytes, seal: Seal) -> bytes:
    """HMAC over domain, epoch, the raw PREFILL, the raw BEGIN, the stream digest, figures.

    The figures are SEAL's frames, payload bytes, queue and compute time, as four 64-bit
    big-endian numbers. ``transfer`` is part of BEGIN. All parts are length-prefixed.
    """
    figures = _FIGURES.pack(seal.frames, seal.payload_bytes, seal.queue_us, seal.compute_us)
    return pairing.authenticate(SEAL_DOMAIN, prefill, begin, seal.digest, figures)


def make_seal(
    pairing: Pairing,
    prefill: bytes,
    begin: bytes,
    transfer: bytes,
    stream: StreamDigest,
    *,
    queue_us: int,
    compute_us: int,
) -> Seal:
    """The SEAL of a stream whose frames were all sent."""
    unsigned = Seal(
        transfer=transfer,
        frames=stream.frames,
        payload_bytes=stream.payload_bytes,
        queue_us=queue_us,
        compute_us=compute_us,
        digest=stream.digest(),
        mac=bytes(32),
    )
    return Seal(
        transfer=transfer,
        frames=unsigned.frames,
        payload_bytes=unsigned.payload_bytes,
        queue_us=queue_us,
        compute_us=compute_us,
        digest=unsigned.digest,
        mac=seal_mac(pairing, prefill, begin, unsigned),
    )


def require_complete(seal: Seal, transfer: bytes, frames: int, payload_bytes: int) -> None:
    """Return only if SEAL ends this transfer after as many frames as the manifest said.

    Raises PeerProtocolError ``transfer_differs``, ``frames_differ``, ``bytes_differ``.
    """
    if seal.transfer != transfer:
        raise differs("transfer_differs", "transfer", seal.transfer, transfer)
    if seal.frames != frames:
        raise differs("frames_differ", "frames", seal.frames, frames)
    if seal.payload_bytes != payload_bytes:
        raise differs("bytes_differ", "payload_bytes", seal.payload_bytes, payload_bytes)


def verify_seal(
    pairing: Pairing, prefill: bytes, begin: bytes, stream: StreamDigest, seal: Seal
) -> None:
    """Return only if the seal authenticates this request, manifest and stream.

    ``prefill`` and ``begin`` are the bytes as they went over the wire.

    Raises IntegrityError: ``stream_digest_differs``, ``seal_differs``.
    """
    if not hmac.compare_digest(seal.digest, stream.digest()):
        raise differs("stream_digest_differs", "digest", seal.digest, stream.digest())
    if not hmac.compare_digest(seal.mac, seal_mac(pairing, prefill, begin, seal)):
        raise refusal("seal_differs", "the seal does not authenticate this handoff", field="mac")


def make_committed(pairing: Pairing, seal: Seal) -> Committed:
    """The decoder's answer to a seal after the install."""
    mac = pairing.authenticate(COMMIT_DOMAIN, seal.transfer, seal.mac)
    return Committed(transfer=seal.transfer, mac=mac)


def verify_committed(pairing: Pairing, seal: Seal, committed: Committed) -> None:
    """Return only if COMMITTED answers this seal.

    Raises PeerProtocolError ``transfer_differs``, IntegrityError ``commit_differs``.
    """
    if committed.transfer != seal.transfer:
        raise differs("transfer_differs", "transfer", committed.transfer, seal.transfer)
    if not hmac.compare_digest(committed.mac, make_committed(pairing, seal).mac):
        raise refusal("commit_differs", "COMMITTED does not answer this seal", field="mac")
