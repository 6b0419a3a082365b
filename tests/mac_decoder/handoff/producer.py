"""A small producer over real sockets, which can be told to go wrong at any byte.

It drives the protocol's own ``ProducerHandoff``, so what it sends is right until a fault
changes it. Rows are synthetic: a function of layer, role and position.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from protocol.deadlines import Timing
from protocol.errors import BatonError
from protocol.frames import digest
from protocol.handoff import (
    Committed,
    Event,
    Interrupted,
    Late,
    PeerAborted,
    ProducerHandoff,
    Requested,
    State,
)
from protocol.identity import NONE, Identity
from protocol.layout import (
    FullLayer,
    Layout,
    RecurrentLayer,
    SlidingLayer,
    Slot,
    StateArray,
    regions,
)
from protocol.messages import Limits, Recipe
from protocol.pairing import Pairing, PinnedCertificates
from protocol.reasons import refusal

KEY = bytes(range(32))
TILE = 16
IDENTITY = Identity("ab" * 32, "cd" * 32, NONE, NONE, "ef" * 32, NONE, "01" * 32, "23" * 32)
LAYOUT = Layout(
    (
        FullLayer(0, 2, 8, 8, "float32"),
        SlidingLayer(1, 1, 8, 4, "bfloat16", 24),
        RecurrentLayer(
            2, (StateArray("conv", (3, 5), "float32"), StateArray("s", (7,), "float16"))
        ),
    )
)
WIDE = Layout((FullLayer(0, 8, 1024, 1024, "float32"), FullLayer(1, 8, 1024, 1024, "float32")))
"""Rows of 32 KiB: frames of half a MiB at a tile of 16."""

TIMING = Timing(
    handshake_s=5.0, idle_s=5.0, abort_s=5.0, commit_s=5.0, heartbeat_s=0.1, base_s=20.0
)


def payload(slot: Slot) -> bytes:
    """The synthetic bytes of a slot."""
    start = slot.offset + 7 * slot.index + 31 * slot.role
    return (np.arange(start, start + slot.nbytes, dtype=np.int64) % 251).astype(np.uint8).tobytes()


class Memory:
    """A destination in plain memory, poisoned, that remembers what was placed."""

    def __init__(self, layout: Layout, cut: int, end: int) -> None:
        self.cut, self.end = cut, end
        self.extra: tuple[int, ...] = ()
        self.layout = layout
        self.regions = {
            (region.index, region.role): memoryview(bytearray(b"\xa5" * region.nbytes))
            for region in regions(layout, cut, end)
        }
        self.prefaulted = False

    def begin(self, cut: int) -> None:
        """As the shadow: what was asked for, or all of it."""
        if cut != self.cut:
            self.__init__(self.layout, cut, self.end)

    def place(self, slot: Slot) -> memoryview:
        return self.regions[slot.index, slot.role][slot.offset : slot.offset + slot.nbytes]

    def prefault(self, cancelled: Callable[[], bool]) -> None:
        self.prefaulted = True

    def holds_what_was_sent(self) -> bool:
        return all(
            bytes(view) == payload(Slot(0, index, role, 0, 0, 0, view.nbytes))
            for (index, role), view in self.regions.items()
        )

    def digest(self) -> int:
        return hash(tuple(bytes(view) for view in self.regions.values()))


class Gone(Exception):
    """The test's producer ends this connection."""


@dataclass
class Fault:
    """What happens to the bytes after the request: offsets count from the first of them."""

    cut_at: int | None = None
    flip_at: int | None = None
    drip: bool = False


