"""`baton status`: addresses as people type them, and a summary that they can read."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from app.commands import app
from app.status import MOST_KEYS_BYTES, MOST_STATUS_BYTES, base_url, fetch_status, first_key
from app.view.summary import summary
from protocol.errors import ConfigError, PeerProtocolError, TransferError
from protocol.status.snapshot import Nodes
from tests.app.view.snapshots import IDLE, NOW, exactly, with_engine, with_node
from tests.patience import soon

LINK = {
    "name": "wss://box:7431",
    "state": "refused",
    "reason": "weights_differ",
    "detail": "its checkpoint differs in weights, tokenizer; copy it",
    "attempts": 3,
    "retry_in_s": 7.5,
    "round_trip_ms": 0.42,
    "handoffs": 2,
    "failures": {"connection_lost": 1},
}
STATUS: dict[str, Any] = {
    "model": "a [model]",
    "supervisor": {"restarts": 1, "last_fault": "signal SIGABRT"},
    "engine": {
        "ready": True,
        "fault": None,
        "open": 3,
        "open_limit": 80,
        "requests": {"waiting": 1, "remote": 0, "decode": 2},
        "ended": {"stop": 12, "length": 1},
        "generated_tokens": 1234,
        "links": [LINK],
        "fallbacks": {"producer_down": 4},
        "rates": {
            "local_tokens_per_s": 55.2,
            "producer_tokens_per_s": 2100.0,
            "link_bytes_per_s": 1_180_000_000,
            "handoff_overhead_ms": 0.0,
        },
        "remote_threshold": 256,
        "cache_bytes_reserved": 42_000_000,
        "cache_bytes_limit": 11_800_000_000,
    },
    "cache": {
        "live": {"sequences": 1, "bytes": 1000},
        "resident": {"cuts": 3, "used_bytes": 2_000_000, "budget_bytes": 5_000_000_000},
        "durable": None,
        "counters": {"cache_hits": 5, "cache_misses": 2, "session_continuation_hits": 1},
    },
}


SNAPSHOT = msgspec.structs.replace(
    with_node(
        with_engine(
            IDLE,
            open=3,
            stages={"waiting": 1, "remote": 0, "decode": 2},
            ended={"stop": 12, "length": 1},
            generated_tokens=1234,
            fallbacks={"producer_down": 4},
            asked_from_tokens=256,
            local_tokens_per_s=exactly(55.2),
            cache_bytes_reserved=42_000_000,
            cache_bytes_limit=11_800_000_000,
        ),
        called="box",
        state="refused",
        reason="weights_differ",
        detail="its checkpoint differs in weights, tokenizer; copy it",
        attempts=3,
        handoffs=2,
        resumed=0,
        failures={"connection_lost": 1},
    ),
    decoder=msgspec.structs.replace(
        IDLE.decoder, model="a [model]", restarts=1, last_fault="signal SIGABRT"
    ),
    cache=msgspec.structs.replace(
        IDLE.cache,
        durable=None,
        counters={"cache_hits": 5, "cache_misses": 2, "session_continuation_hits": 1},
    ),
)
STATUS["snapshot"] = json.loads(msgspec.json.encode(SNAPSHOT))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/status", "http://127.0.0.1:8000"),
        ("mac.local", "http://mac.local:8000"),
        ("https://mac.example", "https://mac.example"),
        ("https://mac.example/baton/v1", "https://mac.example/baton"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_an_address_is_taken_as_people_type_it(typed: str, meant: str) -> None:
    assert base_url(typed) == meant


@pytest.mark.parametrize(
    "typed",
    [
        *("", "ws://host:1", "host:port", "http://", "host:99999"),
        *("[::1", "[127.0.0.1:9000]", "http://a..b:1", "http://...", f"https://{'a' * 70}"),
        *("http://exämple..:1", "http://a\0b", "a b", "a\x1b[2J"),
    ],
)
def test_what_is_no_address_is_refused(typed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        base_url(typed)
    assert refused.value.reason == "address_invalid"


@contextmanager
def answering(status: int, body: object) -> Iterator[str]:
    """A server that gives this answer to anyone with the right key, at ``host:port``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wrong = self.headers.get("authorization", "Bearer right") != "Bearer right"
            refusal = {"error": {"code": "invalid_api_key", "message": "no valid key"}}
            said = refusal if wrong else body
            raw = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(404 if self.path != "/status" else 401 if wrong else status)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def shown(address: str, *more: str) -> str:
    result = CliRunner().invoke(app, ["status", address, *more], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_summary_is_text_and_json_is_raw() -> None:
    with answering(200, STATUS) as address:
        text = " ".join(shown(address).split())
        assert json.loads(shown(f"http://{address}/v1/", "--json")) == STATUS
    for part in (
        "model a [model]",
        "does Idle",
        "restarts 1, the last after signal SIGABRT",
        "3 open of at most 80 (1 waiting, 2 decode)",
        "12 stop, 1 length; 1,234 tokens generated",
        "box: refused (weights_differ): its checkpoint differs in weights, tokenizer; "
        "copy it; tried 3 times",
        "2 received; failed: 1 connection_lost",
        "4 producer_down (prefilled here instead)",
        "prefill here 55.2 tokens/s, producer 2,100 tokens/s, round trip 0.4 ms, link 1.2 GB/s",
        "asked from 256 tokens on",
        "42.0 MB of 11.8 GB for requests",
        "memory cache 1.2 GB of 8.0 GB, 3 cuts",
        "5 hits, 2 misses, 1 continued live",
        "≈ 2 min 4 s",
    ):
        assert part in text
    assert "disk" not in text
    assert "{" not in text


def test_what_a_person_has_to_do_is_said_to_its_end_and_no_text_is_endless() -> None:
    remedy = f"{'its files differ ' * 18}: baton node send gb10"
    assert 160 < len(remedy) < 500
    for detail, seen in ((remedy, True), ("x" * 100_000 + remedy, False)):
        snapshot = with_node(IDLE, state="refused", reason="weights_differ", detail=detail)
        told = {"snapshot": json.loads(msgspec.json.encode(snapshot))}
        with answering(200, told) as address:
            text = " ".join(shown(address).split())
        assert ("baton node send gb10" in text) == seen
        assert len(text) < 3_000


def test_one_of_a_thing_is_one() -> None:
    counters = {"cache_hits": 1, "cache_misses": 1, "session_continuation_hits": 1_234}
    told = msgspec.structs.replace(
        IDLE, cache=msgspec.structs.replace(IDLE.cache, counters=counters)
    )
    lines = {line.title: line.text for line in summary(told, NOW)}
    assert lines["reuse"] == "1 hit, 1 miss, 1,234 continued live"


def test_a_decoder_that_cannot_answer_says_why() -> None:
    failed = with_engine(IDLE, doing="trouble", ready=False, fault="engine_fault")
    assert {line.title: line.text for line in summary(failed, NOW)}["does"] == (
        "Trouble: engine_fault"
    )


def test_without_a_producer_that_is_said() -> None:
    alone = msgspec.structs.replace(IDLE, nodes=Nodes(()))
    lines = {line.title: line.text for line in summary(alone, NOW)}
    assert lines["producer"] == "No producer: every prompt is prefilled here"


def test_a_status_of_another_release_is_named_as_such() -> None:
    with answering(200, {"model": "m"}) as address, pytest.raises(PeerProtocolError) as refused:
        shown(address)
    assert refused.value.reason == "status_version_differs"


@pytest.mark.parametrize("code", ["decoder_starting", "invalid_api_key"])
def test_a_decoder_that_refuses_is_not_said_to_be_away(code: str) -> None:
    body = {"error": {"code": code, "message": "the decoder is starting"}}
    with answering(503, body) as address, pytest.raises(TransferError) as refused:
        fetch_status(address)
    assert refused.value.reason == code
    assert "the decoder is starting" in refused.value.message


@pytest.mark.parametrize("body", ["no object", {"error": "text"}, {}])
def test_something_else_that_answers_is_no_decoder(body: object) -> None:
    with answering(500, body) as address, pytest.raises(TransferError) as refused:
        fetch_status(address)
    assert refused.value.reason == "decoder_unreachable"


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"snapshot":' * 5_000,
        b'{"error":{"code":"a","message":' + b"[" * 3_000 + b"]" * 3_000 + b"}}",
        b" " * (MOST_STATUS_BYTES + 1),
    ],
)
def test_what_nobody_can_read_is_no_decoders(body: bytes) -> None:
    with answering(500, body) as address, pytest.raises(TransferError) as refused:
        fetch_status(address)
    assert refused.value.reason == "decoder_unreachable"


