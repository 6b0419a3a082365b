"""A decoder for tests: protocol's machine over a real WebSocket, in one thread, step by step."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from gb10_producer.synthetic import Synthetic
from protocol import frames
from protocol.errors import BatonError, TransferError
from protocol.handoff import (
    Began,
    DecoderHandoff,
    Event,
    Outstanding,
    PeerAborted,
    Ready,
    Reception,
    Released,
    Sealed,
)
from protocol.identity import Identity
from protocol.layout import (
    FullLayer,
    Layout,
    RecurrentLayer,
    SlidingLayer,
    StateArray,
    regions,
)
from protocol.layouts_named import stand_in_identity
from protocol.pairing import Pairing, PinnedCertificates
from tests.gb10_producer.one_thread import OneThread

KEY = Pairing(b"k" * 32, 0)
SPACE = b"s" * 32
"""Whose prompts the producer may keep, unless a test says otherwise."""

MIXED = Layout(
    (
        FullLayer(0, 2, 16, 8, "bfloat16"),
        SlidingLayer(1, 1, 16, 16, "float16", 24),
        RecurrentLayer(
            2, (StateArray("conv", (3, 8), "bfloat16"), StateArray("s", (64,), "float32"))
        ),
        FullLayer(3, 1, 32, 0, "float32"),
    )
)
"""Every kind of layer, small."""

WIDE = Layout(tuple(FullLayer(index, 8, 128, 128, "float32") for index in range(4)))
"""32 KiB a position: enough bytes to fill any buffer in few tiles."""


def _connected(
    url: str, context: ssl.SSLContext | None, headers: dict[str, str] | None
) -> ClientConnection | OneThread:
    if context is not None:
        assert headers is None
        return OneThread(url, context)
    return connect(
        url,
        compression=None,
        max_size=frames.MAX_FRAME_BYTES,
        ping_interval=None,
        close_timeout=1,
        legacy=True,
        additional_headers=headers,
    )


class Closed(Exception):
    """The producer closed the connection."""


class Peer:
    """One connection of a decoder; ``place`` of every payload is a bytearray per region."""

    def __init__(
        self,
        url: str,
        layout: Layout = MIXED,
        *,
        pairing: Pairing = KEY,
        identity: Identity | None = None,
        context: ssl.SSLContext | None = None,
        certificates: PinnedCertificates | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.layout = layout
        self.socket = _connected(url, context, headers)
        self.machine = DecoderHandoff(
            identity=identity or stand_in_identity(layout),
            layout=layout,
            pairing=pairing,
            nonce=os.urandom(32),
            outstanding=Outstanding(nullcontext()),
            certificates=certificates,
        )
        self.memory: dict[tuple[int, int], bytearray] = {}
        self.texts: list[bytes] = []
        self.generation = 0
        self.reception: Reception | None = None

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def flush(self) -> None:
        """Send what the machine has queued. Raises ``Closed``."""
        try:
            for raw in self.machine.outgoing():
                self.socket.send(raw, text=True)
        except ConnectionClosed as error:
            raise Closed from error

    def handshake(self) -> Peer:
        """Prove the key and be ready."""
        self.machine.connect(time.monotonic())
        self.flush()
        self.until(Ready)
        return self

    def start(self, tokens: Sequence[int], cut: int = 0, **options: object) -> None:
        """Send a PREFILL for all of ``tokens``; buffers start out poisoned."""
        self.generation += 1
        self.memory = {
            (region.index, region.role): bytearray(b"\xa5" * region.nbytes)
            for region in regions(self.layout, cut, len(tokens))
        }
        options.setdefault("space", SPACE)
        self.reception = self.machine.start(
            generation=self.generation,
            nonce=os.urandom(32),
            request_id=f"test-{self.generation}",
            tokens=tokens,
            cut=cut,
            now=time.monotonic(),
            **options,  # type: ignore[arg-type]
        )
        self.flush()

    def step(self, timeout: float = 10.0) -> list[Event]:
        """Receive one message and act on it. Raises ``Closed``, ``TimeoutError``, refusals."""
        try:
            raw = self.socket.recv(timeout, decode=False)
        except ConnectionClosed as error:
            raise Closed from error
        assert isinstance(raw, bytes)
        now = time.monotonic()
        try:
            if raw[:1] == b"{":
                self.texts.append(raw)
                return self.machine.receive_text(raw, now)
            return self._frame(raw, now)
        finally:
            self.flush()

    def _frame(self, raw: bytes, now: float) -> list[Event]:
        header, payload = raw[: frames.HEADER_BYTES], raw[frames.HEADER_BYTES :]
        slot = self.machine.frame_header(header, len(payload), now)
        if slot is None:
            return []
        memory = self.memory[slot.index, slot.role]
        memory[slot.offset : slot.offset + slot.nbytes] = payload
        digest = frames.digest(header[: frames.PREFIX_BYTES], payload)
        return self.machine.frame_digest(slot.sequence, digest, now)

    def until(self, *kinds: type, timeout: float = 15.0) -> Event:
        """Step until one of ``kinds`` happens and return it; an abort meanwhile is raised."""
        deadline = time.monotonic() + timeout
        while True:
            for event in self.step(max(0.01, deadline - time.monotonic())):
                if isinstance(event, kinds):
                    return event
                if isinstance(event, PeerAborted):
                    raise event.error

    def fetch(self, tokens: Sequence[int], cut: int = 0) -> dict[tuple[int, int], bytes]:
        """A whole handoff: the bytes of every region, after the verified seal."""
        self.start(tokens, cut)
        return self.complete()

    def vanish(self) -> Peer:
        """The connection breaks; what was received stays."""
        self.socket.socket.shutdown(socket.SHUT_RDWR)
        if isinstance(self.socket, OneThread):  # the library's own closes by itself
            self.socket.socket.close()
        with suppress(TransferError):
            self.machine.eof(time.monotonic())
        return self

    def resume(self, lost: Peer, credit: int = 32) -> None:
        """Go on with what another peer has lost."""
        assert lost.reception is not None
        self.memory, self.reception = lost.memory, lost.reception
        self.generation = lost.generation
        self.machine.resume(lost.reception, time.monotonic(), credit)
        self.flush()

    def complete(self) -> dict[tuple[int, int], bytes]:
        """The rest of a handoff: the bytes of every region, after the verified seal."""
        self.until(Sealed)
        self.machine.commit(time.monotonic())
        self.flush()
        return {where: bytes(memory) for where, memory in self.memory.items()}

    def withdraw(self, error: BatonError) -> None:
        """Abort the handoff and wait until the producer let go of it."""
        self.machine.abort(error, time.monotonic())
        self.flush()
        self.until(Released)

    def begun(self) -> Began:
        """Wait for the manifest."""
        event = self.until(Began)
        assert isinstance(event, Began)
        return event


def expected_regions(
    layout: Layout, tokens: Sequence[int], cut: int, tile: int
) -> dict[tuple[int, int], bytes]:
    """What a :class:`Synthetic` producer must have handed over."""
    from gb10_producer.prefill import Rows, State
    from protocol.layout import KEY, STATE, VALUE

    found: dict[tuple[int, int], bytes] = {}

    def keep(item: Rows | State) -> None:
        if isinstance(item, Rows):
            for role, view in ((KEY, item.key), (VALUE, item.value)):
                where = item.index, role
                found[where] = found.get(where, b"") + bytes(view)
        else:
            found[item.index, STATE + item.number] = bytes(item.data)

    source = Synthetic(layout, tile)
    source.prefill(tokens, cut, len(tokens), keep, lambda: False, lambda _: None)
    return found
