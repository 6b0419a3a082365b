"""What the durable tier holds, in memory and pure: cuts, the blocks they share, bytes, recency.

Blocks form a trie of *nodes*: a node is a block's name together with the digest of its file
and with the node before it, so that two conversations whose tokens agree but whose rows were
made otherwise share nothing by mistake. A cut ends at a node. All sizes are whole files.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from mac_decoder.store.manifest import Role
from protocol.blocks import BLOCK, cut_digest

MOST_VISITED: Final = 4096
"""Blocks after another one that are looked at side by side for the nearest cut."""

Withheld = Literal["", "invalid", "unreadable", "incomplete"]
"""Why a cut is not served: its file, the medium, or a block of it."""


@dataclass(eq=False, slots=True)
class BlockFile:
    """A block's file.

    ``users`` counts the nodes that need it, and publications in progress; ``trusted`` is false
    until somebody digested its bytes, or wrote them and committed.
    """

    digest: bytes
    nbytes: int
    users: int = 0
    present: bool = True
    trusted: bool = True


@dataclass(eq=False, slots=True)
class Node:
    """A block in its chain. ``users`` counts the nodes after it and the cuts that end here.

    ``chain_nbytes`` are the bytes of its file and of all before it.
    """

    number: int
    parent: Node | None
    block: bytes
    file: BlockFile | None
    depth: int
    chain_nbytes: int
    users: int = 0
    after: set[Node] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Cut:
    """A held cut. ``file`` is its file's digest, ``parent`` the deepest held cut it extends.

    ``mixed``: it has rows of more than one recipe. ``used`` orders uses across restarts, and
    ``left`` is that of the last time that somebody published it again, 0 if nobody did;
    ``made_at`` and ``used_at`` are readings of a clock, 0 for a use before this start.
    """

    name: bytes
    file: bytes
    space: bytes
    node: Node | None
    position: int
    nbytes: int
    role: Role
    used: int = 0
    mixed: bool = False
    made_at: float = 0.0
    used_at: float = 0.0
    parent: Cut | None = None
    children: set[Cut] = field(default_factory=set)
    pins: int = 0
    withheld: Withheld = ""
    left: int = 0

    def nodes(self) -> Iterator[Node]:
        """The nodes of its whole blocks, the last one first."""
        node = self.node
        while node is not None:
            yield node
            node = node.parent


Kind = Literal[
    "stale_format",  # written by another version
    "foreign_key",  # made under another store key
    "malformed",  # not what any version wrote: damage
    "unreadable",  # the medium gave an error
    "duplicate",  # a second file of a held cut
    "quarantined",
    "unfinished",  # a temporary file
    "own",  # lock and tag
    "unknown",  # not ours
]
"""What a file is that is neither a held cut nor a block."""


class Tally(NamedTuple):
    """A number of files and their bytes."""

    files: int = 0
    nbytes: int = 0


class Other(NamedTuple):
    """A file that is neither a held cut nor a block."""

    kind: Kind
    nbytes: int


class Version(NamedTuple):
    """How often cuts came and went, by namespace, and files of blocks."""

    cuts: Mapping[bytes, int]
    files: int


@dataclass(slots=True)
class Removed:
    """What a removal lets go: rows for the index, and the block files nobody needs any more."""

    nodes: list[Node] = field(default_factory=list)
    files: list[BlockFile] = field(default_factory=list)


class Ledger:
    """The books. Not thread-safe: the store's lock guards it."""

    def __init__(self) -> None:
        self.cuts: OrderedDict[bytes, Cut] = OrderedDict()
        """By name, least recently used first."""
        self.blocks: dict[bytes, BlockFile] = {}
        self.other: dict[str, Other] = {}
        """By path: what is neither a held cut nor a block."""
        self.index_nbytes = 0
        self.reserved = 0
        self._nodes: dict[tuple[int, bytes, bytes], Node] = {}
        self._named: dict[bytes, list[Node]] = {}
        self._ends: dict[tuple[bytes, bytes], list[Cut]] = {}
        self._next_node = 1
        self._clock = 0
        self._data_nbytes = 0
        self._changes: Counter[bytes] = Counter()
        self._lost_or_back = 0

    @property
    def on_disk(self) -> int:
        """Bytes of all files, as a walk counts them."""
        return (
            self._data_nbytes
            + sum(other.nbytes for other in self.other.values())
            + self.index_nbytes
        )

    def version(self, without: Collection[bytes]) -> Version:
        """Differs from an earlier one where a cut of other namespaces than these came or went
        since, or a block's file of whatever cut.
        """
        changes = {space: n for space, n in self._changes.items() if space not in without}
        return Version(changes, self._lost_or_back)

    def node(self, parent: Node | None, block: bytes, digest: bytes) -> Node | None:
        """The node of that block after ``parent``, if there is one."""
        return self._nodes.get((parent.number if parent else 0, block, digest))

    def add_node(
        self, parent: Node | None, block: bytes, file: BlockFile | None, number: int = 0
    ) -> Node:
        """A new node; ``number`` is its number in the index, 0 for the next one."""
        number = number or self._next_node
        self._next_node = max(self._next_node, number + 1)
        depth, before = (parent.depth, parent.chain_nbytes) if parent else (0, 0)
        nbytes = file.nbytes if file else 0
        node = Node(number, parent, block, file, depth + 1, before + nbytes)
        self._nodes[_key(node)] = node
        self._named.setdefault(block, []).append(node)
        if parent:
            parent.users += 1
            parent.after.add(node)
        if file:
            file.users += 1
        return node

    def _forget(self, node: Node) -> None:
        del self._nodes[_key(node)]
        named = self._named[node.block]
        named.remove(node)
        if not named:
            del self._named[node.block]
        if node.parent:
            node.parent.after.discard(node)

    def shared(self, blocks: Sequence[bytes]) -> int:
        """How many of a prompt's ``blocks`` are held, from the first on, whatever their rows."""
        return bisect_left(range(len(blocks)), True, key=lambda at: blocks[at] not in self._named)

    def nearest(self, space: bytes, block: bytes) -> Cut | None:
        """A served cut at or past ``block``.

        One that is the fewest blocks away, unless more than ``MOST_VISITED`` blocks are nearer.
        """
        ahead = deque(self._named.get(block, ()))
        visited = 0
        while ahead:
            # Many long branches are not walked side by side to their ends: one of them is.
            node = ahead.popleft() if visited < MOST_VISITED else ahead.pop()
            visited += 1
            for cut in self.ending_at(space, node.block):
                if cut.node is node and not cut.withheld:
                    return cut
            ahead.extend(node.after)
        return None

    def add_block(self, file: BlockFile) -> None:
        """A block's file that is on the disk now."""
        assert file.digest not in self.blocks
        self.blocks[file.digest] = file
        if file.present:
            self._data_nbytes += file.nbytes

    def resize_block(self, file: BlockFile, nbytes: int) -> None:
        """The file is there, with another size than the books had."""
        self.set_present(file, False)
        file.trusted = False
        if file.nbytes != nbytes:
            file.nbytes = nbytes
            for node in self.nodes():
                before = node.parent.chain_nbytes if node.parent else 0
                node.chain_nbytes = before + (node.file.nbytes if node.file else 0)
        self.set_present(file, True)

    def set_present(self, file: BlockFile, present: bool) -> None:
        """The file appeared, or is gone."""
        if file.present != present:
            file.present = present
            self._lost_or_back += 1
            self._data_nbytes += file.nbytes if present else -file.nbytes

    def add_cut(self, cut: Cut, parent: Cut | None) -> None:
        """A cut whose file is on the disk and whose commit has happened."""
        assert cut.name not in self.cuts
        self.cuts[cut.name] = cut
        self._changes[cut.space] += 1
        self._data_nbytes += cut.nbytes
        cut.parent = parent
        if parent:
            parent.children.add(cut)
        if cut.node:
            cut.node.users += 1
        self._ends.setdefault(_end(cut), []).append(cut)
        if not cut.used:
            self.touch(cut)
        self._clock = max(self._clock, cut.used)

    def set_parent(self, cut: Cut, parent: Cut | None) -> None:
        """Say late which cut ``cut`` extends; it must be a shorter one."""
        if parent and parent.position < cut.position and cut.parent is None:
            cut.parent = parent
            parent.children.add(cut)

    def reparent(self, cut: Cut, parent: Cut) -> None:
        """``cut`` extends ``parent`` and nothing deeper."""
        if cut.parent:
            cut.parent.children.discard(cut)
        cut.parent = parent
        parent.children.add(cut)

    def next_numbers(self, count: int) -> range:
        """Numbers for new nodes; they stay free until nodes are added."""
        return range(self._next_node, self._next_node + count)

    def next_use(self) -> int:
        """What ``used`` of the most recently used cut will be."""
        return self._clock + 1

    def nodes(self) -> list[Node]:
        """All nodes, each after the one before it in its chain."""
        return sorted(self._nodes.values(), key=lambda node: node.number)

    def drop_unused_nodes(self) -> None:
        """Forget nodes that lead to no cut; their files stay, without users."""
        for node in reversed(self.nodes()):
            if node.users:
                continue
            self._forget(node)
            if node.parent:
                node.parent.users -= 1
            if node.file:
                node.file.users -= 1
                if not node.file.users and not node.file.present:
                    self.drop_block(node.file)

    def touch(self, cut: Cut) -> None:
        """``cut`` is the most recently used one."""
        self._clock += 1
        cut.used = self._clock
        self.cuts.move_to_end(cut.name)

    def ending_at(self, space: bytes, block: bytes) -> Sequence[Cut]:
        """Cuts whose last whole block is ``block`` (empty: none), whatever its rows."""
        return self._ends.get((space, block), ())

    def ancestors(
        self, space: bytes, blocks: Sequence[bytes], tokens: NDArray[np.uint32]
    ) -> list[Cut]:
        """Held cuts whose tokens are the beginning of ``tokens``, without all of them.

        The shortest first. ``blocks`` are the names of the whole blocks of ``tokens``.
        """
        found = self.prefixes(space, blocks, tokens)
        return [cut for cut in found if cut.position < len(tokens)]

    def prefixes(
        self, space: bytes, blocks: Sequence[bytes], tokens: NDArray[np.uint32]
    ) -> list[Cut]:
        """Held cuts whose tokens are the beginning of ``tokens``, or all; the shortest first."""
        found: list[Cut] = []
        for count in range(len(blocks) + 1):
            end = blocks[count - 1] if count else b""
            # Many conversations may end after one block, in few different lengths.
            for position in {cut.position for cut in self.ending_at(space, end)}:
                tail = tokens[count * BLOCK : position]
                if len(tail) != position - count * BLOCK:
                    continue
                cut = self.cuts.get(cut_digest(space, end, tail, position))
                if cut is not None:
                    found.append(cut)
        return sorted(found, key=lambda cut: cut.position)

    def remove_cut(self, cut: Cut) -> Removed:
        """Take ``cut`` out; its children become its parent's.

        Files in the result have left the books' bytes only once ``drop_block`` is called.
        """
        del self.cuts[cut.name]
        self._changes[cut.space] += 1
        self._data_nbytes -= cut.nbytes
        ends = self._ends[_end(cut)]
        ends.remove(cut)
        if not ends:
            del self._ends[_end(cut)]
        for child in cut.children:
            child.parent = cut.parent
        if cut.parent:
            cut.parent.children.remove(cut)
            cut.parent.children |= cut.children
        return self.release(cut.node)

    def hold(self, node: Node | None) -> None:
        """Keep ``node`` and all before it, until :meth:`release`."""
        if node:
            node.users += 1

    def release(self, node: Node | None) -> Removed:
        """One user of ``node`` less; nodes without users go, from the end of the chain."""
        removed = Removed()
        while node:
            node.users -= 1
            if node.users:
                break
            self._forget(node)
            removed.nodes.append(node)
            if node.file:
                node.file.users -= 1
                if not node.file.users:
                    removed.files.append(node.file)
            node = node.parent
        return removed

    def drop_block(self, file: BlockFile) -> None:
        """A block's file without users is gone from the disk."""
        assert not file.users
        self.set_present(file, False)
        del self.blocks[file.digest]

    def readable(self, cut: Cut) -> bool:
        """Whether every block of ``cut`` is there."""
        return all(node.file is None or node.file.present for node in cut.nodes())

    def withhold_users(self, file: BlockFile) -> list[Cut]:
        """Mark every cut that needs ``file`` as incomplete; those that were served until now."""
        found = []
        for cut in self.cuts.values():
            if not cut.withheld and any(node.file is file for node in cut.nodes()):
                cut.withheld = "incomplete"
                found.append(cut)
        return found

    def complete_users(self) -> None:
        """Serve those incomplete cuts again whose blocks are all back."""
        for cut in self.cuts.values():
            if cut.withheld == "incomplete" and self.readable(cut):
                cut.withheld = ""

    def idle_blocks(self) -> list[BlockFile]:
        """Block files that no held cut needs."""
        return [file for file in self.blocks.values() if not file.users and file.present]

    def tallies(self) -> dict[str, Tally]:
        """Files and bytes of each kind of other files, and of ``orphan`` blocks."""
        totals: dict[str, Tally] = dict.fromkeys((*get_args(Kind), "orphan"), Tally())
        for kind, nbytes in self.other.values():
            totals[kind] = Tally(totals[kind].files + 1, totals[kind].nbytes + nbytes)
        idle = self.idle_blocks()
        totals["orphan"] = Tally(len(idle), sum(file.nbytes for file in idle))
        return totals

    def referenced(self) -> int:
        """Bytes summed per conversation: shared blocks and cuts count in each of them.

        A conversation is a cut that no other held cut extends.
        """
        total = 0
        for cut in self.cuts.values():
            if cut.children:
                continue
            total += cut.node.chain_nbytes if cut.node else 0
            at: Cut | None = cut
            while at is not None:
                total += at.nbytes
                at = at.parent
        return total


