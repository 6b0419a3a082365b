"""The durable tier: cuts that survive crashes, within a number of bytes, never wrong ones.

Format, promises and attacker are in FORMAT.md. One store per directory (see ``lock``). Any
thread may call; nothing here touches a device. A damaged file is an ``IntegrityError`` and
the end of that cut here; a failing disk refuses a publication and nothing else.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec
from numpy.typing import ArrayLike

from mac_decoder.reuse.cut import (
    BlockBody,
    CutBody,
    Piece,
    check_block,
    check_cut,
    pieces,
)
from mac_decoder.reuse.facts import Holding
from mac_decoder.store.block_files import BlockFiles
from mac_decoder.store.catalogue import Catalogue, Footprint
from mac_decoder.store.events import DeleteReason, Event, Listener
from mac_decoder.store.files import Disk, RealDisk
from mac_decoder.store.holdings import Holdings
from mac_decoder.store.index import Index
from mac_decoder.store.ledger import Cut, Tally, Victims
from mac_decoder.store.lookup import Lookup
from mac_decoder.store.manifest import Manifest, Role
from mac_decoder.store.opening import OpenIndex, look_at_holdings, open_holdings
from mac_decoder.store.publishing import Order, Publication, Published, Refused
from mac_decoder.store.quarantine import Quarantine
from mac_decoder.store.reading import Into
from mac_decoder.store.sweep import AT_ONCE, Pace, Sweeper
from mac_decoder.store.verify import Progress, Verified, Verifier, nothing
from protocol.blocks import chain
from protocol.errors import CapacityError, ConfigError, IntegrityError
from protocol.identity import Identity, identity_differences

_LOG = logging.getLogger(__name__)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Restored:
    """A finished read: bytes placed and bytes read, and seconds in all threads together."""

    manifest: Manifest
    nbytes: int
    read_nbytes: int
    read_s: float
    verify_s: float


@dataclass(frozen=True)
class StoreStats:
    """Figures of the tier, in bytes.

    ``referenced``: summed per conversation, shared blocks in each. ``on_disk``: every file
    below the directory, as a walk counts it; the cap's figure. ``identities`` counts held cuts
    by the digest of their identity in hexadecimal; ``kinds`` other files, by kind; ``counts``
    what happened since the start. ``mixed`` cuts have rows of more than one recipe.
    """

    cap_bytes: int
    floor_bytes: int
    on_disk: int
    referenced: int
    cuts: int
    withheld: int
    mixed: int
    blocks: int
    block_bytes: int
    identities: Mapping[str, Tally]
    kinds: Mapping[str, Tally]
    counts: Mapping[str, int]


def log_event(event: Event) -> None:
    """The listener where none is given."""
    _LOG.info("%s", event)


class Store:
    """An open durable tier; made by :meth:`open`."""

    def __init__(self, held: Holdings, release: Callable[[], None]) -> None:
        self._held = held
        self._release = release
        self._sweeper = Sweeper(held)
        self._quarantine = Quarantine(held)
        self._lookup = Lookup(held, self._quarantine)
        self._block_files = BlockFiles(held)
        self.catalogue = Catalogue(held, self._lookup)
        self._closed = False

    @classmethod
    def open(
        cls,
        directory: Path,
        store_key: bytes,
        cap_bytes: int,
        floor_bytes: int,
        disk: Disk | None = None,
        listener: Listener = log_event,
        open_index: OpenIndex = Index,
    ) -> Store:
        """Open or make the tier in ``directory``, whose files then belong to this process.

        Raises ``ConfigError`` (``store_locked``, ``cache_cap_too_small``, and
        ``cache_dir_unusable`` where the disk refuses).
        """
        with _usable(directory):
            held, release = open_holdings(
                directory,
                store_key,
                cap_bytes,
                floor_bytes,
                disk or RealDisk(),
                listener,
                open_index,
            )
        return cls(held, release)

    @classmethod
    def look(cls, directory: Path, store_key: bytes, listener: Listener = log_event) -> Store:
        """The tier in ``directory`` as it is, to be looked at: no file is changed but the lock's.

        For figures and dry runs, with neither cap nor floor. What would write fails as on a
        disk that takes nothing: a publication is refused, a deletion raises. Raises
        ``ConfigError`` (``store_locked``; ``cache_dir_unusable``, also if there is none).
        """
        with _usable(directory):
            held, release = look_at_holdings(directory, store_key, listener)
        return cls(held, release)

    # -- reading

    def holding(
        self, space: bytes, tokens: ArrayLike, names: Sequence[bytes] | None = None
    ) -> Holding:
        """What is held of a prompt, for the ladder: authenticated cuts only.

        ``names`` spares computing the prompt's chain again.
        """
        return self._lookup.holding(space, tokens, names)

    def holds(self, name: bytes) -> bool:
        """Whether the cut would be served."""
        return self._served(name) is not None

    def manifest(self, name: bytes) -> Manifest | None:
        """The manifest of a held cut, authenticated; ``None`` for a miss.

        Raises ``IntegrityError``; the cut is then not held any more.
        """
        cut = self._served(name)
        return self._lookup.manifest(cut) if cut else None

    def read(
        self,
        name: bytes,
        into: Into,
        *,
        position: int | None = None,
        wanted: Iterable[Piece] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Restored | None:
        """Restore the cut ``name``, or a cache at a smaller ``position``; ``None`` for a miss.

        Bytes go straight into the memory that ``into(index, role, offset, nbytes)`` returns,
        called from several threads, for ``pieces(layout, held, position)`` or for ``wanted``
        instead. The memory is complete and verified on return, and void after an error: no
        thread writes to it any more. Cuts in use are not deleted.

        Raises ``IntegrityError``: the cut, and every other one that needs the damaged file, is
        then withheld and counted. Raises ``Cancelled``, ``ValueError`` for a position that the
        cut cannot supply, and what ``into`` raises.
        """
        with self._held.lock:
            cut = self._served(name)
            if cut is None:
                return None
            cut.pins += 1
        try:
            manifest = self._lookup.manifest(cut)
            if wanted is None:
                wanted = pieces(manifest.layout, manifest.position, position or manifest.position)
            parts = list(wanted)
            effort = self._held.reader.restore(manifest, cut.file, parts, into, cancelled)
        except IntegrityError as error:
            self._quarantine.find(error, cut)
            raise
        finally:
            with self._held.lock:
                cut.pins -= 1
        self._held.touch(cut)
        nbytes = sum(piece.nbytes for piece in parts)
        return Restored(manifest, nbytes, effort.nbytes, effort.read_s, effort.digest_s)

    def _served(self, name: bytes) -> Cut | None:
        with self._held.lock:
            cut = self._held.ledger.cuts.get(name)
            return cut if cut and not cut.withheld else None

    def namespaces(self) -> Mapping[bytes, Identity]:
        """The identity of every namespace that was ever written to."""
        with self._held.lock:
            known = dict(self._held.spaces)
        return {space: msgspec.json.decode(text, type=Identity) for space, text in known.items()}

    def hidden(self, identity: Identity) -> Mapping[tuple[str, ...], Tally]:
        """Held cuts that ``identity`` cannot use, by the components that differ."""
        differ = {
            space: identity_differences(identity, other)
            for space, other in self.namespaces().items()
        }
        found: Counter[tuple[str, ...]] = Counter()
        nbytes: Counter[tuple[str, ...]] = Counter()
        with self._held.lock:
            for cut in self._held.ledger.cuts.values():
                if components := differ[cut.space]:
                    found[components] += 1
                    nbytes[components] += cut.nbytes
        return {components: Tally(found[components], nbytes[components]) for components in found}

    # -- writing

    def publish(
        self,
        space: bytes,
        identity: Identity,
        cut: CutBody,
        blocks: Iterable[BlockBody],
        *,
        role: Role = "turn",
        block_files: Sequence[bytes] = (),
        told: Callable[[Published | Refused], None] = lambda outcome: None,
    ) -> Published | Refused:
        """Commit a cut durably; nothing is written if it is held already.

        ``blocks`` are bodies of its whole blocks, in any order. The first ones may be left out:
        those whose files are on disk, ``block_files`` by their digests, as the last outcome for
        the same sequence gave them. Steps of the same conversation that this cut extends are
        deleted once it is on record. Blocks until done: meant for the publisher's thread.

        ``told`` is called with the outcome before anybody else may write or delete: so nobody
        hears of a deletion of this cut before its publication. It must not wait.

        Raises ``IntegrityError`` (``cut_malformed``, ``chain_differs``) for parts that do not
        fit together.
        """
        check_cut(cut)
        if tuple(chain(space, cut.tokens)) != cut.blocks:
            raise IntegrityError("a cut names other blocks than its own", reason="chain_differs")
        bodies = {body.hash: body for body in blocks}
        for body in bodies.values():
            check_block(cut.layout, body)
        name = cut.digest(space)
        with self._held.writing:
            order = Order(space, identity, cut, role, tuple(block_files), bodies)
            outcome = self._publish(order, name)
            self._held.count("published" if isinstance(outcome, Published) else outcome.reason)
            told(outcome)
        return outcome

    def _publish(self, order: Order, name: bytes) -> Published | Refused:
        """``order.files`` are those that are said to be there, of the first blocks."""
        position = order.cut.position
        if self._closed:
            return Refused(name, position, "store_closed", order.files)
        self._quarantine.settle()
        held = self._served(name)
        if held:
            if order.role != "step":
                held.role = order.role
            self._held.left_again(held)
            there = self._block_files.there(order, order.bodies)
            return Published(name, position, existed=True, block_files=there)
        try:
            whole = replace(order, files=self._block_files.of(order))
            publication = Publication(self._held, self._sweeper, self._quarantine, whole)
            return publication.run()
        except CapacityError as error:
            reason = error.reason
        except IntegrityError as error:
            reason = error.reason if error.reason == "block_missing" else "io_failed"
        except OSError as error:
            reason = "disk_full" if error.errno in _FULL else "io_failed"
        except sqlite3.Error as error:
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            reason = "disk_full" if full else "index_failed"
        return Refused(name, position, reason, self._block_files.there(order, {}))

    # -- keeping house

    def verify(
        self,
        progress: Progress = nothing,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        dry_run: bool = False,
    ) -> Verified:
        """Read and authenticate everything; what is wrong goes to quarantine, if not dry."""
        verifier = Verifier(self._held, self._quarantine, progress, cancelled, dry_run)
        return verifier.run()

    def prune(
        self,
        *,
        to_bytes: int | None = None,
        stale: bool = False,
        identity: Identity | None = None,
        dry_run: bool = False,
        pace: Pace = AT_ONCE,
    ) -> Tally:
        """Delete down to ``to_bytes`` on disk, least recently used first, or what is stale.

        Stale is what nobody here can use: other formats and store keys, damage, quarantine,
        orphans, and with ``identity`` the cuts of all others. One of the two must be asked for.
        Returns files and bytes that were deleted, or would be; others may write meanwhile, and
        a cut that is used meanwhile stays.
        Raises ``ConfigError`` (``cache_dir_unusable``) if the disk fails.
        """

        def plan() -> Victims:
            if stale:
                spaces = self.namespaces().items()
                others = {space for space, other in spaces if identity and other != identity}
                return self._sweeper.plan_stale(others)
            if to_bytes is None:
                raise ValueError("prune needs a size, or stale")
            return self._sweeper.plan(max(0, self._held.ledger.on_disk - to_bytes))

        return self._delete(plan, "prune", dry_run, pace)

    def clear(
        self, *, identity: Identity | None = None, dry_run: bool = False, pace: Pace = AT_ONCE
    ) -> Tally:
        """Delete everything but the lock, the tag and files that are not ours.

        With ``identity``: what it has, and what is damaged or nobody's; not what others have.
        What is published meanwhile stays. Returns and raises as :meth:`prune`.
        """

        def plan() -> Victims:
            return self._sweeper.plan_all(self.spaces_of(identity) if identity else None)

        done = self._delete(plan, "clear", dry_run, pace)
        if not dry_run:
            with self._held.writing:
                self._held.compact()
        return done

    def forget(
        self, cuts: Collection[bytes], *, dry_run: bool = False, pace: Pace = AT_ONCE
    ) -> Tally:
        """Delete the held ones of ``cuts``, by their names, and the blocks only they need.

        Returns and raises as :meth:`prune`.
        """
        return self._delete(lambda: self._sweeper.plan_cuts(cuts), "forget", dry_run, pace)

    def _delete(
        self, make_plan: Callable[[], Victims], reason: DeleteReason, dry_run: bool, pace: Pace
    ) -> Tally:
        with _usable(self._held.directory):
            with self._held.writing:
                self._quarantine.settle()
                plan = make_plan()
            if dry_run:
                return Tally(plan.files, plan.freed)
            try:
                return self._sweeper.delete_in_slices(plan, reason, pace)
            finally:
                self._lookup.forget()

    def spaces_of(self, identity: Identity) -> frozenset[bytes]:
        """The namespaces of ``identity`` that were ever written to, under whatever salt."""
        found = self.namespaces().items()
        return frozenset(space for space, other in found if other == identity)

    def footprint(self, cancelled: Callable[[], bool] = lambda: False) -> Footprint:
        """Count every file by a walk. Raises ``ConfigError`` (``cache_dir_unusable``) if the disk
        fails, and ``Cancelled``.
        """
        with _usable(self._held.directory):
            return self.catalogue.walk(cancelled)

    def stats(self) -> StoreStats:
        """The figures now."""
        held = self._held
        identities = {
            space: identity.digest().hex() for space, identity in self.namespaces().items()
        }
        with held.lock:
            ledger = held.ledger
            cuts = list(ledger.cuts.values())
            by_identity: dict[str, Tally] = {}
            for cut in cuts:
                digest = identities[cut.space]
                files, nbytes = by_identity.get(digest, Tally())
                by_identity[digest] = Tally(files + 1, nbytes + cut.nbytes)
            present = [file.nbytes for file in ledger.blocks.values() if file.present]
            return StoreStats(
                cap_bytes=held.cap_bytes,
                floor_bytes=held.floor_bytes,
                on_disk=ledger.on_disk,
                referenced=ledger.referenced(),
                cuts=len(cuts),
                withheld=sum(bool(cut.withheld) for cut in cuts),
                mixed=sum(cut.mixed for cut in cuts),
                blocks=len(present),
                block_bytes=sum(present),
                identities=by_identity,
                kinds=ledger.tallies(),
                counts=dict(held.counts),
            )

    def flush(self) -> None:
        """Tell the index what was used lately, and set aside what was found damaged."""
        with self._held.writing:
            if not self._closed:
                self._quarantine.settle()
                self._held.flush()

    def close(self) -> None:
        """Finish, and let the next process in; may be called again."""
        with self._held.writing:
            if self._closed:
                return
            self.flush()
            self._closed = True
            self._held.reader.close()
            self._held.index.close()
            self._release()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def _usable(directory: Path) -> Iterator[None]:
    """Turn what the disk says into an error for whoever chose the directory."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        # Without the number and the file, which say nothing to whoever chose the directory.
        why = isinstance(error, OSError) and error.strerror
        raise ConfigError(
            f"the cache directory {directory} cannot be used: {why or error}",
            reason="cache_dir_unusable",
            field="cache_dir",
            hint="check its owner and free space, choose another --cache-dir, or use --no-disk",
        ) from error
