"""Builds transformers' model from the decoder's checkpoint, so that it means what mlx-lm means.

Only the text model without its head is built: a prefill needs no logits. What differs between
the frameworks by architecture is named by ``Architecture.torch_tweaks`` and done here.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from gb10_producer.prefill import Emit
from gb10_producer.rope import inverse_frequencies
from gb10_producer.tap import DTYPES, Pass, open_pass
from gb10_producer.weights import LazyTensor, open_weights
from protocol.checkpoint import Checkpoint
from protocol.errors import ConfigError

DeviceChoice = Literal["auto", "cuda", "cpu"]

_NO_WINDOW: Final = 1 << 20
"""A window that no prompt outruns; some models insist on a number."""

_FREQUENCY_TOLERANCE: Final = 1e-5
"""Relative: far above what rounding does to a frequency, far below another formula."""

_MISREAD: Final = (
    StrictDataclassError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What transformers and torch raise of a configuration that they cannot build a model of."""

_NOT_THE_MODELS: Final = (
    "auto_map",
    *(f"{before}{part}_implementation" for part in ("attn", "experts") for before in ("", "_")),
    *(f"_{part}_implementation_internal" for part in ("attn", "experts")),
)
"""How to compute is this machine's to choose: a name of a kernel here may be a hub's."""

_NOT_TORCHS: Final = ("quantization", "quantization_config", "quantize_activations")
"""What ``config.json`` says to mlx-lm about the files, and transformers would misread."""


@dataclass(frozen=True)
class ProducerModel:
    """A text model without its head, on its device, ready to prefill."""

    decoder: Any
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype

    @property
    def attends_eagerly(self) -> bool:
        """Whether attention writes out all scores: queries by rows, for every head."""
        return self.decoder.config._attn_implementation == "eager"

    def open_pass(
        self, cut: int, end: int, emit: Emit, extra: Sequence[int] = ()
    ) -> AbstractContextManager[Pass]:
        """See :func:`gb10_producer.tap.open_pass`."""
        known = self.checkpoint
        return open_pass(
            self.decoder, known.layout, known.architecture, self.device, cut, end, emit, extra
        )


def load(
    checkpoint: Checkpoint,
    device: DeviceChoice = "auto",
    *,
    threads: int | None = None,
    progress: bool = True,
) -> ProducerModel:
    """The model of ``checkpoint`` in its KV dtype on ``device`` (``auto``: cuda, else cpu).

    ``threads`` bounds torch's CPU threads (default: torch's own); ``progress`` shows a bar on
    stderr. Raises ``ConfigError``: ``device_unavailable``, ``not_enough_memory``,
    ``architecture_unsupported`` (this transformers does not know it), ``model_not_buildable``,
    ``weights_incomplete``, ``weights_unexpected``, ``weights_shape_differs``,
    ``mlx_format_unsupported``, and what :func:`gb10_producer.weights.open_weights` raises.
    """
    target = choose_device(device)
    compute_exactly(target, threads)
    dtype = DTYPES[checkpoint.dtype]
    with _buildable(_MISREAD):
        config = _torch_config(checkpoint)
        with torch.device("meta"):
            model_class: Any = type(transformers.AutoModel.from_config(config))
    with (
        _loading_bar(progress),
        _buildable((RuntimeError,)),  # what has a shape, and no memory for it
        open_weights(
            checkpoint.weight_files,
            checkpoint.config,
            architecture=checkpoint.architecture.name,
            hidden_layers=config.num_hidden_layers,
            dtype=dtype,
        ) as tensors,
    ):
        # strict shapes: a mismatch is reported, never initialised
        decoder, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        _require_complete(checkpoint, report)
        _restore_float32(decoder, tensors, dtype)
    _round_embed_scale(decoder, checkpoint)
    _use_mlx_frequencies(decoder)
    decoder.requires_grad_(False)
    return ProducerModel(_placed(decoder.eval(), target), checkpoint, target, dtype)


