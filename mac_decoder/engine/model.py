"""Loading a checkpoint into mlx-lm so that it means what torch means, or refusing it.

No file is edited: what mlx-lm would misread is passed beside the file (see
``protocol/architectures``). The layout that both machines derived from the configuration must
be the one that the loaded model has, measured on its own caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import psutil
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import _get_classes, load_model, load_tokenizer

from mac_decoder.engine.weights import adapted
from mac_decoder.kv.elements import mlx_dtype
from mac_decoder.kv.install import layout_of
from mac_decoder.reuse.accounting import Matrix, active_matmul_parameters
from protocol.checkpoint import Checkpoint
from protocol.errors import ConfigError
from protocol.layout import Layout

_MATMULS: Final = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)


@dataclass(frozen=True)
class LoadedModel:
    """A model that can decode, with its tokenizer.

    ``stop_token_ids`` end a turn; ``vocabulary`` is the number of logits.
    ``active_parameters`` are those that one prompt token is multiplied by.
    """

    model: Any
    tokenizer: TokenizerWrapper
    checkpoint: Checkpoint
    stop_token_ids: frozenset[int]
    vocabulary: int
    active_parameters: int = 0

    @property
    def layout(self) -> Layout:
        """The layout of the model's caches, declared and measured alike."""
        return self.checkpoint.layout


def load(checkpoint: Checkpoint, *, cast: bool = False) -> LoadedModel:
    """Load weights and tokenizer; on the MLX thread.

    With ``cast`` floating-point weights are cast to ``checkpoint.dtype``, which then is not
    the file's: a probe compares meaning in fp32, where rounding hides nothing.

    Raises ``ConfigError``: ``not_enough_memory``, ``model_unloadable`` when mlx-lm cannot read
    the checkpoint, ``model_unrunnable`` when mlx's backend lacks an operation for it,
    ``cache_kind_unsupported``, ``layout_differs`` when the model's own caches are not what the
    table declares, ``model_not_finite`` when a first token has no finite logits,
    ``tokenizer_unloadable``.
    """
    _check_memory(checkpoint)
    model, config = load_network(checkpoint)
    if cast:
        model.set_dtype(mlx_dtype(checkpoint.dtype))
    _check_layout(model, checkpoint.layout)
    vocabulary = _check_finite(model)
    tokenizer = _load_tokenizer(checkpoint, config.get("eos_token_id"))
    stops = frozenset(int(token) for token in tokenizer.eos_token_ids)
    active = active_matmul_parameters(_matrices(model, config))
    return LoadedModel(model, tokenizer, checkpoint, stops, vocabulary, active)


def _check_memory(checkpoint: Checkpoint) -> None:
    """Loading more weights than there is memory brings the whole machine to a halt."""
    free = psutil.virtual_memory().available
    if checkpoint.nbytes > free:
        raise ConfigError(
            f"{checkpoint.name} needs {checkpoint.nbytes / 1e9:.1f} GB of memory, "
            f"{free / 1e9:.1f} GB are free",
            reason="not_enough_memory",
            field="memory",
            found=free,
            expected=checkpoint.nbytes,
            hint="close other programs, or use a smaller or quantised model",
        )


def load_network(checkpoint: Checkpoint, *, lazy: bool = False) -> tuple[Any, dict[str, Any]]:
    """mlx-lm's model with the checkpoint's weights, and the configuration that it was told.

    With ``lazy`` weights are read when they are first used. Raises ``ConfigError``
    (``model_unloadable``).
    """
    architecture = checkpoint.architecture

    def classes(config: dict[str, Any]) -> tuple[type, type]:
        model_class, arguments_class = _get_classes(config)
        return adapted(model_class, architecture.mlx_weights, checkpoint.config), arguments_class

    try:
        return load_model(
            checkpoint.path,
            lazy=lazy,
            model_config=architecture.mlx_overrides(checkpoint.config),
            get_model_classes=classes,
        )
    except (ValueError, TypeError, KeyError) as error:
        # mlx-lm's own ways to say that configuration and weights do not fit its model.
        raise ConfigError(
            f"mlx-lm cannot load {checkpoint.name} as {architecture.name}: {error}",
            reason="model_unloadable",
            field="model_type",
            found=architecture.name,
        ) from error


def _matrices(model: Any, config: Mapping[str, Any]) -> Iterator[Matrix]:
    """The weights that a prompt token is multiplied by, the head left out."""
    text = config.get("text_config") or config
    routed = text.get("num_experts_per_tok") or text.get("moe_topk") or 1
    for name, module in model.named_modules():
        if name.endswith("lm_head") or not isinstance(module, _MATMULS):
            continue
        *experts, rows, columns = module.weight.shape
        if isinstance(module, (nn.QuantizedLinear, QuantizedSwitchLinear)):
            columns = columns * 32 // module.bits
        yield Matrix(rows, columns, *((experts[0], int(routed)) if experts else ()))


def stored_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that mlx-lm writes when it saves ``model``."""
    flat: dict[str, mx.array] = dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    return {name: tuple(tensor.shape) for name, tensor in flat.items()}


def _load_tokenizer(checkpoint: Checkpoint, ends: Any) -> TokenizerWrapper:
    try:
        return load_tokenizer(checkpoint.path, eos_token_ids=ends)
    except (OSError, ValueError, TypeError, KeyError) as error:
        # transformers' ways to say that the files are missing or not a tokenizer's.
        raise ConfigError(
            f"the tokenizer of {checkpoint.name} cannot be loaded: {error}",
            reason="tokenizer_unloadable",
            field="tokenizer",
        ) from error


def _check_layout(model: Any, declared: Layout) -> None:
    try:
        measured = layout_of(model)
    except RuntimeError as error:
        # Its CPU backend, say, multiplies the experts of a mixture in float32 only.
        raise ConfigError(
            f"mlx cannot run this model on this machine: {error}", reason="model_unrunnable"
        ) from error
    if measured == declared:
        return
    pairs = zip(measured.layers, declared.layers, strict=False)
    differing = next((pair for pair in pairs if pair[0] != pair[1]), None)
    found, expected = differing or (len(measured.layers), len(declared.layers))
    raise ConfigError(
        "the loaded model's caches are not what its configuration declares",
        reason="layout_differs",
        field="layout",
        found=found,
        expected=expected,
    )


def _check_finite(model: Any) -> int:
    """The vocabulary's size, after a look at the logits of one token."""
    logits = model(mx.array([[0]]))[0, -1].astype(mx.float32)
    if not mx.all(mx.isfinite(logits)).item():
        raise ConfigError("the model's logits are not finite", reason="model_not_finite")
    return int(logits.shape[-1])
