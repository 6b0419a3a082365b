"""What a handoff could reach at best on this machine: TCP, or TLS, and one SHA-256 per end.

Two processes on loopback. The sender hashes a chunk while it sends another, the receiver
receives into memory that was touched before while it hashes what came; nothing else is done.
With TLS the two ends use a pairing's certificates, as producer and decoder do.
Both run as children and obey one word at a time from a pipe: see :func:`send`, :func:`receive`.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import numpy as np

CHUNK: Final = 1 << 20
_POOL: Final = 64 << 20
_SOCKET_BUFFER: Final = 4 << 20


def send(orders: Connection, nbytes: int, pairing: Path | None = None) -> None:
    """Child: listen, say the port; then for every order send ``nbytes``, hashed."""
    pool = memoryview(np.random.default_rng(7).bytes(_POOL))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        orders.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if pairing is not None:
        from gb10_producer.trust import trust_from_file

        context = trust_from_file(pairing).context
        assert context is not None
        connection = context.wrap_socket(connection, server_side=True)

    def chunks(use: Callable[[memoryview], object]) -> None:
        for offset in range(0, nbytes, CHUNK):
            at = offset % (_POOL - CHUNK)
            use(pool[at : at + min(CHUNK, nbytes - offset)])

    with connection:
        while orders.recv():
            hashing = threading.Thread(
                target=chunks, args=(lambda view: hashlib.sha256(view).digest(),)
            )
            hashing.start()
            chunks(connection.sendall)
            hashing.join()
            orders.send(None)


def receive(orders: Connection, nbytes: int, port: int, pairing: Path | None = None) -> None:
    """Child: connect; then for every order receive ``nbytes``, hashed, and say the seconds."""
    view = np.ones(nbytes, dtype=np.uint8).data
    all_of_it = socket.MSG_WAITALL
    with ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        if pairing is not None:
            from mac_decoder.handoff.trust import trust_of_file

            context, all_of_it = trust_of_file(pairing).context, 0
            assert context is not None
            wrapped = context.wrap_socket(connection, server_hostname="127.0.0.1")
            connection = stack.enter_context(wrapped)
        orders.send(None)
        while orders.recv():
            began = time.perf_counter()
            arrived = threading.Semaphore(0)
            hashing = threading.Thread(target=_hash_behind, args=(view, arrived))
            hashing.start()
            for offset in range(0, nbytes, CHUNK):
                place = view[offset : offset + CHUNK]
                while place:
                    place = place[connection.recv_into(place, 0, all_of_it) :]
                arrived.release()
            hashing.join()
            orders.send(time.perf_counter() - began)


def _hash_behind(view: memoryview, arrived: threading.Semaphore) -> None:
    for offset in range(0, len(view), CHUNK):
        arrived.acquire()
        hashlib.sha256(view[offset : offset + CHUNK]).digest()
