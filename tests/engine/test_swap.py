"""Preemption by swap: the same tokens, nothing lost, nothing left behind. Case ids are those of tests/cases.md."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.scripted_engine import PagedDecoder, collect, make_prompt, scripted_engine, submit, walk
from pagedkv.config import EngineConfig
from pagedkv.engine import FinishReason
from pagedkv.errors import DeviceError, InvalidArgument


class Watcher:
    """Keeps what an engine reports of preemptions and swaps."""

    def __init__(self):
        self.preempted, self.swapped = [], []

    def on_preempted(self, request_id, mode, reason, num_tokens_lost):
        self.preempted.append((mode, num_tokens_lost))

    def on_swap(self, direction, num_bytes, seconds, request_id):
        self.swapped.append((direction, num_bytes))

    def __getattr__(self, name):
        return lambda *args: None


def swapping_engine(watcher=None, **options):
    given = {"num_blocks": 8, "num_host_blocks": 16, "preemption": "swap", "decoder": PagedDecoder(), **options}
    return scripted_engine(observer=watcher or Watcher(), **given)


async def test_sc06_two_requests_that_do_not_fit_together_both_finish_after_a_swap():
    watcher, prompts = Watcher(), [make_prompt(40, seed) for seed in range(2)]
    async with swapping_engine(watcher) as (engine, cache, _):
        results = await asyncio.gather(*(collect(submit(engine, prompt, max_tokens=56)) for prompt in prompts))
        assert (cache.usage().num_swapped, engine.stats.num_swapped) == (0, 0)
    assert [result.token_ids for result in results] == [walk(prompt, 56) for prompt in prompts]
    assert set(watcher.preempted) == {("swap", 0)}
    assert [direction for direction, _ in watcher.swapped] == ["out", "in"] * len(watcher.preempted)


async def test_a_swapped_request_computes_no_token_twice():
    watcher, prompts = Watcher(), [make_prompt(40, seed) for seed in range(2)]
    async with swapping_engine(watcher) as (engine, _, decoder):
        await asyncio.gather(*(collect(submit(engine, prompt, max_tokens=56)) for prompt in prompts))
    assert watcher.preempted
    assert sum(len(step.token_ids) for step in decoder.steps) == 2 * (40 + 56 - 1)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_sc04_random_mixes_give_every_prompt_its_own_tokens(data):
    """Pools for a few requests at most, prompts with common beginnings, cancellations; host pools down to one block."""
    block_size, longest = 4, 24
    num_blocks = data.draw(st.integers(7, 20))
    host = data.draw(st.sampled_from([1, 3, 8, 40]))
    heads = [make_prompt(12, seed) for seed in range(3)]
    requests = data.draw(
        st.lists(
            st.tuples(st.sampled_from(heads), st.integers(1, 12), st.integers(0, 9), st.integers(1, 12)),
            min_size=3,
            max_size=14,
        )
    )
    prompts = [(*head[:keep], *make_prompt(more, 100 + at)) for at, (head, keep, more, _) in enumerate(requests)]
    cancelled = data.draw(st.sets(st.integers(0, len(requests) - 1), max_size=2))
    chunk = data.draw(st.sampled_from([8, 16, 64]))

    async def run():
        options = {"num_blocks": num_blocks, "block_size": block_size, "num_host_blocks": host}
        limits = {"max_num_seqs": 8, "max_batch_tokens": chunk, "context_length": longest}
        async with swapping_engine(**options, **limits) as (engine, _, _):
            streams = [
                submit(engine, prompt, max_tokens=tokens)
                for prompt, (*_, tokens) in zip(prompts, requests, strict=True)
            ]
            readers = [asyncio.create_task(collect(stream)) for stream in streams]
            for at in cancelled:
                await asyncio.sleep(0)
                streams[at].cancel()
            return await asyncio.gather(*readers)

    results = asyncio.run(run())
    for at, (prompt, (*_, num_tokens), result) in enumerate(zip(prompts, requests, results, strict=True)):
        expected = walk(prompt, min(num_tokens, longest - len(prompt)))
        assert result.token_ids == (expected[: len(result.token_ids)] if at in cancelled else expected)


async def test_a_full_host_pool_falls_back_to_recompute_and_changes_no_token():
    watcher, prompts = Watcher(), [make_prompt(33, seed) for seed in range(6)]
    async with swapping_engine(watcher, num_blocks=12, num_host_blocks=5) as (engine, _, _):
        results = await asyncio.gather(*(collect(submit(engine, prompt, max_tokens=45)) for prompt in prompts))
    assert [result.token_ids for result in results] == [walk(prompt, 45) for prompt in prompts]
    assert {mode for mode, _ in watcher.preempted} == {"swap", "recompute"}
    assert len(watcher.preempted) <= 2 * len(prompts)


async def test_preempted_requests_come_back_in_their_order_before_new_ones_join():
    joined, overtaken = [], []

    class Order(Watcher):
        def on_scheduled(self, request_id, queue_seconds, num_cached_tokens):
            swapped = [request.request_id for request in engine._scheduler.waiting if request.is_swapped]
            overtaken.extend((request_id, name) for name in swapped if name < request_id)
            joined.append(request_id)

    async with swapping_engine(Order(), num_blocks=12) as (engine, _, _):
        prompts = [make_prompt(30, seed) for seed in range(6)]
        results = await asyncio.gather(*(collect(submit(engine, prompt, max_tokens=60)) for prompt in prompts))
    assert [result.token_ids for result in results] == [walk(prompt, 60) for prompt in prompts]
    assert not overtaken
    assert len(joined) > len(set(joined)) == 6


@pytest.mark.parametrize("end", ["cancel", "stop"])
async def test_the_host_blocks_of_a_request_that_ends_swapped_are_free_at_once(end):
    async with swapping_engine(num_blocks=8) as (engine, cache, _):
        streams = [submit(engine, make_prompt(40, seed), max_tokens=80) for seed in range(2)]
        readers = [asyncio.create_task(collect(stream)) for stream in streams]
        while not cache.usage().num_swapped:
            await asyncio.sleep(0)
        swapped = next(name for name in cache.sequence_ids() if cache.sequence(name).is_swapped)
        assert cache.usage().host_free < 16
        if end == "cancel":
            next(stream for stream in streams if stream.request_id == swapped).cancel()
            assert cache.usage().host_free == 16
        else:
            await engine.stop(0.0)
        results = await asyncio.gather(*readers)
    assert FinishReason.CANCELLED in {result.finish_reason for result in results}


async def test_sd06_swapped_requests_hold_no_place_in_the_batch():
    async with swapping_engine(num_blocks=12, max_num_seqs=4, max_batch_tokens=64) as (engine, cache, _):
        streams = [submit(engine, make_prompt(40, seed), max_tokens=60) for seed in range(4)]
        readers = [asyncio.create_task(collect(stream)) for stream in streams]
        while not cache.usage().num_swapped:
            await asyncio.sleep(0)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*readers)
        again = await asyncio.gather(*(collect(submit(engine, make_prompt(20, seed))) for seed in range(4)))
    assert all(len(result.token_ids) == 8 for result in again)


@pytest.mark.parametrize("direction", ["swap_out", "swap_in"])
async def test_a_swap_that_fails_costs_time_and_no_token(direction):
    decoder, failed = PagedDecoder(), []

    def fail_once(pairs):
        if not failed:
            failed.append(direction)
            raise DeviceError("no memory for the copy")
        swap(pairs)

    async with swapping_engine(decoder=decoder) as (engine, _, _):
        swap = getattr(decoder.backend, direction)
        setattr(decoder.backend, direction, fail_once)
        prompts = [make_prompt(40, seed) for seed in range(2)]
        done = await asyncio.gather(*(collect(submit(engine, prompt, max_tokens=56)) for prompt in prompts))
        assert failed
        assert [result.token_ids for result in done] == [walk(prompt, 56) for prompt in prompts]


async def test_swap_needs_a_host_pool_and_a_known_mode():
    with pytest.raises(InvalidArgument, match="preemption"):
        async with scripted_engine(preemption="swap"):
            pass
    with pytest.raises(InvalidArgument, match="preemption"):
        EngineConfig(preemption="auto")
