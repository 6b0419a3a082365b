"""Which half of Baton is installed: the decoder's, the producer's, or both."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, Literal

from protocol.errors import ConfigError

Half = Literal["decoder", "producer", "both"]

_DECODER: Final = ("mlx", "mlx_lm", "transformers", "fastapi", "uvicorn", "prometheus_client")
_PRODUCER: Final = ("torch", "transformers")

MODULES: Final[dict[Half, tuple[str, ...]]] = {
    "decoder": _DECODER,
    "producer": _PRODUCER,
    "both": tuple(dict.fromkeys((*_DECODER, *_PRODUCER, "accelerate", "gguf"))),
}
"""What an extra of the package brings that the others do without."""


def missing(half: Half) -> tuple[str, ...]:
    """The modules of ``half`` that are not installed; none of them is imported."""
    return tuple(name for name in MODULES[half] if find_spec(name) is None)


def install_command(half: Half) -> str:
    """What installs ``half``, for people; Baton comes as a repository, not from an index."""
    return f"in a clone of Baton's repository: pip install -c constraints.txt '.[{half}]'"


def require(half: Half) -> None:
    """Raise ConfigError ``half_not_installed`` unless everything of ``half`` is there."""
    if lacking := missing(half):
        raise ConfigError(
            f"this needs Baton's {'two halves' if half == 'both' else f'half of the {half}'}",
            reason="half_not_installed",
            field="modules",
            found=f"without {', '.join(lacking)}",
            hint=install_command(half),
        )
