"""Keeping house beside a keeper and a store that work: what is shown, found, deleted and left."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mac_decoder.engine.facade import Engine
from mac_decoder.housekeeping.conversations import Conversation, Conversations, Span
from mac_decoder.housekeeping.house import Gone, Housekeeping, Shared
from mac_decoder.housekeeping.operations import Progress
from mac_decoder.keeper import Keeper
from mac_decoder.reuse.facts import Restore
from mac_decoder.store import index
from mac_decoder.store.events import PassedOver
from mac_decoder.store.files import Disk, RealDisk
from mac_decoder.store.ledger import Tally
from mac_decoder.store.store import Store
from protocol.blocks import namespace
from protocol.errors import BatonError, Cancelled, CapacityError, ConfigError, RequestError
from protocol.layout import Layout
from tests.mac_decoder.reuse.made import FULL, RECURRENT, SLIDING, made_of
from tests.mac_decoder.store.made import OTHER_IDENTITY, Destination, conversation, rows_of
from tests.mac_decoder.tiers.brought import IDENTITY, KEY, Brought, serves

pytestmark = pytest.mark.anyio

RAM = 1 << 26


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Gated(RealDisk):
    """A disk that stops before, or after, operations of a kind until it is let go on."""

    def __init__(self) -> None:
        self.before: dict[str, Callable[[Path], None]] = {}

    def unlink(self, path: Path) -> None:
        self.before.get("unlink", lambda _path: None)(path)
        super().unlink(path)

    def open(self, path: Path) -> int:
        self.before.get("open", lambda _path: None)(path)
        return super().open(path)

    def create(self, path: Path) -> int:
        self.before.get("create", lambda _path: None)(path)
        return super().create(path)


class Gate:
    """Stops the first who comes until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()

    def __call__(self, path: Path) -> None:
        self.reached.set()
        assert self.go.wait(20)


def no_model() -> Any:
    raise AssertionError("nobody loads a model here")


def kept_in(
    directory: Path | None, layout: Layout = FULL, ram: int = RAM, disk: Disk | None = None
) -> Keeper:
    """A keeper on a real directory; without one there is no durable tier."""
    keeper = Keeper(IDENTITY, layout, KEY, ram)
    if directory is not None:
        keeper.attach(Store.open(directory, KEY, 1 << 28, 0, disk, keeper.heard))
    return keeper


@asynccontextmanager
async def housekeeping(keeper: Keeper) -> AsyncIterator[Housekeeping]:
    """Keeping house for ``keeper``, of which nothing is left open; its engine never started."""
    house = Housekeeping(keeper, Engine(no_model, keeper=keeper))
    try:
        yield house
    finally:
        await house.close()
        await asyncio.to_thread(keeper.close)


def walked(directory: Path) -> dict[str, int]:
    """Bytes of every file but the lock's, the tag's and the index's."""
    return {
        path: nbytes
        for path, nbytes, _modified in RealDisk().walk(directory)
        if path not in (*index.FILES, "lock", "CACHEDIR.TAG")
    }


def gone_between(before: dict[str, int], after: dict[str, int]) -> Tally:
    assert after.items() <= before.items()
    return Tally(len(before) - len(after), sum(before.values()) - sum(after.values()))


def on_disk(gone: Gone) -> Tally:
    return Tally(gone.files, gone.nbytes)


def talk(keeper: Keeper, seed: int, length: int, shared: int = 0, *steps: int) -> Brought:
    """A conversation that was kept and published, its cuts at ``steps`` and at its end."""
    one = Brought(keeper, keeper._layout, conversation(length, seed, shared))
    for step in (*steps, length):
        one.settled(step)
    keeper.let_go(one.line)
    return one


async def published(keeper: Keeper) -> None:
    assert await asyncio.to_thread(keeper.drain, 20)


def only(found: Conversations, position: int) -> Conversation:
    (one,) = [each for each in found.shown if each.position == position]
    return one


@pytest.fixture
def other_model(tmp_path: Path) -> None:
    """A cut that another model left in the directory."""
    space = namespace(KEY, OTHER_IDENTITY.digest())
    cut, blocks = made_of(FULL, conversation(700, 77), space=space)
    with Store.open(tmp_path, KEY, 1 << 28, 0) as store:
        store.publish(space, OTHER_IDENTITY, cut, blocks)


