"""Caches of a model as a flat list: members of a ``CacheList`` one by one, with their place.

Layouts count the same way: ``layer`` is the index of the cache object, ``member`` the place
within a ``CacheList`` and 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from protocol.errors import ConfigError

Single = KVCache | RotatingKVCache | ArraysCache


class Entry(NamedTuple):
    """One cache and where it belongs."""

    layer: int
    member: int
    cache: Single


def entries(caches: Sequence[Any]) -> list[Entry]:
    """Every single cache of ``caches`` in the order of the layout.

    Raises ``ConfigError`` (``cache_kind_unsupported``) for any kind that Baton does not carry
    over, by name: the type must be exactly one of mlx-lm's own, since a subclass may hold more.
    """
    found: list[Entry] = []
    for layer, cache in enumerate(caches):
        members = cache.caches if type(cache) is CacheList else (cache,)
        for member, single in enumerate(members):
            _check_kind(single)
            found.append(Entry(layer, member, single))
    return found


def _check_kind(cache: object) -> None:
    if type(cache) not in (KVCache, RotatingKVCache, ArraysCache):
        raise ConfigError(
            f"layers with a {type(cache).__name__} cannot be carried over",
            reason="cache_kind_unsupported",
            field="cache",
            found=type(cache).__name__,
            expected="KVCache, RotatingKVCache, ArraysCache, or a CacheList of them",
        )
    if isinstance(cache, RotatingKVCache) and cache.keep != 0:
        raise ConfigError(
            "a sliding layer that also keeps its first rows cannot be carried over",
            reason="cache_kind_unsupported",
            field="keep",
            found=cache.keep,
            expected=0,
        )
    if isinstance(cache, ArraysCache) and len(cache.cache) > 2:
        raise ConfigError(
            "a recurrent layer with more than two states cannot be carried over",
            reason="cache_kind_unsupported",
            field="states",
            found=len(cache.cache),
            expected="1 or 2",
        )
