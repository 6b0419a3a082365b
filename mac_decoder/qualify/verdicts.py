"""What was found of each producer, kept so that a restart need not ask again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from protocol.errors import ConfigError
from protocol.messages import Bytes32, Recipe
from trust.places import Kind, Place

MAX_FILE_BYTES: Final = 64 * 1024

_FILE: Final = Kind(
    called="record of a producer's qualification",
    field="qualified",
    exposed="qualified_exposed",
    unreadable="qualified_unreadable",
    hint="remove it; the producer is then qualified anew",
)

Figure = Annotated[float, msgspec.Meta(ge=0)]
MOST_PAST: Final = 30


class Past(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One comparison: when (seconds since 1970), and how far the rows were apart (`compare.py`)."""

    at: int
    fit: bool
    apart: float
    allowed: float
    where: str


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="baton_qualified"):
    """Whether a producer's rows were this decoder's own, but for rounding.

    It holds for ``identity`` (the digest of the decoder's), ``recipe`` and what computes
    ``here`` (names and releases) alone. Rates are those of the qualification; ``past`` has the
    latest comparison last, and ``turn`` is the number of the probe that is compared next.
    """

    version: Literal[1]
    identity: Bytes32
    recipe: Recipe
    here: str
    turn: Annotated[int, msgspec.Meta(ge=0)]
    past: Annotated[tuple[Past, ...], msgspec.Meta(min_length=1, max_length=MOST_PAST)]
    tokens_per_s: Figure
    link_bytes_per_s: Figure
    round_trip_ms: Figure

    @property
    def fit(self) -> bool:
        """What the latest comparison said."""
        return self.past[-1].fit

    @property
    def at(self) -> int:
        """When that was, in seconds since 1970."""
        return self.past[-1].at

    def holds_for(self, identity: bytes, here: str, recipe: Recipe) -> bool:
        """Whether it is about this model on both sides, computed like this."""
        return (self.identity, self.here, self.recipe) == (identity, here, recipe)


class Verdicts:
    """One file for each producer, named by its certificate's fingerprint."""

    def __init__(self, directory: Path) -> None:
        self._place = Place(directory / "qualified")

    def of(self, fingerprint: bytes) -> Verdict | None:
        """What is on record; ``None`` if nothing is, or it cannot be read.

        Raises ``ConfigError``: what ``Place.read`` raises of the directory.
        """
        try:
            raw = self._place.read(fingerprint.hex(), MAX_FILE_BYTES, _FILE)
            return None if raw is None else msgspec.json.decode(raw, type=Verdict)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        except ConfigError as error:
            if error.reason in (_FILE.exposed, _FILE.unreadable):
                return None
            raise

    def put(self, fingerprint: bytes, verdict: Verdict) -> None:
        """Keep a verdict. Raises ``ConfigError`` as ``Place.write``."""
        raw = msgspec.json.format(msgspec.json.encode(verdict), indent=2) + b"\n"
        self._place.write(fingerprint.hex(), raw)

    def forget(self, fingerprint: bytes) -> bool:
        """Have the producer qualified anew; ``False`` if nothing was on record."""
        return self._place.remove(fingerprint.hex())
