"""No secret of a whole life together is anywhere but where it is kept.

Every code, key and private key that two machines used is searched for in what they wrote, what
they were started with, their environment and what they answered over HTTP.
"""

from __future__ import annotations

import base64
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mac_decoder.config import DecoderConfig
from protocol.pairing.record import Role
from tests.e2e.paired import BATON, Box, Mac
from tests.e2e.running import until
from tests.mac_decoder.test_node import Decoder
from trust.peers import Peers
from trust.secrets import PlainSecrets

PROMPT = "the ferry of the unlikely marmalade leaves at nine " * 12
MAY_HOLD = {"peers", "own", "store.key"}
"""Private files in private directories, which hold secrets; everything else is searched."""


class Watch:
    """What every process below this one was started with, and what it has in its environment."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.02):
            for process in psutil.Process().children(recursive=True):
                for name in ("cmdline", "environ"):
                    try:
                        self.seen.add(Path(f"/proc/{process.pid}/{name}").read_bytes())
                    except OSError:
                        continue  # it has ended


def spellings(secret: bytes | str) -> set[bytes]:
    """The ways in which a secret might be written."""
    if isinstance(secret, str):
        words = secret.split()
        return {form.join(words).encode() for form in (" ", "-", "")} | {repr(words).encode()}
    plain = base64.b64encode(secret)
    return {
        secret,
        secret.hex().encode(),
        plain,
        plain.rstrip(b"="),
        base64.urlsafe_b64encode(secret),
        repr(secret)[2:-1].encode(),
    }


def kept_by(state: Path, role: Role) -> Iterator[bytes]:
    """The secrets of one side's registry."""
    for peer in Peers(state, role, PlainSecrets()).all().peers:
        yield from (peer.record.key, peer.record.private_key)


def files(*roots: Path) -> Iterator[Path]:
    for root in roots:
        yield from (path for path in root.rglob("*") if path.is_file())


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_no_secret_is_anywhere_but_where_it_is_kept(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = str(checkpoint("llama"))
    secrets: dict[str, bytes | str] = {}
    answers: list[bytes] = []
    state, cache = tmp_path / "mac", tmp_path / "mac" / "cache"
    config = DecoderConfig(model="", state_dir=str(state), secrets="file")
    with Watch() as watched:
        box = Box(
            tmp_path / "gb10",
            *("--model", model, "--device", "cpu", "--host", "127.0.0.1", "--pair"),
        )
        state.mkdir()
        decoder = Decoder(state, "--model", model, "--port", "0", "--remote-threshold", "16")
        mac = Mac(state, decoder.await_ready())
        try:
            secrets["code"] = code = box.code()
            add = ("add", f"127.0.0.1:{box.pair_port}", "--code-stdin", "--name", "mac")
            said = [mac.node(*add, typed=code)]
            for number, secret in enumerate(kept_by(config.state_path, "decoder")):
                secrets[f"first {number}"] = secret
            made = subprocess.run(
                [BATON, "key", "create", "editor", "--state-dir", str(state)],
                capture_output=True,
                text=True,
                check=True,
            )
            secrets["API key"] = made.stdout.strip()
            headers = {"Authorization": f"Bearer {secrets['API key']}"}
            name = decoder.get("/v1/models").json()["data"][0]["id"]
            body = {"model": name, "messages": [{"role": "user", "content": PROMPT}]}
            url = decoder.url + "/v1/chat/completions"
            # It looks for keys at most once a second, and has just told how many there are.
            models = decoder.url + "/v1/models"
            until(lambda: decoder.client.get(models, headers=headers).status_code == 200)
            asked = decoder.client.post(url, json={**body, "max_tokens": 3}, headers=headers)
            assert asked.status_code == 200, asked.text.replace(secrets["API key"], "KEY")
            assert asked.json()["baton"]["source"] == "remote", asked.json()["baton"]
            answers.append(asked.content)
            # Refusals, too, have what they refuse at hand.
            for wrong in (secrets["API key"] + "x", "baton-" + "0" * 43):
                bad = {"Authorization": f"Bearer {wrong}"}
                answers.append(decoder.client.post(url, json=body, headers=bad).content)
            said += [mac.node("rotate", "gb10", asks=False)]
            for number, secret in enumerate(kept_by(config.state_path, "decoder")):
                secrets[f"second {number}"] = secret
            for number, secret in enumerate(kept_by(box.state / "producer", "producer")):
                secrets[f"producer {number}"] = secret
            mac.await_state("ready")
            said += [mac.node("list"), box.produce("--peers")]
            for path in ("/status", "/metrics", "/health", "/ready", "/v1/models", "/nothing"):
                answers.append(decoder.get(path).content)
            secrets["store key"] = config.store_key_path.read_bytes()
            secrets["prompt"] = PROMPT[:40].strip()
            said += [mac.node("remove", "gb10", asks=False)]
        finally:
            box.running.close()
            decoder.close()
    assert len(watched.seen) > 10
    assert len(secrets) >= 9

    logs = "\n".join(
        # What is shown to whoever sits there is no log: a service is not given --pair.
        line
        for line in (box.said + decoder.log).splitlines()
        if secrets["code"] not in line or "time=" in line or line.startswith("{")
    )
    places = {"logs": logs.encode(), "commands": "\n".join(said).encode()}
    places |= {f"answer {number}": answer for number, answer in enumerate(answers)}
    places |= {f"process {number}": text for number, text in enumerate(watched.seen)}
    for path in files(tmp_path, Path(model)):
        if MAY_HOLD & {*path.parts}:
            assert path.stat().st_mode & 0o077 == 0, path
            assert path.parent.stat().st_mode & 0o077 == 0, path
        elif path.name not in ("log", "producer.log"):
            places[str(path)] = path.read_bytes()
    assert any(str(cache) in place for place in places)

    found = [
        (name, place)
        for name, secret in secrets.items()
        for place, text in places.items()
        for form in spellings(secret)
        if form in text and not (name == "prompt" and place.startswith("answer"))
    ]
    assert found == []


def test_the_search_would_find_them() -> None:
    """Each spelling, in a haystack of its kind."""
    key = bytes(range(32))
    for form in (key, key.hex().encode(), base64.b64encode(key), str(key).encode()):
        assert any(one in b"a" + form + b"z" for one in spellings(key))
    for form in (b"one two six", b"one-two-six", b"['one', 'two', 'six']"):
        assert any(one in form for one in spellings("one two six"))
