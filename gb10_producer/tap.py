"""Takes rows and states out of a prefill while it runs, in the decoder's form.

A :class:`TapCache` is transformers' own cache whose ``update`` also hands each layer's new rows
on: a layer's rows travel while the next layer computes. On cuda they are copied into pinned
memory by a side stream and emitted by a second thread once the copy's event has happened, so
that nothing overtakes the kernel that wrote them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol

import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from gb10_producer.prefill import Emit, Rows, State
from gb10_producer.prefix_cache import (
    Chain,
    Footprint,
    PrefixCache,
    Recording,
    Tile,
    footprint,
    lacks_memory,
)
from protocol.architectures import Architecture
from protocol.errors import CapacityError, ConfigError, EngineFault
from protocol.layout import AttentionLayer, Layout, RecurrentLayer, Span, StateArray, spans

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_COPIES_IN_FLIGHT: Final = 8
"""Layers' rows on their way off the device at one time; more hold the computation back."""


class Ticket(NamedTuple):
    """``emit(build(*views))`` once the bytes of ``tensors`` are in host memory.

    The tensors are contiguous copies that nothing writes to again.
    """

    build: Callable[..., Rows | State]
    tensors: tuple[torch.Tensor, ...]


class Outlet(Protocol):
    """Where tensors leave the device."""

    def put(self, ticket: Ticket) -> None:
        """Copy and emit, now or soon; may block; raises what an earlier emission raised."""
        ...

    def close(self, *, drain: bool) -> None:
        """With ``drain`` emit all that was put, and raise what that raised; else drop it."""
        ...


class HostOutlet(Outlet):
    """The device is the host: copy and emit at once."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit

    def put(self, ticket: Ticket) -> None:
        self._emit(ticket.build(*(_bytes_of(tensor) for tensor in ticket.tensors)))

    def close(self, *, drain: bool) -> None:
        """Nothing is ever pending."""


class Copy(NamedTuple):
    """A copy on its way to host memory; ``wait()`` returns when ``tensors`` hold their bytes."""

    tensors: tuple[torch.Tensor, ...]
    wait: Callable[[], None]


class CudaCopier:
    """Copies into pinned memory on a side stream, after what the compute stream wrote so far."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._compute = torch.cuda.current_stream(device)

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> Copy:
        """Start copying ``tensors``; called on the thread that computes."""
        written = torch.cuda.Event()
        written.record(self._compute)
        hosts: list[torch.Tensor] = []
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(written)
            for tensor in tensors:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor, non_blocking=True)
                # the allocator must not give the memory away before the copy is done
                tensor.record_stream(self._stream)
                hosts.append(host)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return Copy(tuple(hosts), copied.synchronize)


class ThreadedOutlet(Outlet):
    """Starts copies on the thread that computes, waits and emits on a thread of its own."""

    def __init__(self, emit: Emit, copier: Callable[[tuple[torch.Tensor, ...]], Copy]) -> None:
        self._emit = emit
        self._copier = copier
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tap")
        self._pending: deque[Future[None]] = deque()
        self._broken = False

    def put(self, ticket: Ticket) -> None:
        while self._pending and (
            self._pending[0].done() or len(self._pending) >= _COPIES_IN_FLIGHT
        ):
            self._pending.popleft().result()
        copy = self._copier(ticket.tensors)
        self._pending.append(self._thread.submit(self._finish, copy, ticket))

    def close(self, *, drain: bool) -> None:
        self._broken = self._broken or not drain
        self._thread.shutdown(wait=True, cancel_futures=not drain)
        if drain:
            for future in self._pending:
                future.result()

    def _finish(self, copy: Copy, ticket: Ticket) -> None:
        if self._broken:
            return
        # stays so when anything here raises: nothing is emitted after a gap
        self._broken = True
        copy.wait()
        self._emit(ticket.build(*(_bytes_of(tensor) for tensor in copy.tensors)))
        self._broken = False


