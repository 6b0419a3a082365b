"""Which releases of the frameworks the two sides were measured with, and what others mean.

That torch and MLX compute the same function is no promise of theirs: it was measured, for each
architecture, with the releases below (see ``docs/models.md``). Another minor release may rename
a field or change a default in silence, so it is refused; another patch release is told of.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from typing import Final

from protocol.errors import ConfigError

MEASURED: Final[Mapping[str, str]] = {
    "mlx": "0.32.4",
    "mlx-lm": "0.32.2",
    "torch": "2.13.0",
    "transformers": "5.24.0",
}
"""Package -> the release that ``docs/models.md`` was measured with."""

DECODER: Final = ("mlx", "mlx-lm", "transformers")
"""``transformers`` for tokenizers and chat templates."""
PRODUCER: Final = ("torch", "transformers")


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Package -> installed version, ``""`` where it is not installed."""
    found: dict[str, str] = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def require_measured(found: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for each package of another patch release than the measured one.

    ``found`` is as :func:`installed` says. Raises ``ConfigError`` (``release_not_measured``)
    for a package of another minor release, or that is missing.
    """
    remarks: list[str] = []
    for name, version in found.items():
        measured = MEASURED[name]
        plain = version.partition("+")[0]  # 2.13.0+cpu is 2.13.0, built in another way
        if _minor(plain) != _minor(measured):
            raise ConfigError(
                f"Baton is not measured with {name} {version or 'missing'}",
                reason="release_not_measured",
                field=name,
                found=version or "not installed",
                expected=f"{_minor(measured)}.*",
                hint=f"pip install '{name}=={measured}'",
            )
        if plain != measured:
            remarks.append(f"{name} {version} is installed; Baton was measured with {measured}")
    return tuple(remarks)


def _minor(version: str) -> str:
    """``2.13`` of ``2.13.0``."""
    return ".".join(version.split(".")[:2])
