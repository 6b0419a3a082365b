"""Kinds of caches that are carried over, and the refusal of all others by name."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mac_decoder.kv.composite import entries
from mac_decoder.kv.elements import dtype_name, filled
from protocol.errors import ConfigError, EngineFault


class _Extended(KVCache):
    """A subclass may hold more than its parent."""


def test_members_are_counted_within_their_layer() -> None:
    full, states, ring = KVCache(), ArraysCache(2), RotatingKVCache(8)
    found = entries([full, CacheList(states, ring)])
    assert [(entry.layer, entry.member) for entry in found] == [(0, 0), (1, 0), (1, 1)]
    assert [entry.cache for entry in found] == [full, states, ring]


@pytest.mark.parametrize(
    "cache",
    [
        QuantizedKVCache(),
        ChunkedKVCache(8),
        ConcatenateKVCache(),
        CacheList(CacheList(KVCache())),
        CacheList(KVCache(), QuantizedKVCache()),
        _Extended(),
        ArraysCache(3),
        RotatingKVCache(8, keep=4),
    ],
    ids=lambda cache: type(cache).__name__,
)
def test_other_kinds_are_refused_by_name(cache: object) -> None:
    with pytest.raises(ConfigError) as caught:
        entries([KVCache(), cache])
    assert caught.value.reason == "cache_kind_unsupported"
    assert caught.value.found is not None


def test_other_element_types_are_refused() -> None:
    assert dtype_name(mx.zeros(1, mx.bfloat16)) == "bfloat16"
    with pytest.raises(ConfigError) as caught:
        dtype_name(mx.zeros(1, mx.int8))
    assert caught.value.reason == "cache_dtype_unsupported"


def test_an_empty_cache_has_no_rows() -> None:
    with pytest.raises(EngineFault) as caught:
        filled(None)
    assert caught.value.reason == "cache_empty"
