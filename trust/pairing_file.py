"""A pairing file that the user named, wherever it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from protocol.errors import ConfigError
from protocol.pairing.record import MAX_RECORD_BYTES, PairingRecord, Role, decode_record
from trust.places import Kind, read_named

_FILE: Final = Kind(
    called="pairing file",
    field="pairing",
    exposed="pairing_exposed",
    unreadable="pairing_unreadable",
    hint="Make a new pairing and copy its two files again.",
)


def load_record(path: Path, role: Role) -> PairingRecord:
    """The record in the file at ``path``, which must be the one of ``role``.

    Raises ``ConfigError``: ``pairing_missing``, ``pairing_exposed`` (others have access),
    ``pairing_unreadable``, ``pairing_of_other_side``.
    """
    try:
        raw = read_named(path, MAX_RECORD_BYTES, _FILE)
    except OSError as error:
        raise ConfigError(
            f"The pairing file {path} cannot be opened: {error.strerror}.",
            reason="pairing_missing",
            field="pairing",
            hint="Make one on the producer: baton produce --make-pairing DIR",
        ) from error
    return decode_record(raw, role)
