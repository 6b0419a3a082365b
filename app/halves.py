"""Which half of Baton is installed: the decoder's, the producer's, or both."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, Literal

from protocol.errors import ConfigError

Half = Literal["decoder", "producer", "both"]

MODULES: Final[dict[Half, tuple[str, ...]]] = {
    "decoder": ("mlx", "mlx_lm", "fastapi", "uvicorn"),
    "producer": ("torch", "transformers"),
    "both": ("mlx", "mlx_lm", "torch", "transformers", "accelerate", "gguf"),
}
"""What an extra of the package brings that the others do without."""


def missing(half: Half) -> tuple[str, ...]:
    """The modules of ``half`` that are not installed; none of them is imported."""
    return tuple(name for name in MODULES[half] if find_spec(name) is None)


def require(half: Half) -> None:
    """Raise ConfigError ``half_not_installed`` unless everything of ``half`` is there."""
    if lacking := missing(half):
        raise ConfigError(
            f"this command needs Baton's {half if half != 'both' else 'two halves'}",
            reason="half_not_installed",
            field="modules",
            found=f"without {', '.join(lacking)}",
            hint=f"pip install 'baton-llm[{half}]'",
        )