def _placed(decoder: Any, device: torch.device) -> Any:
    """``decoder`` on ``device``, moved parameter by parameter."""
    try:
        return decoder.to(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the dequantised weights do not fit into the device's memory",
            reason="not_enough_memory",
            field="memory",
            found=device.type,
            hint="use a smaller model, or --device cpu",
        ) from error


def give_memory_back() -> None:
    """What no object holds any more is free for the next model."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _buildable(errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """What the libraries raise of a configuration becomes ``model_not_buildable``."""
    try:
        yield
    except errors as error:
        raise ConfigError(
            f"transformers can build no model of config.json ({type(error).__name__}: "
            f"{_one_line(error)})",
            reason="model_not_buildable",
            field="config.json",
            found=type(error).__name__,
            hint="fetch or import the model again; its config.json may have been edited",
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def choose_device(choice: DeviceChoice) -> torch.device:
    """The device to compute on. Raises ``ConfigError`` (``device_unavailable``)."""
    available = torch.cuda.is_available()
    if choice == "cuda" and not available:
        raise ConfigError(
            "this machine has no CUDA device that torch can use",
            reason="device_unavailable",
            field="device",
            found="cpu",
            expected="cuda",
            hint="install torch with CUDA, or choose --device cpu",
        )
    return torch.device("cuda:0" if available and choice != "cpu" else "cpu")


def discrete_free_bytes(device: torch.device) -> int | None:
    """Free bytes of a device with memory of its own; ``None`` where it shares the machine's."""
    if device.type != "cuda" or torch.cuda.get_device_properties(device).is_integrated:
        return None
    return int(torch.cuda.mem_get_info(device)[0])


def compute_exactly(device: torch.device, threads: int | None = None) -> None:
    """Switch off what trades bits for speed in this process: TF32, reduced accumulators, and on
    cuda kernels whose sums depend on which thread comes first."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if device.type == "cuda":
        # cuBLAS reads it when its first handle is made
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # everything is written before it is read: filling fresh memory would only cost
        filling = torch.utils.deterministic
        filling.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if threads is not None:
        torch.set_num_threads(threads)


def _plain(value: Any) -> Any:
    """A configuration without what says how to compute it, or with whose code."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if name not in _NOT_THE_MODELS}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _torch_config(checkpoint: Checkpoint) -> Any:
    """transformers' configuration of the text model, with the tweaks that belong into it."""
    given = _plain(checkpoint.config)
    given = {name: value for name, value in given.items() if name not in _NOT_TORCHS}
    known = transformers.CONFIG_MAPPING
    model_type = str(given.get("model_type"))
    if model_type not in known:
        raise ConfigError(
            f"this transformers ({transformers.__version__}) does not know {model_type}",
            reason="architecture_unsupported",
            field="model_type",
            found=model_type,
            hint="upgrade transformers on the producer",
        )
    whole = known[model_type].from_dict(given)
    config = whole.get_text_config(decoder=True)
    for tweak in checkpoint.architecture.torch_tweaks:
        match tweak:
            case "no_sliding_window":
                _forget_window(config)
            case "yarn_truncate":
                _truncate_yarn(config)
            case "round_embed_scale":
                pass  # a buffer, not configuration: see _round_embed_scale
    return config


def _forget_window(config: Any) -> None:
    """mlx-lm attends to every row here: so does torch."""
    types = getattr(config, "layer_types", None)
    if types is None:
        config.sliding_window = None
    else:
        config.sliding_window = _NO_WINDOW
        config.layer_types = ["full_attention"] * len(types)


