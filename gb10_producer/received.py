"""Models that a paired decoder has sent: where they are kept, and how one comes in.

All lie beside those that were imported here, in ``models`` of the cache directory. A model that
comes in is a directory ``.receiving-DIGEST``, whose name is the digest of its manifest; it is
renamed once it is whole and verified. What is there of it outlives any crash, and is looked at
again before more is taken: a file that is not what the manifest says is not kept.

One model at a time, also where several producers share the directory. What nobody has gone on
with for :data:`STALE_S` is removed when a producer starts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from protocol.checkpoint import read_checkpoint, remember_digests, require_known
from protocol.control.messages import SendModel
from protocol.control.models import Manifest, ModelFile, read_manifest
from protocol.errors import BatonError, Cancelled, ConfigError, IntegrityError
from protocol.identity import identity_differences
from protocol.reasons import differs, refusal
from trust.places import sync

log = logging.getLogger(__name__)

STALE_S: Final = 7 * 24 * 3600.0
"""After so many seconds what was begun is taken for given up."""
FLOOR_BYTES: Final = 20 * 10**9
"""So much of a volume stays free, or a twentieth of it if that is less; as at the decoder's."""

MANIFEST: Final = ".manifest.json"
"""The list of its files, in every directory of a model that was received."""
_PARTS: Final = ".receiving-"
_LOCK: Final = ".receiving.lock"
_CONFIG: Final = "config.json"
_OF_OTHER_RELEASES: Final = (
    "architecture_unsupported",
    "quantisation_unsupported",
    "weights_dtype_unsupported",
)
"""What another release may read: that is refused, but not removed."""
_DIGESTS: Final = ".digests.json"
_CHUNK: Final = 4 << 20
_SYNC_BYTES: Final = 256 << 20
"""After so many bytes of a file it is synced, so that little is lost with the power."""
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_MORE: Final = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


