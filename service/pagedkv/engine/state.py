"""A request inside the engine: its tokens, how far they are computed, and what turns them into text."""

from __future__ import annotations

from collections.abc import Callable

from pagedkv.engine.detokenizer import IncrementalDetokenizer, StopChecker
from pagedkv.engine.request import FinishReason, GenerationChunk, GenerationRequest
from pagedkv.engine.sampler import Sampler
from pagedkv.engine.stream import GenerationStream


class RequestState:
    """One generation from queue to end. Survives preemption: tokens, text and random stream go on where they were."""

    def __init__(
        self,
        request_id: str,
        request: GenerationRequest,
        *,
        max_tokens: int,
        stop_token_ids: frozenset[int],
        token_bytes: Callable[[int], bytes],
        special_text: Callable[[int], str],
        stream: GenerationStream,
        now: float,
    ) -> None:
        self.request_id = request_id
        self.salt = request.salt
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.token_ids = list(request.prompt_token_ids)
        self.num_computed = 0  # leading tokens whose K and V are in the pool
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache when the request first joined the batch
        self.num_preemptions = 0
        self.is_swapped = False  # preempted, and its blocks are in the host pool
        self.is_suspect = False  # was in a step that failed: computed alone until it has its next token
        self.finish_reason: FinishReason | None = None
        self.stream = stream
        self.sampler = Sampler(request.sampling)
        self.queued_at = self.last_token_at = now
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids
        self._detokenizer = IncrementalDetokenizer(token_bytes, request.prompt_token_ids)
        self._stop_checker = StopChecker(request.sampling.stop)
        self._special_text = special_text
        self._skip_special = request.sampling.skip_special
        self._unsent_token_ids: list[int] = []
        self._unsent_text = ""

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose K and V are still to be computed; 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    def accept(self, token_id: int) -> None:
        """Append a sampled token and end the request if it is the last; `send` tells its reader."""
        self.token_ids.append(token_id)
        self._unsent_token_ids.append(token_id)
        is_end = token_id in self._stop_token_ids
        text, is_stopped = self._take_text(token_id, is_end)
        self._unsent_text += text
        if is_stopped or is_end:
            self.finish_reason = FinishReason.STOP
        elif self.num_output_tokens >= self._max_tokens:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None and not is_stopped:
            self.release_text()

    def _take_text(self, token_id: int, is_end: bool) -> tuple[str, bool]:
        """Return what a token makes certain of the text, and whether a stop string is complete.

        A stop string may name a control token, whether such are shown or not; a token that ends the text is not shown.
        """
        special = self._special_text(token_id)
        if special and (is_end or self._skip_special):
            return self._stop_checker.push(special, hidden=True)
        if is_end:
            return "", False
        return self._stop_checker.push(
            self._detokenizer.push_text(special) if special else self._detokenizer.push(token_id)
        )

    def release_text(self) -> None:
        """Let the text that was held back lest it begin a stop string be sent: no more will come."""
        self._unsent_text += self._stop_checker.flush()

    def send(self) -> None:
        """Give the reader the text that became certain, and the end if there is one."""
        if not self._unsent_text and self.finish_reason is None:
            return
        text, self._unsent_text = self._unsent_text, ""
        token_ids, self._unsent_token_ids = tuple(self._unsent_token_ids), []
        self.stream.push(
            GenerationChunk(
                text,
                token_ids,
                self.finish_reason,
                num_prompt_tokens=self.num_prompt_tokens,
                num_cached_tokens=self.num_cached_tokens,
                num_output_tokens=self.num_output_tokens,
            )
        )