class TapCache(DynamicCache):
    """transformers' cache for ``config``; ``on_rows(layer, keys, values)`` sees new rows first."""

    def __init__(
        self, config: Any, on_rows: Callable[[int, torch.Tensor, torch.Tensor], None]
    ) -> None:
        super().__init__(config=config)
        self._on_rows = on_rows

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``DynamicCache.update``; the rows are handed on before."""
        self._on_rows(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class Pass:
    """One prefill: computes tile by tile, emits what ``[cut, end)`` ships, with cuts at ``extra``.

    It begins at position 0, or where :meth:`resume` brings it.
    """

    def __init__(
        self,
        decoder: Any,
        layout: Layout,
        architecture: Architecture,
        cut: int,
        end: int,
        outlet: Outlet,
        extra: Sequence[int] = (),
    ) -> None:
        self._decoder = decoder
        self._layout = layout
        self._architecture = architecture
        self._outlet = outlet
        self._cache = TapCache(decoder.config, self._take_rows)
        self._attention: dict[int, Span] = {}
        self._tile = (0, 0)
        self._recording: Recording | None = None
        for span in spans(layout, cut, end, extra):
            layer = layout.layers[span.index]
            if not isinstance(layer, RecurrentLayer):
                self._attention[layer.layer] = span

    def replay(self, tile: Tile) -> None:
        """Emit a tile that was computed by an earlier pass, as this one would have."""
        for number, piece in tile.rows.items():
            self._emit_rows(number, piece.first, piece.keys, piece.values)

    def resume(self, prefixes: PrefixCache, chain: Chain) -> None:
        """Go on from the end of what ``prefixes`` holds, as if it had been computed here."""
        prefixes.restore(chain, self._cache.layers)

    def compute(
        self, tokens: Sequence[int], first: int, recording: Recording | None = None
    ) -> None:
        """Run the positions from ``first`` on; what was computed before must end there.

        ``recording`` gets their rows and the states at their end.
        """
        self._tile = (first, first + len(tokens))
        self._recording = recording
        device = self._decoder.get_input_embeddings().weight.device
        ids = torch.tensor([tokens], dtype=torch.long, device=device)
        self._decoder(input_ids=ids, cache=self._cache, use_cache=True)
        if recording is not None:
            recording.take_states(self._cache.layers)

    def footprint(self, tile: int) -> Footprint:
        """What a :class:`PrefixCache` keeps of caches like this one, once it has computed."""
        return footprint(self._cache.layers, self._layout, tile)

    def emit_states(self, position: int) -> None:
        """Emit every recurrent state, which must stand at ``position`` now."""
        declared_layers = {
            layer.layer for layer in self._layout.layers if isinstance(layer, RecurrentLayer)
        }
        for number, stored in enumerate(self._cache.layers):
            if isinstance(stored, LinearAttentionCacheLayerMixin) != (number in declared_layers):
                raise _misplaced(number, "a state")
        for index, layer in enumerate(self._layout.layers):
            if isinstance(layer, RecurrentLayer):
                stored = self._cache.layers[layer.layer]
                found = _states(stored, self._architecture.state_transform)
                for number, (tensor, declared) in enumerate(zip(found, layer.states, strict=True)):
                    self._put_state(index, number, position, tensor, declared)

    def _put_state(
        self, index: int, number: int, position: int, tensor: torch.Tensor, declared: StateArray
    ) -> None:
        _require_shape(f"layer {index}, {declared.name}", tensor.shape, declared.shape)
        wire = _copied(tensor, DTYPES[declared.dtype])
        self._outlet.put(Ticket(lambda data: State(index, number, position, data), (wire,)))

    def _take_rows(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        first, last = self._tile
        if keys.shape[-2] != last - first:
            raise _misplaced(layer, "rows")
        self._emit_rows(layer, first, keys, values)
        if self._recording is not None:
            self._recording.take_rows(layer, keys, values)

    def _emit_rows(
        self, layer: int, rows_first: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Emit what is shipped of a layer's rows from ``rows_first`` on."""
        span = self._attention.get(layer)
        if span is None:
            raise _misplaced(layer, "rows")
        first = max(rows_first, span.first)
        last = min(rows_first + keys.shape[-2], span.last)
        if first >= last:
            return
        declared = self._layout.layers[span.index]
        assert not isinstance(declared, RecurrentLayer)
        if self._architecture.row_transform == "mla_interleave":
            values = interleave(values)
        shipped = slice(first - rows_first, last - rows_first)
        key = _wire_rows(keys[0, :, shipped], declared, declared.key_dim)
        value = _wire_rows(values[0, :, shipped], declared, declared.value_dim)
        index = span.index
        self._outlet.put(Ticket(lambda k, v: Rows(index, first, last, k, v), (key, value)))


