"""Find each weight of a decoder under its file's name, check its shape, and hand it to the backend."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from pagedkv.compute.backend import DenseOps, Tensor, WeightData
from pagedkv.errors import InvalidModelFile, UnsupportedModel
from pagedkv.model.config import ModelConfig
from pagedkv.model.gguf_file import kind_bytes
from pagedkv.model.mapped_file import TensorEntry
from pagedkv.model.shown import shown

_FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


class WeightSource(Protocol):
    """Named tensors of a file or of a directory of files."""

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Entry of every tensor by name."""

    def path_of(self, name: str) -> Path:
        """Return the file that holds a tensor, or would."""

    def weight(self, name: str) -> WeightData:
        """Return a tensor as stored, without a copy."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix and, in some models, its bias."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one decoder layer; `q_norm` and `k_norm` exist in Qwen3 only."""

    attention_norm: Tensor
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp_norm: Tensor
    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights, as the backend's tensors. With tied embeddings `head` is the same object as `embedding`."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


@dataclass(frozen=True, slots=True)
class Conversion:
    """Matrices of one kind that loading turns into another."""

    kind: str
    into: str
    num_tensors: int
    stored_bytes: int
    loaded_bytes: int

    def plus(self, stored_bytes: int, loaded_bytes: int) -> Conversion:
        """Return the conversion with one more matrix."""
        stored, loaded = self.stored_bytes + stored_bytes, self.loaded_bytes + loaded_bytes
        return Conversion(self.kind, self.into, self.num_tensors + 1, stored, loaded)


@dataclass(frozen=True, slots=True)
class WeightNames:
    """How a format names its tensors: `layer` holds the part before `.weight` with `{}` for the layer's index."""

    embedding: str
    norm: str
    head: str
    layer: Mapping[str, str]
    ignored: tuple[str, ...]  # tensors that hold what the configuration already says


GGUF_NAMES = WeightNames(
    "token_embd.weight",
    "output_norm.weight",
    "output.weight",
    {
        "attention_norm": "blk.{}.attn_norm",
        "q": "blk.{}.attn_q",
        "k": "blk.{}.attn_k",
        "v": "blk.{}.attn_v",
        "o": "blk.{}.attn_output",
        "q_norm": "blk.{}.attn_q_norm",
        "k_norm": "blk.{}.attn_k_norm",
        "mlp_norm": "blk.{}.ffn_norm",
        "gate": "blk.{}.ffn_gate",
        "up": "blk.{}.ffn_up",
        "down": "blk.{}.ffn_down",
    },
    ("rope_freqs.weight",),
)
HF_NAMES = WeightNames(
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    {
        "attention_norm": "model.layers.{}.input_layernorm",
        "q": "model.layers.{}.self_attn.q_proj",
        "k": "model.layers.{}.self_attn.k_proj",
        "v": "model.layers.{}.self_attn.v_proj",
        "o": "model.layers.{}.self_attn.o_proj",
        "q_norm": "model.layers.{}.self_attn.q_norm",
        "k_norm": "model.layers.{}.self_attn.k_norm",
        "mlp_norm": "model.layers.{}.post_attention_layernorm",
        "gate": "model.layers.{}.mlp.gate_proj",
        "up": "model.layers.{}.mlp.up_proj",
        "down": "model.layers.{}.mlp.down_proj",
    },
    ("rotary_emb.inv_freq",),
)


