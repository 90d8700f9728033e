"""Times vLLM's CPU attention on its own paged cache; runs in vLLM's environment, one JSON line a request.

The cache rotates over layers that together exceed the processor's caches, its blocks are shuffled; the plan of a step
(`get_scheduler_metadata`), which all layers of a model share, is made once and not timed. Each shape is compared with
scaled_dot_product_attention before it is timed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import vllm
from torch.nn.functional import scaled_dot_product_attention
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}


class Problem:
    """One shape: a filled cache and the timed call."""

    def __init__(self, request: dict[str, Any], block_size: int) -> None:
        self.shape = request
        batch, context, heads, kv_heads, dim = (
            request[name] for name in ("batch", "context", "num_heads", "num_kv_heads", "head_dim")
        )
        self.dtype, self.query_len = getattr(torch, request["dtype"]), request["query_len"]
        self.scale = dim**-0.5
        per_sequence = -(-context // block_size)
        size = 2 * batch * context * kv_heads * dim * self.dtype.itemsize
        layers = max(1, -(-request["rotation_bytes"] // size))
        self.tables = torch.randperm(batch * per_sequence).to(torch.int32).view(batch, per_sequence)
        places = torch.arange(context)
        slots = self.tables[:, places // block_size].long() * block_size + places % block_size
        isa = _get_attn_isa(self.dtype, block_size, dim, "auto")
        self.key, self.value = (torch.randn(batch, context, kv_heads, dim).to(self.dtype) for _ in range(2))
        self.caches = []
        for _ in range(layers):
            cache = torch.zeros(batch * per_sequence, kv_heads, 2 * block_size, dim, dtype=self.dtype)
            self.caches.append(cache.chunk(2, dim=2))
            rows = (part.reshape(-1, kv_heads, dim) for part in (self.key, self.value))
            ops.cpu_attn_reshape_and_cache(*rows, *self.caches[-1], slots.reshape(-1), isa)
        self.query = torch.randn(batch * self.query_len, heads, dim).to(self.dtype)
        self.output = torch.empty_like(self.query)
        self.starts = torch.arange(0, batch * self.query_len + 1, self.query_len, dtype=torch.int32)
        self.lens = torch.full((batch,), context, dtype=torch.int32)
        self.plan = ops.cpu_attn_get_scheduler_metadata(
            batch, heads, kv_heads, dim, self.lens, self.dtype, self.starts, True, -1, isa, True
        )
        self.at = 0

    def seconds(self) -> float:
        self.at = (self.at + 1) % len(self.caches)
        start = time.perf_counter()
        ops.cpu_attention_with_kv_cache(
            query=self.query,
            key_cache=self.caches[self.at][0],
            value_cache=self.caches[self.at][1],
            output=self.output,
            query_start_loc=self.starts,
            seq_lens=self.lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.tables,
            softcap=0.0,
            scheduler_metadata=self.plan,
            s_aux=None,
        )
        return time.perf_counter() - start

    def error(self) -> float:
        """Return the largest difference from the formula in float32, of the first sequence."""
        self.seconds()
        query, key, value = (
            part.float().transpose(0, 1)[None] for part in (self.query[: self.query_len], self.key[0], self.value[0])
        )
        rows = torch.arange(key.shape[2] - self.query_len, key.shape[2])[:, None]
        mask = torch.arange(key.shape[2])[None, :] <= rows
        expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
        return float((self.output[: self.query_len].float() - expected).abs().max())


def main() -> None:
    block_size = int(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print where they like
    current_platform.import_kernels()
    print(json.dumps({"name": f"vLLM {vllm.__version__}, block size {block_size}"}), file=replies)
    problem: Problem | None = None
    with torch.inference_mode():
        for line in sys.stdin:
            request = json.loads(line)
            if "shape" in request:
                torch.set_num_threads(request["num_threads"])
                problem = None  # free its cache before the next one is made
                problem = Problem(request["shape"], block_size)
                error = problem.error()
                assert error <= TOLERANCE[problem.dtype], f"{request['shape']}: error {error:.1e}"
            assert problem is not None
            print(json.dumps({"seconds": problem.seconds()}), file=replies)


if __name__ == "__main__":
    main()
