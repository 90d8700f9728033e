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
        self._seals = {text: _SECRET + _number(at) for at, text in enumerate(dict.fromkeys(texts))}
        self._single_words = frozenset(single_words)
        longest_first = sorted(self._seals, key=len, reverse=True)
        self._longest = len(longest_first[0]) if longest_first else 0
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __contains__(self, text: str) -> bool:
        return text in self._seals

    def rename(self, text: str) -> str:
        """Return the seal of a control token; any other text is returned as it is."""
        return self._seals.get(text, text)

    def seal(self, text: str, spans: Iterable[tuple[int, int]] | None = None) -> str:
        """Replace every control token that lies in one of the spans [start, end); None: wherever it is.

        Where several match, the leftmost and then the longest. Spans are in order and apart.
        """
        parts, at = [], 0
        for start, end in [(0, len(text))] if spans is None else spans:
            for match in self._matches(text, start, end):
                parts += [text[at : match.start()], self._seals[match.group()]]
                at = match.end()
        return "".join([*parts, text[at:]]) if parts else text

    def _matches(self, text: str, at: int, end: int) -> Iterator[re.Match[str]]:
        while self._pattern is not None and at < end:
            stop = at + _WINDOW
            match = self._pattern.search(text, at, min(end, stop + self._longest - 1))
            if match is None or match.start() >= stop:
                at = stop
                continue
            if match.group() not in self._single_words or _stands_alone(text, *match.span()):
                yield match
            at = match.end()


def _stands_alone(text: str, start: int, end: int) -> bool:
    neighbours = text[max(0, start - 1) : start] + text[end : end + 1]
    return _WORD.search(neighbours) is None


def _number(at: int) -> str:
    return chr(_PRIVATE + at // _NUM_PRIVATE) + chr(_PRIVATE + at % _NUM_PRIVATE)
