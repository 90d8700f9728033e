"""The control plane's own calls in microseconds, at 1,000 and 100,000 blocks: `./run bench cache [--peers]`.

Every figure has the time of a fixed pure-Python loop beside it, taken in the same run between the samples, as the
yardstick of the machine at that moment. The figures of vLLM's pool in the last column were measured elsewhere, once;
`--peers` times it here if it can be imported.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from pagedkv.cache import CacheManager, ReserveRequest
from pagedkv.config import CacheConfig
from tests.bench.report import median_p10, print_table, write_result

POOLS = (1_000, 100_000)
BLOCK_SIZE = 16
PROMPT_TOKENS = 512
NUM_SEQUENCES = 64
VOCABULARY = 50_000
PUBLISHED_VLLM = {"allocate + free, a block": 0.38, "512-token request": 363.0, "one token for 64 sequences": 710.0}
TARGETS = {"allocate + free, a block": 0.3, "512-token request": 110.0, "one token for 64 sequences": 150.0}


@dataclass(frozen=True, slots=True)
class Figure:
    """Microseconds of one call; `yardstick` is the pure-Python loop of the same moments."""

    name: str
    num_blocks: int
    median: float
    p10: float
    yardstick: float


def yardstick() -> None:
    """Do a fixed amount of interpreter work: 1,000 additions."""
    total = 0
    for number in range(1_000):
        total += number


def microseconds(call: Callable[[], object]) -> float:
    """Time one call."""
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1_000


def measure(name: str, num_blocks: int, calls: Sequence[Callable[[], object]], per: int = 1) -> Figure:
    """Time each call once, a yardstick beside each; the first tenth warms up."""
    samples, loops = [], []
    gc.collect()
    gc.disable()
    for call in calls:
        samples.append(microseconds(call) / per)
        loops.append(microseconds(yardstick))
    gc.enable()
    warm = len(calls) // 10
    timing = median_p10(samples[warm:])
    return Figure(name, num_blocks, timing.median, timing.p10, median_p10(loops[warm:]).median)


def make_cache(num_blocks: int) -> CacheManager:
    """Return an empty cache."""
    return CacheManager(CacheConfig(num_blocks, BLOCK_SIZE))


def fill_with_cached(cache: CacheManager, rng: random.Random) -> None:
    """Cache something in every block, so that each request evicts."""
    while cache.pool.free:
        request(cache, prompt(rng))


def prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]


def request(cache: CacheManager, token_ids: list[int]) -> None:
    """Hash, look up, reserve, commit, free."""
    num_cached = cache.allocate("request", token_ids).num_cached_tokens
    cache.commit(cache.reserve("request", len(token_ids) - num_cached))
    cache.free("request")


def bench_blocks(num_blocks: int) -> Figure:
    """Take and release 32 blocks at the pool's own level."""
    pool, count = make_cache(num_blocks).pool, PROMPT_TOKENS // BLOCK_SIZE
    call = lambda: pool.release(pool.take(count, 0.0), 0.0)  # noqa: E731
    return measure("allocate + free, a block", num_blocks, [call] * 500, per=count)


def bench_requests(num_blocks: int) -> list[Figure]:
    """A 512-token request that nothing is cached of, evicting from a full cache; and one that hits all it can."""
    rng, cache = random.Random(0), make_cache(num_blocks)
    fill_with_cached(cache, rng)
    prompts = [prompt(rng) for _ in range(200)]
    cold = measure("512-token request", num_blocks, [lambda ids=ids: request(cache, ids) for ids in prompts])
    warm = measure("512-token request, cached", num_blocks, [lambda: request(cache, prompts[-1])] * 200)
    return [cold, warm]


def bench_decode(num_blocks: int) -> Figure:
    """One token more for each of 64 running sequences: reserve and commit; their lengths are spread over the block."""
    cache = make_cache(num_blocks)
    for index in range(NUM_SEQUENCES):
        cache.allocate(str(index))
        length = 20 + index % BLOCK_SIZE
        cache.commit(cache.reserve(str(index), length, token_ids=[index] * length))

    def step_of(token_id: int) -> Callable[[], None]:
        requests = [ReserveRequest(str(index), 1, None, [token_id]) for index in range(NUM_SEQUENCES)]
        return lambda: cache.commit_batch(cache.reserve_batch(requests))

    calls = [step_of(token_id) for token_id in range(150)]
    return measure("one token for 64 sequences", num_blocks, calls)


def bench_upkeep(num_blocks: int) -> list[Figure]:
    """What happens seldom: construction, a scrape, an audit."""
    rng, cache = random.Random(0), make_cache(num_blocks)
    fill_with_cached(cache, rng)
    scrape = lambda: (cache.usage(), cache.accounting())  # noqa: E731
    return [
        measure("construct", num_blocks, [lambda: make_cache(num_blocks)] * 10),
        measure("usage + accounting", num_blocks, [scrape] * 20),
        measure("audit", num_blocks, [cache.audit] * 5),
    ]


def bench_peer(num_blocks: int) -> list[Figure]:
    """vLLM's own block pool, if it is installed."""
    try:
        from vllm.v1.core.block_pool import BlockPool  # type: ignore[import-not-found]
    except ImportError:
        return []
    pool, count = BlockPool(num_blocks, True, BLOCK_SIZE), PROMPT_TOKENS // BLOCK_SIZE
    call = lambda: pool.free_blocks(reversed(pool.get_new_blocks(count)))  # noqa: E731
    return [measure("vLLM: allocate + free, a block", num_blocks, [call] * 500, per=count)]


def row(figure: Figure) -> tuple[object, ...]:
    published = PUBLISHED_VLLM.get(figure.name)
    return (
        figure.name,
        f"{figure.num_blocks:,}",
        figure.median,
        figure.p10,
        figure.median / figure.yardstick,
        TARGETS.get(figure.name, ""),
        published or "",
        f"{published / figure.median:.1f}x" if published else "",
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench cache", description=__doc__)
    parser.add_argument("--peers", action="store_true", help="time vLLM's block pool too, if it can be imported")
    options = parser.parse_args(argv)
    figures: list[Figure] = []
    for num_blocks in POOLS:
        figures += [bench_blocks(num_blocks), *bench_requests(num_blocks), bench_decode(num_blocks)]
        figures += bench_upkeep(num_blocks)
    peers = [figure for num_blocks in POOLS for figure in bench_peer(num_blocks)] if options.peers else []
    columns = ("microseconds", "blocks", "median", "p10", "/ yardstick", "target", "vLLM, published", "ratio")
    print_table(f"Control plane, block size {BLOCK_SIZE}", columns, [row(figure) for figure in figures + peers])
    if options.peers and not peers:
        print("vLLM is not installed here; its published figures stand in the table.")
    result = {
        "block_size": BLOCK_SIZE,
        "unit": "microseconds",
        "figures": [asdict(figure) for figure in figures],
        "peers": [asdict(figure) for figure in peers],
        "published_vllm": PUBLISHED_VLLM,
        "targets": TARGETS,
    }
    print(f"written to {write_result('cache', result)}")
    return 0
