"""Where files lie in the cache directory. Names are digests: they tell nothing about prompts."""

from __future__ import annotations

import re
from typing import Final

BLOCKS: Final = "blocks"
CUTS: Final = "cuts"
TEMP: Final = "temp"
QUARANTINE: Final = "quarantine"
FOLDERS: Final = (BLOCKS, CUTS, TEMP, QUARANTINE)

CACHE_TAG: Final = "CACHEDIR.TAG"
CACHE_TAG_TEXT: Final = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Baton's durable tier. Backup programs that know this tag leave the directory out\n"
    "# (https://bford.info/cachedir/).\n"
)

_SUFFIX: Final = ".safetensors"
_DIGEST_NAME: Final = re.compile(r"\A[0-9a-f]{64}\.safetensors\Z")


def block_path(digest: bytes) -> str:
    """The block file whose SHA-256 is ``digest``, relative to the directory."""
    return f"{BLOCKS}/{digest.hex()}{_SUFFIX}"


def cut_path(digest: bytes) -> str:
    """The cut file whose SHA-256 is ``digest``, relative to the directory."""
    return f"{CUTS}/{digest.hex()}{_SUFFIX}"


def is_in(path: str, folder: str) -> bool:
    """Whether that is a file of ``folder`` itself: in folders of a folder nothing is ours."""
    return path.rpartition("/")[0] == folder


def digest_of_path(path: str, folder: str) -> bytes | None:
    """The digest in the name of a file of ``folder``; ``None`` for any other path."""
    parent, _, name = path.rpartition("/")
    if parent != folder or not _DIGEST_NAME.match(name):
        return None
    return bytes.fromhex(name[: -len(_SUFFIX)])
