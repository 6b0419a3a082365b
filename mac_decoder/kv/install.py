"""From a complete shadow to mlx-lm's caches, and from caches back to rows and states.

All functions run on the MLX thread, on caches with a batch of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from mac_decoder.kv import full, recurrent, sliding
from mac_decoder.kv.composite import Entry, entries
from mac_decoder.kv.elements import carrier, dtype_name
from mac_decoder.kv.shadow import Shadow
from protocol.errors import EngineFault, IdentityMismatch, IntegrityError
from protocol.layout import (
    KEY,
    STATE,
    VALUE,
    AttentionLayer,
    Dtype,
    FullLayer,
    LayerLayout,
    Layout,
    RecurrentLayer,
    SlidingLayer,
)

_KINDS: dict[type, type] = {
    FullLayer: KVCache,
    SlidingLayer: RotatingKVCache,
    RecurrentLayer: ArraysCache,
}


def layout_of(model: Any) -> Layout:
    """The layout that ``model`` has, measured on its own caches after one token.

    Raises ``ConfigError`` for a kind of cache or element type that cannot be carried over.
    """
    caches = make_prompt_cache(model)
    entries(caches)
    mx.eval(model(mx.array([[0]]), cache=caches))
    return Layout(tuple(_measure(entry) for entry in entries(caches)))


def _measure(entry: Entry) -> LayerLayout:
    layer, member, cache = entry
    if isinstance(cache, KVCache):
        return full.measure(cache, layer, member)
    if isinstance(cache, RotatingKVCache):
        return sliding.measure(cache, layer, member)
    return recurrent.measure(cache, layer, member)


def build(model: Any, layout: Layout, shadow: Shadow) -> list[Any]:
    """One cache per layer of ``model``, at position ``shadow.end`` in every layer.

    As :func:`build_all`, for a shadow without extra cuts.
    """
    return build_all(model, layout, shadow)[shadow.end]


def build_all(model: Any, layout: Layout, shadow: Shadow) -> dict[int, list[Any]]:
    """For each of the shadow's cuts, by position, one cache per layer of ``model`` there.

    ``layout`` is the model's (see :func:`layout_of`). Everything that can refuse does so before
    the shadow gives up its memory: ``IdentityMismatch`` (``layout_differs``) for another
    layout, ``IntegrityError`` (``shadow_incomplete``) for one that is not full. Nothing is
    copied: the arrays are views of the shadow's memory, which is used up afterwards.
    """
    if shadow.layout != layout:
        raise IdentityMismatch(
            "the shadow was made for another layout",
            components=("engine",),
            reason="layout_differs",
            field="layout",
            found=shadow.layout.digest().hex(),
            expected=layout.digest().hex(),
        )
    shadow.check_complete()
    built = {stop: make_prompt_cache(model) for stop in (*shadow.extra, shadow.end)}
    found = [_matched(caches, layout) for caches in built.values()]
    for index, (layer, *places) in enumerate(zip(layout.layers, *found, strict=True)):
        rows: tuple[mx.array, ...] = ()
        if not isinstance(layer, RecurrentLayer):
            rows = shadow.take(index, KEY), shadow.take(index, VALUE)
        for stop, entry in zip(built, places, strict=True):
            match layer, entry.cache:
                case RecurrentLayer(), ArraysCache() as cache:
                    numbers = range(len(layer.states))
                    states = [shadow.take(index, STATE + n, stop) for n in numbers]
                    recurrent.install(cache, states)
                case FullLayer(), KVCache() as cache:
                    keys, values = _cut_off(rows, shadow.end - stop, stop)
                    full.install(cache, keys, values, stop)
                case SlidingLayer(), RotatingKVCache() as cache:
                    count = min(stop, layer.window)
                    keys, values = _cut_off(rows, shadow.end - stop, count)
                    sliding.install(cache, keys, values, stop)
    for stop, caches in built.items():
        check_position(caches, stop)
    return built


def _cut_off(rows: Sequence[mx.array], behind: int, count: int) -> Iterator[mx.array]:
    """``count`` rows of each array, those before its last ``behind``."""
    for array in rows:
        last = array.shape[2] - behind
        yield array if count == array.shape[2] else array[:, :, last - count : last]


def check_position(caches: Sequence[Any], position: int) -> None:
    """Raise ``EngineFault`` (``position_differs``) unless every layer is at ``position``.

    Recurrent states do not know their position, so only their presence is checked.
    """
    for layer, _member, cache in entries(caches):
        if isinstance(cache, ArraysCache):
            good = all(array is not None for array in cache.cache)
            found: object = "states" if good else "none"
        else:
            found = cache.offset
            good = found == position
        if not good:
            raise EngineFault(
                "a layer's cache is not at the position it should be at",
                reason="position_differs",
                field=f"layer {layer}",
                found=found,
                expected=position,
            )


Rows = dict[tuple[int, int], np.ndarray]
"""Rows and states in the wire's form, flat ``uint8``, by layer and role."""


