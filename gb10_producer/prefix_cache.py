"""What earlier prefills left behind, so that a prompt which begins alike computes its rest only.

Kept are whole tiles of the grid, each with the rows that torch's cache had of it and with the
recurrent states at its end. Rows and states at tile ends are functions of the tokens alone
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
from protocol.messages import NO_SPACE

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

    @property
    def nbytes(self) -> int:
        """Bytes of a tile."""
        return self.row_bytes + self.state_bytes


def lacks_memory(error: RuntimeError, device: torch.device) -> bool:
    """Whether torch says that there is no memory, and not that the device failed."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    # torch gives the failure of its CPU allocator no type of its own
    return device.type == "cpu" and "DefaultCPUAllocator" in str(error)


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

    convolution: dict[int, torch.Tensor]
    recurrent: dict[int, torch.Tensor]


@dataclass(eq=False)
class Tile:
    """Rows of positions ``[first, last)`` behind ``parent``'s, and the states at ``last``.

    Of a sliding layer's rows those are here that a pass from ``last`` on can still ask for.
    """

    name: bytes
    parent: Tile | None
    tokens: NDArray[np.uint32] = field(repr=False)
    first: int
    last: int
    rows: Mapping[int, Piece]
    states: dict[int, States] = field(default_factory=dict)


class Recording:
    """Takes a tile out of the pass that computes it."""

    def __init__(self, tile: Tile, states: torch.Tensor) -> None:
        """``states`` is the memory for the states at the tile's end."""
        self._tile = tile
        self._states = states
        self._missing = set(tile.rows)
        self._at_its_end = False

    @property
    def complete(self) -> bool:
        """Whether all rows and states were taken."""
        return self._at_its_end and not self._missing

    def take_rows(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy all new rows of ``layer``."""
        piece = self._tile.rows[layer]
        dropped = piece.first - self._tile.first
        piece.keys.copy_(keys[:, :, dropped:])
        piece.values.copy_(values[:, :, dropped:])
        self._missing.remove(layer)

    def take_states(self, layers: Sequence[Any]) -> None:
        """Copy the states of a cache of ``layers``, which stands at the tile's end."""
        offset = 0
        for number, layer in enumerate(layers):
            if not isinstance(layer, LinearAttentionCacheLayerMixin):
                continue
            taken = self._tile.states[number] = States({}, {})
            for kind, index, state in _tensors(layer):
                flat = self._states[offset : offset + state.nbytes].view(state.dtype)
                # a product with a transposed matrix may round otherwise: strides are kept too
                taken[kind][index] = flat.as_strided(state.shape, state.stride()).copy_(state)
                offset += _aligned(state.nbytes)
        self._at_its_end = True


@dataclass(frozen=True)
class Chain:
    """The tiles held of one prompt, in order; those that its pass computes are appended."""

    prompt: NDArray[np.uint32] = field(repr=False)
    tiles: list[Tile]

    @property
    def position(self) -> int:
        """Where a pass over the prompt would begin, or has come to: every layer can be resumed."""
        return self.tiles[-1].last if self.tiles else 0


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
        self._space = b""
        # The least recently used one first, and each before its parent.
        self._tiles: OrderedDict[bytes, Tile] = OrderedDict()
        self.used = 0
        """Bytes of all tiles; they are reserved in the ledger."""
        ledger.reclaim = self.reclaim

    def __len__(self) -> int:
        return len(self._tiles)

    def turn_to(self, space: bytes) -> None:
        """Find and keep what belongs to ``space`` from now on; with ``NO_SPACE`` nothing."""
        self._space = space

    def find(self, tokens: Sequence[int] | NDArray[np.uint32], end: int) -> Chain:
        """What is held of ``tokens[:end]``, from now on the most recently used."""
        prompt = np.array(tokens[:end], np.uint32)
        chain = Chain(prompt, [])
        while (piece := self._next_piece(chain)) is not None:
            tile = self._tiles.get(self._name(chain, piece))
            parent = chain.tiles[-1] if chain.tiles else None
            if tile is None or tile.parent is not parent or not np.array_equal(tile.tokens, piece):
                break
            chain.tiles.append(tile)
        self._touch(chain)
        return chain

    def restore(self, chain: Chain, layers: Sequence[Any]) -> None:
        """Bring the ``layers`` of a new cache to the chain's position, sharing nothing with it."""
        # as a hybrid layer's first tokens do: its states, then its rows
        for number, states in chain.tiles[-1].states.items():
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
            pieces = [tile.rows[number] for tile in chain.tiles[first:]]
            layer = layers[number]
            keys = torch.cat([piece.keys for piece in pieces], dim=-2)[:, :, -attended:]
            values = torch.cat([piece.values for piece in pieces], dim=-2)[:, :, -attended:]
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = position

    @contextmanager
    def recording(self, chain: Chain, first: int) -> Iterator[Recording | None]:
        """Take the chain's tile from ``first`` on while the block computes it; it is kept once
        the block has ended well.

        ``None`` where there is nothing to keep: it is not whole, or there is no room.
        """
        piece = self._next_piece(chain) if first == chain.position else None
        buffer = None if piece is None else self._buffer(chain)
        if piece is None or buffer is None:
            yield None
            return
        last = first + self._form.tile
        parent = chain.tiles[-1] if chain.tiles else None
        rows = _views(buffer, self._form.rows, last)
        tile = Tile(self._name(chain, piece), parent, piece.copy(), first, last, rows)
        recording = Recording(tile, buffer[self._form.row_bytes :])
        complete = False
        try:
            yield recording
            if not recording.complete:
                raise LocalProtocolError("A tile lacks rows or states.", field="tile", found=first)
            complete = True
        finally:
            if not complete:
                self._give()
        if tile.name in self._tiles:  # another prompt's, of the same hash
            self._give()
            return
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
        if self._space == NO_SPACE:
            return None
        first = len(chain.tiles) * self._form.tile
        piece = chain.prompt[first : first + self._form.tile]
        return piece if len(piece) == self._form.tile else None

    def _name(self, chain: Chain, piece: NDArray[np.uint32]) -> bytes:
        before = chain.tiles[-1].name if chain.tiles else self._seed + self._space
        return hashlib.sha256(before + piece.tobytes()).digest()

    def _buffer(self, chain: Chain) -> torch.Tensor | None:
        """Reserved memory for a tile, at the cost of tiles that are not in ``chain``; ``None``: no
        room.

        One piece for all of a tile: what is forgotten then goes back to the machine.
        """
        self._touch(chain)
        nbytes, kept = self._form.nbytes, len(chain.tiles)
        self._forget(self.used + nbytes - self._budget, kept)
        if self.used + nbytes > self._budget:
            return None
        while not self._ledger.take(nbytes):
            if not self._release(nbytes, kept):
                return None
        self.used += nbytes
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._form.device)
        except RuntimeError as error:
            self._give()
            if not lacks_memory(error, self._form.device):
                raise
            return None  # no prefill fails for what would be kept beside it

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
            self._tiles.popitem(last=False)
            self._give()
        return before - self.used

    def _give(self) -> None:
        """A tile's memory is free, or about to be."""
        self.used -= self._form.nbytes
        self._ledger.give(self._form.nbytes)


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
