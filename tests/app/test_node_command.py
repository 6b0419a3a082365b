"""`baton node`: pairing, listing and ending, against a producer's real invitation and control."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app import node, node_add, node_decoder, node_pairing, settings, status
from app.commands import app
from app.discovery import Seen
from mac_decoder.config import DecoderConfig
from mac_decoder.qualify.verdicts import Past, Verdict, Verdicts
from protocol.errors import BatonError
from protocol.messages import Recipe
from tests.app.test_status import answering as decoder_answering
from tests.trust.answering import Answering, answering, records
from tests.trust.inviting import PORT, Inviting, inviting
from tests.trust.keyrings import Locked, using
from trust.peers import Address, Peer, Peers

NOBODY = "127.0.0.1:9"
"""No decoder is there."""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "mac"


def path_of(state: Path) -> Path:
    return DecoderConfig(model="", state_dir=str(state)).state_path


def peers_of(state: Path) -> Peers:
    return Peers(path_of(state), "decoder")


def baton(state: Path, *args: str, url: str | None = NOBODY, typed: str = "") -> Result:
    command = ["node", *args, "--state-dir", str(state), "--secrets", "file"]
    if url is not None:
        command += ["--url", url]
    return CliRunner().invoke(app, command, input=typed)


def done(result: Result) -> Result:
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def reason(result: Result) -> str:
    assert isinstance(result.exception, BatonError), (result.output, result.exception)
    return result.exception.reason


def add(state: Path, invited: Inviting, *args: str, url: str = NOBODY) -> Result:
    """Pair by a code that the producer has just opened."""
    code = invited.invitation.open().text
    target = f"127.0.0.1:{invited.port}"
    return baton(state, "add", target, "--code-stdin", *args, url=url, typed=f"{code}\n")


@contextmanager
def decoder(**link: Any) -> Iterator[str]:
    """A decoder's status, with this one link to ``PORT``."""
    known = {"name": f"wss://127.0.0.1:{PORT}", "state": "ready", **link}
    with decoder_answering(200, {"model": "m", "engine": {"links": [known]}}) as url:
        yield url


def verdict() -> Verdict:
    return Verdict(
        version=1,
        identity=bytes(32),
        recipe=Recipe("producer", "cuda", "bfloat16", 512),
        here="mlx 0.32.4",
        turn=0,
        past=(Past(1_700_000_000, True, 0.1, 0.01, "layer 0"),),
        tokens_per_s=2100.0,
        link_bytes_per_s=1.18e9,
        round_trip_ms=0.4,
    )


# Adding


def test_a_code_from_standard_input_pairs_both(state: Path, tmp_path: Path) -> None:
    with inviting(tmp_path / "gb10") as invited:
        said = done(add(state, invited, "--name", "my mac")).stderr
        (theirs,) = invited.peers.all().peers
    (ours,) = peers_of(state).all().peers
    assert ours.name == "gb10"
    assert ours.address == Address("127.0.0.1", PORT)
    assert theirs.name == "my mac"
    assert (ours.record.key, ours.record.epoch) == (theirs.record.key, theirs.record.epoch)
    assert abs(ours.paired_at - time.time()) < 60
    assert "decoder not running" in said
    assert ours.record.key.hex() not in said


@pytest.mark.parametrize("closed", [True, False])
def test_without_anybody_to_type_it_says_so(state: Path, tmp_path: Path, closed: bool) -> None:
    with inviting(tmp_path / "gb10") as invited:
        invited.invitation.open()
        words = [sys.executable, "-m", "app.cli", "node", "add", f"127.0.0.1:{invited.port}"]
        words += ["--state-dir", str(state), "--secrets", "file"]
        with open(os.devnull) as nothing:
            found = subprocess.run(
                words,
                stdin=None if closed else nothing,
                preexec_fn=(lambda: os.close(0)) if closed else None,
                capture_output=True,
                text=True,
            )
        assert found.returncode == 78
        assert "no_terminal" in found.stderr
        assert "Traceback" not in found.stderr
        assert invited.invitation.left_s() > 0, "the code is not spent"


def test_a_slip_of_the_typist_is_told_and_costs_nothing(state: Path, tmp_path: Path) -> None:
    with inviting(tmp_path / "gb10") as invited:
        code = invited.invitation.open().text
        typed = f"acorn acrobat nonsense\n{code.upper().replace('-', '  ')}\n"
        said = done(baton(state, "add", f"127.0.0.1:{invited.port}", typed=typed)).stderr
        assert "code_malformed" in said
        assert "nonsense" not in said.split("the six words")[0]
        assert len(invited.peers.all().peers) == 1


