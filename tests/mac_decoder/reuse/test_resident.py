"""The resident tier: exact bytes, one budget, least recently used first, pins and sharing."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mac_decoder.reuse import resident as module
from mac_decoder.reuse.cut import BlockBody, CutBody, Place, block_sizes, divide
from mac_decoder.reuse.facts import NOTHING, Facts, Holding, Local, Publication, Restore
from mac_decoder.reuse.ladder import plan
from mac_decoder.reuse.resident import BARRED, Pinned, Resident
from protocol.blocks import chain
from protocol.errors import IntegrityError, LocalProtocolError
from protocol.layout import Layout, payload_bytes
from protocol.messages import History
from tests.mac_decoder.reuse.made import (
    BLOCKLESS,
    DECODE,
    FULL,
    LAYOUTS,
    OTHER_SPACE,
    PREFILL,
    SLIDING,
    SPACE,
    causal_rows,
    dropped,
    emptied,
    made_of,
    publication_of,
    some_rows,
)

PLENTY = 1 << 30
BLOCK_BYTES = sum(block_sizes(FULL).values())


def contents(held: Pinned) -> tuple[dict[Place, bytes], list[tuple[bytes, dict[Place, bytes]]]]:
    rest = {place: array.tobytes() for place, array in held.cut.rest.items()}
    blocks = [(b.hash, {p: a.tobytes() for p, a in b.data.items()}) for b in held.blocks]
    return rest, blocks


def saved(cut: CutBody, bodies: tuple[BlockBody, ...]) -> tuple:
    rest = {place: array.tobytes() for place, array in cut.rest.items()}
    return rest, [(b.hash, {p: a.tobytes() for p, a in b.data.items()}) for b in bodies]


def put(
    tier: Resident,
    tokens: range | list[int],
    space: bytes = SPACE,
    publication: Publication = "pending",
) -> bytes:
    cut, bodies = made_of(FULL, tokens, space=space)
    result = tier.put(space, cut, bodies, publication=publication)
    assert result.outcome == "stored"
    return result.key


# -- what is put is what is pinned


@pytest.mark.parametrize("position", [1, 255, 256, 257, 700])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_restored_is_saved(layout: Layout, position: int) -> None:
    tier = Resident(PLENTY)
    rows = some_rows(layout, position)
    cut, bodies = divide(layout, SPACE, range(position), rows, (History(0, position, PREFILL),))
    expected = saved(cut, bodies)
    done = tier.put(SPACE, cut, bodies)
    with tier.pin(done.key) or pytest.fail("gone") as held:
        assert contents(held) == expected
        assert held.cut.tokens.tolist() == list(range(position))
        assert held.cut.history == cut.history
    payload = payload_bytes(layout, 0, position) + 4 * position
    assert (done.outcome, done.added_bytes) == ("stored", payload)
    assert tier.stats().used_bytes == payload


def test_what_is_kept_cannot_be_written_to() -> None:
    tier = Resident(PLENTY)
    with tier.pin(put(tier, range(300))) or pytest.fail("gone") as held:
        arrays = (held.cut.tokens, *held.cut.rest.values(), *held.blocks[0].data.values())
        for array in arrays:
            with pytest.raises(ValueError):
                array[0] = 1


def test_arrays_are_taken_over_where_they_own_their_bytes_and_copied_where_not() -> None:
    cut, bodies = made_of(FULL, range(300))
    (body,) = bodies
    whole = BlockBody(body.hash, {place: array.copy() for place, array in body.data.items()})
    tier = Resident(PLENTY)
    done = tier.put(SPACE, cut, [whole])
    with tier.pin(done.key) or pytest.fail("gone") as held:
        for place, array in held.blocks[0].data.items():
            assert np.shares_memory(array, whole.data[place])
        for place, array in held.cut.rest.items():
            assert not np.shares_memory(array, cut.rest[place])


def test_foreign_memory_is_copied() -> None:
    """A view of an mlx array, or of a mapped file, would keep that alive uncounted."""
    cut, bodies = made_of(FULL, range(300))
    foreign = bytearray(bodies[0].data[0, 0].tobytes())
    data = {**bodies[0].data, (0, 0): np.frombuffer(foreign, np.uint8)}
    tier = Resident(PLENTY)
    done = tier.put(SPACE, cut, [BlockBody(bodies[0].hash, data)])
    foreign[:] = bytes(len(foreign))
    with tier.pin(done.key) or pytest.fail("gone") as held:
        assert contents(held) == saved(cut, bodies)


# -- sharing


def test_a_system_prompt_is_held_once() -> None:
    system = list(range(4096))
    tier = Resident(PLENTY)
    for number in range(10):
        put(tier, [*system, *range(10_000 * number + 5000, 10_000 * number + 5300)])
    stats = tier.stats()
    assert stats.blocks == 16 + 10
    own = 10 * (payload_bytes(FULL, 0, 4396) - 17 * BLOCK_BYTES + 4 * 4396)
    assert stats.used_bytes == 26 * BLOCK_BYTES + own
    assert stats.referenced_bytes == 170 * BLOCK_BYTES + own


def test_equal_tokens_with_other_bytes_are_not_shared() -> None:
    """Rows that were made otherwise differ in rounding; each cut keeps its own."""
    tier = Resident(PLENTY)
    first = made_of(FULL, range(600))
    second = made_of(FULL, range(700), rows=some_rows(FULL, 700))
    keys = [tier.put(SPACE, cut, bodies).key for cut, bodies in (first, second)]
    assert tier.stats().blocks == 4
    for key, expected in zip(keys, (first, second), strict=True):
        with tier.pin(key) or pytest.fail("gone") as held:
            assert contents(held) == saved(*expected)


def test_putting_what_is_held_adds_nothing() -> None:
    tier = Resident(PLENTY)
    key = put(tier, range(600))
    before = tier.stats()
    again = tier.put(SPACE, *made_of(FULL, range(600)))
    assert (again.key, again.outcome, again.added_bytes) == (key, "held", 0)
    other = made_of(FULL, range(600), rows=some_rows(FULL, 600))
    assert tier.put(SPACE, *other).outcome == "differs"
    assert tier.stats() == before


def test_one_byte_of_the_rest_makes_another_cut() -> None:
    tier = Resident(PLENTY)
    put(tier, range(600))
    rows = causal_rows(FULL, range(600))
    rows[0, 0][-1] ^= 1
    assert tier.put(SPACE, *made_of(FULL, range(600), rows=rows)).outcome == "differs"


def test_a_cut_goes_on_from_the_one_it_was_built_from() -> None:
    tier = Resident(PLENTY)
    cut, bodies = made_of(FULL, range(1000))
    with tier.pin(put(tier, range(600))) or pytest.fail("gone") as base:
        done = tier.put(SPACE, cut, bodies[2:], continues=base)
    assert done.added_bytes == payload_bytes(FULL, 512, 1000) + 4000
    with tier.pin(done.key) or pytest.fail("gone") as held:
        assert contents(held) == saved(cut, bodies)


def test_a_cut_goes_on_from_one_that_was_dropped_meanwhile() -> None:
    tier = Resident(PLENTY)
    cut, bodies = made_of(FULL, range(1000))
    with tier.pin(put(tier, range(600))) or pytest.fail("gone") as base:
        emptied(tier)
        done = tier.put(SPACE, cut, bodies[2:], continues=base)
    with tier.pin(done.key) or pytest.fail("gone") as held:
        assert contents(held) == saved(cut, bodies)
    assert tier.stats().used_bytes == payload_bytes(FULL, 0, 1000) + 4000


def test_missing_blocks_are_refused() -> None:
    tier = Resident(PLENTY)
    cut, bodies = made_of(FULL, range(1000))
    with pytest.raises(LocalProtocolError) as refused:
        tier.put(SPACE, cut, bodies[1:])
    assert refused.value.reason == "blocks_missing"
    with tier.pin(put(tier, range(300))) or pytest.fail("gone") as base:
        for given in (bodies[2:], bodies[:1], ()):
            with pytest.raises(LocalProtocolError) as refused:
                tier.put(SPACE, cut, given, continues=base)
            assert refused.value.reason == "blocks_missing"
    with pytest.raises(LocalProtocolError):
        tier.put(SPACE, cut, bodies[1:], continues=base)  # released
    assert tier.stats().cuts == 1


def test_rows_of_another_history_do_not_go_on() -> None:
    tier = Resident(PLENTY)
    with tier.pin(put(tier, range(600))) or pytest.fail("gone") as base:
        history = (History(0, 500, PREFILL), History(500, 1000, DECODE))
        cut, bodies = made_of(FULL, range(1000), history=history)
        with pytest.raises(LocalProtocolError) as refused:
            tier.put(SPACE, cut, bodies[2:], continues=base)
        assert refused.value.reason == "history_differs"
        assert tier.put(SPACE, cut, bodies[1:], continues=base).outcome == "stored"


@pytest.mark.parametrize(
    ("what", "reason", "change"),
    [
        ("another chain", "chain_differs", lambda c: replace(c, blocks=(bytes(32),))),
        ("another token", "chain_differs", lambda c: replace(c, tokens=c.tokens + np.uint32(1))),
        ("no rest", "cut_malformed", lambda c: replace(c, rest={})),
        ("a gap", "cut_malformed", lambda c: replace(c, history=(History(1, 300, PREFILL),))),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    what: str, reason: str, change: Callable[[CutBody], CutBody]
) -> None:
    tier = Resident(PLENTY)
    cut, bodies = made_of(FULL, range(300))
    with pytest.raises(IntegrityError) as refused:
        tier.put(SPACE, change(cut), bodies)
    assert refused.value.reason == reason, what
    with pytest.raises(IntegrityError):
        tier.put(OTHER_SPACE, cut, bodies)
    short = {place: array[1:] for place, array in bodies[0].data.items()}
    with pytest.raises(IntegrityError):
        tier.put(SPACE, cut, [BlockBody(bodies[0].hash, short)])
    assert tier.stats().used_bytes == 0


# -- identities


def test_another_namespace_finds_nothing_and_shares_the_budget() -> None:
    """Traps 1 and 15."""
    size = payload_bytes(FULL, 0, 300) + 1200
    tier = Resident(2 * size)
    ours = put(tier, range(300))
    assert tier.holding(OTHER_SPACE, range(300)) == NOTHING
    assert tier.match(OTHER_SPACE, range(300)).shared == 0
    put(tier, range(300), space=OTHER_SPACE)
    put(tier, range(1, 301), space=OTHER_SPACE)
    assert tier.pin(ours) is None
    assert tier.stats().used_bytes == 2 * size
    emptied(tier)
    assert tier.stats().used_bytes == 0


# -- the budget


def test_least_recently_used_goes_first() -> None:
    size = payload_bytes(FULL, 0, 10) + 40
    tier = Resident(3 * size)
    first, second, third = (put(tier, range(n, n + 10)) for n in (0, 100, 200))
    (tier.pin(first) or pytest.fail("gone")).release()
    done = tier.put(SPACE, *made_of(FULL, range(300, 310)))
    assert done.evicted_bytes == size
    assert [publication_of(tier, key) is not None for key in (first, second, third)] == [
        True,
        False,
        True,
    ]
    assert tier.stats().used_bytes == tier.stats().budget_bytes


def test_putting_what_is_held_is_a_use() -> None:
    size = payload_bytes(FULL, 0, 10) + 40
    tier = Resident(2 * size)
    first, second = (put(tier, range(n, n + 10)) for n in (0, 100))
    assert tier.put(SPACE, *made_of(FULL, range(10))).outcome == "held"
    put(tier, range(200, 210))
    assert publication_of(tier, first) == "pending"
    assert publication_of(tier, second) is None


def test_evicted_memory_is_free_at_once() -> None:
    tier = Resident(PLENTY)
    cut, bodies = made_of(FULL, range(600))
    arrays = [array.copy() for body in bodies for array in body.data.values()]
    whole = iter(arrays)
    given = [BlockBody(b.hash, {place: next(whole) for place in b.data}) for b in bodies]
    alive = [weakref.ref(array) for array in arrays]
    key = tier.put(SPACE, cut, given).key
    del arrays, whole, given
    assert all(array() is not None for array in alive)
    assert tier.resize(0) == payload_bytes(FULL, 0, 600) + 2400
    assert publication_of(tier, key) is None
    assert all(array() is None for array in alive)


def test_eviction_keeps_blocks_that_another_cut_has() -> None:
    tier = Resident(PLENTY)
    put(tier, range(512))
    deep = put(tier, range(700))
    tier.resize(tier.stats().used_bytes - 1)
    stats = tier.stats()
    assert (stats.cuts, stats.blocks) == (1, 2)
    with tier.pin(deep) or pytest.fail("gone") as held:
        assert contents(held) == saved(*made_of(FULL, range(700)))


def test_a_pinned_cut_stays() -> None:
    size = payload_bytes(FULL, 0, 300) + 1200
    tier = Resident(size)
    held = tier.pin(put(tier, range(300))) or pytest.fail("gone")
    refused = tier.put(SPACE, *made_of(FULL, range(1, 301)))
    assert (refused.outcome, refused.evicted_bytes) == ("no_room", 0)
    assert tier.resize(0) == 0
    assert tier.stats().pinned_bytes == size
    assert contents(held) == saved(*made_of(FULL, range(300)))
    held.release()
    held.release()
    assert tier.stats().used_bytes == 0
    assert not hasattr(held, "blocks")


def test_a_dropped_cut_leaves_with_its_last_pin() -> None:
    tier = Resident(PLENTY)
    key = put(tier, range(300))
    one, two = tier.pin(key) or pytest.fail("gone"), tier.pin(key) or pytest.fail("gone")
    assert dropped(tier, key)
    assert not dropped(tier, key)
    assert tier.pin(key) is None
    assert tier.holding(SPACE, range(300)) == NOTHING
    one.release()
    assert contents(two) == saved(*made_of(FULL, range(300)))
    assert tier.stats().pinned_bytes == tier.stats().used_bytes > 0
    two.release()
    assert tier.stats().used_bytes == 0


def test_what_does_not_fit_at_all_evicts_nothing() -> None:
    tier = Resident(payload_bytes(FULL, 0, 300) + 1200)
    key = put(tier, range(300))
    assert tier.put(SPACE, *made_of(FULL, range(600))).outcome == "no_room"
    assert publication_of(tier, key) == "pending"


def test_shared_blocks_are_not_evicted_for_the_cut_that_shares_them() -> None:
    extended = payload_bytes(FULL, 0, 700) + 2800
    tier = Resident(extended)
    put(tier, range(512))
    done = tier.put(SPACE, *made_of(FULL, range(700)))
    assert done.outcome == "stored"
    assert done.added_bytes == extended - 2 * BLOCK_BYTES
    assert done.evicted_bytes == 4 * 512
    assert tier.stats().used_bytes == extended


def test_no_memory_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Resident(PLENTY)
    put(tier, range(300))
    before = tier.stats()

    def fails(block: BlockBody) -> BlockBody:
        raise MemoryError

    monkeypatch.setattr(module, "owned_block", fails)
    assert tier.put(SPACE, *made_of(FULL, range(600))).outcome == "no_room"
    assert tier.stats() == before


def test_a_budget_of_nothing_keeps_nothing() -> None:
    tier = Resident(0)
    assert tier.put(SPACE, *made_of(FULL, range(300))).outcome == "no_room"
    assert tier.put(SPACE, *made_of(BLOCKLESS, range(3))).outcome == "no_room"


# -- publication


@pytest.mark.parametrize("ended", sorted(BARRED))
def test_a_refused_or_invalid_cut_is_held_for_its_reason_alone(ended: Publication) -> None:
    tier = Resident(PLENTY)
    shallow = put(tier, range(300), publication="published")
    deep = put(tier, range(600))
    durable = Holding(300, None, tier.holding(SPACE, range(300)).offers)
    facts = Facts(1000, FULL, "local", durable=durable)

    def planned() -> tuple:
        found = plan(replace(facts, resident=tier.holding(SPACE, range(1000))))
        return found.action, found.reasons

    assert planned() == (Restore("resident", deep, 600, 600), ("lane_local",))
    assert tier.settle(deep, ended)
    assert publication_of(tier, deep) == ended
    assert tier.match(SPACE, range(1000)).cuts == ((300, shallow),)
    assert planned() == (
        Restore("resident", shallow, 300, 300),
        ("capped_by_durable", "lane_local"),
    )
    assert tier.settle(deep, "published")
    assert planned()[1] == ("capped_by_durable", "lane_local")
    assert tier.settle(deep, "out_of_space")
    assert planned() == (
        Restore("resident", deep, 600, 600),
        ("durable_out_of_space", "lane_local"),
    )


def test_a_barred_cut_is_replaced_by_a_fresh_one() -> None:
    tier = Resident(PLENTY)
    key = put(tier, range(600))
    tier.settle(key, "invalid")
    fresh = made_of(FULL, range(600), rows=some_rows(FULL, 600))
    assert tier.put(SPACE, *fresh).outcome == "stored"
    assert publication_of(tier, key) == "pending"
    with tier.pin(key) or pytest.fail("gone") as held:
        assert contents(held) == saved(*fresh)
    assert tier.stats().blocks == 2


def test_barred_cuts_go_first() -> None:
    size = payload_bytes(FULL, 0, 10) + 40
    tier = Resident(3 * size)
    first, second, third = (put(tier, range(n, n + 10)) for n in (0, 100, 200))
    tier.settle(third, "refused")
    (tier.pin(third) or pytest.fail("gone")).release()
    put(tier, range(300, 310))
    assert publication_of(tier, third) is None
    assert publication_of(tier, first) == publication_of(tier, second) == "pending"


@pytest.mark.parametrize("ended", sorted(BARRED))
def test_what_may_not_serve_is_not_pinned_to_serve(ended: Publication) -> None:
    """It was found while it still might."""
    tier = Resident(PLENTY)
    key = put(tier, [1, 2, 3])
    tier.settle(key, ended)
    assert tier.pin(key, serving=True) is None
    publishing = tier.pin(key)
    assert publishing
    publishing.release()
    assert tier.settle(key, "out_of_space", was=ended)
    pinned = tier.pin(key, serving=True)
    assert pinned
    pinned.release()


@pytest.mark.parametrize("was", ["pending", "refused", "invalid", "out_of_space", "superseded"])
def test_a_settlement_of_what_was_not_so_changes_nothing(was: Publication) -> None:
    tier = Resident(PLENTY)
    key = put(tier, [1, 2, 3])
    tier.settle(key, was)
    assert tier.settle(key, "out_of_space", was="published")
    assert publication_of(tier, key) == was
    assert not tier.settle(bytes(32), "out_of_space", was="published")


def test_a_cut_that_is_gone_settles_nothing() -> None:
    tier = Resident(PLENTY)
    assert not tier.settle(bytes(32), "published")
    assert publication_of(tier, bytes(32)) is None


def test_the_figures() -> None:
    tier = Resident(PLENTY)
    put(tier, range(300), publication="published")
    mixed = (History(0, 299, PREFILL), History(299, 300, DECODE))
    tier.put(SPACE, *made_of(FULL, range(1, 301), history=mixed))
    stats = tier.stats()
    assert (stats.cuts, stats.blocks, stats.mixed) == (2, 2, 1)
    assert stats.publications == {"published": 1, "pending": 1}
    assert plan(Facts(2, FULL)).action == Local()


# -- against a plain dictionary


class Model(NamedTuple):
    space: bytes
    tokens: tuple[int, ...]
    salt: int


RUNS = (3, 200, 256, 300)
prompts = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(RUNS)), min_size=1, max_size=3).map(
    lambda parts: tuple(token for token, count in parts for _ in range(count))
)


def salted(model: Model) -> tuple[CutBody, tuple[BlockBody, ...]]:
    rows = causal_rows(SLIDING, model.tokens)
    changed = {place: array ^ np.uint8(model.salt) for place, array in rows.items()}
    return made_of(SLIDING, model.tokens, space=model.space, rows=changed)


class AgainstDictionary(RuleBasedStateMachine):
    """Puts, pins, drops, settlements and budgets in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = 12_000
        self.tier = Resident(self.budget)
        self.held: dict[bytes, Model] = {}  # least recently used first
        self.barred: set[bytes] = set()
        self.pins: dict[bytes, list[Pinned]] = {}
        self.leaving: dict[bytes, list[tuple[Model, Pinned]]] = {}

    def own(self, model: Model) -> int:
        cut, _ = salted(model)
        return cut.rest_nbytes + 4 * len(model.tokens)

    def blocks(self, model: Model) -> set[tuple[bytes, int]]:
        return {(name, model.salt) for name in chain(model.space, model.tokens)}

    def used(self, models: list[Model], also: frozenset = frozenset()) -> int:
        names = set(also).union(*(self.blocks(m) for m in models))
        size = sum(block_sizes(SLIDING).values())
        return sum(map(self.own, models)) + size * len(names)

    def pinned(self) -> list[Model]:
        leaving = {id(m): m for many in self.leaving.values() for m, _ in many}
        return [self.held[k] for k, many in self.pins.items() if many] + list(leaving.values())

    def everything(self) -> list[Model]:
        leaving = {id(m): m for many in self.leaving.values() for m, _ in many}
        return [*self.held.values(), *leaving.values()]

    def take_out(self, key: bytes) -> None:
        model = self.held.pop(key)
        self.barred.discard(key)
        handles = self.pins.pop(key, [])
        if handles:
            self.leaving.setdefault(key, []).extend((model, handle) for handle in handles)

    def evict(self, needed: int, also: frozenset = frozenset()) -> None:
        for key in list(self.held):
            if self.used(self.everything(), also) + needed <= self.budget:
                break
            if not self.pins.get(key):
                self.take_out(key)

    @rule(space=st.sampled_from((SPACE, OTHER_SPACE)), tokens=prompts, salt=st.sampled_from((0, 9)))
    def put(self, space: bytes, tokens: tuple[int, ...], salt: int) -> None:
        model = Model(space, tokens, salt)
        cut, bodies = salted(model)
        key = cut.digest(space)
        done = self.tier.put(space, cut, bodies)
        assert done.key == key
        there = self.held.get(key)
        if there is not None and key not in self.barred:
            assert done.outcome == ("held" if there == model else "differs")
            if there == model:
                self.held[key] = self.held.pop(key)
            return
        held = set().union(*(self.blocks(m) for m in self.everything()))
        taken = frozenset(self.blocks(model) & held)
        size = sum(block_sizes(SLIDING).values())
        needed = self.own(model) + size * len(self.blocks(model) - taken)
        if there is not None:
            self.take_out(key)
        if self.used(self.pinned(), taken) + needed > self.budget:
            assert done.outcome == "no_room"
            return
        assert (done.outcome, done.added_bytes) == ("stored", needed)
        self.evict(needed, taken)
        self.held[key] = model

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        handle = self.tier.pin(key)
        assert handle is not None
        assert contents(handle) == saved(*salted(self.held[key]))
        self.pins.setdefault(key, []).append(handle)
        if key not in self.barred:
            self.held[key] = self.held.pop(key)

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(k for k, v in self.pins.items() if v)))
        self.pins[key].pop().release()
        if self.used(self.everything()) > self.budget:
            self.evict(0)

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def unpin_what_leaves(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.leaving)))
        model, handle = self.leaving[key].pop()
        assert contents(handle) == saved(*salted(model))
        handle.release()
        if not self.leaving[key]:
            del self.leaving[key]
        if self.used(self.everything()) > self.budget:
            self.evict(0)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), ended=st.sampled_from(("published", "refused", "invalid")))
    def settle(self, data: st.DataObject, ended: Publication) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        assert self.tier.settle(key, ended)
        if ended in BARRED:
            self.barred.add(key)
            self.held = {key: self.held.pop(key), **self.held}
        else:
            self.barred.discard(key)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        assert dropped(self.tier, key)
        self.take_out(key)

    @rule(budget=st.sampled_from((0, 6_000, 12_000, 30_000)))
    def resize(self, budget: int) -> None:
        self.budget = budget
        self.tier.resize(budget)
        self.evict(0)

    @rule(space=st.sampled_from((SPACE, OTHER_SPACE)), tokens=prompts)
    def match(self, space: bytes, tokens: tuple[int, ...]) -> None:
        found = self.tier.match(space, tokens)
        may = [k for k, m in self.held.items() if m.space == space and k not in self.barred]
        prefixes = [k for k in may if tokens[: len(self.held[k].tokens)] == self.held[k].tokens]
        assert {cut.key for cut in found.cuts} == set(prefixes)

    @invariant()
    def counts_every_byte(self) -> None:
        stats = self.tier.stats()
        assert stats.used_bytes == self.used(self.everything())
        assert stats.used_bytes <= max(self.budget, self.used(self.pinned()))
        assert stats.cuts == len(self.held)

    def teardown(self) -> None:
        for handles in self.pins.values():
            for handle in handles:
                handle.release()
        for many in self.leaving.values():
            for _, handle in many:
                handle.release()
        emptied(self.tier)
        assert self.tier.stats().used_bytes == 0
        assert self.tier.stats().blocks == 0


