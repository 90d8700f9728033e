"""Turn tokens into text as they come, in whole UTF-8 characters, held back where a stop string may begin."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

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

    def _prime(self, prompt_token_ids: Sequence[int]) -> bool:
        """Feed the prompt's last bytes, giving nothing out; return whether it ends inside a character."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = self._token_bytes(token_id) + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        self._decoder.decode(tail)
        return bool(self._decoder.getstate()[0])


class StopChecker:
    """Find the first stop string in a growing text, giving out no character that could still be part of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to give out and whether a stop string was met (it is cut off)."""
        self._held += text
        ends = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            return self._release(min(ends)), True
        return self._release(len(self._held) - self._num_ambiguous()), False

    def flush(self) -> str:
        """Return what is held back; the text ends here without a stop string."""
        return self._release(len(self._held))

    def _release(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _num_ambiguous(self) -> int:
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
