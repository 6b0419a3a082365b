"""Reads the decoder's checkpoint, and dequantises it tensor by tensor.

Nothing is converted on disk. :func:`open_weights` maps the files and gives one lazy tensor per
parameter of transformers' model; a quantised weight is unpacked when the model takes it, a few
million values at a time, so that the file is never held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

from gb10_producer.mlx_format import (
    FLOAT32_NAMES,
    FLOAT32_OPS,
    Op,
    Shape,
    Target,
    canonical_name,
    plan,
)
from protocol.errors import ConfigError

AFFINE_BITS: Final = (2, 3, 4, 5, 6, 8)
_CHUNK_VALUES: Final = 1 << 22
"""Values unpacked at once: bounds what dequantising needs beside its result."""

_PLAIN: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Packing:
    """How one quantised weight is packed: bits per value, values per scale and bias."""

    bits: int
    group_size: int


@dataclass(frozen=True)
class _Stored:
    """One logical tensor of the files: plain, or packed with scales (and biases)."""

    shape: Shape
    kind: str
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class LazyTensor:
    """A parameter that is read, and dequantised, when ``tensor[...]`` asks for it."""

    op: Op
    sources: tuple[_Stored, ...]
    keeps_float32: bool
    """Whether the model must hold it in float32, because it says something else in fewer bits."""

    def __getitem__(self, index: object) -> torch.Tensor:
        """The whole tensor; ``index`` is ``...``, as transformers' loader asks for it."""
        if index is not Ellipsis:
            raise IndexError("only the whole tensor can be read")
        return _combine(self.op, [source.read() for source in self.sources])


@contextmanager
def open_weights(
    files: Sequence[Path],
    config: Mapping[str, Any],
    *,
    architecture: str,
    hidden_layers: int,
    dtype: torch.dtype,
) -> Iterator[dict[str, LazyTensor]]:
    """Every parameter of the text model by its name in transformers, lazily.

    ``dtype`` is what dequantised weights are rounded to, once. Files stay mapped inside the
    ``with`` block only. Raises ``ConfigError`` (``quantisation_unsupported``,
    ``quantisation_inconsistent``, ``weights_dtype_unsupported``, ``weights_incomplete``).
    """
    _refuse_foreign_quantisation(config)
    with ExitStack() as stack:
        handles: dict[str, Any] = {}
        for file in files:
            handle = stack.enter_context(safe_open(file, framework="pt"))
            handles.update(dict.fromkeys(handle.keys(), handle))
        reader = _Reader(handles, config, dtype)
        stored: dict[str, _Stored] = {}
        for name in reader.logical_names():
            canonical = canonical_name(name, hidden_layers)
            if canonical is not None:
                stored[canonical] = reader.stored(name)
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        yield {
            target.name: _lazy(target, tuple(stored[name] for name in target.sources))
            for target in plan(architecture, shapes)
        }


def _lazy(target: Target, sources: tuple[_Stored, ...]) -> LazyTensor:
    float32_on_disk = sources[0].kind == "F32" and target.name.endswith(FLOAT32_NAMES)
    return LazyTensor(target.op, sources, target.op in FLOAT32_OPS or float32_on_disk)


class _Reader:
    """The logical tensors of a set of safetensors files."""

    def __init__(
        self,
        handles: Mapping[str, Any],
        config: Mapping[str, Any],
        dtype: torch.dtype,
    ) -> None:
        self._handles = handles
        self._quantisation: Mapping[str, Any] = config.get("quantization") or {}
        self._dtype = dtype

    def logical_names(self) -> list[str]:
        """All tensor names, without the scales and biases that belong to a packed weight."""
        return [name for name in self._handles if not self._belongs_to_packed(name)]

    def stored(self, name: str) -> _Stored:
        """The tensor ``name``, packed or plain."""
        path = name.removesuffix(".weight")
        if name.endswith(".weight") and f"{path}.scales" in self._handles:
            return self._packed(path)
        kind = self._handles[name].get_slice(name).get_dtype()
        if kind not in _PLAIN:
            raise ConfigError(
                f"the weights hold {name} as {kind}, which is not a plain float",
                reason="weights_dtype_unsupported",
                field=name,
                found=kind,
                expected=", ".join(_PLAIN),
            )
        return _Stored(self._shape(name), kind, lambda: self._handles[name].get_tensor(name))

    def _belongs_to_packed(self, name: str) -> bool:
        path, _, part = name.rpartition(".")
        return (
            part in ("scales", "biases")
            and bool(self._quantisation)
            and f"{path}.weight" in self._handles
            and f"{path}.scales" in self._handles
        )

    def _shape(self, name: str) -> Shape:
        return tuple(self._handles[name].get_slice(name).get_shape())

    def _packed(self, path: str) -> _Stored:
        packing = _packing_of(path, self._quantisation)
        names = [f"{path}.weight", f"{path}.scales", f"{path}.biases"]
        missing = [name for name in names if name not in self._handles]
        if missing:
            raise ConfigError(
                f"the weights lack {missing[0]}", reason="weights_incomplete", field=missing[0]
            )
        words, scales = self._shape(names[0]), self._shape(names[1])
        values = words[-1] * 32 // packing.bits
        if values * packing.bits != words[-1] * 32 or values != scales[-1] * packing.group_size:
            raise ConfigError(
                f"{path}: the shapes of weight and scales do not fit its quantisation",
                reason="quantisation_inconsistent",
                field=path,
                found=f"weight {words}, scales {scales}",
                expected=f"{packing.bits} bits in groups of {packing.group_size}",
            )

        def read() -> torch.Tensor:
            parts = [self._handles[name].get_tensor(name) for name in names]
            return dequantise(parts[0], parts[1], parts[2], packing, self._dtype)

        return _Stored((*words[:-1], values), "packed", read)


