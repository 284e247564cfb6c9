"""Stop texts, against reading letter by letter."""

from __future__ import annotations

import random

import pytest
from letters import letter_by_letter

from prefold.text.detokenize import StopFinder


def run(parts: list[str], stops: list[str]) -> tuple[str, str | None, list[str]]:
    finder, given = StopFinder(stops), []
    for part in parts:
        given.append(finder.add(part))
        if finder.stop is not None:
            assert finder.start == len("".join(given))
            return "".join(given), finder.stop, given
    given.append(finder.finish())
    return "".join(given), None, given


def split(rng: random.Random, text: str) -> list[str]:
    parts = []
    while text:
        size = rng.randrange(5)
        parts.append(text[:size])
        text = text[size:]
    return parts


@pytest.mark.parametrize("seed", range(3))
def test_any_split_equals_reading_letter_by_letter(seed):
    rng = random.Random(seed)
    found = 0
    for _ in range(2000):
        stops = ["".join(rng.choice("abc") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(4))]
        text = "".join(rng.choice("abcd") for _ in range(rng.randrange(20)))
        expected = letter_by_letter(text, stops)
        assert run(split(rng, text), stops)[:2] == expected
        found += expected[1] is not None
    assert 500 < found < 1900


def test_no_more_is_held_back_than_may_begin_a_stop():
    assert run(list("xSTSTO, y"), ["STOP", "\n\n"])[2] == ["x", "", "", "ST", "", "", "STO,", " ", "y", ""]
    assert run(["a\n", "b\n", "\n", "c"], ["\n\n"])[2] == ["a", "\nb", ""]


def test_without_stops_text_passes():
    assert run(["a", "bc", ""], [])[2] == ["a", "bc", "", ""]


def test_what_is_not_searched_is_no_stop_but_may_begin_one():
    finder = StopFinder(["ab", "b"])
    assert finder.add("xab", search=False) == "xa" + "b"
    assert finder.add("a", search=False) == ""
    assert finder.add("b") == ""
    assert (finder.stop, finder.start) == ("ab", 3)


def test_likely_text_is_searched_before_it_is_certain():
    finder = StopFinder(["\n"])
    assert finder.add("a", "é") == "a"
    assert finder.add("", "é\nb") == "é"
    assert (finder.stop, finder.start) == ("\n", 2)
    finder = StopFinder(["\n"])
    assert finder.add("a", "\n", search=False) == "a"
    assert finder.add("\nb") == "\nb"
    assert finder.stop is None
