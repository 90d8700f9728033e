"""Control tokens by stand-ins that no text can hold, so that one encoding of a whole text tells quoted from meant.

An encoder is built with every control token renamed to its seal: characters of Unicode's private use area that begin
with a secret of this process. Where a control token is meant its text is replaced by the seal before encoding; any
other occurrence matches nothing and is ordinary text. So whatever in an encoder depends on neighbours (a prepended
space, white space that a token swallows, normalisers, word boundaries) sees the one text that the model sees.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Final

_PRIVATE: Final = 0xE000
_NUM_PRIVATE: Final = 0x1900
_SECRET: Final = "".join(chr(_PRIVATE + secrets.randbelow(_NUM_PRIVATE)) for _ in range(11))  # 138 bits
_WORD: Final = re.compile(r"\w")
_WINDOW: Final = 2**17  # characters searched in one go: a search holds the interpreter


class Seals:
    """The seals of a set of control tokens, given by their texts; those of `single_words` are no part of a word."""

    def __init__(self, texts: Iterable[str], single_words: Iterable[str] = ()) -> None:
        self._seals = {text: _SECRET + _number(at) for at, text in enumerate(dict.fromkeys(filter(None, texts)))}
        self._single_words = frozenset(single_words)
        self._lengths = _lengths_by_start(self._seals)
        self._starts = _pattern_of_starts(self._lengths)

    def __contains__(self, text: str) -> bool:
        return text in self._seals

    def rename(self, text: str) -> str:
        """Return the seal of a control token; any other text is returned as it is."""
        return self._seals.get(text, text)

    def seal(self, text: str, spans: Iterable[tuple[int, int]] | None = None) -> str:
        """Replace every control token that lies in one of the spans [start, end); None: wherever it is.

        Where several match, the leftmost and then the longest. Spans are in order and apart. Takes time in proportion
        to the text, however many control tokens there are, and never holds the interpreter for long.
        """
        parts, at = [], 0
        for start, end in [(0, len(text))] if spans is None else spans:
            for found, found_end in self._matches(text, start, end):
                parts += [text[at:found], self._seals[text[found:found_end]]]
                at = found_end
        return "".join([*parts, text[at:]]) if parts else text

    def _matches(self, text: str, at: int, end: int) -> Iterator[tuple[int, int]]:
        while self._starts is not None and at < end:
            candidate = self._starts.search(text, at, min(end, at + _WINDOW + 1))  # a start may lie across the edge
            if candidate is None:
                at += _WINDOW
                continue
            start = candidate.start()
            found = self._longest_at(text, start, end)
            if found is None:
                at = start + 1
                continue
            at = found
            if text[start:found] not in self._single_words or _stands_alone(text, start, found):
                yield start, found

    def _longest_at(self, text: str, start: int, end: int) -> int | None:
        """Return the end of the longest control token that begins here."""
        for length in self._lengths.get(text[start : start + 2], ()) or self._lengths.get(text[start], ()):
            if start + length <= end and text[start : start + length] in self._seals:
                return start + length
        return None


def _lengths_by_start(texts: Iterable[str]) -> dict[str, list[int]]:
    """Return the lengths of the texts by their first two characters, the longest first; a single one is its own."""
    found: dict[str, set[int]] = {}
    for text in texts:
        found.setdefault(text[:2], set()).add(len(text))
    singles = {start: lengths for start, lengths in found.items() if len(start) == 1}
    for start, lengths in found.items():
        lengths |= singles.get(start[:1], set())
    return {start: sorted(lengths, reverse=True) for start, lengths in found.items()}


def _pattern_of_starts(starts: Iterable[str]) -> re.Pattern[str] | None:
    """Return what finds places where a text may begin, in one step a character."""
    first = "".join(re.escape(character) for character in sorted({start[0] for start in starts}))
    second = "".join(re.escape(character) for character in sorted({start[1:] for start in starts}))
    if not first:
        return None
    has_single = any(len(start) == 1 for start in starts)
    return re.compile(f"[{first}]" if has_single else f"[{first}][{second}]")


def _stands_alone(text: str, start: int, end: int) -> bool:
    neighbours = text[max(0, start - 1) : start] + text[end : end + 1]
    return _WORD.search(neighbours) is None


def _number(at: int) -> str:
    return chr(_PRIVATE + at // _NUM_PRIVATE) + chr(_PRIVATE + at % _NUM_PRIVATE)
