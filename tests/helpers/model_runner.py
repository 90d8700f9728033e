"""Run a loaded model step by step over a page pool, without a cache or an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from helpers.numpy_dense import NumpyBackend
from pagedkv.compute.backend import AttentionBatch
from pagedkv.compute.layout import KvLayout
from pagedkv.model import LoadedModel, StepInput, load_model, read_model_config

BLOCK_SIZE = 16


def load_on_numpy(path: Path, *, num_blocks: int = 16, dtype: type = np.float32) -> LoadedModel:
    """Load a model on the NumPy reference backend."""
    shape = read_model_config(path).kv_shape()
    return load_model(path, NumpyBackend(KvLayout(shape, num_blocks, BLOCK_SIZE), dtype))  # type: ignore[arg-type]


def forward(
    model: LoadedModel,
    token_ids: Sequence[int],
    start: int = 0,
    *,
    rows: Sequence[int] | None = None,
    table: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    backend: Any = None,
) -> np.ndarray:
    """Compute one sequence's tokens [start, start + n) and return logits of `rows` (the last by default)."""
    count = len(token_ids)
    backend = backend or model.decoder._ops
    blocks = np.arange(backend.layout.num_blocks, dtype=np.int32) if table is None else np.array(table, np.int32)
    places = np.arange(start, start + count)
    slots = blocks[places // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + places % BLOCK_SIZE
    step = StepInput(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(places if positions is None else positions, np.int32),
        slot_mapping=slots,
        batch=AttentionBatch(blocks[None], np.array([start + count], np.int32), np.array([0, count], np.int32)),
        copies=[],
        logit_rows=np.array([count - 1] if rows is None else rows, np.int32),
    )
    return backend.submit(lambda: backend.to_host(model.decoder.forward(step))).result()


def generate_greedily(model: LoadedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the tokens of a greedy decode, one step a token."""
    logits, position, output = forward(model, prompt), len(prompt), []
    for _ in range(num_tokens):
        output.append(int(logits[0].argmax()))
        logits = forward(model, output[-1:], position)
        position += 1
    return output
