"""What a data plane offers: the contracts that the CPU and the CUDA backend both fulfil.

A `Tensor` is the backend's own array: a NumPy array on the CPU, a device array on a GPU; `from_host` and `to_host`
cross over. Operations are called inside a job given to `Backend.submit`; jobs run one after another in the order
of submission, never on the event loop, and a job's future completes when all device work it issued has completed.
Host arrays handed out by `to_host` are valid from that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv.compute.health import DeviceHealth
from pagedkv.compute.layout import KvLayout
from pagedkv.dtypes import DType

T = TypeVar("T")
Tensor = Any  # NumPy array on the CPU, device array on a GPU; has .shape and a .reshape(shape) that copies nothing

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Options of one attention call; the defaults switch everything off.

    Scores are `scale * q.k`, then `soft_cap * tanh(score / soft_cap)`, then `+ slope * (key_position -
    query_position)`, then the mask (causal; with `window` W a query sees exactly the W newest keys, itself
    included). `sinks` [num_heads] float32 adds exp(sink) to the softmax's denominator (and to `lse`) of each head.
    `scale` None means 1 / sqrt(head_dim). `alibi_slopes` is [num_heads] float32.
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Float32Array | None = None
    sinks: Float32Array | None = None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Any mix of decode (query length 1) and chunked causal prefill, over sequences in the pool.

    Query i of a sequence with query length n and context length L has position L - n + i and sees keys
    [0, position]. A context length of 0 with a query length of 0 is legal; rows with no visible key give zeros
    and lse = -inf.
    """

    block_tables: Int32Array  # [num_sequences, max_blocks]; entries beyond ceil(L / block_size) are never read
    context_lens: Int32Array  # [num_sequences], keys in the pool, those of this call's queries included
    query_starts: Int32Array  # [num_sequences + 1], exclusive prefix sums of the query lengths


