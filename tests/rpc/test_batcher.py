"""Attend calls that meet a busy device share a launch; nobody waits for an idle one, or for another's mistake."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from helpers.server import serving
from helpers.waiting import PATIENCE, until
from helpers.wire import assert_attention, make_queries, make_rows
from pagedkv.client import AsyncClient
from pagedkv.errors import InvalidArgument, PositionMismatch, SequenceNotFound, SequenceTooLong
from pagedkv.rpc.batcher import Batcher

on_each_backend = pytest.mark.usefixtures("backend")


class Launches:
    """Records each launch; `finish` ends the work of the last one and answers its calls with their requests."""

    def __init__(self):
        self.requests, self.leave = [], ()
        self.batcher = Batcher(self)

    def __call__(self, calls):
        left = [call for call in calls if call.request in self.leave]
        self.calls = [call for call in calls if call not in left]
        self.leave, self.work = (), asyncio.get_running_loop().create_future()
        self.requests.append([call.request for call in self.calls])
        return left, self.work

    async def finish(self):
        for call in self.calls:
            if not call.answer.done():
                call.answer.set_result(call.request)
        self.work.set_result(None)
        await asyncio.sleep(0)


async def test_call_to_an_idle_device_is_launched_at_once():
    launches = Launches()
    answer = launches.batcher.run(1)
    assert launches.requests == [[1]]
    await launches.finish()
    assert await answer == 1
    launches.batcher.run(2)
    assert launches.requests == [[1], [2]]


async def test_calls_to_a_busy_device_are_launched_together_in_order():
    launches = Launches()
    answers = [launches.batcher.run(number) for number in range(5)]
    await launches.finish()
    assert launches.requests == [[0], [1, 2, 3, 4]]
    await launches.finish()
    assert await asyncio.gather(*answers) == list(range(5))


async def test_call_whose_caller_has_gone_is_not_launched():
    launches = Launches()
    answers = [launches.batcher.run(number) for number in range(3)]
    answers[1].cancel()
    await launches.finish()
    assert launches.requests == [[0], [2]]


async def test_calls_left_by_a_launch_come_first_in_the_next():
    launches = Launches()
    for number in range(4):
        launches.batcher.run(number)
    launches.leave = (2,)
    await launches.finish()
    launches.batcher.run(4)
    await launches.finish()
    assert launches.requests == [[0], [1, 3], [2, 4]]


@dataclass
class Busy:
    """A server whose device is busy until `release`: a client of it, the rows of each launch, calls that arrived."""

    client: AsyncClient
    launches: list[int]
    release: Callable[[], None]
    arrived: list[asyncio.Future]

    async def send(self, *calls):
        """Send calls, each when the one before has arrived, or was refused on its way; return their tasks."""
        tasks = []
        for call in calls:
            before = len(self.arrived)
            task = asyncio.ensure_future(call)
            tasks.append(task)
            await until(lambda before=before, task=task: len(self.arrived) > before or task.done(), "arrival")
        return tasks


@contextlib.asynccontextmanager
async def busy_device(monkeypatch):
    """Serve sequences s0 to s5 of 20 tokens; an attend to s5 holds the device, so whatever is sent meets a busy one."""
    arrived, run = [], Batcher.run

    def noting(batcher, request):
        arrived.append(run(batcher, request))
        return arrived[-1]

    monkeypatch.setattr(Batcher, "run", noting)
    async with serving() as served, AsyncClient(served.address, timeout=PATIENCE) as client:
        for at in range(6):
            await client.allocate(f"s{at}")
            await client.append(f"s{at}", *make_rows(20, at), layer=0)
        launches, gate, attend = [], threading.Event(), served.backend.attend

        def watched(layer, queries, batch, params):
            launches.append(len(queries))
            gate.wait(30)
            return attend(layer, queries, batch, params)

        served.backend.attend = watched
        first = asyncio.ensure_future(client.attend(["s5"], make_queries(1), layer=0))
        await until(lambda: launches, "launch")
        yield Busy(client, launches, gate.set, arrived)
        gate.set()
        await first


@on_each_backend
async def test_attends_that_meet_a_busy_device_run_as_one_launch_and_are_exact(monkeypatch):
    async with busy_device(monkeypatch) as busy:
        rows = [make_rows(at + 1, 50 + at) for at in range(5)]
        calls = [
            busy.client.attend(
                [f"s{at}"],
                make_queries(at + 1, at),
                layer=0,
                query_lens=[at + 1],
                **({"keys": rows[at][0], "values": rows[at][1]} if at % 2 else {}),
            )
            for at in range(5)
        ]
        tasks = await busy.send(*calls)
        busy.release()
        results = await asyncio.gather(*tasks)
        for at, result in enumerate(results):
            full = [np.concatenate([a, b]) if at % 2 else a for a, b in zip(make_rows(20, at), rows[at], strict=True)]
            assert_attention(result, make_queries(at + 1, at), [full[0]], [full[1]], [at + 1])
        assert busy.launches == [1, 1 + 2 + 3 + 4 + 5]
        assert (await busy.client.audit()).ok


@on_each_backend
async def test_attends_of_other_options_run_apart(monkeypatch):
    async with busy_device(monkeypatch) as busy:
        windows = [4, 4, 9]
        tasks = await busy.send(
            *(busy.client.attend([f"s{at}"], make_queries(1), layer=0, window=w) for at, w in enumerate(windows))
        )
        busy.release()
        for at, task in enumerate(tasks):
            keys, values = make_rows(20, at)
            assert_attention(await task, make_queries(1), [keys], [values], [1], window=windows[at])
        assert busy.launches == [1, 2, 1]


@on_each_backend
async def test_bad_attend_in_a_shared_launch_fails_alone(monkeypatch):
    async with busy_device(monkeypatch) as busy:
        keys, values = make_rows(1, 9)
        new = {"layer": 0, "keys": keys, "values": values}
        tasks = await busy.send(
            busy.client.attend(["s0"], make_queries(1), **new),
            busy.client.attend(["nobody"], make_queries(1), **new),
            busy.client.attend(["s1"], make_queries(1), positions=[25], **new),
            busy.client.attend(["s2"], make_queries(1), layer=0),
        )
        busy.release()
        good, unknown, gap, other = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(unknown, SequenceNotFound)
        assert isinstance(gap, PositionMismatch)
        full = [np.concatenate(pair) for pair in zip(make_rows(20, 0), (keys, values), strict=True)]
        assert_attention(good, make_queries(1), [full[0]], [full[1]], [1])
        assert_attention(other, make_queries(1), *([rows] for rows in make_rows(20, 2)), [1])
        assert busy.launches == [1, 2]
        assert (await busy.client.sequence("s1")).layer_lengths[0] == 20


@on_each_backend
async def test_three_bad_calls_of_eight_fail_alone_and_leave_no_trace_gr_16(monkeypatch):
    """An unknown sequence, one that gets too long, one named twice: the five other calls of the launch are exact."""
    async with busy_device(monkeypatch) as busy:
        rows = [make_rows(1, 50 + at) for at in range(5)]
        queries = make_queries(1)

        def attend(name, keys, values, **options):
            return busy.client.attend([name], queries, layer=0, keys=keys, values=values, **options)

        good = [attend(f"s{at}", *rows[at]) for at in range(5)]
        two, many = make_rows(2), make_rows(64 * 16)
        bad = [
            attend("nobody", *rows[0]),
            busy.client.attend(["s5"], make_queries(1024), layer=0, query_lens=[1024], keys=many[0], values=many[1]),
            busy.client.attend(["s5", "s5"], make_queries(2), layer=0, keys=two[0], values=two[1]),
        ]
        tasks = await busy.send(good[0], bad[0], good[1], bad[1], good[2], bad[2], good[3], good[4])
        busy.release()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for at, answer in enumerate(answers[number] for number in (0, 2, 4, 6, 7)):
            full = [np.concatenate(pair) for pair in zip(make_rows(20, at), rows[at], strict=True)]
            assert_attention(answer, queries, [full[0]], [full[1]], [1])
        assert [type(answers[number]) for number in (1, 3, 5)] == [SequenceNotFound, SequenceTooLong, InvalidArgument]
        assert busy.launches == [1, 5]
        lengths = [(await busy.client.sequence(f"s{at}")).layer_lengths[0] for at in range(6)]
        assert lengths == [21] * 5 + [20]
        assert (await busy.client.audit()).ok


@on_each_backend
async def test_two_writes_to_one_sequence_follow_each_other(monkeypatch):
    async with busy_device(monkeypatch) as busy:
        keys, values = make_rows(2, 9)
        tasks = await busy.send(
            *(
                busy.client.attend(
                    ["s0"],
                    make_queries(1, at),
                    layer=0,
                    positions=[20 + at],
                    keys=keys[at, None],
                    values=values[at, None],
                )
                for at in range(2)
            )
        )
        busy.release()
        old = make_rows(20, 0)
        for at, task in enumerate(tasks):
            full = [np.concatenate([a, b[: at + 1]]) for a, b in zip(old, (keys, values), strict=True)]
            assert_attention(await task, make_queries(1, at), [full[0]], [full[1]], [1])
        assert busy.launches == [1, 1, 1]


@on_each_backend
async def test_waiting_attend_whose_caller_goes_writes_nothing(monkeypatch):
    async with busy_device(monkeypatch) as busy:
        keys, values = make_rows(1, 9)
        (task,) = await busy.send(busy.client.attend(["s0"], make_queries(1), layer=0, keys=keys, values=values))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(busy.arrived[-1].cancelled, "news of the cancellation")
        busy.release()
        await busy.client.attend(["s1"], make_queries(1), layer=0)
        assert (await busy.client.sequence("s0")).layer_lengths[0] == 20
        assert busy.launches == [1, 1]


async def test_rl02_what_waits_for_the_device_is_planned_in_parts(monkeypatch):
    """300 calls of 16 sequences: no more than 4,096 sequences at a time, all answered in the end."""
    async with serving(num_blocks=64) as served, AsyncClient(served.address, timeout=PATIENCE) as client:
        for at in range(16):
            await client.allocate(f"s{at}")
            await client.append(f"s{at}", *make_rows(1), layer=0)
        planned, gate, attend = [], threading.Event(), served.backend.attend

        def watched(layer, queries, batch, params):
            planned.append(len(batch.context_lens))
            gate.wait(30)
            return attend(layer, queries, batch, params)

        served.backend.attend = watched
        names = [f"s{at}" for at in range(16)]
        first = asyncio.ensure_future(client.attend(names, make_queries(16), layer=0))
        await until(lambda: planned, "launch")
        calls = [asyncio.ensure_future(client.attend(names, make_queries(16), layer=0)) for _ in range(300)]
        await until(lambda: len(served.server._kv_cache._batcher._waiting) == 300, "calls")
        gate.set()
        await asyncio.gather(first, *calls)
        assert planned == [16, 4_096, 300 * 16 - 4_096]
