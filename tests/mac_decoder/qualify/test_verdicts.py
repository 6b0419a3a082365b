"""What is on record of a producer, and what becomes of records that cannot be read."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from mac_decoder.qualify.compare import NO_NUMBER
from mac_decoder.qualify.verdicts import MOST_PAST, Past, Verdict, Verdicts
from protocol.errors import ConfigError
from protocol.messages import Recipe

RECIPE = Recipe("producer", "cuda", "bfloat16", 2048)
HERE = "mlx 0.32.4"
ONE, OTHER = b"1" * 32, b"2" * 32


def verdict(*fit: bool) -> Verdict:
    past = tuple(Past(number, good, 0.5, 0.25, "layer 3, keys") for number, good in enumerate(fit))
    return Verdict(1, bytes(32), RECIPE, HERE, 0, past, 2000.0, 1.2e9, 0.4)


def test_a_verdict_is_what_was_found_last(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path)
    assert verdicts.of(ONE) is None
    verdicts.put(ONE, verdict(True, False))
    assert Verdicts(tmp_path).of(ONE) == verdict(True, False)
    assert not verdict(True, False).fit
    assert verdict(False, True).fit
    assert verdict(False, True).at == 1
    assert verdicts.of(OTHER) is None
    verdicts.put(OTHER, verdict(True))
    assert verdicts.forget(OTHER)
    assert verdicts.of(OTHER) is None
    assert verdicts.of(ONE) is not None


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b'{"type":"baton_qualified"}'])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, damage: bytes) -> None:
    """The producer is qualified anew, which costs seconds."""
    verdicts = Verdicts(tmp_path)
    verdicts.put(ONE, verdict(True))
    (file,) = [path for path in (tmp_path / "qualified").iterdir() if path.name == ONE.hex()]
    file.write_bytes(damage)
    assert verdicts.of(ONE) is None
    file.chmod(0o644)
    assert verdicts.of(ONE) is None


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path)
    verdicts.put(ONE, verdict(True))
    (tmp_path / "qualified").chmod(0o755)
    with pytest.raises(ConfigError) as caught:
        verdicts.of(ONE)
    assert caught.value.reason == "directory_exposed"


def test_a_verdict_holds_for_one_model_and_one_way_of_computing() -> None:
    assert verdict(True).holds_for(bytes(32), HERE, RECIPE)
    assert not verdict(True).holds_for(ONE, HERE, RECIPE)
    assert not verdict(True).holds_for(bytes(32), "mlx 0.32.5", RECIPE)
    other = msgspec.structs.replace(RECIPE, tile=512)
    assert not verdict(True).holds_for(bytes(32), HERE, other)


def test_the_past_is_bounded() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(verdict(*[True] * (MOST_PAST + 1))), type=Verdict)


def test_rows_that_are_no_numbers_are_on_record_too(tmp_path: Path) -> None:
    past = Past(1, False, NO_NUMBER, NO_NUMBER, "layer 0, keys")
    found = Verdict(1, bytes(32), RECIPE, HERE, 0, (past,), 2000.0, 1.2e9, 0.4)
    Verdicts(tmp_path).put(ONE, found)
    assert Verdicts(tmp_path).of(ONE) == found
