"""Line drawings of 20 by 20, in the colour of the text beside them."""

from __future__ import annotations

from typing import Final

from app.dashboard.pages.markup import Html


def _drawn(shapes: str) -> Html:
    return Html(
        '<svg viewBox="0 0 20 20" width="20" height="20" fill="none" stroke="currentColor" '
        'stroke-width="1.5" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true">'
        f"{shapes}</svg>"
    )


BRAND: Final = _drawn('<circle cx="10" cy="10" r="6.5" stroke-width="3.4"/>')
NOW: Final = _drawn('<path d="M2.5 10.5h3.2l2.3-6 4 11 2.3-5h3.2"/>')
REQUESTS: Final = _drawn('<path d="M3 5.5h14M3 10h14M3 14.5h9"/>')
CACHE: Final = _drawn(
    '<path d="M10 2.8 17.2 6.5 10 10.2 2.8 6.5zM2.8 10.2l7.2 3.7 7.2-3.7'
    'M2.8 13.9l7.2 3.7 7.2-3.7"/>'
)
NODES: Final = _drawn(
    '<rect x="3" y="3.5" width="14" height="5" rx="1.4"/><rect x="3" y="11.5" width="14" '
    'height="5" rx="1.4"/><path d="M6 6h.01M6 14h.01"/>'
)
TRY: Final = _drawn('<path d="M3 4.5h14v9.5H9l-3.5 3V14H3z"/>')
ABOUT: Final = _drawn('<circle cx="10" cy="10" r="7.2"/><path d="M10 9.2v4.3M10 6.5h.01"/>')
AUTO: Final = _drawn(
    '<circle cx="10" cy="10" r="6.5"/>'
    '<path d="M10 3.5v13a6.5 6.5 0 0 0 0-13z" fill="currentColor" stroke="none"/>'
)
LIGHT: Final = _drawn(
    '<circle cx="10" cy="10" r="3.2"/><path d="M10 2.5v1.6M10 15.9v1.6M2.5 10h1.6M15.9 10h1.6'
    'M4.7 4.7l1.1 1.1M14.2 14.2l1.1 1.1M4.7 15.3l1.1-1.1M14.2 5.8l1.1-1.1"/>'
)
DARK: Final = _drawn('<path d="M16.5 11.8A6.8 6.8 0 0 1 8.2 3.5a6.8 6.8 0 1 0 8.3 8.3z"/>')
