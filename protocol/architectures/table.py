"""The table: one entry per architecture, found by the ``model_type`` of ``config.json``."""

from __future__ import annotations

from typing import Final

from protocol.architectures.definition import Architecture, Config
from protocol.architectures.dense import DENSE
from protocol.architectures.experts import EXPERTS
from protocol.architectures.recurrent import RECURRENT
from protocol.errors import ConfigError

ARCHITECTURES: Final[dict[str, Architecture]] = {
    entry.name: entry for entry in (*DENSE, *EXPERTS, *RECURRENT)
}
"""Name (the ``model_type``) -> entry."""

ALIASES: Final[dict[str, str]] = {"qwen3_5_text": "qwen3_5"}
"""Other values of ``model_type`` that mean an entry of the table."""

REFUSED: Final[dict[str, str]] = {
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
    found.check(config)
    return found
