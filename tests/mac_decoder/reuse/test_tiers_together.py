"""Both fetched tiers behind the ladder, against plain dictionaries: never wrong bytes.

Cuts are put, published, evicted, damaged, crashed and reopened in any order. After every step
the plans for all prompts are made and carried out, and invariant 4 holds: the resident tier
serves no deeper than the durable tier vouches for, and as deep as it may.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mac_decoder.reuse.cut import REST, Place, block_sizes, divide, extended, pieces
from mac_decoder.reuse.facts import Facts, Local, Plan, Publication, Restore
from mac_decoder.reuse.ladder import plan
from mac_decoder.reuse.resident import BARRED, Pinned, Resident
from mac_decoder.store import index, names
from mac_decoder.store.events import Deleting, Event, Invalid
from mac_decoder.store.manifest import Role
from mac_decoder.store.publisher import Job, Publisher
from mac_decoder.store.publishing import Published, Refused
from mac_decoder.store.store import Store
from protocol.errors import IntegrityError
from protocol.layout import Layout, regions
from protocol.messages import History
from tests.mac_decoder.reuse.made import (
    DECODE,
    FULL,
    PREFILL,
    RECURRENT,
    SLIDING,
    emptied,
    publication_of,
)
from tests.mac_decoder.store.made import (
    IDENTITY,
    SPACE,
    Destination,
    conversation,
    crashed,
    opened,
    rows_of,
)
from tests.mac_decoder.store.simulated import PowerCut, SimulatedDisk

Rows = dict[Place, np.ndarray]

TEXTS = [conversation(620, seed, shared=300) for seed in range(3)]
PROMPTS = [[*text[:length], 7] for text in TEXTS for length in (620, 512)] + [[*TEXTS[0][:300], 7]]
PLENTY = 1 << 30
RECIPES = (PREFILL, DECODE)

texts = st.sampled_from(range(len(TEXTS)))
lengths = st.sampled_from((1, 255, 256, 300, 512, 600, 620))
flavours = st.sampled_from((0, 1))
roles = st.sampled_from(("turn", "turn", "step", "shared"))


def common(ours: list[int], theirs: list[int]) -> int:
    """Length of the longest common beginning."""
    # Almost always one is the other's beginning, and lists compare fast.
    least = min(len(ours), len(theirs))
    if ours[:least] == theirs[:least]:
        return least
    return next(at for at in range(least) if ours[at] != theirs[at])


def below(layout: Layout, rows: Rows, position: int) -> Rows:
    """The part of a cut's rows that a cache at a smaller position has."""
    return {
        (r.index, r.role): rows[r.index, r.role][: r.nbytes] for r in regions(layout, 0, position)
    }


def served(layout: Layout, tier: Resident, store: Store, action: Restore) -> Destination | None:
    """A cache as its tier gives it; ``None`` where the cut has gone meanwhile."""
    assert isinstance(action.key, bytes)
    memory = Destination(layout, action.position)
    if action.tier == "durable":
        done = store.read(action.key, memory.into, position=action.position)
        return memory if done else None
    pinned = tier.pin(action.key, serving=True)
    if pinned is None:
        return None
    with pinned:
        for piece in pieces(layout, action.held, action.position):
            blocks = pinned.blocks
            data = pinned.cut.rest if piece.source == REST else blocks[piece.source].data
            part = data[piece.index, piece.role][piece.start : piece.start + piece.nbytes]
            memory.into(piece.index, piece.role, piece.offset, piece.nbytes)[:] = part.data
    return memory


def settled(name: bytes, outcome: Published | Refused) -> Publication:
    """What a publication's outcome means for the resident cut ``name``."""
    if isinstance(outcome, Published):
        return "superseded" if name in outcome.superseded else "published"
    return "out_of_space" if outcome.out_of_space else "refused"


@dataclass
class Known:
    """A cut as it was put: what a tier that serves it has to give back."""

    tokens: list[int]
    rows: Rows
    publication: Publication = "pending"
    role: Role = "turn"


