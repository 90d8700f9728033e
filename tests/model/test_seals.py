"""Control tokens are found leftmost and longest, where they may be, in time that does not depend on their number."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.model import seals as module
from pagedkv.model.seals import Seals

TOKENS = st.sets(st.text("<|ab>", min_size=1, max_size=4), max_size=6)


def expected(tokens: set[str], text: str, spans) -> list[str]:
    """The text cut at control tokens by a regular expression, span by span."""
    longest_first = sorted(tokens, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first))) if tokens else None
    out, at = [], 0
    for start, end in spans:
        for match in pattern.finditer(text, start, end) if pattern else ():
            out += [text[at : match.start()], f"[{match.group()}]"]
            at = match.end()
    return [*out, text[at:]]


def unseal(seals: Seals, tokens: set[str], text: str) -> str:
    for token in tokens:
        text = text.replace(seals.rename(token), f"[{token}]")
    return text


@given(
    TOKENS, st.text("<|ab> ", max_size=24), st.lists(st.integers(0, 24), max_size=4), st.sampled_from([1, 2, 3, 2**17])
)
def test_control_tokens_are_found_leftmost_and_longest_in_their_spans_whatever_the_window(tokens, text, cuts, window):
    edges = sorted({min(cut, len(text)) for cut in cuts})
    spans = list(pairwise(edges))[::2] if edges else [(0, len(text))]
    seals = Seals(tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_WINDOW", window)
        sealed = seals.seal(text, spans)
    assert unseal(seals, tokens, sealed) == "".join(expected(tokens, text, spans))


def test_no_text_is_taken_for_a_seal():
    seals = Seals(["<s>", "</s>"])
    assert seals.rename("<s>") != seals.rename("</s>")
    assert seals.seal("a\ue000\uf8ff") == "a\ue000\uf8ff"
    assert seals.rename("<x>") == "<x>"


def test_rl02_thousands_of_control_tokens_are_looked_for_in_one_pass():
    """Each place is compared with as many lengths as there are, not with as many tokens."""
    seals = Seals(f"<unused{number}>" for number in range(60_000))
    text = "<unused1><unused" * 2_000 + "<" * 200_000
    assert seals.seal(text).count(seals.rename("<unused1>")) == 2_000
