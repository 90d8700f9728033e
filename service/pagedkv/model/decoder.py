"""The Llama-family decoder, written once against the backend's operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedkv.compute.backend import AttentionBatch, AttentionParams, Backend, Int32Array, Int64Array, Tensor
from pagedkv.model.config import ModelConfig
from pagedkv.model.weights import DecoderWeights, LayerWeights, Projection


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step over T new tokens of any mix of sequences; `batch` says which rows belong to whom."""

    token_ids: Int32Array  # [T]
    positions: Int32Array  # [T]
    slot_mapping: Int64Array  # [T]
    batch: AttentionBatch
    copies: Sequence[tuple[int, int]]  # block copies (source, destination) to make first
    logit_rows: Int32Array  # [R], rows of the step whose logits are wanted; may be empty


class Decoder:
    """A loaded model. `forward` runs inside a backend job and mutates nothing but the page pool."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, backend: Backend) -> None:
        self.config = config
        self._weights = weights
        self._ops = backend
        self._inv_freq = config.rope.inv_freq()
        self._params = [AttentionParams(window=window) for window in config.windows]

    def forward(self, step: StepInput) -> Tensor:
        """Write the step's keys and values into the pool and return logits [R, vocab_size] float32."""
        ops = self._ops
        if len(step.copies):
            ops.copy_blocks(step.copies)
        x = ops.embedding(self._weights.embedding, step.token_ids)
        for layer, weights in enumerate(self._weights.layers):
            attended = self._attend(layer, weights, x, step)
            if layer == len(self._weights.layers) - 1:  # from here on only the rows asked for matter
                if not len(step.logit_rows):
                    return ops.from_host(np.empty((0, self.config.vocab_size), np.float32))
                x, attended = ops.take_rows(x, step.logit_rows), ops.take_rows(attended, step.logit_rows)
            x = ops.add(x, self._project(attended, weights.o))
            x = ops.add(x, self._mlp(weights, x))
        x = ops.rms_norm(x, self._weights.norm, self.config.rms_epsilon)
        return ops.linear(x, self._weights.head)

    def _attend(self, layer: int, weights: LayerWeights, x: Tensor, step: StepInput) -> Tensor:
        """Return what the layer's heads read [T, num_heads * head_dim]."""
        ops, config = self._ops, self.config
        normed = ops.rms_norm(x, weights.attention_norm, config.rms_epsilon)
        q = self._heads(normed, weights.q, config.num_heads, weights.q_norm)
        k = self._heads(normed, weights.k, config.num_kv_heads, weights.k_norm)
        v = self._heads(normed, weights.v, config.num_kv_heads, None)
        for rotated in (q, k):
            ops.rope(
                rotated,
                step.positions,
                self._inv_freq,
                interleaved=config.rope.interleaved,
                scale=config.rope.scale,
            )
        ops.write_kv(layer, k, v, step.slot_mapping)
        output = ops.attend(layer, q, step.batch, self._params[layer]).output
        return output.reshape((len(step.token_ids), config.num_heads * config.head_dim))

    def _heads(self, x: Tensor, projection: Projection, num_heads: int, norm: Tensor | None) -> Tensor:
        """Project to [T, num_heads, head_dim] and, if the model does so, normalise each head."""
        heads = self._project(x, projection).reshape((x.shape[0], num_heads, self.config.head_dim))
        return heads if norm is None else self._ops.rms_norm(heads, norm, self.config.rms_epsilon)

    def _mlp(self, weights: LayerWeights, x: Tensor) -> Tensor:
        normed = self._ops.rms_norm(x, weights.mlp_norm, self.config.rms_epsilon)
        gate, up = self._project(normed, weights.gate), self._project(normed, weights.up)
        return self._project(self._ops.silu_mul(gate, up), weights.down)

    def _project(self, x: Tensor, projection: Projection) -> Tensor:
        return self._ops.linear(x, projection.weight, projection.bias)