@contextmanager
def open_pass(
    decoder: Any,
    layout: Layout,
    architecture: Architecture,
    device: torch.device,
    cut: int,
    end: int,
    emit: Emit,
    extra: Sequence[int] = (),
) -> Iterator[Pass]:
    """A :class:`Pass`; leaving the block waits until everything was emitted.

    Errors of the device leave it as ``CapacityError`` (``memory_exceeded``) or
    ``EngineFault``; what ``emit`` raised leaves it as it is.
    """
    outlet = ThreadedOutlet(emit, CudaCopier(device)) if device.type == "cuda" else HostOutlet(emit)
    drained = False
    try:
        with torch.inference_mode():
            yield Pass(decoder, layout, architecture, cut, end, outlet, extra)
        drained = True
        outlet.close(drain=True)
    except RuntimeError as error:
        if lacks_memory(error, device):
            raise _out_of_memory(device) from error
        raise EngineFault(
            f"the device failed during a prefill: {type(error).__name__}",
            field="device",
            found=type(error).__name__,
        ) from error
    finally:
        if not drained:
            outlet.close(drain=False)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def interleave(rope: torch.Tensor) -> torch.Tensor:
    """Rotary parts in halves (transformers) as adjacent pairs (mlx); last axis even."""
    half = rope.shape[-1] // 2
    return torch.stack((rope[..., :half], rope[..., half:]), dim=-1).flatten(-2)


def _states(stored: Any, transform: str) -> list[torch.Tensor]:
    """The states of one layer of transformers' cache in the decoder's form, no batch axis."""
    # transformers keeps the oldest column of the convolution too, which no step reads again
    convolution = stored.conv_states[0][0, :, 1:].transpose(0, 1)
    if transform == "short_conv":
        return [convolution]
    recurrent = stored.recurrent_states[0][0]
    return [convolution, recurrent.transpose(-1, -2) if transform == "delta_net" else recurrent]


def _wire_rows(rows: torch.Tensor, layer: AttentionLayer, width: int) -> torch.Tensor:
    """``(heads, positions, width)`` as ``(positions, heads, width)`` in the layout's dtype."""
    wire = _copied(rows.transpose(0, 1), DTYPES[layer.dtype])
    _require_shape(f"layer {layer.layer}", wire.shape[1:], (layer.heads, width))
    return wire


def _copied(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous copy that shares nothing with what the model goes on using."""
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def _misplaced(layer: int, what: str) -> ConfigError:
    return ConfigError(
        f"torch and the layout do not both have {what} in layer {layer}",
        reason="layout_differs",
        field=f"layer {layer}",
    )


def _require_shape(what: str, found: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(found) != tuple(expected):
        raise ConfigError(
            f"torch's cache has another shape than the layout: {what}",
            reason="layout_differs",
            field=what,
            found=tuple(found),
            expected=tuple(expected),
        )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous host tensor's bytes; the view keeps the tensor alive."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _out_of_memory(device: torch.device) -> CapacityError:
    return CapacityError(
        "the prefill does not fit into the producer's memory",
        reason="memory_exceeded",
        field="device",
        found=device.type,
        retry_after_s=5.0,
    )
