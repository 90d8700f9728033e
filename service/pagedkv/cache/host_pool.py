"""Host blocks: where swapped sequences lie, and which device blocks hold the same as which host blocks.

A swapped sequence holds nothing on the device. Each entry of its table is a host block with a reference count of its
own, so that forks share in host memory what they shared on the device. A host block may have a twin: a device block
that holds at least the same tokens, because a fork that still runs holds it too, or because it is still cached. Then
another fork that is swapped out takes the host block without a copy, and one that is swapped in takes the device block
without a copy. The twins part when the device block is given up, or written in place.
"""

from __future__ import annotations

from collections.abc import Iterable


class HostPool:
    """Reference counts of the host blocks, and the twins. Callers check that what they ask for is possible."""

    __slots__ = (
        "device_of",
        "free",
        "host_of",
        "num_blocks",
        "num_sequences",
        "num_shared",
        "num_tokens",
        "ref_counts",
    )

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, so that copies coalesce
        self.ref_counts: dict[int, int] = {}  # of the blocks in use
        self.num_shared = 0  # of those, held more than once
        self.num_sequences = 0  # swapped out
        self.num_tokens = 0  # that they hold, shared ones once a sequence
        self.host_of: dict[int, int] = {}  # device block -> its twin
        self.device_of: dict[int, int] = {}  # the same by host block

    def take(self) -> int:
        """Return a free block, held once."""
        host = self.free.pop()
        self.ref_counts[host] = 1
        return host

    def acquire(self, host: int) -> None:
        """Take one more reference to a block in use."""
        count = self.ref_counts[host] + 1
        self.ref_counts[host] = count
        self.num_shared += count == 2

    def release(self, hosts: Iterable[int]) -> None:
        """Drop one reference to each; a block that nobody holds any more is free."""
        for host in hosts:
            count = self.ref_counts[host] - 1
            self.num_shared -= count == 1
            if count:
                self.ref_counts[host] = count
                continue
            del self.ref_counts[host]
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

    def restore(self, ref_counts: dict[int, int], num_sequences: int, num_tokens: int) -> None:
        """Rebuild everything from a recount; all twins part."""
        self.ref_counts, self.num_sequences, self.num_tokens = ref_counts, num_sequences, num_tokens
        self.num_shared = sum(count > 1 for count in ref_counts.values())
        self.free = [host for host in range(self.num_blocks - 1, -1, -1) if host not in ref_counts]
        self.host_of, self.device_of = {}, {}