def extract(caches: Sequence[Any], layout: Layout, position: int) -> Rows:
    """All rows and states of ``caches`` at ``position`` in the wire's form, copied.

    As :func:`views` of all rows, which has the errors too.
    """
    found = views(caches, layout, position)
    return {place: array.copy() for place, array in found.items()}


def views(
    caches: Sequence[Any],
    layout: Layout,
    position: int,
    first: int = 0,
    *,
    finite: bool = False,
) -> dict[tuple[int, int], np.ndarray]:
    """Rows and states of ``caches`` at ``position`` in the wire's form.

    Of full layers the rows ``[first, position)``, of sliding layers the window, of recurrent
    layers the states. Keys are ``(index, role)`` as in ``regions(layout, first, position)``,
    values flat ``uint8``, rows position-major: views of mlx's memory, evaluated, which any
    thread may read and nobody may write to. Nothing is copied that lies in the wire's order
    already, as rows of a shadow do.

    Raises ``EngineFault`` (``position_differs``) for another position, ``IntegrityError`` for
    arrays that are not the layout's, and with ``finite`` for any number that is not
    (``rows_not_finite``).
    """
    check_position(caches, position)
    found: dict[tuple[int, int], mx.array] = {}
    pairs = zip(_matched(caches, layout), layout.layers, strict=True)
    for index, (entry, layer) in enumerate(pairs):
        match layer, entry.cache:
            case RecurrentLayer(), ArraysCache() as cache:
                arrays = zip(layer.states, recurrent.states(cache), strict=True)
                for number, (state, array) in enumerate(arrays):
                    _check_array(array, (1, *state.shape), state.dtype)
                    found[index, STATE + number] = array[0]
            case FullLayer(), KVCache() as cache:
                for role in (KEY, VALUE):
                    rows = _checked_rows(full.rows(cache, role), layer, role, position)
                    found[index, role] = rows[0, :, first:].transpose(1, 0, 2)
            case SlidingLayer(), RotatingKVCache() as cache:
                count = min(position, layer.window)
                for role in (KEY, VALUE):
                    rows = _checked_rows(sliding.rows(cache, role), layer, role, count)
                    found[index, role] = rows[0].transpose(1, 0, 2)
    carried = {place: _carried(array) for place, array in found.items()}
    good = [mx.all(mx.isfinite(array)) for array in found.values()] if finite else []
    # All at once: one wait for the device, not one for each array.
    mx.eval(list(carried.values()), good)
    if not all(one.item() for one in good):
        raise IntegrityError("a prefill gave rows that are no numbers", reason="rows_not_finite")
    return {
        place: np.array(array, copy=False).reshape(-1).view(np.uint8)
        for place, array in carried.items()
    }


def canonical(caches: Sequence[Any]) -> None:
    """Put every ring in temporal order with exactly its last ``window`` rows, in place."""
    for entry in entries(caches):
        if isinstance(entry.cache, RotatingKVCache):
            sliding.canonical(entry.cache)


def round_up(caches: Sequence[Any]) -> None:
    """Give full layers the room that they would have had they grown row by row; lazily."""
    for entry in entries(caches):
        if isinstance(entry.cache, KVCache):
            full.round_up(entry.cache)


def allocated(caches: Sequence[Any]) -> int:
    """Bytes of the arrays that caches hold, filled or not."""
    return sum(entry.cache.nbytes for entry in entries(caches))


def detach(caches: Sequence[Any]) -> None:
    """Evaluate caches that decoded, so that they hold nothing of a batch that they were in.

    A state is taken out as a slice, which keeps the whole batch's memory: it is copied.
    """
    for entry in entries(caches):
        if isinstance(entry.cache, ArraysCache):
            entry.cache.cache = [mx.contiguous(a) for a in recurrent.states(entry.cache)]
    mx.eval([cache.state for cache in caches])


def _matched(caches: Sequence[Any], layout: Layout) -> list[Entry]:
    found = entries(caches)
    places = [(entry.layer, entry.member, type(entry.cache)) for entry in found]
    expected = [(layer.layer, layer.member, _KINDS[type(layer)]) for layer in layout.layers]
    if places != expected:
        raise IdentityMismatch(
            "the model's caches are not those of the layout",
            components=("engine",),
            reason="layout_differs",
            field="layout",
        )
    return found


def _checked_rows(array: mx.array, layer: AttentionLayer, role: int, count: int) -> mx.array:
    """``array`` itself, ``(1, heads, count, dim)``."""
    width = layer.key_dim if role == KEY else layer.value_dim
    _check_array(array, (1, layer.heads, count, width), layer.dtype)
    return array


def _check_array(array: mx.array, shape: tuple[int, ...], dtype: Dtype) -> None:
    found = (array.shape, dtype_name(array))
    if found != (shape, dtype):
        raise IntegrityError(
            "a cache's array is not the layout's",
            reason="layout_differs",
            field="shape",
            found=found,
            expected=(shape, dtype),
        )


def _carried(array: mx.array) -> mx.array:
    """The array's bits in C order, as a type that numpy can see."""
    return mx.contiguous(array).view(carrier(dtype_name(array)))
