"""A checkpoint of this machine as the stream of bytes that a producer is sent.

Files are hashed once: digests are remembered where the decoder remembers its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.checkpoint import Progress, checkpoint_files, file_digests, read_checkpoint
from protocol.control.messages import NO_MAC, SendModel
from protocol.control.models import PIECE_BYTES, Manifest, ModelFile, manifest_of
from protocol.errors import ConfigError, PeerProtocolError
from protocol.identity import Identity

_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME: Final = 64


@dataclass(frozen=True)
class Outgoing:
    """A checkpoint that can be sent."""

    path: Path
    name: str
    identity: Identity
    manifest: Manifest

    @property
    def offer(self) -> SendModel:
        """What the producer is told of it."""
        return SendModel(
            name=self.name,
            identity=self.identity,
            nbytes=self.manifest.nbytes,
            manifest_bytes=len(self.manifest.raw),
            digest=self.manifest.digest,
            mac=NO_MAC,
        )

    def pieces(self, offset: int) -> Iterator[bytes]:
        """The stream from byte ``offset`` on, in pieces; one of them is in memory at a time.

        Raises ``ConfigError`` (``model_changed``, ``model_unreadable``).
        """
        listed = self.manifest.raw[offset:]
        for start in range(0, len(listed), PIECE_BYTES):
            yield listed[start : start + PIECE_BYTES]
        for file, start in self.manifest.rest(offset):
            yield from self._of_file(file, start)

    def _of_file(self, file: ModelFile, start: int) -> Iterator[bytes]:
        left = file.nbytes - start
        try:
            with (self.path / file.name).open("rb", buffering=0) as opened:
                opened.seek(start)
                while left:
                    piece = opened.read(min(PIECE_BYTES, left))
                    if not piece:
                        raise ConfigError(
                            f"{file.name} became shorter while it was sent",
                            reason="model_changed",
                            field=file.name,
                            hint="send it again",
                        )
                    left -= len(piece)
                    yield piece
        except OSError as error:
            raise _unreadable(file.name, error) from error


def outgoing(model: Path, digest_cache: Path | None, progress: Progress | None = None) -> Outgoing:
    """The checkpoint in ``model``, hashed as far as ``digest_cache`` does not know its files.

    Raises ``ConfigError`` as :func:`protocol.checkpoint.read_checkpoint`, and
    ``model_not_sendable``, ``model_unreadable``.
    """
    try:
        identity = read_checkpoint(model, digest_cache, progress).identity
        files = checkpoint_files(model)
        digests = file_digests(files, digest_cache)
        listed = [ModelFile(path.name, path.stat().st_size, digests[path]) for path in files]
        manifest = manifest_of(listed)
    except OSError as error:
        raise _unreadable(str(model), error) from error
    except PeerProtocolError as error:
        raise ConfigError(
            f"the checkpoint in {model} cannot be sent",
            reason="model_not_sendable",
            field=error.field,
            found=error.found,
            expected=error.expected,
            hint="its files have other names, or are more or larger, than a checkpoint has",
        ) from error
    return Outgoing(model, name_of(model), identity, manifest)


def name_of(model: Path) -> str:
    """What the model is called where it is sent to: its directory's name, as a message has it.

    Of a snapshot in a hub's cache, whose directory has a number for a name, the repository's.
    """
    path = model.resolve()
    if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--"):
        called = path.parents[1].name.rpartition("--")[2]
    else:
        called = path.name
    return _NOT_IN_NAMES.sub("-", called)[:_LONGEST_NAME].strip("-._") or "model"


def _unreadable(name: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{name} cannot be read: {error.strerror}", reason="model_unreadable", field="model"
    )
