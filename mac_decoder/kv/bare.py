"""Empty caches of a layout without its model, for measuring installs."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from protocol.layout import FullLayer, Layout, RecurrentLayer, SlidingLayer


class BareModel:
    """What :func:`mac_decoder.kv.install.build` needs of a model: its empty caches.

    For layouts whose entries are not members of composite caches.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def make_cache(self) -> list[Any]:
        """One empty cache per layer, of the kind that the layout says."""
        found: list[Any] = []
        for layer in self._layout.layers:
            match layer:
                case FullLayer():
                    found.append(KVCache())
                case SlidingLayer(window=window):
                    found.append(RotatingKVCache(max_size=window, keep=0))
                case RecurrentLayer(states=states):
                    found.append(ArraysCache(size=len(states)))
        return found
