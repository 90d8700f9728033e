"""What the real scheduler and sampler tell the metrics, over a scripted model."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from helpers.scripted_engine import ScriptedDecoder, collect, make_prompt, scripted_engine, submit
from pagedkv.compute.layout import KvLayout
from pagedkv.engine import GenerationRequest, SamplingParams
from pagedkv.metrics.service import ServiceMetrics
from tests.metrics.support import OPENMETRICS, SHAPE, of, scrape, value

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACE_CONTEXT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


class Late:
    """An observer that is chosen after the engine is made, as the metrics want the engine's cache."""

    def __init__(self):
        self.target = None

    def __getattr__(self, name):
        return getattr(self.target, name)


@asynccontextmanager
async def measured_engine(**options):
    late = Late()
    async with scripted_engine(observer=late, **options) as (engine, cache, decoder):
        layout = KvLayout(SHAPE, cache.config.num_blocks, cache.config.block_size)
        metrics = ServiceMetrics(cache, layout, backend_name="cpu")
        late.target = metrics.engine_observer
        metrics.watch_engine(engine)
        yield engine, metrics, decoder


def bucket(samples, name, bound):
    return value(samples, name + "_bucket", repr(bound))


async def test_mt01_latencies_fall_into_the_right_buckets(monkeypatch):
    now = 100.0

    def wait(step):
        nonlocal now
        now += 0.06 if len(step.token_ids) > 1 else 0.015

    monkeypatch.setattr("pagedkv.engine.engine.time", SimpleNamespace(perf_counter=lambda: now))

    name = "pagedkv_time_to_first_token_seconds"
    async with measured_engine(decoder=ScriptedDecoder(before_step=wait)) as (engine, metrics, _):
        for seed in range(10):
            await collect(submit(engine, make_prompt(5, seed), max_tokens=3))
        samples = scrape(metrics)
    assert value(samples, name + "_sum") == pytest.approx(10 * 0.06)
    assert bucket(samples, name, 0.05) == 0
    assert bucket(samples, name, 0.1) == 10
    assert value(samples, name + "_bucket", "+Inf") == value(samples, name + "_count") == 10
    inter_token = "pagedkv_inter_token_latency_seconds"
    assert value(samples, inter_token + "_sum") == pytest.approx(20 * 0.015)
    assert bucket(samples, inter_token, 0.01) == 0
    assert bucket(samples, inter_token, 0.025) == value(samples, inter_token + "_count") == 20


async def test_mt02_first_token_samples_are_the_requests_that_sent_one():
    async with measured_engine(num_blocks=256, max_batch_tokens=64, max_num_seqs=16) as (engine, metrics, _):
        streams = [submit(engine, make_prompt(60, seed), max_tokens=3) for seed in range(50)]
        for stream in streams[-5:]:
            stream.cancel()
        done = await asyncio.gather(*map(collect, streams))
        samples = scrape(metrics)
    started = sum(bool(result.token_ids) for result in done)
    assert started == 45
    assert value(samples, "pagedkv_time_to_first_token_seconds_count") == started
    assert value(samples, "pagedkv_request_queue_time_seconds_count") == started
    assert value(samples, "pagedkv_requests_received_total") == 50
    assert of(samples, "pagedkv_request_success_total")["cancelled",] == 5
    assert value(samples, "pagedkv_generation_tokens_total") == 45 * 3
    assert value(samples, "pagedkv_prompt_tokens_total") == 50 * 60


async def test_mt04_recomputed_tokens_are_no_prefix_hits():
    async with measured_engine(num_blocks=12, block_size=8, max_num_seqs=4) as (engine, metrics, _):
        streams = [submit(engine, make_prompt(24, seed), max_tokens=40) for seed in range(4)]
        await asyncio.gather(*map(collect, streams))
        samples = scrape(metrics)
    assert of(samples, "pagedkv_num_preemptions_total")["recompute", "out_of_blocks"] > 0
    assert value(samples, "pagedkv_preempted_tokens_total", "recompute") > 0
    assert value(samples, "pagedkv_prefix_cache_hits_total", "prompt") == 0
    assert value(samples, "pagedkv_prefix_cache_queries_total", "prompt") == 4 * 24
    assert value(samples, "pagedkv_prefix_cache_queries_total", "recompute") > 0
    assert value(samples, "pagedkv_request_queue_time_seconds_count") == 4
    assert value(samples, "pagedkv_time_to_first_token_seconds_count") == 4


