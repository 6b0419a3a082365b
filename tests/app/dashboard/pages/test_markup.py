"""What is not marked as HTML stays text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.dashboard.pages.markup import Html, escaped, joined, tag


@given(st.text())
def test_text_cannot_become_anything_else(text: str) -> None:
    made = tag("p", text, title=text)
    assert made.count("<") == 2
    assert made.count('"') == 2
    assert "'" not in made


def test_html_is_kept_and_text_is_not() -> None:
    inner = tag("b", "a & b")
    assert tag("p", inner, "<i>") == "<p><b>a &amp; b</b>&lt;i&gt;</p>"
    assert joined(Html("<br>"), "<br>", None) == "<br>&lt;br&gt;"
    assert escaped(Html("<br>")) == "<br>"


def test_attributes() -> None:
    made = tag("input", class_="a", data_path="x.0", disabled=True, hidden=False, value=None, min=0)
    assert made == '<input class="a" data-path="x.0" disabled min="0">'
    assert tag("button", "Go", name="n", value="") == '<button name="n" value="">Go</button>'
