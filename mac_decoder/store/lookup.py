"""What the durable tier holds of a prompt: a few cuts, each authenticated before it counts.

The books propose by names alone; a proposal's manifest is read, and its tokens are
compared with the prompt's one by one. Manifests are kept for a while: the next prompt of a
conversation asks for the same ones.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mac_decoder.reuse.facts import NOTHING, Holding, Publication, offers
from mac_decoder.reuse.radix import match_of_few
from mac_decoder.store import names
from mac_decoder.store.holdings import Holdings
from mac_decoder.store.ledger import Cut
from mac_decoder.store.manifest import Manifest
from mac_decoder.store.quarantine import Quarantine
from protocol.blocks import BLOCK, as_tokens, chain
from protocol.errors import IntegrityError
from protocol.messages import History

KEPT: Final = 16
"""Manifests kept: with 131,072 tokens each, 8 MiB."""


class Lookup:
    """Finds and authenticates cuts. All methods may be called from any thread."""

    def __init__(self, held: Holdings, quarantine: Quarantine) -> None:
        self._held = held
        self._quarantine = quarantine
        self._kept: OrderedDict[bytes, Manifest] = OrderedDict()
        self._lock = threading.Lock()

    def manifest(self, cut: Cut, *, remember: bool = True) -> Manifest:
        """The manifest of a held cut, kept for a while if it is to be remembered.

        Raises ``IntegrityError``; the cut is then withheld.
        """
        with self._lock:
            known = self._kept.get(cut.file)
            if known:
                self._kept.move_to_end(cut.file)
                return known
        path = names.cut_path(cut.file)
        try:
            manifest = self._held.reader.manifest(path)
            files = tuple(node.file.digest for node in cut.nodes() if node.file)[::-1]
            if (manifest.name, manifest.files) != (cut.name, files):
                raise IntegrityError(
                    "another cut's file lies in this one's place",
                    reason="digest_differs",
                    field=path,
                    found=manifest.name.hex(),
                    expected=cut.name.hex(),
                )
        except IntegrityError as error:
            self._quarantine.find(error, cut)
            raise
        if not remember:
            return manifest
        with self._lock:
            self._kept[cut.file] = manifest
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return manifest

    def forget(self) -> None:
        """Keep no manifest any more: what is deleted is not to stay in memory."""
        with self._lock:
            self._kept.clear()

    def holding(
        self, space: bytes, tokens: ArrayLike, blocks: Sequence[bytes] | None = None
    ) -> Holding:
        """What is held of the prompt ``tokens``, as facts for the ladder; keys are cuts' names.

        Offered are the deepest cut that is a prefix of the prompt, the deepest that leaves out
        its last token at least, and the nearest cut at or past the last shared block. So
        ``shared`` may miss up to a block that another branch shares.
        """
        prompt = as_tokens(tokens)
        links = chain(space, prompt) if blocks is None else blocks
        manifests = {found.name: found for found in self._candidates(space, prompt, links)}
        if not manifests:
            return NOTHING
        cuts = [(name, found.tokens) for name, found in manifests.items()]

        def describe(name: bytes) -> tuple[tuple[History, ...], Publication]:
            return manifests[name].history, "published"

        return offers(match_of_few(cuts, prompt, links), describe)

    def _candidates(
        self, space: bytes, prompt: NDArray[np.uint32], links: Sequence[bytes]
    ) -> list[Manifest]:
        found: list[Manifest] = []
        with self._held.lock:
            prefixes = self._held.ledger.prefixes(space, links, prompt)
            shared = self._held.ledger.shared(links)
        for cut in reversed(prefixes):
            manifest = self._proven(cut)
            if manifest:
                found.append(manifest)
                if manifest.position < len(prompt):
                    break
        while shared * BLOCK > (found[0].position if found else 0):
            with self._held.lock:
                cut = self._held.ledger.nearest(space, links[shared - 1])
            if cut is None:
                shared -= 1
                continue
            manifest = self._proven(cut)
            if manifest:
                found.append(manifest)
                break
        return found

    def _proven(self, cut: Cut) -> Manifest | None:
        if cut.withheld:
            return None
        try:
            return self.manifest(cut)
        except IntegrityError:
            # Withheld and counted; the prompt goes one rung down.
            return None
