"""Names of blocks and cuts: what a cache is looked up by.

A *block* is 256 consecutive tokens. Its name binds the namespace (identity, store key, salt)
and every token up to its end, so that a wrong identity, another prefix or another position
cannot find it. Names only lead to candidates: tokens are compared one by one before rows are
served.

A namespace is a secret of its decoder: whoever has it can test guesses of prompts against
names. All hashing is SHA-256 over parts of fixed or prefixed length.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protocol.pairing import length_prefixed

BLOCK: Final = 256
"""Tokens of a block."""

NAME_BYTES: Final = 32

_NAMESPACE: Final = b"baton namespace 1"
_CUT: Final = b"baton cut 1"
_BLOCK: Final = b"baton block 1"
_FIRST: Final = bytes(NAME_BYTES)
"""Stands for the parent of block 0."""


def namespace(store_key: bytes, identity_digest: bytes, salt: bytes = b"") -> bytes:
    """HMAC-SHA256 of an identity under a decoder's 32-byte store key, 32 bytes.

    ``salt`` separates API keys that do not share. Raises ``ValueError`` for another length of
    key or digest.
    """
    _require("store key", store_key)
    _require("identity digest", identity_digest)
    message = length_prefixed(_NAMESPACE, identity_digest, salt)
    return hmac.new(store_key, message, hashlib.sha256).digest()


def chain(space: bytes, tokens: ArrayLike) -> list[bytes]:
    """The names of all whole blocks of ``tokens``, in order; a ragged tail has none.

    ``h[i] = SHA-256("baton block 1" | space | h[i-1] | tokens of block i)``, tokens as uint32
    little endian, ``h[-1]`` 32 zero bytes. Raises ``ValueError`` for what is no token.
    """
    _require("namespace", space)
    raw = as_tokens(tokens).view(np.uint8).data
    seeded = hashlib.sha256(_BLOCK + space)
    names: list[bytes] = []
    parent = _FIRST
    width = 4 * BLOCK
    for start in range(0, len(raw) - width + 1, width):
        block = seeded.copy()
        block.update(parent)
        block.update(raw[start : start + width])
        parent = block.digest()
        names.append(parent)
    return names


def cut_digest(space: bytes, parent: bytes, tail: ArrayLike, position: int) -> bytes:
    """The name of the cut at ``position``, 32 bytes.

    ``parent`` is the name of its last whole block (empty without one), ``tail`` the tokens
    after that. Raises ``ValueError`` where they do not make up ``position``.
    """
    _require("namespace", space)
    ending = as_tokens(tail)
    whole, ragged = divmod(position, BLOCK)
    if position < 0 or len(ending) != ragged or len(parent) != (NAME_BYTES if whole else 0):
        raise ValueError(f"{len(parent)} bytes and {len(ending)} tokens are no cut at {position}")
    at = position.to_bytes(8, "big")
    parts = length_prefixed(_CUT, space, parent, at, ending.tobytes())
    return hashlib.sha256(parts).digest()


def as_tokens(tokens: ArrayLike) -> NDArray[np.uint32]:
    """``tokens`` as contiguous uint32 little endian; the same array where it is that already.

    Raises ``ValueError`` for a token outside of 32 bits, other numbers than integers, or more
    than one dimension.
    """
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"tokens are a list of integers, not {array.ndim}-d {array.dtype}")
    if array.dtype != np.dtype("<u4"):
        if array.dtype == np.uint64 and array.size and int(array.max()) >= 1 << 32:
            raise ValueError("a token is outside of 32 bits")
        wide = array.astype(np.int64)
        if wide.size and (int(wide.min()) < 0 or int(wide.max()) >= 1 << 32):
            raise ValueError("a token is outside of 32 bits")
        array = wide.astype("<u4")
    return np.ascontiguousarray(array)


def _require(what: str, value: bytes) -> None:
    if len(value) != NAME_BYTES:
        raise ValueError(f"a {what} has {NAME_BYTES} bytes, not {len(value)}")
