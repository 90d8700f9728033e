"""The control plane's own calls in microseconds, at 1,000 and 100,000 blocks: `./run bench cache [--peers]`.

Every figure has the time of a fixed pure-Python loop beside it, taken in the same run between the samples, as the
yardstick of the machine at that moment. With `--peers` vLLM's block pool and cache manager do the same work, figure by
figure in turns, in an environment made for it; without, or where it cannot be installed, its figures are those
published for another machine and say so.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from pagedkv.cache import CacheManager, ReserveRequest
from pagedkv.config import CacheConfig
from tests.bench.cache_clock import time_calls
from tests.bench.peers import VLLM, PeerUnavailable
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


def measure(name: str, num_blocks: int, calls: Sequence[Callable[[], object]], per: int = 1) -> Figure:
    """Time each call once, a yardstick beside each; the first tenth warms up."""
    return make_figure(name, num_blocks, *time_calls(calls), per)


def make_figure(name: str, num_blocks: int, samples: Sequence[float], loops: Sequence[float], per: int = 1) -> Figure:
    timing = median_p10([sample / per for sample in samples])
    return Figure(name, num_blocks, timing.median, timing.p10, median_p10(loops).median)


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


def bench_blocks(num_blocks: int) -> list[Figure]:
    """Take and release 32 blocks at the pool's own level."""
    pool, count = make_cache(num_blocks).pool, PROMPT_TOKENS // BLOCK_SIZE
    call = lambda: pool.release(pool.take(count, 0.0), 0.0)  # noqa: E731
    return [measure("allocate + free, a block", num_blocks, [call] * 500, per=count)]


def bench_requests(num_blocks: int) -> list[Figure]:
    """A 512-token request that nothing is cached of, evicting from a full cache; and one that hits all it can."""
    rng, cache = random.Random(0), make_cache(num_blocks)
    fill_with_cached(cache, rng)
    prompts = [prompt(rng) for _ in range(200)]
    cold = measure("512-token request", num_blocks, [lambda ids=ids: request(cache, ids) for ids in prompts])
    warm = measure("512-token request, cached", num_blocks, [lambda: request(cache, prompts[-1])] * 200)
    return [cold, warm]


def bench_decode(num_blocks: int) -> list[Figure]:
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
    return [measure("one token for 64 sequences", num_blocks, calls)]


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


class VllmPool:
    """vLLM's block pool and cache manager in a process of their own. Raises PeerUnavailable if they cannot run."""

    def __init__(self) -> None:
        self._process = VLLM.start("cache_peer.py")
        self.name = str(self._process.first["name"])

    def figure(self, name: str, num_blocks: int) -> Figure:
        """Time the work of one of our figures."""
        sizes = {"block_size": BLOCK_SIZE, "prompt_tokens": PROMPT_TOKENS, "num_sequences": NUM_SEQUENCES}
        reply = self._process.ask({"name": name, "num_blocks": num_blocks, **sizes})
        per = PROMPT_TOKENS // BLOCK_SIZE if name.endswith("a block") else 1
        return make_figure(name, num_blocks, reply["samples"], reply["loops"], per)

    def close(self) -> None:
        """End the process."""
        self._process.close()


def start_peer(wanted: bool) -> tuple[VllmPool | None, str]:
    """Return the peer, None if it is not wanted or not to be had, and what the table calls its column."""
    if not wanted:
        return None, "published elsewhere"
    try:
        peer = VllmPool()
    except PeerUnavailable as error:
        print(f"vLLM: not timed, {error}")
        return None, "published elsewhere"
    return peer, peer.name


def bench_all(peer: VllmPool | None) -> tuple[list[Figure], list[Figure]]:
    """Return our figures and the peer's, measured in turns."""
    ours: list[Figure] = []
    peers: list[Figure] = []
    for num_blocks in POOLS:
        for bench in (bench_blocks, bench_requests, bench_decode, bench_upkeep):
            found = bench(num_blocks)
            ours += found
            if peer:
                peers += [peer.figure(figure.name, num_blocks) for figure in found if figure.name in PUBLISHED_VLLM]
    return ours, peers


def row(figure: Figure, peers: Sequence[Figure]) -> tuple[object, ...]:
    measured = next((p for p in peers if (p.name, p.num_blocks) == (figure.name, figure.num_blocks)), None)
    theirs = measured.median if measured else PUBLISHED_VLLM.get(figure.name)
    return (
        figure.name,
        f"{figure.num_blocks:,}",
        figure.median,
        figure.p10,
        figure.median / figure.yardstick,
        TARGETS.get(figure.name, ""),
        theirs or "",
        measured.p10 if measured else "",
        f"{theirs / figure.median:.1f}x" if theirs else "",
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench cache", description=__doc__)
    parser.add_argument("--peers", action="store_true", help="time vLLM's cache manager too, in turns")
    peer, name = start_peer(parser.parse_args(argv).peers)
    figures, peers = bench_all(peer)
    columns = ("microseconds", "blocks", "median", "p10", "/ loop", "target", "vLLM", "p10", "ratio")
    title = f"Control plane, block size {BLOCK_SIZE}; vLLM: {name}"
    print_table(title, columns, [row(figure, peers) for figure in figures])
    result = {
        "block_size": BLOCK_SIZE,
        "unit": "microseconds",
        "figures": [asdict(figure) for figure in figures],
        "peer": name,
        "peers": [asdict(figure) for figure in peers],
        "published_vllm": PUBLISHED_VLLM,
        "targets": TARGETS,
    }
    print(f"written to {write_result('cache', result)}")
    if peer:
        peer.close()
    return 0