@dataclass
class Stored:
    """A cut that is on disk. ``others`` are bytes of the same name that a crash may have left.

    ``promised``: it was acknowledged, so only damage may take it away.
    """

    tokens: list[int]
    rows: Rows
    promised: bool = True
    others: list[Rows] = field(default_factory=list)


class Together(RuleBasedStateMachine):
    """A ``Resident`` and a ``Store``, joined as an engine joins them."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.disk = SimulatedDisk()
        self.resident: dict[bytes, Known] = {}
        self.durable: dict[bytes, Stored] = {}
        self.lost: dict[bytes, list[Stored]] = {}
        """What is not on disk any more, but whose bytes may turn up again."""
        self.queue: list[bytes] = []
        self.flipped: dict[Path, bytes] = {}
        self.pinned: list[Pinned] = []

    @initialize(layout=st.sampled_from((FULL, SLIDING, RECURRENT)))
    def start(self, layout: Layout) -> None:
        self.layout = layout
        self.open()
        # Something to lose from the start.
        self.put(0, 300, 0, "shared")
        self.put(1, 620, 1, "turn")
        self.publish_what_waits()

    def open(self) -> None:
        """A process starts: the disk's cuts are there, the memory's are not."""
        self.tier = Resident(PLENTY)
        self.resident.clear()
        self.queue.clear()
        self.pinned.clear()
        self.store = opened(self.directory, self.disk)
        self.store._held.listener = self.heard

    # -- what an engine does with events and outcomes

    def heard(self, event: Event) -> None:
        if isinstance(event, Invalid):
            for name in event.cuts:
                self.tier.settle(name, "invalid")
                if name in self.resident:
                    self.resident[name].publication = "invalid"
                assert not self.durable[name].promised or self.is_damaged(name)
                self.lose(name)
        elif isinstance(event, Deleting) and event.cut:
            # Not for a prune: so there are published cuts here that outlive what vouched for them.
            became: dict[str, Publication] = {"room": "out_of_space", "superseded": "superseded"}
            if event.reason in became:
                self.tier.settle(event.cut, became[event.reason], was="published")
                held = self.resident.get(event.cut)
                if held and held.publication == "published":
                    held.publication = became[event.reason]
            self.lose(event.cut)

    def told(self, name: bytes, known: Known, outcome: Published | Refused) -> None:
        self.tier.settle(name, settled(name, outcome))
        if name in self.resident:
            self.resident[name].publication = settled(name, outcome)
        if isinstance(outcome, Refused):
            # A crash may undo that its files were removed again.
            self.lost.setdefault(name, []).append(Stored(known.tokens, known.rows))
        elif not outcome.existed and name not in outcome.superseded:
            self.durable[name] = Stored(known.tokens, known.rows)
            self.lost.pop(name, None)
        self.found_again(promised=True)
        if isinstance(outcome, Published):
            assert name in self.durable or name in outcome.superseded

    def lose(self, name: bytes) -> None:
        if name in self.durable:
            self.lost.setdefault(name, []).append(self.durable.pop(name))

    def found_again(self, *, promised: bool) -> None:
        """Cuts come back when their missing block does, or when a crash undid a deletion."""
        for name in [name for name in self.lost if self.store.holds(name)]:
            stored, *others = self.lost.pop(name)
            others = [other.rows for other in others]
            self.durable[name] = Stored(stored.tokens, stored.rows, promised, others)

    def is_damaged(self, name: bytes) -> bool:
        """Whether a file that the cut needs was tampered with."""
        cut = self.store._held.ledger.cuts.get(name)
        if cut is None:
            return False
        paths = [names.cut_path(cut.file)]
        paths += [names.block_path(node.file.digest) for node in cut.nodes() if node.file]
        files = self.disk.files()
        found = [self.directory / path for path in paths]
        return any(p in self.flipped and files.get(p) == self.flipped[p] for p in found)

    # -- rules

    @rule(text=texts, length=lengths, flavour=flavours, role=roles)
    def put(self, text: int, length: int, flavour: int, role: Role) -> None:
        tokens = TEXTS[text][:length]
        history = (History(0, length, RECIPES[flavour]),)
        self.keep(tokens, rows_of(self.layout, tokens, flavour), history, role)

    def put_any(self, data: st.DataObject) -> None:
        self.put(*(data.draw(each) for each in (texts, lengths, flavours, roles)))

    @rule(data=st.data())
    def put_and_publish(self, data: st.DataObject) -> None:
        """As after each answer; so that there is mostly something to lose."""
        self.put_any(data)
        self.publish_what_waits()

    @rule(data=st.data(), text=texts, length=lengths, flavour=flavours)
    def go_on(self, data: st.DataObject, text: int, length: int, flavour: int) -> None:
        """A cut that has the blocks of the one it was built from, and brings the others."""
        tokens = TEXTS[text][:length]
        held = self.held()
        bases = [n for n in held if common(held[n].tokens, tokens) == len(held[n].tokens) < length]
        if not bases:
            return
        name = data.draw(st.sampled_from(bases))
        pinned = self.tier.pin(name)
        assert pinned
        with pinned:
            whole = len(pinned.cut.blocks)
            rows = rows_of(self.layout, tokens, flavour)
            for place, nbytes in block_sizes(self.layout).items():
                inherited = held[name].rows[place][: whole * nbytes]
                rows[place] = np.concatenate((inherited, rows[place][whole * nbytes :]))
            span = History(pinned.cut.position, length, RECIPES[flavour])
            history = extended(pinned.cut.history, span)
            self.keep(tokens, rows, history, "turn", known=whole, continues=pinned)

    def keep(
        self,
        tokens: list[int],
        rows: Rows,
        history: tuple[History, ...],
        role: Role,
        publication: Publication = "pending",
        known: int = 0,
        continues: Pinned | None = None,
    ) -> None:
        cut, blocks = divide(self.layout, SPACE, tokens, rows, history)
        done = self.tier.put(
            SPACE, cut, blocks[known:], publication=publication, continues=continues
        )
        there = self.resident.get(done.key)
        if done.outcome == "stored":
            self.resident[done.key] = Known(tokens, rows, publication, role)
            if publication == "pending":
                self.queue.append(done.key)
        elif done.outcome == "no_room" and there and there.publication in BARRED:
            assert publication_of(self.tier, done.key) is None
        self.forget_evicted()

    def held(self) -> dict[bytes, Known]:
        """The resident cuts that may serve."""
        return {n: k for n, k in self.resident.items() if k.publication not in BARRED}

    def forget_evicted(self) -> None:
        for name in list(self.resident):
            if publication_of(self.tier, name) is None:
                del self.resident[name]

    def job(self, name: bytes, released: list[bytes]) -> Job | None:
        """The queued cut, pinned as long as its publication takes."""
        pinned = self.tier.pin(name)
        if pinned is None:
            return None

        def release() -> None:
            released.append(name)
            pinned.release()

        role = self.resident[name].role
        return Job(SPACE, IDENTITY, pinned.cut, pinned.blocks, role, release=release)

    @rule()
    def publish_what_waits(self) -> None:
        """In the publisher's own thread, as it comes: steps wait for what extends them."""
        publisher = Publisher(
            self.store, lambda job, outcome: self.told(job.name, self.resident[job.name], outcome)
        )
        released: list[bytes] = []
        jobs = [job for name in self.queue if (job := self.job(name, released))]
        self.queue.clear()
        with publisher._ready:
            # None is taken before all wait: the same cuts are absorbed in every run.
            queued = [publisher.submit(job) for job in jobs]
            assert all(queued)
        assert publisher.close(60)
        assert sorted(released) == sorted(job.name for job in jobs)

    def publish_one(self) -> None:
        name = self.queue.pop(0)
        job = self.job(name, [])
        if job is None:
            return
        known = self.resident[name]
        try:
            outcome = self.store.publish(SPACE, IDENTITY, job.cut, job.blocks, role=job.role)
        except PowerCut:
            known = Known(known.tokens, known.rows)
            self.lost.setdefault(name, []).append(Stored(known.tokens, known.rows))
            raise
        self.told(name, known, outcome)
        job.release()

    @rule(text=texts, publish=st.booleans())
    def prefill_in_steps(self, text: int, publish: bool) -> None:
        """Steps that are still waiting when the whole is there are never written."""
        for length in (256, 512):
            self.put(text, length, 0, "step")
        self.put(text, 620, 0, "turn")
        if publish:
            self.publish_what_waits()

    @rule(data=st.data(), trouble=st.sampled_from(("fails", "full", "full", "crash")))
    def publish_in_trouble(self, data: st.DataObject, trouble: str) -> None:
        disk = self.disk
        self.put_any(data)
        if not self.queue:
            return
        after = disk.operations + data.draw(st.integers(1, 25))
        if trouble == "fails":
            disk.fail_kinds = frozenset({"create", "write", "sync", "rename", "barrier", "commit"})
            disk.fail_at = after
            self.publish_one()
            disk.fail_at = disk.fail_kinds = None
        elif trouble == "full":
            # What was not used for longest makes room; where that is not enough, it is refused.
            # Most of what a commit asks for is room for the index.
            growth = self.store._held.index.growth(data.draw(st.integers(34, 36)))
            disk.capacity = disk.nbytes + growth + data.draw(st.sampled_from((-8_000, 0, 5_000)))
            self.publish_one()
            disk.capacity = 1 << 40
        else:
            disk.cut_at = after
            with contextlib.suppress(PowerCut):
                self.publish_one()
            self.crash()

    @rule(how=st.sampled_from(("closed", "crashed", "crashed, without the index")))
    def restart(self, how: str) -> None:
        if how == "closed":
            self.store.close()
            self.open()
        else:
            self.crash(lose_index=how != "crashed")

    def crash(self, lose_index: bool = False) -> None:
        damaged = {name for name in self.durable if self.is_damaged(name)}
        self.disk = crashed(self.directory, self.disk)
        if lose_index:
            index.remove(self.directory)
        self.open()
        for name in damaged:
            if not self.store.holds(name):
                self.lose(name)
        self.found_again(promised=False)

    @rule(part=st.sampled_from((0.5, 0.9, 0.98)))
    def evict_from_disk(self, part: float) -> None:
        self.store.prune(to_bytes=int(self.store.stats().on_disk * part))

    @rule(budget=st.sampled_from((0, 8_000, 30_000)))
    def evict_from_memory(self, budget: int) -> None:
        self.tier.resize(budget)
        self.forget_evicted()
        assert self.tier.stats().used_bytes <= budget or self.pinned
        # Without any, nothing would be put any more.
        self.tier.resize(budget or PLENTY)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """A sequence goes on from a cut and holds it, whatever becomes of that."""
        pinned = self.tier.pin(data.draw(st.sampled_from(sorted(self.resident))))
        assert pinned
        self.pinned.append(pinned)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.pinned.pop(0).release()
        self.forget_evicted()

    def targets(self) -> list[Path]:
        """Files of blocks and cuts; none while one is damaged: readers race for what is found."""
        files = self.disk.files()
        if any(files.get(path) == content for path, content in self.flipped.items()):
            return []
        kept = (names.BLOCKS, names.CUTS)
        return sorted(path for path in files if path.parent.name in kept and files[path])

    @precondition(lambda self: self.targets())
    @rule(data=st.data(), forget=st.booleans())
    def damage(self, data: st.DataObject, forget: bool) -> None:
        """A byte flips; ``forget`` that nobody reads it from memory instead."""
        path = data.draw(st.sampled_from(self.targets()))
        content = bytearray(self.disk.files()[path])
        content[data.draw(st.integers(0, len(content) - 1))] ^= 0x20
        self.disk.put(path, bytes(content))
        self.flipped[path] = bytes(content)
        if forget:
            emptied(self.tier)
            self.resident.clear()

    # -- what must be true

    def facts(self, prompt: list[int]) -> Facts:
        # The disk first: what it finds damaged is then not offered from memory.
        durable = self.store.holding(SPACE, prompt)
        resident = self.tier.holding(SPACE, prompt)
        return Facts(len(prompt), self.layout, "local", resident=resident, durable=durable)

    def deepest_on_disk(self, prompt: list[int]) -> int:
        return max((common(stored.tokens, prompt) for stored in self.durable.values()), default=0)

    def check(self, prompt: list[int], found: Plan) -> None:
        """Invariant 4, from the dictionaries alone, and that nothing is left unused."""
        vouched, end = self.deepest_on_disk(prompt), len(prompt) - 1
        action = found.action
        if isinstance(action, Restore) and action.tier == "resident":
            assert isinstance(action.key, bytes)
            held = self.resident[action.key]
            assert held.publication not in BARRED
            assert action.position <= common(held.tokens, prompt)
            if held.publication in ("published", "superseded"):
                assert action.position <= vouched
        free = [
            len(held.tokens)
            for held in self.resident.values()
            if held.publication in ("pending", "out_of_space")
            and held.tokens == prompt[: len(held.tokens)]
        ]
        sure = [
            len(stored.tokens)
            for name, stored in self.durable.items()
            if stored.promised
            and stored.tokens == prompt[: len(stored.tokens)]
            and not self.is_damaged(name)
        ]
        assert action.position >= max((p for p in (*free, *sure) if p <= end), default=0)

    def carried_out(self, action: Restore) -> bool:
        """Whether the restore succeeded; then every byte is one that was put."""
        assert isinstance(action.key, bytes)
        rows, sure = [], True
        if action.tier == "resident":
            rows = [self.resident[action.key].rows]
        else:
            stored = self.durable[action.key]
            rows = [stored.rows, *stored.others]
            sure = stored.promised and not self.is_damaged(action.key)
        try:
            memory = served(self.layout, self.tier, self.store, action)
        except IntegrityError:
            assert not sure
            assert action.key not in self.durable
            return False
        assert memory
        assert any(memory.holds(below(self.layout, each, action.position)) for each in rows)
        return True

    def ask(self, prompt: list[int]) -> Restore | None:
        """Serve a prompt: after a failed restore, the next plan is another one."""
        tried = set()
        while True:
            found = plan(self.facts(prompt))
            self.check(prompt, found)
            if not isinstance(found.action, Restore):
                assert isinstance(found.action, Local)
                return None
            assert found.action not in tried
            tried.add(found.action)
            if self.carried_out(found.action):
                return found.action

    @rule(text=texts, length=lengths)
    def get(self, text: int, length: int) -> None:
        """What came from disk is kept in memory too, and is published already."""
        prompt = [*TEXTS[text][:length], 7]
        action = self.ask(prompt)
        if action and action.tier == "durable" and action.position == action.held:
            assert isinstance(action.key, bytes)
            stored = self.durable[action.key]
            if not stored.others:
                manifest = self.store.manifest(action.key)
                assert manifest
                self.keep(stored.tokens, stored.rows, manifest.history, "turn", "published")

    @invariant()
    def every_prompt_is_served_rightly(self) -> None:
        for prompt in PROMPTS:
            self.ask(prompt)

    @invariant()
    def both_tiers_hold_what_the_dictionaries_say(self) -> None:
        for name, known in self.resident.items():
            assert publication_of(self.tier, name) == known.publication
            if known.publication == "superseded":
                assert not self.store.holds(name)
        assert self.tier.stats().cuts == len(self.resident)
        for name, stored in self.durable.items():
            assert self.store.holds(name) or not stored.promised
        unknown = self.store._held.ledger.cuts.keys() - self.durable.keys()
        assert not any(self.store.holds(name) for name in unknown)

    def teardown(self) -> None:
        for pinned in self.pinned:
            pinned.release()
        emptied(self.tier)
        stats = self.tier.stats()
        assert (stats.used_bytes, stats.blocks) == (0, 0)
        self.store.close()
        shutil.rmtree(self.directory)


