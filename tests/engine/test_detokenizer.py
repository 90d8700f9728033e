"""Text comes in whole characters, complete, and never past a stop string."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
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


def first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The rule, one character at a time: the first complete one, and of several the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def run_checker(stops, pieces) -> tuple[str, bool]:
    """Feed (text, hidden) pieces; return what was given out and whether a stop was met."""
    checker, given_out = StopChecker(stops), ""
    for piece, hidden in pieces:
        delta, stopped = checker.push(piece, hidden=hidden)
        given_out += delta
        if stopped:
            return given_out, True
    return given_out + checker.flush(), False


def cut(text: str, lengths: list[int]) -> list[str]:
    """Cut a text into pieces of these lengths, over and over."""
    pieces, at = [], 0
    while at < len(text):
        length = lengths[len(pieces) % len(lengths)]
        pieces.append(text[at : at + length])
        at += length
    return pieces


STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=8)


@given(st.text("abc", max_size=40), STOPS, LENGTHS)
@example("xabcdy", ["abcd", "bc"], [1])
@example("xabcdy", ["abcd", "bc"], [6])
@example("xabcdy", ["abcd", "bc"], [2, 3])
@example("aab", ["aab", "ab", "b"], [3])
@example("aaab", ["aab"], [1, 2])
def test_stop_strings_give_the_same_text_however_the_tokens_fall(text, stops, lengths):
    pieces = [(piece, False) for piece in cut(text, lengths)]
    assert run_checker(stops, pieces) == first_stop(text, stops)


@given(st.lists(st.tuples(st.text("abc", max_size=6), st.booleans()), max_size=8), STOPS, LENGTHS)
def test_tk09_hidden_pieces_give_the_same_text_however_the_shown_ones_are_cut(pieces, stops, lengths):
    whole = [(character, hidden) for text, hidden in pieces for character in text]
    finer = [(part, hidden) for text, hidden in pieces for part in cut(text, lengths)]
    assert run_checker(stops, pieces) == run_checker(stops, whole) == run_checker(stops, finer)


@given(st.lists(st.tuples(st.text("abc", max_size=6), st.booleans()), max_size=8), STOPS)
def test_tk09_no_stop_string_is_given_out_and_nothing_hidden_is(pieces, stops):
    given_out, stopped = run_checker(stops, pieces)
    shown = "".join(text for text, hidden in pieces if not hidden)
    assert shown.startswith(given_out)
    assert not any(stop in given_out for stop in stops)
    assert stopped or given_out == shown


@given(st.text("ab", max_size=12), STOPS)
def test_text_is_held_back_no_longer_than_it_can_begin_a_stop_string(text, stops):
    checker, given_out = StopChecker(stops), ""
    for character in text:
        delta, stopped = checker.push(character)
        given_out += delta
        if stopped:
            return
    held = text[len(given_out) :]
    assert not held or any(stop.startswith(held) for stop in stops)
    assert not any(stop.startswith(text[at:]) for stop in stops for at in range(len(given_out)))
