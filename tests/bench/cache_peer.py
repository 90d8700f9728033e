"""Times vLLM's block pool and cache manager for the cache benchmark; runs in vLLM's own environment.

Reads {"name", "num_blocks", "block_size", "prompt_tokens", "num_sequences"} a line and answers {"samples", "loops"}
in microseconds. The work is that of the benchmark's own figures of the same names, through vLLM's own calls: hash,
look up, allocate, cache, free. Device work is not part of it.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import vllm
from cache_clock import time_calls
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

VOCABULARY = 50_000
Calls = list[Callable[[], object]]


class Requests:
    """Makes vLLM's requests; their full blocks are hashed as they are made, as vLLM does."""

    def __init__(self, block_size: int) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)
        self._sampling = SamplingParams(max_tokens=1_000)
        self._sampling.update_from_generation_config({}, eos_token_id=VOCABULARY)

    def make(self, name: str, token_ids: list[int]) -> Request:
        return Request(name, token_ids, self._sampling, None, block_hasher=self._hasher)


def make_manager(num_blocks: int, block_size: int) -> KVCacheManager:
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
    config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, 1 << 20, scheduler_block_size=block_size, hash_block_size=block_size)


def block_calls(request: dict[str, Any]) -> Calls:
    """Take and release a prompt's blocks at the pool's own level."""
    pool = BlockPool(request["num_blocks"], True, request["block_size"])
    count = request["prompt_tokens"] // request["block_size"]
    return [lambda: pool.free_blocks(reversed(pool.get_new_blocks(count)))] * 500


def prompt_calls(request: dict[str, Any]) -> Calls:
    """A request that nothing is cached of, evicting from a full cache."""
    rng, length = random.Random(0), request["prompt_tokens"]
    manager = make_manager(request["num_blocks"], request["block_size"])
    requests = Requests(request["block_size"])

    def serve(token_ids: list[int]) -> None:
        made = requests.make("request", token_ids)
        blocks, num_computed, _ = manager.get_computed_blocks(made)
        assert manager.allocate_slots(made, length - num_computed, num_computed, blocks) is not None
        manager.free(made)

    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for _ in range(200)]
    for _ in range(request["num_blocks"] * request["block_size"] // length + 1):
        serve([rng.randrange(VOCABULARY) for _ in range(length)])
    return [lambda ids=ids: serve(ids) for ids in prompts]


def decode_calls(request: dict[str, Any]) -> Calls:
    """One token more for each running sequence; their lengths are spread over the block."""
    manager = make_manager(request["num_blocks"], request["block_size"])
    requests, running = Requests(request["block_size"]), []
    for index in range(request["num_sequences"]):
        made = requests.make(str(index), [index] * (20 + index % request["block_size"]))
        assert manager.allocate_slots(made, made.num_tokens) is not None
        made.num_computed_tokens = made.num_tokens
        running.append(made)

    def step() -> None:
        for made in running:
            made.append_output_token_ids(7)
            assert manager.allocate_slots(made, 1) is not None
            made.num_computed_tokens += 1

    return [step] * 150


CALLS = {
    "allocate + free, a block": block_calls,
    "512-token request": prompt_calls,
    "one token for 64 sequences": decode_calls,
}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print where they like
    print(json.dumps({"name": f"vLLM {vllm.__version__}"}), file=replies)
    for line in sys.stdin:
        request = json.loads(line)
        samples, loops = time_calls(CALLS[request["name"]](request))
        print(json.dumps({"samples": samples, "loops": loops}), file=replies)


if __name__ == "__main__":
    main()