@pytest.mark.parametrize("part", ["head", "body"])
def test_an_answer_that_drips_is_not_waited_for(part: str) -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            sock, _ = listener.accept()
            with sock, suppress(OSError):
                sock.sendall(b"HTTP/1.1 200 OK\r\n" + (b"\r\n" if part == "body" else b"x: "))
                while not over.wait(0.05):
                    sock.sendall(b"1")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            with soon(), pytest.raises(TransferError) as refused:
                fetch_status(f"127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.5)
        finally:
            over.set()
            dripping.join()
    assert refused.value.reason == "decoder_unreachable"


def test_what_a_decoder_is_called_is_one_line_of_the_terminal() -> None:
    decoder = msgspec.structs.replace(SNAPSHOT.decoder, model="\x1b]0;x\x07\u202e" + "m" * 100_000)
    told = msgspec.structs.replace(SNAPSHOT, decoder=decoder)
    status = STATUS | {"snapshot": json.loads(msgspec.json.encode(told))}
    with answering(200, status) as address:
        text = shown(address)
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert len(text) < 5_000


def test_a_key_comes_from_a_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("right\nanother\n")
    with answering(200, STATUS) as address:
        assert "a [model]" in shown(address, "--api-keys-file", str(keys))
        keys.write_text("left\n")
        with pytest.raises(TransferError) as refused:
            shown(address, "--api-keys-file", str(keys))
        assert refused.value.reason == "invalid_api_key"
    keys.write_text("\n")
    with pytest.raises(ConfigError) as keyless:
        shown("127.0.0.1:1", "--api-keys-file", str(keys))
    assert keyless.value.reason == "api_keys_invalid"


@pytest.mark.parametrize("what", ["pipe", "zeros", "directory", "long", "binary", "missing"])
def test_what_is_no_file_of_keys_is_not_waited_for(tmp_path: Path, what: str) -> None:
    keys = tmp_path / "keys"
    match what:
        case "pipe":
            os.mkfifo(keys)
        case "zeros":
            keys.symlink_to("/dev/zero")
        case "directory":
            keys.mkdir()
        case "long":
            keys.write_text("k\n" * MOST_KEYS_BYTES)
        case "binary":
            keys.write_bytes(b"\xff\xfe")
    with soon(), pytest.raises(ConfigError) as caught:
        first_key(keys)
    assert (caught.value.reason, caught.value.field) == ("api_keys_invalid", "api-keys-file")
    assert str(keys) in caught.value.message


@pytest.mark.parametrize("code", ["x" * 65, "Two Words", 7, ["a"], "\x1b[2J"])
def test_what_answers_with_no_code_of_ours_is_not_quoted(code: object) -> None:
    body = {"error": {"code": code, "message": "\x1b[2J" + "m" * 100_000}}
    with answering(503, body) as address, pytest.raises(TransferError) as refused:
        fetch_status(address)
    assert refused.value.reason == "unknown"
    assert refused.value.message.isprintable()
    assert len(refused.value.message) < 250
