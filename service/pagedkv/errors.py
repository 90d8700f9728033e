"""Every exception a caller can meet.

PagedKvError
├── InvalidArgument
├── SequenceNotFound
├── SequenceExists
├── SequenceTooLong
├── PositionMismatch
├── SequenceSwapped
├── OutOfBlocks
├── OutOfHostBlocks
├── SwapUnavailable
├── QuotaExceeded
├── Starting
├── Draining
├── Unauthenticated
├── PermissionDenied
├── DeviceError
│   └── DeviceLost
├── NumericalError
├── TransportError
└── UnsupportedModel
    └── InvalidModelFile

Each carries a stable `reason` (the wire's ErrorInfo.reason) and its figures as `details`, a flat mapping of
strings that survives the wire, so that a client raises the same exception that the server raised.
"""

from __future__ import annotations

from typing import ClassVar


class PagedKvError(Exception):
    """Base of all errors of this package."""

    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, str] = {name: str(value) for name, value in details.items() if value is not None}


class InvalidArgument(PagedKvError):
    """A request's field is out of its range; nothing was changed."""

    reason = "INVALID_ARGUMENT"

    def __init__(self, message: str, *, field: str, **details: object) -> None:
        super().__init__(f"{field}: {message}", field=field, **details)
        self.field = field


class SequenceNotFound(PagedKvError):
    """No live sequence has this id."""

    reason = "SEQUENCE_NOT_FOUND"

    def __init__(self, sequence_id: str) -> None:
        super().__init__(f"sequence {sequence_id!r} does not exist", sequence_id=sequence_id)


class SequenceExists(PagedKvError):
    """A live sequence already has this id."""

    reason = "SEQUENCE_EXISTS"

    def __init__(self, sequence_id: str) -> None:
        super().__init__(f"sequence {sequence_id!r} exists already", sequence_id=sequence_id)


class SequenceTooLong(PagedKvError):
    """The tokens asked for pass the longest sequence that the cache or the model allows."""

    reason = "SEQUENCE_TOO_LONG"

    def __init__(self, message: str, *, num_tokens: int, limit: int) -> None:
        super().__init__(f"{message}: {num_tokens} tokens, limit {limit}", num_tokens=num_tokens, limit=limit)
        self.num_tokens = num_tokens
        self.limit = limit


class PositionMismatch(PagedKvError):
    """The position named by the caller is not the one the sequence continues at."""

    reason = "POSITION_MISMATCH"

    def __init__(self, message: str, *, position: int, expected: int) -> None:
        super().__init__(f"{message}: position {position}, expected {expected}", position=position, expected=expected)
        self.position = position
        self.expected = expected


class SequenceSwapped(PagedKvError):
    """The sequence's blocks are in host memory; swap it in first."""

    reason = "SEQUENCE_SWAPPED"

    def __init__(self, sequence_id: str) -> None:
        super().__init__(f"sequence {sequence_id!r} is swapped out", sequence_id=sequence_id)


class OutOfBlocks(PagedKvError):
    """The pool cannot give this many blocks now. `free` includes the evictable ones."""

    reason = "OUT_OF_BLOCKS"

    def __init__(self, *, needed: int, free: int, evictable: int, total: int) -> None:
        super().__init__(
            f"{needed} blocks needed, {free} of {total} free ({evictable} of them cached and evictable)",
            needed=needed,
            free=free,
            evictable=evictable,
            total=total,
        )
        self.needed = needed
        self.free = free
        self.evictable = evictable
        self.total = total


class OutOfHostBlocks(PagedKvError):
    """The host pool cannot take this many blocks now."""

    reason = "OUT_OF_HOST_BLOCKS"

    def __init__(self, *, needed: int, free: int, total: int) -> None:
        super().__init__(f"{needed} host blocks needed, {free} of {total} free", needed=needed, free=free, total=total)
        self.needed = needed
        self.free = free
        self.total = total


class SwapUnavailable(PagedKvError):
    """There is no host pool to swap to."""

    reason = "SWAP_UNAVAILABLE"


class QuotaExceeded(PagedKvError):
    """A tenant's or a queue's limit is reached."""

    reason = "QUOTA_EXCEEDED"


class Starting(PagedKvError):
    """The server is still loading its model; it takes calls soon."""

    reason = "STARTING"


class Draining(PagedKvError):
    """The server is shutting down and takes no new work."""

    reason = "DRAINING"


class Unauthenticated(PagedKvError):
    """The credentials are missing or unknown."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(PagedKvError):
    """The credentials do not allow this call."""

    reason = "PERMISSION_DENIED"


class DeviceError(PagedKvError):
    """A piece of work failed on the device, for want of memory for example; the device goes on."""

    reason = "DEVICE_ERROR"


class DeviceLost(DeviceError):
    """The device or what drives it is spoiled: nothing computed from now on is to be trusted. Final."""

    reason = "DEVICE_LOST"


class NumericalError(PagedKvError):
    """A request's numbers are not finite, though its input was; it alone ends. Trying again computes all anew."""

    reason = "NUMERICAL_ERROR"


class TransportError(PagedKvError):
    """A call failed on its way: no server there, a deadline, a message over the limit. `code` is gRPC's."""

    reason = "TRANSPORT_ERROR"

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(f"{code}: {message}", code=code)
        self.code = code


class UnsupportedModel(PagedKvError):
    """The model's architecture, tensor type or option is not implemented."""

    reason = "UNSUPPORTED_MODEL"


class InvalidModelFile(UnsupportedModel):
    """A model file is truncated, damaged or of another format."""

    reason = "INVALID_MODEL_FILE"
