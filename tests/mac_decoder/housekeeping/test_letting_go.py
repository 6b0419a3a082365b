"""Letting go of cuts while others hold on to them: nobody is told what is not so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mac_decoder.engine.sequences import Sequences
from mac_decoder.housekeeping.house import Housekeeping
from mac_decoder.keeper import Keeper
from mac_decoder.reuse.facts import NOTHING
from mac_decoder.reuse.ladder import served_depth
from mac_decoder.store import sweep
from mac_decoder.store.ledger import Tally
from mac_decoder.store.store import Store
from mac_decoder.store.sweep import Pace
from mac_decoder.tiers.keeping import Keeping
from tests.mac_decoder.engine.drive import ask, prompt, running, told
from tests.mac_decoder.engine.test_reuse import keeper_for
from tests.mac_decoder.housekeeping.test_house import Gate, Gated, kept_in, walked
from tests.mac_decoder.reuse.made import FULL
from tests.mac_decoder.store.made import conversation
from tests.mac_decoder.tiers.brought import Brought, serves


def test_a_step_whose_publication_is_given_up_still_serves(tmp_path: Path) -> None:
    """It waited for a cut that is forgotten; nothing was found to be wrong with it."""
    disk, gate = Gated(), Gate()
    keeper = kept_in(tmp_path, disk=disk)
    try:
        disk.before["create"] = gate
        Brought(keeper, FULL, conversation(100, 9)).cut(100)
        assert gate.reached.wait(20)
        one = Brought(keeper, FULL, conversation(700, 1))
        one.cut(300, "step")
        one.cut(700)
        assert keeper._waiting.drain(20)
        (leaf,) = [job.name for job in keeper.unpublished() if job.cut.position == 700]
        forgotten = keeper.forget({leaf}).result(20)
        assert (forgotten.cuts, forgotten.publications) == (1, 2)
        gate.go.set()
        assert keeper.drain(20)
        assert serves(keeper, one, 300, "resident")
        assert not serves(keeper, one, 700, "resident")
        assert not serves(keeper, one, 300, "durable")
        publications = keeper.resident.stats().publications
        assert publications == {"published": 1, "out_of_space": 1}
    finally:
        gate.go.set()
        keeper.close()


def test_what_is_deleted_does_not_stay_in_memory(tmp_path: Path) -> None:
    """Manifests have tokens, and some are remembered."""
    keeper = kept_in(tmp_path)
    store = keeper.store
    assert store is not None
    try:
        one = Brought(keeper, FULL, conversation(300, 1))
        one.settled(300)
        assert serves(keeper, one, 300, "durable")
        assert store._lookup._kept
        store.clear(dry_run=True)
        assert store._lookup._kept
        store.clear()
        assert not store._lookup._kept
    finally:
        keeper.close()


def cleared(store: Store, pace: Pace) -> Tally:
    return store.clear(pace=pace)


def pruned(store: Store, pace: Pace) -> Tally:
    return store.prune(to_bytes=0, pace=pace)


def forgotten(store: Store, pace: Pace) -> Tally:
    return store.forget(list(store._held.ledger.cuts), pace=pace)


def deleted_between(
    keeper: Keeper, deletion: Callable[[Store, Pace], Tally], meanwhile: Callable[[], object]
) -> None:
    """Delete everything; ``meanwhile`` comes between the first cut and the next one."""
    came = []

    def told(done: int, total: int) -> None:
        if not came:
            came.append(meanwhile())

    assert keeper.store is not None
    # A minute: what stays is not waited for.
    assert deletion(keeper.store, Pace(told, lambda: False, 60)).files
    assert came


@pytest.mark.parametrize("deletion", [cleared, pruned, forgotten])
def test_what_is_left_again_during_a_deletion_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deletion: Callable[[Store, Pace], Tally]
) -> None:
    """The disk still has that very cut when it is published once more."""
    monkeypatch.setattr(sweep, "_SLICE_S", 0.0)
    keeper = kept_in(tmp_path)
    try:
        first, second = (Brought(keeper, FULL, conversation(700, seed)) for seed in (1, 2))
        first.settled(700)
        second.settled(700)
        again = Brought(keeper, FULL, second.tokens)
        deleted_between(keeper, deletion, partial(again.settled, 700))
        assert serves(keeper, again, 700, "durable")
        assert not serves(keeper, first, 700, "durable")
    finally:
        keeper.close()


@pytest.mark.parametrize(("deletion", "stays"), [(cleared, False), (pruned, True)])
def test_what_is_read_during_a_deletion_stays_where_recency_decides(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    deletion: Callable[[Store, Pace], Tally],
    stays: bool,
) -> None:
    monkeypatch.setattr(sweep, "_SLICE_S", 0.0)
    keeper = kept_in(tmp_path)
    try:
        first, second = (Brought(keeper, FULL, conversation(700, seed)) for seed in (1, 2))
        first.settled(700)
        second.settled(700)
        deleted_between(keeper, deletion, lambda: serves(keeper, second, 700, "durable"))
        assert serves(keeper, second, 700, "durable") == stays
    finally:
        keeper.close()


def test_a_deletion_right_after_a_publication_is_not_heard_of_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread deletes the cut in the moment in which the disk is done with it."""
    keeper = kept_in(tmp_path)
    store, publish = keeper.store, Store.publish
    assert store is not None

    def then_gone(*arguments: Any, **named: Any) -> Any:
        outcome = publish(*arguments, **named)
        other = threading.Thread(target=partial(store.prune, to_bytes=0))
        other.start()
        other.join(20)
        return outcome

    try:
        monkeypatch.setattr(Store, "publish", then_gone)
        one = Brought(keeper, FULL, conversation(700, 1))
        one.settled(700)
        assert walked(tmp_path) == {}
        assert keeper.resident.stats().publications == {"out_of_space": 1}
        assert serves(keeper, one, 700, "resident")
        (offer,) = keeper.look((*one.tokens, 1)).result(20).resident.offers
        assert served_depth(offer, NOTHING) == 700
    finally:
        keeper.close()


