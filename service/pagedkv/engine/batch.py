"""Lay a step's chunks out as the arrays that the model and the kernels take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedkv.cache import CacheManager
from pagedkv.compute.backend import AttentionBatch, pad_block_tables
from pagedkv.engine.scheduler import ScheduledChunk
from pagedkv.model import StepInput


def build_step_input(chunks: Sequence[ScheduledChunk], cache: CacheManager) -> StepInput:
    """Return the step's arrays, chunk after chunk; logits are asked for where a chunk reaches its last token."""
    block_size = cache.config.block_size
    starts = np.array([chunk.reservation.start for chunk in chunks], dtype=np.int64)
    lengths = np.array([chunk.reservation.num_tokens for chunk in chunks], dtype=np.int64)
    query_starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    positions = np.arange(query_starts[-1], dtype=np.int64) + np.repeat(starts - query_starts[:-1], lengths)
    block_tables = pad_block_tables([cache.block_table(chunk.request.request_id) for chunk in chunks])
    rows = np.repeat(np.arange(len(chunks)), lengths)
    slots = block_tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    token_ids = np.concatenate([_chunk_token_ids(chunk) for chunk in chunks])
    last_rows = query_starts[1:] - 1
    return StepInput(
        token_ids=token_ids,
        positions=positions.astype(np.int32),
        slot_mapping=slots,
        batch=AttentionBatch(block_tables, (starts + lengths).astype(np.int32), query_starts),
        copies=[copy for chunk in chunks for copy in chunk.reservation.copies],
        logit_rows=last_rows[[chunk.produces_token for chunk in chunks]],
    )


def _chunk_token_ids(chunk: ScheduledChunk) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    start = chunk.reservation.start
    return np.array(chunk.request.token_ids[start : start + chunk.reservation.num_tokens], dtype=np.int32)
