from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pagedkv.compute.queue import DeviceQueue
from pagedkv.errors import DeviceError


@pytest.fixture
def queue() -> Iterator[DeviceQueue]:
    queue = DeviceQueue("test-queue")
    yield queue
    queue.close()


def test_queue_runs_jobs_in_order_on_one_thread(queue) -> None:
    seen: list[tuple[int, int]] = []
    futures = [queue.submit(lambda index=index: seen.append((index, threading.get_ident()))) for index in range(100)]
    for future in futures:
        future.result()
    assert [index for index, _ in seen] == list(range(100))
    assert len({thread for _, thread in seen}) == 1


def test_queue_exception_goes_to_its_future_and_the_next_job_runs(queue) -> None:
    failed = queue.submit(lambda: 1 / 0)
    assert queue.submit(lambda: 7).result() == 7
    with pytest.raises(ZeroDivisionError):
        failed.result()


def test_queue_job_cancelled_before_start_is_skipped(queue) -> None:
    gate, ran = threading.Event(), []
    queue.submit(gate.wait)
    cancelled = queue.submit(lambda: ran.append(1))
    assert cancelled.cancel()
    gate.set()
    queue.synchronize()
    assert not ran


def test_queue_close_finishes_what_was_submitted_and_refuses_more(queue) -> None:
    gate = threading.Event()
    queue.submit(gate.wait)
    futures = [queue.submit(lambda index=index: index) for index in range(5)]
    gate.set()
    queue.close()
    assert [future.result(timeout=0) for future in futures] == list(range(5))
    with pytest.raises(DeviceError):
        queue.submit(lambda: None)
    queue.close()