# -- what is shown


@pytest.mark.parametrize("layout", [FULL, SLIDING, RECURRENT])
async def test_what_is_kept_is_shown_as_conversations(tmp_path: Path, layout: Layout) -> None:
    keeper = kept_in(tmp_path, layout)
    async with housekeeping(keeper) as house:
        await asyncio.to_thread(talk, keeper, 1, 700, 512, 512)
        await asyncio.to_thread(talk, keeper, 2, 900, 512)
        found = await house.conversations()
        assert [one.position for one in found.shown] == [900, 700]
        assert (found.not_shown, found.foreign.cuts) == (0, 0)
        one, other = only(found, 700), only(found, 900)
        assert [(cut.position, cut.own) for cut in one.cuts] == [(700, True), (512, False)]
        assert [(cut.position, cut.own) for cut in other.cuts] == [(900, True), (512, False)]
        for each in (one, other):
            assert each.tiers == ("resident", "durable")
            assert {cut.state for cut in each.cuts} == {"published"}
            assert {cut.why for cut in each.cuts} == {"turn"}
            assert each.spans == (Span(0, each.position, "decoder_prefill", "cpu", "float32", 64),)
            assert each.made_at is not None
            assert each.used_at is not None
            assert each.made_at <= each.used_at
            assert 0 < each.own_bytes < each.referenced_bytes
            assert each.own_bytes + each.shared_bytes == each.referenced_bytes
            assert 0 < each.memory_own_bytes < each.memory_bytes
        store = keeper.store
        assert store is not None
        assert sum(each.referenced_bytes for each in found.shown) == store.stats().referenced
        assert one.id != other.id
        assert not any(name.hex() in repr(found) for name in store._held.ledger.cuts)


async def test_after_a_restart_the_disk_alone_tells(tmp_path: Path) -> None:
    keeper = kept_in(tmp_path)
    async with housekeeping(keeper) as house:
        await asyncio.to_thread(talk, keeper, 1, 700, 512, 512)
        before = only(await house.conversations(), 700)
    again = kept_in(tmp_path)
    async with housekeeping(again) as house:
        one = only(await house.conversations(), 700)
        assert one.tiers == ("durable",)
        assert one.used_at is None
        assert again.store is not None
        assert not again.store._lookup._kept, "looking pushes no prompt's manifest out"
        assert one.made_at == pytest.approx(before.made_at, abs=60)
        assert one.spans == before.spans
        assert [cut.position for cut in one.cuts] == [700, 512]
        assert (one.memory_bytes, one.referenced_bytes) == (0, before.referenced_bytes)
        await asyncio.to_thread(restored_once, again, conversation(700, 1, 512))
        assert only(await house.conversations(), 700).used_at is not None


async def test_what_others_share_says_nothing_of_a_conversation(tmp_path: Path) -> None:
    """Its times are those of its own cuts; what stays when it goes is told apart."""
    keeper = kept_in(tmp_path)
    async with housekeeping(keeper) as house:
        await asyncio.to_thread(talk, keeper, 1, 700, 512, 512)
        before = only(await house.conversations(), 700)
        await asyncio.sleep(0.02)
        two = await asyncio.to_thread(talk, keeper, 2, 900, 512)
        await asyncio.to_thread(serves, keeper, two, 512, "resident")
        one, other = only(await house.conversations(), 700), only(await house.conversations(), 900)
        assert one.used_at == before.used_at
        assert one.made_at is not None
        assert other.made_at is not None
        assert other.made_at > one.made_at
        told = await house.would_forget(one.id)
        assert told.shared == Shared(one.shared_bytes, one.memory_bytes - one.memory_own_bytes)
        assert one.shared_bytes > 0
        assert await house.forget(one.id).result() == told
        assert only(await house.conversations(), 900).referenced_bytes == other.referenced_bytes
        assert (await house.would_clear()).shared is None


