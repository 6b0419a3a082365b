"""First run: what is offered and shown in every state, and what a choice leads to."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from app import demo_model, first_run, settings
from app.demo_fetch import Progress
from app.first_run import Checked, Offer, State, begun, shown
from mac_decoder.__main__ import look_ahead
from mac_decoder.config import DecoderConfig
from protocol import halves
from protocol.errors import Cancelled, ConfigError
from tests.tiny_models import REFUSED

DEMO = State(Offer())
OWN = DEMO.chose("own")
MODEL = Checked(Path("/m"), "llama, 4 bit, 1.0 GB")
WRONG = ConfigError("there is no directory /m.", reason="model_missing", hint="look again")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(settings, "default_path", lambda: tmp_path / "conf" / "config.toml")
    return tmp_path


def test_the_size_is_told_before_anything_is_fetched() -> None:
    assert "92.9 MB to fetch, 541.0 MB on disk" in Offer().about
    assert "(43.0 MB of it are here)" in Offer(bytes_here=43_000_000).about
    made = Offer(made=True).about
    assert "already" in made
    assert "fetch" not in made


@pytest.mark.parametrize(
    ("state", "begin", "may"),
    [
        (DEMO, "Fetch and serve", True),
        (State(Offer(bytes_here=1)), "Go on", True),
        (State(Offer(made=True)), "Serve it", True),
        (State(Offer(lacking="No.")), "Fetch and serve", False),
        (OWN, "Serve it", False),
        (OWN.typed("/m"), "Serve it", False),
        (OWN.typed("/m").found("/m", MODEL), "Serve it", True),
        (OWN.typed("/m").found("/m", WRONG), "Serve it", False),
        (DEMO.started(0), "Fetch and serve", False),
        (DEMO.started(0).stopped(), "Fetch and serve", False),
        (DEMO.settled(Path("/m")), "Fetch and serve", False),
    ],
)
def test_one_button_begins_what_is_chosen_once_it_can(state: State, begin: str, may: bool) -> None:
    assert (shown(state).begin, shown(state).may_begin) == (begin, may)


def test_a_directory_is_told_about() -> None:
    assert shown(OWN).says == first_run.EMPTY
    typed = OWN.typed("/m")
    assert shown(typed).says == "Looking at it …"
    assert shown(typed.found("/m", MODEL)).says == "Can be served: llama, 4 bit, 1.0 GB."
    refused = shown(typed.found("/m", WRONG))
    assert refused.error == "There is no directory /m (model_missing)."
    assert (refused.says, refused.hint) == ("", "look again")


def test_an_answer_about_another_directory_is_passed_over() -> None:
    typed = OWN.typed("/m").typed("/n")
    assert typed.found("/m", MODEL) == typed
    assert OWN.typed("").doing == "nothing"
    assert OWN.typed("/m").found("/m", MODEL).typed("/n").checked is None


def test_choosing_the_other_takes_the_error_away_and_keeps_the_directory() -> None:
    failed = OWN.typed("/m").found("/m", WRONG)
    other = failed.chose("demo")
    assert shown(other).error == ""
    assert shown(OWN.typed("/m").found("/m", MODEL).chose("demo").chose("own")).may_begin


def test_progress_of_fetching_is_told_with_its_rate() -> None:
    state = DEMO.started(100.0)
    now = shown(state)
    assert (now.bar_visible, now.bar, now.says) == (True, None, "Looking for it …")
    state = state.progressed(Progress("fetch", 10_000_000, 90_000_000), 101.0)
    assert shown(state).says == "Fetched 10.0 MB of 90.0 MB"
    state = state.progressed(Progress("fetch", 30_000_000, 90_000_000), 105.0)
    now = shown(state)
    # What came before this start is no speed.
    assert now.says == "Fetched 30.0 MB of 90.0 MB, 5.0 MB/s"
    assert now.bar == pytest.approx(1 / 3)
    state = state.progressed(Progress("fetch", 30_000_000, 0), 105.0)
    assert (shown(state).says[:15], shown(state).bar) == ("Fetched 30.0 MB", None)
    checking = state.progressed(Progress("check", 45_000_000, 90_000_000), 110.0)
    assert (shown(checking).says, shown(checking).bar) == ("Checking its digest …", 0.5)
    making = checking.progressed(Progress("make", 0, 0), 111.0)
    assert "half a minute" in shown(making).says
    assert shown(making).bar is None


def test_while_it_is_fetched_nothing_else_can_be_chosen() -> None:
    state = DEMO.started(0)
    now = shown(state)
    assert (now.may_choose, now.may_demo, now.leave) == (False, False, "Stop")
    assert state.chose("own") == state
    assert state.typed("/m") == state


def test_a_cancel_is_nothing_that_went_wrong_and_is_gone_on_from() -> None:
    stopping = DEMO.started(0).stopped()
    assert shown(stopping).says == "Stopping …"
    ended = stopping.failed(Cancelled("x"), Offer(bytes_here=5_000_000))
    now = shown(ended)
    assert (now.error, now.begin, now.bar_visible, now.leave) == ("", "Go on", False, "Not now")
    assert DEMO.stopped() == DEMO


def test_without_internet_it_says_so_and_the_other_choice_works() -> None:
    error = ConfigError("the demo model could not be fetched: x", reason="demo_model_unavailable")
    failed = DEMO.started(0).failed(error, Offer())
    now = shown(failed)
    assert "demo_model_unavailable" in now.error
    assert now.may_begin, "it can be tried again"
    assert shown(failed.typed("/m").found("/m", MODEL)).may_begin


def test_late_progress_changes_nothing_once_it_ended() -> None:
    for ended in (DEMO, DEMO.settled(Path("/m"))):
        assert ended.progressed(Progress("fetch", 1, 2), 1.0) == ended


def test_what_lies_on_this_machine_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first_run.offer(tmp_path) == Offer()
    models = tmp_path / "models"
    models.mkdir()
    (models / f".{demo_model.WHEEL_FILE}.part").write_bytes(b"x" * 77)
    assert first_run.offer(tmp_path) == Offer(bytes_here=77)
    monkeypatch.setattr(halves, "find_spec", lambda name: None if name == "torch" else object())
    lacking = first_run.offer(tmp_path).lacking
    assert lacking.startswith("Making it here needs both halves; torch is not installed.")
    assert "pip install -c constraints.txt '.[both]'" in lacking
    made = models / f"{demo_model.NAME}-fp32"
    made.mkdir()
    (made / "config.json").write_text("{}")
    assert first_run.offer(tmp_path) == Offer(made=True)


def test_a_checkpoint_is_described(checkpoint) -> None:
    path = checkpoint("llama")
    found = first_run.check(f"  {path} ")
    assert found.path == path
    assert found.about.startswith("llama, not quantised, ")


@pytest.mark.parametrize("name", sorted(REFUSED)[:3])
def test_what_serve_would_refuse_is_refused_here_by_the_same_reason(checkpoint, name: str) -> None:
    with pytest.raises(ConfigError) as by_serve:
        look_ahead(DecoderConfig(model=str(checkpoint(name))))
    with pytest.raises(ConfigError) as refused:
        first_run.check(str(checkpoint(name)))
    assert refused.value.details() == by_serve.value.details()


def test_a_directory_without_a_tokenizer_is_refused(checkpoint, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("llama"), copy)
    for file in copy.glob("*token*"):
        file.unlink()
    for name in ("vocab.json", "merges.txt", "vocab.txt"):
        (copy / name).unlink(missing_ok=True)
    with pytest.raises(ConfigError) as refused:
        first_run.check(str(copy))
    assert refused.value.reason == "tokenizer_missing"


def test_what_is_no_directory_of_a_model_is_refused(tmp_path: Path) -> None:
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(b"GGUF")
    for path in ("relative", "/nowhere/at/all", str(gguf), str(tmp_path), "~nobody-of-this-name"):
        with pytest.raises(ConfigError) as refused:
            first_run.check(path)
        assert refused.value.reason == "model_missing"
    with pytest.raises(ConfigError) as refused:
        first_run.check(str(gguf))
    assert "model import" in (refused.value.hint or "")


def test_a_directory_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path / "config.json"))

    # By hand: whoever runs this may be allowed to read everything.
    monkeypatch.setattr(first_run, "read_layout", denied)
    with pytest.raises(ConfigError) as refused:
        first_run.check(str(tmp_path))
    assert refused.value.reason == "model_unreadable"
    assert "Permission denied" in refused.value.message


def test_a_choice_is_what_the_settings_name(home: Path) -> None:
    file = first_run.choose(home / "a model")
    assert file == home / "conf" / "config.toml"
    assert settings.named("serve", "model") == str(home / "a model")


def test_it_opens_with_the_model_that_is_served_now() -> None:
    first, later = begun(Offer()), begun(Offer(), "/m")
    assert (first.choice, first.path, shown(first).leave) == ("demo", "", "Not now")
    assert (later.choice, later.path, shown(later).leave) == ("own", "/m", "Cancel")
    assert shown(later.chose("demo").started(0)).leave == "Stop"
    assert begun(Offer(lacking="No.")).choice == "own"
