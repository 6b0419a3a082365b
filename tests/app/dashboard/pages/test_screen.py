"""What a browser is told: what differs, and nothing else."""

from __future__ import annotations

from app.dashboard.pages.markup import Html
from app.dashboard.pages.screen import Memo, Rows, changes

A, B, C = Html("<li>a</li>"), Html("<li>b</li>"), Html("<li>c</li>")


def test_nothing_is_told_of_what_is_alike() -> None:
    rows = Rows({"a": A}, {"a": "now"})
    assert changes({"x": A, "r": rows}, {"x": Html("<li>a</li>"), "r": rows}) == []
    assert changes({"r": rows}, {"r": Rows({"a": A}, {"a": "now"})}) == []


def test_a_part_that_differs_is_told_whole() -> None:
    assert changes({"x": A, "y": B}, {"x": C, "y": B}) == [("set", "x", C)]


def test_of_rows_only_those_that_differ_are_told_and_their_order() -> None:
    before, after = Rows({"a": A, "b": B}, base="p"), Rows({"c": C, "a": A}, base="p")
    assert changes({"r": before}, {"r": after}) == [("rows", "r", ["c", "a"], {"c": C}, "p")]
    turned = Rows({"b": B, "a": A}, base="p")
    assert changes({"r": before}, {"r": turned}) == [("rows", "r", ["b", "a"], {}, "p")]


def test_an_age_is_told_alone() -> None:
    before, after = (
        Rows({"a": A, "b": B}, {"a": "1", "b": "1"}),
        Rows({"a": A, "b": B}, {"a": "1", "b": "2"}),
    )
    assert changes({"r": before}, {"r": after}) == [("text", "r", {"b": "2"})]


def test_what_is_made_of_the_same_is_made_once() -> None:
    memo, made = Memo(), []
    for inputs in ((1,), (1,), (2,), (2,)):
        memo.of("x", inputs, lambda: made.append(1))
    assert len(made) == 2
