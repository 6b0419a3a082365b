"""Producers that claim the decoder's identity and compute something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from gb10_producer import model as torch_side
from gb10_producer.prefill import Emit, Prefiller, Rows, TorchPrefiller
from mac_decoder.handoff.client import ProducerLink
from mac_decoder.handoff.connection import Producer
from mac_decoder.handoff.generations import Generations
from mac_decoder.handoff.trust import trust_of_key
from mac_decoder.qualify.gate import Gate
from protocol.architectures import text_config
from protocol.checkpoint import Checkpoint, read_checkpoint
from tests.e2e.running import until
from tests.gb10_producer.peer import KEY
from tests.gb10_producer.producer import running

TILE = 64
MOST = 400
"""Tokens of the longest probe in tests; windows of tiny models are 32."""
FINGERPRINT = b"f" * 32
Lie = Callable[[TorchPrefiller], Prefiller]


class Rewriting:
    """A prefiller whose rows are changed on their way out."""

    def __init__(self, honest: TorchPrefiller, change: Callable[[Rows], Rows]) -> None:
        self._honest = honest
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)

    def prefill(self, tokens: Any, cut: int, end: int, emit: Emit, *rest: Any) -> int:
        def changed(item: Any) -> None:
            emit(self._change(item) if isinstance(item, Rows) else item)

        return self._honest.prefill(tokens, cut, end, changed, *rest)


def honest(prefiller: TorchPrefiller) -> Prefiller:
    return prefiller


def another_rope_base(prefiller: TorchPrefiller) -> Prefiller:
    for module in _modules(prefiller):
        if hasattr(module, "inv_freq"):
            module.inv_freq = module.inv_freq * 1.1
    return prefiller


def a_shifted_position(prefiller: TorchPrefiller) -> Prefiller:
    for module in _modules(prefiller):
        if hasattr(module, "inv_freq"):
            rotate = module.forward

            def shifted(x: Any, position_ids: Any, *rest: Any, rotate: Any = rotate, **more: Any):
                return rotate(x, position_ids + 1, *rest, **more)

            module.forward = shifted
    return prefiller


def a_window_off_by_one(prefiller: TorchPrefiller) -> Prefiller:
    decoder = prefiller._model.decoder
    decoder.config.sliding_window -= 1
    for module in _modules(prefiller):
        if getattr(module, "sliding_window", None):
            module.sliding_window -= 1
    return prefiller


def a_dropped_layer(prefiller: TorchPrefiller) -> Prefiller:
    layers = prefiller._model.decoder.layers
    with torch.no_grad():
        for name, weights in layers[len(layers) // 2].named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weights.zero_()
    return prefiller


def keys_and_values_swapped(prefiller: TorchPrefiller) -> Prefiller:
    return Rewriting(prefiller, lambda rows: rows._replace(key=rows.value, value=rows.key))


def bytes_of_another_format(prefiller: TorchPrefiller) -> Prefiller:
    """Float16 where bfloat16 is meant."""

    def read_as_the_other(data: memoryview) -> memoryview:
        numbers = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).to(torch.float16)
        return numbers.view(torch.uint8).numpy().data

    return Rewriting(
        prefiller,
        lambda rows: rows._replace(
            key=read_as_the_other(rows.key), value=read_as_the_other(rows.value)
        ),
    )


def a_window_ignored(prefiller: TorchPrefiller) -> Prefiller:
    decoder = prefiller._model.decoder
    decoder.config.sliding_window = 1 << 20
    for module in _modules(prefiller):
        if getattr(module, "sliding_window", None):
            module.sliding_window = 1 << 20
    return prefiller


def a_tile_of_the_middle_wrong(prefiller: TorchPrefiller) -> Prefiller:
    """In all layers but the first, in one of many tiles."""

    def change(rows: Rows) -> Rows:
        if rows.index == 0 or rows.first != 2 * TILE:
            return rows
        return rows._replace(key=rows.value, value=rows.key)

    return Rewriting(prefiller, change)


def no_numbers_at_the_end(prefiller: TorchPrefiller) -> Prefiller:
    """One row of one layer."""

    def change(rows: Rows) -> Rows:
        if rows.index != 2 or rows.last < MOST - 1:
            return rows
        key = bytearray(rows.key)
        key[-4:] = b"\xff" * 4
        return rows._replace(key=memoryview(key))

    return Rewriting(prefiller, change)


def no_numbers(prefiller: TorchPrefiller) -> Prefiller:
    """Keys that are NaN, in every layer."""
    return Rewriting(
        prefiller, lambda rows: rows._replace(key=memoryview(b"\xff" * rows.key.nbytes))
    )


LIES: Final[dict[str, Lie]] = {
    lie.__name__: lie
    for lie in (
        another_rope_base,
        a_shifted_position,
        a_window_off_by_one,
        a_dropped_layer,
        a_window_ignored,
        a_tile_of_the_middle_wrong,
        keys_and_values_swapped,
        no_numbers_at_the_end,
    )
}


def _modules(prefiller: TorchPrefiller) -> Iterator[Any]:
    return prefiller._model.decoder.modules()


def prefiller_of(path: Path, tile: int = TILE) -> TorchPrefiller:
    loaded = torch_side.load(read_checkpoint(path), "cpu", threads=1, progress=False)
    return TorchPrefiller(loaded, tile)


@contextmanager
def gated(
    known: Checkpoint, source: Prefiller, state: Path, max_tokens: int = 1 << 14
) -> Iterator[Gate]:
    """A gate to a producer that computes with ``source`` and says that it is ``known``."""
    vocabulary = int(text_config(known.config)["vocab_size"])
    with running(
        source, identity=known.identity, vocabulary=vocabulary, max_tokens=max_tokens
    ) as producer:
        target = Producer(producer.url, trust_of_key(KEY.key), known.identity, known.layout)
        state.mkdir(exist_ok=True)
        numbers = Generations(state / "generations.json", KEY.key, 0)
        gate = Gate(ProducerLink(target, numbers), FINGERPRINT)
        gate.start()
        try:
            until(lambda: gate.link.state.ready)
            yield gate
        finally:
            gate.close()