async def test_a_mark_stays_while_a_conversation_goes_on(tmp_path: Path) -> None:
    keeper = kept_in(tmp_path)
    async with housekeeping(keeper) as house:
        one = await asyncio.to_thread(talk, keeper, 1, 700, 512, 512)
        before = only(await house.conversations(), 700)
        assert len(before.mark) == 6
        # Another one begins alike: what was its own there is not any more.
        await asyncio.to_thread(talk, keeper, 2, 800, 512)
        goes_on = Brought(keeper, FULL, conversation(900, 1, 512), line=one.line.renewed())
        await asyncio.to_thread(goes_on.settled, 900)
        after, other = (
            only(await house.conversations(), 900),
            only(await house.conversations(), 800),
        )
        assert after.mark == before.mark
        assert after.id != before.id
        assert other.mark != after.mark
        assert only(await house.conversations(), 800).mark == other.mark


async def test_a_mark_stays_where_a_conversation_forks(tmp_path: Path) -> None:
    """It goes on in two ways before anybody looks again, and one of them is forgotten."""
    keeper = kept_in(tmp_path)
    async with housekeeping(keeper) as house:
        one = await asyncio.to_thread(talk, keeper, 1, 700)
        before = only(await house.conversations(), 700)
        for length, seed in ((900, 2), (800, 3)):
            goes_on = [*one.tokens, *conversation(length - 700, seed)]
            branch = Brought(keeper, FULL, goes_on, line=one.line.renewed())
            await asyncio.to_thread(branch.settled, length)
        marks = {each.position: each.mark for each in (await house.conversations()).shown}
        assert marks.keys() == {900, 800}
        assert [*marks.values()].count(before.mark) == 1
        (same,) = [position for position, mark in marks.items() if mark == before.mark]
        await house.forget(only(await house.conversations(), same).id).result()
        (left,) = (await house.conversations()).shown
        assert left.mark != before.mark
        assert left.mark == marks[left.position]


async def test_what_is_forgotten_hands_its_mark_on_to_nobody(tmp_path: Path) -> None:
    """Another one begins alike, and nobody looks before the first is forgotten."""
    keeper = kept_in(tmp_path)
    async with housekeeping(keeper) as house:
        await asyncio.to_thread(talk, keeper, 1, 700, 512, 512)
        before = only(await house.conversations(), 700)
        await asyncio.to_thread(talk, keeper, 2, 900, 512)
        await house.forget(before.id).result()
        (left,) = (await house.conversations()).shown
        assert [cut.position for cut in left.cuts if cut.own] == [900, 512]
        assert left.mark != before.mark


async def test_walks_of_a_slow_disk_keep_no_deletion_waiting(tmp_path: Path) -> None:
    disk, gates = Gated(), [Gate(), Gate()]
    walks, walk = iter(gates), disk.walk

    def slow(directory: Path) -> Any:
        next(walks)(directory)
        return walk(directory)

    keeper = kept_in(tmp_path, disk=disk)
    async with housekeeping(keeper) as house:
        await asyncio.to_thread(talk, keeper, 1, 700)
        (shown,) = (await house.conversations()).shown
        disk.walk = slow  # type: ignore[method-assign]
        walking = [asyncio.create_task(house.footprint()) for _ in gates]
        try:
            for gate in gates:
                assert await asyncio.to_thread(gate.reached.wait, 20)
            gone = await asyncio.wait_for(house.forget(shown.id).result(), 20)
            assert not any(each.done() for each in walking)
        finally:
            for gate in gates:
                gate.go.set()
            await asyncio.gather(*walking)
        assert (gone.nbytes, walked(tmp_path)) == (shown.own_bytes, {})


def restored_once(keeper: Keeper, tokens: Sequence[int]) -> None:
    one = Brought(keeper, FULL, tokens)
    assert serves(keeper, one, len(tokens), "durable")


async def test_without_a_disk_memory_is_shown(tmp_path: Path) -> None:
    keeper = kept_in(None)
    async with housekeeping(keeper) as house:
        await asyncio.to_thread(talk, keeper, 1, 700)
        (one,) = (await house.conversations()).shown
        assert (one.tiers, one.cuts[0].state, one.cuts[0].why) == (("resident",), "", "turn")
        assert (one.referenced_bytes, one.own_bytes) == (0, 0)
        assert one.memory_bytes == one.memory_own_bytes > 0
        assert not house.durable
        asks: list[Callable[[], Any]] = [house.verify, lambda: house.prune(0)]
        for refused in asks:
            with pytest.raises(RequestError) as caught:
                refused()
            assert caught.value.reason == "no_durable_tier"
        with pytest.raises(RequestError):
            await house.footprint()
        told = await house.would_clear()
        assert await house.clear().result() == told
        assert (told.files, told.cuts, told.memory_bytes) == (0, 1, one.memory_bytes)
        assert (await house.conversations()).shown == ()


