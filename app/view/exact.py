"""Sizes of what is to be deleted: people are asked about every byte."""

from __future__ import annotations

from app.view import words


def exactly(nbytes: int) -> str:
    """Bytes to the last one, with a size that can be read: "1,234,567 bytes (1.2 MB)"."""
    exact = words.counted(nbytes, "byte")
    return exact if nbytes < 1000 else f"{exact} ({words.human_bytes(nbytes)})"
