"""A checkpoint as one stream of bytes: the list of its files, then these files in its order.

The list, the manifest, is JSON as :mod:`protocol.canonical` has it, sorted by name. A digest of
it travels under a MAC, and it has a digest of every file: so nothing else has to be
authenticated, and whoever has received a part of the stream can tell whether it is good.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import msgspec

from protocol.errors import BatonError
from protocol.reasons import differs, refusal

PIECE_BYTES: Final = 1 << 20
"""Most bytes of the stream in one BINARY message."""
MAX_FILES: Final = 512
MAX_MANIFEST: Final = 1 << 18
MAX_STREAM: Final = 1 << 42
"""Most bytes of a whole stream: 4 TiB."""
MAX_WEIGHTS: Final = 1 << 40
"""Most bytes of one file of weights: 1 TiB."""
MAX_OTHER: Final = 1 << 27
"""Most bytes of any other file, which is read into memory as a whole: 128 MiB."""

_WEIGHTS: Final = ".safetensors"

FileName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"\A[A-Za-z0-9_][A-Za-z0-9._-]*\.(safetensors|json|jinja|txt|model|tiktoken)\Z",
        max_length=128,
    ),
]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a checkpoint; ``sha256`` in lower-case hexadecimal."""

    name: FileName
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_WEIGHTS)]
    sha256: Sha256


class Span(NamedTuple):
    """The rest of a file of the stream, from its byte ``start`` on."""

    file: ModelFile
    start: int


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint, sorted by name, and their list as it travels."""

    files: tuple[ModelFile, ...]
    raw: bytes

    @property
    def digest(self) -> bytes:
        """SHA-256 of the list, 32 bytes."""
        return hashlib.sha256(self.raw).digest()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole stream."""
        return len(self.raw) + sum(file.nbytes for file in self.files)

    def rest(self, offset: int) -> Iterator[Span]:
        """What of the files comes from byte ``offset`` of the stream on, behind the list."""
        begin = len(self.raw)
        for file in self.files:
            start = max(0, offset - begin)
            begin += file.nbytes
            if start < file.nbytes:
                yield Span(file, start)


def manifest_of(files: Iterable[ModelFile]) -> Manifest:
    """The list of these files. Raises PeerProtocolError ``model_manifest_invalid``."""
    listed = sorted(files, key=lambda file: file.name)
    return read_manifest(_encoder.encode(listed))


def read_manifest(raw: bytes) -> Manifest:
    """The list in ``raw``, which has its one encoding and keeps every limit.

    Raises PeerProtocolError ``model_manifest_invalid``. No error holds anything of the list.
    """
    if len(raw) > MAX_MANIFEST:
        raise differs("model_manifest_invalid", "length", len(raw), f"at most {MAX_MANIFEST}")
    try:
        files = _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _invalid("it is no list of files that may be sent", "form") from error
    if _encoder.encode(files) != raw:
        raise _invalid("it is not in its one encoding", "form")
    if not 1 <= len(files) <= MAX_FILES:
        raise differs("model_manifest_invalid", "files", len(files), f"1 to {MAX_FILES}")
    names = [file.name for file in files]
    if names != sorted(names):
        raise _invalid("its names are not sorted", "names")
    # Of two names that differ by case, some file systems make one file.
    if len({name.lower() for name in names}) != len(names):
        raise _invalid("a name occurs twice", "names")
    if any(f.nbytes > MAX_OTHER for f in files if not f.name.endswith(_WEIGHTS)):
        raise _invalid("a file that holds no weights is too large", "nbytes")
    found = Manifest(tuple(files), raw)
    if found.nbytes > MAX_STREAM:
        raise differs("model_manifest_invalid", "nbytes", found.nbytes, f"at most {MAX_STREAM}")
    return found


def _invalid(why: str, field: str) -> BatonError:
    return refusal("model_manifest_invalid", f"a model's list of files: {why}", field=field)


_decoder: Final = msgspec.json.Decoder(list[ModelFile])
_encoder: Final = msgspec.json.Encoder()
