"""About: who answers, of what it is made, under which terms, and where to read on."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from typing import Final

from app.dashboard.pages import parts
from app.dashboard.pages.markup import Html, joined, tag
from app.dashboard.pages.screen import Drawn, Memo, Seen, Still, part, piece
from app.view.overview import about

_OURS: Final = "baton-llm"
_BUILT_ON: Final = (
    "mlx",
    "mlx-lm",
    "tokenizers",
    "nicegui",
    "starlette",
    "uvicorn",
    "websockets",
    "msgspec",
    "numpy",
    "cryptography",
    "zeroconf",
)
_SHORT: Final = 60

_DOCS: Final = (
    ("README.md", "What Baton is, and the way to a first answer"),
    ("docs/dashboard.md", "These pages"),
    ("docs/status.md", "What the figures mean, and where else they are told"),
    ("docs/cache.md", "What is kept, how it is found again, and every reason code"),
    ("docs/security.md", "Who may do what, and how it is seen to"),
)


class AboutPage(Still):
    """``/about``"""

    title = "About"

    def __init__(self) -> None:
        self._memo = Memo()

    def draw(self, seen: Seen) -> Drawn:
        """Every part."""
        snapshot = seen.snapshot
        return {
            "about": self._memo.of(
                "about",
                (snapshot.decoder, snapshot.door),
                lambda: part(
                    "about",
                    "div",
                    *(
                        tag("section", tag("h2", title), parts.facts(found, "facts wide card"))
                        for title, found in about(snapshot)
                    ),
                    class_="stacked",
                ),
            )
        }

    def body(self, drawn: Drawn) -> Html:
        """Everything below the heading."""
        return joined(piece(drawn, "about"), _licences(), _docs(), parts.glossary("about"))


@cache
def _licences() -> Html:
    rows = (
        tag("div", tag("dt", name), tag("dd", licence(name)), class_="fact")
        for name in (_OURS, *_BUILT_ON)
        if licence(name)
    )
    return tag("section", tag("h2", "Licences"), tag("dl", *rows, class_="facts wide card"))


def _docs() -> Html:
    rows = (
        tag("div", tag("dt", tag("code", name)), tag("dd", what), class_="fact")
        for name, what in _DOCS
    )
    return tag("section", tag("h2", "To read"), tag("dl", *rows, class_="facts wide card"))


def licence(package: str) -> str:
    """What an installed package says of its licence in a line; empty where it is not installed."""
    try:
        told = metadata(package).json
    except PackageNotFoundError:
        return ""
    named = str(told.get("license_expression") or told.get("license") or "")
    if named and len(named) <= _SHORT and "\n" not in named:
        return named
    # Some have the whole text there, and its name among the classifiers.
    kinds = told.get("classifier") or ()
    names = [kind.rpartition(" :: ")[2] for kind in kinds if kind.startswith("License ::")]
    return ", ".join(names) or "see the package"
