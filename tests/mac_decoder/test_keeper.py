"""The tiers behind their threads: who waits for whom, what is kept where, what is counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mac_decoder.keeper import Keeper, Kept, Line
from mac_decoder.reuse.facts import Restore
from mac_decoder.reuse.resident import Resident
from mac_decoder.store.store import Store
from protocol.blocks import BLOCK
from protocol.identity import Identity
from protocol.layout import regions
from protocol.messages import History
from tests.mac_decoder.reuse.made import PREFILL, SLIDING, causal_rows

IDENTITY = Identity(*(f"{number:064x}" for number in range(8)))
KEY = bytes(range(32))
RAM = 1 << 26


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    made = Keeper(IDENTITY, SLIDING, KEY, RAM)
    made.attach(Store.open(tmp_path, KEY, 1 << 28, 0, listener=made.heard))
    yield made
    made.close()


def tokens(count: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((7919 * (at + 1 + 13 * salt)) % 5003 for at in range(count))


def kept(keeper: Keeper, said: tuple[int, ...], line: Line | None = None) -> Kept:
    """A cut of all of ``said``, whose rows depend on the tokens alone."""
    line = Line() if line is None else line
    known = line.blocks
    rows = causal_rows(SLIDING, said)
    for region in regions(SLIDING, 0, len(said)):
        place = (region.index, region.role)
        if region.last - region.first == len(said):
            rows[place] = rows[place][known * BLOCK * (region.nbytes // len(said)) :]
    line.blocks = len(said) // BLOCK
    history = (History(0, len(said), PREFILL),)
    held = np.array(said, np.uint32)
    return Kept(line, keeper.space(), held, rows, known, history, "turn")


def placed(keeper: Keeper, said: tuple[int, ...], tier: str) -> dict[tuple[int, int], bytes] | None:
    """All bytes that a tier restores for a prompt, ``None`` if it has nothing."""
    looked = keeper.look((*said, 1)).result(20)
    holding = looked.resident if tier == "resident" else looked.durable
    assert holding is not None
    keys = [offer.key for offer in holding.offers if offer.position == offer.shared == len(said)]
    if not keys:
        return None
    memory = {
        (region.index, region.role): bytearray(region.nbytes)
        for region in regions(SLIDING, 0, len(said))
    }

    def into(index: int, role: int, offset: int, nbytes: int) -> memoryview:
        return memoryview(memory[index, role])[offset : offset + nbytes]

    action = Restore("resident" if tier == "resident" else "durable", keys[0], len(said), len(said))
    restored = keeper.restore(action, into, lambda: False).result(20)
    if restored is None:
        return None
    if restored.pinned is not None:
        restored.pinned.release()
    return {place: bytes(held) for place, held in memory.items()}


def expected(said: tuple[int, ...]) -> dict[tuple[int, int], bytes]:
    return {place: array.tobytes() for place, array in causal_rows(SLIDING, said).items()}


@pytest.mark.parametrize("tier", ["resident", "durable"])
def test_what_is_kept_in_parts_is_restored_whole(keeper: Keeper, tier: str) -> None:
    line = Line()
    for count in (200, 700, 1000):
        keeper.keep(kept(keeper, tokens(count), line))
    assert keeper.drain(20)
    assert placed(keeper, tokens(1000), tier) == expected(tokens(1000))
    assert keeper.status()["kept"] == {"put_stored": 3}


def test_a_prompt_waits_for_its_own_beginning_and_a_stranger_for_nobody(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, put = threading.Event(), Resident.put

    def slow(*arguments: object, **named: object) -> object:
        go.wait(20)
        return put(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Resident, "put", slow)
    keeper.keep(kept(keeper, tokens(300)))
    mine = [keeper.look(tokens(count)) for count in (301, 100)]
    stranger = keeper.look(tokens(301, 1))
    salted = keeper.look(tokens(301), b"another key")
    assert stranger.result(20).resident.shared == 0
    assert salted.result(20).resident.shared == 0
    assert not any(looking.done() for looking in mine)
    assert not keeper.drain(0.01)
    go.set()
    assert [looking.result(20).resident.shared for looking in mine] == [300, 100]


def test_a_sequence_that_rests_lets_its_cuts_be_evicted_and_finds_them_again(
    keeper: Keeper,
) -> None:
    memory_alone = Keeper(IDENTITY, SLIDING, KEY, RAM)
    lines = [Line(), Line()]
    for one, line in zip((keeper, memory_alone), lines, strict=True):
        one.keep(kept(one, tokens(300), line))
        one.rest(line)
        assert one.drain(20)
        _settle(one)
        assert one.status()["resident"]["pinned_bytes"] == 0
        one.wake(line)
        _settle(one)
        assert line.pinned is not None
        assert not line.broken
        one.rest(line)
        _settle(one)
        one.resize(0)
        one.wake(line)
        _settle(one)
        assert line.pinned is None
    # What is on disk too is gone on from there.
    assert [line.broken for line in lines] == [False, True]
    assert memory_alone.close()


def test_a_cut_that_is_gone_is_a_miss_and_not_an_error(keeper: Keeper) -> None:
    gone = Restore("resident", bytes(32), 300, 300)
    assert keeper.restore(gone, lambda *_: memoryview(b""), lambda: False).result(20) is None
    gone = Restore("durable", bytes(32), 300, 300)
    assert keeper.restore(gone, lambda *_: memoryview(b""), lambda: False).result(20) is None


def test_memory_does_not_claim_of_a_superseded_step_that_it_is_on_disk(keeper: Keeper) -> None:
    """Whether it was there and was deleted, or never got there since its extension came first."""
    line = Line()
    for count in (300, 600):
        keeper.keep(replace(kept(keeper, tokens(count), line), role="step"))
        assert keeper.drain(20)
    keeper.keep(kept(keeper, tokens(900), line))
    assert keeper.drain(20)
    status = keeper.status()
    assert status["durable"]["cuts"] == 1
    assert status["resident"]["publications"] == {"superseded": 2, "published": 1}
    # It serves on, since what extends it is there.
    assert placed(keeper, tokens(600), "resident") == expected(tokens(600))
    offers = keeper.look((*tokens(600), 1)).result(20).resident.offers
    assert [(offer.position, offer.publication) for offer in offers if offer.shared == 600] == [
        (600, "superseded")
    ]


def test_nothing_shows_a_token(keeper: Keeper) -> None:
    said = (40961, 40962, 40963)
    cut = kept(keeper, said)
    looked = keeper.look(said).result(20)
    for shown in (repr(cut), repr(looked), str(keeper.status())):
        assert "40962" not in shown


def _settle(keeper: Keeper) -> None:
    """Wait until the keeping thread has done what it was told."""
    keeper._keeping._ordered.submit(lambda: None).result(20)
