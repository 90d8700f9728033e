"""What the backends share of swapping: pairs of device and host blocks, checked and joined, run as one job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from pagedkv.compute.backend import Backend
from pagedkv.compute.layout import KvLayout
from pagedkv.config import require


class BlockRun(NamedTuple):
    """`length` neighbouring device blocks that go to, or come from, as many neighbouring host blocks."""

    device: int
    host: int
    length: int


def join_pairs(pairs: Sequence[tuple[int, int]]) -> list[BlockRun]:
    """Return the (device block, host block) pairs as few runs, in the order of the device blocks."""
    runs: list[BlockRun] = []
    for device, host in sorted(pairs):
        last = runs[-1] if runs else None
        if last and (device, host) == (last.device + last.length, last.host + last.length):
            runs[-1] = last._replace(length=last.length + 1)
        else:
            runs.append(BlockRun(device, host, 1))
    return runs


def check_pairs(layout: KvLayout, num_host_blocks: int, pairs: Sequence[tuple[int, int]]) -> None:
    """Refuse ids outside either pool and a block that is named twice."""
    for side, what, limit in ((0, "device", layout.num_blocks), (1, "host", num_host_blocks)):
        blocks = [pair[side] for pair in pairs]
        for at, block in enumerate(blocks):
            require(0 <= block < limit, f"pairs[{at}]", f"must name a {what} block in [0, {limit})", block, limit - 1)
        require(len(set(blocks)) == len(blocks), "pairs", f"must name each {what} block once", blocks)


def submit_swap(backend: Backend, direction: str, pairs: Sequence[tuple[int, int]]) -> Future[float]:
    """Queue the copies "out" or "in" as one job; the future's result is the seconds from its start to its end."""
    done: Future[float] = Future()
    done.set_running_or_notify_cancel()  # who waits may go, the copies are run all the same
    started = 0.0

    def job() -> None:
        nonlocal started
        started = time.perf_counter()
        (backend.swap_out if direction == "out" else backend.swap_in)(pairs)

    def finish(job_done: Future[None]) -> None:
        error = job_done.exception()
        if error is None:
            done.set_result(time.perf_counter() - started)
        else:
            done.set_exception(error)

    backend.submit(job).add_done_callback(finish)
    return done
