"""What is beside one's own caches: right, counted while others use the books, and only once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mac_decoder.store import catalogue
from mac_decoder.store.catalogue import Foreign
from mac_decoder.store.ledger import Cut, Victims
from mac_decoder.store.store import Store
from tests.mac_decoder.reuse.made import FULL
from tests.mac_decoder.store.made import (
    KEY,
    OTHER_IDENTITY,
    OTHER_SPACE,
    SPACE,
    conversation,
    made,
    publish,
)


def publish_foreign(store: Store, seed: int) -> None:
    cut, blocks = made(FULL, conversation(700, seed, 512), space=OTHER_SPACE)
    store.publish(OTHER_SPACE, OTHER_IDENTITY, cut, blocks)


class Watched(Victims):
    """Counts the cuts that are counted."""

    counted = 0

    def add_cut(self, cut: Cut) -> None:
        Watched.counted += 1
        super().add_cut(cut)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with Store.open(tmp_path, KEY, 1 << 28, 0) as opened:
        publish(opened, FULL, conversation(700, 1))
        for seed in (2, 3):
            publish_foreign(opened, seed)
        Watched.counted = 0
        monkeypatch.setattr(catalogue, "Victims", Watched)
        yield opened


def would_free(store: Store) -> Foreign:
    """By what a deletion says."""
    tally = store.forget([cut.name for cut in store.catalogue.cuts({OTHER_SPACE})], dry_run=True)
    return Foreign(1, len(store.catalogue.cuts({OTHER_SPACE})), tally.nbytes)


def test_others_come_to_the_books_between_two_cuts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds: list[int] = []

    class Lock:
        """The books' lock, which counts the cuts of each holding."""

        def __init__(self) -> None:
            self.lock = store._held.lock

        def __enter__(self) -> None:
            self.lock.acquire()
            holds.append(Watched.counted)

        def __exit__(self, *error: object) -> None:
            holds[-1] = Watched.counted - holds[-1]
            self.lock.release()

    monkeypatch.setattr(store._held, "lock", Lock())
    assert store.catalogue.foreign({SPACE}).cuts == 2
    assert Watched.counted == 2
    assert max(holds) == 1


def test_what_others_have_is_counted_once_until_it_changes(store: Store) -> None:
    first = store.catalogue.foreign({SPACE})
    assert first == would_free(store)
    assert Watched.counted == 2
    publish(store, FULL, conversation(900, 4))
    assert store.catalogue.foreign({SPACE}) == first
    assert Watched.counted == 2, "what is one's own does not matter"
    publish_foreign(store, 5)
    more = store.catalogue.foreign({SPACE})
    assert more == would_free(store)
    assert (more.cuts, Watched.counted) == (3, 5)
    store.forget([store.catalogue.cuts({OTHER_SPACE})[0].name])
    less = store.catalogue.foreign({SPACE})
    assert less == would_free(store)
    assert less.cuts == 2
    assert less.nbytes < more.nbytes
    assert store.catalogue.foreign({SPACE, OTHER_SPACE}) == (0, 0, 0)


def test_what_changes_during_a_count_is_not_remembered_as_it_was(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    came = []

    class Meanwhile(Watched):
        def add_cut(self, cut: Cut) -> None:
            super().add_cut(cut)
            if not came:
                came.append(cut)
                # What is deleted while another thread counts.
                store._sweeper.delete_cuts([cut], "forget")

    monkeypatch.setattr(catalogue, "Victims", Meanwhile)
    found = store.catalogue.foreign({SPACE})
    monkeypatch.undo()
    assert found == would_free(store)
    assert found.cuts == 1