@dataclass
class Peer:
    """One accepted connection of the test's producer."""

    sock: socket.socket
    owner: TestProducer
    fault: Fault = field(default_factory=Fault)
    sent: int = 0
    counting: bool = False
    texts: list[bytes] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    credited: int = 0

    def __post_init__(self) -> None:
        owner = self.owner
        self.protocol = ServerProtocol(max_size=None)
        self.machine = ProducerHandoff(
            identity=owner.identity,
            layout=owner.layout,
            recipe=Recipe("producer", "cpu", "float32", TILE),
            limits=Limits(max_tokens=4096, max_credit=owner.max_credit, max_extra_cuts=4),
            pairing=Pairing(owner.key, owner.epoch),
            nonce=os.urandom(32),
            certificates=owner.certificates,
            timing=owner.timing,
            now=time.monotonic(),
        )

    def write(self, data: bytes | memoryview) -> None:
        """Send raw bytes, as the fault has them."""
        data = bytearray(data)
        if self.counting:
            start, self.sent = self.sent, self.sent + len(data)
            flip, cut = self.fault.flip_at, self.fault.cut_at
            if flip is not None and start <= flip < self.sent:
                data[flip - start] ^= 0x10
            if cut is not None and cut < self.sent:
                self.sock.sendall(data[: max(0, cut - start)])
                raise Gone
        if self.fault.drip and self.counting:
            for value in data:
                self.sock.sendall(bytes([value]))
                time.sleep(0.03)
            return
        self.sock.sendall(data)

    def flush(self) -> None:
        for raw in self.machine.outgoing():
            self.text(raw)

    def text(self, raw: bytes) -> None:
        self.message(0x81, raw)

    def message(self, first: int, *parts: bytes | memoryview) -> None:
        """One whole WebSocket frame with this first byte."""
        self.write(head(first, sum(len(part) for part in parts)))
        for part in parts:
            self.write(part)

    def frame(self, slot: Slot, content: bytes | None = None) -> bytes:
        """The header of a slot's frame; counts as sent for the machine."""
        data = payload(slot) if content is None else content
        found = digest(self.machine.header_prefix(slot), data)
        return self.machine.frame(slot, found, time.monotonic())

    def receive(self, timeout_s: float = 0.05) -> bool:
        """Take in what came, if anything did; false if nothing came in time."""
        tls = isinstance(self.sock, ssl.SSLSocket) and self.sock.pending()
        if not tls and not select.select([self.sock], [], [], timeout_s)[0]:
            self.events += self.machine.tick(time.monotonic())
            self.flush()
            return False
        data = self.sock.recv(1 << 16)
        if not data:
            raise Gone
        self.protocol.receive_data(data)
        for event in self.protocol.events_received():
            if isinstance(event, Request):
                self.protocol.send_response(self.protocol.accept(event))
            elif isinstance(event, Frame):
                self._frame(event)
        for raw in self.protocol.data_to_send():
            self.write(raw)
        self.flush()
        return True

    def _frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            raise Gone
        if frame.opcode is Opcode.TEXT:
            self.texts.append(bytes(frame.data))
            for event in self.machine.receive_text(bytes(frame.data), time.monotonic()):
                self.events.append(event)
                if isinstance(event, PeerAborted):
                    self.machine.release(time.monotonic())
                    self.owner.seen.append(event)
                if isinstance(event, Committed | Late):
                    self.owner.seen.append(event)
                if isinstance(event, Interrupted):  # this one keeps nothing
                    unknown = refusal("transfer_unknown", "nothing is kept")
                    self.machine.abort(unknown, time.monotonic())

    def await_request(self) -> Requested:
        while True:
            for event in self.events:
                if isinstance(event, Requested):
                    self.events.remove(event)
                    return event
            self.receive()

    # The right way to serve, in steps that a test can replace

    def begin(self, computed_tokens: int = 0) -> None:
        if self.machine.state != State.REQUESTED:
            return  # withdrawn in the same breath as it was asked for
        now = time.monotonic()
        self.machine.begin(transfer=os.urandom(16), computed_tokens=computed_tokens, now=now)
        self.flush()

    def slots(self) -> Iterator[Slot]:
        """The slots of the handoff, waiting for credit where there is none."""
        while self.machine.remaining:
            if self.machine.state != State.STREAMING:
                return
            slot = self.machine.next_slot()
            if slot is None:
                self.receive()
                continue
            yield slot

    def frames(self) -> None:
        for slot in self.slots():
            while self.receive(0.0):
                pass
            if self.machine.state != State.STREAMING:
                return
            self.message(0x82, self.frame(slot), payload(slot))

    def seal(self) -> None:
        if self.machine.state == State.STREAMING:
            self.machine.seal(queue_us=2000, compute_us=5000, now=time.monotonic())
            self.flush()

    def serve(self, computed_tokens: int = 0) -> None:
        self.begin(computed_tokens)
        self.frames()
        self.seal()


def head(first: int, length: int) -> bytes:
    """A WebSocket frame's header, unmasked."""
    if length < 126:
        return struct.pack("!BB", first, length)
    if length < 1 << 16:
        return struct.pack("!BBH", first, 126, length)
    return struct.pack("!BBQ", first, 127, length)


class TestProducer:
    """Listens on loopback; ``script`` answers each request (default: serve it rightly)."""

    __test__ = False

    def __init__(
        self,
        *,
        layout: Layout = LAYOUT,
        identity: Identity = IDENTITY,
        key: bytes = KEY,
        epoch: int = 0,
        port: int = 0,
        timing: Timing = TIMING,
        max_credit: int = 64,
        certificates: PinnedCertificates | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.layout, self.identity, self.key, self.epoch = layout, identity, key, epoch
        self.timing, self.max_credit = timing, max_credit
        self.certificates, self.context = certificates, context
        self.script: Callable[[Peer, Requested], None] = lambda peer, request: peer.serve()
        self.greeting: Callable[[socket.socket], bool] = lambda sock: True
        self.fault = Fault()
        self.seen: list[Event] = []
        self.requests = 0
        self.connections = 0
        self.sent = 0
        self._listening = socket.create_server(("127.0.0.1", port))
        self._listening.settimeout(0.05)
        self.port = self._listening.getsockname()[1]
        self._stopped = False
        self._threads: list[threading.Thread] = []
        self._socks: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    @property
    def url(self) -> str:
        return f"{'ws' if self.context is None else 'wss'}://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._stopped = True
        self._accepting.join()
        self._listening.close()
        for sock in self._socks:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> TestProducer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _accept(self) -> None:
        while not self._stopped:
            try:
                sock, _ = self._listening.accept()
            except TimeoutError:
                continue
            sock.setblocking(True)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socks.append(sock)
            thread = threading.Thread(target=self._run, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _run(self, sock: socket.socket) -> None:
        self.connections += 1
        try:
            with sock:
                if not self.greeting(sock):
                    return
                if self.context is not None:
                    sock = self.context.wrap_socket(sock, server_side=True)
                    self._socks.append(sock)
                with sock:
                    self._serve(Peer(sock, self))
        except (Gone, OSError):
            return

    def _serve(self, peer: Peer) -> None:
        try:
            while not self._stopped:
                request = peer.await_request()
                self.requests += 1
                peer.fault, peer.sent, peer.counting = self.fault, 0, True
                try:
                    self.script(peer, request)
                finally:
                    self.sent = peer.sent
                peer.counting = False
        except BatonError:
            peer.counting = False
            peer.flush()
            peer.sock.shutdown(socket.SHUT_WR)