def test_a_wrong_code_is_refused_and_nothing_is_kept(state: Path, tmp_path: Path) -> None:
    with inviting(tmp_path / "gb10") as invited:
        invited.invitation.open()
        wrong = "acorn acrobat album amber anchor ankle\n"
        target = f"127.0.0.1:{invited.port}"
        refused = baton(state, "add", target, "--code-stdin", typed=wrong)
        assert reason(refused) == "code_differs"
        again = baton(state, "add", target, "--code-stdin", typed=wrong)
        assert reason(again) == "code_burned"
        assert invited.peers.all().peers == ()
    assert peers_of(state).all().peers == ()


def test_a_code_is_no_argument(state: Path) -> None:
    refused = baton(state, "add", "127.0.0.1", "acorn-acrobat-album-amber-anchor-ankle")
    assert refused.exit_code == 2


def test_no_code_is_spent_where_nothing_could_be_kept(state: Path, tmp_path: Path) -> None:
    with inviting(tmp_path / "gb10") as invited:
        code = invited.invitation.open().text
        place = path_of(state) / "peers"
        place.mkdir(parents=True)
        place.chmod(0o755)
        target = f"127.0.0.1:{invited.port}"
        refused = baton(state, "add", target, "--code-stdin", typed=f"{code}\n")
        assert reason(refused) == "directory_exposed"
        assert invited.invitation.left_s() > 0
        place.chmod(0o700)
        command = ["node", "add", target, "--code-stdin", "--state-dir", str(state)]
        with using(Locked()):
            locked = CliRunner().invoke(app, [*command, "--secrets", "keyring"], input=code)
        assert reason(locked) == "keychain_locked"
        assert invited.invitation.left_s() > 0


def test_a_name_that_is_taken_gets_a_number_and_an_address_has_one_producer(
    state: Path, tmp_path: Path
) -> None:
    other = Peer("gb10", records()[1], 1_700_000_000, Address("10.0.0.9", PORT))
    peers_of(state).add(other)
    with inviting(tmp_path / "gb10") as invited:
        done(add(state, invited))
        assert {peer.name for peer in peers_of(state).all().peers} == {"gb10", "gb10 2"}
        # The same producer once more: its own name is free to it.
        done(add(state, invited, "--as", "box"))
        assert {peer.name for peer in peers_of(state).all().peers} == {"gb10", "box"}
    moved = Peer("old box", records()[1], 1_700_000_000, Address("127.0.0.1", PORT))
    peers_of(state).add(moved)
    with inviting(tmp_path / "gb10") as invited:
        said = done(add(state, invited)).stderr
        assert "old box, which had this address, is forgotten" in said
        assert {peer.name for peer in peers_of(state).all().peers} == {"gb10", "gb10 2"}


def test_it_waits_for_the_decoder_and_shows_what_was_measured(state: Path, tmp_path: Path) -> None:
    measured = {
        "compute_tokens_per_s": 2100.4,
        "wire_bytes_per_s": 1_180_000_000,
        "round_trip_ms": 0.42,
        "tile": 512,
    }
    with inviting(tmp_path / "gb10") as invited, decoder(**measured) as url:
        shown = " ".join(done(add(state, invited, url=url)).stdout.split())
    for part in ("gb10", f"127.0.0.1:{PORT}", "ready", "2,100", "512", "1.2 GB/s", "0.4 ms"):
        assert part in shown


@pytest.mark.parametrize(
    ("link", "told"),
    [
        ({"state": "refused", "reason": "weights_differ"}, "weights_differ"),
        ({"state": "unfit", "reason": "producer_unfit"}, "producer_unfit"),
        ({"state": "down", "reason": "producer_down"}, "producer_down"),
        ({"name": "wss://other:1"}, "node_not_linked"),
    ],
)
def test_what_keeps_a_producer_from_being_used_is_told_and_it_stays_paired(
    state: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    link: dict[str, str],
    told: str,
) -> None:
    hopeless = told in ("weights_differ", "producer_unfit")
    patience_s = 60.0 if hopeless else 0.5
    monkeypatch.setattr(node_decoder.Decoder.wait, "__defaults__", (lambda: True, patience_s))
    with inviting(tmp_path / "gb10") as invited, decoder(**link) as url:
        began = time.monotonic()
        assert reason(add(state, invited, url=url)) == told
        assert hopeless == (time.monotonic() - began < patience_s)
    assert len(peers_of(state).all().peers) == 1