class WeightPlan:
    """The tensors a model needs, found and checked; nothing of their data is read yet.

    Raises InvalidModelFile naming a tensor that is missing or of the wrong shape, UnsupportedModel naming one that
    this architecture does not have. A tied model that also stores an output head uses the embedding, as its flag
    says; if the head differs, a warning tells so.
    """

    def __init__(self, path: Path, config: ModelConfig, source: WeightSource, names: WeightNames) -> None:
        self._path, self._config, self._source, self._names = path, config, source, names
        self._tensors = source.tensors
        self._used: set[str] = set()
        self._unloaded: set[str] = set()
        vocabulary = (config.vocab_size, config.hidden_size)
        self._require(names.embedding, vocabulary)
        self._require(names.norm, (config.hidden_size,))
        if config.tied_embeddings:
            self._check_tied_head()
        else:
            self._require(names.head, vocabulary)
        for layer in range(config.num_layers):
            self._check_layer(layer)
        self._refuse_unknown()

    def conversions(self, ops: DenseOps) -> list[Conversion]:
        """Return what loading turns into another kind because no kernel of the backend reads the stored one."""
        found: dict[str, Conversion] = {}
        for name in sorted(self._used - self._unloaded):
            entry = self._tensors[name]
            into = ops.stored_kind(entry.kind)
            if len(entry.shape) == 2 and into != entry.kind:
                known = found.get(entry.kind, Conversion(entry.kind, into, 0, 0, 0))
                loaded_bytes = kind_bytes(into, math.prod(entry.shape))
                found[entry.kind] = known.plus(entry.num_bytes, loaded_bytes)
        return list(found.values())

    def load(self, ops: DenseOps) -> DecoderWeights:
        """Hand every weight to the backend; called inside a backend job."""
        embedding = ops.load_weight(self._source.weight(self._names.embedding))
        tied = self._config.tied_embeddings
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(self._load_layer(ops, layer) for layer in range(self._config.num_layers)),
            norm=self._load_vector(ops, self._names.norm),
            head=embedding if tied else ops.load_weight(self._source.weight(self._names.head)),
        )

    def _matrices(self) -> dict[str, tuple[int, int]]:
        c = self._config
        heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return {
            "q": (heads, c.hidden_size),
            "k": (kv_heads, c.hidden_size),
            "v": (kv_heads, c.hidden_size),
            "o": (c.hidden_size, heads),
            "gate": (c.intermediate_size, c.hidden_size),
            "up": (c.intermediate_size, c.hidden_size),
            "down": (c.hidden_size, c.intermediate_size),
        }

    def _check_layer(self, layer: int) -> None:
        for name, shape in self._matrices().items():
            self._require(self._name(name, layer), shape)
            bias = self._name(name, layer, "bias")
            if bias in self._tensors:
                self._require(bias, shape[:1])
        for name in ("attention_norm", "mlp_norm"):
            self._require(self._name(name, layer), (self._config.hidden_size,))
        if self._config.has_qk_norm:
            for name in ("q_norm", "k_norm"):
                self._require(self._name(name, layer), (self._config.head_dim,))

    def _name(self, name: str, layer: int, part: str = "weight") -> str:
        return f"{self._names.layer[name].format(layer)}.{part}"

    def _require(self, name: str, shape: tuple[int, ...]) -> None:
        entry = self._tensors.get(name)
        path = self._source.path_of(name)
        if entry is None:
            raise InvalidModelFile(f"{path}: tensor {name!r} is missing", file=path, tensor=name)
        if entry.shape != shape:
            needed = f"the configuration in {self._path.name} needs {shape}"
            raise InvalidModelFile(
                f"{path}: tensor {name!r} has shape {entry.shape}, {needed}",
                file=path,
                tensor=name,
            )
        if len(shape) == 1 and entry.kind not in _FLOATS:
            raise UnsupportedModel(
                f"{path}: vector {name!r} has type {entry.kind}; supported: {', '.join(_FLOATS)}",
                file=path,
                tensor=name,
            )
        self._used.add(name)

    def _check_tied_head(self) -> None:
        head, embedding = self._names.head, self._names.embedding
        if head not in self._tensors:
            return
        self._used.add(head)
        self._unloaded.add(head)
        first, second = self._source.weight(head), self._source.weight(embedding)
        if first.kind != second.kind or not np.array_equal(first.data, second.data):
            warnings.warn(
                f"{self._path}: the model ties its output head to the embedding but stores another {head!r}; "
                "the embedding is used",
                stacklevel=4,
            )

    def _refuse_unknown(self) -> None:
        for name in self._tensors.keys() - self._used:
            if not name.endswith(self._names.ignored):
                path = self._source.path_of(name)
                raise UnsupportedModel(
                    f"{path}: architecture {self._config.architecture} has no tensor {shown(name)}",
                    file=path,
                    tensor=name,
                )

    def _load_layer(self, ops: DenseOps, layer: int) -> LayerWeights:
        def vector(name: str) -> Tensor:
            return self._load_vector(ops, self._name(name, layer))

        def projection(name: str) -> Projection:
            bias = self._name(name, layer, "bias")
            return Projection(
                ops.load_weight(self._source.weight(self._name(name, layer))),
                self._load_vector(ops, bias) if bias in self._tensors else None,
            )

        has_qk_norm = self._config.has_qk_norm
        return LayerWeights(
            attention_norm=vector("attention_norm"),
            q_norm=vector("q_norm") if has_qk_norm else None,
            k_norm=vector("k_norm") if has_qk_norm else None,
            mlp_norm=vector("mlp_norm"),
            **{name: projection(name) for name in self._matrices()},
        )

    def _load_vector(self, ops: DenseOps, name: str) -> Tensor:
        """Load norm weights and biases, always as float32: they are small."""
        weight = self._source.weight(name)
        values = weight.data.view(_FLOATS[weight.kind]).astype(np.float32)
        return ops.load_weight(WeightData("F32", weight.shape, values.view(np.uint8)))
