"""Publishing a cut: what is new, room for it, the commit, what it supersedes.

Blocks first, the cut's file last, then the directories, one barrier, the index: whoever finds
a cut finds its blocks. A step that fails undoes the whole publication and is not tried again.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from mac_decoder.reuse.cut import BlockBody, CutBody, block_sizes, mixed, rest_regions
from mac_decoder.store import names
from mac_decoder.store.draft import Draft
from mac_decoder.store.holdings import MOST_TOUCHED, Holdings
from mac_decoder.store.index import Change, NodeRow
from mac_decoder.store.ledger import NO_NODE, BlockFile, Cut, Node
from mac_decoder.store.manifest import Role, block_header, encode_head
from mac_decoder.store.quarantine import Quarantine
from mac_decoder.store.recovery import cut_row
from mac_decoder.store.sweep import Sweeper
from protocol.errors import IntegrityError
from protocol.identity import Identity


@dataclass(frozen=True)
class Published:
    """The cut survives any crash from here on.

    ``written`` is in bytes, 0 if it was held already (``existed``); ``superseded`` are the
    names of its own steps that went. ``block_files`` are the digests of the files of its first
    blocks that are on disk, as many as there are: those of all, unless what existed has other
    rows. They are empty for blocks without rows.
    """

    name: bytes
    position: int
    written: int = 0
    files: int = 0
    existed: bool = False
    superseded: tuple[bytes, ...] = ()
    block_files: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Refused:
    """The cut was not published, and what was held is still held.

    Reasons: ``store_over_cap``, ``store_under_floor`` and ``disk_full`` (more space is all
    that was missing), ``io_failed`` (the medium), ``index_failed``, ``block_missing`` (a block
    neither given nor held), ``publisher_behind``, ``store_closed`` and ``forgotten`` (never tried).
    ``block_files`` as in :class:`Published`.
    """

    name: bytes
    position: int
    reason: str
    block_files: tuple[bytes, ...] = ()

    @property
    def out_of_space(self) -> bool:
        """Whether more space is all that was missing."""
        return self.reason in ("store_over_cap", "store_under_floor", "disk_full")


def files_of_blocks(files: Sequence[bytes], blocks: int) -> tuple[bytes, ...]:
    """The digests of the first ``blocks`` blocks' files; empty ones where blocks have no rows,
    for which ``files`` is empty.
    """
    return tuple(files[:blocks]) if files else (b"",) * blocks


class Fresh(NamedTuple):
    """A block whose file has to be written."""

    block: bytes
    digest: bytes
    header: bytes
    body: BlockBody

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + self.body.nbytes


@dataclass(frozen=True)
class Order:
    """What is to be published. ``files`` has the digest of each block's file, in order; it is
    empty for a layout without full layers. ``bodies`` has the rows of those that may be new."""

    space: bytes
    identity: Identity
    cut: CutBody
    role: Role
    files: tuple[bytes, ...]
    bodies: Mapping[bytes, BlockBody]


class Publication:
    """One cut on its way to the disk. The caller holds ``holdings.writing``."""

    def __init__(
        self, held: Holdings, sweeper: Sweeper, quarantine: Quarantine, order: Order
    ) -> None:
        self._held = held
        self._sweeper = sweeper
        self._quarantine = quarantine
        self._order = order
        self._draft = Draft(held)
        self._node: Node | None = None
        self._shared = 0
        self._cut_file = b""
        self._files: list[BlockFile] = []
        with held.lock:
            self._ancestors = held.ledger.ancestors(order.space, order.cut.blocks, order.cut.tokens)

    def run(self) -> Published:
        """Publish, or raise what stopped it, with everything undone.

        Raises ``IntegrityError`` (``block_missing``), ``CapacityError``, ``OSError`` and
        ``sqlite3.Error``.
        """
        order = self._order
        done = False
        try:
            fresh = self._claim()
            head = encode_head(
                self._held.keys, order.space, order.identity, order.cut, order.files, order.role
            )
            regions = rest_regions(order.cut.layout, order.cut.position)
            buffers = [memoryview(head)]
            buffers += [order.cut.rest[r.index, r.role].data for r in regions]
            self._make_room(fresh, sum(buffer.nbytes for buffer in buffers))
            self._write(fresh, buffers)
            self._commit(fresh, sum(buffer.nbytes for buffer in buffers))
            done = True
        finally:
            if not done:
                self._undo()
            self._release()
        name = order.cut.digest(order.space)
        written, files = self._draft.nbytes, len(self._draft.paths)
        self._held.count("written_bytes", written)
        return Published(
            name,
            order.cut.position,
            written,
            files,
            superseded=self._supersede(),
            block_files=files_of_blocks(order.files, len(order.cut.blocks)),
        )

    def _claim(self) -> list[Fresh]:
        """Keep the blocks that are held already from being deleted; those that are not."""
        order, ledger = self._order, self._held.ledger
        blocks = order.cut.blocks
        with self._held.lock:
            for block, digest in zip(blocks, order.files or [b""] * len(blocks), strict=True):
                node = ledger.node(self._node, block, digest)
                if node is None:
                    break
                self._node = node
                self._shared += 1
            ledger.hold(self._node)
        fresh: list[Fresh] = []
        for block, digest in zip(blocks, order.files, strict=False):
            file = self._usable(digest)
            if file:
                with self._held.lock:
                    file.users += 1
                self._files.append(file)
                continue
            body = order.bodies.get(block)
            if body is None:
                raise IntegrityError("a block is neither given nor held", reason="block_missing")
            header = block_header(order.cut.layout, order.space, block, self._held.keys.number)
            fresh.append(Fresh(block, digest, header, body))
        return fresh

    def _usable(self, digest: bytes) -> BlockFile | None:
        """The held file of that digest, if it may be relied on."""
        file = self._held.ledger.blocks.get(digest)
        if file is None or not file.present:
            return None
        if not file.trusted:
            # Found at start-up, unknown to the index: perhaps a crash tore it.
            path = names.block_path(digest)
            try:
                good = self._held.reader.digest(path) == digest
            except IntegrityError as error:
                self._quarantine.block(file, error.reason)
                return None
            if not good:
                self._quarantine.block(file, "digest_differs")
                return None
            file.trusted = True
        return file

    def _make_room(self, fresh: list[Fresh], cut_nbytes: int) -> None:
        rows = len(self._order.cut.blocks) - self._shared + 2 + MOST_TOUCHED
        nbytes = sum(entry.nbytes for entry in fresh) + cut_nbytes
        # The source of the new cut stays until the new one is on record, and so do the steps
        # that it will supersede: that is when they go.
        keep = [cut for cut in self._ancestors if cut.role == "step"] + self._ancestors[-1:]
        old = self._held.ledger.cuts.get(self._order.cut.digest(self._order.space))
        keep += [old] if old else []
        self._sweeper.make_room(nbytes + self._held.index.growth(rows), keep)

    def _write(self, fresh: list[Fresh], buffers: list[memoryview]) -> None:
        sizes = block_sizes(self._order.cut.layout)
        for entry in fresh:
            rows = [entry.body.data[place].data for place in sorted(sizes)]
            self._draft.write(names.block_path(entry.digest), [memoryview(entry.header), *rows])
        sha = hashlib.sha256()
        for buffer in buffers:
            sha.update(buffer)
        self._cut_file = sha.digest()
        self._draft.write(names.cut_path(self._cut_file), buffers, last=True)
        self._draft.settle()

    def _commit(self, fresh: list[Fresh], nbytes: int) -> None:
        """The index's transaction, then the books."""
        held, order = self._held, self._order
        parent = self._ancestors[-1] if self._ancestors else None
        rows = self._node_rows(fresh)
        now = time.time()
        cut = Cut(
            name=order.cut.digest(order.space),
            file=self._cut_file,
            space=order.space,
            node=None,
            position=order.cut.position,
            nbytes=nbytes,
            role=order.role,
            mixed=mixed(order.cut.history),
            made_at=now,
            used_at=now,
        )
        row = cut_row(cut)._replace(
            node=rows[-1].id if rows else self._node.number if self._node else NO_NODE,
            parent=parent.name if parent else b"",
            used=held.ledger.next_use(),
        )
        change = Change(nodes=rows, cuts=[row])
        if order.space not in held.spaces:
            change.space = (order.space, msgspec.json.encode(order.identity).decode("ascii"))
        held.commit(change)
        with held.lock:
            if change.space:
                held.spaces[order.space] = change.space[1]
            self._enter(fresh, rows, cut, parent)

    def _node_rows(self, fresh: list[Fresh]) -> list[NodeRow]:
        ledger, order = self._held.ledger, self._order
        sizes = {entry.digest: entry.nbytes for entry in fresh}
        numbers = ledger.next_numbers(len(order.cut.blocks) - self._shared)
        parent = self._node.number if self._node else NO_NODE
        rows: list[NodeRow] = []
        for number, at in zip(numbers, range(self._shared, len(order.cut.blocks)), strict=True):
            digest = order.files[at] if order.files else b""
            if not digest:
                size = 0
            elif digest in sizes:
                size = sizes[digest]
            else:
                size = ledger.blocks[digest].nbytes
            rows.append(NodeRow(number, parent, order.cut.blocks[at], digest, size))
            parent = number
        return rows

    def _enter(self, fresh: list[Fresh], rows: list[NodeRow], cut: Cut, parent: Cut | None) -> None:
        ledger = self._held.ledger
        for entry in fresh:
            file = ledger.blocks.get(entry.digest)
            if file:
                ledger.resize_block(file, entry.nbytes)
                file.trusted = True
            else:
                ledger.add_block(BlockFile(entry.digest, entry.nbytes))
        cut.node = self._node
        for row in rows:
            file = ledger.blocks[row.file] if row.file else None
            cut.node = ledger.add_node(cut.node, row.block, file, row.id)
        ledger.hold(cut.node)
        old = ledger.cuts.get(cut.name)
        children = set(old.children) if old else set()
        removed = ledger.remove_cut(old) if old else None
        ledger.add_cut(cut, parent)
        ledger.release(cut.node)
        for child in children:
            ledger.reparent(child, cut)
        ledger.complete_users()
        if old and removed:
            self._sweeper.replaced(old, removed, cut)

    def _undo(self) -> None:
        """Remove what was written. Never raises."""
        self._draft.discard()
        with self._held.lock:
            old = self._held.ledger.cuts.get(self._order.cut.digest(self._order.space))
            if old and old.file == self._cut_file:
                # The same bytes, withheld: what was undone is what it consisted of.
                self._held.ledger.remove_cut(old)

    def _release(self) -> None:
        """Let go of what was kept. Never raises."""
        with self._held.lock:
            for file in self._files:
                file.users -= 1
            removed = self._held.ledger.release(self._node)
        try:
            self._held.forget_rows([], [node.number for node in removed.nodes])
        except sqlite3.Error:
            # They are dropped at the next start.
            self._held.count("index_failures")

    def _supersede(self) -> tuple[bytes, ...]:
        """Delete the cut's own steps: those that lead to it alone."""
        own = []
        cut = self._held.ledger.cuts[self._order.cut.digest(self._order.space)]
        at = cut.parent
        below = cut
        while at is not None and at.children == {below}:
            if at.role == "step":
                own.append(at)
            below, at = at, at.parent
        try:
            self._sweeper.delete_cuts(own, "superseded")
        except (OSError, sqlite3.Error):
            # They are tried again when this cut is extended.
            self._held.count("delete_failures")
        return tuple(step.name for step in own if self._held.ledger.cuts.get(step.name) is not step)
