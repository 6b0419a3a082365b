"""The decoder's side of a handoff in the test's own process: link and engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mac_decoder.handoff.client import ProducerLink
from mac_decoder.handoff.connection import Producer
from mac_decoder.handoff.generations import Generations
from mac_decoder.handoff.trust import trust_of_key
from protocol.identity import Identity
from protocol.layout import Layout
from tests.e2e.running import until

KEY = bytes(range(32))


@contextmanager
def linked(url: str, identity: Identity, layout: Layout, state: Path) -> Iterator[ProducerLink]:
    """A link to the producer at ``url``, which holds ``KEY``; it is ready."""
    target = Producer(url, trust_of_key(KEY), identity, layout)
    with ProducerLink(target, Generations(state / "generations.json", KEY, 0)) as link:
        until(lambda: link.state.ready)
        yield link
