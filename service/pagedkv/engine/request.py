"""What a generation asks for and what it gets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from pagedkv.config import check_count, require

MAX_STOPS = 64
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKEN_IDS = 1_024
GREEDY_TEMPERATURE = 1e-5  # at or below, sampling is greedy: dividing logits by less overflows float32


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # a stop string, a stop token or the model's own end of text
    LENGTH = "length"  # max_tokens or the model's context limit
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Temperature 0 is greedy; top_k 0 and top_p 1 switch these limits off."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special: bool = True  # control tokens add nothing to the text

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "max_tokens", "must be at least 1", self.max_tokens, 1)
        finite = math.isfinite(self.temperature)
        require(finite and self.temperature >= 0, "temperature", "must be finite and at least 0", self.temperature, 0)
        require(self.top_k >= 0, "top_k", "must be at least 0 (0 means no limit)", self.top_k, 0)
        require(0 < self.top_p <= 1, "top_p", "must be in (0, 1]", self.top_p, "(0, 1]")
        check_count("stop", len(self.stop), MAX_STOPS)
        for at, length in enumerate(map(len, self.stop)):
            what = f"entry {at} must hold 1 to {MAX_STOP_LENGTH} characters"
            require(0 < length <= MAX_STOP_LENGTH, "stop", what, length, MAX_STOP_LENGTH)
        check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        require(self.seed is None or 0 <= self.seed < 2**64, "seed", "must fit 64 bits", self.seed, 2**64 - 1)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt with its sampling parameters.

    `salt` separates prefix caches of tenants; `trace_context` is the caller's W3C traceparent, if one came.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    salt: bytes | None = None
    trace_context: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """New text and the tokens it came from; the last chunk carries the reason and the usage."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
