"""`baton plan`: the figures of the design's table, to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from app.commands import app
from app.plan import USUAL_PROMPT, plan_handoff
from protocol.errors import RequestError
from protocol.layout import FullLayer, Layout, RecurrentLayer, SlidingLayer, StateArray
from protocol.layouts_named import muse_glimmer

TABLE = [
    (65_536, 0, 954_190_848, 1.0, 0),
    (32_769, 0, 517_996_544, 1.0, 0),
    (65_536, 32_768, 517_983_232, 0.542851, 81_788_928),
    (2_048, 1_024, 54_472_704, 0.499756, 0),
]

MIXED = Layout(
    (
        FullLayer(0, 2, 16, 16, "float32"),
        SlidingLayer(1, 2, 16, 16, "float32", 8),
        RecurrentLayer(2, (StateArray("conv", (3, 4), "float32"),)),
    )
)


@pytest.mark.parametrize(("prompt", "held", "payload", "share", "resent"), TABLE)
def test_the_designs_table_comes_out(
    prompt: int, held: int, payload: int, share: float, resent: int
) -> None:
    plan = plan_handoff(muse_glimmer(), prompt, held)
    assert plan.payload_bytes == payload
    assert plan.share == pytest.approx(share, abs=5e-7)
    assert plan.resent_window_bytes == resent


@pytest.mark.parametrize(("prompt", "held", "payload", "share", "resent"), TABLE)
def test_the_command_prints_the_same_as_json(
    prompt: int, held: int, payload: int, share: float, resent: int
) -> None:
    arguments = ["plan", "--layout", "muse-glimmer", "--prompt", str(prompt), "--held", str(held)]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert printed["payload_bytes"] == payload
    assert printed["full_bytes"] >= payload
    assert printed["share"] == pytest.approx(share, abs=5e-7)
    assert printed["resent_window_bytes"] == resent
    assert sum(kind["payload_bytes"] for kind in printed["layers"]) == payload
    assert {kind["kind"]: kind["layers"] for kind in printed["layers"]} == {
        "sliding": 39,
        "full": 13,
    }


@given(st.integers(1, 60), st.integers(0, 60))
def test_kinds_add_up_and_the_boundary_token_is_never_shipped(prompt: int, held: int) -> None:
    held = min(held, prompt)
    plan = plan_handoff(MIXED, prompt, held)
    assert plan.payload_bytes == sum(kind.payload_bytes for kind in plan.layers)
    assert plan.full_bytes == sum(kind.full_bytes for kind in plan.layers)
    assert 0 <= plan.payload_bytes <= plan.full_bytes
    if held >= prompt - 1:
        assert plan.payload_bytes == 0


@pytest.mark.parametrize(("held", "resent_rows"), [(0, 0), (10, 8), (11, 0), (12, 0)])
def test_a_window_is_sent_again_only_when_the_suffix_outruns_it(
    held: int, resent_rows: int
) -> None:
    plan = plan_handoff(MIXED, 20, held)
    assert plan.resent_window_bytes == resent_rows * 2 * (16 + 16) * 4


@pytest.mark.parametrize(
    ("prompt", "held", "field"),
    [(0, 0, "prompt"), (-3, 0, "prompt"), (5, 6, "held"), (5, -1, "held")],
)
def test_impossible_plans_are_refused_by_the_option_that_is_wrong(
    prompt: int, held: int, field: str
) -> None:
    with pytest.raises(RequestError) as refused:
        plan_handoff(MIXED, prompt, held)
    assert (refused.value.reason, refused.value.field) == (f"{field}_out_of_range", field)


def test_a_checkpoint_can_be_planned(checkpoint) -> None:
    model: Path = checkpoint("llama")
    result = CliRunner().invoke(app, ["plan", "--model", str(model), "--prompt", "100", "--json"])
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert printed["payload_bytes"] == printed["full_bytes"] > 0
    assert printed["layers"][0]["last"] == 99


def test_a_prompt_beyond_the_context_is_planned_with_a_remark(checkpoint) -> None:
    model = str(checkpoint("llama"))
    context = json.loads((checkpoint("llama") / "config.json").read_text())[
        "max_position_embeddings"
    ]
    for prompt, remarked in ((context - 1, False), (context, True)):
        arguments = ["plan", "--model", model, "--prompt", str(prompt), "--json"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0
        assert json.loads(result.stdout)["prompt"] == prompt
        assert (f"context of {context:,}" in " ".join(result.stderr.split())) == remarked


def test_a_plan_without_a_prompt_is_of_a_usual_one(checkpoint) -> None:
    layout = CliRunner().invoke(app, ["plan", "--layout", "muse-glimmer", "--json"])
    assert json.loads(layout.stdout)["prompt"] == USUAL_PROMPT
    model = CliRunner().invoke(app, ["plan", "--model", str(checkpoint("llama")), "--json"])
    assert json.loads(model.stdout)["prompt"] < USUAL_PROMPT, "its context is shorter"
    assert model.stderr == ""


def test_an_extra_cut_adds_what_its_window_lacks() -> None:
    layout = muse_glimmer()
    plain, extra = (plan_handoff(layout, 65_536, 32_768, cuts) for cuts in ((), (65_531,)))
    assert extra.payload_bytes - plain.payload_bytes == 39 * 4 * 1024
    assert extra.extra_cuts == (65_531,)
    for wrong in (0, 32_768, 65_535, 60_000):
        with pytest.raises(RequestError) as caught:
            plan_handoff(layout, 65_536, 32_768, (wrong,))
        assert caught.value.reason == "extra_cut_out_of_range"
        assert caught.value.expected == "63487 to 65534"