async def test_a_publication_under_way_is_shown_as_pending(tmp_path: Path) -> None:
    disk, gate = Gated(), Gate()
    keeper = kept_in(tmp_path, ram=0, disk=disk)
    async with housekeeping(keeper) as house:
        disk.before["create"] = gate
        one = Brought(keeper, FULL, conversation(600, 1))
        one.cut(600)
        assert await asyncio.to_thread(gate.reached.wait, 20)
        (shown,) = (await house.conversations()).shown
        assert [(cut.state, cut.tiers) for cut in shown.cuts] == [("pending", ())]
        gate.go.set()
        await published(keeper)
        (shown,) = (await house.conversations()).shown
        assert [(cut.state, cut.tiers) for cut in shown.cuts] == [("published", ("durable",))]


async def test_the_footprint_is_a_walk(tmp_path: Path, other_model: None) -> None:
    keeper = kept_in(tmp_path)
    (tmp_path / "cuts/notes.txt").write_bytes(b"hello")
    async with housekeeping(keeper) as house:
        await asyncio.to_thread(talk, keeper, 1, 700)
        found = await house.footprint()
        total = {path: nbytes for path, nbytes, _modified in RealDisk().walk(tmp_path)}
        assert found.total == (len(total), sum(total.values()))
        assert found.kinds["cuts"].files == 2
        assert found.kinds["blocks"].files == 4
        assert found.kinds["unknown"] == (1, 5)
        assert found.kinds["index"].nbytes == (tmp_path / index.NAME).stat().st_size
        store = keeper.store
        assert store is not None
        assert found.on_disk == store.stats().on_disk == found.total.nbytes - 5
        assert found.referenced == store.stats().referenced


# -- what goes


async def clear(house: Housekeeping, **named: Any) -> tuple[Gone, Gone]:
    return await house.would_clear(**named), await house.clear(**named).result()


async def prune(house: Housekeeping) -> tuple[Gone, Gone]:
    half = (await house.footprint()).on_disk // 2
    return await house.would_prune(half), await house.prune(half).result()


async def forget(house: Housekeeping) -> tuple[Gone, Gone]:
    one = only(await house.conversations(), 900)
    told, done = await house.would_forget(one.id), await house.forget(one.id).result()
    assert told.nbytes == one.own_bytes
    assert told.memory_bytes == one.memory_own_bytes
    assert told.shared == Shared(one.shared_bytes, one.memory_bytes - one.memory_own_bytes)
    return told, done


async def clear_all(house: Housekeeping) -> tuple[Gone, Gone]:
    return await clear(house, foreign=True)


@pytest.mark.parametrize("deletion", [clear, clear_all, prune, forget])
@pytest.mark.parametrize("ram", [RAM, 0])
async def test_a_dry_run_says_what_goes_to_the_byte(
    tmp_path: Path,
    other_model: None,
    deletion: Callable[[Housekeeping], Awaitable[tuple[Gone, Gone]]],
    ram: int,
) -> None:
    keeper = kept_in(tmp_path, ram=ram)
    async with housekeeping(keeper) as house:
        await asyncio.to_thread(talk, keeper, 1, 700, 512, 512)
        two = await asyncio.to_thread(talk, keeper, 2, 900, 512)
        await asyncio.to_thread(talk, keeper, 3, 300)
        before, memory = walked(tmp_path), keeper.resident.stats().used_bytes
        told, done = await deletion(house)
        after = walked(tmp_path)
        assert told == done
        assert done.left == (await house.footprint()).on_disk
        assert on_disk(done) == gone_between(before, after) != (0, 0)
        assert done.memory_bytes == memory - keeper.resident.stats().used_bytes
        assert (done.cuts > 0) == (ram > 0 and deletion is not prune)
        store = keeper.store
        assert store is not None
        assert store.stats().on_disk == (await house.footprint()).total.nbytes
        left = {one.position for one in (await house.conversations()).shown}
        foreign = (await house.conversations()).foreign
        if deletion is forget:
            assert left == {700, 300}
            assert not serves(keeper, two, 900, "durable")
            assert ram == 0 or not serves(keeper, two, 900, "resident")
        elif deletion is clear:
            assert (left, foreign.identities, foreign.cuts) == (set(), 1, 1)
            assert sum(after.values()) == foreign.nbytes
        elif deletion is clear_all:
            assert (left, foreign.cuts, after) == (set(), 0, {})
        else:
            assert foreign.cuts == 0
    assert (await_reopened(tmp_path)) == after


