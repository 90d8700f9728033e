"""Build caches and check what must hold of every one."""

from __future__ import annotations

from pagedkv.cache import CacheManager, PrefixExtras
from pagedkv.config import CacheConfig


class Clock:
    """A clock that stands until it is told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def make_cache(num_blocks=64, block_size=16, **options):
    config = {name: options.pop(name) for name in tuple(options) if name in CacheConfig.__slots__}
    return CacheManager(CacheConfig(num_blocks, block_size, **config), **options)


def write(cache, sequence_id, num_tokens, token_ids=None, layer=None):
    """Reserve and commit; return the reservation."""
    reservation = cache.reserve(sequence_id, num_tokens, token_ids=token_ids, layer=layer)
    cache.commit(reservation)
    return reservation


def run_prompt(cache, sequence_id, token_ids, **extras):
    """Allocate and write a whole prompt; return the number of cached tokens."""
    num_cached = cache.allocate(sequence_id, token_ids, extras=PrefixExtras(**extras)).num_cached_tokens
    if num_cached < len(token_ids):
        write(cache, sequence_id, len(token_ids) - num_cached)
    return num_cached


def table(cache, sequence_id):
    return list(cache.block_table(sequence_id))


def snapshot(cache):
    """Everything a caller can see, but for the counters of attempts."""
    return cache.usage(), cache.accounting(), [cache.sequence(name) for name in cache.sequence_ids()]


def assert_sound(cache):
    """Audit, and check that the states sum to the pool."""
    report = cache.audit()
    assert report.ok, report.findings
    usage = cache.usage()
    states = (usage.free, usage.cached, usage.private, usage.shared, usage.pinned, usage.in_flight)
    assert sum(states) == usage.total == cache.config.num_blocks
    assert_evicts_children_first(cache)


def assert_evicts_children_first(cache):
    """Check that no cached block would be evicted, or is to be had, before one whose digest is chained to its own."""
    gone = set()
    for block in cache.pool.cached:
        parent = cache.pool.published[block].parent
        assert isinstance(parent, bytes) or parent.block_id not in gone, (block, list(cache.pool.cached))
        gone.add(block)
    held = [entry for block, entry in cache.pool.published.items() if block not in gone]
    assert all(isinstance(entry.parent, bytes) or entry.parent.block_id not in gone for entry in held)


def assert_pool_clean(cache):
    """Check that nobody holds anything."""
    assert_sound(cache)
    usage = cache.usage()
    assert usage.free + usage.cached == usage.total
    assert usage.num_tokens == 0
