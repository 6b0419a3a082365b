"""What earlier prefills left behind, so that a prompt which begins alike computes its rest only.

Kept are whole tiles of the grid, each with the rows that torch's cache had of it and, at some
tile ends, the recurrent states. Rows and states at tile ends are functions of the tokens alone
(same tiles, same bits), so that a pass which begins at a held tile's end goes on as one that
computed everything would. A tile belongs to its predecessor: they form a tree, whose leaves are
forgotten first, and of these the least recently used one.

A tile is found by a chained hash over all tokens up to its end, under a seed of this process.
The hash leads to a candidate only: tokens are compared one by one.

Bytes are reserved in the ledger before they are allocated. A pass copies what it begins with,
so that nothing here is ever written to again. Device thread only.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from gb10_producer.memory import Ledger
from protocol.errors import ConfigError, LocalProtocolError
from protocol.layout import Layout, RecurrentLayer, SlidingLayer

STATE_STEP: Final = 2048
"""States are kept at every multiple, and where others are likely to go on from: they may weigh
more than the rows of a small tile."""

_ALIGNED: Final = 64
_KNOWN: Final = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""Layers of transformers' caches of which it is known here all that they hold."""


class RowForm(NamedTuple):
    """One layer's rows: the last ``kept`` of every tile are kept.

    ``attended`` is how many rows before a position its next token looks at; 0: all.
    """

    heads: int
    widths: tuple[int, int]
    dtypes: tuple[torch.dtype, torch.dtype]
    kept: int
    attended: int

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of a tile's keys and values."""
        rows = self.heads * self.kept
        key, value = (
            _aligned(rows * width * dtype.itemsize)
            for width, dtype in zip(self.widths, self.dtypes, strict=True)
        )
        return key, value


@dataclass(frozen=True)
class Footprint:
    """What is kept of one model's cache, by the number of torch's layer, and its bytes."""

    tile: int
    device: torch.device
    rows: Mapping[int, RowForm]
    state_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows of one tile."""
        return sum(sum(form.nbytes) for form in self.rows.values())


def footprint(layers: Sequence[Any], layout: Layout, tile: int) -> Footprint:
    """The footprint of caches like ``layers``, which must have seen some tokens.

    Raises ``ConfigError`` (``architecture_unsupported``) where it is not known what a layer holds.
    """
    rows: dict[int, RowForm] = {}
    device, state_bytes = torch.device("cpu"), 0
    for declared in layout.layers:
        layer: Any = layers[declared.layer]
        if type(layer) not in _KNOWN:
            raise ConfigError(
                f"it is not known what a {type(layer).__name__} holds",
                reason="architecture_unsupported",
                field=f"layer {declared.layer}",
            )
        device = layer.device
        if isinstance(declared, RecurrentLayer):
            state_bytes += sum(_aligned(state.nbytes) for _, _, state in _tensors(layer))
            continue
        window = getattr(layer, "sliding_window", 1)
        kept, attended = tile, window - 1
        if attended and isinstance(declared, SlidingLayer):
            kept = min(tile, max(declared.window, window))
        keys, values = layer.keys, layer.values
        widths, dtypes = (keys.shape[-1], values.shape[-1]), (keys.dtype, values.dtype)
        rows[declared.layer] = RowForm(keys.shape[1], widths, dtypes, kept, attended)
    return Footprint(tile, device, rows, state_bytes)


class Piece(NamedTuple):
    """Rows from position ``first`` on of one layer, as torch has them: (1, heads, rows, width)."""

    first: int
    keys: torch.Tensor
    values: torch.Tensor


class States(NamedTuple):
    """The states of one layer by their number."""

    convolution: Mapping[int, torch.Tensor]
    recurrent: Mapping[int, torch.Tensor]


@dataclass(eq=False)
class Tile:
    """Rows of positions ``[first, last)`` behind ``parent``'s, and the states at ``last`` if kept.

    Of a sliding layer's rows those are here that a pass from ``last`` on can still ask for.
    """

    name: bytes
    parent: Tile | None
    tokens: NDArray[np.uint32] = field(repr=False)
    first: int
    last: int
    rows: Mapping[int, Piece]
    nbytes: int
    states: Mapping[int, States] | None = None


class Recording:
    """Takes a tile out of the pass that computes it."""

    def __init__(self, tile: Tile, missing: set[int], states: torch.Tensor | None) -> None:
        """``missing`` are the layers whose rows must come, ``states`` the memory for the states,
        ``None`` where none are kept.
        """
        self._tile = tile
        self._missing = missing
        self._states = states

    @property
    def complete(self) -> bool:
        """Whether all was taken."""
        return not self._missing and self._states is None

    def take_rows(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy all new rows of ``layer``."""
        if layer in self._missing:
            piece = self._tile.rows[layer]
            dropped = piece.first - self._tile.first
            piece.keys.copy_(keys[:, :, dropped:])
            piece.values.copy_(values[:, :, dropped:])
            self._missing.remove(layer)

    def take_states(self, layers: Sequence[Any]) -> None:
        """Copy the states of a cache of ``layers``, which stands at the tile's end."""
        if self._states is None:
            return
        offset = 0
        taken: dict[int, States] = {}
        for number, layer in enumerate(layers):
            if not isinstance(layer, LinearAttentionCacheLayerMixin):
                continue
            found: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]] = ({}, {})
            for kind, index, state in _tensors(layer):
                flat = self._states[offset : offset + state.nbytes].view(state.dtype)
                # a product with a transposed matrix may round otherwise: strides are kept too
                found[kind][index] = flat.as_strided(state.shape, state.stride()).copy_(state)
                offset += _aligned(state.nbytes)
            taken[number] = States(*found)
        self._tile.states, self._states = taken, None