def await_reopened(directory: Path) -> dict[str, int]:
    """What a start makes of the directory."""
    with Store.open(directory, KEY, 1 << 28, 0):
        return walked(directory)


async def test_pruning_leaves_memory_serving(tmp_path: Path) -> None:
    keeper = kept_in(tmp_path)
    async with housekeeping(keeper) as house:
        one = await asyncio.to_thread(talk, keeper, 1, 700)
        await house.prune(0).result()
        assert walked(tmp_path) == {}
        assert not serves(keeper, one, 700, "durable")
        assert serves(keeper, one, 700, "resident")
        (cut,) = (await house.conversations()).shown[0].cuts
        assert (cut.state, cut.tiers) == ("out_of_space", ("resident",))


@pytest.mark.parametrize("kind", ["prune", "clear", "forget"])
async def test_what_cannot_be_removed_is_told_and_the_rest_goes(kind: str, tmp_path: Path) -> None:
    keeper = kept_in(tmp_path)
    async with housekeeping(keeper) as house:
        await asyncio.to_thread(talk, keeper, 1, 700)
        path = sorted((tmp_path / "blocks").iterdir())[0]
        path.unlink()
        path.mkdir()
        (path / "notes.txt").write_text("mine")
        (shown,) = (await house.conversations()).shown
        operation = {
            "prune": lambda: house.prune(0),
            "clear": house.clear,
            "forget": lambda: house.forget(shown.id),
        }[kind]()
        gone = await operation.result()
        assert operation.passed_over == (PassedOver(f"blocks/{path.name}", "directory_not_empty"),)
        assert walked(tmp_path) == {f"blocks/{path.name}/notes.txt": 4}
        footprint = await house.footprint()
        assert gone.left == footprint.total.nbytes == footprint.on_disk


async def test_a_conversation_that_went_on_is_another_one(tmp_path: Path) -> None:
    keeper = kept_in(tmp_path)
    async with housekeeping(keeper) as house:
        one = await asyncio.to_thread(talk, keeper, 1, 700)
        (shown,) = (await house.conversations()).shown
        goes_on = Brought(keeper, FULL, conversation(900, 1), line=one.line.renewed())
        await asyncio.to_thread(goes_on.settled, 900)
        with pytest.raises(RequestError) as caught:
            await house.would_forget(shown.id)
        assert caught.value.reason == "conversation_unknown"
        operation = house.forget(shown.id)
        with pytest.raises(RequestError):
            await operation.result()
        assert operation.state == "failed"
        assert serves(keeper, goes_on, 900, "durable")


# -- what is on its way


@pytest.mark.parametrize("ram", [RAM, 0])
@pytest.mark.parametrize("whole", [True, False])
async def test_what_is_on_its_way_to_the_disk_does_not_reappear(
    tmp_path: Path, ram: int, whole: bool
) -> None:
    """One publication is in progress and another waits when all is cleared, or forgotten."""
    disk, gate = Gated(), Gate()
    keeper = kept_in(tmp_path, ram=ram, disk=disk)
    async with housekeeping(keeper) as house:
        await asyncio.to_thread(talk, keeper, 2, 300)
        disk.before["create"] = gate
        one = Brought(keeper, FULL, conversation(900, 1))
        one.cut(600)
        assert await asyncio.to_thread(gate.reached.wait, 20)
        one.cut(900)
        assert await asyncio.to_thread(keeper._waiting.drain, 20)
        keeper.let_go(one.line)
        if whole:
            operation = house.clear()
        else:
            operation = house.forget(only(await house.conversations(), 900).id)
        while keeper.status()["durable"]["publishing"] > 1:
            await asyncio.sleep(0.005)
        gate.go.set()
        gone = await operation.result()
        assert gone.publications == 1
        await published(keeper)
        assert [each.position for each in (await house.conversations()).shown] == (
            [] if whole else [300]
        )
        for position in (600, 900):
            assert not serves(keeper, one, position, "durable")
            assert not serves(keeper, one, position, "resident")
        assert keeper.resident.stats().pinned_bytes == 0
        # It is used again: then it is kept again, in both tiers.
        again = Brought(keeper, FULL, one.tokens)
        await asyncio.to_thread(again.settled, 900)
        assert serves(keeper, again, 900, "durable")
        assert ram == 0 or serves(keeper, again, 900, "resident")