def test_an_outcome_is_told_before_anybody_else_may_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion that waits for the disk's lock gets it only after that."""
    tell, was_free = Keeping._told, list[bool]()

    def look() -> None:
        assert keeper.store is not None
        writing = keeper.store._held.writing
        was_free.append(writing.acquire(blocking=False))
        if was_free[-1]:
            writing.release()

    def told(*arguments: Any) -> None:
        other = threading.Thread(target=look)
        other.start()
        other.join(20)
        tell(*arguments)

    monkeypatch.setattr(Keeping, "_told", told)
    keeper = kept_in(tmp_path)
    try:
        Brought(keeper, FULL, conversation(700, 1)).settled(700)
        assert was_free == [False]
    finally:
        keeper.close()


def test_what_memory_lets_go_of_is_free_once_nobody_uses_it() -> None:
    keeper = kept_in(None)
    try:
        for seed in (1, 2):
            Brought(keeper, FULL, conversation(700, seed, 512)).settled(700)
        resident = keeper.resident
        one, other = resident.cuts()
        weight = resident.weigh([one.name, other.name], [one.name])
        assert weight.referenced == resident.stats().used_bytes
        assert 0 < weight.own < weight.referenced // 2
        pinned = resident.pin(one.name)
        assert pinned is not None
        assert resident.forget({one.name}) == 1
        assert resident.pin(one.name) is None
        assert [cut.name for cut in resident.cuts()] == [other.name]
        # Two more hold on to it: the sequence, and this test.
        assert resident.stats().used_bytes == weight.referenced
        pinned.release()
        assert resident.stats().used_bytes == weight.referenced
        assert resident.forget() == 1
        assert resident.forget() == 0
    finally:
        keeper.close()


@pytest.mark.parametrize("name", ["llama"])
def test_an_engine_that_dies_answers_whoever_keeps_house(
    checkpoint: Callable[..., Path], name: str
) -> None:
    def breaks(sequences: Sequences) -> str:
        raise ZeroDivisionError

    async def main() -> None:
        path = checkpoint(name)
        keeper = keeper_for(path)
        async with running(path, keeper=keeper) as engine:
            house = Housekeeping(keeper, engine)
            await told(engine, ask(prompt(300), 4))
            assert len(await engine.live()) == 1
            assert await asyncio.wait_for(engine._ask(breaks, "nothing"), 20) == "nothing"
            assert await engine.live() == ()
            assert (await asyncio.wait_for(house.clear().result(), 20)).live == 0
            assert keeper.resident.stats().cuts == 0
            await house.close()

    asyncio.run(main())