Together.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestTogether = Together.TestCase


def test_a_cut_that_the_disk_had_no_room_for_any_more_serves_on() -> None:
    both = Together()
    both.start(FULL)
    name = next(name for name, known in both.resident.items() if len(known.tokens) == 620)
    prompt = [*TEXTS[1], 7]
    both.put(2, 600, 0, "turn")
    both.disk.capacity = both.disk.nbytes + both.store._held.index.growth(35)
    both.publish_one()
    assert len(both.durable) == 2
    assert name not in both.durable
    assert publication_of(both.tier, name) == "out_of_space"
    found = plan(both.facts(prompt))
    assert found.action == Restore("resident", name, 620, 620)
    assert "durable_out_of_space" in found.reasons
    both.teardown()


def test_no_loss_lets_an_invalid_cut_serve_again() -> None:
    """Its block is damaged, so the cut is withheld; later its own file has to make room."""
    both = Together()
    both.start(FULL)
    name = next(name for name, known in both.resident.items() if len(known.tokens) == 620)
    cut = both.store._held.ledger.cuts[name]
    assert cut.node
    assert cut.node.file
    both.disk.put(both.directory / names.block_path(cut.node.file.digest), b"damage")
    both.flipped[both.directory / names.block_path(cut.node.file.digest)] = b"damage"
    assert [bad.reason for bad in both.store.verify().bad] == ["file_malformed"]
    assert publication_of(both.tier, name) == "invalid"
    sweeper = both.store._sweeper
    sweeper.delete(sweeper.plan(PLENTY), "room")
    assert name not in both.store._held.ledger.cuts
    assert publication_of(both.tier, name) == "invalid"
    both.teardown()


