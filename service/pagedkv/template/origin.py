"""Texts that know, for each character, whether the template wrote it or a message said it.

The rule of control tokens: a control token counts where every one of its characters was written by the template: a
literal of its source, the text of a special token that the model's files name, a number, or the role of a message.
Whatever came from the content of a message, and whatever came out of an operation that is not followed here, is said:
it never makes a control token, not even a part of one. What is not known is taken for said, so a gap in this module
costs a template a token and never gives a message one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, SupportsIndex

SAID: Final = 0  # by a message, or of unknown origin
WRITTEN: Final = 1  # by the template
LAST: Final = 2  # by the last message, which may be continued


class Text(str):
    """A str with an origin for each character. Every operation gives the characters that str gives."""

    __slots__ = ("_origins",)  # templates reach no name that begins so
    _origins: bytes

    def __new__(cls, text: str = "", origins: bytes | None = None) -> Text:
        made = super().__new__(cls, text)
        made._origins = origins_of(text) if origins is None else origins
        return made

    def __str__(self) -> str:
        return self

    def __iter__(self) -> Iterator[str]:
        return (self[at] for at in range(len(self)))

    def __getitem__(self, index: SupportsIndex | slice) -> Text:
        origins = self._origins[index] if isinstance(index, slice) else bytes((self._origins[index],))
        return Text(str.__getitem__(self, index), origins)

    def __add__(self, other: str) -> Text:
        if not isinstance(other, str):
            return NotImplemented
        return Text(str.__add__(self, other), self._origins + origins_of(other))

    def __radd__(self, other: str) -> Text:
        if not isinstance(other, str):
            return NotImplemented
        return Text(str.__add__(other, self), origins_of(other) + self._origins)

    def __mul__(self, count: SupportsIndex) -> Text:
        return Text(str.__mul__(self, count), self._origins * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        """Follow `%s` alone; any other conversion makes the whole of unknown origin."""
        given = list(values) if isinstance(values, tuple) else [values]
        pieces = self.split("%s")
        if any("%" in piece for piece in pieces) or len(pieces) != len(given) + 1:
            return str.__mod__(self, values)
        return concat(part for pair in zip(pieces, [*map(shown, given), ""], strict=True) for part in pair)

    def join(self, parts: Iterable[str]) -> Text:
        parts = list(parts)
        return Text(str.join(self, parts), self._origins.join(map(origins_of, parts)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return str.replace(self, old, new, count)
        return Text(new).join(self.split(old, count))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._locate(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._locate(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        whole = self._locate(str.splitlines(self, True), "")
        return [line[: len(cut)] for line, cut in zip(whole, str.splitlines(self, keepends), strict=True)]

    def partition(self, sep: str) -> tuple[str, str, str]:
        before, found, after = self._locate(list(str.partition(self, sep)), "")
        return before, found, after

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        before, found, after = self._locate(list(str.rpartition(self, sep)), "")
        return before, found, after

    def lstrip(self, chars: str | None = None) -> Text:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> Text:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None) -> Text:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> Text:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str) -> Text:
        return self[: len(str.removesuffix(self, suffix))]

    def upper(self) -> str:
        return self._recased(str.upper(self))

    def lower(self) -> str:
        return self._recased(str.lower(self))

    def title(self) -> str:
        return self._recased(str.title(self))

    def capitalize(self) -> str:
        return self._recased(str.capitalize(self))

    def swapcase(self) -> str:
        return self._recased(str.swapcase(self))

    def _recased(self, text: str) -> str:
        """Characters become one or more: an equal length means one for one."""
        return Text(text, self._origins) if len(text) == len(self) else text

    def _locate(self, pieces: list[str], sep: str | None) -> list[str]:
        """Return the pieces as parts of this text, `sep` between them; None: white space, which begins none."""
        found: list[str] = []
        at = 0
        for piece in pieces:
            if sep is None:
                at = str.index(self, piece, at)
            found.append(self[at : at + len(piece)])
            at += len(piece) + len(sep or "")
        return found


def origins_of(text: str) -> bytes:
    """Return the origin of each character; those of a plain str are not known."""
    return text._origins if isinstance(text, Text) else bytes(len(text))


def written(text: str) -> Text:
    """Return a text of the template."""
    return Text(text, bytes((WRITTEN,)) * len(text))


def said(text: str, *, last: bool) -> Text:
    """Return what a message says."""
    return Text(text, bytes((LAST if last else SAID,)) * len(text))


def shown(value: Any) -> str:
    """Return a value as the template puts it out: its `str`, and numbers are written."""
    if isinstance(value, str):
        return value
    return written(str(value)) if isinstance(value, (bool, int, float)) else str(value)


def concat(parts: Iterable[str]) -> Text:
    """Join texts, each with its origins."""
    return Text().join(parts)


def runs_of(text: Text) -> list[int]:
    """Return the lengths of the runs of one kind, said and written in turn; the first, of said ones, may be 0."""
    runs, at, kind = [], 0, False
    flags = text._origins.translate(_IS_WRITTEN)
    while at < len(flags):
        end = flags.find(not kind, at)
        end = len(flags) if end < 0 else end
        runs.append(end - at)
        at, kind = end, not kind
    return runs


_IS_WRITTEN: Final = bytes(kind == WRITTEN for kind in range(256))
