"""Turn tokens into text as they come, in whole UTF-8 characters, held back where a stop string may begin."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_MAX_CHARACTER_BYTES = 4


class IncrementalDetokenizer:
    """Bytes in, whole characters out.

    A byte that cannot belong to any character becomes one replacement mark; an incomplete character is held until
    its last byte comes, and dropped if it never does. A character that the prompt began is completed, but nothing
    else of the prompt is ever given out.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], prompt_token_ids: Sequence[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unfinished_prompt = self._prime(prompt_token_ids)

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes."""
        data = self._token_bytes(token_id)
        if self._unfinished_prompt and data:
            if not 0x80 <= data[0] < 0xC0:  # not a continuation: the prompt's half character stays the prompt's
                self._decoder.reset()
            self._unfinished_prompt = False
        return self._decoder.decode(data)

    def push_text(self, text: str) -> str:
        """Return the characters that a text of a control token completes."""
        return self._decoder.decode(text.encode())

    def _prime(self, prompt_token_ids: Sequence[int]) -> bool:
        """Feed the prompt's last bytes, giving nothing out; return whether it ends inside a character."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = self._token_bytes(token_id) + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        self._decoder.decode(tail)
        return bool(self._decoder.getstate()[0])


@dataclass(frozen=True, slots=True)
class _View:
    """The held text, or the part of it that is shown, with the place of each character in the held text."""

    text: str
    places: Sequence[int]

    def place(self, at: int) -> int:
        """Return where the character `at` stands in the held text."""
        return self.places[at]


class StopChecker:
    """Find the first stop string in a growing text, giving out no character that could still be part of one.

    The stop string that is complete first ends the text; of several that are complete with one character, the longest.
    What comes before it is given out. So the outcome is that of a text that came one character at a time, however it
    was cut into pieces. Hidden pieces (control tokens that are not shown) are never given out, but take part: a stop
    string is looked for in the text with them and in the text without them.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = sorted(set(stop))
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self._is_shown: list[bool] = []  # of each character held

    def push(self, text: str, *, hidden: bool = False) -> tuple[str, bool]:
        """Return the text that is safe to give out and whether a stop string was met (it is cut off)."""
        if not self._stop:
            return "" if hidden else text, False
        self._held += text
        self._is_shown += [not hidden] * len(text)
        views = self._views()
        found = [match for view in views if (match := self._first_match(view)) is not None]
        if found:
            _, start = min(found)
            return self._release(start), True
        return self._release(min(self._first_ambiguous(view) for view in views)), False

    def flush(self) -> str:
        """Return what is held back; the text ends here without a stop string."""
        return self._release(len(self._held))

    def _views(self) -> list[_View]:
        whole = _View(self._held, range(len(self._held)))
        if all(self._is_shown):
            return [whole]
        places = [at for at, is_shown in enumerate(self._is_shown) if is_shown]
        return [whole, _View("".join(self._held[at] for at in places), places)]

    def _first_match(self, view: _View) -> tuple[int, int] | None:
        """Return the last and the first place of the stop string that is complete first."""
        found = ((at + len(stop) - 1, at) for stop in self._stop if (at := view.text.find(stop)) >= 0)
        match = min(found, default=None)
        return None if match is None else (view.place(match[0]), view.place(match[1]))

    def _first_ambiguous(self, view: _View) -> int:
        """Return the place from where on the text may be the beginning of a stop string."""
        length = len(view.text)
        for start in range(max(0, length - self._longest + 1), length):
            if self._begins_one(view.text[start:]):
                return view.place(start)
        return len(self._held)

    def _begins_one(self, text: str) -> bool:
        at = bisect_left(self._stop, text)  # what begins with a text follows it in order
        return at < len(self._stop) and self._stop[at].startswith(text)

    def _release(self, end: int) -> str:
        pairs = zip(self._held[:end], self._is_shown[:end], strict=True)
        text = self._held[:end] if all(self._is_shown[:end]) else "".join(c for c, is_shown in pairs if is_shown)
        self._held, self._is_shown = self._held[end:], self._is_shown[end:]
        return text
