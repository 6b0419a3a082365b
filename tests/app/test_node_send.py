"""`baton node send`, and the offer in `baton node add`: which model, whether, and how it looks."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs
from platformdirs import user_config_path

from app import node_send
from app.model_stream import Outgoing, name_of, outgoing
from app.node_decoder import Decoder
from app.node_send import find_model
from protocol.control import Event, ModelOffered, ProducerControl
from protocol.control.messages import Description
from protocol.control.models import PIECE_BYTES
from protocol.errors import BatonError, ConfigError, TransferError
from protocol.reasons import refusal
from tests.app.test_node_command import NOBODY, baton, done, peers_of, reason
from tests.app.test_status import answering as decoder_answering
from tests.trust.answering import Answering, answering, records
from trust.peers import Peer

READY = Description("gb10", "0.1.0", "ready", "m", None, None)
WAITING = structs.replace(READY, state="waiting", model="")


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def ours(model: Path) -> Outgoing:
    return outgoing(model, None)


@pytest.fixture
def serves(ours: Outgoing) -> Description:
    """What a producer says that serves the decoder's model."""
    return structs.replace(READY, identity=ours.identity)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "mac"


@pytest.fixture
def gb10(state: Path) -> Iterator[Answering]:
    """A producer that is paired as ``gb10``."""
    theirs, mine = records()
    with answering(theirs) as (found, address):
        peers_of(state).add(Peer("gb10", mine, 1_700_000_000, address))
        yield found


def offer(state: Path, model: Path | None, send: bool | None, url: str = NOBODY) -> str | None:
    """What becomes of a model that is offered."""
    registry = node_send.Registry(state, "file")
    (peer,) = registry.peers.all().peers
    found = node_send.describe(peer)
    sent = node_send.offer(registry, peer, found, Decoder(url), model, send)
    return None if sent is None else sent.serving


def stream(ours: Outgoing) -> bytes:
    return b"".join(ours.pieces(0))


# Sending


def test_a_model_is_sent_as_it_is(
    state: Path, gb10: Answering, model: Path, ours: Outgoing, serves: Description
) -> None:
    gb10.descriptions = [serves]
    told = done(baton(state, "send", "gb10", "--model", str(model), "--json"))
    (asked,) = [event for event in gb10.events if isinstance(event, ModelOffered)]
    assert asked.offer.name == model.name
    assert structs.replace(asked.offer, mac=ours.offer.mac) == ours.offer
    assert bytes(gb10.received) == stream(ours)
    found = json.loads(told.stdout)
    total = ours.manifest.nbytes
    assert found.pop("seconds") > 0
    assert found == {
        "producer": "gb10",
        "model": "kept-model",
        "serving": "now",
        "bytes": total,
        "sent": total,
    }
    assert "gb10 has kept-model" in told.stderr


@pytest.mark.parametrize("place", [0.2, 0.9999, 1.0])
def test_only_what_is_lacking_is_sent(
    state: Path,
    gb10: Answering,
    model: Path,
    ours: Outgoing,
    serves: Description,
    place: float,
) -> None:
    gb10.have = int(ours.manifest.nbytes * place)
    gb10.descriptions = [serves]
    told = done(baton(state, "send", "gb10", "--model", str(model), "--json"))
    assert bytes(gb10.received) == stream(ours)[gb10.have :]
    assert json.loads(told.stdout)["sent"] == ours.manifest.nbytes - gb10.have


def test_a_model_that_is_only_kept_says_what_to_type(
    state: Path, gb10: Answering, model: Path
) -> None:
    gb10.serving = "kept"
    told = done(baton(state, "send", "gb10", "--model", str(model))).stderr
    assert "baton produce, without --model" in " ".join(told.split())


def test_it_is_waited_for_until_it_is_served(
    state: Path,
    gb10: Answering,
    model: Path,
    serves: Description,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_send, "_LOOK_S", 0.01)
    other = structs.replace(serves, identity=structs.replace(serves.identity, weights="f" * 64))
    loading = structs.replace(READY, state="loading")
    gb10.serving = "restarting"
    gb10.descriptions = [other, loading, loading, serves, WAITING]
    done(baton(state, "send", "gb10", "--model", str(model)))
    assert gb10.descriptions == [WAITING], "all before were heard"