async def test_a_preemption_by_swap_loses_no_token_and_counts_its_bytes():
    options = {"num_blocks": 12, "block_size": 8, "max_num_seqs": 4, "num_host_blocks": 64, "preemption": "swap"}
    async with measured_engine(**options) as (engine, metrics, _):
        streams = [submit(engine, make_prompt(24, seed), max_tokens=40) for seed in range(4)]
        await asyncio.gather(*map(collect, streams))
        samples, stats = scrape(metrics), engine._cache.stats
    assert of(samples, "pagedkv_num_preemptions_total")["swap", "out_of_blocks"] > 0
    assert of(samples, "pagedkv_num_preemptions_total")["recompute", "out_of_blocks"] == 0
    assert value(samples, "pagedkv_preempted_tokens_total", "swap") == 0
    block_bytes = engine._backend.layout.block_bytes
    copied = {"out": stats.swapped_out_blocks, "in": stats.swapped_in_blocks}
    for direction, num_blocks in copied.items():
        assert value(samples, "pagedkv_swap_bytes_total", direction) == num_blocks * block_bytes > 0
        assert value(samples, "pagedkv_swap_seconds_total", direction) > 0
    assert value(samples, "pagedkv_num_requests_swapped") == 0
    assert value(samples, "pagedkv_computed_tokens_total", "prefill") == 4 * 24


async def test_swapped_requests_are_a_gauge_while_they_wait():
    options = {"num_blocks": 12, "block_size": 8, "max_num_seqs": 4, "num_host_blocks": 64, "preemption": "swap"}
    async with measured_engine(**options) as (engine, metrics, _):
        streams = [submit(engine, make_prompt(24, seed), max_tokens=40) for seed in range(4)]
        readers = [asyncio.create_task(collect(stream)) for stream in streams]
        while not engine.stats.num_swapped:
            await asyncio.sleep(0)
        samples = scrape(metrics)
        assert value(samples, "pagedkv_num_requests_swapped") == value(samples, "pagedkv_swapped_sequences") > 0
        assert value(samples, "pagedkv_num_requests_waiting") >= value(samples, "pagedkv_num_requests_swapped")
        await asyncio.gather(*readers)


async def test_mt06_the_engine_goes_on_when_the_stats_see_a_count_fall():
    async with measured_engine() as (engine, metrics, _):
        await collect(submit(engine, make_prompt(20)))
        scrape(metrics)
        engine._cache.stats.queried_tokens = 0
        assert (await collect(submit(engine, make_prompt(20, 1)))).token_ids
        samples = scrape(metrics)
    assert value(samples, "pagedkv_prefix_cache_queries_total", "prompt") >= 20
    assert engine.is_healthy


async def test_running_waiting_and_device_health_are_the_engines():
    async with measured_engine() as (engine, metrics, _):
        assert value(scrape(metrics), "pagedkv_device_healthy") == 1
        stream = submit(engine, make_prompt(20), max_tokens=50)
        assert value(scrape(metrics), "pagedkv_num_requests_waiting") == 1
        await anext(aiter(stream))
        assert value(scrape(metrics), "pagedkv_num_requests_running") == 1
        stream.cancel()
        assert value(scrape(metrics), "pagedkv_num_requests_running") == 0


async def test_trace_context_becomes_the_exemplar_of_its_bucket():
    async with measured_engine() as (engine, metrics, _):
        request = GenerationRequest(make_prompt(5), SamplingParams(max_tokens=2), trace_context=TRACE_CONTEXT)
        await collect(engine.submit(request))
        text = metrics.scrape(OPENMETRICS)[0].decode()
    exemplars = [line for line in text.splitlines() if f'# {{trace_id="{TRACE_ID}"}}' in line]
    assert {line.split("_bucket")[0] for line in exemplars} >= {
        "pagedkv_time_to_first_token_seconds",
        "pagedkv_inter_token_latency_seconds",
    }
    assert "trace_id" not in metrics.scrape("text/plain")[0].decode()


@pytest.mark.parametrize("context", ["", "00-xyz-1-01", f"00-{'0' * 32}-00f067aa0ba902b7-01", 'x"} 1\nevil 1'])
async def test_malformed_trace_context_makes_no_exemplar(context):
    async with measured_engine() as (engine, metrics, _):
        await collect(engine.submit(GenerationRequest(make_prompt(5), SamplingParams(max_tokens=1), None, context)))
        assert "trace_id" not in metrics.scrape(OPENMETRICS)[0].decode()


async def test_steps_count_computed_tokens_and_batch_sizes():
    async with measured_engine() as (engine, metrics, decoder):
        await collect(submit(engine, make_prompt(10), max_tokens=4))
        samples = scrape(metrics)
    assert value(samples, "pagedkv_computed_tokens_total", "prefill") == 10
    assert value(samples, "pagedkv_computed_tokens_total", "decode") == 3
    assert value(samples, "pagedkv_batch_size_sequences_count") == len(decoder.steps) == 4
