"""The books: what is shared, what a deletion frees, who extends whom."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from mac_decoder.store.ledger import BlockFile, Cut, Ledger, Node, Victims
from protocol.blocks import cut_digest

SPACE = bytes(32)
paths = st.lists(st.lists(st.sampled_from("abc"), max_size=5), min_size=1, max_size=8)


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def add(ledger: Ledger, path: list[str], number: int) -> Cut:
    """A cut whose blocks are the letters of ``path``; a file is 10 bytes and its depth."""
    node: Node | None = None
    for depth in range(1, len(path) + 1):
        name = digest("".join(path[:depth]))
        file = ledger.blocks.get(name)
        if file is None:
            file = BlockFile(name, 10 + depth)
            ledger.add_block(file)
        node = ledger.node(node, name, name) or ledger.add_node(node, name, file)
    cut = Cut(digest(f"cut {number}"), b"", SPACE, node, len(path) + 1, 100 + number, "turn")
    ledger.add_cut(cut, None)
    return cut


def bytes_of(ledger: Ledger) -> int:
    """Counted anew."""
    files = {node.file for cut in ledger.cuts.values() for node in cut.nodes()}
    return sum(cut.nbytes for cut in ledger.cuts.values()) + sum(f.nbytes for f in files if f)


@settings(max_examples=60, deadline=None)
@given(paths, st.randoms(use_true_random=False))
def test_a_plan_frees_what_it_says_and_sharing_is_counted_once(
    paths: list[list[str]], dice: object
) -> None:
    ledger = Ledger()
    cuts = [add(ledger, path, number) for number, path in enumerate(paths)]
    assert ledger.on_disk == bytes_of(ledger)
    dice.shuffle(cuts)  # type: ignore[attr-defined]
    victims = cuts[: len(cuts) // 2 + 1]
    plan = Victims(ledger)
    for cut in victims:
        plan.add_cut(cut)
    before, files = ledger.on_disk, len(ledger.blocks) + len(ledger.cuts)
    for cut in victims:
        for file in ledger.remove_cut(cut).files:
            ledger.drop_block(file)
    assert before - ledger.on_disk == plan.freed
    assert files - len(ledger.blocks) - len(ledger.cuts) == plan.files
    assert ledger.on_disk == bytes_of(ledger)
    for cut in cuts[len(victims) :]:
        for file in ledger.remove_cut(cut).files:
            ledger.drop_block(file)
    assert (ledger.on_disk, ledger.nodes(), ledger.blocks) == (0, [], {})


@given(paths)
@settings(max_examples=60, deadline=None)
def test_shared_and_nearest(paths: list[list[str]]) -> None:
    ledger = Ledger()
    cuts = [add(ledger, path, number) for number, path in enumerate(paths)]
    prompt = ["a", "b", "c", "a", "b"]
    links = [digest("".join(prompt[:depth])) for depth in range(1, 6)]
    shared = max(
        next((i for i, (x, y) in enumerate(zip(path, prompt, strict=False)) if x != y),
             min(len(path), 5))
        for path in paths
    )  # fmt: skip
    assert ledger.shared(links) == shared
    if shared:
        below = [cut for cut in cuts if links[shared - 1] in [n.block for n in cut.nodes()]]
        found = ledger.nearest(SPACE, links[shared - 1])
        assert found in below
        assert found
        assert len(list(found.nodes())) == min(len(list(cut.nodes())) for cut in below)


def test_many_long_branches_are_not_all_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    cuts = [add(ledger, ["s", *[f"{branch:02}"] * 40], branch) for branch in range(30)]
    looked: list[bytes] = []
    ending_at = ledger.ending_at
    monkeypatch.setattr(
        ledger, "ending_at", lambda space, block: looked.append(block) or ending_at(space, block)
    )
    assert ledger.nearest(SPACE, digest("s")) in cuts
    assert len(looked) > 30 * 39
    looked.clear()
    monkeypatch.setattr("mac_decoder.store.ledger.MOST_VISITED", 100)
    assert ledger.nearest(SPACE, digest("s")) in cuts
    assert len(looked) <= 100 + 40


def test_conversations_of_one_length_cost_one_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    made: list[int] = []

    def counted(space: bytes, parent: bytes, tail: ArrayLike, position: int) -> bytes:
        made.append(position)
        return cut_digest(space, parent, tail, position)

    tails = np.arange(100, dtype=np.uint32) + 256 * np.arange(50, dtype=np.uint32)[:, None]
    for tail in tails:
        name = cut_digest(SPACE, b"", tail, len(tail))
        ledger.add_cut(Cut(name, name, SPACE, None, len(tail), 1, "turn"), None)
    monkeypatch.setattr("mac_decoder.store.ledger.cut_digest", counted)
    prompt = np.concatenate([tails[7], tails[8]])
    found = ledger.prefixes(SPACE, [], prompt)
    assert [cut.name for cut in found] == [cut_digest(SPACE, b"", tails[7], 100)]
    assert made == [100]
    assert ledger.prefixes(SPACE, [], tails[7][:99]) == []


def test_parents_pass_their_children_on() -> None:
    ledger = Ledger()
    cuts = [add(ledger, ["a"] * depth, depth) for depth in range(1, 4)]
    for above, below in itertools.pairwise(cuts):
        ledger.set_parent(below, above)
    ledger.remove_cut(cuts[1])
    assert cuts[2].parent is cuts[0]
    assert cuts[0].children == {cuts[2]}
    ledger.set_parent(cuts[0], cuts[2])
    assert cuts[0].parent is None  # a longer one is no parent


def test_a_missing_block_withholds_what_needs_it() -> None:
    ledger = Ledger()
    short, long, other = (add(ledger, list(path), i) for i, path in enumerate(("a", "ab", "c")))
    file = ledger.blocks[digest("ab")]
    assert ledger.withhold_users(file) == [long]
    ledger.set_present(file, False)
    ledger.complete_users()
    assert [cut.withheld for cut in (short, long, other)] == ["", "incomplete", ""]
    assert ledger.nearest(SPACE, digest("ab")) is None
    ledger.set_present(file, True)
    ledger.complete_users()
    assert long.withheld == ""


def test_held_nodes_stay() -> None:
    ledger = Ledger()
    cut = add(ledger, ["a", "b"], 1)
    node = cut.node
    ledger.hold(node)
    assert ledger.remove_cut(cut).files == []
    removed = ledger.release(node)
    assert [entry.depth for entry in removed.nodes] == [2, 1]
    assert len(removed.files) == 2
