"""What an entry of the table consists of, and how an entry refuses a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from protocol.errors import ConfigError
from protocol.layout import Dtype, Layout

Config = dict[str, Any]
"""A model's ``config.json``."""

RowTransform = Literal["none", "mla_interleave"]
StateTransform = Literal["none", "mamba", "delta_net", "short_conv"]
TorchTweak = Literal["round_embed_scale", "no_sliding_window", "yarn_truncate"]
WeightTweak = Literal["drop_vision", "split_experts"]


def _nothing(_config: Config) -> Config:
    return {}


def _accept(_config: Config) -> None:
    return None


@dataclass(frozen=True)
class Architecture:
    """How one architecture carries over from torch to mlx-lm.

    ``layout(config, dtype)`` declares the caches that mlx-lm makes; the decoder measures its
    own and refuses to start where they differ. ``mlx_overrides(config)`` are fields for
    ``load_model(path, model_config=...)``: no file is edited. ``refuse(config)`` raises
    ``ConfigError`` for a variant that does not carry over. ``torch_tweaks`` are what the
    producer changes so that torch means what mlx-lm means; ``mlx_weights`` what the decoder
    does to tensors that mlx-lm would not find. The two transforms say how the producer turns
    rows and states into the decoder's form:

    - ``mla_interleave``: values are the rotary part of the latent, in halves on torch's side,
      interleaved on mlx's;
    - ``mamba``: convolution ``(C, K)`` becomes ``(K - 1, C)``, the state stays;
    - ``delta_net``: convolution as above, the state's last two axes swapped;
    - ``short_conv``: a convolution alone, as above.

    ``note`` is one line for people, shown in ``docs/models.md``.
    """

    name: str
    layout: Callable[[Config, Dtype], Layout]
    mlx_overrides: Callable[[Config], Config] = _nothing
    refuse: Callable[[Config], None] = _accept
    torch_tweaks: tuple[TorchTweak, ...] = ()
    mlx_weights: tuple[WeightTweak, ...] = ()
    row_transform: RowTransform = "none"
    state_transform: StateTransform = "none"
    note: str = ""


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
