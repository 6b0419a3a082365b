"""Safetensors files, as the store writes them: one header for given contents, and no other.

Format (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, a
JSON header padded with blanks to a multiple of 8, then the tensors' bytes without holes. The
store writes tensors in the order of their offsets, the metadata first, and JSON without
blanks, so that a header can be predicted and compared byte by byte.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from protocol.errors import IntegrityError

MAX_HEADER: Final = 8 << 20
"""Longest header that is read, in bytes."""

LENGTH: Final = struct.Struct("<Q")
_ITEMSIZE: Final = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4, "U32": 4}
_CODES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_METADATA: Final = "__metadata__"


class Tensor(NamedTuple):
    """One array: name, safetensors' element code, shape."""

    name: str
    code: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return _ITEMSIZE[self.code] * math.prod(self.shape)


class Header(NamedTuple):
    """A parsed header. ``nbytes`` counts the length field too: the tensors start there."""

    nbytes: int
    metadata: dict[str, str]
    tensors: tuple[Tensor, ...]

    @property
    def file_nbytes(self) -> int:
        """Size of the whole file."""
        return self.nbytes + sum(tensor.nbytes for tensor in self.tensors)

    def offset(self, name: str) -> int:
        """Where the tensor ``name`` starts in the file. Raises ``KeyError``."""
        at = self.nbytes
        for tensor in self.tensors:
            if tensor.name == name:
                return at
            at += tensor.nbytes
        raise KeyError(name)


def element_code(dtype: str) -> str:
    """Safetensors' name of a layout's element type."""
    return _CODES[dtype]


def encode(metadata: Mapping[str, str], tensors: Sequence[Tensor]) -> bytes:
    """Length field and header of a file with these tensors, in this order."""
    content: dict[str, Any] = {_METADATA: dict(metadata)}
    at = 0
    for tensor in tensors:
        content[tensor.name] = {
            "dtype": tensor.code,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    text += b" " * (-len(text) % 8)
    return LENGTH.pack(len(text)) + text


def header_length(raw: bytes | memoryview) -> int:
    """Bytes of length field and header together, from a file's first 8 bytes.

    Raises ``IntegrityError`` (``file_malformed``).
    """
    if len(raw) < LENGTH.size:
        raise malformed("shorter than a header")
    (length,) = LENGTH.unpack_from(raw)
    if length > MAX_HEADER:
        raise malformed("header too long")
    return LENGTH.size + length


def peek(raw: bytes | memoryview) -> dict[str, str]:
    """The metadata in ``raw``, whatever else a later version wrote; empty if there is none.

    ``raw`` is length field and header exactly.
    """
    try:
        metadata = json.loads(bytes(raw[LENGTH.size :]))[_METADATA]
        return {str(name): str(value) for name, value in metadata.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def parse(raw: bytes | memoryview) -> Header:
    """The header in ``raw``, which is length field and header exactly.

    Raises ``IntegrityError`` (``file_malformed``) for anything :func:`encode` does not write.
    """
    try:
        content = json.loads(bytes(raw[LENGTH.size :]).decode("ascii"))
        metadata = content.pop(_METADATA)
        tensors = tuple(
            Tensor(name, entry["dtype"], tuple(entry["shape"])) for name, entry in content.items()
        )
        if not all(isinstance(value, str) for value in metadata.values()):
            raise malformed("metadata")
        if not all(_is_size(extent) for tensor in tensors for extent in tensor.shape):
            raise malformed("shape")
        # Offsets, order and padding follow from the rest: only one spelling is ours.
        if encode(metadata, tensors) != bytes(raw):
            raise malformed("header")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise malformed("header") from error
    return Header(len(raw), metadata, tensors)


def _is_size(extent: object) -> bool:
    return type(extent) is int and 0 <= extent < 1 << 48


def malformed(what: str) -> IntegrityError:
    """The error for a file that does not have the store's form."""
    return IntegrityError(
        f"a file does not have the store's form: {what}", reason="file_malformed", found=what
    )
