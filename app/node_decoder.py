"""What a running decoder says of its producers, and waiting for what it finds out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from app.status import AS_SET, DEFAULT_URL, fetch_status, first_key
from app.terminal import step
from protocol.errors import IdentityMismatch, TransferError
from protocol.reasons import REASONS

Url = Annotated[
    str | None,
    typer.Option(help="Where the decoder listens: HOST:PORT or a URL.", show_default=AS_SET),
]
KeysFile = Annotated[
    Path | None, typer.Option(help="The decoder's file of API keys, if it asks for one.")
]

PATIENCE_S: Final = 120.0
"""How long a decoder may take to meet a producer and to qualify it."""

STILL: Final = "producer_qualifying"
"""The reason of a link whose producer is being qualified."""

_LOOK_S: Final = 0.5
_SETTLE_S: Final = 15.0
"""A producer that was paired a moment ago may refuse at first; it is asked again by itself."""
_STARTING: Final = ("decoder_starting", "decoder_restarting")


@dataclass(frozen=True)
class Decoder:
    """The decoder at ``url``, running or not."""

    url: str = DEFAULT_URL
    keys_file: Path | None = None

    def links(self) -> Sequence[Mapping[str, Any]]:
        """Its links to producers. Raises as ``fetch_status``."""
        engine = self._status().get("engine") or {}
        return engine.get("links") or []

    def model(self) -> Path | None:
        """The directory of its model, where it says so; it is on the decoder's machine.

        Raises as :meth:`links`.
        """
        found = self._status().get("model_path")
        return Path(found) if isinstance(found, str) else None

    def _status(self) -> Mapping[str, Any]:
        key = None if self.keys_file is None else first_key(self.keys_file)
        return fetch_status(self.url, key=key)

    def require_reached(self, name: str) -> None:
        """Return unless the decoder says that it cannot reach what is behind the link.

        Raises ``TransferError`` with the link's reason, and as :meth:`links`.
        """
        state = self._link(name)
        if state.get("state") in ("down", "refused"):
            raise _unused(state)

    def wait(
        self,
        name: str,
        title: str,
        done: Callable[[], bool] = lambda: True,
        patience_s: float = PATIENCE_S,
        *,
        settle_s: float = 0.0,
    ) -> None:
        """Return once the link called ``name`` is ready, and ``done``.

        For ``settle_s`` the decoder may still say what held before a change. Raises
        ``TransferError`` once it is certain that it will not be, or ``patience_s`` later: the
        link's reason, ``node_not_linked`` or ``node_not_qualified``; and as :meth:`links`.
        """
        state: Mapping[str, Any] = {}
        began = time.monotonic()
        with step(title, lambda: str(state.get("detail") or "")):
            while True:
                state = self._link(name)
                if state.get("state") == "ready" and done():
                    return
                waited = time.monotonic() - began
                unfit = state.get("state") == "unfit" and done()
                hopeless = unfit or _hopeless(state, waited)
                if (hopeless and waited > settle_s) or waited > patience_s:
                    raise _unused(state)
                time.sleep(_LOOK_S)

    def _link(self, name: str) -> Mapping[str, Any]:
        """What is said of one link; empty where nothing is (yet)."""
        try:
            links = self.links()
        except TransferError as error:
            if error.reason not in _STARTING:
                raise
            return {"reason": error.reason, "detail": error.message}
        return next((link for link in links if link.get("name") == name), {})


def _unused(link: Mapping[str, Any]) -> TransferError:
    return TransferError(
        "the decoder does not use the producer",
        reason=link.get("reason") or _silent(link),
        found=link.get("detail") or link.get("state"),
        hint="see `baton node list`; the log of `baton serve` has more",
    )


def _silent(link: Mapping[str, Any]) -> str:
    """What is the matter where the decoder gives no reason."""
    return "node_not_qualified" if link else "node_not_linked"


def _hopeless(link: Mapping[str, Any], waited: float) -> bool:
    """Whether a producer that refuses will go on to."""
    known = REASONS.get(str(link.get("reason")))
    other_model = known is not None and known.error is IdentityMismatch
    return link.get("state") == "refused" and (other_model or waited > _SETTLE_S)
