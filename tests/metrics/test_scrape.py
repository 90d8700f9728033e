"""What a scrape says of the cache: always true, always whole, and within bounds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings

from helpers.caches import run_prompt, write
from pagedkv.cache import BlockState
from pagedkv.engine import FinishReason
from pagedkv.metrics.registry import METRICS, STATE, MetricType
from tests.metrics.support import OPENMETRICS, OPERATIONS, Mix, make_metrics, of, scrape, value


def resident(cache):
    return [view for view in map(cache.sequence, cache.sequence_ids()) if not view.is_swapped]


def recount(cache):
    """Blocks and tokens from nothing but the block tables."""
    block_size, logical, fills = cache.config.block_size, Counter(), {}
    for sequence in resident(cache):
        logical.update(sequence.block_table)
        for index, block in enumerate(sequence.block_table):
            seen = min(block_size, max(0, sequence.num_tokens - index * block_size))
            fills[block] = max(fills.get(block, 0), seen)
    return logical, fills


def assert_true(samples, cache):
    logical, fills = recount(cache)
    total, size = cache.config.num_blocks, cache.config.block_size
    held, tokens = len(logical), sum(fills.values())
    states = of(samples, "pagedkv_blocks")
    assert sum(states.values()) == total == value(samples, "pagedkv_pool_blocks")
    assert states["private",] == sum(count == 1 for count in logical.values())
    assert states["shared",] == sum(count > 1 for count in logical.values())
    assert value(samples, "pagedkv_logical_blocks") == sum(logical.values())
    assert value(samples, "pagedkv_held_blocks") == held
    assert value(samples, "pagedkv_tokens", "physical") == tokens
    assert value(samples, "pagedkv_kv_cache_usage_ratio") == held / total
    assert value(samples, "pagedkv_token_occupancy_ratio") == pytest.approx(tokens / (total * size))
    assert value(samples, "pagedkv_internal_fragmentation_ratio") == pytest.approx(
        1 - tokens / (held * size) if held else 0
    )
    assert value(samples, "pagedkv_memory_saved_ratio") == pytest.approx(
        1 - held / sum(logical.values()) if held else 0
    )
    pool_bytes = value(samples, "pagedkv_pool_bytes")
    assert sum(of(samples, "pagedkv_memory_bytes").values()) == pool_bytes
    assert sum(of(samples, "pagedkv_state_bytes").values()) == pool_bytes
    assert value(samples, "pagedkv_contiguous_bytes", "oracle") * total * size == pool_bytes * sum(
        view.num_tokens for view in resident(cache)
    )
    assert value(samples, "pagedkv_sequences") == len(resident(cache))
    assert_host_true(samples, [view for view in map(cache.sequence, cache.sequence_ids()) if view.is_swapped])


def assert_host_true(samples, swapped):
    counts = Counter(host for view in swapped for host in view.host_table)
    states = of(samples, "pagedkv_host_blocks")
    assert states["private",] == sum(count == 1 for count in counts.values())
    assert states["shared",] == sum(count > 1 for count in counts.values())
    assert sum(states.values()) == value(samples, "pagedkv_host_pool_blocks") == 16
    assert sum(of(samples, "pagedkv_host_state_bytes").values()) == value(samples, "pagedkv_host_pool_bytes")
    assert value(samples, "pagedkv_swapped_sequences") == len(swapped)
    fills = {}
    for view in swapped:
        for index, host in enumerate(view.host_table):
            fills[host] = max(fills.get(host, 0), min(8, max(0, view.num_tokens - index * 8)))
    assert value(samples, "pagedkv_swapped_tokens") == sum(fills.values())
    uses = of(samples, "pagedkv_host_memory_bytes")
    assert sum(uses.values()) == value(samples, "pagedkv_host_pool_bytes")
    assert uses["tail",] * len(fills) * 8 == (len(fills) * 8 - sum(fills.values())) * (uses["tail",] + uses["tokens",])


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_every_scrape_under_a_random_mix_equals_a_recount_and_states_sum_to_the_pool(operations):
    cache, metrics = make_metrics()
    mix, before = Mix(cache), {}
    counters = {name for name, metric in METRICS.items() if metric.type is MetricType.COUNTER}
    for operation in operations:
        mix.apply(operation)
        samples = scrape(metrics)
        assert_true(samples, cache)
        fallen = [key for key in before if key[0] in counters and samples[key] < before[key]]
        assert not fallen
        before = samples


@settings(max_examples=15, deadline=None)
@given(OPERATIONS)
def test_both_formats_say_the_same(operations):
    cache, metrics = make_metrics()
    mix = Mix(cache)
    for operation in operations:
        mix.apply(operation)
    assert scrape(metrics) == scrape(metrics, OPENMETRICS)


def test_scrape_shows_every_declared_metric_with_declared_labels_only():
    _, metrics = make_metrics()
    metrics.rpc_observer.on_rpc("KvCache/Append", "OK", 0.1)
    shown = scrape(metrics)
    names = {name for metric in METRICS.values() for name in metric.series_names}
    assert {name for name, _ in shown} == names


def test_ratios_are_within_zero_and_one():
    cache, metrics = make_metrics()
    write(cache, run_and_fork(cache), 3)
    ratios = {key: number for key, number in scrape(metrics).items() if key[0].endswith("_ratio")}
    assert len(ratios) >= 5
    assert all(0 <= number <= 1 for number in ratios.values())


def run_and_fork(cache):
    run_prompt(cache, "parent", list(range(20)))
    cache.fork("parent", "child")
    return "child"


@pytest.mark.parametrize("num_held", [0, 50, 100])
def test_mt05_usage_is_the_share_of_held_blocks(num_held):
    cache, metrics = make_metrics(num_blocks=100)
    cache.allocate("a")
    if num_held:
        write(cache, "a", num_held * 8)
    assert value(scrape(metrics), "pagedkv_kv_cache_usage_ratio") == num_held / 100


def test_mt05_cached_blocks_are_apart_and_reserved_ones_count_as_held():
    cache, metrics = make_metrics(num_blocks=100)
    run_prompt(cache, "a", list(range(80)))
    cache.free("a")
    samples = scrape(metrics)
    assert value(samples, "pagedkv_kv_cache_usage_ratio") == 0
    assert value(samples, "pagedkv_blocks", "cached") == 10
    cache.allocate("b")
    cache.reserve("b", 8)
    samples = scrape(metrics)
    assert value(samples, "pagedkv_kv_cache_usage_ratio") == 0.01
    assert value(samples, "pagedkv_memory_bytes", "reserved") == value(samples, "pagedkv_pool_bytes") / 100


def test_mt06_a_falling_count_is_counted_as_a_fault_and_never_shown():
    cache, metrics = make_metrics()
    run_prompt(cache, "a", list(range(40)))
    high = value(scrape(metrics), "pagedkv_allocated_blocks_total")
    cache.stats.allocated_blocks -= 3
    assert value(scrape(metrics), "pagedkv_allocated_blocks_total") == high
    assert value(scrape(metrics), "pagedkv_metric_errors_total") >= 1


def test_mt06_an_impossible_observation_is_a_counted_fault_and_nothing_raises():
    _, metrics = make_metrics()
    observer = metrics.engine_observer
    observer.on_queued("a", -5, None)
    observer.on_preempted("a", "recompute", "out_of_blocks", -1)
    observer.on_first_token("a", float("nan"))
    observer.on_finished("never seen", FinishReason.STOP, 1, 1)
    samples = scrape(metrics)
    assert value(samples, "pagedkv_metric_errors_total") == 3
    assert value(samples, "pagedkv_prompt_tokens_total") == 0
    assert value(samples, "pagedkv_preempted_tokens_total", "recompute") == 0


def test_mt09_two_services_side_by_side_share_no_value():
    one_cache, one = make_metrics()
    _, two = make_metrics()
    run_prompt(one_cache, "a", list(range(40)))
    one.engine_observer.on_queued("a", 7, None)
    assert value(scrape(one), "pagedkv_held_blocks") == 5
    assert value(scrape(two), "pagedkv_held_blocks") == 0
    assert value(scrape(two), "pagedkv_prompt_tokens_total") == 0


def test_mt10_names_from_requests_make_no_series():
    cache, metrics = make_metrics(num_blocks=64)

    def load(start, count):
        for index in range(start, start + count):
            name = f"user-{index}"
            metrics.engine_observer.on_queued(name, 1, f"00-{index + 1:032x}-{index + 1:016x}-01")
            metrics.engine_observer.on_scheduled(name, 0.1, 0)
            metrics.engine_observer.on_first_token(name, 0.1)
            metrics.engine_observer.on_preempted(name, f"mode-{index}", f"reason {index}", 1)
            metrics.engine_observer.on_finished(name, FinishReason.STOP, 1, 1)
            metrics.rpc_observer.on_rpc(f"KvCache/M{index}", f"E{index}", 0.1)
            metrics.recorder.on_kernel(f"kernel_{index}", 0.1)
            if index % 100 == 0:
                cache.allocate(name)

    load(0, 10)
    before = set(scrape(metrics))
    load(10, 10_000)
    assert set(scrape(metrics)) == before
    assert value(scrape(metrics), "pagedkv_rpc_duration_seconds_count", "other", "other") == 10_010


def test_mt13_on_the_cpu_backend_usage_and_hits_are_right_and_labelled():
    cache, metrics = make_metrics(num_blocks=20, backend_name="cpu")
    run_prompt(cache, "a", list(range(80)))
    assert run_prompt(cache, "b", list(range(80))) == 72
    cache.free("b")
    samples = scrape(metrics)
    assert of(samples, "pagedkv_cache_info") == {("cpu", "float32"): 1}
    assert value(samples, "pagedkv_kv_cache_usage_ratio") == 0.5
    assert value(samples, "pagedkv_prefix_cache_hits_total", "prompt") == 72
    assert value(samples, "pagedkv_prefix_cache_queries_total", "prompt") == 160


def test_evictions_and_reuse_reach_their_histograms():
    cache, metrics = make_metrics(num_blocks=8)
    run_prompt(cache, "a", list(range(40)))
    cache.free("a")
    run_prompt(cache, "b", list(range(40)))
    cache.free("b")
    cache.allocate("c")
    write(cache, "c", 64)
    samples = scrape(metrics)
    assert value(samples, "pagedkv_kv_block_reuse_gap_seconds_count") == 5  # 4 hits, 1 deduplication
    evicted = value(samples, "pagedkv_evicted_blocks_total")
    assert evicted == value(samples, "pagedkv_kv_block_lifetime_seconds_count") == 5
    assert evicted == value(samples, "pagedkv_kv_block_idle_before_evict_seconds_count")


def test_swap_preemption_and_lease_metrics_read_zero_before_anything_happens():
    """Rates of a series that appears with its first event would miss that event."""
    _, metrics = make_metrics()
    samples = scrape(metrics)
    names = ("swapped_blocks", "swap_bytes", "swap_seconds", "num_preemptions", "preempted_tokens", "leases_expired")
    for name in names:
        found = of(samples, f"pagedkv_{name}_total")
        assert found
        assert not any(found.values())


def test_states_are_named_in_the_order_of_the_pools_state_map():
    assert STATE.values == tuple(state.name.lower() for state in BlockState)


def test_swaps_reach_their_series_by_direction():
    cache, metrics = make_metrics()
    cache.allocate("a")
    write(cache, "a", 20)
    cache.fork("a", "b")
    cache.swap_out(["a", "b"])
    metrics.rpc_observer.on_swap("out", 3 * 4096, 0.5)
    samples = scrape(metrics)
    assert of(samples, "pagedkv_swapped_blocks_total") == {("in",): 0, ("out",): 3}
    assert of(samples, "pagedkv_swap_bytes_total") == {("in",): 0, ("out",): 3 * 4096}
    assert of(samples, "pagedkv_swap_seconds_total") == {("in",): 0, ("out",): 0.5}
    assert of(samples, "pagedkv_host_blocks") == {("free",): 13, ("private",): 0, ("shared",): 3}
    cache.swap_in(["a", "b"])
    metrics.engine_observer.on_swap("in", 3 * 4096, 0.25, "~gen-0")
    samples = scrape(metrics)
    assert of(samples, "pagedkv_swapped_blocks_total") == {("in",): 3, ("out",): 3}
    assert of(samples, "pagedkv_swap_bytes_total") == {("in",): 3 * 4096, ("out",): 3 * 4096}
    assert value(samples, "pagedkv_host_blocks", "free") == 16