@dataclass(frozen=True)
class Chain:
    """The tiles known of one prompt; what its pass computes is appended.

    ``held`` are those that the pass begins with: at their end every layer can be resumed.
    """

    prompt: NDArray[np.uint32] = field(repr=False)
    tiles: list[Tile]
    held: tuple[Tile, ...]

    @property
    def position(self) -> int:
        """Where a pass over the prompt begins."""
        return self.held[-1].last if self.held else 0


class PrefixCache:
    """Tiles of earlier prefills in at most ``budget`` bytes of ``ledger``.

    Whoever asks the ledger for more than is free makes this forget first what was used last
    the longest ago.
    """

    def __init__(self, form: Footprint, ledger: Ledger, budget: int) -> None:
        self._form = form
        self._ledger = ledger
        self._budget = budget
        self._seed = os.urandom(32)
        # The least recently used one first, and each before its parent.
        self._tiles: OrderedDict[bytes, Tile] = OrderedDict()
        self.used = 0
        """Bytes of all tiles; they are reserved in the ledger."""
        ledger.reclaim = self.reclaim

    def __len__(self) -> int:
        return len(self._tiles)

    def find(self, tokens: Sequence[int] | NDArray[np.uint32], end: int) -> Chain:
        """What is held of ``tokens[:end]``, from now on the most recently used."""
        prompt = np.array(tokens[:end], np.uint32)
        chain = Chain(prompt, [], ())
        while (piece := self._next_piece(chain)) is not None:
            tile = self._tiles.get(self._name(chain, piece))
            parent = chain.tiles[-1] if chain.tiles else None
            if tile is None or tile.parent is not parent or not np.array_equal(tile.tokens, piece):
                break
            chain.tiles.append(tile)
        self._touch(chain)
        return Chain(prompt, chain.tiles, self._resumable(chain.tiles))

    def restore(self, chain: Chain, layers: Sequence[Any]) -> None:
        """Bring the ``layers`` of a new cache to the chain's position, sharing nothing with it."""
        # as a hybrid layer's first tokens do: its states, then its rows
        for number, states in (chain.held[-1].states or {}).items():
            layer = layers[number]
            for index, state in states.convolution.items():
                layer.lazy_initialization(conv_states=state, state_idx=index)
                layer.conv_states[index].copy_(state)
                layer.has_previous_state[index] = True
            for index, state in states.recurrent.items():
                layer.lazy_initialization(recurrent_states=state, state_idx=index)
                layer.recurrent_states[index].copy_(state)
        position = chain.position
        for number, form in self._form.rows.items():
            attended = min(form.attended or position, position)
            first = (position - attended) // self._form.tile
            pieces = [tile.rows[number] for tile in chain.held[first:]]
            layer = layers[number]
            keys = torch.cat([piece.keys for piece in pieces], dim=-2)[:, :, -attended:]
            values = torch.cat([piece.values for piece in pieces], dim=-2)[:, :, -attended:]
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = position

    @contextmanager
    def recording(self, chain: Chain, first: int, cut: int) -> Iterator[Recording | None]:
        """Take the chain's tile from ``first`` on while the block computes it for a handoff from
        ``cut`` on; it is kept once the block has ended well.

        ``None`` where there is nothing to take: it is not whole, or there is no room.
        """
        tile = self._tile(chain, first)
        if tile is None:
            yield None
            return
        known = tile.name in self._tiles
        states = None
        if tile.states is None and self._keeps_states(chain, tile.last, cut):
            states = self._buffer(self._form.state_bytes, chain)
        recording = Recording(tile, set() if known else set(tile.rows), states)
        added = (0 if known else tile.nbytes) + (0 if states is None else states.nbytes)
        complete = False
        try:
            yield recording
            if not recording.complete:
                raise LocalProtocolError("A tile lacks rows or states.", field="tile", found=first)
            complete = True
        finally:
            if not complete:
                self._give(added)
        tile.nbytes += 0 if states is None else states.nbytes
        if not known:
            self._tiles[tile.name] = tile
            chain.tiles.append(tile)
            self._touch(chain)

    def reclaim(self, nbytes: int) -> int:
        """Forget what was used the longest ago, ``nbytes`` where there are as many, and give the
        memory back to the machine; return the bytes forgotten.
        """
        return self._release(nbytes, 0)

    def clear(self) -> None:
        """Forget everything."""
        self._release(self.used, 0)

    def _next_piece(self, chain: Chain) -> NDArray[np.uint32] | None:
        """The tokens of the first tile behind the chain's, if there are enough for a whole one."""
        first = len(chain.tiles) * self._form.tile
        piece = chain.prompt[first : first + self._form.tile]
        return piece if len(piece) == self._form.tile else None

    def _name(self, chain: Chain, piece: NDArray[np.uint32]) -> bytes:
        before = chain.tiles[-1].name if chain.tiles else self._seed
        return hashlib.sha256(before + piece.tobytes()).digest()

    def _resumable(self, tiles: Sequence[Tile]) -> tuple[Tile, ...]:
        """Those up to the last one at whose end all that a pass needs is kept."""
        count = len(tiles)
        while self._form.state_bytes and count and tiles[count - 1].states is None:
            count -= 1
        return tuple(tiles[:count])

    def _tile(self, chain: Chain, first: int) -> Tile | None:
        """The tile to record: one that is known, or the next one, with memory for its rows."""
        number = first // self._form.tile
        if number < len(chain.tiles):
            return chain.tiles[number]
        piece = self._next_piece(chain)
        if number > len(chain.tiles) or piece is None:
            return None
        name = self._name(chain, piece)
        buffer = None if name in self._tiles else self._buffer(self._form.row_bytes, chain)
        if buffer is None:
            return None
        last = first + self._form.tile
        rows = _views(buffer, self._form.rows, last)
        parent = chain.tiles[-1] if chain.tiles else None
        return Tile(name, parent, piece.copy(), first, last, rows, buffer.nbytes)

    def _keeps_states(self, chain: Chain, last: int, cut: int) -> bool:
        """Whether somebody is likely to go on from ``last``.

        A chat's next turn parts from this prompt in its last tile, seldom in the one before;
        where a delta begins, prompts have parted already.
        """
        tile = self._form.tile
        if not self._form.state_bytes:
            return False
        step = -(-STATE_STEP // tile) * tile
        whole = len(chain.prompt) // tile * tile
        return last % step == 0 or last > whole - 2 * tile or last == cut // tile * tile

    def _buffer(self, nbytes: int, chain: Chain) -> torch.Tensor | None:
        """Reserved memory, at the cost of tiles that are not in ``chain``; ``None``: no room.

        One piece for all of a tile: what is forgotten then goes back to the machine.
        """
        self._touch(chain)
        kept = len(chain.tiles)
        self._forget(self.used + nbytes - self._budget, kept)
        if self.used + nbytes > self._budget:
            return None
        while not self._ledger.take(nbytes):
            if not self._release(nbytes, kept):
                return None
        self.used += nbytes
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._form.device)
        except RuntimeError:  # also torch's when there is no memory
            self._give(nbytes)  # no prefill fails for what would be kept beside it
            return None

    def _touch(self, chain: Chain) -> None:
        for tile in reversed(chain.tiles):
            self._tiles.move_to_end(tile.name)

    def _release(self, nbytes: int, kept: int) -> int:
        """As :meth:`_forget`; what is forgotten is free for everybody, not for torch alone."""
        forgotten = self._forget(nbytes, kept)
        if forgotten and self._form.device.type == "cuda":
            torch.cuda.empty_cache()
        return forgotten

    def _forget(self, nbytes: int, kept: int) -> int:
        """Forget at least ``nbytes``, but none of the ``kept`` tiles that were used last; return
        the bytes forgotten.
        """
        before = self.used
        while len(self._tiles) > kept and before - self.used < nbytes:
            self._give(self._tiles.popitem(last=False)[1].nbytes)
        return before - self.used

    def _give(self, nbytes: int) -> None:
        self.used -= nbytes
        self._ledger.give(nbytes)


def _views(buffer: torch.Tensor, forms: Mapping[int, RowForm], last: int) -> dict[int, Piece]:
    """Where in ``buffer`` the rows of a tile that ends at ``last`` lie."""
    offset = 0
    pieces: dict[int, Piece] = {}
    for number, form in forms.items():
        views: list[torch.Tensor] = []
        for width, dtype, nbytes in zip(form.widths, form.dtypes, form.nbytes, strict=True):
            shape = (1, form.heads, form.kept, width)
            used = form.heads * form.kept * width * dtype.itemsize
            views.append(buffer[offset : offset + used].view(dtype).view(shape))
            offset += nbytes
        pieces[number] = Piece(last - form.kept, *views)
    return pieces


def _tensors(layer: Any) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Kind (0: convolution, 1: recurrent), number and tensor of each state of ``layer``."""
    for kind, states in enumerate((layer.conv_states, layer.recurrent_states)):
        for index, state in states.items():
            if state is not None:
                yield kind, index, state


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
