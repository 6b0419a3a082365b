"""A model that comes in over a control connection: hashed and written in a thread of its own.

The connection's thread hands on what arrived and asks for news; it never waits for the disk.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gb10_producer.received import Kept, ReceivedModels
from protocol.control.messages import SendModel
from protocol.errors import BatonError, Cancelled
from protocol.reasons import refusal

HELD_BYTES: Final = 4 << 20
"""Above this much that is not yet written, no more is taken from the wire."""

_END_S: Final = 2.0


@dataclass(frozen=True)
class Wanted:
    """The stream is wanted from byte ``offset`` on."""

    offset: int


News = Wanted | Kept | BatonError
"""In this order; after the last two nothing more happens."""


class Receipt:
    """Takes in the model of one offer. :meth:`start` once, :meth:`stop` in any case.

    ``wake`` is called from its thread whenever there is news, or room for more.
    """

    def __init__(
        self,
        models: ReceivedModels,
        offer: SendModel,
        wake: Callable[[], None],
        unheard: Callable[[Path], object],
    ) -> None:
        """``unheard`` is called with a model that is kept and of which nobody asks for news."""
        self._unheard = unheard
        self._models = models
        self._offer = offer
        self._wake = wake
        self._pieces: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._news: deque[News] = deque()
        self._lock = threading.Lock()
        self._held = 0
        self._over = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Look at what is here of it; :meth:`news` says how much that is."""
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether :meth:`add` may be called."""
        with self._lock:
            return self._held < HELD_BYTES

    def add(self, piece: bytes) -> None:
        """The next bytes of the stream."""
        with self._lock:
            self._held += len(piece)
        self._pieces.put(piece)

    def news(self) -> News | None:
        """What has happened since this was asked."""
        with self._lock:
            return self._news.popleft() if self._news else None

    def stop(self) -> None:
        """Keep what has come, and take no more. Does not wait for a disk that takes long."""
        with self._lock:
            self._stopped.set()
            left = [news for news in self._news if isinstance(news, Kept)]
            self._news.clear()
        for kept in left:
            self._unheard(kept.path)
        self._pieces.put(None)
        if self._thread.ident is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            self._receive()
        finally:
            # Whatever else ended it, a bug among that, nobody waits for more.
            if not self._over:
                self._tell(refusal("model_not_kept", "the model could not be taken in"))

    def _receive(self) -> None:
        try:
            with self._models.open(self._offer) as incoming:
                left = self._offer.nbytes - incoming.prepare(self._stopped.is_set)
                self._tell(Wanted(self._offer.nbytes - left))
                while left:
                    piece = self._pieces.get()
                    if piece is None:
                        self._over = True
                        return
                    incoming.write(piece)
                    left -= len(piece)
                    with self._lock:
                        self._held -= len(piece)
                    self._wake()
                kept = incoming.finish()
            self._tell(kept)
        except Cancelled:
            self._over = True
        except BatonError as error:
            self._tell(error)

    def _tell(self, news: News) -> None:
        self._over = not isinstance(news, Wanted)
        with self._lock:
            heard = not self._stopped.is_set()
            if heard:
                self._news.append(news)
        if heard:
            self._wake()
        elif isinstance(news, Kept):
            # The sender is gone, and the model is whole: it is served like any other.
            self._unheard(news.path)
