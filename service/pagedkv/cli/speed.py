"""The speeds of a generation, as everybody defines them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pagedkv.client import Chunk


@dataclass(slots=True)
class Stopwatch:
    """Runs from the request to the last token, and may go on to another request.

    Prefill: prompt tokens that were computed, those found in the cache left out, over the time to the first token.
    Decode: the tokens after the first message, over the time from it to the last one.
    """

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_decoded_tokens: int = 0
    _started: float = field(default_factory=time.perf_counter)
    _first: float | None = None

    def note(self, chunk: Chunk) -> None:
        """Take a message of the stream in."""
        now = time.perf_counter()
        if self._first is None:
            self._first, self.prefill_seconds = now, now - self._started
        else:
            self.decode_seconds = now - self._first
            self.num_decoded_tokens += len(chunk.token_ids)
        self.num_output_tokens += len(chunk.token_ids)
        self.num_prompt_tokens = chunk.num_prompt_tokens
        self.num_cached_tokens = chunk.num_cached_tokens

    def __add__(self, other: Stopwatch) -> Stopwatch:
        """Return both together."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        return Stopwatch(**sums)

    @property
    def prefill_text(self) -> str:
        """Prompt tokens a second."""
        return _rate(self.num_prompt_tokens - self.num_cached_tokens, self.prefill_seconds)

    @property
    def decode_text(self) -> str:
        """Tokens a second after the first."""
        return _rate(self.num_decoded_tokens, self.decode_seconds)


_SUMMED = (
    "prefill_seconds",
    "decode_seconds",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_decoded_tokens",
)


def _rate(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens / seconds:.0f} tokens/s" if num_tokens and seconds else "- tokens/s"
