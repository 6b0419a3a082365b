"""The certificate that clients are shown, and what a connection behind TLS lets pass."""

from __future__ import annotations

import logging
import shutil
import socket
import ssl
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from mac_decoder.api import tls
from mac_decoder.api.deadlines import DeadlineProtocol
from mac_decoder.api.settings import ApiSettings
from protocol.checkpoint import read_checkpoint
from protocol.errors import ConfigError
from tests.e2e.running import until
from tests.mac_decoder.api.answers import chat
from tests.mac_decoder.api.recital import Recital
from tests.mac_decoder.api.scripted import Part, ScriptedEngine
from tests.mac_decoder.api.serving import Server, serving

NAMES = ("localhost", "127.0.0.1", "::1", "Desk.local")


def reason_of(doing: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        doing()
    return caught.value.reason


def test_a_certificate_is_made_once_for_ten_years_and_kept_in_private(tmp_path: Path) -> None:
    made = tls.own(tmp_path / "decoder", NAMES)
    again = tls.own(tmp_path / "decoder", NAMES)
    assert (again.path, again.fingerprint) == (made.path, made.fingerprint)
    leaf = x509.load_pem_x509_certificate(made.path.read_bytes())
    assert 3640 < (leaf.not_valid_after_utc - datetime.now(UTC)).days <= 3650
    for path in made.path.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.path.parent.stat().st_mode) == 0o700
    assert b"PRIVATE" not in made.path.read_bytes(), "what clients are given has no secret"
    assert tls.own(tmp_path / "another", NAMES).fingerprint != made.fingerprint


def test_the_fingerprint_is_what_openssl_says(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("this machine has no openssl command")
    made = tls.own(tmp_path, NAMES)
    command = [openssl, "x509", "-noout", "-fingerprint", "-sha256", "-in", str(made.path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.strip().partition("=")[2].replace(":", "").lower() == made.fingerprint


def test_a_name_that_came_later_is_told_and_the_certificate_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = tls.own(tmp_path, NAMES)
    with caplog.at_level(logging.WARNING):
        assert tls.own(tmp_path, NAMES).fingerprint == made.fingerprint
        assert not caplog.records
        later = tls.own(tmp_path, (*NAMES, "mac.local", "no name"))
    assert later.fingerprint == made.fingerprint
    assert "does not name mac.local:" in caplog.text


def test_a_private_key_that_others_may_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    made = tls.own(tmp_path, NAMES)
    identity = made.path.with_name("identity.pem")
    identity.chmod(0o644)
    assert reason_of(lambda: tls.own(tmp_path, NAMES)) == "tls_key_exposed"
    identity.chmod(0o600)
    identity.write_bytes(made.path.read_bytes())
    assert reason_of(lambda: tls.own(tmp_path, NAMES)) == "tls_unusable"
    identity.write_bytes(b"")
    assert reason_of(lambda: tls.own(tmp_path, NAMES)) == "tls_unusable"


def pair(tmp_path: Path, name: str, password: bytes | None = None) -> tuple[Path, Path]:
    """A certificate and its private key in files of their own."""
    made = tls.own(tmp_path / name, NAMES)
    raw = made.path.with_name("identity.pem").read_bytes()
    key = serialization.load_pem_private_key(raw, None)
    path = tmp_path / f"{name}.key"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption()
            if password is None
            else serialization.BestAvailableEncryption(password),
        )
    )
    path.chmod(0o600)
    return made.path, path


def test_the_users_own_certificate_is_used_as_it_is(tmp_path: Path) -> None:
    certificate, key = pair(tmp_path, "mine")
    found = tls.given(certificate, key)
    assert found.path == certificate
    assert found.fingerprint == tls.own(tmp_path / "mine", NAMES).fingerprint
    certificate.chmod(0o644)
    tls.given(certificate, key)
    key.chmod(0o644)
    assert reason_of(lambda: tls.given(certificate, key)) == "tls_key_exposed"


def test_a_certificate_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    certificate, key = pair(tmp_path, "mine")
    _, another = pair(tmp_path, "another")
    _, locked = pair(tmp_path, "locked", b"a password")
    nowhere = tmp_path / "nowhere"
    for given in ((certificate, another), (nowhere, key), (certificate, nowhere), (key, key)):
        assert reason_of(lambda given=given: tls.given(*given)) == "tls_unusable"
    began = time.monotonic()
    assert reason_of(lambda: tls.given(certificate, locked)) == "tls_unusable"
    assert time.monotonic() - began < 5, "nobody is asked for a password"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tls.Tls:
    return tls.own(tmp_path_factory.mktemp("state"), NAMES)


@pytest.fixture(scope="module")
def server(recital: Recital, shown: tls.Tls) -> Iterator[Server]:
    checkpoint = read_checkpoint(recital.path)

    async def play(part: Part) -> None:
        for _ in range(20):
            part.token(10)
        part.end()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeadlineProtocol, "head_timeout_s", 1.0)
        with serving(
            lambda: ScriptedEngine(checkpoint, play), ApiSettings(), tls=shown.context
        ) as running:
            yield running


