"""HTML made of parts. What is not marked as HTML is text, and cannot become anything else."""

from __future__ import annotations

from typing import Final

_ESCAPES: Final = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"}
)
_EMPTY: Final = frozenset({"br", "hr", "input"})


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


NOTHING: Final = Html("")

Piece = str | None
"""``None`` is left out."""

Attribute = str | float | bool | None
"""``True`` is an attribute without a value; ``False`` and ``None`` leave it out."""


def escaped(text: str) -> str:
    """Text as it may stand in HTML, between tags and in an attribute."""
    return text if type(text) is Html else text.translate(_ESCAPES)


def joined(*pieces: Piece) -> Html:
    """One after the other."""
    return Html("".join(escaped(piece) for piece in pieces if piece is not None))


def tag(element: str, /, *pieces: Piece, **attributes: Attribute) -> Html:
    """An element. In the names of attributes ``_`` stands for ``-``, and is cut off at the end:
    ``class_``, ``data_path``.
    """
    given = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        if value is True
        else f' {key.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if element in _EMPTY:
        return Html(f"<{element}{given}>")
    inner = "".join([escaped(piece) for piece in pieces if piece is not None])
    return Html(f"<{element}{given}>{inner}</{element}>")
