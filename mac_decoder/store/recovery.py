"""Start-up: the books made from a walk and the index, and what does not belong told apart.

Nothing is deleted here. Files win over the index: rows whose file is gone are dropped, cuts
that the index does not know (it was lost, or a crash came before its commit) are adopted
after their manifest proved authentic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from mac_decoder.reuse.cut import mixed
from mac_decoder.store import index, names
from mac_decoder.store.files import Found
from mac_decoder.store.index import Change, Content, CutRow, NodeRow
from mac_decoder.store.ledger import NO_NODE, BlockFile, Cut, Kind, Ledger, Node, Other
from mac_decoder.store.manifest import Manifest, block_header, block_tensors
from mac_decoder.store.reading import Reader
from protocol.errors import IntegrityError

_BY_REASON: Final[dict[str, Kind]] = {
    "format_differs": "stale_format",
    "key_differs": "foreign_key",
    "file_unreadable": "unreadable",
}


@dataclass
class Recovered:
    """The books; ``spaces`` maps namespaces to their identity as JSON."""

    ledger: Ledger
    spaces: dict[bytes, str]
    lost: int = 0
    """Files that the index knew and that are gone."""
    adopted: int = 0
    """Cuts that the index did not know."""


def recover(
    reader: Reader, content: Content, found: Iterable[Found], index_nbytes: int
) -> Recovered:
    """The books for the files ``found``, given what the index says.

    Neither the sizes nor the contents of held files are taken from the index: sizes come from
    the walk, contents are verified when they are read.
    """
    files = {entry.path: entry for entry in found if entry.path not in index.FILES}
    made = Recovered(Ledger(), dict(content.spaces))
    made.ledger.index_nbytes = index_nbytes
    recovery = _Recovery(reader, files, made)
    recovery.read_unknown(content)
    recovery.take_index(content)
    recovery.adopt()
    recovery.sort_out()
    return made


class _Unknown(NamedTuple):
    """A cut's file that the index does not know."""

    path: str
    name: bytes
    position: int
    complete: bool
    modified_ns: int


