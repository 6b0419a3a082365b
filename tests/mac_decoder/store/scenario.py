"""A life of a store, and what must be true of it whatever happened to the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mac_decoder.store.events import Deleting, Event
from mac_decoder.store.publishing import Published, Refused
from mac_decoder.store.store import Store
from protocol.errors import ConfigError, IntegrityError
from protocol.layout import Layout
from tests.mac_decoder.reuse.made import SLIDING
from tests.mac_decoder.store.made import conversation, name_of, opened, publish, serves, walk
from tests.mac_decoder.store.simulated import SimulatedDisk


@dataclass
class Truth:
    """What was acknowledged, kept outside of the store."""

    tried: list[tuple[Layout, Sequence[int]]] = field(default_factory=list)
    published: dict[bytes, tuple[Layout, Sequence[int]]] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    _since: dict[bytes, tuple[str, int]] = field(default_factory=dict)

    def publish(
        self, store: Store, layout: Layout, tokens: Sequence[int], role: str = "turn"
    ) -> None:
        """Publish, and note what was promised."""
        self.tried.append((layout, tokens))
        outcome = publish(store, layout, tokens, role)
        if isinstance(outcome, Refused):
            self.refused.append(outcome)
            return
        assert isinstance(outcome, Published)
        self.published[outcome.name] = (layout, tokens)
        file = store._held.ledger.cuts[outcome.name].file
        self._since[outcome.name] = (f"cuts/{file.hex()}.safetensors", len(self.events))

    def read(self, store: Store, layout: Layout, tokens: Sequence[int]) -> None:
        """Read what may be there; only the medium may be at fault."""
        try:
            serves(store, layout, tokens)
        except IntegrityError as error:
            if error.reason != "file_unreadable":
                raise

    def promised(self) -> list[tuple[Layout, Sequence[int]]]:
        """Cuts that were acknowledged, and whose deletion was not announced since."""
        return [known for name, known in self.published.items() if not self._gone(name)]

    def _gone(self, name: bytes) -> bool:
        path, since = self._since[name]
        later = self.events[since:]
        return any(isinstance(event, Deleting) and event.path == path for event in later)

    def check(self, directory: Path, disk: SimulatedDisk) -> None:
        """After a restart: promised cuts are there, no cut is wrong, and work goes on."""
        with opened(directory, disk, events=self.events) as store:
            promised = {name_of(*known) for known in self.promised()}
            for layout, tokens in self.tried:
                try:
                    good = serves(store, layout, tokens)
                except IntegrityError:
                    # Never acknowledged, and half there after a crash.
                    good = False
                if name_of(layout, tokens) in promised:
                    assert good, len(tokens)
            assert store.stats().on_disk == walk(directory, disk)
            for layout, tokens in self.tried:
                assert isinstance(publish(store, layout, tokens), Published)
                assert serves(store, layout, tokens)
            assert store.stats().on_disk == walk(directory, disk)
        with opened(directory, disk) as store:
            for layout, tokens in self.tried:
                assert serves(store, layout, tokens)
            assert store.stats().on_disk == walk(directory, disk)
            # What a crash tore before it was ever acknowledged is damage, and left alone.
            store.prune(stale=True)
            assert store.verify().bad == []
            assert store.stats().on_disk == walk(directory, disk)


def scenario(directory: Path, disk: SimulatedDisk, truth: Truth) -> None:
    """Publish, extend, supersede, share, restart, read, make room."""
    chat = conversation(620, 1, shared=256)
    other = conversation(300, 2, shared=256)
    with opened(directory, disk, events=truth.events) as store:
        truth.publish(store, SLIDING, chat[:300], "step")
        truth.publish(store, SLIDING, other)
        truth.publish(store, SLIDING, chat)
        truth.read(store, SLIDING, chat)
    with opened(directory, disk, events=truth.events) as store:
        truth.read(store, SLIDING, other)
        truth.publish(store, SLIDING, chat + [5] * 10)
        with contextlib.suppress(ConfigError):
            store.prune(to_bytes=store.stats().on_disk - 3_000)
        truth.read(store, SLIDING, other)
