"""What a decoder must know about its model before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.config import HEAD_DIMS, KvShape
from pagedkv.dtypes import DType
from pagedkv.errors import InvalidModelFile, UnsupportedModel
from pagedkv.model.rope import RopeConfig

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_LARGEST = 1 << 31
_MAX_LAYERS = 1 << 12


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's geometry and options, read from metadata alone.

    `windows[layer]` is the layer's sliding window in tokens, None where it sees everything. `eos_token_ids` joins
    the end tokens of every source; it may be empty: then only length and stop strings end a text. `bos_token_id`
    is None where the model names none, and `add_bos` tells whether encoding puts it first.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    rope: RopeConfig
    rms_epsilon: float
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    add_bos: bool = False

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise UnsupportedModel(f"head_dim {self.head_dim} is not supported; supported: {HEAD_DIMS}")
        if self.num_heads % self.num_kv_heads:
            raise InvalidModelFile(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.rope.rotary_dim % 2 or not 2 < self.rope.rotary_dim <= self.head_dim:
            raise InvalidModelFile(f"rotary dimension {self.rope.rotary_dim} does not fit head_dim {self.head_dim}")
        if self.rope.base <= 1:
            raise InvalidModelFile(f"rope base {self.rope.base} must be above 1")
        if len(self.windows) != self.num_layers:
            raise InvalidModelFile(f"{len(self.windows)} windows for {self.num_layers} layers")

    @property
    def sliding_window(self) -> int | None:
        """Widest window if every layer has one; None if any layer sees the whole context."""
        return None if None in self.windows else max(window for window in self.windows if window is not None)

    @property
    def has_qk_norm(self) -> bool:
        """Whether each head of q and k is normalised before rotation."""
        return self.architecture == "qwen3"

    def kv_shape(self, dtype: DType = DType.FLOAT32) -> KvShape:
        """Return the geometry of this model's page pool."""
        return KvShape(self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim, dtype)


class Fields:
    """Checked access to the untrusted key-value pairs of a model file."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self._values = values
        self._prefix = prefix

    def get(self, name: str) -> Any:
        """Return the value, None if it is missing or null."""
        return self._values.get(self._prefix + name)

    def count(self, name: str, default: int | None = None, limit: int = _LARGEST) -> int:
        """Return a whole number in [1, limit]; a list of equal numbers counts as one number."""
        value = self.get(name)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= limit:
            raise self.fail(name, f"must be a whole number from 1 to {limit}")
        return value

    def layer_count(self, name: str) -> int:
        """Return a number of layers."""
        return self.count(name, limit=_MAX_LAYERS)

    def choice(self, name: str, default: str) -> str:
        """Return a word; what it means is the caller's to check."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(name, "must be a string")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.fail(name, "must be a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.fail(name, "must be true or false")
        return value

    def token_ids(self, name: str) -> frozenset[int]:
        """Return the ids of a single number or a list; empty if missing."""
        value = self.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token_id) is int and 0 <= token_id < _LARGEST for token_id in ids):
            raise self.fail(name, "must be a token id or a list of them")
        return frozenset(ids)

    def fail(self, name: str, rule: str) -> InvalidModelFile:
        """Return the error that names file, key, rule and value."""
        value = repr(self.get(name))[:80]
        return InvalidModelFile(
            f"{self.path}: {self._prefix}{name} {rule}, got {value}", file=self.path, key=self._prefix + name
        )


def refuse_architecture(path: Path, name: object) -> UnsupportedModel:
    """Return the error for an architecture that is not implemented."""
    return UnsupportedModel(
        f"{path}: architecture {name!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}",
        file=path,
        architecture=name,
    )


def refuse_option(path: Path, option: str, value: object, supported: object) -> UnsupportedModel:
    """Return the error for an option of a supported architecture that is not implemented."""
    return UnsupportedModel(
        f"{path}: {option} {value!r} is not supported; supported: {supported}", file=path, option=option
    )
