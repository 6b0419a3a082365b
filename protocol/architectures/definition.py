"""What an entry of the table consists of, and how an entry refuses a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from protocol.errors import ConfigError
from protocol.layout import Dtype, Layout

Config = dict[str, Any]
"""A model's ``config.json``."""

RowTransform = Literal["none", "mla_interleave"]
StateTransform = Literal["none", "mamba", "delta_net", "short_conv"]
TorchTweak = Literal["round_embed_scale", "no_sliding_window", "yarn_truncate"]
WeightTweak = Literal["drop_vision", "split_experts", "fold_multipliers"]
Shapes = Mapping[str, tuple[int, ...]]
"""Name of a stored tensor -> its shape."""

SILU = ("silu", "swish")
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new")


def _nothing(_config: Config) -> Config:
    return {}


def _accept(_config: Config) -> None:
    return None


def _accept_tensors(_config: Config, _shapes: Shapes) -> None:
    return None


@dataclass(frozen=True)
class Architecture:
    """How one architecture carries over from torch to mlx-lm.

    ``stack(config, dtype)`` declares the caches that mlx-lm makes; the decoder measures its own
    and refuses to start where they differ. ``fields(config)`` are configuration fields
    that mlx-lm must be told, ``defaults`` those that it must be told where the file is silent,
    because its own default is not transformers'. ``refuse(config)`` raises ``ConfigError`` for
    a variant that does not carry over, ``refuse_tensors(config, shapes)`` for such weights.
    ``activations`` are the names of the one activation that mlx-lm has built in.

    ``torch_tweaks`` are what the producer changes so that torch means what mlx-lm means;
    ``mlx_weights`` what the decoder does to tensors that mlx-lm would not find. The two
    transforms say how the producer turns rows and states into the decoder's form:

    - ``mla_interleave``: values are the rotary part of the latent, in halves on torch's side,
      interleaved on mlx's;
    - ``mamba``: convolution ``(C, K)`` becomes ``(K - 1, C)``, the state stays;
    - ``delta_net``: convolution as above, the state's last two axes swapped;
    - ``short_conv``: a convolution alone, as above.

    ``note`` is one line for people, shown in ``docs/models.md``.
    """

    name: str
    stack: Callable[[Config, Dtype], Layout]
    fields: Callable[[Config], Config] = _nothing
    defaults: Mapping[str, Any] = field(default_factory=dict)
    refuse: Callable[[Config], None] = _accept
    refuse_tensors: Callable[[Config, Shapes], None] = _accept_tensors
    activations: tuple[str, ...] = SILU
    torch_tweaks: tuple[TorchTweak, ...] = ()
    mlx_weights: tuple[WeightTweak, ...] = ()
    row_transform: RowTransform = "none"
    state_transform: StateTransform = "none"
    note: str = ""

    def layout(self, config: Config, dtype: Dtype) -> Layout:
        """The declared layout. Raises ``ConfigError`` (``config_incomplete``)."""
        with _complete(config):
            return self.stack(config, dtype)

    def mlx_overrides(self, config: Config) -> Config:
        """Fields for ``mlx_lm.utils.load_model(path, model_config=...)``; no file is edited.

        Where the language model is nested in ``text_config``, so are the fields.
        """
        text = text_config(config)
        missing = {name: value for name, value in self.defaults.items() if name not in text}
        fields = missing | self.fields(config)
        if text is config or not fields:
            return fields
        return {"text_config": text | fields}

    def check(self, config: Config) -> None:
        """Raise ``ConfigError`` for a refused variant or a field that is missing.

        Reasons: ``architecture_unsupported``, ``config_incomplete``.
        """
        with _complete(config):
            self._check(config)

    def _check(self, config: Config) -> None:
        text = text_config(config)
        for name in ("hidden_act", "hidden_activation"):
            found = text.get(name)
            if found is not None and found not in self.activations:
                raise unsupported(
                    config, f"mlx-lm always computes {self.activations[0]}", field=name, found=found
                )
        self.refuse(config)
        # What cannot be told to mlx-lm (a RoPE type, say) is refused before anything is loaded.
        self.mlx_overrides(config)


@contextmanager
def _complete(config: Config) -> Iterator[None]:
    """Turn a missing field into a ``ConfigError`` that names it."""
    try:
        yield
    except KeyError as error:
        missing = str(error.args[0])
        raise ConfigError(
            f"{config.get('model_type', 'unknown')}: config.json lacks {missing}",
            reason="config_incomplete",
            field=missing,
        ) from error


def text_config(config: Config) -> Config:
    """The language model's part of a configuration: ``text_config`` where there is one."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def unsupported(config: Config, message: str, *, field: str, found: object) -> ConfigError:
    """The refusal of a variant of a known architecture, naming the field that decides."""
    name = config.get("model_type", "unknown")
    return ConfigError(
        f"{name}: {message}",
        reason="architecture_unsupported",
        field=field,
        found=found,
        hint="docs/models.md lists what carries over",
    )


def require(config: Config, why: str, **known: Any) -> None:
    """Refuse every field of ``known`` that the file gives another value than the one named."""
    text = text_config(config)
    for name, value in known.items():
        found = text.get(name, value)
        if found != value:
            raise unsupported(config, why, field=name, found=found)
