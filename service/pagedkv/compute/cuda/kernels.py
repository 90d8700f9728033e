"""Every kernel variant as a plain value: source, macros, launch shape. Needs no device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagedkv.config import KvShape
from pagedkv.dtypes import DType
from pagedkv.errors import UnsupportedModel

STORAGE_CODES = {DType.FLOAT32: 0, DType.FLOAT16: 1, DType.BFLOAT16: 2, DType.FLOAT8_E4M3: 3, DType.INT8: 4}
ATTEND_SIGNATURE = "P" * 10 + "q" * 6 + "i" * 5 + "ff"
STAGE_LIMIT = 72 << 10  # bytes of shared memory for K and V tiles: three CTAs on an SM of 228 KiB, one on 100 KiB
MAX_ROWS = 8  # rows of a query tile on CUDA cores
DECODE_ROWS = 16  # most rows whose keys the warps of a CTA divide
FEWEST_TENSOR_ROWS = 2  # one row costs CUDA cores half the instructions that the memory leaves time for, two most
MMA_ROWS = 16  # rows of a warp on tensor cores
_POOL = "qqqqii"  # strides of the page pool
_SIGNATURES = {
    "write_kv": "PPPPq" + _POOL,
    "rope_write_kv": "P" * 7 + _POOL + "iiif",
    "copy_blocks": "PPPq",
    "merge_states": "PPPPqii",
    "rms_norm": "PPPPqf",
    "rope": "PPPqiiiif",
    "silu_mul": "PPPq",
    "add": "PPqq",
    "embedding": "PPPq",
    "cast": "PPq",
    "split": "PPqqqq",
    "sample": "PPPPq",
    "echo": "Piqfq",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel, specialised. `name` is both the source file's stem and the entry point."""

    name: str
    macros: tuple[tuple[str, int], ...] = ()
    signature: str = ""
    num_threads: int = 128
    shared_bytes: int = 0

    @property
    def label(self) -> str:
        """A readable name, unique among variants."""
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.macros)])

    @property
    def rows(self) -> int:
        """Rows of a query tile; attention only."""
        return dict(self.macros)["NUM_ROWS"]


def plain_variant(name: str, **macros: int) -> Variant:
    """Return a variant of anything but attention."""
    threads = 256 if name in ("sample", "copy_blocks") else 128
    return Variant(name, tuple(macros.items()), _SIGNATURES[name], threads)


def write_variant(shape: KvShape, source: int) -> Variant:
    """Return the variant of write_kv for sources of a storage code."""
    return plain_variant("write_kv", HEAD_DIM=shape.head_dim, STORAGE=storage_code(shape.dtype), SOURCE=source)


def rope_write_variant(shape: KvShape) -> Variant:
    """Return the variant of rope_write_kv."""
    return plain_variant("rope_write_kv", HEAD_DIM=shape.head_dim, STORAGE=storage_code(shape.dtype))


def norm_variant(width: int, *, add: bool = False) -> Variant:
    """Return the variant of rms_norm for rows of `width`, which adds a residual first where `add`."""
    threads = 32 if width <= 256 else 256  # a head, or a row of activations
    macros = {"ADD": int(add), "VECTOR": 1 if width % 4 else 4, "NUM_THREADS": threads}
    return Variant("rms_norm", tuple(macros.items()), _SIGNATURES["rms_norm"], threads)


def storage_code(dtype: DType) -> int:
    """Return the number by which kernels know a storage type. Raises UnsupportedModel."""
    if dtype not in STORAGE_CODES:
        raise UnsupportedModel(f"the CUDA backend has no kernels for {dtype} storage", field="dtype", value=dtype)
    return STORAGE_CODES[dtype]


