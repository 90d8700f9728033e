"""Choose the backend, size its pool to the memory of where it runs, open it, and say what was taken and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.markup import escape

from pagedkv.cli.options import DEFAULT_MEMORY, ServeOptions, parse_memory
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.cpu.pool import available_memory
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.cuda.graphs import MAX_GRAPH_ROWS
from pagedkv.compute.cuda.select import check_cuda, open_cuda_backend
from pagedkv.compute.layout import KvLayout
from pagedkv.config import KvShape
from pagedkv.errors import DeviceError, InvalidArgument
from pagedkv.model import ModelConfig

OnProgress = Callable[[int, int, str], None]
Say = Callable[[str], None]
_GIB = 2**30


def open_backend(options: ServeOptions, shape: KvShape, on_compile: OnProgress, say: Say) -> CpuBackend | CudaBackend:
    """Open the backend asked for, for "auto" a GPU's. Says which it is, why, and its pool.

    Raises InvalidArgument for a pool that holds no block or does not fit, DeviceError, UnsupportedModel.
    """
    if options.backend == "cpu":
        return open_cpu(options, shape, on_compile, say, "as asked")
    return open_cuda(options, shape, on_compile, say)


def is_asked_too_much(options: ServeOptions, error: DeviceError) -> bool:
    """Whether a device is too small for a pool that was sized by hand: a mistake to tell, and not to work around."""
    is_sized = options.blocks is not None or options.memory != DEFAULT_MEMORY
    return is_sized and "asked" in error.details


def reason_for_cpu(error: DeviceError) -> str:
    """Return on one line why the CPU is taken where a GPU would have been."""
    return " ".join(error.message.split())


def open_cpu(options: ServeOptions, shape: KvShape, on_compile: OnProgress, say: Say, reason: str) -> CpuBackend:
    """Open the CPU backend; a share of --memory is one of what this process may still take."""
    layout = size_pool(options, shape, available_memory() or 0)
    num_host_blocks = size_host_pool(options, layout.block_bytes)
    backend = CpuBackend(
        layout,
        num_threads=options.threads,
        on_compile=on_compile,
        num_host_blocks=num_host_blocks,
        activations=options.activations,
    )
    say(f"[bold]backend[/]  cpu, {backend.isa}, {backend.num_threads} threads ({escape(reason)})")
    say(_describe_pool(layout))
    _say_host_pool(backend, say)
    return backend


def open_cuda(options: ServeOptions, shape: KvShape, on_compile: OnProgress, say: Say, **stand_ins: Any) -> CudaBackend:
    """Open the CUDA backend, its pools not yet: see `open_pools`.

    `stand_ins` go to CudaBackend: tests put `driver_module` and `cublas` in the place of the real ones.
    """
    libraries = {name: stand_ins.get(name) for name in ("driver_module", "cublas")}
    check_cuda(needs_cublas=options.model is not None, **libraries)
    backend = open_cuda_backend(shape, options.block_size, on_compile=on_compile, **stand_ins)
    try:  # what cannot fit even now is refused before a model is loaded
        backend.require_room(size_pool(options, shape, backend.free_bytes()))
    except BaseException:
        backend.close()
        raise
    info, reason = backend.device.context.info, "as asked" if options.backend == "cuda" else "it is there"
    say(f"[bold]backend[/]  cuda, {escape(info.name)}, sm_{info.capability[0]}{info.capability[1]} ({reason})")
    return backend


def open_pools(backend: CpuBackend | CudaBackend, options: ServeOptions, say: Say, working_bytes: int = 0) -> None:
    """Open the pools of a backend that has everything else: a share of --memory is one of what is free by now.

    `working_bytes` are left for the arrays and graphs of steps. The CPU's pools are open already. Raises
    InvalidArgument for a pool that holds no block, DeviceError for one that does not fit.
    """
    if isinstance(backend, CpuBackend):
        return
    layout = size_pool(options, backend.layout.shape, max(0, backend.free_bytes() - working_bytes))
    backend.open_pools(layout, size_host_pool(options, layout.block_bytes))
    say(f"{_describe_pool(layout)}; {backend.pool.free_bytes_left / _GIB:.2f} GiB of the device are left")
    _say_host_pool(backend, say)


def working_bytes(options: ServeOptions, config: ModelConfig | None) -> int:
    """Return an estimate of the bytes that steps' arrays take, once for prompts and once for the graphs of decoding.

    Of a layer that is: the residual, its norm and a product, queries, keys, values and attended rows, three arrays of
    the MLP, and a copy of half the size of what a product reads; behind the layers, the logits.
    """
    if config is None:
        return 0
    heads = (config.num_heads + config.num_kv_heads) * config.head_dim
    row_bytes = 4 * (4 * config.hidden_size + 3 * heads + 4 * config.intermediate_size)
    rows = options.max_batch_tokens + MAX_GRAPH_ROWS
    logits_bytes = 4 * config.vocab_size * (options.max_num_seqs + MAX_GRAPH_ROWS)
    return rows * row_bytes + logits_bytes


def size_pool(options: ServeOptions, shape: KvShape, available_bytes: int) -> KvLayout:
    """Return the layout of a pool of --blocks, or of as many blocks as fit --memory. Raises InvalidArgument."""
    block_bytes = KvLayout(shape, 1, options.block_size).block_bytes
    if options.blocks is not None:
        return KvLayout(shape, options.blocks, options.block_size)
    pool_bytes = parse_memory(options.memory, available_bytes)
    if pool_bytes < block_bytes:
        raise InvalidArgument(
            f"{pool_bytes} bytes do not hold one block of {block_bytes} bytes; raise --memory",
            field="memory",
            value=options.memory,
            limit=block_bytes,
        )
    return KvLayout(shape, pool_bytes // block_bytes, options.block_size)


def size_host_pool(options: ServeOptions, block_bytes: int) -> int:
    """Return the host blocks to swap to: --swap-blocks, or as many as fit --swap-memory, else none.

    Raises InvalidArgument for memory that holds no block.
    """
    if options.swap_blocks is not None or options.swap_memory is None:
        return options.swap_blocks or 0
    host_bytes = parse_memory(options.swap_memory, available_memory() or 0, "swap_memory")
    if host_bytes < block_bytes:
        raise InvalidArgument(
            f"{host_bytes} bytes do not hold one block of {block_bytes} bytes; raise --swap-memory",
            field="swap_memory",
            value=options.swap_memory,
            limit=block_bytes,
        )
    return host_bytes // block_bytes


def _say_host_pool(backend: CpuBackend | CudaBackend, say: Say) -> None:
    if backend.num_host_blocks:
        num_bytes = backend.num_host_blocks * backend.layout.block_bytes
        say(f"[bold]swap[/]     {backend.num_host_blocks} host blocks, {num_bytes / _GIB:.2f} GiB")


def _describe_pool(layout: KvLayout) -> str:
    return (
        f"[bold]pool[/]     {layout.num_blocks} blocks of {layout.block_size} tokens "
        f"({layout.block_bytes / 2**10:.0f} KiB each, {layout.shape.dtype}), "
        f"{layout.num_blocks * layout.block_size} tokens, {layout.pool_bytes / _GIB:.2f} GiB"
    )