async def test_a_publication_that_is_about_to_begin_does_not_reappear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher has taken it, and has not come to the disk's lock yet."""
    gate, publish = Gate(), Store.publish

    def later(*arguments: Any, **named: Any) -> Any:
        gate(Path())
        return publish(*arguments, **named)

    keeper = kept_in(tmp_path)
    async with housekeeping(keeper) as house:
        monkeypatch.setattr(Store, "publish", later)
        one = Brought(keeper, FULL, conversation(600, 1))
        one.cut(600)
        assert await asyncio.to_thread(gate.reached.wait, 20)
        keeper.let_go(one.line)
        operation = house.clear()
        while keeper.resident.stats().cuts:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert operation.state == "running"
        gate.go.set()
        assert (await operation.result()).files == 3
        await published(keeper)
        assert walked(tmp_path) == {}


@pytest.mark.parametrize("ram", [RAM, 0])
async def test_a_sequence_in_progress_goes_on_after_a_clear(tmp_path: Path, ram: int) -> None:
    """Its next cuts count on blocks that were kept before, and are gone."""
    keeper = kept_in(tmp_path, ram=ram)
    async with housekeeping(keeper) as house:
        one = Brought(keeper, FULL, conversation(1500, 1))
        await asyncio.to_thread(one.settled, 600)
        await house.clear().result()
        for position in (900, 1200, 1500):
            await asyncio.to_thread(one.settled, position)
        assert serves(keeper, one, 1500, "durable")
        assert ram == 0 or serves(keeper, one, 1500, "resident")


async def test_a_restore_goes_on_with_the_cut_that_it_has(tmp_path: Path) -> None:
    keeper = kept_in(tmp_path)
    async with housekeeping(keeper) as house:
        one = await asyncio.to_thread(talk, keeper, 1, 900)
        offers = keeper.look((*one.tokens, 1)).result(20)
        assert offers.durable is not None
        restores, memories, gates = [], [], []
        for tier, holding in (("resident", offers.resident), ("durable", offers.durable)):
            (offer,) = holding.offers
            memory, gate = Destination(FULL, 900), Gate()

            def into(
                index: int, role: int, offset: int, nbytes: int, memory=memory, gate=gate
            ) -> memoryview:
                gate(Path())
                return memory.into(index, role, offset, nbytes)

            action = Restore(tier, offer.key, 900, 900)  # type: ignore[arg-type]
            restores.append(keeper.restore(action, into, lambda: False))
            memories.append(memory)
            gates.append(gate)
        for gate in gates:
            assert await asyncio.to_thread(gate.reached.wait, 20)
        operation = house.clear()
        while keeper.resident.stats().cuts:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        assert operation.state == "running"
        for gate in gates:
            gate.go.set()
        for restoring, memory in zip(restores, memories, strict=True):
            restored = restoring.result(20)
            assert restored is not None
            assert memory.holds(rows_of(FULL, one.tokens))
            if restored.pinned is not None:
                restored.pinned.release()
        await operation.result()
        assert walked(tmp_path) == {}
        assert keeper.resident.stats().used_bytes == 0


# -- right bytes


