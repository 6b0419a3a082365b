"""The text that the demo and the benchmarks ask about: the user's own, or one that comes along."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from protocol.errors import ConfigError


def read_document(document: Path | None) -> str:
    """The text of ``document``, or the one that comes along.

    Raises ConfigError ``document_unreadable`` and ``document_empty``.
    """
    if document is None:
        return (files("app") / "demo_document.txt").read_text()
    try:
        text = document.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{document} cannot be read as text",
            reason="document_unreadable",
            field="document",
            found=type(error).__name__,
        ) from error
    if not text.strip():
        raise ConfigError(
            f"{document} has no text", reason="document_empty", field="document", found=document
        )
    return text
