"""What a step produced and nobody has heard of yet.

The next step needs the sampled tokens alone: messages and figures wait until the device is at work again.
"""

from __future__ import annotations

from collections import deque

from pagedkv.engine.observer import EngineObserver
from pagedkv.engine.state import RequestState


class Outbox:
    """Accepted tokens on their way to readers and observers, in the order of acceptance."""

    def __init__(self, observer: EngineObserver) -> None:
        self._observer = observer
        self._entries: deque[tuple[RequestState, float]] = deque()

    def add(self, request: RequestState, now: float) -> None:
        """Take in that a request accepted a token at `now`; the one before it has been delivered."""
        self._entries.append((request, now))

    def deliver(self) -> None:
        """Tell readers and observers; does nothing the second time."""
        while self._entries:
            request, now = self._entries.popleft()
            request.send()
            if request.num_output_tokens == 1:
                self._observer.on_first_token(request.request_id, now - request.queued_at)
            else:
                self._observer.on_token(request.request_id, now - request.last_token_at)
            request.last_token_at = now
            self.note_if_finished(request)

    def note_if_finished(self, request: RequestState) -> None:
        """Tell the observer of the request's end, if it has one."""
        if request.finish_reason is not None:
            counts = request.num_prompt_tokens, request.num_output_tokens
            self._observer.on_finished(request.request_id, request.finish_reason, *counts)
