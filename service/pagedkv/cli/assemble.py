"""Put the parts together: backend, cache, model, engine, gRPC server, metrics server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pagedkv.cache import CacheManager
from pagedkv.cli.options import ServeOptions, parse_memory
from pagedkv.compute.backend import Backend
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.cpu.pool import available_memory
from pagedkv.compute.cuda.select import open_cuda_backend
from pagedkv.compute.layout import KvLayout
from pagedkv.config import CacheConfig, EngineConfig, KvShape
from pagedkv.engine import Engine
from pagedkv.errors import DeviceError, InvalidArgument
from pagedkv.metrics.http import MetricsServer
from pagedkv.metrics.service import ServiceMetrics
from pagedkv.model import LoadedModel, ModelConfig, load_model, read_model_config
from pagedkv.model.hub import fetch_smollm2
from pagedkv.rpc.server import Server, ServerConfig

OnProgress = Callable[[int, int, str], None]


@dataclass(slots=True)
class Service:
    """Everything that runs in one process. Built off the loop (loading takes seconds), started on it."""

    options: ServeOptions
    layout: KvLayout
    backend: Backend
    model: LoadedModel | None
    cache: CacheManager
    engine: Engine | None = None
    server: Server | None = None
    metrics_server: MetricsServer | None = None

    @property
    def address(self) -> str:
        """Where the gRPC server listens; valid after `start`."""
        assert self.server is not None
        return f"{self.options.host}:{self.server.port}"

    @property
    def metrics_url(self) -> str | None:
        """Base URL of the metrics server, None if it is off."""
        return None if self.metrics_server is None else f"http://{self.options.host}:{self.metrics_server.port}"

    async def start(self) -> None:
        """Start the engine and both servers; the service is ready when this returns."""
        metrics = ServiceMetrics(self.cache, self.layout, backend_name=self.backend.name)
        metrics.watch_backend(self.backend)
        if self.model is not None:
            self.engine = Engine(
                backend=self.backend,
                cache=self.cache,
                decoder=self.model.decoder,
                tokenizer=self.model.tokenizer,
                model_config=self.model.config,
                config=_engine_config(self.options),
                observer=metrics.engine_observer,
            )
            metrics.watch_engine(self.engine)
            await self.engine.start()
        self.server = Server(
            ServerConfig(host=self.options.host, port=self.options.port, insecure=self.options.insecure),
            cache=self.cache,
            backend=self.backend,
            engine=self.engine,
            observer=metrics.rpc_observer,
        )
        await self.server.start()
        if self.options.metrics_port is not None:
            self.metrics_server = MetricsServer(metrics, host=self.options.host, port=self.options.metrics_port)
            await self.metrics_server.start()

    async def stop(self) -> None:
        """Drain: refuse new work, let streams go on for `drain_seconds`, then release everything."""
        grace = self.options.drain_seconds
        if self.server is not None:
            await self.server.stop(grace)
        if self.engine is not None:
            await self.engine.stop(0.0)
        if self.metrics_server is not None:
            await self.metrics_server.stop()
        await asyncio.to_thread(self.backend.close)


def build_service(
    options: ServeOptions, *, on_compile: OnProgress | None = None, say: Callable[[str], None] = lambda line: None
) -> Service:
    """Open the backend, size the pool, load the model and compile what it needs. Blocks for seconds.

    Raises InvalidArgument for options that do not fit the model or the machine, UnsupportedModel, DeviceError.
    """
    path = None if options.model is None else _resolve_model(options.model, say)
    config = None if path is None else read_model_config(path)
    shape = options.shape if config is None else config.kv_shape(options.dtype)
    assert shape is not None
    layout = _size_pool(options, shape)
    backend = _open_backend(options, layout, on_compile, say)
    model = None if path is None else load_model(path, backend)
    if isinstance(backend, CpuBackend):
        backend.warm_up()
    say(_describe_pool(layout, options))
    cache = CacheManager(
        CacheConfig(
            num_blocks=layout.num_blocks,
            block_size=layout.block_size,
            num_layers=shape.num_layers,
            max_sequence_tokens=_sequence_limit(options, config),
        )
    )
    return Service(options, layout, backend, model, cache)


def _resolve_model(model: str, say: Callable[[str], None]) -> Path:
    if model == "smollm2":
        return fetch_smollm2(say)
    path = Path(model)
    if not path.exists():
        raise InvalidArgument(f'is neither "smollm2" nor an existing file or directory: {model!r}', field="model")
    return path


def _sequence_limit(options: ServeOptions, config: ModelConfig | None) -> int | None:
    limits = [options.max_model_len, None if config is None else config.context_length]
    return min((limit for limit in limits if limit is not None), default=None)


def _size_pool(options: ServeOptions, shape: KvShape) -> KvLayout:
    """Return the layout of a pool of --blocks, or of as many blocks as fit --memory."""
    one_block = KvLayout(shape, 1, options.block_size)
    if options.blocks is not None:
        return KvLayout(shape, options.blocks, options.block_size)
    pool_bytes = parse_memory(options.memory, available_memory() or 0)
    num_blocks = pool_bytes // one_block.block_bytes
    if num_blocks < 1:
        raise InvalidArgument(
            f"{pool_bytes} bytes do not hold one block of {one_block.block_bytes} bytes; raise --memory",
            field="memory",
            value=options.memory,
            limit=one_block.block_bytes,
        )
    return KvLayout(shape, num_blocks, options.block_size)


def _open_backend(
    options: ServeOptions, layout: KvLayout, on_compile: OnProgress | None, say: Callable[[str], None]
) -> Backend:
    """Open the backend asked for; "auto" takes a GPU where there is one. Says which it is and why."""
    reason = "as asked"
    if options.backend != "cpu":
        try:
            backend = open_cuda_backend(layout)
        except DeviceError as error:
            if options.backend == "cuda":
                raise
            reason = f"no GPU: {error.message}"
        else:
            say("[bold]backend[/]  cuda")
            return backend
    cpu = CpuBackend(layout, num_threads=options.threads, on_compile=on_compile)
    say(f"[bold]backend[/]  cpu, {cpu.isa}, {cpu.num_threads} threads ({reason})")
    return cpu


def _engine_config(options: ServeOptions) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=options.max_num_seqs,
        max_batch_tokens=options.max_batch_tokens,
        max_model_len=options.max_model_len,
    )


def _describe_pool(layout: KvLayout, options: ServeOptions) -> str:
    gib, kib = 2**30, 2**10
    return (
        f"[bold]pool[/]     {layout.num_blocks} blocks of {layout.block_size} tokens "
        f"({layout.block_bytes / kib:.0f} KiB each, {layout.shape.dtype}), "
        f"{layout.num_blocks * layout.block_size} tokens, {layout.pool_bytes / gib:.2f} GiB"
    )
