"""The files of a cut's blocks: those that are said to be on disk and are, else those of bodies.

A sequence that goes on need not bring the blocks that its last cut left on disk: it says what
their files are called, as the outcome of that publication did.
"""

from __future__ import annotations

from collections.abc import Mapping

from mac_decoder.reuse.cut import BlockBody, block_sizes
from mac_decoder.store.digests import Digests
from mac_decoder.store.holdings import Holdings
from mac_decoder.store.publishing import Order, files_of_blocks
from protocol.errors import IntegrityError


class BlockFiles:
    """Names files by their digests. An order's ``files`` are those said to be there, of its
    first blocks.
    """

    def __init__(self, held: Holdings) -> None:
        self._held = held
        self._digests = Digests(held.keys.number)

    def of(self, order: Order) -> tuple[bytes, ...]:
        """The digest of each block's file; none for a layout without full layers.

        Raises ``IntegrityError`` (``block_missing``) where a block has neither file nor body.
        """
        if not block_sizes(order.cut.layout):
            return ()
        files: list[bytes] = []
        for number, block in enumerate(order.cut.blocks):
            digest = self._digest(order, number, order.bodies.get(block))
            if not digest:
                raise IntegrityError("a block is neither given nor held", reason="block_missing")
            files.append(digest)
        return tuple(files)

    def there(self, order: Order, bodies: Mapping[bytes, BlockBody]) -> tuple[bytes, ...]:
        """Which files of the first blocks are on disk: of those said to be, and of ``bodies``."""
        blocks = order.cut.blocks
        if not block_sizes(order.cut.layout):
            return files_of_blocks((), len(blocks))
        there: list[bytes] = []
        for number, block in enumerate(blocks):
            digest = self._digest(order, number, bodies.get(block))
            if not self._trusts(digest):
                break
            there.append(digest)
        return tuple(there)

    def _digest(self, order: Order, number: int, body: BlockBody | None) -> bytes:
        """What is said of the block, unless it is not so and there is a body to ask.

        So what is written is called after its own bytes, whatever was said.
        """
        said = order.files[number] if number < len(order.files) else b""
        if body is None or self._trusts(said):
            return said
        return self._digests.of(order.cut.layout, order.space, body)

    def _trusts(self, digest: bytes) -> bool:
        """Whether there is a block's file of that digest, which nobody has to look at first."""
        with self._held.lock:
            file = self._held.ledger.blocks.get(digest)
            return file is not None and file.present and file.trusted