def trusting(shown: tls.Tls, most: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(shown.path))
    # What Python 3.13 asks for of itself.
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    if most is not None:
        context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        context.maximum_version = most
        context.set_ciphers("ALL:@SECLEVEL=0")
    return context


@pytest.mark.parametrize("streamed", [False, True])
def test_openais_client_trusts_the_certificates_file(
    server: Server, shown: tls.Tls, *, streamed: bool
) -> None:
    with (
        httpx.Client(verify=trusting(shown)) as http,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", http_client=http, max_retries=0
        ) as client,
    ):
        asked = chat()
        if streamed:
            chunks = list(
                client.chat.completions.create(
                    model=asked["model"], messages=asked["messages"], stream=True
                )
            )
            assert chunks[-1].choices[0].finish_reason == "stop"
        else:
            answer = client.chat.completions.create(
                model=asked["model"], messages=asked["messages"]
            )
            assert answer.choices[0].finish_reason == "stop"


def test_a_client_that_pins_another_certificate_does_not_connect(
    server: Server, tmp_path: Path
) -> None:
    another = tls.own(tmp_path, NAMES)
    with (
        httpx.Client(verify=trusting(another)) as http,
        pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        http.get(f"{server.url}/health")


@pytest.mark.parametrize(
    ("most", "spoken"),
    [
        (None, "TLSv1.3"),
        (ssl.TLSVersion.TLSv1_2, "TLSv1.2"),
        (ssl.TLSVersion.TLSv1_1, None),
        (ssl.TLSVersion.TLSv1, None),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_version_below_1_2_is_spoken(
    server: Server, shown: tls.Tls, most: ssl.TLSVersion | None, spoken: str | None
) -> None:
    # Whatever else this machine's OpenSSL would refuse.
    assert shown.context.minimum_version == ssl.TLSVersion.TLSv1_2
    context = trusting(shown, most)
    raw = socket.create_connection(("127.0.0.1", server.port), 10)
    if spoken is None:
        before = failed(server)
        with raw, pytest.raises(ssl.SSLError):
            context.wrap_socket(raw, server_hostname="localhost")
        until(lambda: failed(server) == before + 1, 5)
        return
    with context.wrap_socket(raw, server_hostname="localhost") as client:
        assert client.version() == spoken
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")


def failed(server: Server) -> int:
    return server.door.refusals.counts["tls_handshake_failed"]


@pytest.mark.parametrize(
    "said",
    [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"],
    ids=["nothing", "in the clear", "half a hello"],
)
def test_without_a_handshake_nothing_is_said_and_nobody_stays(server: Server, said: bytes) -> None:
    before = failed(server)
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), 10) as client:
        client.sendall(said)
        answer = b""
        try:
            while piece := client.recv(4096):
                answer += piece
        except ConnectionResetError:
            pass
    assert b"HTTP" not in answer, "an alert at most"
    assert time.monotonic() - began < 5
    until(lambda: failed(server) == before + 1, 5)
    assert "tls_handshake_failed" in httpx.get(f"{server.url}/status", verify=False).text