def _row_stride(shape: KvShape) -> int:
    return (shape.head_dim * shape.dtype.itemsize // 16 | 1) * 16


def _stage_bytes(shape: KvShape, tokens: int) -> int:
    scales = 4 * tokens if shape.dtype.is_quantized else 0
    return 2 * 2 * (tokens * _row_stride(shape) + scales)


def _wide_bytes(shape: KvShape, tokens: int) -> int:
    """Return the size of K and V tiles that tensor cores read widened to 16 bits."""
    return 2 * tokens * (shape.head_dim // 8 | 1) * 16 if shape.dtype.is_quantized else 0


def _mma_bytes(shape: KvShape, tokens: int) -> int:
    return _stage_bytes(shape, tokens) + _wide_bytes(shape, tokens)


def _tile_tokens(shape: KvShape, size: Callable[[KvShape, int], int]) -> int:
    return next(tokens for tokens in (64, 32, 16) if size(shape, tokens) <= STAGE_LIMIT or tokens == 16)


def attend_variant(shape: KvShape, max_rows: int) -> Variant:
    """Return the CUDA-core variant for query tiles of up to `max_rows` rows (query positions x group size)."""
    rows = next(rows for rows in (1, 2, 3, 4, 6, 8) if rows >= min(max_rows, MAX_ROWS))
    tokens, elements = _tile_tokens(shape, _stage_bytes), 4 if shape.dtype is DType.FLOAT32 else 8
    pieces = shape.head_dim // elements
    groups = 1 << ((128 // pieces).bit_length() - 1)
    parts = min(groups, 32) * rows * shape.head_dim * 4
    return _attention("attend", shape, rows, tokens, 4, max(_stage_bytes(shape, tokens), parts))


def decode_variant(shape: KvShape, max_rows: int) -> Variant:
    """Return the tensor-core variant for query tiles of up to `max_rows` rows, at most 16, over many keys."""
    slot = _stage_bytes(shape, 16) // 2
    stages, warps = next(
        (stages, warps) for warps in (4, 2) for stages in (4, 3, 2) if stages * warps * slot <= STAGE_LIMIT
    )
    rows = 8 if max_rows <= 8 else DECODE_ROWS
    return _attention("attend_decode", shape, rows, 16 * warps, warps, stages * warps * slot, STAGES=stages)


def mma_variant(shape: KvShape, max_rows: int) -> Variant:
    """Return the tensor-core variant for query tiles of up to `max_rows` rows, many of them."""
    warps = 2 if max_rows <= 2 * MMA_ROWS else 4
    tokens = _tile_tokens(shape, _mma_bytes)
    return _attention("attend_mma", shape, warps * MMA_ROWS, tokens, warps, _mma_bytes(shape, tokens))


def _attention(name: str, shape: KvShape, rows: int, tokens: int, warps: int, shared: int, **more: int) -> Variant:
    macros = {"HEAD_DIM": shape.head_dim, "STORAGE": storage_code(shape.dtype), "NUM_ROWS": rows}
    macros |= {"TILE_TOKENS": tokens, "NUM_WARPS": warps, **more}
    return Variant(name, tuple(macros.items()), ATTEND_SIGNATURE, 32 * warps, shared)


def choose_attention(shape: KvShape, max_rows: int, tensor_cores: bool | None = None) -> Variant:
    """Return the variant for a batch whose largest sequence has `max_rows` rows.

    Tensor cores serve storage of 16 and 8 bits from 2 rows on; `tensor_cores` forces the choice.
    """
    can = shape.dtype is not DType.FLOAT32
    if not (can and max_rows >= FEWEST_TENSOR_ROWS if tensor_cores is None else tensor_cores and can):
        return attend_variant(shape, max_rows)
    return decode_variant(shape, max_rows) if max_rows <= DECODE_ROWS else mma_variant(shape, max_rows)


def all_variants(shape: KvShape) -> list[Variant]:
    """Return every variant that a backend of this shape can come to need."""
    chosen = {choose_attention(shape, rows) for rows in (*range(1, 10), 32, 64)}
    chosen |= {write_variant(shape, source) for source in (0, 1, 2)} | {rope_write_variant(shape)}
    chosen |= {norm_variant(width, add=add) for width in (1, 4, 257, 260) for add in (False, True)}
    chosen |= {plain_variant("cast", SOURCE=a, TARGET=b) for a in (0, 1, 2) for b in (0, 1, 2) if a != b}
    chosen |= {plain_variant("embedding", SOURCE=source) for source in (0, 1, 2)}
    names = ("copy_blocks", "merge_states", "rope", "silu_mul", "add", "split", "sample", "echo")
    return sorted(chosen | {plain_variant(name) for name in names}, key=lambda variant: variant.label)