def _truncate_yarn(config: Any) -> None:
    """mlx-lm always rounds YaRN's correction range to whole dimensions."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for entry in nested or [parameters]:
        if entry.get("rope_type") == "yarn":
            entry["truncate"] = True


def _round_embed_scale(decoder: Any, checkpoint: Checkpoint) -> None:
    """mlx-lm scales embeddings by the square root of the width rounded to bfloat16."""
    if "round_embed_scale" in checkpoint.architecture.torch_tweaks:
        scale = decoder.embed_tokens.embed_scale
        decoder.embed_tokens.embed_scale = scale.to(torch.bfloat16).to(scale.dtype)


def _use_mlx_frequencies(decoder: Any) -> None:
    """Rotate by mlx's table of frequencies, which differs from torch's in the last bits only.

    Raises ``ConfigError`` (``rope_differs``) where it differs by more: then the two frameworks
    read the configuration in different ways.
    """
    parameters = getattr(decoder.config, "rope_parameters", None) or {}
    context = {"original_max_position_embeddings": decoder.config.max_position_embeddings}
    for name, table in list(decoder.named_buffers()):
        layer_type, found, _ = name.rpartition(".")[2].rpartition("inv_freq")
        if not found or layer_type == "original_" or layer_type.endswith("_original_"):
            continue
        own = parameters.get(layer_type.removesuffix("_"), parameters)
        dims = 2 * table.shape[-1]
        theirs = torch.from_numpy(inverse_frequencies(context | own, dims))
        if not torch.allclose(table, theirs, rtol=_FREQUENCY_TOLERANCE, atol=0):
            raise ConfigError(
                "torch and mlx-lm would rotate by different frequencies",
                reason="rope_differs",
                field=name,
                found=str(own.get("rope_type", "default")),
                hint="report this model: its rope_parameters mean two things",
            )
        table.copy_(theirs)


def _restore_float32(decoder: Any, tensors: Mapping[str, LazyTensor], dtype: torch.dtype) -> None:
    """Give the few parameters that are float32 in every model their own bits back."""
    if dtype == torch.float32:
        return
    for name, tensor in tensors.items():
        if tensor.keeps_float32:
            path, _, attribute = name.removeprefix("model.").rpartition(".")
            module = decoder.get_submodule(path)
            value = tensor[...].float()
            if attribute in module._buffers:
                setattr(module, attribute, value)
            else:
                setattr(module, attribute, torch.nn.Parameter(value, requires_grad=False))


def _require_complete(checkpoint: Checkpoint, report: Mapping[str, Any]) -> None:
    """Every parameter from the files, every tensor of the files in the model, shapes equal."""
    missing = sorted(report["missing_keys"])
    unexpected = sorted(report["unexpected_keys"])
    mismatched = sorted(str(key) for key in report["mismatched_keys"])
    broken = sorted(report.get("error_msgs") or ())
    if not (missing or unexpected or mismatched or broken):
        return
    if unexpected:
        reason, name = "weights_unexpected", unexpected[0]
        message = f"the weights hold {name}, which the model has no place for"
    elif missing:
        reason, name = "weights_incomplete", missing[0]
        message = f"the weights lack {name}"
    else:
        reason, name = "weights_shape_differs", (mismatched or broken)[0]
        message = f"a tensor has another shape than the model: {name}"
    if checkpoint.quantisation is not None or _saved_by_mlx(checkpoint):
        reason = "mlx_format_unsupported"
        message = f"mlx-lm's form of {checkpoint.architecture.name} could not be read: {message}"
    raise ConfigError(
        message,
        reason=reason,
        field=name,
        found=f"{len(unexpected)} unexpected, {len(missing)} missing, {len(mismatched)} reshaped",
        expected="every tensor of the checkpoint, once",
    )


def _saved_by_mlx(checkpoint: Checkpoint) -> bool:
    from safetensors import safe_open

    with safe_open(checkpoint.weight_files[0], framework="pt") as file:
        return (file.metadata() or {}).get("format") == "mlx"


@contextmanager
def _loading_bar(shown: bool):
    """transformers' own progress bar while a model loads, or none."""
    from transformers.utils import logging as bars

    was_shown = bars.is_progress_bar_enabled()
    (bars.enable_progress_bar if shown else bars.disable_progress_bar)()
    try:
        yield
    finally:
        (bars.enable_progress_bar if was_shown else bars.disable_progress_bar)()
