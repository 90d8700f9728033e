"""Failures have one owner: what belongs to a job ends the job; what is final is told once and answers the rest."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import threading

import numpy as np
import pytest

from helpers.waiting import PATIENCE, until
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.health import DeviceHealth
from pagedkv.compute.layout import KvLayout
from pagedkv.compute.queue import DeviceQueue
from pagedkv.config import KvShape
from pagedkv.errors import DeviceError, DeviceLost


@pytest.fixture
def queue():
    queue = DeviceQueue("test-queue", DeviceHealth())
    yield queue
    queue.close()


def raising(error):
    def job():
        raise error

    return job


def test_the_first_final_failure_stays_and_is_told_once():
    health, heard = DeviceHealth(), []
    health.watch(heard.append)
    first = DeviceLost("first")
    health.fail(first)
    health.fail(DeviceLost("second"))
    health.watch(heard.append)
    assert heard == [first, first]
    with pytest.raises(DeviceLost, match="first"):
        health.check()


async def test_who_watches_on_a_loop_hears_there():
    health, heard = DeviceHealth(), asyncio.get_running_loop().create_future()
    health.watch_on(asyncio.get_running_loop(), lambda failure: heard.set_result(threading.get_ident()))
    await asyncio.to_thread(health.fail, DeviceLost("gone"))
    assert await asyncio.wait_for(heard, PATIENCE) == threading.get_ident()


@pytest.mark.parametrize(
    "error",
    [
        asyncio.CancelledError(),
        concurrent.futures.CancelledError(),
        StopIteration(),
        SystemExit(1),
        KeyboardInterrupt(),
        GeneratorExit(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_rl06_whatever_a_job_raises_is_an_error_of_that_job(queue, error):
    with pytest.raises(DeviceError, match=type(error).__name__):
        await asyncio.wait_for(asyncio.wrap_future(queue.submit(raising(error))), PATIENCE)
    assert await asyncio.wrap_future(queue.submit(lambda: 7)) == 7


def test_cu03_only_a_lost_device_is_final(queue):
    with pytest.raises(DeviceError):
        queue.submit(raising(DeviceError("out of memory"))).result(PATIENCE)
    assert queue.submit(lambda: 7).result(PATIENCE) == 7
    gate = threading.Event()
    queue.submit(gate.wait)
    lost, behind = queue.submit(raising(DeviceLost("illegal address"))), queue.submit(lambda: 7)
    gate.set()
    for future in (lost, behind):
        with pytest.raises(DeviceLost, match="illegal address"):
            future.result(PATIENCE)
    with pytest.raises(DeviceLost, match="illegal address"):
        queue.submit(lambda: 7)


def test_rl06_jobs_that_fail_one_after_another_for_no_known_reason_are_final(queue):
    for _ in range(7):
        with pytest.raises(ZeroDivisionError):
            queue.submit(lambda: 1 / 0).result(PATIENCE)
    assert queue.submit(lambda: 7).result(PATIENCE) == 7
    for _ in range(8):
        with pytest.raises(ZeroDivisionError):
            queue.submit(lambda: 1 / 0).result(PATIENCE)
    with pytest.raises(DeviceLost, match="8 jobs in a row") as caught:
        queue.submit(lambda: 7)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


async def test_rl06_the_end_of_the_devices_thread_is_noticed_at_once_and_answers_what_waits():
    health = DeviceHealth()
    queue, gate = DeviceQueue("test-queue", health), threading.Event()
    queue.submit(gate.wait)
    queue._entries.put(None)  # not by close
    waiting = queue.submit(lambda: 7)
    gate.set()
    with pytest.raises(DeviceLost, match="thread has ended"):
        await asyncio.wait_for(asyncio.wrap_future(waiting), PATIENCE)
    await until(lambda: health.failure is not None, "the failure")
    with pytest.raises(DeviceLost):
        queue.submit(lambda: 7)
    queue.close()


def make_backend():
    return CpuBackend(KvLayout(KvShape(1, 2, 1, 64), num_blocks=4, block_size=16), num_threads=2)


def use_in_child(backend, told):
    """Submit, and call an operation directly; both must be refused, and the end must not hang."""
    rows, slots = np.ones((1, 1, 64), np.float32), np.zeros(1, np.int64)
    for use in (lambda: backend.submit(lambda: 7), lambda: backend.write_kv(0, rows, rows, slots)):
        try:
            use()
        except DeviceLost as error:
            told.put(str(error))
    backend.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_rt07_a_forked_child_is_refused_at_once_and_the_parent_goes_on():
    backend, context = make_backend(), multiprocessing.get_context("fork")
    told = context.Queue()
    child = context.Process(target=use_in_child, args=(backend, told))
    child.start()
    messages = [told.get(timeout=PATIENCE) for _ in range(2)]
    child.join(PATIENCE)
    assert child.exitcode == 0
    assert all("forked" in message and "spawn" in message for message in messages)
    assert backend.submit(lambda: 7).result(PATIENCE) == 7
    backend.close()


def spawned():
    backend = make_backend()
    assert backend.submit(lambda: 7).result(PATIENCE) == 7
    backend.close()


def test_rt07_a_spawned_child_has_a_backend_of_its_own():
    backend = make_backend()
    child = multiprocessing.get_context("spawn").Process(target=spawned)
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0
    backend.close()