class Disk:
    """What is asked of a disk; tests fill it. Every method raises ``OSError``."""

    def room(self, directory: Path) -> tuple[int, int]:
        """Bytes that are free, and that there are, on the volume of ``directory``."""
        volume = os.statvfs(directory)
        return volume.f_bavail * volume.f_frsize, volume.f_blocks * volume.f_frsize

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of ``data``; how many bytes that was."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """What was written reaches the medium."""
        sync(descriptor)


@dataclass(frozen=True)
class Kept:
    """A model that was received whole: its directory."""

    path: Path


class ReceivedModels:
    """The models in ``root``, of which some were received."""

    def __init__(self, root: Path, digest_cache: Path, disk: Disk | None = None) -> None:
        """``digest_cache``: where digests of files are remembered, for whoever loads one."""
        self._root = root
        self._digest_cache = digest_cache
        self._disk = disk or Disk()

    def last(self) -> Path | None:
        """The one that was received last, if it is still there."""
        found = [(stamp, path) for stamp, path, _ in _whole(self._root)]
        return max(found)[1] if found else None

    def sweep(self, now: float) -> None:
        """Remove what was begun and given up; ``now`` is the wall clock's. Never raises."""
        if not self._root.is_dir():
            return
        with contextlib.suppress(BatonError), self._alone():
            for path in self._root.glob(f"{_PARTS}*"):
                try:
                    touched = max(one.lstat().st_mtime for one in (path, *path.iterdir()))
                except OSError:
                    continue  # no directory of ours
                if not path.is_symlink() and now - touched > STALE_S:
                    shutil.rmtree(path, ignore_errors=True)
                    log.info("a model that was never whole is removed", extra={"part": path.name})

    @contextlib.contextmanager
    def open(self, offer: SendModel) -> Iterator[Incoming]:
        """Take the model of ``offer`` in, while no other is.

        Raises ``CapacityError`` (``model_transfer_busy``), ``ConfigError`` (``model_not_kept``).
        """
        with self._alone():
            same = [path for _, path, digest in _whole(self._root) if digest == offer.digest]
            incoming = Incoming(self._root, offer, same, self._digest_cache, self._disk)
            try:
                yield incoming
            finally:
                incoming.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            with _keeping(self._root):
                self._root.mkdir(parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                lock = os.open(self._root / _LOCK, flags, 0o600)
                stack.callback(os.close, lock)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    text = "another model is being received"
                    raise refusal("model_transfer_busy", text) from error
            yield


@dataclass
class _Open:
    """The file that is being written."""

    file: ModelFile
    descriptor: int
    digest: hashlib._Hash
    written: int
    unsynced: int = 0


@dataclass
class Incoming:
    """One model on its way in, in one thread: :meth:`prepare`, :meth:`write`, :meth:`finish`.

    Every method raises ``CapacityError`` (``disk_full``) and ``ConfigError``
    (``model_not_kept``); what was received before stays. ``same``: directories of models
    that were received whole and have the same manifest.
    """

    root: Path
    offer: SendModel
    same: list[Path]
    digest_cache: Path
    disk: Disk
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _place: int = -1
    _manifest: Manifest | None = None
    _listed: bytearray = field(default_factory=bytearray)
    _rest: list[ModelFile] = field(default_factory=list)
    _open: _Open | None = None
    _had: Path | None = None

    @property
    def part(self) -> Path:
        """The directory that it comes into."""
        return self.root / f"{_PARTS}{self.offer.digest.hex()}"

    def prepare(self, cancelled: Callable[[], bool] = lambda: False) -> int:
        """How many bytes of the stream are here already, and good; all of it, if it is kept.

        Raises also ``Cancelled``, and ``ConfigError`` as :meth:`write`.
        """
        for path in self.same:
            with _keeping(path):
                if self._is_offered(path, cancelled):
                    self._had = path
                    return self.offer.nbytes
        with _keeping(self.part):
            self._enter()
            have = self._look(cancelled)
            if self._manifest is not None and not self._lacks(_CONFIG):
                self._require_known()
            free, total = self.disk.room(self.root)
            floor = min(FLOOR_BYTES, total // 20)
            lacking = self.offer.nbytes - have + floor - free
        if lacking > 0:
            text = "the producer's disk has no room for the model"
            raise refusal(
                "disk_full", text, field="bytes free", found=free, expected=free + lacking
            )
        return have

    def write(self, data: bytes) -> None:
        """Keep the next bytes of the stream.

        Raises also ``IntegrityError`` (``model_digest_differs``), ``PeerProtocolError``
        (``model_manifest_invalid``): then what was wrong is not kept. As soon as the
        configuration is here, ``ConfigError``: ``model_unusable``, and nothing is kept;
        ``model_unsupported``, and all of it is, for another release.
        """
        view = memoryview(data)
        with _keeping(self.part):
            if self._manifest is None:
                wanted = self.offer.manifest_bytes - len(self._listed)
                self._listed += view[:wanted]
                view = view[wanted:]
                if len(self._listed) == self.offer.manifest_bytes:
                    self._keep_manifest(bytes(self._listed))
            while view:
                view = view[self._write_some(view) :]
            self._end_file()

    def finish(self) -> Kept:
        """The model in its place, once all of the stream is here.

        Raises also ``IntegrityError`` (``model_identity_differs``), ``ConfigError``
        (``model_unusable``): then nothing of it is kept; and ``ConfigError``
        (``model_unsupported``).
        """
        if self._had is not None:
            with _keeping(self._had):
                stamp = self._stamp()
                os.utime(self._had / MANIFEST, ns=(stamp, stamp))
            return Kept(self._had)
        manifest = self._manifest
        assert manifest is not None
        digests = {file.name: file.sha256 for file in manifest.files}
        with _keeping(self.part):
            self._end_file()
            assert self._open is None
            known = self.part / _DIGESTS
            remember_digests(known, {self.part / name: digests[name] for name in digests})
            with self._removed_if_bad():
                self._require_offered(self.part, known)
            known.unlink(missing_ok=True)
            stamp = self._stamp()
            os.utime(MANIFEST, ns=(stamp, stamp), dir_fd=self._place)
            self.disk.sync(self._place)
            final = self._move()
            remember_digests(self.digest_cache, {final / name: digests[name] for name in digests})
        return Kept(final)

    def close(self) -> None:
        """Leave it as it is; idempotent."""
        if self._open is not None:
            os.close(self._open.descriptor)
            self._open = None
        self._stack.close()
        with contextlib.suppress(OSError):
            os.rmdir(self.part)  # only where nothing is in it

    # what is there

    def _enter(self) -> None:
        """Open the directory, which is made, and is this user's alone."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.part, 0o700)
        self._place = os.open(self.part, _FOLDER)
        self._stack.callback(os.close, self._place)
        status = os.fstat(self._place)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(errno.EPERM, "it is not this user's alone")

    def _look(self, cancelled: Callable[[], bool]) -> int:
        """Keep of the directory what is good, remove the rest; the bytes of the stream here."""
        raw = self._listed_before()
        if raw is None:
            self._remove_but(())
            return 0
        self._manifest = manifest = self._read(raw)
        self._rest = list(manifest.files)
        have, good = len(raw), [MANIFEST]
        while self._rest:
            file = self._rest[0]
            found = self._look_at(file, cancelled)
            if found is None:
                break
            good.append(file.name)
            have += found.written
            self._rest.pop(0)
            if found.written < file.nbytes:
                self._open = found
                break
            os.close(found.descriptor)
        self._remove_but(good)
        return have

    def _listed_before(self) -> bytes | None:
        """The manifest that lies here, if it is the offered one."""
        if self._status(MANIFEST) is None:
            return None
        raw = _small(self.part / MANIFEST)
        same = len(raw) == self.offer.manifest_bytes
        return raw if same and hashlib.sha256(raw).digest() == self.offer.digest else None

    def _look_at(self, file: ModelFile, cancelled: Callable[[], bool]) -> _Open | None:
        """What is here of a file, open; ``None`` if there is nothing, or it is not good."""
        status = self._status(file.name)
        if status is None or status.st_size > file.nbytes:
            return None
        descriptor = os.open(file.name, _MORE, dir_fd=self._place)
        try:
            digest, read = hashlib.sha256(), 0
            while piece := os.read(descriptor, _CHUNK):
                digest.update(piece)
                read += len(piece)
                if cancelled():
                    raise Cancelled("nobody waits for the model any more")
            if read == file.nbytes and digest.hexdigest() != file.sha256:
                log.warning("a file of a model is damaged", extra={"file": file.name})
                os.close(descriptor)
                return None
            self.disk.sync(descriptor)
        except (OSError, BatonError):
            os.close(descriptor)
            raise
        return _Open(file, descriptor, digest, read)

    def _status(self, name: str) -> os.stat_result | None:
        """Of a file of ours; ``None`` where there is none, or something else."""
        try:
            status = os.stat(name, dir_fd=self._place, follow_symlinks=False)
        except FileNotFoundError:
            return None
        plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        return status if plain and status.st_uid == os.geteuid() else None

    def _remove_but(self, names: list[str] | tuple[str, ...]) -> None:
        for name in os.listdir(self._place):
            if name not in names:
                self._remove(name)

    def _remove(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._place)
        except (IsADirectoryError, PermissionError):
            shutil.rmtree(self.part / name)

    # what comes

    def _keep_manifest(self, raw: bytes) -> None:
        digest = hashlib.sha256(raw).digest()
        if digest != self.offer.digest:
            self._listed.clear()
            raise differs("model_digest_differs", "manifest", digest, self.offer.digest)
        self._manifest = manifest = self._read(raw)
        self._rest = list(manifest.files)
        descriptor = os.open(MANIFEST, _NEW, 0o600, dir_fd=self._place)
        try:
            self._write_all(descriptor, memoryview(raw))
            self.disk.sync(descriptor)
        except OSError:
            self._remove(MANIFEST)
            raise
        finally:
            os.close(descriptor)
        self.disk.sync(self._place)

    def _read(self, raw: bytes) -> Manifest:
        manifest = read_manifest(raw)
        if manifest.nbytes != self.offer.nbytes:
            raise differs("model_manifest_invalid", "nbytes", manifest.nbytes, self.offer.nbytes)
        return manifest

    def _write_some(self, view: memoryview) -> int:
        """Write what belongs into the current file, or some of it; how many bytes that was."""
        self._end_file()
        found = self._open
        assert found is not None
        data = view[: found.file.nbytes - found.written]
        count = self.disk.write(found.descriptor, data)
        found.digest.update(data[:count])
        found.written += count
        found.unsynced += count
        if found.unsynced >= _SYNC_BYTES:
            self.disk.sync(found.descriptor)
            found.unsynced = 0
        return count

    def _end_file(self) -> None:
        """End the current file if it is whole, and open the next one that has bytes to come."""
        while True:
            if self._open is None:
                if not self._rest:
                    return
                self._open = self._new(self._rest.pop(0))
            found = self._open
            if found.written < found.file.nbytes:
                return
            self._open = None
            try:
                self.disk.sync(found.descriptor)
            finally:
                os.close(found.descriptor)
            digest = found.digest.hexdigest()
            if digest != found.file.sha256:
                self._remove(found.file.name)
                raise differs("model_digest_differs", found.file.name, digest, found.file.sha256)
            if found.file.name == _CONFIG:
                self._require_known()

    def _new(self, file: ModelFile) -> _Open:
        descriptor = os.open(file.name, _NEW, 0o600, dir_fd=self._place)
        return _Open(file, descriptor, hashlib.sha256(), 0)

    def _write_all(self, descriptor: int, view: memoryview) -> None:
        while view:
            view = view[self.disk.write(descriptor, view) :]

    # what it is

    def _is_offered(self, path: Path, cancelled: Callable[[], bool]) -> bool:
        """Whether the model that was received earlier is still the offered one.

        Raises ``OSError``, and ``Cancelled``.
        """
        try:
            self._require_offered(path, self.digest_cache, cancelled)
        except (ConfigError, IntegrityError) as error:
            log.warning(
                "a model is not what was received",
                extra={"model": path.name, "reason": error.reason},
            )
            return False
        return True

    def _require_offered(
        self, path: Path, digests: Path, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Raise unless it is that model: ``model_identity_differs``, or as :func:`_usable`.

        Raises also ``OSError``, and ``Cancelled``.
        """

        def look(_done: int, _total: int) -> None:
            if cancelled():
                raise Cancelled("nobody waits for the model any more")

        with _usable(path.name):
            found = read_checkpoint(path, digests, look).identity
        if components := identity_differences(self.offer.identity, found):
            raise refusal(
                "model_identity_differs",
                "the model is another than announced",
                field=", ".join(components),
            )

    def _require_known(self) -> None:
        """Its configuration is here: who sends what cannot be read need not send the weights."""
        with self._removed_if_bad(), _usable(self.offer.name):
            require_known(self.part)

    @contextlib.contextmanager
    def _removed_if_bad(self) -> Iterator[None]:
        """What is no good to any release is removed; what a disk refuses says nothing of it."""
        try:
            yield
        except (ConfigError, IntegrityError) as error:
            if error.reason != "model_unsupported":
                self.close()
                shutil.rmtree(self.part, ignore_errors=True)
            raise

    def _lacks(self, name: str) -> bool:
        """Whether a file of the model is not here as a whole."""
        left = [*self._rest, *([] if self._open is None else [self._open.file])]
        return name not in os.listdir(self._place) or any(file.name == name for file in left)

    def _stamp(self) -> int:
        """A time for what is received now: later than any other model's, whatever the clock."""
        newest = max((stamp for stamp, _, _ in _whole(self.root)), default=0)
        return max(time.time_ns(), newest + 1)

    def _move(self) -> Path:
        """Give the directory the first name that no other model has."""
        name, digest = self.offer.name, self.offer.digest.hex()
        for called in (name, f"{name}-{digest[:8]}", f"{name}-{digest}"):
            final = self.root / called
            if os.path.lexists(final):
                continue
            os.rename(self.part, final)
            place = os.open(self.root, _FOLDER)
            try:
                self.disk.sync(place)
            finally:
                os.close(place)
            return final
        raise FileExistsError(errno.EEXIST, "all of its names are taken")


def _whole(root: Path) -> Iterator[tuple[int, Path, bytes]]:
    """When each model was received, its directory, and its manifest's digest."""
    for file in root.glob(f"*/{MANIFEST}"):
        if file.parent.name.startswith("."):
            continue
        with contextlib.suppress(OSError):
            yield file.stat().st_mtime_ns, file.parent, hashlib.sha256(_small(file)).digest()


@contextlib.contextmanager
def _usable(name: str) -> Iterator[None]:
    """Why a checkpoint cannot be read becomes ``model_unusable`` or ``model_unsupported``."""
    try:
        yield
    except ConfigError as error:
        log.warning("a model is none", extra={"model": name, **error.details()})
        kind = "model_unusable"
        if error.reason in _OF_OTHER_RELEASES:
            kind = "model_unsupported"
        text = f"the model cannot be read ({error.reason})"
        raise refusal(kind, text, found=error.reason) from error


def _small(file: Path) -> bytes:
    """A manifest's bytes, or more than one has. Raises ``OSError``."""
    with file.open("rb") as opened:
        return opened.read((1 << 18) + 1)


@contextlib.contextmanager
def _keeping(path: Path) -> Iterator[None]:
    """What a disk refuses becomes ``disk_full`` or ``model_not_kept``."""
    try:
        yield
    except OSError as error:
        facts = {"path": str(path), "error": error.strerror or type(error).__name__}
        log.warning("a model cannot be written", extra=facts)
        if error.errno in _NO_ROOM:
            raise refusal("disk_full", "the producer's disk is full") from error
        raise refusal("model_not_kept", f"the model cannot be written: {error.strerror}") from error