def test_threads_are_served_right_bytes_while_both_tiers_change(tmp_path: Path) -> None:
    """As in an engine: one thread keeps and publishes, one reads, one takes things away."""
    tier = Resident(PLENTY)
    wrong: list[str] = []
    served_by: list[str] = []

    def heard(event: Event) -> None:
        if isinstance(event, Deleting) and event.cut and event.reason in ("room", "superseded"):
            became = "out_of_space" if event.reason == "room" else "superseded"
            tier.settle(event.cut, became, was="published")

    store = Store.open(tmp_path, bytes(32), 1 << 30, 0, listener=heard)
    publisher = Publisher(
        store, lambda job, outcome: tier.settle(job.name, settled(job.name, outcome))
    )
    texts = [tokens[:length] for tokens in TEXTS for length in (300, 512, 620)]
    stop = threading.Event()

    def keeps() -> None:
        draw = np.random.default_rng(1)
        for _ in range(60):
            which = int(draw.integers(len(texts)))
            history = (History(0, len(texts[which]), PREFILL),)
            rows = rows_of(SLIDING, texts[which])
            put = tier.put(SPACE, *divide(SLIDING, SPACE, texts[which], rows, history))
            pinned = tier.pin(put.key) if put.outcome == "stored" else None
            if pinned:
                job = Job(SPACE, IDENTITY, pinned.cut, pinned.blocks, release=pinned.release)
                publisher.submit(job)
            if draw.integers(3) == 0:
                publisher.drain()

    def takes_away() -> None:
        draw = np.random.default_rng(2)
        while not stop.wait(0.005):
            emptied(tier) if draw.integers(4) else store.prune(to_bytes=60_000)

    def reads(seed: int) -> None:
        draw = np.random.default_rng(seed)
        while not stop.is_set():
            which = int(draw.integers(len(texts)))
            prompt = [*texts[which], 7]
            facts = Facts(
                len(prompt), SLIDING, "local", resident=tier.holding(SPACE, prompt),
                durable=store.holding(SPACE, prompt),
            )  # fmt: skip
            action = plan(facts).action
            memory = served(SLIDING, tier, store, action) if isinstance(action, Restore) else None
            if isinstance(action, Restore) and memory:
                served_by.append(action.tier)
                if not memory.holds(rows_of(SLIDING, prompt[: action.position])):
                    wrong.append("bytes")

    others = [threading.Thread(target=takes_away)]
    others += [threading.Thread(target=reads, args=(seed,)) for seed in (3, 4)]
    for thread in others:
        thread.start()
    keeps()
    assert publisher.close(60)
    stop.set()
    for thread in others:
        thread.join()
    assert wrong == []
    assert set(served_by) == {"resident", "durable"}
    assert store.verify().bad == []
    emptied(tier)
    assert (tier.stats().used_bytes, tier.stats().pinned_bytes) == (0, 0)
    store.close()


@pytest.mark.soak
def test_a_long_life_together() -> None:
    run_state_machine_as_test(
        Together, settings=settings(max_examples=300, stateful_step_count=40, deadline=None)
    )
