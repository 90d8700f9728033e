"""Every kernel variant as a plain value: source, macros, launch shape. Needs no device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from pagedkv.config import KvShape
from pagedkv.dtypes import DType
from pagedkv.errors import DeviceError, UnsupportedModel

STORAGE_CODES = {DType.FLOAT32: 0, DType.FLOAT16: 1, DType.BFLOAT16: 2, DType.FLOAT8_E4M3: 3, DType.INT8: 4}
ATTEND_SIGNATURE = "P" * 11 + "q" * 6 + "i" * 5 + "ff"
STAGE_LIMIT = 72 << 10  # bytes of shared memory for K and V tiles: three CTAs on an SM of 228 KiB, one on 100 KiB
SHARED_LIMIT = 99 << 10  # of a CTA, dynamic and static, on the smallest device that is built today
MAX_ROWS = 8  # rows of a query tile on CUDA cores
DECODE_ROWS = 16  # most rows whose keys the warps of a CTA divide
FEWEST_TENSOR_ROWS = 2  # one row costs CUDA cores half the instructions that the memory leaves time for, two most
MMA_ROWS = 16  # rows of a warp on tensor cores
_POOL = "qqqqii"  # strides of the page pool
_SIGNATURES = {
    "write_kv": "PPPPq" + _POOL,
    "rope_write_kv": "P" * 7 + _POOL + "iiif",
    "copy_blocks": "PPPq",
    "merge_states": "PPPPPqiii",
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
    shared_bytes: int = 0  # dynamic: what a launch asks for
    static_bytes: int = 0  # what the source declares besides; attention only

    @property
    def needed_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.shared_bytes + self.static_bytes

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


def attend_variants(shape: KvShape, max_rows: int) -> Iterator[Variant]:
    """Yield the CUDA-core variants for query tiles of up to `max_rows` rows (query positions x group size)."""
    rows = next(rows for rows in (1, 2, 3, 4, 6, 8) if rows >= min(max_rows, MAX_ROWS))
    pieces = shape.head_dim // (4 if shape.dtype is DType.FLOAT32 else 8)
    groups = min(32, 1 << ((128 // pieces).bit_length() - 1))
    for tokens in (64, 32, 16, 8):
        if tokens < groups:
            return
        shared = max(_stage_bytes(shape, tokens), groups * rows * shape.head_dim * 4)
        static = 4 * rows * (shape.head_dim + tokens + 8 + 1)  # the queries, the scores, a factor each
        if tokens == 16 or _stage_bytes(shape, tokens) <= STAGE_LIMIT:
            yield _attention("attend", shape, rows, tokens, 4, shared, static)


def decode_variants(shape: KvShape, max_rows: int) -> Iterator[Variant]:
    """Yield the tensor-core variants for query tiles of up to `max_rows` rows, at most 16, over many keys."""
    slot, rows = _stage_bytes(shape, 16) // 2, 8 if max_rows <= 8 else DECODE_ROWS
    for warps in (4, 2, 1):
        static = shape.head_dim * rows * 4 + 2 * 4 * warps * rows  # the queries in two parts, maxima and sums
        for stages in (4, 3, 2):
            shared = stages * warps * slot
            if shared <= STAGE_LIMIT:
                yield _attention("attend_decode", shape, rows, 16 * warps, warps, shared, static, STAGES=stages)


def mma_variants(shape: KvShape, max_rows: int) -> Iterator[Variant]:
    """Yield the tensor-core variants for query tiles of up to `max_rows` rows, many of them."""
    warps = 2 if max_rows <= 2 * MMA_ROWS else 4
    for tokens in (64, 32, 16):
        shared = _stage_bytes(shape, tokens) + _wide_bytes(shape, tokens)
        if tokens == 16 or shared <= STAGE_LIMIT:
            yield _attention("attend_mma", shape, warps * MMA_ROWS, tokens, warps, shared, 0)


def _attention(
    name: str, shape: KvShape, rows: int, tokens: int, warps: int, shared: int, static: int, **more: int
) -> Variant:
    macros = {"HEAD_DIM": shape.head_dim, "STORAGE": storage_code(shape.dtype), "NUM_ROWS": rows}
    macros |= {"TILE_TOKENS": tokens, "NUM_WARPS": warps, **more}
    declared = -(-static // 16) * 16  # the dynamic part begins at a multiple of 16
    return Variant(name, tuple(macros.items()), ATTEND_SIGNATURE, 32 * warps, shared, declared)


@lru_cache(maxsize=1024)
def choose_attention(
    shape: KvShape, max_rows: int, tensor_cores: bool | None = None, shared_limit: int = SHARED_LIMIT
) -> Variant:
    """Return the variant for a batch whose largest sequence has `max_rows` rows: the first that the device can hold.

    Tensor cores serve storage of 16 and 8 bits from 2 rows on; `tensor_cores` forces the choice. `shared_limit` is
    the shared memory that a CTA may have. Raises DeviceError where no variant is small enough.
    """
    families: list[Callable[[KvShape, int], Iterator[Variant]]] = [attend_variants]
    can = shape.dtype is not DType.FLOAT32
    if can and max_rows >= FEWEST_TENSOR_ROWS if tensor_cores is None else tensor_cores and can:
        families = [decode_variants, mma_variants] if max_rows <= DECODE_ROWS else [mma_variants, attend_variants]
    fewest = 0
    for family in families:
        for variant in family(shape, max_rows):
            if variant.needed_bytes <= shared_limit:
                return variant
            fewest = variant.needed_bytes
    message = f"attention of head dim {shape.head_dim} in {shape.dtype} needs {fewest} bytes of shared memory"
    raise DeviceError(f"{message}, a CTA of this device has {shared_limit}", needed=fewest, limit=shared_limit)


def all_variants(shape: KvShape, shared_limit: int = SHARED_LIMIT) -> list[Variant]:
    """Return every variant that a backend of this shape can come to need, on a device as `choose_attention` says."""
    chosen = {choose_attention(shape, rows, None, shared_limit) for rows in (*range(1, 10), 32, 64)}
    chosen |= {write_variant(shape, source) for source in (0, 1, 2)} | {rope_write_variant(shape)}
    chosen |= {norm_variant(width, add=add) for width in (1, 4, 257, 260) for add in (False, True)}
    chosen |= {plain_variant("cast", SOURCE=a, TARGET=b) for a in (0, 1, 2) for b in (0, 1, 2) if a != b}
    chosen |= {plain_variant("embedding", SOURCE=source) for source in (0, 1, 2)}
    names = ("copy_blocks", "merge_states", "rope", "silu_mul", "add", "split", "sample", "echo")
    return sorted(chosen | {plain_variant(name) for name in names}, key=lambda variant: variant.label)
