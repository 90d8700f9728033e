"""Text comes in whole characters, complete, and never past a stop string."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.engine.detokenizer import IncrementalDetokenizer, StopChecker


def make_detokenizer(prompt: bytes = b"") -> IncrementalDetokenizer:
    """One token a byte."""
    return IncrementalDetokenizer(lambda token_id: bytes([token_id]), list(prompt))


@given(st.text())
def test_detokenizer_one_byte_a_token_joins_to_the_text_without_marks(text):
    """TK-01: no delta of valid text holds a replacement mark that the text does not."""
    detokenizer = make_detokenizer()
    deltas = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in text


@pytest.mark.parametrize(("next_bytes", "expected"), [("語".encode()[2:], "語"), (b" x", " x")])
def test_tk02_prompt_ending_inside_a_character_first_delta_holds_only_new_text(next_bytes, expected):
    detokenizer = make_detokenizer(b"prompt " + "語".encode()[:2])
    assert "".join(map(detokenizer.push, next_bytes)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_tk03_random_bytes_never_raise_and_ascii_after_them_survives(seed):
    detokenizer = make_detokenizer()
    data = random.Random(seed).randbytes(200) + b"\x80\x80plain ascii"
    text = "".join(map(detokenizer.push, data))
    assert text.endswith("plain ascii")
    assert text == data.decode("utf-8", "replace")


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_tk05_a_character_cut_by_the_length_limit_is_dropped(num_bytes):
    detokenizer = make_detokenizer()
    assert "".join(map(detokenizer.push, b"ok" + "🙂".encode()[:num_bytes])) == "ok"


def test_gn01_parts_of_a_stop_string_are_held_until_it_is_decided():
    checker = StopChecker(["DEFGHIJ"])
    assert [checker.push(part) for part in ("ABC", "DEF", "G", "HI", "J")] == [
        ("ABC", False),
        ("", False),
        ("", False),
        ("", False),
        ("", True),
    ]
    checker = StopChecker(["DEFGHIJ"])
    deltas = [checker.push(part)[0] for part in ("ABC", "DEF", "G", "HI", "X")]
    assert deltas == ["ABC", "", "", "", "DEFGHIX"]


def test_gn02_text_before_the_stop_in_the_same_token_is_kept():
    assert StopChecker(["\n"]).push("?\n") == ("?", True)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_checker_any_cut_into_deltas_gives_the_text_before_the_first_stop(text, stops, data):
    checker, given_out, stopped, at = StopChecker(stops), "", False, 0
    while at < len(text) and not stopped:
        length = data.draw(st.integers(1, 5))
        delta, stopped = checker.push(text[at : at + length])
        given_out += delta
        at += length
    given_out += "" if stopped else checker.flush()
    found = [text.find(stop) for stop in stops if stop in text]
    assert stopped == bool(found)
    if not found:
        assert given_out == text
    else:  # a stop that ends later may begin earlier, but nothing behind the first complete one is ever given out
        assert text.startswith(given_out)
        assert not any(stop in given_out for stop in stops)
