"""What is kept of earlier prefills: the bits of a cold pass, for the same tokens, counted."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transformers.cache_utils import DynamicIndexedLayer

from gb10_producer.memory import Ledger
from gb10_producer.prefill import Rows, State, TorchPrefiller
from gb10_producer.prefix_cache import Chain, Footprint, PrefixCache, RowForm, Tile, footprint
from protocol.errors import (
    Cancelled,
    CapacityError,
    ConfigError,
    EngineFault,
    LocalProtocolError,
)
from protocol.layout import KEY, STATE, schedule
from protocol.messages import NO_SPACE
from tests import crossing
from tests.gb10_producer.test_prefill import fail_in_layer, ignore, never, raise_it
from tests.ordinary import examples, usual
from tests.tiny_models import NAMES, REFUSED, WINDOW

Checkpoints = Callable[..., Path]
TILE = crossing.TILE
CARRIED = [name for name in NAMES if name not in REFUSED]
KINDS = ("llama", "muse_glimmer", "deepseek_v3", "lfm2", "qwen3_next", "falcon_h1")
PLENTY = 1 << 30


class Twins:
    """One model, prefilled with what earlier prefills left (``warm``) and without (``cold``)."""

    def __init__(self, path: Path, tile: int = TILE, budget: int = PLENTY) -> None:
        self.cold = crossing.producer(path, tile)
        self.warm = TorchPrefiller(self.cold._model, tile)
        self.ledger = Ledger(PLENTY)
        self.warm.keep_prefixes(self.ledger, budget)

    @property
    def prefixes(self) -> PrefixCache:
        return self.warm._prefixes

    def check(
        self,
        prompt: Sequence[int],
        cut: int,
        end: int,
        held: int,
        extra: tuple[int, ...] = (),
    ) -> None:
        """The warm one begins at ``held``, and every byte is the cold one's."""
        assert self.warm.recall(prompt, end, extra) == held
        expected = crossing.collect_all(self.cold, prompt, cut, end, extra)
        found = crossing.collect_all(self.warm, prompt, cut, end, extra)
        assert found.keys() == expected.keys()
        for stop, rows in expected.items():
            assert found[stop].keys() == rows.keys()
            assert [p for p in rows if not np.array_equal(found[stop][p], rows[p])] == []


def branch(prompt: Sequence[int], shared: int, length: int) -> list[int]:
    """A prompt that parts from ``prompt`` after ``shared`` tokens."""
    other = [prompt[shared] ^ 1, *crossing.tokens(length, seed=11)]
    return [*prompt[:shared], *other][:length]


def tensors(tile: Tile) -> Iterator[torch.Tensor]:
    """All that a tile keeps alive."""
    for piece in tile.rows.values():
        yield from (piece.keys, piece.values)
    for states in tile.states.values():
        yield from (*states.convolution.values(), *states.recurrent.values())


