"""Answers of calls that carried a request id, so that a retry gets the first answer."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from google.protobuf.message import Message

from pagedkv.errors import InvalidArgument


class RetryMemory:
    """The newest `capacity` answers by request id."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._answers: OrderedDict[str, tuple[bytes, Message]] = OrderedDict()

    def find(self, request_id: str, request: Message) -> Message | None:
        """Return the first answer to this request, None if it is new.

        Raises InvalidArgument if the id came with another content before.
        """
        known = self._answers.get(request_id) if request_id else None
        if known is None:
            return None
        if known[0] != _digest(request):
            raise InvalidArgument("was used for another request", field="request_id", value=request_id)
        return known[1]

    def remember(self, request_id: str, request: Message, answer: Message) -> None:
        """Keep an answer."""
        if not request_id:
            return
        self._answers[request_id] = (_digest(request), answer)
        if len(self._answers) > self._capacity:
            self._answers.popitem(last=False)


def _digest(request: Message) -> bytes:
    """Stand for a request and its type in a few bytes; prompts may be megabytes."""
    content = request.SerializeToString(deterministic=True)
    return hashlib.sha256(request.DESCRIPTOR.full_name.encode() + b"\0" + content).digest()
