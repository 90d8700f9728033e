"""What goes wrong is sorted: a request's own fault ends it, a step's is taken back, what is final is told at once."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from helpers.scripted_engine import (
    VOCAB_SIZE,
    PagedDecoder,
    ScriptedDecoder,
    collect,
    make_prompt,
    scripted_engine,
    submit,
    walk,
)
from helpers.waiting import PATIENCE, until
from pagedkv.engine.detokenizer import IncrementalDetokenizer
from pagedkv.engine.sampler import Sampler
from pagedkv.errors import DeviceError, DeviceLost, NumericalError

POISON = 200  # no prompt of make_prompt holds it


class PoisonedDecoder(PagedDecoder):
    """Refuses a step that holds the poison, as a device does that has no memory for it."""

    def __init__(self, error):
        super().__init__(before_step=self.refuse)
        self.error = error

    def refuse(self, step):
        if POISON in step.token_ids:
            raise self.error


async def outcomes(streams):
    return await asyncio.wait_for(
        asyncio.gather(*(collect(stream) for stream in streams), return_exceptions=True), PATIENCE
    )


@pytest.mark.parametrize("error", [DeviceError("no memory"), ValueError("a mistake of ours")], ids=["own", "unknown"])
@pytest.mark.parametrize("max_batch_tokens", [2048, 64])
async def test_rl06_a_step_that_fails_for_one_request_ends_that_request_alone(error, max_batch_tokens):
    prompts = [make_prompt(30, seed) for seed in range(6)]
    async with scripted_engine(decoder=PoisonedDecoder(error), max_batch_tokens=max_batch_tokens) as (engine, _, _):
        streams = [submit(engine, prompt, max_tokens=40) for prompt in prompts[:3]]
        await anext(streams[0])
        bad = submit(engine, (*make_prompt(35, 9), POISON, 97))
        streams += [submit(engine, prompt, max_tokens=40) for prompt in prompts[3:]]
        *good, ended = await outcomes([*streams, bad])
        for stream, prompt in zip(good, prompts, strict=True):
            assert stream.token_ids[-39:] == walk(prompt, 40)[-39:]
        assert ended is error
        assert engine.is_healthy
        assert (await collect(submit(engine, prompts[0]))).token_ids == walk(prompts[0], 8)


async def test_rl06_blocks_of_a_failed_step_are_found_by_nobody():
    async with scripted_engine(decoder=PoisonedDecoder(DeviceError("no memory"))) as (engine, cache, _):
        prompt = (*make_prompt(40), POISON, *make_prompt(40, 1))
        with pytest.raises(DeviceError):
            await collect(submit(engine, prompt))
        assert cache.probe_prefix(prompt) == 0
        assert cache.usage().cached == 0


async def test_rl01_a_prompt_whose_logits_went_wrong_is_computed_anew_the_next_time():
    bad = [True]

    def script(token_id, position):
        return np.full(VOCAB_SIZE, np.nan, np.float32) if bad[0] else 97

    async with scripted_engine(decoder=ScriptedDecoder(script)) as (engine, cache, _):
        with pytest.raises(NumericalError):
            await collect(submit(engine, make_prompt(50)))
        assert cache.usage().cached == 0
        bad[0] = False
        again = await collect(submit(engine, make_prompt(50)))
        assert (again.num_cached_tokens, again.token_ids) == (0, [97] * 8)


@pytest.mark.parametrize(("owner", "method"), [(Sampler, "sample"), (IncrementalDetokenizer, "push")])
async def test_rl06_a_sampler_or_text_that_raises_ends_its_own_request(monkeypatch, owner, method):
    original, broken = getattr(owner, method), []

    def raise_for_the_first(self, *args):
        broken[:] = broken or [self]
        if broken[0] is self:
            raise ZeroDivisionError
        return original(self, *args)

    monkeypatch.setattr(owner, method, raise_for_the_first)
    async with scripted_engine(decoder=PagedDecoder()) as (engine, _, _):
        prompts = [make_prompt(20, seed) for seed in range(3)]
        first, *rest = await outcomes([submit(engine, prompt, temperature=1e-3) for prompt in prompts])
        assert isinstance(first, ZeroDivisionError)
        assert [result.token_ids for result in rest] == [walk(prompt, 8) for prompt in prompts[1:]]
        assert engine.is_healthy


async def test_rl06_a_cancellation_out_of_a_job_is_a_failure_and_no_silence():
    def cancel(step):
        raise asyncio.CancelledError

    async with scripted_engine(decoder=ScriptedDecoder(before_step=cancel)) as (engine, _, _):
        (error,) = await outcomes([submit(engine, make_prompt(5))])
        assert isinstance(error, DeviceLost)
        assert not engine.is_healthy


@pytest.mark.parametrize("how", ["cancel", "schedule"])
async def test_rl06_an_engine_loop_that_ends_for_any_reason_is_final(monkeypatch, how):
    async with scripted_engine() as (engine, _, _):
        await collect(submit(engine, make_prompt(5)))
        if how == "cancel":
            engine._task.cancel()
        else:
            monkeypatch.setattr(engine._scheduler, "schedule", lambda: 1 / 0)
            submit(engine, make_prompt(5))
        await until(lambda: not engine.is_healthy, "failure")
        with pytest.raises(DeviceLost, match="loop has ended"):
            submit(engine, make_prompt(5))


async def test_rl06_steps_that_fail_one_after_another_for_no_known_reason_are_final():
    async with scripted_engine(decoder=ScriptedDecoder(before_step=lambda step: 1 / 0)) as (engine, _, _):
        done = [(await outcomes([submit(engine, make_prompt(5, seed))]))[0] for seed in range(8)]
        assert [type(error) for error in done] == [ZeroDivisionError] * 7 + [DeviceLost]
        assert not engine.is_healthy
