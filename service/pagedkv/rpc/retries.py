"""Answers of calls that carried a request id, so that a retry gets the first answer.

An answer is remembered while what it made is as it was made: freeing the sequence, or cutting it below what the answer
says, forgets it. Number, bytes and time are bounded, the oldest answers go first.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import Message

from pagedkv.errors import InvalidArgument

MAX_ANSWERS: Final = 4_096
MAX_BYTES: Final = 4 * 2**20
MAX_SECONDS: Final = 600.0
_ENTRY_BYTES: Final = 600  # of the objects themselves


@dataclass(frozen=True, slots=True)
class _Answer:
    digest: bytes
    message: Message
    sequence_id: str
    num_tokens: int
    num_bytes: int
    expires_at: float


class RetryMemory:
    """The newest answers by request id, each about the one sequence that it made."""

    def __init__(
        self,
        max_answers: int = MAX_ANSWERS,
        max_bytes: int = MAX_BYTES,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_answers, self._max_bytes, self._max_seconds = max_answers, max_bytes, max_seconds
        self._clock = clock
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self._by_sequence: dict[str, str] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, request_id: str, request: Message) -> Message | None:
        """Return the first answer to this request, None if it is new or forgotten.

        Raises InvalidArgument if the id came with another content before.
        """
        if not request_id:
            return None
        self._expire()
        known = self._answers.get(request_id)
        if known is None:
            return None
        if known.digest != _digest(request):
            raise InvalidArgument("was used for another request", field="request_id", value=request_id)
        return known.message

    def remember(
        self, request_id: str, request: Message, answer: Message, *, sequence_id: str, num_tokens: int
    ) -> None:
        """Keep the answer to a call that made a sequence of at least `num_tokens`."""
        self.note_freed((sequence_id,))
        if not request_id:
            return
        num_bytes = 4 * (len(request_id) + len(sequence_id)) + _ENTRY_BYTES
        expires_at = self._clock() + self._max_seconds
        self._answers[request_id] = _Answer(_digest(request), answer, sequence_id, num_tokens, num_bytes, expires_at)
        self._by_sequence[sequence_id] = request_id
        self.num_bytes += num_bytes
        self._expire()
        while len(self._answers) > self._max_answers or self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._answers)))

    def note_freed(self, sequence_ids: Iterable[str]) -> None:
        """Forget what made these sequences: they are no more, and their names may be used again."""
        for sequence_id in sequence_ids:
            self.note_truncated(sequence_id, -1)

    def note_truncated(self, sequence_id: str, num_tokens: int) -> None:
        """Forget what made a sequence that now has fewer tokens than the answer says."""
        request_id = self._by_sequence.get(sequence_id)
        if request_id is not None and num_tokens < self._answers[request_id].num_tokens:
            self._forget(request_id)

    def _expire(self) -> None:
        now = self._clock()
        while self._answers and next(iter(self._answers.values())).expires_at <= now:
            self._forget(next(iter(self._answers)))

    def _forget(self, request_id: str) -> None:
        answer = self._answers.pop(request_id)
        del self._by_sequence[answer.sequence_id]
        self.num_bytes -= answer.num_bytes


def _digest(request: Message) -> bytes:
    """Stand for a request and its type in a few bytes; prompts may be megabytes."""
    content = request.SerializeToString(deterministic=True)
    return hashlib.sha256(request.DESCRIPTOR.full_name.encode() + b"\0" + content).digest()
