"""The decoder's call: every way in which it can fail has its own reason."""

from __future__ import annotations

import errno
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from protocol.errors import BatonError, ConfigError
from protocol.pairing.certificates import OwnCertificate
from protocol.pairing.code import new_code
from tests.trust.inviting import DECODER, STRANGER, soon
from tests.trust.machines import own
from trust import acceptance
from trust.acceptance import accept
from trust.frames import receive_frame, receive_opening, send_frame
from trust.tls import server_context


def refusal(port: int, host: str = "127.0.0.1", **options) -> BatonError:
    with pytest.raises(BatonError) as caught:
        accept(host, port, new_code(), **{"own": DECODER, "name": "macbook", **options})
    return caught.value


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port at which ``answer`` serves one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                answer(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def secured(sock: socket.socket) -> ssl.SSLSocket:
    announced = receive_opening(sock, soon())
    context = server_context(own().certificate, own().private_key, [announced])
    return context.wrap_socket(sock, server_side=True)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    error = refusal(port)
    assert error.reason == "producer_down"
    assert "--pair" in (error.hint or "")


@pytest.mark.parametrize("host", ["a..b", "a\0b", "no-such-host.invalid"])
def test_a_host_that_has_no_address(host: str) -> None:
    assert refusal(1, host).reason == "producer_unreachable"


def test_a_host_that_is_not_reached_says_what_macos_may_do(monkeypatch) -> None:
    def connect(sock: socket.socket, address: object) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")  # 65 on macOS

    monkeypatch.setattr(socket.socket, "connect", connect)
    error = refusal(1)
    assert error.reason == "producer_unreachable"
    assert "local network" in (error.hint or "")


def test_who_answers_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "PATIENCE_S", 0.3)
    stop = threading.Event()

    def answer(sock: socket.socket) -> None:
        stop.wait(20.0)

    with answering(answer) as port:
        began = time.monotonic()
        assert refusal(port).reason == "connect_timeout"
        assert time.monotonic() - began < 15.0
        stop.set()


def test_what_speaks_no_tls_is_told() -> None:
    def answer(sock: socket.socket) -> None:
        receive_opening(sock, soon())
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        sock.recv(4096)

    with answering(answer) as port:
        assert refusal(port).reason == "tls_failed"


def test_an_older_tls_is_refused() -> None:
    def answer(sock: socket.socket) -> None:
        announced = receive_opening(sock, soon())
        context = server_context(own().certificate, own().private_key, [announced])
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError):
            context.wrap_socket(sock, server_side=True)

    with answering(answer) as port:
        assert refusal(port).reason == "tls_failed"


def test_who_goes_away_during_the_tls_handshake_is_told() -> None:
    with answering(lambda sock: None) as port:
        error = refusal(port)
    assert error.reason == "connection_lost"
    assert error.hint == "check the port: pairing has one of its own"


def test_who_ends_the_connection_is_told() -> None:
    with answering(lambda sock: secured(sock).close()) as port:
        assert refusal(port).reason == "connection_lost"


@pytest.mark.parametrize("message", [b"", b"{}", b"\xff" * 10])
def test_garbage_is_refused_and_told(message: bytes) -> None:
    told: list[bytes] = []

    def answer(sock: socket.socket) -> None:
        with secured(sock) as wrapped:
            receive_frame(wrapped, soon())
            send_frame(wrapped, message, soon())
            told.append(receive_frame(wrapped, soon()))

    with answering(answer) as port:
        assert refusal(port).reason == "message_malformed"
    assert b"message_malformed" in told[0]


def test_its_own_message_that_comes_back_is_refused() -> None:
    def answer(sock: socket.socket) -> None:
        with secured(sock) as wrapped:
            send_frame(wrapped, receive_frame(wrapped, soon()), soon())

    with answering(answer) as port:
        assert refusal(port).reason == "message_unexpected"


def test_a_name_that_cannot_travel_is_told() -> None:
    with answering(lambda sock: secured(sock).close()) as port:
        assert refusal(port, name="two\nlines").reason == "name_malformed"


def test_a_certificate_that_is_none_calls_nobody() -> None:
    error = refusal(1, own=OwnCertificate(DECODER.certificate, STRANGER.private_key))
    assert isinstance(error, ConfigError)
    assert error.reason == "pairing_unreadable"
