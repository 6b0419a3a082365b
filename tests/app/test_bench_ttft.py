"""What the bench of the time to first token accepts as a measurement."""

from __future__ import annotations

import pytest

from app.ask import Answer
from app.bench_ttft import of_lane
from protocol.errors import TransferError


def test_an_answer_of_another_lane_is_no_measurement() -> None:
    local = Answer(baton={"source": "local"})
    assert of_lane(local, "local") is local
    for answer in (local, Answer()):
        with pytest.raises(TransferError) as caught:
            of_lane(answer, "remote")
        assert caught.value.reason == "lane_differs"
