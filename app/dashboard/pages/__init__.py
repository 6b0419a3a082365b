"""The pages: which there are, and how a browser is shown one.

A page's HTML is made here, of the view, and kept up to date part by part; NiceGUI brings it to
the browser, holds the connection and brings back what is done there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from nicegui import ui
from starlette.requests import Request

from app.dashboard.pages import frame
from app.dashboard.pages.about import AboutPage
from app.dashboard.pages.cache import CachePage
from app.dashboard.pages.feed import Feed
from app.dashboard.pages.live import Live
from app.dashboard.pages.nodes import NodesPage
from app.dashboard.pages.now import NowPage
from app.dashboard.pages.requests import RequestsPage
from app.dashboard.pages.screen import Page
from app.dashboard.pages.talk import TryPage
from app.dashboard.pages.walk import Walk
from app.dashboard.sealed import NONCE
from mac_decoder.api.face import Facing

_STYLE: Final = Path(__file__).parents[1] / "assets" / "baton.css"


def register(facing: Facing) -> None:
    """Have NiceGUI answer at the addresses of ``addresses.PAGES``. Once in a process."""
    feed = Feed(facing.board)
    version = hashlib.sha256(_STYLE.read_bytes()).hexdigest()[:12]
    style = f'<link rel="stylesheet" href="/assets/{_STYLE.name}?v={version}">'

    def at(path: str, make: Callable[[], Page]) -> None:
        @ui.page(path)
        async def shown(request: Request) -> None:
            ui.add_head_html(frame.head(request.scope[NONCE]) + style)
            page = make()
            ui.page_title(f"{page.title} – Baton")
            snapshot = await feed.now()
            Live(facing, feed, page, request, snapshot, time.time())

    at("/", NowPage)
    at("/requests", RequestsPage)
    if facing.facts.disk:
        walk = Walk(facing.manage)
        at("/cache", lambda: CachePage(facing.manage, walk, facing.facts.cache))
    # What `--state-dir` says, of which the decoder's is a part.
    at("/nodes", lambda: NodesPage(facing.facts.state.parent, facing.facts.secrets))
    at("/try", lambda: TryPage(facing, feed))
    at("/about", AboutPage)
