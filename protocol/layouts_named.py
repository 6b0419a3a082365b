"""Layouts that have a name, for planning and measuring without a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from protocol.errors import ConfigError
from protocol.identity import Identity, identity_from_parts
from protocol.layout import FullLayer, LayerLayout, Layout, SlidingLayer
from protocol.messages import MAX_TOKENS


def muse_glimmer() -> Layout:
    """52 layers, every fourth full (NoPE), 39 sliding over 2,048; 2 heads of 128, bf16."""
    layers: list[LayerLayout] = []
    for index in range(52):
        if index % 4 == 3:
            layers.append(FullLayer(index, 2, 128, 128, "bfloat16"))
        else:
            layers.append(SlidingLayer(index, 2, 128, 128, "bfloat16", 2048))
    return Layout(tuple(layers))


NAMED: Final[dict[str, Callable[[], Layout]]] = {"muse-glimmer": muse_glimmer}


def named(name: str) -> Layout:
    """The layout of that name; ConfigError ``layout_unknown`` lists those there are."""
    if name not in NAMED:
        raise ConfigError(
            f"there is no layout called {name!r}",
            reason="layout_unknown",
            field="layout",
            found=name,
            expected=", ".join(sorted(NAMED)),
        )
    return NAMED[name]()


def stand_in_identity(layout: Layout) -> Identity:
    """The identity under which both sides of a measurement without a model meet."""
    return identity_from_parts(
        config={"model_type": "synthetic"},
        weight_files=(),
        tokenizer_files=(),
        chat_template=None,
        layout=layout,
        dtype="bfloat16",
        max_context=MAX_TOKENS,
    )
