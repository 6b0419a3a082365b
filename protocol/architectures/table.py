"""The table: one entry per architecture, found by the ``model_type`` of ``config.json``."""

from __future__ import annotations

from protocol.architectures import layouts
from protocol.architectures.definition import Architecture, Config, text_config, unsupported
from protocol.architectures.rope import flat, rope
from protocol.errors import ConfigError


def _muse_refusals(config: Config) -> None:
    text = text_config(config)
    base = rope(config).theta
    thetas = text.get("layer_rope_theta") or []
    if any(theta not in (0, base) for theta in thetas):
        raise unsupported(
            config,
            "mlx-lm has one RoPE base for all layers",
            field="layer_rope_theta",
            found=thetas,
        )


ARCHITECTURES: dict[str, Architecture] = {
    entry.name: entry
    for entry in (
        Architecture(
            "llama",
            layout=layouts.all_full,
            mlx_overrides=flat,
            torch_tweaks=("yarn_truncate",),
        ),
        Architecture(
            "muse_glimmer",
            layout=layouts.by_layer_types,
            refuse=_muse_refusals,
            mlx_weights=("drop_vision",),
            note="text only: the vision tower is left out",
        ),
    )
}
"""Name (the ``model_type``) -> entry."""

ALIASES: dict[str, str] = {}
"""Other values of ``model_type`` that mean an entry of the table."""

REFUSED: dict[str, str] = {
    "jamba": "transformers' Jamba ignores the incoming state when a prompt is prefilled in tiles",
}
"""Architectures known not to carry over, with the reason."""


def resolve(config: Config) -> Architecture:
    """The table's entry for ``config``.

    Raises ``ConfigError`` (``architecture_unsupported``) for an unknown or refused
    architecture and for a refused variant of a known one.
    """
    model_type = str(config.get("model_type", "none"))
    name = ALIASES.get(model_type, model_type)
    found = ARCHITECTURES.get(name)
    if found is None:
        why = REFUSED.get(name, "it is not in the table of architectures that carry over")
        raise ConfigError(
            f"{model_type} cannot be carried over: {why}",
            reason="architecture_unsupported",
            field="model_type",
            found=model_type,
            expected=", ".join(ARCHITECTURES),
            hint="docs/models.md lists what carries over",
        )
    found.refuse(config)
    # A RoPE type that cannot be proven is refused here, before anything is loaded.
    found.mlx_overrides(config)
    return found