def dequantise(
    packed: torch.Tensor,
    scales: torch.Tensor,
    biases: torch.Tensor,
    packing: Packing,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Unpack a weight that mlx quantised: ``(..., words)`` becomes ``(..., values)`` of ``dtype``.

    Values lie in each row as one little-endian stream of bits, lowest first (mlx's format for
    every width); each becomes ``scale * value + bias`` of its group, in float32, rounded once.
    """
    bits = packing.bits
    rows = packed.reshape(-1, packed.shape[-1])
    width = rows.shape[-1] * 32 // bits
    grouped_scales = scales.reshape(rows.shape[0], -1)
    grouped_biases = biases.reshape(rows.shape[0], -1)
    result = torch.empty((rows.shape[0], width), dtype=dtype, device=packed.device)
    step = max(1, _CHUNK_VALUES // width)
    for start in range(0, rows.shape[0], step):
        chunk = slice(start, start + step)
        values = _unpack(rows[chunk], bits).reshape(
            -1, width // packing.group_size, packing.group_size
        )
        scale = grouped_scales[chunk].unsqueeze(-1)
        floats = values.float() * scale.float() + grouped_biases[chunk].unsqueeze(-1).float()
        result[chunk] = floats.reshape(-1, width).to(dtype)
    return result.reshape(*packed.shape[:-1], width)


def _unpack(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """``(rows, words)`` of 32 bits into ``(rows, values)`` of type uint8."""
    # eight values fill exactly `bits` bytes, whatever the width
    packs = rows.contiguous().view(torch.uint8).reshape(rows.shape[0], -1, bits)
    word = torch.zeros(packs.shape[:-1], dtype=torch.int64, device=rows.device)
    for index in range(bits):
        word |= packs[..., index].long() << (8 * index)
    values = torch.empty((*packs.shape[:-1], 8), dtype=torch.uint8, device=rows.device)
    for index in range(8):
        values[..., index] = (word >> (bits * index)) & ((1 << bits) - 1)
    return values.reshape(rows.shape[0], -1)


def _packing_of(path: str, quantisation: Mapping[str, Any]) -> Packing:
    """The packing of the module ``path``: its own entry in ``quantization``, else the default."""
    own = quantisation.get(path)
    given = own if isinstance(own, Mapping) else quantisation
    mode = str(given.get("mode", "affine"))
    packing = Packing(int(given.get("bits", 4)), int(given.get("group_size", 64)))
    if mode != "affine" or packing.bits not in AFFINE_BITS:
        raise ConfigError(
            f"{path} is quantised as {mode} with {packing.bits} bits, "
            "which the producer cannot dequantise",
            reason="quantisation_unsupported",
            field=path,
            found=f"{mode}, {packing.bits} bits",
            expected="affine with 2, 3, 4, 5, 6 or 8 bits",
        )
    return packing


def _refuse_foreign_quantisation(config: Mapping[str, Any]) -> None:
    """Formats that mlx-lm repacks while it loads, and activation quantisation, are refused."""
    text = config.get("text_config") or {}
    foreign = config.get("quantization_config") or text.get("quantization_config") or {}
    found = foreign.get("quant_method")
    if not config.get("quantization") and foreign:
        found = found or "unnamed"
    elif config.get("quantize_activations"):
        found = "quantize_activations"
    else:
        return
    raise ConfigError(
        f"the checkpoint is quantised as {found}, which the producer cannot dequantise",
        reason="quantisation_unsupported",
        field="quantization_config",
        found=found,
        expected="none, or mlx-lm's affine quantisation",
        hint="convert it with mlx_lm.convert, and give both sides the result",
    )


def _combine(op: Op, parts: list[torch.Tensor]) -> torch.Tensor:
    """Carry out ``op`` (see :class:`~gb10_producer.mlx_format.Op` for the shapes)."""
    first = parts[0]
    match op:
        case Op.SAME:
            return first
        case Op.CONCAT_ROWS:
            return torch.cat(parts, dim=0)
        case Op.CONCAT_EXPERTS:
            return torch.cat(parts, dim=1)
        case Op.INTERLEAVE_EXPERTS:
            return torch.stack(parts, dim=2).flatten(1, 2).transpose(1, 2).contiguous()
        case Op.INTERLEAVE_BIASES:
            return torch.stack(parts, dim=2).flatten(1, 2)
        case Op.SWAP_LAST:
            return first.transpose(-1, -2).contiguous()
        case Op.MINUS_ONE:
            return first.float() - 1.0
        case Op.ROUNDED_NORM:
            return (first + 1.0).float() - 1.0
        case Op.JOIN_MLA:
            return torch.cat([first.transpose(1, 2), parts[1]], dim=1).flatten(0, 1)
