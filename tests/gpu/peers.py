"""PyTorch and FlashInfer beside our kernels; each figure is None where the library is missing or fails."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from tests.gpu.problem import Problem


def load_torch() -> Any:
    """Return PyTorch with a working GPU, else None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _median(torch: Any, work: Callable[[], Any], repeats: int) -> float:
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    work()
    samples = []
    for _ in range(repeats):
        for value in (0, 1, 2):
            flush.fill_(value)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3)
    return statistics.median(samples)


def matrix_rate(torch: Any, repeats: int, size: int = 8192) -> float | None:
    """Return operations a second of a square float16 product."""
    if torch is None:
        return None
    a, b = (torch.randn(size, size, dtype=torch.float16, device="cuda") for _ in range(2))
    return 2 * size**3 / _median(torch, lambda: a @ b, repeats)


def _dtype(torch: Any, problem: Problem) -> Any:
    return getattr(torch, str(problem.dtype.value))


def sdpa_seconds(torch: Any, problem: Problem, repeats: int) -> float | None:
    """Return the time of scaled_dot_product_attention on contiguous keys and values of the same shape."""
    if torch is None or problem.dtype.is_quantized:
        return None
    batch, context, queries = len(problem.context_lens), max(problem.context_lens), max(problem.query_lens)
    sizes = ((problem.num_heads, queries), (problem.num_kv_heads, context), (problem.num_kv_heads, context))
    tensors = [
        torch.zeros(batch, heads, length, problem.head_dim, dtype=_dtype(torch, problem), device="cuda")
        for heads, length in sizes
    ]
    attention = torch.nn.functional.scaled_dot_product_attention
    try:
        return _median(torch, lambda: attention(*tensors, is_causal=queries > 1, enable_gqa=True), repeats)
    except (RuntimeError, TypeError):
        return None


def flashinfer_seconds(torch: Any, problem: Problem, repeats: int) -> float | None:
    """Return the time of FlashInfer's paged decode; None for prefill."""
    try:
        import flashinfer
    except ImportError:
        return None
    if torch is None or problem.dtype.is_quantized or max(problem.query_lens) > 1:
        return None
    batch, blocks = len(problem.context_lens), problem.layout.num_blocks
    per_sequence = blocks // batch
    dtype = _dtype(torch, problem)
    try:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "HND"
        )
        index = torch.arange(blocks, dtype=torch.int32, device="cuda")
        starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * per_sequence
        last = torch.full((batch,), problem.block_size, dtype=torch.int32, device="cuda")
        heads = (problem.num_heads, problem.num_kv_heads, problem.head_dim, problem.block_size)
        wrapper.plan(starts, index, last, *heads, data_type=dtype, q_data_type=dtype)
        pages = (blocks, 2, problem.num_kv_heads, problem.block_size, problem.head_dim)
        cache = torch.zeros(pages, dtype=dtype, device="cuda")
        query = torch.zeros(batch, problem.num_heads, problem.head_dim, dtype=dtype, device="cuda")
        return _median(torch, lambda: wrapper.run(query, cache), repeats)
    except Exception:  # a peer's own failure must not end the check
        return None
