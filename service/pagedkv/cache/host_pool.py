"""Host blocks: where swapped sequences lie, and which device blocks hold the same as which host blocks.

A swapped sequence holds nothing on the device. Each entry of its table is a host block with a reference count of its
own, so that forks share in host memory what they shared on the device. A host block may have a twin: a device block
that holds at least the same tokens, because a fork that still runs holds it too, or because it is still cached. Then
another fork that is swapped out takes the host block without a copy, and one that is swapped in takes the device block
without a copy. The twins part when the device block is given up, or written in place.
"""

from __future__ import annotations

from copy import copy


class HostPool:
    """The host blocks, who holds them, and the twins. Callers check that what they ask for is possible."""

    __slots__ = (
        "device_of",
        "free",
        "holders",
        "host_of",
        "num_blocks",
        "num_sequences",
        "num_shared",
        "num_tokens",
    )

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, so that copies coalesce
        self.holders: dict[int, dict[str, int]] = {}  # block -> the tokens that each sequence sees in it
        self.num_shared = 0  # blocks held more than once
        self.num_sequences = 0  # swapped out
        self.num_tokens = 0  # that they hold, shared ones once
        self.host_of: dict[int, int] = {}  # device block -> its twin
        self.device_of: dict[int, int] = {}  # the same by host block

    def enter(self, host: int, sequence_id: str, view: int) -> None:
        """Note that a sequence holds the block and sees `view` tokens of it; one just taken off `free`, or one held."""
        views = self.holders.setdefault(host, {})
        self.num_tokens += max(0, view - max(views.values(), default=0))
        views[sequence_id] = view
        self.num_shared += len(views) == 2

    def leave(self, host: int, sequence_id: str) -> None:
        """Drop a sequence's hold; a block that nobody holds any more is free."""
        views = self.holders[host]
        view = views.pop(sequence_id)
        self.num_tokens -= max(0, view - max(views.values(), default=0))
        self.num_shared -= len(views) == 1
        if not views:
            del self.holders[host]
            self.free.append(host)
            if host in self.device_of:
                del self.host_of[self.device_of.pop(host)]

    def pair(self, device: int, host: int) -> None:
        """Make two blocks twins, in place of what either was paired with."""
        self.part(device)
        if host in self.device_of:
            del self.host_of[self.device_of[host]]
        self.host_of[device] = host
        self.device_of[host] = device

    def part(self, device: int) -> None:
        """Note that a device block no longer holds what its twin holds; does nothing for one without a twin."""
        host = self.host_of.pop(device, None)
        if host is not None:
            del self.device_of[host]

    def copy(self) -> HostPool:
        """Return a pool of the same state."""
        twin = copy(self)
        twin.free, twin.host_of, twin.device_of = self.free[:], self.host_of.copy(), self.device_of.copy()
        twin.holders = {host: views.copy() for host, views in self.holders.items()}
        return twin

    def restore(self, holders: dict[int, dict[str, int]], num_sequences: int) -> None:
        """Rebuild everything from these holders; all twins part."""
        self.holders, self.num_sequences = holders, num_sequences
        self.num_shared = sum(len(views) > 1 for views in holders.values())
        self.num_tokens = sum(max(views.values()) for views in holders.values())
        self.free = [host for host in range(self.num_blocks - 1, -1, -1) if host not in holders]
        self.host_of, self.device_of = {}, {}