def kept_bytes(prefixes: PrefixCache) -> int:
    """The sizes of all distinct storages."""
    storages = [t.untyped_storage() for tile in prefixes._tiles.values() for t in tensors(tile)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# -- the same bits


@pytest.mark.both_blas
@pytest.mark.parametrize("name", usual(CARRIED, KINDS))
def test_a_pass_from_held_tiles_has_the_bits_of_a_cold_one(
    name: str, checkpoint: Checkpoints
) -> None:
    it = Twins(checkpoint(name))
    prompt = crossing.tokens(290)
    other = branch(prompt, 200, 330)
    it.check(prompt, 0, 270, 0)
    it.check(prompt, 270, 290, 256)
    it.check(other, 70, 330, 192)
    it.check(branch(prompt, 90, 170), 90, 170, 64)
    it.check(other, 0, 320, 320)
    assert it.prefixes.used == it.ledger.reserved == kept_bytes(it.prefixes)


@pytest.mark.both_blas
@pytest.mark.parametrize("name", KINDS)
def test_extra_cuts_divide_no_tile_that_is_kept(name: str, checkpoint: Checkpoints) -> None:
    it = Twins(checkpoint(name))
    prompt = crossing.tokens(290)
    it.check(prompt, 0, 200, 0, (195,))
    it.check(prompt, 64, 200, 192, (193, 195))
    it.check(prompt, 0, 200, 192, (192,))
    it.check(prompt, 0, 256, 192, (250,))  # its last tile is divided: nobody is given it
    it.check(prompt, 0, 256, 192)
    it.check(prompt, 100, 256, 192, (250,))  # nor does it take the whole one
    it.check(prompt, 0, 290, 256)


@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("name", usual(["muse_glimmer", "gpt_oss"], ["muse_glimmer"]))
def test_windows_go_on_wherever_they_stand(name: str, tile: int, checkpoint: Checkpoints) -> None:
    """Shorter than a tile, as long, and longer; before, at and behind the first wrap."""
    it = Twins(checkpoint(name), tile)
    prompt = crossing.tokens(6 * WINDOW)
    for last in range(tile, 4 * WINDOW, tile):
        it.check(prompt, max(0, last - WINDOW - 3), last, last - tile)
        it.check(prompt, 0, last, last)
        it.check(prompt, max(0, last - 5), last + 1, last)
        it.check(prompt, last, last + tile - 1, last)


@pytest.mark.both_blas
@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "granitemoehybrid", "falcon_h1"])
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_states_of_other_dtypes_than_the_rows_go_on(
    name: str, dtype: str, checkpoint: Checkpoints
) -> None:
    it = Twins(checkpoint(name, dtype=dtype))
    prompt = crossing.tokens(220)
    it.check(prompt, 0, 200, 0)
    it.check(prompt, 100, 220, 192)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_restored_lies_in_memory_as_what_was_computed(
    name: str, checkpoint: Checkpoints
) -> None:
    """Products round by how their matrices lie: the same shapes and strides, not only values."""
    it = Twins(checkpoint(name))
    prompt = crossing.tokens(192)
    it.check(prompt, 0, 150, 0)
    chain = it.prefixes.find(prompt, 150)
    with it.warm._model.open_pass(0, 150, ignore) as restored:
        restored.resume(it.prefixes, chain)
    with it.cold._model.open_pass(0, 150, ignore) as computed:
        for first in (0, 64):
            computed.compute(prompt[first : first + 64], first)
    for ours, theirs in zip(restored._cache.layers, computed._cache.layers, strict=True):
        known = {**vars(theirs), **vars(ours)}
        assert vars(ours).keys() == vars(theirs).keys()
        for attribute in known:
            same(getattr(ours, attribute), getattr(theirs, attribute))


def same(ours: object, theirs: object) -> None:
    """Equal, tensors bit by bit and in the order of their strides."""
    if isinstance(theirs, dict):
        assert isinstance(ours, dict)
        assert ours.keys() == theirs.keys()
        for key in theirs:
            same(ours[key], theirs[key])
    elif isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor)
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        order = [sorted(range(t.ndim), key=t.stride().__getitem__) for t in (ours, theirs)]
        assert order[0] == order[1]
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("cut", [0, 70, 140])
def test_held_rows_come_in_the_order_of_the_schedule(
    name: str, cut: int, checkpoint: Checkpoints
) -> None:
    it = Twins(checkpoint(name))
    prompt, end = crossing.tokens(150), 150
    it.warm.prefill(prompt, 0, end, ignore, never, ignore)
    got: list[tuple[int, int, int]] = []
    reached: list[int] = []

    def emit(item: Rows | State) -> None:
        if isinstance(item, Rows):
            got.append((item.index, item.first, item.last))
        else:
            got.append((item.index, item.position, STATE + item.number))

    assert it.warm.prefill(prompt, cut, end, emit, never, reached.append) == end - 128
    slots = schedule(it.warm.layout, cut, end, TILE)
    assert got == [
        (slot.index, slot.first, slot.last if slot.role == KEY else slot.role)
        for slot in slots
        if slot.role == KEY or slot.role >= STATE
    ]
    assert reached == [64, 128, 150]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_kept_is_never_written_to_again(name: str, checkpoint: Checkpoints) -> None:
    it = Twins(checkpoint(name))
    prompt = crossing.tokens(300)
    it.warm.prefill(prompt, 0, 150, ignore, never, ignore)
    kept = [t for tile in it.prefixes._tiles.values() for t in tensors(tile)]
    before = [tensor.clone() for tensor in kept]
    assert len(kept) >= 16
    for other, end in ((prompt, 300), (branch(prompt, 130, 300), 290), (prompt, 128)):
        it.warm.prefill(other, 0, end, ignore, never, ignore)
    assert all(map(torch.equal, kept, before))


