"""What the bench of the time to first token accepts as a measurement."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from app import bench_ttft
from app.ask import Answer, Question
from app.bench_ttft import of_lane
from app.commands import app
from protocol.errors import ConfigError, TransferError


@pytest.mark.parametrize(
    ("content", "reason"), [(b" \n", "document_empty"), (b"\xff\xfe\x00", "document_unreadable")]
)
def test_a_document_without_text_is_refused_before_anything_starts(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "document").write_bytes(content)
    arguments = ["bench", "ttft", "--document", str(tmp_path / "document")]
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert refused.value.reason == reason


def test_every_question_is_announced_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(url: str, question: Question, **_: object) -> Answer:
        assert "… round 1, lane local" in capsys.readouterr().err
        return Answer(baton={"source": "local"})

    monkeypatch.setattr(bench_ttft, "ask", answer)
    monkeypatch.setattr(bench_ttft, "served_model", lambda url: "m")
    pair: Any = SimpleNamespace(url="http://127.0.0.1:1")
    assert bench_ttft._ask(pair, "text", "round 1", "local").baton == {"source": "local"}


def test_an_answer_of_another_lane_is_no_measurement() -> None:
    local = Answer(baton={"source": "local"})
    assert of_lane(local, "local") is local
    for answer in (local, Answer()):
        with pytest.raises(TransferError) as caught:
            of_lane(answer, "remote")
        assert caught.value.reason == "lane_differs"