AgainstDictionary.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None
)
TestAgainstDictionary = AgainstDictionary.TestCase


# -- threads


def test_threads_meet_only_whole_cuts_within_the_budget() -> None:
    budget = 3 * (payload_bytes(FULL, 0, 600) + 2400)
    tier = Resident(budget)
    prompts_of = [[*range(256), *range(1000 * n, 1000 * n + 344)] for n in range(8)]
    made = [made_of(FULL, prompt) for prompt in prompts_of]
    expected = {cut.digest(SPACE): saved(cut, bodies) for cut, bodies in made}
    wrong: list[str] = []
    stop = threading.Event()

    def writes(seed: int) -> None:
        draw = np.random.default_rng(seed)
        for _ in range(60):
            tier.put(SPACE, *made[int(draw.integers(8))])
            if draw.integers(5) == 0:
                dropped(tier, made[int(draw.integers(8))][0].digest(SPACE))

    def reads(seed: int) -> None:
        draw = np.random.default_rng(seed)
        while not stop.is_set():
            match = tier.match(SPACE, prompts_of[int(draw.integers(8))])
            handle = tier.pin(match.witness.key) if match.witness else None
            if handle is not None:
                with handle:
                    if contents(handle) != expected[handle.key]:
                        wrong.append("bytes")
            if tier.stats().used_bytes > budget:
                wrong.append("budget")

    writers = [threading.Thread(target=writes, args=(n,)) for n in range(2)]
    readers = [threading.Thread(target=reads, args=(10 + n,)) for n in range(2)]
    for thread in (*writers, *readers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert wrong == []
    emptied(tier)
    assert (tier.stats().used_bytes, tier.stats().blocks) == (0, 0)
