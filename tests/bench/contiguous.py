"""Contiguous reservation, as systems before paging did it: one run of slots a request, taken from a buddy allocator.

The three policies are the vLLM paper's (section 6.1): Max reserves the longest sequence the model allows, Pow2 the
prompt and the output rounded up to a power of two, Oracle exactly the final length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.bench.traces import MAX_SEQUENCE_TOKENS, TraceRequest


def round_up_to_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


POLICIES: dict[str, Callable[[TraceRequest], int]] = {
    "Max": lambda request: max(MAX_SEQUENCE_TOKENS, request.num_tokens),
    "Pow2": lambda request: request.num_prompt_tokens + round_up_to_power_of_two(request.num_output_tokens),
    "Oracle": lambda request: request.num_tokens,
}


class BuddyAllocator:
    """Runs of 2**order slots; a freed run merges with its buddy. The memory may have any size."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def allocate(self, num_slots: int) -> tuple[int, int] | None:
        """Return (start, order) of a run of at least `num_slots`, or None if no run is long enough."""
        order = round_up_to_power_of_two(num_slots).bit_length() - 1
        found = next((at for at in range(order, len(self._free)) if self._free[at]), None)
        if found is None:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        while found > order:
            found -= 1
            self._free[found].add(start + (1 << found))
        return start, order

    def release(self, start: int, order: int) -> None:
        """Give a run back."""
        while order + 1 < len(self._free) and (buddy := start ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            start, order = min(start, buddy), order + 1
        self._free[order].add(start)

    @property
    def num_free(self) -> int:
        """Free slots."""
        return sum(len(starts) << order for order, starts in enumerate(self._free))


@dataclass(slots=True)
class ContiguousMemory:
    """One memory under one reservation policy."""

    allocator: BuddyAllocator
    policy: Callable[[TraceRequest], int]
    runs: dict[int, tuple[int, int]]

    @classmethod
    def of_policy(cls, name: str, num_slots: int) -> ContiguousMemory:
        """Return an empty memory."""
        return cls(BuddyAllocator(num_slots), POLICIES[name], {})

    def admit(self, index: int, request: TraceRequest) -> bool:
        """Reserve the request's whole run; False if there is none."""
        run = self.allocator.allocate(self.policy(request))
        if run is not None:
            self.runs[index] = run
        return run is not None

    def release(self, index: int) -> None:
        """Give the request's run back."""
        self.allocator.release(*self.runs.pop(index))
