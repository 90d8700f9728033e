"""The host pool of the CUDA backend: pinned memory that blocks are swapped to, on the copy stream."""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.compute.cuda.device import Device
from pagedkv.compute.cuda.driver import is_out_of_memory
from pagedkv.compute.cuda.pool import DevicePool
from pagedkv.compute.swap import check_pairs, join_pairs
from pagedkv.errors import DeviceError


class HostPool:
    """Owns pinned memory for `num_blocks` blocks of the pool's layout; for none it owns nothing."""

    def __init__(self, device: Device, pool: DevicePool, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._device, self._pool = device, pool
        self._block_bytes = pool.layout.block_bytes
        self._pointer = self._allocate(num_blocks * self._block_bytes) if num_blocks else 0

    def _allocate(self, asked: int) -> int:
        try:
            return int(self._device.driver.call("cuMemHostAlloc", asked, 0))
        except DeviceError as error:
            if not is_out_of_memory(error):
                raise
            message = f"the host pool of {asked} bytes does not fit in pinned memory; lower --swap-memory"
            raise DeviceError(message, asked=asked) from error

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `KvOps.swap_out`."""
        self._swap("cuMemcpyDtoHAsync", pairs)

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `KvOps.swap_in`."""
        self._swap("cuMemcpyHtoDAsync", pairs)

    def _swap(self, copy: str, pairs: Sequence[tuple[int, int]]) -> None:
        """Enqueue the copies behind all work enqueued before, and ahead of all that comes.

        So a block that is swapped out may be handed out at once: whatever its next owner enqueues waits for the event
        behind the copy. Host blocks are touched by the copy stream only, one copy after another.
        """
        check_pairs(self._pool.layout, self.num_blocks, pairs)
        if not pairs:
            return
        streams, driver = self._device.streams, self._device.driver
        streams.join(streams.copy, streams.compute)
        for device, host, length in join_pairs(pairs):
            here, there = self._pool.block_pointer(device), self._pointer + host * self._block_bytes
            target, source = (here, there) if copy == "cuMemcpyHtoDAsync" else (there, here)
            driver.call(copy, target, source, length * self._block_bytes, streams.copy)
        streams.join(streams.compute, streams.copy)

    def release(self) -> None:
        """Free the memory; no copy may be under way."""
        if self._pointer:
            self._device.driver.call("cuMemFreeHost", self._pointer)
            self._pointer = 0
