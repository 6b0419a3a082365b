"""A page in one browser: drawn whole once, then told what changes for as long as it is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nicegui.element import Element
from nicegui.events import GenericEventArguments
from starlette.requests import Request

from app.dashboard.pages import frame
from app.dashboard.pages.feed import Feed
from app.dashboard.pages.screen import Change, Drawn, Memo, Page, Seen, changes
from app.view.standing import Standing
from mac_decoder.api.face import Facing
from mac_decoder.api.guard import KeyGuard
from mac_decoder.api.sessions import Session, Sessions
from protocol.status.snapshot import Snapshot


class Live(Element, component="live.js"):
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        facing: Facing,
        feed: Feed,
        page: Page,
        request: Request,
        snapshot: Snapshot,
        now: float,
    ) -> None:
        super().__init__()
        # NiceGUI's own page would be a second <main>: this one stands beside it.
        around = self.client.content.parent_slot
        assert around is not None
        around.parent.tag = "div"
        self._facing = facing
        self._feed = feed
        self._page = page
        self._session: Session | None = request.scope.get(Sessions.SCOPE)
        self._salt: bytes = request.scope.get(KeyGuard.SALT) or b""
        self._allowed: Callable[[], bool] = request.scope.get(KeyGuard.ALLOWED, lambda: True)
        self._standing = Standing("connected", facing.facts.address)
        self._memo = Memo()
        # Until it says so: it may be opened in a tab behind others.
        self._seen = self._connected = False
        self._shown = self._draw(snapshot, now)
        session = "" if self._session is None else "manage" if self._session.may_manage else "look"
        self._props["html"] = frame.whole(
            request.url.path,
            page.title,
            self._shown,
            page.body(self._shown),
            session=session,
            disk=facing.facts.disk,
        )
        self.on("act", self._act)
        self.client.on_connect(self._came)
        self.client.on_disconnect(self._left)
        self.client.on_delete(self._left)

    def may_manage(self) -> bool:
        """Whether who looks at it may change things, now."""
        return self._facing.sessions.may_manage(self._session)

    @property
    def salt(self) -> bytes:
        """What keeps the caches of their prompts apart from those of others."""
        return self._salt

    def allowed(self) -> bool:
        """Whether they would still be let in."""
        return self._allowed()

    def see(self, snapshot: Snapshot, now: float) -> None:
        """Show a snapshot, if anything is different."""
        drawn = self._draw(snapshot, now)
        found = changes(self._shown, drawn)
        self._shown = drawn
        if found:
            self.tell(found)

    def tell(self, found: Sequence[Change]) -> None:
        """Have the browser do something."""
        self.run_method("patch", found)

    def _draw(self, snapshot: Snapshot, now: float) -> Drawn:
        seen = Seen(snapshot, now, self._standing, self.may_manage())
        return {**frame.draw(self._memo, seen), **self._page.draw(seen)}

    def _came(self) -> None:
        self._connected = True
        self._look()

    def _look(self) -> None:
        if self._seen and self._connected:
            self._feed.join(self)
            self._page.looked_at(self)

    def _left(self) -> None:
        self._connected = False
        self._feed.leave(self)
        self._page.close()

    async def _act(self, event: GenericEventArguments) -> None:
        said: dict[str, Any] = event.args if isinstance(event.args, dict) else {}
        if not self.allowed():
            return
        match said.get("do"):
            case "hidden":
                self._seen = False
                self._feed.leave(self)
                self._page.unseen()
            case "shown":
                self._seen = True
                self._look()
            case _:
                await self._page.act(said, self)