@dataclass
class _Recovery:
    reader: Reader
    files: dict[str, Found]
    made: Recovered
    unknown: dict[bytes, _Unknown] = field(default_factory=dict)
    superseded: set[bytes] = field(default_factory=set)
    """Cuts of the index of which another file is taken."""

    def read_unknown(self, content: Content) -> None:
        """Cut files that the index does not know, the best one of each name.

        A crash can undo that a cut's former file was deleted. The one that was published last
        is whole, and newer than what the index may still say.
        """
        rows = {names.cut_path(row.file): row for row in content.cuts}
        for path in list(self.files):
            known = path in rows and self._is_there(path, rows[path].nbytes)
            if known or names.digest_of_path(path, names.CUTS) is None:
                continue
            try:
                manifest = self.reader.manifest(path)
            except IntegrityError as error:
                self._note(path, _BY_REASON.get(error.reason, "malformed"))
                continue
            blocks = map(names.block_path, manifest.files)
            complete = all(block in self.files for block in blocks)
            name, modified_ns = manifest.name, self.files[path].modified_ns
            found = _Unknown(path, name, manifest.position, complete, modified_ns)
            other = self.unknown.get(name)
            if other is None or _better(found, other):
                self.unknown[name] = found
            if other is not None:
                worse = other if self.unknown[name] is found else found
                self._note(worse.path, "duplicate")
        for path, row in rows.items():
            other = self.unknown.get(row.name)
            if other is None or not self._is_there(path, row.nbytes):
                continue
            complete = self._has_blocks(row, {node.id: node for node in content.nodes})
            held = _Unknown(path, row.name, row.position, complete, self.files[path].modified_ns)
            if _better(other, held):
                self.superseded.add(row.name)
                self._note(path, "duplicate")
            else:
                self._note(self.unknown.pop(row.name).path, "duplicate")

    def _has_blocks(self, row: CutRow, nodes: dict[int, NodeRow]) -> bool:
        """Whether the file of every block of an indexed cut is there."""
        number = row.node
        while number != NO_NODE:
            node = nodes[number]
            if node.file and names.block_path(node.file) not in self.files:
                return False
            number = node.parent
        return True

    def take_index(self, content: Content) -> None:
        """Nodes and cuts of the index whose files are there at their size."""
        ledger = self.made.ledger
        nodes: dict[int, Node | None] = {NO_NODE: None}
        whole = {NO_NODE: True}
        for row in content.nodes:
            file = self._block_file(row.file, row.nbytes, trusted=True) if row.file else None
            nodes[row.id] = ledger.add_node(nodes[row.parent], row.block, file, row.id)
            whole[row.id] = whole[row.parent] and (file is None or file.present)
        parents: dict[bytes, bytes] = {}
        for row in content.cuts:
            path = names.cut_path(row.file)
            if row.name in self.superseded:
                continue
            if self._is_there(path, row.nbytes):
                made_at = self.files.pop(path).modified_ns / 1e9
                cut = Cut(
                    row.name, row.file, row.space, nodes[row.node], row.position, row.nbytes,
                    row.role, row.used, bool(row.mixed), made_at,
                )  # fmt: skip
                cut.withheld = "" if whole[row.node] else "incomplete"
                ledger.add_cut(cut, None)
                parents[row.name] = row.parent
            else:
                self.made.lost += path not in self.files
        for name, parent in parents.items():
            ledger.set_parent(ledger.cuts[name], ledger.cuts.get(parent))
        ledger.drop_unused_nodes()

    def adopt(self) -> None:
        """Cut files that the index does not know, shortest first, so that each finds its parent."""
        adopted: list[tuple[int, bytes]] = []
        for unknown in sorted(self.unknown.values(), key=lambda each: each.position):
            try:
                # Read again: with all manifests at once, memory would grow with the directory.
                manifest = self.reader.manifest(unknown.path)
            except IntegrityError as error:
                self._note(unknown.path, _BY_REASON.get(error.reason, "malformed"))
                continue
            del self.files[unknown.path]
            self._adopt(manifest, unknown.path, unknown.modified_ns / 1e9)
            adopted.append((unknown.modified_ns, manifest.name))
        for _modified, name in sorted(adopted):
            self.made.ledger.touch(self.made.ledger.cuts[name])
        self.made.adopted = len(adopted)

    def _adopt(self, manifest: Manifest, path: str, made_at: float) -> None:
        ledger = self.made.ledger
        sizes = sum(tensor.nbytes for tensor in block_tensors(manifest.layout).values())
        node: Node | None = None
        for number, block in enumerate(manifest.blocks):
            file = None
            if manifest.files:
                header = block_header(
                    manifest.layout, manifest.space, block, self.reader.key_number
                )
                nbytes = len(header) + sizes
                file = self._block_file(manifest.files[number], nbytes, trusted=False)
            digest = file.digest if file else b""
            node = ledger.node(node, block, digest) or ledger.add_node(node, block, file)
        digest = names.digest_of_path(path, names.CUTS)
        assert digest is not None
        cut = Cut(
            manifest.name, digest, manifest.space, node, manifest.position, manifest.nbytes,
            manifest.role, mixed=mixed(manifest.history), made_at=made_at,
        )  # fmt: skip
        ancestors = ledger.ancestors(manifest.space, manifest.blocks, manifest.tokens)
        ledger.add_cut(cut, ancestors[-1] if ancestors else None)
        if not ledger.readable(cut):
            cut.withheld = "incomplete"
        identity = msgspec.json.encode(manifest.identity).decode("ascii")
        self.made.spaces.setdefault(manifest.space, identity)

    def sort_out(self) -> None:
        """Everything else, by kind."""
        for path in list(self.files):
            if path in (names.CACHE_TAG, "lock"):
                self._note(path, "own")
            elif names.is_in(path, names.TEMP):
                self._note(path, "unfinished")
            elif names.is_in(path, names.QUARANTINE):
                self._note(path, "quarantined")
            elif (digest := names.digest_of_path(path, names.BLOCKS)) is not None:
                self._sort_block(path, digest)
            else:
                self._note(path, "unknown")

    def _sort_block(self, path: str, digest: bytes) -> None:
        try:
            self.reader.check_block(path)
        except IntegrityError as error:
            self._note(path, _BY_REASON.get(error.reason, "malformed"))
            return
        entry = self.files.pop(path)
        known = self.made.ledger.blocks.get(digest)
        if known:
            # Its length is the one its header asks for: the index was wrong.
            self.made.ledger.resize_block(known, entry.nbytes)
            self.made.ledger.complete_users()
            return
        self.made.ledger.add_block(BlockFile(digest, entry.nbytes, trusted=False))

    def _block_file(self, digest: bytes, nbytes: int, *, trusted: bool) -> BlockFile:
        ledger = self.made.ledger
        known = ledger.blocks.get(digest)
        if known:
            return known
        path = names.block_path(digest)
        there = self._is_there(path, nbytes)
        if there:
            del self.files[path]
        else:
            self.made.lost += path not in self.files
        file = BlockFile(digest, nbytes, present=there, trusted=trusted)
        ledger.add_block(file)
        return file

    def _is_there(self, path: str, nbytes: int) -> bool:
        entry = self.files.get(path)
        return entry is not None and entry.nbytes == nbytes

    def _note(self, path: str, kind: Kind) -> None:
        entry = self.files.pop(path)
        self.made.ledger.other[path] = Other(kind, entry.nbytes)


