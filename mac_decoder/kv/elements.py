"""Element types: the layout's names, mlx's types, and the unsigned carriers of their bits."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from protocol.errors import ConfigError, EngineFault
from protocol.layout import Dtype

_TYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_CARRIERS = {"float32": mx.uint32, "bfloat16": mx.uint16, "float16": mx.uint16}


def mlx_dtype(name: Dtype) -> mx.Dtype:
    """The mlx type of a layout's element type."""
    return _TYPES[name]


def carrier(name: Dtype) -> mx.Dtype:
    """The unsigned type of the same size, which numpy can see where it has no bfloat16."""
    return _CARRIERS[name]


def dtype_name(array: mx.array) -> Dtype:
    """The layout's name of an array's element type.

    Raises ``ConfigError`` (``cache_dtype_unsupported``) for any other type.
    """
    for name, known in _TYPES.items():
        if array.dtype == known:
            return cast(Dtype, name)
    raise ConfigError(
        "the model's cache has an element type that cannot be shipped",
        reason="cache_dtype_unsupported",
        field="dtype",
        found=array.dtype,
        expected=", ".join(_TYPES),
    )


def filled(array: mx.array | None) -> mx.array:
    """``array`` itself. Raises ``EngineFault`` (``cache_empty``) where a cache holds none yet."""
    if array is None:
        raise EngineFault("a layer's cache is empty", reason="cache_empty")
    return array
