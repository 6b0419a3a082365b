"""Layouts that have a name on the command line, for planning and benchmarks without a model."""

from __future__ import annotations

from protocol.errors import ConfigError
from protocol.layout import FullLayer, LayerLayout, Layout, SlidingLayer


def muse_glimmer() -> Layout:
    """52 layers, every fourth full (NoPE), the others sliding over 2,048; 2 heads of 128, bf16."""
    layers: list[LayerLayout] = []
    for index in range(52):
        if index % 4 == 3:
            layers.append(FullLayer(index, 2, 128, 128, "bfloat16"))
        else:
            layers.append(SlidingLayer(index, 2, 128, 128, "bfloat16", 2048))
    return Layout(tuple(layers))


NAMED = {"muse-glimmer": muse_glimmer}


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