def _better(one: _Unknown, other: _Unknown) -> bool:
    """Whether ``one`` is whole where ``other`` is not, or as whole and newer."""
    return (one.complete, one.modified_ns) > (other.complete, other.modified_ns)


def difference(content: Content, made: Recovered) -> list[Change]:
    """What the index has to be told so that it says what the books say, in this order."""
    ledger = made.ledger
    nodes = {node.number: node for node in ledger.nodes()}
    old_nodes = {row.id for row in content.nodes}
    old_cuts = {row.name: row for row in content.cuts}
    changes = [
        Change(space=(space, identity))
        for space, identity in made.spaces.items()
        if space not in content.spaces
    ]
    gone = [
        name
        for name, row in old_cuts.items()
        if name not in ledger.cuts or ledger.cuts[name].file != row.file
    ]
    changes.append(Change(dropped_cuts=gone))
    changes.append(Change(dropped_nodes=sorted(old_nodes - nodes.keys(), reverse=True)))
    fresh = sorted(nodes.keys() - old_nodes)
    changes.append(Change(nodes=[node_row(nodes[number]) for number in fresh]))
    kept = old_cuts.keys() - set(gone)
    added = [cut_row(cut) for name, cut in ledger.cuts.items() if name not in kept]
    changes.append(Change(cuts=added))
    return [change for change in changes if change.rows]


def node_row(node: Node) -> NodeRow:
    """A node as the index keeps it."""
    parent = node.parent.number if node.parent else NO_NODE
    if node.file is None:
        return NodeRow(node.number, parent, node.block, b"", 0)
    return NodeRow(node.number, parent, node.block, node.file.digest, node.file.nbytes)


def cut_row(cut: Cut) -> CutRow:
    """A cut as the index keeps it."""
    node = cut.node.number if cut.node else NO_NODE
    parent = cut.parent.name if cut.parent else b""
    return CutRow(
        cut.name, cut.file, cut.space, node, cut.position, cut.nbytes, cut.role, parent, cut.used,
        int(cut.mixed),
    )  # fmt: skip