# Whom to add


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("10.0.0.9", ("10.0.0.9", 7432)),
        (" 10.0.0.9:99 ", ("10.0.0.9", 99)),
        ("box.local", ("box.local", 7432)),
        ("box:7000", ("box", 7000)),
        ("localhost", ("localhost", 7432)),
        ("::1", ("::1", 7432)),
        ("[::1]", ("::1", 7432)),
        ("[::1]:5", ("::1", 5)),
    ],
)
def test_an_address_is_one(typed: str, meant: tuple[str, int]) -> None:
    assert node_add.target_of(typed) == meant


@pytest.mark.parametrize("typed", ["", "a.b:0", "a.b:99999", "a.b:x", "wss://a.b", "[::1", "a\n.b"])
def test_what_is_neither_a_name_nor_an_address_is_refused(typed: str) -> None:
    with pytest.raises(BatonError) as refused:
        node_add.target_of(typed)
    assert refused.value.reason == "address_invalid"


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        (Seen("gb10 in the attic", "10.1.1.1", 7431, 7777, "m"), ("10.1.1.1", 7777)),
        (Seen("gb10 in the attic", "10.1.1.1", 7431, 0, "m"), "pairing_closed"),
        (Seen("another", "10.1.1.1", 7431, 7777, "m"), "node_not_found"),
    ],
)
def test_a_name_is_looked_for_in_the_network(
    monkeypatch: pytest.MonkeyPatch, seen: Seen, found: tuple[str, int] | str
) -> None:
    monkeypatch.setattr(node_pairing, "browse", lambda until: [seen])
    if isinstance(found, str):
        with pytest.raises(BatonError) as refused:
            node_add.target_of("gb10 in the attic")
        assert refused.value.reason == found
    else:
        assert node_add.target_of("gb10 in the attic") == found


def test_what_answers_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [Seen("gb10", "10.1.1.1", 7431, 7432, "[m]"), Seen("b", "10.1.1.2", 7431, 0, "")]
    monkeypatch.setattr(node, "browse", lambda seconds: seen if seconds == 1 else [])
    runner = CliRunner()
    listed = done(runner.invoke(app, ["node", "discover", "--seconds", "1", "--json"]))
    assert json.loads(listed.stdout) == [asdict(one) for one in seen]
    shown = done(runner.invoke(app, ["node", "discover", "--seconds", "1"])).stdout
    assert "[m]" in shown
    assert "10.1.1.1:7431" in shown
    assert "nobody answers" in done(runner.invoke(app, ["node", "discover"])).stderr


# Listing


def keep(state: Path, name: str = "gb10", **changes: Any) -> Peer:
    """A peer whose link would be to ``PORT``."""
    values = {"paired_at": 1_700_000_000, "address": Address("127.0.0.1", PORT), **changes}
    peer = Peer(name, records(epoch=7)[1], **values)
    peers_of(state).add(peer)
    return peer


def listed(state: Path, url: str = NOBODY) -> list[dict[str, Any]]:
    return json.loads(done(baton(state, "list", "--json", url=url)).stdout)


def test_the_list_has_what_the_decoder_says_and_no_verdict_that_may_be_anothers(
    state: Path,
) -> None:
    """One on record may be of another model, or of other releases: the decoder alone knows."""
    peer = keep(state)
    base = {
        "name": "gb10",
        "address": f"127.0.0.1:{PORT}",
        "fingerprint": peer.fingerprint.hex(),
        "paired_at": 1_700_000_000,
        "epoch": 7,
    }
    nothing = {
        "state": None,
        "reason": "",
        "detail": "",
        "tokens_per_s": 0,
        "tile": 0,
        "link_bytes_per_s": 0,
        "round_trip_ms": 0,
        "qualified_at": None,
    }
    assert listed(state) == [base | nothing]
    Verdicts(path_of(state)).put(peer.fingerprint, verdict())
    assert listed(state) == [base | nothing]
    shown = " ".join(done(baton(state, "list")).stdout.split())
    assert "decoder not running" in shown
    assert "qualified" not in shown
    assert "tokens/s" not in shown
    told = {
        "compute_tokens_per_s": 9.0,
        "tile": 256,
        "wire_bytes_per_s": 7,
        "round_trip_ms": 0.5,
        "qualified": {"at": 1_800_000_000, "fit": True},
    }
    measured = {
        "tokens_per_s": 9.0,
        "tile": 256,
        "link_bytes_per_s": 7,
        "round_trip_ms": 0.5,
        "qualified_at": 1_800_000_000,
    }
    for name in ("ready", "down"):
        with decoder(state=name, reason="why", **told) as url:
            now = {"state": name, "reason": "why", **measured}
            assert listed(state, url) == [base | nothing | now]
            assert "qualified 2027-01-" in done(baton(state, "list", url=url)).stdout
    with decoder(state="connecting", qualified=None, tile=0) as url:
        assert listed(state, url) == [base | nothing | {"state": "connecting"}]
    failed = {**told, "qualified": {"at": 1_800_000_000, "fit": False}}
    for name, said in (
        *(("refused", told), ("unfit", told), ("qualifying", told)),
        *(("down", failed), ("connecting", failed)),
    ):
        with decoder(state=name, reason="weights_differ", **said) as url:
            now = {"state": name, "reason": "weights_differ"}
            assert listed(state, url) == [base | nothing | now]
            shown = done(baton(state, "list", url=url)).stdout
            assert "qualified" not in shown
            assert "tiles of" not in shown
    with decoder(name="wss://other:1") as url:
        shown = " ".join(done(baton(state, "list", url=url)).stdout.split())
        assert "not used by" in shown
    with decoder_answering(503, {"error": {"code": "decoder_starting", "message": ""}}) as url:
        shown = "".join(done(baton(state, "list", url=url)).stdout.split())
        assert "decoder_starting" in shown