async def test_a_wrong_byte_is_found_set_aside_and_told(tmp_path: Path) -> None:
    keeper = kept_in(tmp_path)
    async with housekeeping(keeper) as house:
        good = await asyncio.to_thread(talk, keeper, 1, 700)
        block = await asyncio.to_thread(talk, keeper, 2, 600)
        cut = await asyncio.to_thread(talk, keeper, 3, 100)
        clean = await house.verify().result()
        assert (clean.files, clean.nbytes) == (7, sum(walked(tmp_path).values()))
        assert clean.bad == []
        store = keeper.store
        assert store is not None
        spoiled = {
            next(p for p in walked(tmp_path) if p not in own_files(store, good, cut)),
            next(iter(own_files(store, cut))),
        }
        for path in spoiled:
            raw = bytearray((tmp_path / path).read_bytes())
            raw[-1] ^= 1
            (tmp_path / path).write_bytes(raw)
        operation = house.verify()
        told: list[Progress] = [progress async for progress in operation.follow()]
        found = await operation.result()
        assert {bad.path for bad in found.bad} == spoiled
        assert {bad.reason for bad in found.bad} <= {"digest_differs", "mac_differs"}
        assert told[-1] == Progress("disk", found.nbytes, found.nbytes)
        assert [one.done for one in told] == sorted(one.done for one in told)
        assert serves(keeper, good, 700, "durable")
        for one, position in ((block, 600), (cut, 100)):
            assert not serves(keeper, one, position, "durable")
            assert not serves(keeper, one, position, "resident"), "capped by what the disk has"
        assert (await house.footprint()).kinds["quarantined"].files == 2
        events = [event for event in keeper.status()["events"] if event["kind"] == "invalid"]
        assert sum(event["files"] for event in events) == 2
        states = {one.position: one.cuts[0].state for one in (await house.conversations()).shown}
        assert states[700] == "published"
        assert states[600] == "withheld" if spoiled_block(spoiled) else "invalid"
        # Damage goes with a clear.
        await house.clear().result()
        assert walked(tmp_path) == {}


def spoiled_block(paths: set[str]) -> bool:
    return any(path.startswith("blocks/") for path in paths)


def own_files(store: Store, *sequences: Brought) -> set[str]:
    """The files that these sequences' cuts need."""
    found: set[str] = set()
    for one in sequences:
        for cut in store._held.ledger.cuts.values():
            if cut.position == len(one.tokens):
                found.add(f"cuts/{cut.file.hex()}.safetensors")
                digests = [node.file.digest.hex() for node in cut.nodes() if node.file]
                found |= {f"blocks/{digest}.safetensors" for digest in digests}
    return found


async def test_what_is_deleted_while_it_is_verified_is_not_wrong(tmp_path: Path) -> None:
    """The file is gone, and the books do not know yet."""
    disk, gate = Gated(), Gate()
    keeper = kept_in(tmp_path, disk=disk)
    async with housekeeping(keeper) as house:
        await asyncio.to_thread(talk, keeper, 1, 600)
        store = keeper.store
        assert store is not None
        opened = disk.open

        def missing(path: Path) -> int:
            if path.exists() or gate.go.is_set():
                return opened(path)
            gate.reached.set()
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

        def unlink(path: Path) -> None:
            path.unlink()
            # The verification finds that out before the books do.
            gate.reached.wait(0.3)

        disk.open = missing  # type: ignore[method-assign]
        disk.unlink = unlink  # type: ignore[method-assign]
        deleting = asyncio.create_task(asyncio.to_thread(store.prune, to_bytes=0))
        while len(walked(tmp_path)) == 3:
            await asyncio.sleep(0.001)
        found = await house.verify().result()
        await deleting
        assert gate.reached.is_set(), "nobody looked in between"
        assert found.bad == []
        assert "invalid" not in store.stats().counts


# -- one at a time, and its end


async def test_one_operation_at_a_time_and_whoever_follows_may_leave(tmp_path: Path) -> None:
    disk, gate = Gated(), Gate()
    keeper = kept_in(tmp_path, disk=disk)
    async with housekeeping(keeper) as house:
        await asyncio.to_thread(talk, keeper, 1, 600)
        disk.before["open"] = gate
        operation = house.verify()
        asks: list[Callable[[], Any]] = [
            house.verify, house.clear, lambda: house.prune(1), lambda: house.forget("x")
        ]  # fmt: skip
        for refused in asks:
            with pytest.raises(CapacityError) as caught:
                refused()
            assert caught.value.reason == "housekeeping_busy"
        leaving = asyncio.create_task(operation.result())
        await asyncio.sleep(0)
        leaving.cancel()
        assert house.latest is operation
        gate.go.set()
        assert (await operation.result()).files == 3
        assert (operation.state, operation.progress.done) == ("done", operation.progress.total)
        assert (await house.clear().result()).files == 3


