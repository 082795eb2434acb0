"""Texts of added tokens are found by a short pattern, and each of them is broken up in data."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.text.added_texts import AddedTexts, pattern_of_any

SOME = st.lists(st.text(alphabet="ab<|.", max_size=6), max_size=8)
MARK = "\0"


@settings(max_examples=150)
@given(SOME, st.text(alphabet="ab<|.", max_size=30))
@example([], "a")
@example(["a" * count for count in range(1, 200)], "a" * 77 + "b" + "a" * 300)
def test_a_pattern_finds_the_longest_text(texts: list[str], within: str) -> None:
    plain = "|".join(map(re.escape, sorted(filter(None, texts), key=len, reverse=True)))
    found = [match.span() for match in re.finditer(pattern_of_any(texts), within)]
    assert found == ([match.span() for match in re.finditer(plain, within)] if plain else [])


def test_what_texts_have_in_common_is_in_a_pattern_once() -> None:
    assert pattern_of_any(["<a>", "<ab>", "b", "<a"]) == "<a(?:>|b>)?|b"
    assert len(pattern_of_any([f"<unused{number}>" for number in range(1000)])) < 5000


@settings(max_examples=150)
@given(SOME, st.lists(st.text(alphabet="ab<|.", max_size=12), min_size=1, max_size=3))
def test_no_text_is_left_whole(texts: list[str], values: list[str]) -> None:
    cut = "".join(AddedTexts(texts).cut(values, MARK))
    assert cut.replace(MARK, "") == "".join(values)
    assert not any(text in cut for text in texts if len(text) > 1)


@pytest.mark.parametrize(
    ("value", "cut"),
    [
        (None, None),
        (True, True),
        (3, 3),
        ({"<a>": ("x<a>", 1.5), "name": "<a"}, {"<\0a>": ["x<\0a>", 1.5], "name": "<a\0"}),
    ],
)
def test_values_keep_their_form(value: Any, cut: Any) -> None:
    assert AddedTexts(["<a>", "  ", "x"]).cut(value, MARK) == cut