def pad_block_tables(tables: Sequence[Sequence[int] | Int32Array]) -> Int32Array:
    """Return block tables of different lengths as an AttentionBatch takes them [num_sequences, max(1, longest)]."""
    padded = np.zeros((len(tables), max(map(len, tables), default=0) or 1), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """Output of attention: `output` [num_queries, num_heads, head_dim] float32, `lse` [num_queries, num_heads]."""

    output: Tensor
    lse: Tensor  # float32, natural log of the sum of exponentials of the scores


@dataclass(frozen=True, slots=True)
class WeightData:
    """A matrix as its file stores it: `data` is raw bytes (memory-mapped where the format allows).

    `kind` is "F32", "F16", "BF16" or a GGML block type such as "Q4_0" or "Q6_K". Rows are outputs:
    y[n] = sum_k w[n, k] x[k].
    """

    kind: str
    shape: tuple[int, ...]  # [out_features, in_features] or [n]
    data: npt.NDArray[np.uint8]  # C-order bytes


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary position embedding of one model.

    `inv_freq` [rotary_dim / 2] float32 already holds any rope scaling; `scale` multiplies cos and sin (YaRN's
    attention factor, else 1). `interleaved` pairs (2i, 2i+1) as GGUF's llama files need, else (i, i + half).
    """

    inv_freq: Float32Array
    interleaved: bool
    scale: float = 1.0


class KvOps(Protocol):
    """Operations on the page pool. All raise InvalidArgument before any change."""

    layout: KvLayout

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host pool, which has the same layout; 0 if there is none."""

    def write_kv(self, layer: int, keys: Tensor, values: Tensor, slot_mapping: Int64Array) -> None:
        """Store K and V [num_tokens, num_kv_heads, head_dim] (float32, float16, bfloat16) at their slots; -1 skips."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each, as if all sources were read first."""

    def attend(self, layer: int, queries: Tensor, batch: AttentionBatch, params: AttentionParams) -> AttentionResult:
        """Attend queries [num_queries, num_heads, head_dim] to the batch's sequences in `layer`."""

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks to the host pool: (device block, host block) each, every block named once.

        Comes after all earlier work on these blocks and before all later, so a device block may have another owner
        as soon as this is queued.
        """

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks from the host pool: (device block, host block) each, ordered as `swap_out`."""

    def merge_states(self, outputs: Tensor, lses: Tensor) -> AttentionResult:
        """Merge partial results [num_parts, num_queries, num_heads(, head_dim)]; an empty part has lse -inf."""

    def read_block(self, block_id: int) -> npt.NDArray[np.uint8]:
        """Return a copy of a block's bytes [layout.block_bytes]; for tests, swapping and transfer."""

    def write_block(self, block_id: int, data: npt.NDArray[np.uint8]) -> None:
        """Replace a block's bytes [layout.block_bytes]."""


class DenseOps(Protocol):
    """What a decoder needs besides the cache. Activations are float32 [num_tokens, features].

    `readers` are the weights of the linear layers that alone will read a result: it may come in the form that these
    layers read, which nothing but `linear` and `linear_many` with these weights takes.
    """

    def stored_kind(self, kind: str) -> str:
        """Return the kind that a matrix of this kind has once loaded: another one where no kernel reads its own."""

    def load_weight(self, weight: WeightData) -> Tensor:
        """Make a weight usable by the operations below; keeps the file's own representation where it can."""

    def embedding(self, table: Tensor, token_ids: Int32Array) -> Tensor:
        """Return rows of the table as float32 [num_tokens, features]."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ weight.T (+ bias) [num_tokens, out_features], accumulated in float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, readers: Sequence[Tensor] = ()) -> Tensor:
        """Return x / sqrt(mean(x**2) + epsilon) * weight over the last axis (any leading axes)."""

    def linear_many(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
    ) -> list[Tensor]:
        """Return `linear(x, weight, bias)` for each weight: products that share their input."""

    def add_rms_norm(
        self, x: Tensor, y: Tensor, weight: Tensor, epsilon: float, readers: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return rms_norm(x + y); x [num_tokens, features] becomes x + y in place."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + y, updating x in place and returning it."""

    def silu_mul(self, gate: Tensor, up: Tensor, readers: Sequence[Tensor] = ()) -> Tensor:
        """Return silu(gate) * up."""

    def rope(self, x: Tensor, positions: Int32Array, rotation: Rotation) -> None:
        """Rotate x [num_tokens, num_heads, head_dim] in place."""

    def take_rows(self, x: Tensor, rows: Int32Array) -> Tensor:
        """Return the rows of x [num_rows, features]."""

    def split(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Split the last axis of x into contiguous tensors of these sizes."""


class Backend(KvOps, DenseOps, Protocol):
    """A device with its pool, its operations and its ordered queue."""

    name: str  # "cpu" or "cuda"
    repeats_prompts: bool  # whether `repeat` pays for steps with prompts, whose shapes are many

    @property
    def health(self) -> DeviceHealth:
        """Who is told of every job's end, and asked before every one."""

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; see the module's docstring. The loop awaits it by `asyncio.wrap_future`.

        A job that raises fails alone, with the device as it was; but DeviceLost is final and answers all that follow.
        """

    def rope_write_kv(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Int32Array,
        slot_mapping: Int64Array,
        rotation: Rotation,
    ) -> None:
        """Rotate queries and keys as `rope` does, in place, and store keys and values as `write_kv` does.

        queries [num_tokens, num_heads, head_dim], keys and values [num_tokens, num_kv_heads, head_dim], float32.
        """

    def repeat(
        self,
        shape: Hashable,
        inputs: Sequence[npt.NDArray[Any]],
        body: Callable[[Sequence[npt.NDArray[Any]]], Tensor],
        finish: Callable[[Tensor], Tensor] = ...,
        padding: Sequence[int] = (),
    ) -> Tensor:
        """Return finish(body(inputs)): operations whose shapes and scalars depend on `shape` and the inputs' alone.

        A backend may record what the first call does and repeat the record, so both keep nothing and `body` reads
        the arrays it is given. It may leave `finish` (by default nothing) out of the record, whose result can be
        large. Inputs and result are [num_rows, ...]; with `padding`, a value for each input, a backend may append
        rows of these values, in which a context length of 0 stands for no sequence, and drops their results. The
        result is valid until the next call.
        """

    def stopwatch(self, done: Callable[[float], None]) -> Callable[[], None]:
        """Start timing what the running job has the device do from here on; the returned function stops.

        `done` is told the seconds that the device spent, when that work is complete and before the job's future is.
        """

    def memory_by_use(self) -> dict[str, int]:
        """Return the bytes held besides the pools, used or kept for the next use; may be asked on any thread.

        "working": arrays of jobs, and weights where they are on the device; "steps": what repeated steps keep;
        "staging": pinned host buffers on the way to the device.
        """

    def from_host(self, array: npt.NDArray[Any]) -> Tensor:
        """Return the array as a tensor; the caller leaves the array unchanged until the job has completed."""

    def to_host(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Return the tensor as an array, valid when the job has completed."""

    def synchronize(self) -> None:
        """Block until all submitted jobs are complete. Never called on the event loop."""

    def close(self) -> None:
        """Finish all jobs and release the device."""


SUPPORTED_KV_DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