@pytest.mark.parametrize("ending", ["cancel", "close"])
async def test_a_deletion_that_is_given_up_leaves_whole_cuts(tmp_path: Path, ending: str) -> None:
    disk, gate = Gated(), Gate()
    keeper = kept_in(tmp_path, ram=0, disk=disk)
    async with housekeeping(keeper) as house:
        talks = [await asyncio.to_thread(talk, keeper, seed, 300 + seed) for seed in range(4)]
        disk.before["unlink"] = gate
        operation = house.clear()
        assert await asyncio.to_thread(gate.reached.wait, 20)
        operation.cancel()
        closing = asyncio.create_task(house.close()) if ending == "close" else None
        gate.go.set()
        with pytest.raises(Cancelled):
            await operation.result()
        assert operation.state == "cancelled"
        assert operation.outcome is not None
        assert operation.outcome.files == 2
        served = [serves(keeper, one, len(one.tokens), "durable") for one in talks]
        assert sorted(served) == [False, True, True, True]
        store = keeper.store
        assert store is not None
        nbytes = sum(nbytes for _path, nbytes, _modified in RealDisk().walk(tmp_path))
        assert store.stats().on_disk == nbytes
        if closing is not None:
            await closing
            with pytest.raises(BatonError) as caught:
                house.verify()
            assert caught.value.reason == "engine_stopping"


@pytest.mark.parametrize("ending", ["cancel", "close"])
async def test_a_verification_can_be_given_up(tmp_path: Path, ending: str) -> None:
    disk, gate = Gated(), Gate()
    keeper = kept_in(tmp_path, disk=disk)
    async with housekeeping(keeper) as house:
        await asyncio.to_thread(talk, keeper, 1, 600)
        disk.before["open"] = gate
        operation = house.verify()
        assert await asyncio.to_thread(gate.reached.wait, 20)
        closing = asyncio.create_task(house.close()) if ending == "close" else None
        operation.cancel()
        gate.go.set()
        with pytest.raises(Cancelled):
            await operation.result()
        assert (operation.state, operation.outcome) == ("cancelled", None)
        if closing is not None:
            await closing


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
async def test_a_disk_that_fails_ends_the_deletion_and_nothing_else(
    tmp_path: Path, number: int
) -> None:
    disk = Gated()
    keeper = kept_in(tmp_path, ram=0, disk=disk)
    async with housekeeping(keeper) as house:
        one = await asyncio.to_thread(talk, keeper, 1, 600)

        def fail(path: Path) -> None:
            raise OSError(number, os.strerror(number))

        disk.before["unlink"] = fail
        operation = house.clear()
        with pytest.raises(ConfigError) as caught:
            await operation.result()
        assert caught.value.reason == "cache_dir_unusable"
        assert (operation.state, operation.error) == ("failed", caught.value)
        assert serves(keeper, one, 600, "durable")
        del disk.before["unlink"]
        assert (await house.clear().result()).files == 3
        assert walked(tmp_path) == {}


async def test_a_deletion_lets_others_publish_in_between(tmp_path: Path) -> None:
    """Every unlink takes a slice: a cut that comes meanwhile does not wait for all of them."""
    disk = Gated()
    keeper = kept_in(tmp_path, ram=0, disk=disk)
    async with housekeeping(keeper) as house:
        for seed in range(8):
            await asyncio.to_thread(talk, keeper, seed, 20 + seed)
        reached = asyncio.Event()
        loop = asyncio.get_running_loop()
        unlinked: list[Path] = []

        def slow(path: Path) -> None:
            unlinked.append(path)
            loop.call_soon_threadsafe(reached.set)
            threading.Event().wait(0.06)

        disk.before["unlink"] = slow
        operation = house.clear()
        await reached.wait()
        new = await asyncio.to_thread(talk, keeper, 99, 100)
        assert len(unlinked) < 8
        assert (await operation.result()).files == 8
        assert serves(keeper, new, 100, "durable")
