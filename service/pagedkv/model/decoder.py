"""The Llama-family decoder, written once against the backend's operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import AttentionBatch, AttentionParams, Backend, Int32Array, Int64Array, Tensor
from pagedkv.model.config import ModelConfig
from pagedkv.model.weights import DecoderWeights, LayerWeights, Projection

_LEAST_WIDTH: Final = 32  # blocks
_PADDING: Final = (0, 0, -1, 0, 0)  # what `StepInput.arrays` hold where there is no sequence


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step over T new tokens of any mix of sequences; `batch` says which rows belong to whom."""

    token_ids: Int32Array  # [T]
    positions: Int32Array  # [T]
    slot_mapping: Int64Array  # [T]
    batch: AttentionBatch
    copies: Sequence[tuple[int, int]]  # block copies (source, destination) to make first
    logit_rows: Int32Array  # [R], rows of the step whose logits are wanted; may be empty

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token and wants its logits."""
        num_tokens = len(self.token_ids)
        every_row = np.arange(num_tokens + 1)
        return np.array_equal(self.batch.query_starts, every_row) and np.array_equal(self.logit_rows, every_row[:-1])

    def arrays(self, *, is_decode: bool) -> list[npt.NDArray[Any]]:
        """Return the step's values; its block tables' width is rounded to powers of two: few shapes occur."""
        tables = self.batch.block_tables
        num_sequences, width = tables.shape
        padded = np.zeros((num_sequences, max(_LEAST_WIDTH, 1 << (width - 1).bit_length())), tables.dtype)
        padded[:, :width] = tables
        values: list[npt.NDArray[Any]] = [self.token_ids, self.positions, self.slot_mapping]
        values += [padded, self.batch.context_lens]
        return values if is_decode else [*values, self.batch.query_starts, self.logit_rows]

    @classmethod
    def of_arrays(cls, arrays: Sequence[npt.NDArray[Any]]) -> StepInput:
        """Return the step that `arrays` describe."""
        token_ids, positions, slot_mapping, tables, context_lens, *others = arrays
        rows = np.arange(len(token_ids) + 1, dtype=np.int32)
        query_starts, logit_rows = others or (rows, rows[:-1])
        return cls(
            token_ids, positions, slot_mapping, AttentionBatch(tables, context_lens, query_starts), (), logit_rows
        )


class Decoder:
    """A loaded model. `forward` runs inside a backend job and mutates nothing but the page pool."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, backend: Backend) -> None:
        self.config = config
        self._weights = weights
        self._ops = backend
        self._rotation = config.rope.rotation()
        self._params = [AttentionParams(window=window) for window in config.windows]

    def forward(self, step: StepInput) -> Tensor:
        """Write the step's keys and values into the pool and return logits [R, vocab_size] float32."""
        if len(step.copies):
            self._ops.copy_blocks(step.copies)
        if step.is_decode:
            arrays = step.arrays(is_decode=True)
            return self._ops.repeat((self, "decode"), arrays, self._decode, self._logits, _PADDING)
        if self._ops.repeats_prompts:
            return self._ops.repeat((self, "prompts"), step.arrays(is_decode=False), self._read_prompts, self._logits)
        return self._logits(self._hidden(step, is_decode=False))

    def _decode(self, arrays: Sequence[npt.NDArray[Any]]) -> Tensor:
        return self._hidden(StepInput.of_arrays(arrays), is_decode=True)

    def _read_prompts(self, arrays: Sequence[npt.NDArray[Any]]) -> Tensor:
        return self._hidden(StepInput.of_arrays(arrays), is_decode=False)

    def _logits(self, hidden: Tensor) -> Tensor:
        if hidden is None:
            return self._ops.from_host(np.empty((0, self.config.vocab_size), np.float32))
        return self._ops.linear(hidden, self._weights.head)

    def _hidden(self, step: StepInput, *, is_decode: bool) -> Tensor:
        """Write the step's keys and values; return the normalised last states of the rows asked for, None if none."""
        ops = self._ops
        x = ops.embedding(self._weights.embedding, step.token_ids)
        layers, epsilon = self._weights.layers, self.config.rms_epsilon
        normed = ops.rms_norm(x, layers[0].attention_norm, epsilon, _attention_weights(layers[0]))
        following = [(layer.attention_norm, _attention_weights(layer)) for layer in layers[1:]]
        following.append((self._weights.norm, [self._weights.head]))
        for layer, (weights, (next_norm, next_weights)) in enumerate(zip(layers, following, strict=True)):
            attended = self._attend(layer, weights, normed, step)
            if layer == len(layers) - 1 and not is_decode:  # only the rows asked for matter now
                if not len(step.logit_rows):
                    return None
                x, attended = ops.take_rows(x, step.logit_rows), ops.take_rows(attended, step.logit_rows)
            attended = self._project(attended, weights.o)
            mlp_weights = [weights.gate.weight, weights.up.weight]
            normed = ops.add_rms_norm(x, attended, weights.mlp_norm, epsilon, mlp_weights)
            normed = ops.add_rms_norm(x, self._mlp(weights, normed), next_norm, epsilon, next_weights)
        return normed

    def _attend(self, layer: int, weights: LayerWeights, normed: Tensor, step: StepInput) -> Tensor:
        """Write the layer's keys and values; return what its heads read [T, num_heads * head_dim]."""
        ops, config = self._ops, self.config
        projections = (weights.q, weights.k, weights.v)
        q, k, v = self._project_many(normed, projections)
        q = self._heads(q, config.num_heads, weights.q_norm)
        k = self._heads(k, config.num_kv_heads, weights.k_norm)
        v = self._heads(v, config.num_kv_heads, None)
        ops.rope_write_kv(layer, q, k, v, step.positions, step.slot_mapping, self._rotation)
        output = ops.attend(layer, q, step.batch, self._params[layer]).output
        return output.reshape((len(step.token_ids), config.num_heads * config.head_dim))

    def _heads(self, x: Tensor, num_heads: int, norm: Tensor | None) -> Tensor:
        """Return x as [T, num_heads, head_dim], each head normalised if the model does so."""
        heads = x.reshape((x.shape[0], num_heads, self.config.head_dim))
        return heads if norm is None else self._ops.rms_norm(heads, norm, self.config.rms_epsilon)

    def _mlp(self, weights: LayerWeights, normed: Tensor) -> Tensor:
        gate, up = self._project_many(normed, (weights.gate, weights.up))
        return self._project(self._ops.silu_mul(gate, up, [weights.down.weight]), weights.down)

    def _project_many(self, x: Tensor, projections: Sequence[Projection]) -> list[Tensor]:
        return self._ops.linear_many(x, [p.weight for p in projections], [p.bias for p in projections])

    def _project(self, x: Tensor, projection: Projection) -> Tensor:
        return self._ops.linear(x, projection.weight, projection.bias)


def _attention_weights(layer: LayerWeights) -> list[Tensor]:
    return [layer.q.weight, layer.k.weight, layer.v.weight]