def test_what_is_emitted_is_nobody_elses_memory(checkpoint: Checkpoints) -> None:
    it = Twins(checkpoint("llama"))
    prompt = crossing.tokens(150)
    it.warm.prefill(prompt, 0, 150, ignore, never, ignore)
    kept = [t.untyped_storage() for tile in it.prefixes._tiles.values() for t in tensors(tile)]
    emitted: list[Rows | State] = []
    it.warm.prefill(prompt, 0, 150, emitted.append, never, ignore)
    for item in emitted:
        assert isinstance(item, Rows)
        at = np.frombuffer(item.key, np.uint8).ctypes.data
        assert not any(s.data_ptr() <= at < s.data_ptr() + s.nbytes() for s in kept)


# -- the same tokens


@pytest.mark.parametrize("place", [0, 1, 63])
def test_another_token_early_is_another_prompt(place: int, checkpoint: Checkpoints) -> None:
    it = Twins(checkpoint("llama"))
    prompt = crossing.tokens(150)
    it.check(prompt, 0, 150, 0)
    it.check(branch(prompt, place, 150), 0, 150, 0)
    it.check(prompt, 0, 150, 128)


def test_a_hash_leads_to_a_candidate_only(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tiles of equal length have one name: tokens, and what lies before them, decide."""
    monkeypatch.setattr(PrefixCache, "_name", lambda self, chain, piece: bytes(len(chain.tiles)))
    it = Twins(checkpoint("lfm2"))
    prompt = crossing.tokens(200)
    it.check(prompt, 0, 200, 0)
    it.check(branch(prompt, 5, 200), 0, 200, 0)
    it.check(branch(prompt, 70, 200), 0, 200, 64)
    it.check([*branch(prompt, 5, 64), *prompt[64:]], 0, 200, 0)
    it.check(prompt, 0, 200, 192)
    assert it.prefixes.used == it.ledger.reserved == kept_bytes(it.prefixes)


def test_a_tile_belongs_to_what_lies_before_it(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tiles of equal tokens have one name, whatever they follow."""
    monkeypatch.setattr(PrefixCache, "_name", lambda self, chain, piece: piece.tobytes())
    it = Twins(checkpoint("lfm2"))
    prompt = crossing.tokens(200)
    other = [*branch(prompt, 5, 64), *prompt[64:]]
    it.check(prompt, 0, 200, 0)
    it.check(other, 0, 200, 0)
    it.check(other, 0, 200, 64)
    it.check(prompt, 0, 200, 192)
    assert it.prefixes.used == it.ledger.reserved == kept_bytes(it.prefixes)


def test_names_say_nothing_about_tokens(checkpoint: Checkpoints) -> None:
    one, other = (Twins(checkpoint("llama")) for _ in range(2))
    for it in (one, other):
        it.warm.prefill(crossing.tokens(150), 0, 150, ignore, never, ignore)
    assert one.prefixes._tiles.keys().isdisjoint(other.prefixes._tiles.keys())
    chain = one.prefixes.find(crossing.tokens(150), 150)
    assert len(chain.tiles) == 2
    assert "array(" not in repr(chain)


# -- an end before the end


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_withdrawn_prefill_leaves_its_whole_tiles(name: str, checkpoint: Checkpoints) -> None:
    it = Twins(checkpoint(name))
    prompt = crossing.tokens(300)
    reached: list[int] = []
    with pytest.raises(Cancelled):
        it.warm.prefill(prompt, 0, 300, ignore, lambda: len(reached) == 2, reached.append)
    assert len(it.prefixes) == 2
    assert it.prefixes.used == it.ledger.reserved == kept_bytes(it.prefixes)
    it.check(prompt, 0, 300, 128)
    it.check(prompt, 0, 300, 256)


def test_held_rows_wait_for_nobody_who_left(checkpoint: Checkpoints) -> None:
    it = Twins(checkpoint("llama"))
    prompt = crossing.tokens(300)
    it.warm.prefill(prompt, 0, 300, ignore, never, ignore)
    reached: list[int] = []
    with pytest.raises(Cancelled):
        it.warm.prefill(prompt, 0, 300, ignore, lambda: len(reached) == 2, reached.append)
    assert reached == [64, 128]


FAILURES = [torch.OutOfMemoryError("no room"), RuntimeError("the device is gone")]


@pytest.mark.parametrize("failure", FAILURES, ids=["no room", "fault"])
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_pass_that_fails_leaves_nothing(
    name: str, failure: Exception, checkpoint: Checkpoints
) -> None:
    """Neither its own tiles nor others': the memory is needed, or the device not to be believed."""
    it = Twins(checkpoint(name))
    prompt = crossing.tokens(300)
    it.warm.prefill(crossing.tokens(150, seed=3), 0, 150, ignore, never, ignore)
    reached: list[int] = []

    def progress(position: int) -> None:
        reached.append(position)
        if position == 128:
            fail_in_layer(it.warm, 5, lambda: raise_it(failure))

    with pytest.raises((CapacityError, EngineFault)):
        it.warm.prefill(prompt, 0, 300, ignore, never, progress)
    assert reached == [64, 128]
    assert (len(it.prefixes), it.prefixes.used, it.ledger.reserved) == (0, 0, 0)
    it.check(prompt, 0, 300, 0)
    it.check(prompt, 0, 300, 256)


def test_what_emit_raises_leaves_no_unfinished_tile(checkpoint: Checkpoints) -> None:
    it = Twins(checkpoint("falcon_h1"))
    seen: list[int] = []

    def emit(item: Rows | State) -> None:
        seen.append(item.index)
        if len(seen) == 12:
            raise Cancelled("nobody reads", reason="job_abandoned")

    with pytest.raises(Cancelled):
        it.warm.prefill(crossing.tokens(150), 0, 150, emit, never, ignore)
    assert len(it.prefixes) == 1
    assert it.prefixes.used == it.ledger.reserved == kept_bytes(it.prefixes)


# -- the bytes


def test_what_is_forgotten_is_free(checkpoint: Checkpoints) -> None:
    it = Twins(checkpoint("qwen3_next"))
    it.warm.prefill(crossing.tokens(200), 0, 200, ignore, never, ignore)
    tiles = [weakref.ref(tile) for tile in it.prefixes._tiles.values()]
    rows = [weakref.ref(t) for tile in it.prefixes._tiles.values() for t in tensors(tile)]
    assert len(tiles) == 3
    used = it.prefixes.used
    it.prefixes.reclaim(1)
    assert it.prefixes.used < used
    assert [tile() is None for tile in tiles].count(True) == 1
    it.prefixes.clear()
    assert (it.prefixes.used, it.ledger.reserved) == (0, 0)
    assert [ref for ref in [*tiles, *rows] if ref() is not None] == []


def test_the_least_recently_used_prompt_goes_first(checkpoint: Checkpoints) -> None:
    """From its end on, so that what others share with it stays."""
    it = Twins(checkpoint("llama"))
    tile_bytes = it.warm._form.nbytes
    it.warm.keep_prefixes(it.ledger, 5 * tile_bytes)
    first, second = crossing.tokens(140), crossing.tokens(140, seed=3)
    shares = branch(second, 70, 140)
    for prompt in (first, second):
        it.warm.prefill(prompt, 0, 140, ignore, never, ignore)
    assert it.warm.recall(first, 140) == 128
    it.warm.prefill(shares, 0, 140, ignore, never, ignore)
    assert it.prefixes.used == it.ledger.reserved == 5 * tile_bytes
    third = crossing.tokens(64, seed=4)
    it.warm.prefill(third, 0, 64, ignore, never, ignore)
    held = [it.warm.recall(prompt, len(prompt)) for prompt in (first, second, shares, third)]
    assert held == [128, 64, 128, 64]
    it.warm.prefill(crossing.tokens(64, seed=5), 0, 64, ignore, never, ignore)
    it.check(first, 0, 140, 64)


def test_a_prompt_longer_than_the_budget_keeps_its_beginning(checkpoint: Checkpoints) -> None:
    it = Twins(checkpoint("muse_glimmer"))
    it.warm.keep_prefixes(it.ledger, 3 * it.warm._form.nbytes - 1)
    it.warm.prefill(crossing.tokens(70, seed=3), 0, 70, ignore, never, ignore)
    prompt = crossing.tokens(300)
    it.check(prompt, 0, 300, 0)
    it.check(prompt, 0, 300, 128)
    assert len(it.prefixes) == 2


def test_prompts_of_another_space_are_not_compared(checkpoint: Checkpoints) -> None:
    """Nor do their times tell what others asked."""
    it = Twins(checkpoint("llama"))
    prompt = crossing.tokens(150)
    held: list[int] = []
    for space in (b"a" * 32, b"b" * 32, b"a" * 32, b"b" * 32, NO_SPACE, NO_SPACE):
        it.warm.turn_to(space)
        held.append(it.warm.recall(prompt, 150))
        it.check(prompt, 0, 150, held[-1])
    assert held == [0, 0, 128, 128, 0, 0]
    assert len(it.prefixes) == 4


def test_no_budget_keeps_nothing(checkpoint: Checkpoints) -> None:
    it = Twins(checkpoint("llama"), budget=0)
    prompt = crossing.tokens(150)
    it.check(prompt, 0, 150, 0)
    it.check(prompt, 0, 150, 0)
    assert (len(it.prefixes), it.ledger.reserved) == (0, 0)


def test_what_others_reserved_is_not_taken(checkpoint: Checkpoints) -> None:
    it = Twins(checkpoint("llama"))
    it.ledger = Ledger(4 * it.warm._form.nbytes)
    it.warm.keep_prefixes(it.ledger, PLENTY)
    prompt = crossing.tokens(300)
    with it.ledger.reserve(it.ledger.limit - it.warm._form.nbytes):
        it.check(prompt, 0, 300, 0)
        assert len(it.prefixes) == 1
    it.check(prompt, 0, 300, 64)
    assert len(it.prefixes) == 4


def test_memory_that_is_not_there_costs_no_prefill(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Twins(checkpoint("llama"))
    prompt = crossing.tokens(150)
    expected = crossing.collect(it.cold, prompt, 0, 150)
    empty = torch.empty

    def none_left(*size: object, **options: object) -> torch.Tensor:
        if size == (it.warm._form.nbytes,):
            raise torch.OutOfMemoryError("no room")
        return empty(*size, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", none_left)
    found = crossing.collect(it.warm, prompt, 0, 150)
    assert all(np.array_equal(found[place], expected[place]) for place in expected)
    assert (len(it.prefixes), it.ledger.reserved) == (0, 0)


def test_jobs_come_before_what_is_kept_for_others(checkpoint: Checkpoints) -> None:
    """A reservation is refused only once nothing is left to forget; what it can use goes last."""
    it = Twins(checkpoint("llama"))
    tile = it.warm._form.nbytes
    it.ledger = Ledger(6 * tile)
    it.warm.keep_prefixes(it.ledger, PLENTY)
    first, second = crossing.tokens(140), crossing.tokens(140, seed=3)
    for prompt in (first, second):
        it.warm.prefill(prompt, 0, 140, ignore, never, ignore)
    assert it.warm.recall(first, 140) == 128
    with it.ledger.reserve(4 * tile):
        assert [it.warm.recall(prompt, 140) for prompt in (first, second)] == [128, 0]
        with pytest.raises(CapacityError) as refused, it.ledger.reserve(3 * tile):
            pass
        assert refused.value.reason == "memory_exceeded"
    assert it.ledger.reserved == it.prefixes.used == 0


# -- misuse


def test_a_layer_of_unknown_content_is_refused(checkpoint: Checkpoints) -> None:
    it = Twins(checkpoint("llama"))
    layers = [DynamicIndexedLayer() for _ in it.warm.layout.layers]
    with pytest.raises(ConfigError) as refused:
        footprint(layers, it.warm.layout, TILE)
    assert refused.value.reason == "architecture_unsupported"
    assert "DynamicIndexedLayer" in refused.value.message


FORM = Footprint(
    4,
    torch.device("cpu"),
    {
        0: RowForm(2, (3, 0), (torch.float32, torch.float32), 4, 0),
        2: RowForm(1, (2, 2), (torch.bfloat16, torch.bfloat16), 3, 2),
    },
    0,
)


@pytest.mark.parametrize("states", [False, True])
def test_a_tile_that_lacks_rows_or_states_is_not_kept(states: bool) -> None:
    ledger = Ledger(PLENTY)
    prefixes = PrefixCache(FORM, ledger, PLENTY)
    chain = prefixes.find(range(8), 8)  # type: ignore[arg-type]
    recordings = contextlib.ExitStack()
    recording = recordings.enter_context(prefixes.recording(chain, 0))
    assert recording is not None
    recording.take_rows(0, torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 4, 0))
    if states:
        recording.take_rows(2, torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2))
    else:
        recording.take_states(())
    with pytest.raises(LocalProtocolError):
        recordings.close()
    assert (len(prefixes), prefixes.used, ledger.reserved) == (0, 0, 0)


def content(prompt: Sequence[int], first: int) -> list[torch.Tensor]:
    """Rows of a tile that are a function of all tokens up to its end."""
    number = float(hash(tuple(prompt[: first + 4])) % 9973)
    rows = torch.arange(4.0)[:, None] + number
    return [rows.expand(1, 2, 4, 3), torch.zeros(1, 2, 4, 0), *[rows.expand(1, 1, 4, 2)] * 2]


class Tree(RuleBasedStateMachine):
    """Any prompts in any order: what is found is what was put there for these very tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(PLENTY)
        self.budget = 7 * FORM.nbytes
        self.prefixes = PrefixCache(FORM, self.ledger, self.budget)
        self.prompts: list[tuple[int, ...]] = [()]
        self.reserved = contextlib.ExitStack()
        self.jobs = 0

    @rule(
        data=st.data(),
        shared=st.integers(0, 24),
        rest=st.lists(st.integers(0, 1), max_size=20),
        breaks=st.integers(0, 8),
    )
    def prefill(self, data: st.DataObject, shared: int, rest: list[int], breaks: int) -> None:
        """It begins as an earlier one did, and may end early."""
        prompt = (*data.draw(st.sampled_from(self.prompts))[:shared], *rest)
        chain = self.prefixes.find(prompt, len(prompt))
        self.found(chain, prompt)
        known = max(len(common(prompt, other)) for other in self.prompts)
        assert chain.position <= known // 4 * 4
        for number, first in enumerate(range(chain.position, len(prompt), 4)):
            with (
                contextlib.suppress(Cancelled),
                self.prefixes.recording(chain, first) as recording,
            ):
                if number == breaks:
                    raise Cancelled("enough")
                if recording is not None:
                    rows = content(prompt, first)
                    recording.take_rows(0, rows[0], rows[1])
                    recording.take_rows(2, rows[2], rows[3])
                    recording.take_states(())
            if number == breaks:
                break
        self.prompts.append(prompt)
        self.found(self.prefixes.find(prompt, len(prompt)), prompt)

    def found(self, chain: Chain, prompt: tuple[int, ...]) -> None:
        assert [tile.first for tile in chain.tiles] == list(range(0, chain.position, 4))
        for tile in chain.tiles:
            full, _, window, _ = content(prompt, tile.first)
            assert torch.equal(tile.rows[0].keys, full)
            assert torch.equal(tile.rows[2].values, window[:, :, 1:].bfloat16())

    @rule(tiles=st.integers(1, 7))
    def reserve(self, tiles: int) -> None:
        self.ledger.limit = self.budget + self.jobs
        try:
            self.reserved.enter_context(self.ledger.reserve(tiles * FORM.nbytes))
        except CapacityError:
            assert len(self.prefixes) == 0
        else:
            self.jobs += tiles * FORM.nbytes

    @precondition(lambda self: self.jobs)
    @rule()
    def release(self) -> None:
        self.reserved.close()
        self.jobs = 0
        self.ledger.limit = PLENTY

    @invariant()
    def counted(self) -> None:
        assert self.prefixes.used == kept_bytes(self.prefixes) <= self.budget
        assert self.prefixes.used == len(self.prefixes) * FORM.nbytes
        assert self.ledger.reserved == self.prefixes.used + self.jobs

    @invariant()
    def each_before_its_parent(self) -> None:
        order = list(self.prefixes._tiles.values())
        for place, tile in enumerate(order):
            assert tile.parent is None or tile.parent in order[place + 1 :]


def common(one: Sequence[int], other: Sequence[int]) -> Sequence[int]:
    """The longest common prefix."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return one[:length]


TestTree = Tree.TestCase
TestTree.settings = settings(examples(60), stateful_step_count=25, deadline=None)