def test_the_list_needs_no_decoder_and_says_why_none_is_asked(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the settings do not tell where it is; never asked is one in another place."""
    file = tmp_path / "config.toml"
    monkeypatch.setattr(settings, "default_path", lambda: file)
    keep(state)
    with decoder() as url:
        monkeypatch.setattr(status, "DEFAULT_URL", url)
        assert "decoder not asked" not in done(baton(state, "list", url=None)).stdout
        for text, told in (("port = 0", "address_not_known"), ("prot = 1", "settings_invalid")):
            file.write_text(f"[serve]\n{text}")
            listed = done(baton(state, "list", url=None))
            assert "decoder not asked" in " ".join(listed.stdout.split())
            assert told in listed.stderr
            assert told not in done(baton(state, "list", url=url)).stderr


def test_no_secret_is_listed(state: Path) -> None:
    peer = keep(state)
    for args in (("list",), ("list", "--json")):
        said = done(baton(state, *args)).output
        for secret in (peer.record.key, peer.record.private_key):
            assert secret.hex() not in said
            assert secret.hex()[:24] not in said


def test_a_list_of_nobody_says_what_to_do(state: Path) -> None:
    assert "baton node add" in done(baton(state, "list")).stderr
    assert listed(state) == []
    assert not path_of(state).exists()


def test_a_file_that_cannot_be_used_is_told_beside_the_others(state: Path) -> None:
    peer = keep(state)
    (path_of(state) / "peers" / "no-peer").write_text("{}")
    found = done(baton(state, "list", "--json"))
    assert [row["fingerprint"] for row in json.loads(found.stdout)] == [peer.fingerprint.hex()]
    assert "peer_foreign" in found.stderr


# Ending and renewing


@contextmanager
def served(state: Path) -> Iterator[tuple[Answering, Peer]]:
    """A producer that answers its decoder, which has it as ``gb10``."""
    theirs, ours = records()
    with answering(theirs) as (found, address):
        peer = Peer("gb10", ours, 1_700_000_000, address)
        peers_of(state).add(peer)
        Verdicts(path_of(state)).put(peer.fingerprint, verdict())
        yield found, peer


def kinds(found: Answering) -> list[str]:
    return [type(event).__name__ for event in found.events]


def kept(state: Path) -> dict[str, bytes]:
    """Every file that is neither a peer's nor what was found of it."""
    return {
        str(path): path.read_bytes()
        for path in state.rglob("*")
        if path.is_file() and path.parent.name not in ("peers", "qualified")
    }


@pytest.fixture
def caches(state: Path) -> Callable[[], bool]:
    """Whether what the decoder keeps is as it was."""
    place = state / "decoder"
    place.mkdir(parents=True)
    (place / "store.key").write_bytes(b"k" * 32)
    (state / "kv").mkdir()
    (state / "kv" / "block").write_bytes(b"rows" * 100)
    before = kept(state)
    return lambda: kept(state) == before


def test_a_removed_one_is_forgotten_on_both_sides(state: Path, caches: Callable[[], bool]) -> None:
    with served(state) as (found, peer):
        said = done(baton(state, "remove", "gb10", url=None)).stderr
        assert kinds(found) == ["Proven", "UnpairAsked"]
    assert "gb10 is removed" in said
    assert "could not" not in said
    assert peers_of(state).all().peers == ()
    assert Verdicts(path_of(state)).of(peer.fingerprint) is None
    assert caches()


def test_one_that_is_away_is_removed_here_and_what_is_left_to_do_is_said(
    state: Path, caches: Callable[[], bool]
) -> None:
    keep(state, address=Address("127.0.0.1", 9))
    said = " ".join(done(baton(state, "remove", "gb10", url=None)).stderr.split())
    assert "producer_down" in said
    assert "baton produce --forget" in said
    assert peers_of(state).all().peers == ()
    assert caches()


def test_a_new_key_is_kept_in_the_old_ones_place(state: Path, caches: Callable[[], bool]) -> None:
    with served(state) as (found, peer):
        said = done(baton(state, "rotate", "gb10", url=None)).stderr
        (renewed,) = peers_of(state).all().peers
        assert found.pairings[0] == renewed.record.pairing
        assert renewed.record.epoch == peer.record.epoch + 1
        assert renewed.record.key != peer.record.key
        assert f"epoch {renewed.record.epoch}" in said
        assert renewed.record.key.hex() not in said
    assert Verdicts(path_of(state)).of(peer.fingerprint) == verdict()
    assert caches()


def test_a_key_is_not_renewed_with_one_that_is_away(state: Path) -> None:
    peer = keep(state, address=Address("127.0.0.1", 9))
    assert reason(baton(state, "rotate", "gb10", url=None)) == "producer_down"
    assert peers_of(state).all().peers == (peer,)


def test_qualifying_forgets_what_was_found_and_waits_for_the_decoder(
    state: Path, caches: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, verdicts = keep(state), Verdicts(path_of(state))
    verdicts.put(peer.fingerprint, verdict())
    assert "decoder not running" in done(baton(state, "qualify", "gb10")).stderr
    assert verdicts.of(peer.fingerprint) is None
    monkeypatch.setattr(node_decoder.Decoder.wait, "__defaults__", (lambda: True, 1.0))
    with decoder() as url:
        assert reason(baton(state, "qualify", "gb10", url=url)) == "node_not_qualified"
        pauses: list[float] = []

        def found(seconds: float) -> None:
            pauses.append(seconds)
            verdicts.put(peer.fingerprint, verdict())

        monkeypatch.setattr(node_decoder.time, "sleep", found)
        shown = done(baton(state, "qualify", "gb10", url=url)).stdout
        assert pauses == [0.5]
        assert "2023-11-1" in shown
    assert caches()


@pytest.mark.parametrize("command", ["remove", "rotate", "qualify"])
def test_somebody_unknown_is_told_with_those_that_are_known(state: Path, command: str) -> None:
    keep(state, "attic")
    refused = baton(state, command, "cellar", url=None)
    assert reason(refused) == "peer_unknown"
    assert isinstance(refused.exception, BatonError)
    assert refused.exception.expected == "attic"


def test_two_rotations_at_once_leave_both_sides_with_one_key(state: Path) -> None:
    with served(state) as (found, peer):
        words = [Path(sys.executable).with_name("baton"), "node", "rotate", "gb10"]
        words += ["--state-dir", str(state), "--secrets", "file"]
        both = [subprocess.Popen(words, stderr=subprocess.DEVNULL) for _ in range(2)]
        done = [process.wait(60) for process in both]
        assert 0 in done
        (renewed,) = peers_of(state).all().peers
        assert renewed.record.pairing == found.pairings[0]
        assert renewed.record.epoch == peer.record.epoch + done.count(0)


@pytest.mark.parametrize("link", ["down", "refused"])
def test_a_producer_that_cannot_be_asked_keeps_its_verdict(state: Path, link: str) -> None:
    peer, verdicts = keep(state), Verdicts(path_of(state))
    verdicts.put(peer.fingerprint, verdict())
    with decoder(state=link, reason="producer_down") as url:
        assert reason(baton(state, "qualify", "gb10", url=url)) == "producer_down"
    assert verdicts.of(peer.fingerprint) == verdict()


def test_a_comparison_that_takes_longer_is_no_failure(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(state)
    monkeypatch.setattr(node_decoder.Decoder.wait, "__defaults__", (lambda: True, 0.0))
    said = {"state": "qualifying", "reason": "producer_qualifying", "detail": "probe 2 of 3"}
    with decoder(**said) as url:
        shown = done(baton(state, "qualify", "gb10", url=url)).stderr
    assert "still being qualified (probe 2 of 3)" in " ".join(shown.split())