class Victims:
    """A plan of deletions: what goes, how many files that are, and the bytes that they free.

    Nothing is taken out of the books while a plan is made. ``since``: a cut with this ``used``
    or a later one was used after that.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.other: list[str] = []
        self.blocks: list[BlockFile] = []
        self.cuts: list[Cut] = []
        self.files = 0
        self.freed = 0
        self.since = ledger.next_use()
        self._ledger = ledger
        self._node_users: dict[int, int] = {}
        self._file_users: dict[bytes, int] = {}

    def add_other(self, path: str) -> None:
        """A file that is neither a held cut nor a block goes."""
        self.other.append(path)
        self._count(self._ledger.other[path].nbytes)

    def add_block(self, file: BlockFile) -> None:
        """A block file without users goes."""
        self.blocks.append(file)
        self._count(file.nbytes)

    def add_cut(self, cut: Cut) -> None:
        """A cut goes, with the blocks that no cut needs that stays."""
        self.cuts.append(cut)
        self._count(cut.nbytes)
        node = cut.node
        while node is not None:
            left = self._node_users.get(node.number, node.users) - 1
            self._node_users[node.number] = left
            if left:
                break
            file = node.file
            if file:
                users = self._file_users.get(file.digest, file.users) - 1
                self._file_users[file.digest] = users
                if not users and file.present:
                    self._count(file.nbytes)
            node = node.parent

    def _count(self, nbytes: int) -> None:
        self.files += 1
        self.freed += nbytes


NO_NODE: Final = 0
"""The number that stands for no node."""


def _key(node: Node) -> tuple[int, bytes, bytes]:
    digest = node.file.digest if node.file else b""
    return (node.parent.number if node.parent else NO_NODE, node.block, digest)


def _end(cut: Cut) -> tuple[bytes, bytes]:
    return (cut.space, cut.node.block if cut.node else b"")
