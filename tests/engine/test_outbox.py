"""When readers and observers hear of a token: after the next step has begun, and never late or twice."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.scripted_engine import ScriptedDecoder, assert_clean, collect, make_prompt, scripted_engine, submit
from pagedkv.compute.queue import DeviceQueue
from pagedkv.engine import FinishReason
from pagedkv.engine.sampler import sample_greedy


class Events:
    """An engine observer that remembers what it heard of."""

    def __init__(self):
        self.heard = []

    def __getattr__(self, name):
        return lambda *args: self.heard.append((name, args))

    def of(self, request_id):
        """The events of one request, without those of the queue."""
        ends = {"on_first_token": "first", "on_token": "token", "on_finished": "finished"}
        return [ends[name] for name, args in self.heard if name in ends and args[0] == request_id]


async def test_the_next_step_begins_before_anyone_hears_of_the_last_ones_tokens():
    events, decoder = Events(), ScriptedDecoder()
    decoder.before_step = lambda step: events.heard.append(("begin", ()))
    async with scripted_engine(observer=events, decoder=decoder) as (engine, _, _):
        await asyncio.gather(*(collect(submit(engine, make_prompt(5, seed), max_tokens=3)) for seed in range(2)))
    order = [name for name, _ in events.heard if name in ("begin", "on_first_token", "on_token", "on_finished")]
    step = ["begin", "on_first_token", "on_first_token"]
    assert order == [
        "begin",
        *step,
        *["begin", "on_token", "on_token"],
        *["on_token", "on_finished", "on_token", "on_finished"],
    ]


async def test_a_token_reaches_its_reader_while_the_device_computes_the_next_one():
    may_go_on, decoder = threading.Semaphore(1), ScriptedDecoder()
    decoder.before_step = lambda step: may_go_on.acquire()
    async with scripted_engine(decoder=decoder) as (engine, _, _):
        queue = DeviceQueue("test")
        decoder.backend.submit = queue.submit
        stream = submit(engine, make_prompt(5), max_tokens=4)
        for _ in range(3):
            assert len((await anext(stream)).token_ids) == 1  # the device waits for leave to go on
            may_go_on.release()
        assert (await anext(stream)).finish_reason is FinishReason.LENGTH
        queue.close()


async def test_the_blocks_of_an_ended_request_are_free_when_its_last_chunk_comes():
    async with scripted_engine() as (engine, cache, _):
        result = await collect(submit(engine, make_prompt(20), max_tokens=5))
        assert result.finish_reason is FinishReason.LENGTH
        assert_clean(cache)


@pytest.mark.parametrize("num_read", [1, 2, 5])
async def test_a_cancelled_request_has_its_tokens_before_its_end(num_read):
    events = Events()
    async with scripted_engine(observer=events) as (engine, _, _):
        stream, other = submit(engine, make_prompt(5), max_tokens=50), submit(engine, make_prompt(5, 1), max_tokens=9)
        read = [await anext(stream) for _ in range(num_read)]
        stream.cancel()
        rest = await collect(stream)
        await collect(other)
        assert rest.finish_reason is FinishReason.CANCELLED
        heard = events.of(stream.request_id)
        assert heard == ["first", *["token"] * (len(heard) - 2), "finished"]
        num_tokens = sum(len(chunk.token_ids) for chunk in (*read, *rest.chunks))  # two may come in one chunk
        assert len(heard) - 1 == num_tokens == rest.chunks[-1].num_output_tokens


@given(st.lists(st.lists(st.integers(-3, 3), min_size=3, max_size=3), max_size=5))
def test_greedy_sampling_of_a_batch_is_that_of_its_rows(rows):
    logits = np.array(rows, np.float32).reshape(len(rows), 3)
    assert sample_greedy(logits) == [int(np.argmax(row)) for row in logits]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_greedy_sampling_of_a_batch_refuses_a_row_without_a_finite_maximum(bad):
    logits = np.zeros((3, 4), np.float32)
    logits[1] = bad
    assert sample_greedy(logits) is None
