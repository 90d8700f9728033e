"""Times PyTorch's attention for the attention benchmarks; runs in the peers' own environment, one JSON line a request.

Its best form for grouped heads: the group folded into the query length (decode), which reads K and V once. The keys
rotate over copies that together exceed the caches, as the pool's layers do. Prefill is the causal form, on a context
with an explicit mask.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


class Problem:
    """One shape: prepared tensors and the timed call."""

    def __init__(self, request: dict[str, Any]) -> None:
        batch, context, heads, kv_heads, dim = (
            request[name] for name in ("batch", "context", "num_heads", "num_kv_heads", "head_dim")
        )
        dtype = getattr(torch, request["dtype"])
        query_len = request["query_len"]
        size = 2 * batch * context * kv_heads * dim * dtype.itemsize
        copies = max(1, -(-request["rotation_bytes"] // size))
        shape = (batch, kv_heads, context, dim)
        self.keys = [torch.randn(shape).to(dtype) for _ in range(copies)]
        self.values = [torch.randn(shape).to(dtype) for _ in range(copies)]
        self.at = 0
        group = heads // kv_heads
        self.options: dict[str, Any] = {}
        if query_len == 1:
            self.query = torch.randn(batch, kv_heads, group, dim).to(dtype)
            return
        self.query = torch.randn(batch, heads, query_len, dim).to(dtype)
        self.options = {"enable_gqa": group > 1}
        if query_len == context:
            self.options["is_causal"] = True
        else:
            rows = torch.arange(context - query_len, context)[:, None]
            self.options["attn_mask"] = torch.arange(context)[None, :] <= rows

    def seconds(self) -> float:
        self.at = (self.at + 1) % len(self.keys)
        start = time.perf_counter()
        scaled_dot_product_attention(self.query, self.keys[self.at], self.values[self.at], **self.options)
        return time.perf_counter() - start


def main() -> None:
    print(json.dumps({"ready": True, "name": f"PyTorch {torch.__version__} SDPA"}), flush=True)
    problem: Problem | None = None
    with torch.inference_mode():
        for line in sys.stdin:
            request = json.loads(line)
            if "shape" in request:
                torch.set_num_threads(request["num_threads"])
                problem = Problem(request["shape"])
            assert problem is not None
            print(json.dumps({"seconds": problem.seconds()}), flush=True)


if __name__ == "__main__":
    main()