def test_a_model_that_could_not_be_loaded_is_told(
    state: Path, gb10: Answering, model: Path
) -> None:
    gb10.descriptions = [WAITING]
    assert reason(baton(state, "send", "gb10", "--model", str(model))) == "model_not_served"


def test_a_refusal_in_the_middle_says_that_it_goes_on(
    state: Path, gb10: Answering, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(machine: ProducerControl) -> None:
        if len(gb10.received) > 1000:
            raise refusal("disk_full", "x")

    monkeypatch.setattr(gb10, "_look", full)
    result = baton(state, "send", "gb10", "--model", str(model))
    assert reason(result) in ("disk_full", "connection_lost")
    said = " ".join(result.stderr.split())
    assert "of 1.5 MB sent; `baton node send 'gb10'` goes on from there" in said


def test_a_refusal_before_the_first_byte_does_not(
    state: Path, gb10: Answering, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    def busy(machine: ProducerControl, event: Event) -> None:
        nonlocal asked
        if isinstance(event, ModelOffered):
            asked += 1
            raise refusal("model_transfer_busy", "x")

    gb10.answer = busy
    monkeypatch.setattr(node_send, "BUSY_S", 1.0)
    result = baton(state, "send", "gb10", "--model", str(model))
    assert reason(result) == "model_transfer_busy"
    assert "goes on" not in result.stderr
    assert result.stderr.count("is receiving a model already") == 1
    assert asked > 1


def test_nobody_is_sent_anything_without_a_pairing(state: Path, model: Path) -> None:
    assert reason(baton(state, "send", "gb10", "--model", str(model))) == "peer_unknown"


def test_what_is_no_checkpoint_is_not_sent(state: Path, gb10: Answering, tmp_path: Path) -> None:
    assert reason(baton(state, "send", "gb10", "--model", str(tmp_path))) == "model_missing"
    assert gb10.events == []


# Which model


@pytest.fixture
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine's file of settings, which is not there."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("HOME", str(tmp_path))
    path = user_config_path("baton", appauthor=False)
    path.mkdir(parents=True)
    return path / "config.toml"


def test_the_model_is_what_was_named_or_served_or_set(
    no_settings: Path, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        find_model(None, Decoder(NOBODY))
    assert caught.value.reason == "model_not_known"
    assert "--model DIR" in str(caught.value.hint)
    no_settings.write_text(f'[serve]\nmodel = "{model}"\nport = 7\n')
    assert find_model(None, Decoder(NOBODY)) == model
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    with decoder_answering(200, {"model": "m", "model_path": str(copy)}) as url:
        assert find_model(None, Decoder(url)) == copy
        assert find_model(tmp_path, Decoder(url)) == tmp_path


@pytest.mark.parametrize("reason", ["invalid_api_key", "decoder_stopping", "engine_fault"])
def test_a_decoder_that_runs_and_does_not_say_is_not_guessed_at(
    no_settings: Path, model: Path, reason: str
) -> None:
    """The settings may name another model than the one that it serves."""
    no_settings.write_text(f'[serve]\nmodel = "{model}"\n')
    refusal = {"error": {"code": reason, "message": "x"}}
    with decoder_answering(401, refusal) as url:
        with pytest.raises(TransferError) as caught:
            find_model(None, Decoder(url))
        assert caught.value.reason == reason
    refusal = {"error": {"code": "decoder_starting", "message": "x"}}
    with decoder_answering(503, refusal) as url:
        assert find_model(None, Decoder(url)) == model


@pytest.mark.parametrize("status", [{}, {"model_path": None}, {"model_path": 7}])
def test_a_decoder_that_does_not_say_is_none(no_settings: Path, status: dict[str, object]) -> None:
    with decoder_answering(200, {"model": "m", **status}) as url, pytest.raises(ConfigError):
        find_model(None, Decoder(url))


def test_a_directory_of_another_machine_is_not_taken_for_one_here(no_settings: Path) -> None:
    with decoder_answering(200, {"model_path": "/nowhere/at/all"}) as url:
        with pytest.raises(ConfigError) as caught:
            find_model(None, Decoder(url))
        assert caught.value.reason == "model_not_known"


# The offer


def test_who_has_the_model_is_offered_nothing(
    state: Path, gb10: Answering, model: Path, serves: Description
) -> None:
    gb10.descriptions = [serves]
    assert offer(state, model, True) is None
    assert not [event for event in gb10.events if isinstance(event, ModelOffered)]


def test_with_send_it_is_sent_with_no_send_it_is_not_even_looked_at(
    state: Path, gb10: Answering, model: Path, serves: Description, tmp_path: Path
) -> None:
    gb10.descriptions = [WAITING, serves]
    assert offer(state, tmp_path, False) is None
    gb10.descriptions = [WAITING, serves]
    assert offer(state, model, True) == "now"


@pytest.mark.parametrize("answer", [True, False])
def test_whoever_sits_at_a_terminal_is_asked(
    state: Path,
    gb10: Answering,
    model: Path,
    serves: Description,
    monkeypatch: pytest.MonkeyPatch,
    answer: bool,
) -> None:
    asked: list[str] = []

    def confirm(text: str, default: bool, err: bool) -> bool:
        assert default
        assert err
        asked.append(text)
        return answer

    monkeypatch.setattr(node_send, "_at_a_terminal", lambda: True)
    monkeypatch.setattr("typer.confirm", confirm)
    gb10.descriptions = [WAITING, serves]
    assert offer(state, model, None) == ("now" if answer else None)
    assert asked == [f"gb10 does not have {model.name} (1.5 MB). Send it?"]


def test_without_a_terminal_nothing_is_sent(
    state: Path, gb10: Answering, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gb10.descriptions = [WAITING]
    assert offer(state, model, None) is None
    assert "baton node send 'gb10' sends it" in " ".join(capsys.readouterr().err.split())


def test_where_no_model_is_known_there_is_a_hint_and_with_send_a_refusal(
    no_settings: Path, state: Path, gb10: Answering, capsys: pytest.CaptureFixture[str]
) -> None:
    gb10.descriptions = [WAITING]
    assert offer(state, None, None) is None
    assert "--model DIR" in capsys.readouterr().err
    with pytest.raises(ConfigError) as caught:
        offer(state, None, True)
    assert caught.value.reason == "model_not_known"


def test_a_producer_that_loads_is_waited_for(
    state: Path,
    gb10: Answering,
    model: Path,
    serves: Description,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_send, "_LOOK_S", 0.01)
    loading = structs.replace(READY, state="loading")
    gb10.descriptions = [loading, loading, serves]
    assert offer(state, model, True) is None


# A checkpoint as a stream


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen3-4B-4bit", "Qwen3-4B-4bit"),
        ("my model (2)", "my-model-2"),
        (".hidden", "hidden"),
        ("模型", "model"),
        ("x" * 100, "x" * 64),
        ("models--mlx-community--Qwen3-4B-4bit/snapshots/0123abcd", "Qwen3-4B-4bit"),
    ],
)
def test_a_model_is_called_as_its_directory(tmp_path: Path, path: str, name: str) -> None:
    (tmp_path / path).mkdir(parents=True)
    assert name_of(tmp_path / path) == name


def test_a_stream_goes_on_anywhere_in_pieces_that_fit(ours: Outgoing) -> None:
    whole = stream(ours)
    assert len(whole) == ours.manifest.nbytes
    begin = len(ours.manifest.raw)
    for offset in (0, 1, begin - 1, begin, begin + 1, len(whole) - 1, len(whole)):
        pieces = list(ours.pieces(offset))
        assert b"".join(pieces) == whole[offset:]
        assert all(0 < len(piece) <= PIECE_BYTES for piece in pieces)


def test_files_are_hashed_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "digests.json"
    first = outgoing(model, cache)
    monkeypatch.setattr("protocol.checkpoint._sha256", None)
    assert outgoing(model, cache) == first


def test_files_that_change_or_cannot_be_listed_are_told(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    found = outgoing(copy, None)
    os.truncate(copy / "tokenizer.json", 100)
    with pytest.raises(ConfigError) as caught:
        list(found.pieces(0))
    assert caught.value.reason == "model_changed"
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ConfigError) as caught:
        list(found.pieces(0))
    assert caught.value.reason == "model_unreadable"
    odd = Path(shutil.copytree(model, tmp_path / "odd"))
    (odd / "model.safetensors").rename(odd / "model 1.safetensors")
    with pytest.raises(BatonError) as refused:
        outgoing(odd, None)
    assert refused.value.reason == "model_not_sendable"
