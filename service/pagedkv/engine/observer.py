"""What the engine tells whoever watches it: metrics and tracing are observers; the default does nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagedkv.engine.request import FinishReason


@dataclass(frozen=True, slots=True)
class StepReport:
    """One pass of the model over the running batch."""

    num_sequences: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_copied_blocks: int
    seconds: float


class EngineObserver(Protocol):
    """Called on the event loop; must return at once and never raise. Seconds are wall-clock durations."""

    def on_queued(self, request_id: str, num_prompt_tokens: int, trace_context: str | None) -> None:
        """Note that a request was accepted and waits."""

    def on_scheduled(self, request_id: str, queue_seconds: float, num_cached_tokens: int) -> None:
        """Note that a request joined the batch, for the first time or after a preemption."""

    def on_first_token(self, request_id: str, seconds: float) -> None:
        """Note the first token of a request, `seconds` after it was queued."""

    def on_token(self, request_id: str, seconds: float) -> None:
        """Note a later token, `seconds` after the one before."""

    def on_preempted(self, request_id: str, mode: str, reason: str, num_tokens_lost: int) -> None:
        """Note that a request lost its blocks; `mode` is "recompute" or "swap", which loses no token."""

    def on_swap(self, direction: str, num_bytes: int, seconds: float, request_id: str) -> None:
        """Note that a request's blocks were copied "out" to host memory or "in" again, and how long that took."""

    def on_finished(
        self, request_id: str, reason: FinishReason, num_prompt_tokens: int, num_output_tokens: int
    ) -> None:
        """Note the end of a request, however it came."""

    def on_step(self, report: StepReport) -> None:
        """Note a finished step."""


class NullObserver:
    """Ignores everything."""

    def on_queued(self, request_id: str, num_prompt_tokens: int, trace_context: str | None) -> None:
        """Ignore."""

    def on_scheduled(self, request_id: str, queue_seconds: float, num_cached_tokens: int) -> None:
        """Ignore."""

    def on_first_token(self, request_id: str, seconds: float) -> None:
        """Ignore."""

    def on_token(self, request_id: str, seconds: float) -> None:
        """Ignore."""

    def on_preempted(self, request_id: str, mode: str, reason: str, num_tokens_lost: int) -> None:
        """Ignore."""

    def on_swap(self, direction: str, num_bytes: int, seconds: float, request_id: str) -> None:
        """Ignore."""

    def on_finished(
        self, request_id: str, reason: FinishReason, num_prompt_tokens: int, num_output_tokens: int
    ) -> None:
        """Ignore."""

    def on_step(self, report: StepReport) -> None:
        """Ignore."""
