"""What a decoder must know about its model before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.config import HEAD_DIMS, KvShape
from pagedkv.dtypes import DType
from pagedkv.errors import InvalidModelFile, PagedKvError, UnsupportedModel
from pagedkv.model.rope import RopeConfig
from pagedkv.model.shown import shown

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
MAX_COUNT = (1 << 31) - 1
_MAX_LAYERS = 1 << 12
_MAX_MESSAGE = 200  # characters of a library's own words

Limits = tuple[float, float]
POSITIVE: Limits = (1e-6, 1e6)
EPSILONS: Limits = (1e-20, 1.0)
ROPE_BASES: Limits = (1.0, 1e30)


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
        self.rope.check()
        if not 1 <= self.context_length <= MAX_COUNT:
            raise InvalidModelFile(f"context length {self.context_length} must be from 1 to {MAX_COUNT}")
        if self.add_bos and not 0 <= (-1 if self.bos_token_id is None else self.bos_token_id) < self.vocab_size:
            raise InvalidModelFile(
                f"begin token {self.bos_token_id} is put before every text, but the vocabulary has {self.vocab_size}"
            )
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
    """Checked access to the untrusted key-value pairs of a model file.

    `prefix` is put before each name to look it up, `block` before it in errors. Whatever was asked for counts as
    read, so that `refuse_unread` knows the rest.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "", block: str = "") -> None:
        self.path = path
        self._values = values
        self._prefix = prefix
        self._block = block
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """Return the value, None if it is missing or null."""
        self._read.add(name)
        return self._values.get(self._prefix + name)

    def refuse_unread(self) -> None:
        """Raise UnsupportedModel naming a key of this block that has a value and was never asked for."""
        for key, value in self._values.items():
            name = key.removeprefix(self._prefix)
            if key.startswith(self._prefix) and name not in self._read and value is not None:
                raise refuse_option(self.path, self.label(name), value, ", ".join(sorted(self._read)))

    def refuse_other(self, name: str, neutral: object) -> None:
        """Raise UnsupportedModel unless an option that nothing implements is missing or has no effect."""
        value = self.get(name)
        if value is not None and (isinstance(value, bool) is not isinstance(neutral, bool) or value != neutral):
            raise refuse_option(self.path, self.label(name), value, neutral)

    def count(self, name: str, default: int | None = None, limit: int = MAX_COUNT, least: int = 1) -> int:
        """Return a whole number in [least, limit]; a list of equal numbers counts as one number."""
        value = self.get(name)
        if isinstance(value, list) and value and all(type(item) is int and item == value[0] for item in value):
            value = value[0]
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= limit:
            raise self.fail(name, f"must be a whole number from {least} to {limit}")
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

    def number(self, name: str, default: float | None = None, limits: Limits = POSITIVE) -> float:
        """Return a number in [low, high]: what a float32 formula can take, not what a double can hold."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        low, high = limits
        if type(value) not in (int, float) or not low <= value <= high:  # a NaN is in no range
            raise self.fail(name, f"must be a number from {low:g} to {high:g}")
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
        if not all(type(token_id) is int and 0 <= token_id <= MAX_COUNT for token_id in ids):
            raise self.fail(name, f"must be a token id (0 to {MAX_COUNT}) or a list of them")
        return frozenset(ids)

    def label(self, name: str) -> str:
        """Return the name that errors use."""
        return self._block + self._prefix + name

    def fail(self, name: str, rule: str) -> InvalidModelFile:
        """Return the error that names file, key, rule and value."""
        label = self.label(name)
        return InvalidModelFile(f"{self.path}: {label} {rule}, got {shown(self.get(name))}", file=self.path, key=label)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give every refusal inside that names no file this one."""
    try:
        yield
    except UnsupportedModel as error:
        if "file" in error.details:
            raise
        raise type(error)(f"{path}: {error.message}", file=path, **error.details) from error


@contextmanager
def only_refusals(path: Path) -> Iterator[None]:
    """Turn whatever else goes wrong while an untrusted file is read into InvalidModelFile.

    The last net, for what no check foresaw: it can name neither key nor value.
    """
    try:
        yield
    except (PagedKvError, MemoryError):
        raise
    except OSError as error:
        raise InvalidModelFile(f"{path}: cannot be read: {error.strerror}", file=path) from error
    except Exception as error:
        raise InvalidModelFile(f"{path}: cannot be understood: {type(error).__name__}", file=path) from error


@contextmanager
def library_refusals(path: Path, what: str) -> Iterator[None]:
    """Turn whatever a library says of an untrusted file into InvalidModelFile, shortened; a panic in Rust too."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InvalidModelFile(f"{path}: {what}: {str(error)[:_MAX_MESSAGE]}", file=path) from error


def refuse_architecture(path: Path, name: object) -> UnsupportedModel:
    """Return the error for an architecture that is not implemented."""
    return UnsupportedModel(
        f"{path}: architecture {shown(name)} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}",
        file=path,
        architecture=shown(name),
    )


def refuse_option(path: Path, option: str, value: object, supported: object) -> UnsupportedModel:
    """Return the error for an option of a supported architecture that is not implemented."""
    return UnsupportedModel(
        f"{path}: {option} {shown(value)} is not supported; supported: {supported}", file=path, option=option
    )
