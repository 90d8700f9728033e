"""Attention over the page pool: plans a batch, hands the kernel its arguments, returns new arrays."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import AttentionBatch, AttentionParams, AttentionResult
from pagedkv.compute.cpu import attention_args as at
from pagedkv.compute.cpu import (
    attention_bytes,
    attention_bytes_tiles,
    attention_kernel,
    attention_packed,
    attention_softmax,
    attention_steps,
    attention_tiles,
    simd,
    threads,
    validation,
)
from pagedkv.compute.cpu.attention_plan import AttentionPlan, PlanLimits, make_plan
from pagedkv.compute.cpu.attention_replay import AttentionReplays
from pagedkv.compute.cpu.compile_cache import Kernel, compile_kernel
from pagedkv.compute.cpu.features import Isa, has_byte_dots
from pagedkv.compute.cpu.threads import WorkerPool, address_of
from pagedkv.compute.layout import KvLayout
from pagedkv.dtypes import DType

POOL_KINDS: Final = {
    DType.FLOAT32: simd.KIND_F32,
    DType.FLOAT16: simd.KIND_F16,
    DType.BFLOAT16: simd.KIND_BF16,
    DType.INT8: simd.KIND_I8,
    DType.FLOAT8_E4M3: simd.KIND_E4M3,
}
ARRAY_KINDS: Final = {
    np.dtype(np.float32): simd.KIND_F32,
    np.dtype(np.float16): simd.KIND_F16,
    np.dtype(ml_dtypes.bfloat16): simd.KIND_BF16,
}

_LEAST_UNIT_ROWS, _MOST_UNIT_ROWS = 128, 256  # of a prefill item: keys are transposed once for all of them
_UNIT_ELEMENTS: Final = 1 << 15  # of the rows' queries, which stay in the second-level cache with scores and sums
_CHUNK_TOKENS: Final = {4: 64, 2: 128, 1: 128}  # by the bytes of an element
_NO_WINDOW: Final = 1 << 40
_CALL_WORDS: Final = slice(at.POOL // 8, at.LSE // 8 + 1)  # what differs between two layers of a step
_LOG2_E: Final = math.log2(math.e)
_SOURCES: Final = tuple(
    str(module.__file__)
    for module in (
        at,
        attention_bytes,
        attention_bytes_tiles,
        attention_kernel,
        attention_packed,
        attention_softmax,
        attention_steps,
        attention_tiles,
        threads,
    )
)


def compile_attention(isa: Isa, dtype: DType) -> Kernel:
    """Compile or load the attention kernel for a pool of this dtype."""
    config = (isa.width, POOL_KINDS[dtype], dtype is DType.INT8 and has_byte_dots(isa))
    function = attention_kernel.make_attention_kernel(*config)
    return compile_kernel(function, f"attend-{isa.name}-{dtype}", config, _SOURCES)


class Attention:
    """Runs attention over one pool. The plan of the last batch is kept: the layers of a step share it."""

    def __init__(self, layout: KvLayout, pool_address: int, kernel: Kernel, workers: WorkerPool) -> None:
        self._layout, self._pool_address = layout, pool_address
        self._kernel, self._workers = kernel, workers
        group = layout.shape.group_size
        unit_rows = min(_MOST_UNIT_ROWS, max(_LEAST_UNIT_ROWS, _UNIT_ELEMENTS // layout.shape.head_dim))
        self._max_rows = -(-max(group, unit_rows) // 16) * 16
        self._chunk_tokens = max(_CHUNK_TOKENS[layout.shape.dtype.itemsize], layout.block_size)
        self._limits = PlanLimits(
            block_size=layout.block_size,
            chunk_tokens=self._chunk_tokens,
            num_kv_heads=layout.shape.num_kv_heads,
            unit_queries=max(1, unit_rows // group),
            num_threads=workers.num_threads,
        )
        size = attention_kernel.scratch_bytes(self._max_rows, layout.shape.head_dim, self._chunk_tokens)
        self._scratch_bytes = size
        self._scratch = np.zeros(workers.num_threads * size + 64, np.uint8)
        self._partials = np.zeros(0, np.float32)
        self._plan: AttentionPlan | None = None
        self._lock = threading.Lock()
        self._layer_bytes = layout.layer_stride * layout.shape.dtype.itemsize
        self._fixed_args = self._make_fixed_args()
        self._template: tuple[AttentionPlan, tuple[float | None, float | None], npt.NDArray[np.int64]] | None = None
        self._replays = AttentionReplays(self._renew_plan)

    def run(
        self,
        layer: int,
        queries: Any,
        batch: AttentionBatch,
        params: AttentionParams,
        check_batch: Callable[[AttentionBatch, int | None], None],
    ) -> AttentionResult:
        """Attend; all arguments but a new batch have passed validation. Any thread may call; calls exclude each other.

        A batch that is not the last one again goes through `check_batch` first.
        """
        with self._lock:
            is_known = self._plan is not None and self._plan.serves(batch, params.window)
            if not is_known:
                check_batch(batch, params.window)
            validation.check_num_queries(batch, queries)
            return self._run(layer, queries, batch, params, is_known)

    def _run(
        self, layer: int, queries: Any, batch: AttentionBatch, params: AttentionParams, is_known: bool
    ) -> AttentionResult:
        plan = self._plan
        if not is_known or plan is None:
            plan = self._plan = make_plan(batch, params.window, self._limits)
        given, recording = queries, self._workers.recording
        queries = np.ascontiguousarray(given)
        empty = _empty if recording is None else recording.take
        output, lse = empty(queries.shape), empty(queries.shape[:2])
        if len(plan.records):
            slopes, sinks = _in_log2(params.alibi_slopes), _in_log2(params.sinks)
            args = self._args(params, plan)
            args[_CALL_WORDS] = (
                self._pool_address + layer * self._layer_bytes,
                address_of(queries),
                ARRAY_KINDS[queries.dtype],
                address_of(output),
                address_of(lse),
            )
            if slopes is not None:
                args[at.SLOPES // 8] = address_of(slopes)
            if sinks is not None:
                args[at.SINKS // 8] = address_of(sinks)
            self._workers.run(self._kernel, args, (slopes, sinks))
            if recording is not None:
                self._replays.note(recording, batch, params.window, args)
        if recording is not None and (queries is not given or not len(plan.records)):
            recording.give_up()
        return AttentionResult(output, lse)

    def _renew_plan(self, batch: AttentionBatch, window: int | None) -> tuple[AttentionPlan, npt.NDArray[np.float32]]:
        """Return a plan of the batch, which the next calls may share, and the memory of its partial results."""
        validation.check_batch(self._layout, batch, window)
        self._plan = plan = make_plan(batch, window, self._limits)
        self._partials_address(plan.partial_queries)
        return plan, self._partials

    def _args(self, params: AttentionParams, plan: AttentionPlan) -> npt.NDArray[np.int64]:
        """Return argument words, all but _CALL_WORDS and what only some calls have, with the plan's counters behind."""
        chosen = params.scale, params.soft_cap
        if self._template is None or self._template[0] is not plan or self._template[1] != chosen:
            self._template = plan, chosen, self._make_args(params, plan)
        args = self._template[2].copy()
        args[at.COUNTERS // 8] = address_of(args) + 8 * at.NUM_WORDS
        return args

    def _make_args(self, params: AttentionParams, plan: AttentionPlan) -> npt.NDArray[np.int64]:
        args = np.concatenate([self._fixed_args, plan.counters])
        scale = self._layout.shape.head_dim**-0.5 if params.scale is None else params.scale
        floats = args.view(np.float64)
        floats[at.SCORE_SCALE // 8] = scale / params.soft_cap if params.soft_cap else scale * _LOG2_E
        floats[at.SOFT_CAP // 8] = params.soft_cap * _LOG2_E if params.soft_cap else 0.0
        args[1] = plan.num_items
        args[at.NUM_CLAIMED_EARLY // 8] = plan.num_claimed_early
        args[at.ITEMS // 8] = address_of(plan.records)
        args[at.WINDOW // 8] = _NO_WINDOW if plan.window is None else plan.window
        args[at.PARTIALS // 8] = self._partials_address(plan.partial_queries)
        return args

    def _make_fixed_args(self) -> npt.NDArray[np.int64]:
        """Return the argument words that every call shares."""
        layout, shape = self._layout, self._layout.shape
        item = shape.dtype.itemsize
        words = {
            at.NUM_KV_HEADS: shape.num_kv_heads,
            at.GROUP_SIZE: shape.group_size,
            at.HEAD_DIM: shape.head_dim,
            at.BLOCK_SHIFT: layout.block_size.bit_length() - 1,
            at.BLOCK_BYTES: layout.block_bytes,
            at.VALUE_BYTES: layout.value_stride * item,
            at.HEAD_BYTES: layout.head_stride * item,
            at.SCALE_BYTES: layout.scale_offset * item,
            at.CHUNK_TOKENS: self._chunk_tokens,
            at.MAX_ROWS: self._max_rows,
            at.SCRATCH: -(-self._scratch.ctypes.data // 64) * 64,
            at.SCRATCH_BYTES: self._scratch_bytes,
        }
        args = np.zeros(at.NUM_WORDS, np.int64)
        for offset, value in words.items():
            args[offset // 8] = value
        return args

    def _partials_address(self, partial_queries: int) -> int:
        shape = self._layout.shape
        needed = partial_queries * shape.num_heads * (shape.head_dim + 2)
        if self._partials.size < needed:
            self._partials = np.zeros(needed, np.float32)
            self._template = None
        return address_of(self._partials)


def _in_log2(values: npt.NDArray[Any] | None) -> npt.NDArray[np.float32] | None:
    return None if values is None else (np.asarray(values, np.float64) * _LOG2_E).astype(np.float32)


def _empty(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return np.empty(shape, np.float32)
